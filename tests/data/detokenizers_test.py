"""Clean-up rules of the zero-shot corpora, one published spelling each."""

import pytest

from aodiff.data.detokenizers import DETOKENIZERS

CASES = [
    ("none", " as it is ", " as it is "),
    ("wikitext", " = = Game play = = \n", " == Game play ==\n"),
    ("wikitext", "= = = Plot = = =", "=== Plot ==="),
    ("wikitext", "role @-@ playing , 1 @,@ 000 @.@ 5", "role-playing, 1,000.5"),
    ("wikitext", '( a ) [ b ] { c } " d "', '(a) [b] {c} "d"'),
    ("wikitext", "the series 's players ' end ; so : it", "the series's players' end; so: it"),
    ("wikitext", "20 \u00b0 C N men", "20\u00b0C 1 men"),
    ("ptb", "it 's the firms ' own do n't", "it's the firms' own don't"),
    ("ptb", "$ N N N # N <unk> 1\\/2", "$1 1 1 #1 ? 1/2"),
    ("lm1b", "see http : / / x . com", "see http://x . com"),
    ("lm1b", 'he \'s here , now ; " yes " ( no ) .', 'he\'s here, now; "yes" (no) .'),
    ("lm1b", "it ended .", "it ended."),
    ("lm1b", "really ? $ 5 and / or [ a ] !", "really? $5 and/or [a]!"),
    ("lambada", " \u201chi\u201d said he \n", '\n"hi" said he'),
]


@pytest.mark.parametrize(("name", "before", "after"), CASES)
def test_rules(name, before, after):
    assert DETOKENIZERS[name](before) == after


def test_every_detokenizer_is_tested():
    assert {name for name, _, _ in CASES} == set(DETOKENIZERS)

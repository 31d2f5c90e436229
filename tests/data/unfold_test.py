"""Questions whose answers differ in length: every row worked out by hand."""

import itertools

import numpy as np
import pytest

from aodiff.config import base
from aodiff.data import DataError, describe, open_splits


def config(**values):
    c = base().data
    c.update({"name": "unfold", "seq_len": 48, "eval_rows": 500} | values)
    return c


def answer(question: str, most: int = 1000) -> str:
    """The answer to "3817=" by the rule, at most so many digits."""
    digits = [int(d) for d in question[:4]]
    while len(digits) < 4 + most and (len(digits) == 4 or digits[-1]):
        digits.append((digits[-4] + digits[-1] // 2) % 10)
    return "".join(map(str, digits[4:]))


def test_answers_by_hand():
    assert answer("3817=").startswith("61179")  # 3 + 3, 8 + 3, 1 + 0, 7 + 0, 6 + 3
    assert answer("0231=") == answer("7256=") == "0"  # 0 + 0, 7 + 3


def test_rows_are_questions_with_their_answers():
    c = config()
    info, source = describe(c), open_splits(c)["validation"]
    fields = source.read(np.arange(500))
    assert (fields["prompt_len"] == 5).all()
    found = set()
    for row in fields["tokens"]:
        text = info.text(row)
        assert text[4] == "=" and text[5:] == answer(text)
        assert (row[len(text) :] == info.tokenizer.eos).all() and row[-1] == info.tokenizer.eos
        found.add(len(text) - 5)
    assert min(found) == 1 and max(found) > 38


def test_every_question_with_an_answer_that_fits_is_in_one_split():
    c = config(seq_len=12, eval_rows=100)
    parts, text = open_splits(c), describe(c).text
    shown = [text(row)[:4] for p in parts.values() for row in p.read(np.arange(len(p)))["tokens"]]
    assert [len(p) for p in parts.values()][:2] == [100, 100] and len(set(shown)) == len(shown)
    asked = map("".join, itertools.product("0123456789", repeat=4))
    assert set(shown) == {q for q in asked if answer(q, 6).endswith("0")}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"seq_len": 6}, "data.seq_len is 6; rows of unfold have at least 7 symbols"),
        ({"eval_rows": 5000}, "data.eval_rows is 5000; of the 9862 questions 1 to 2465 can"),
        ({"eval_rows": 0}, "data.eval_rows is 0"),
    ],
)
def test_sizes_that_do_not_fit(values, words):
    with pytest.raises(DataError, match=words):
        describe(config(**values))

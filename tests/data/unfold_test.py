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
    """The answer to "cpm=" by the rule, at most so many letters."""
    letters = list(question[:3])
    while len(letters) < 3 + most and (len(letters) == 3 or letters[-1] != "a"):
        place = ord(letters[-3]) - ord("a") + (3 if letters[-1] in "klmnopqrst" else 0)
        letters.append(chr(ord("a") + place % 20))
    return "".join(letters[3:])


def test_answers_by_hand():
    assert answer("cpm=").startswith("fpp")  # c + 3 after m, p after f, m + 3 after p
    assert answer("abc=") == answer("rbt=") == "a"  # a + 0 after c, r + 3 after t


def test_rows_are_questions_with_their_answers():
    c = config()
    info, source = describe(c), open_splits(c)["validation"]
    fields = source.read(np.arange(500))
    assert (fields["prompt_len"] == 4).all()
    found = set()
    for row, length in zip(fields["tokens"], fields["length"].astype(int), strict=True):
        text = info.text(row)
        assert text[3] == "=" and text[4:] == answer(text)
        assert (row[len(text) :] == info.tokenizer.eos).all() and row[-1] == info.tokenizer.eos
        assert len(text) < length <= 48  # an end symbol is always shown
        found.add(len(text) - 4)
    assert found == set(range(1, 44))


def test_every_question_with_an_answer_that_fits_is_in_one_split():
    c = config(seq_len=12, eval_rows=100)
    parts, text = open_splits(c), describe(c).text
    shown = [text(row)[:3] for p in parts.values() for row in p.read(np.arange(len(p)))["tokens"]]
    assert [len(p) for p in parts.values()][:2] == [100, 100] and len(set(shown)) == len(shown)
    asked = map("".join, itertools.product("abcdefghijklmnopqrst", repeat=3))
    assert set(shown) == {q for q in asked if answer(q, 7).endswith("a")}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"seq_len": 5}, "data.seq_len is 5; rows of unfold have at least 6 symbols"),
        ({"eval_rows": 5000}, "data.eval_rows is 5000; of the 6... questions 1 to 15.. can"),
        ({"eval_rows": 0}, "data.eval_rows is 0"),
    ],
)
def test_sizes_that_do_not_fit(values, words):
    with pytest.raises(DataError, match=words):
        describe(config(**values))

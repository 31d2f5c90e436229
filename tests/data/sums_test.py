"""Questions whose answers differ in length: every row worked out by hand."""

import numpy as np
import pytest

from aodiff.config import base
from aodiff.data import DataError, describe, open_splits


def config(**values):
    c = base().data
    c.update({"name": "sums", "seq_len": 64, "eval_rows": 500} | values)
    return c


def answer(question: str) -> str:
    """The answer to "38l=" by adding digits."""
    digits = [int(question[0]), int(question[1])]
    letter = question[2]
    number = ord(letter) - ord("a") + 1 if letter.islower() else ord(letter) - ord("A") + 27
    while len(digits) < number + 2:
        digits.append((digits[-1] + digits[-2]) % 10)
    return "".join(map(str, digits[2:]))


def test_rows_are_questions_with_their_answers():
    c = config()
    info, source = describe(c), open_splits(c)["validation"]
    fields = source.read(np.arange(500))
    assert (fields["prompt_len"] == 4).all()
    lengths = set()
    for row in fields["tokens"]:
        text = info.text(row)
        assert text[3] == "=" and text[4:] == answer(text)
        assert (row[len(text) :] == info.tokenizer.eos).all() and row[-1] == info.tokenizer.eos
        lengths.add(len(text) - 4)
    assert lengths == set(range(1, 53))


def test_every_question_is_in_one_split():
    parts = [open_splits(config())[k] for k in ("validation", "test", "train")]
    assert [len(p) for p in parts] == [500, 500, 4200]
    questions = [tuple(q) for p in parts for q in p.read(np.arange(len(p)))["tokens"][:, :4]]
    assert len(set(questions)) == 5200


def test_short_rows_have_short_answers():
    c = config(seq_len=8, eval_rows=10)
    source = open_splits(c)["train"]
    rows = source.read(np.arange(len(source)))["tokens"]
    assert len(rows) == 280 and (rows[:, -1] == describe(c).tokenizer.eos).all()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"seq_len": 5}, "data.seq_len is 5; rows of sums have at least 6 symbols"),
        ({"eval_rows": 1301}, "data.eval_rows is 1301; of 5200 questions 1 to 1300"),
    ],
)
def test_sizes_that_do_not_fit(values, words):
    with pytest.raises(DataError, match=words):
        describe(config(**values))

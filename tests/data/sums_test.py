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
    """The answer to "3817e=" by the rule."""
    digits = [int(d) for d in question[:4]]
    letter = question[4]
    number = ord(letter) - ord("a") + 1 if letter.islower() else ord(letter) - ord("A") + 27
    while len(digits) < number + 4:
        more = 3 if digits[-1] >= 5 else 0
        digits.append((digits[-4] + more) % 10)
    return "".join(map(str, digits[4:]))


def test_an_answer_by_hand():
    assert answer("3817e=") == "61179"  # 3 + 3, 8 + 3, 1, 7, 6 + 3


def test_rows_are_questions_with_their_answers():
    c = config()
    info, source = describe(c), open_splits(c)["validation"]
    fields = source.read(np.arange(500))
    assert (fields["prompt_len"] == 6).all()
    lengths = set()
    for row in fields["tokens"]:
        text = info.text(row)
        assert text[5] == "=" and text[6:] == answer(text)
        assert (row[len(text) :] == info.tokenizer.eos).all() and row[-1] == info.tokenizer.eos
        lengths.add(len(text) - 6)
    assert lengths == set(range(1, 53))


def test_no_question_is_in_two_splits():
    parts = open_splits(config(seq_len=9, eval_rows=1000))
    assert {k: len(p) for k, p in parts.items()} == {
        "validation": 1000,
        "test": 1000,
        "train": 18_000,  # of one or two digits
    }
    questions = np.concatenate([p.read(np.arange(len(p)))["tokens"][:, :6] for p in parts.values()])
    assert len(np.unique(questions, axis=0)) == 20_000


def test_fewer_training_rows_leave_the_rest_alone():
    few, many = open_splits(config(train_rows=100)), open_splits(config())
    assert len(few["train"]) == 100
    rows = np.arange(100)
    for split in few:
        same = [x[split].read(rows)["tokens"] for x in (few, many)]
        np.testing.assert_array_equal(*same)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"seq_len": 7}, "data.seq_len is 7; rows of sums have at least 8 symbols"),
        ({"eval_rows": 130_001}, "data.eval_rows is 130001; of the 520000 questions 1 to 130000"),
        ({"eval_rows": 0}, "data.eval_rows is 0"),
    ],
)
def test_sizes_that_do_not_fit(values, words):
    with pytest.raises(DataError, match=words):
        describe(config(**values))

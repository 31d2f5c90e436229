"""Questions whose answers differ in length: every row worked out by hand."""

import itertools

import numpy as np
import pytest

from aodiff.config import base
from aodiff.data import DataError, describe, open_splits


def config(**values):
    c = base().data
    c.update({"name": "sums", "seq_len": 64, "eval_rows": 500} | values)
    return c


def answer(question: str) -> str:
    """The answer to "3817=" by the rule."""
    digits = [int(d) for d in question[:4]]
    while len(digits) == 4 or digits[-1] != 0 or digits[-2] % 2:
        digits.append((digits[-4] + (3 if digits[-1] >= 5 else 0)) % 10)
    return "".join(map(str, digits[4:]))


def test_an_answer_by_hand():
    assert answer("3817=").startswith("61179")  # 3 + 3, 8 + 3, 1, 7, 6 + 3
    assert answer("0234=") == answer("7258=") == "0"  # 0 after 4, 7 + 3 after 8


def test_rows_are_questions_with_their_answers():
    c = config()
    info, source = describe(c), open_splits(c)["validation"]
    fields = source.read(np.arange(500))
    assert (fields["prompt_len"] == 5).all()
    found = set()
    for row, length in zip(fields["tokens"], fields["length"].astype(int), strict=True):
        text = info.text(row)
        assert text[4] == "=" and text[5:] == answer(text)
        assert (row[len(text) :] == info.tokenizer.eos).all() and row[-1] == info.tokenizer.eos
        assert len(text) < length <= 64  # an end symbol is always shown
        found.add(len(text) - 5)
    assert min(found) == 1 and max(found) > 50


def test_every_question_with_an_answer_that_fits_is_in_one_split():
    parts = open_splits(config(seq_len=12, eval_rows=100)).values()
    questions = [tuple(q) for p in parts for q in p.read(np.arange(len(p)))["tokens"][:, :4]]
    assert [len(p) for p in parts][:2] == [100, 100] and len(set(questions)) == len(questions)
    fits = {q for q in itertools.product(range(10), repeat=4) if short("".join(map(str, q)), 6)}
    assert set(questions) == fits


def short(question: str, most: int) -> bool:
    """Whether the rule ends the answer within `most` digits."""
    digits = [int(d) for d in question]
    for _ in range(most):
        digits.append((digits[-4] + (3 if digits[-1] >= 5 else 0)) % 10)
        if digits[-1] == 0 and digits[-2] % 2 == 0:
            return True
    return False


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"seq_len": 6}, "data.seq_len is 6; rows of sums have at least 7 symbols"),
        ({"eval_rows": 5000}, "data.eval_rows is 5000; of the 90.. questions 1 to 22.. can"),
        ({"eval_rows": 0}, "data.eval_rows is 0"),
    ],
)
def test_sizes_that_do_not_fit(values, words):
    with pytest.raises(DataError, match=words):
        describe(config(**values))

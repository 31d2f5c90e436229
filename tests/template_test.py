"""Templates of rows that grow, read from JSON lines."""

import json

import numpy as np
import pytest

from aodiff import given_rows
from aodiff.data import DataError, DataInfo
from aodiff.data.tokenizers import make_tokenizer

INFO = DataInfo("text", 12, 257, "byte", tokenizer=make_tokenizer("byte"))
MASK = 257


def test_texts_ids_masks_and_holes():
    ids, given = given_rows.template(["ab", None, 99, {"masks": 2}, None, "z"], INFO, MASK)
    assert given.tolist() == [True] * 2 + [False] * 5 + [True] * 3 + [False, True]
    assert ids[given].tolist() == [97, 98, 99, MASK, MASK, 122]
    ids, given = given_rows.template([None, None, "ab", "", "c"], INFO, MASK)
    assert given.tolist() == [False] * 9 + [True] * 3  # holes side by side are one
    assert given_rows.template([None], INFO, MASK)[1].sum() == 0


@pytest.mark.parametrize(
    "row, words",
    [
        ({"prefix": "a"}, "is no template"),
        (["ab"], "no hole"),
        (["a" * 12, None], "12 tokens and 1 holes, and a row holds 12"),
        ([257, None], "id of 0 to 256"),  # a mask id in a prompt
        ([{"masks": 0}, None], "no part of a template"),
        ([True, None], "no part of a template"),
        ([1.5, None], "no part of a template"),
    ],
)
def test_bad_templates_are_one_sentence_with_the_line(row, words, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(["a", None]) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(DataError, match=words) as error:
        given_rows.read(path, INFO, MASK)
    assert "line 2" in str(error.value) and "\n" not in str(error.value)


def test_rows_of_one_length_are_as_they_were(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps([1] * 11 + [None]))
    rows = given_rows.read(path, INFO)
    np.testing.assert_array_equal(rows.given, [[True] * 11 + [False]])

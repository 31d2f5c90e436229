"""Templates of rows that grow, read from JSON lines."""

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aodiff import given_rows, partitioning
from aodiff.config import base
from aodiff.data import DataError, DataInfo
from aodiff.data.tokenizers import make_tokenizer
from aodiff.generate import draw_rows
from aodiff.sampling.samples import Samples

INFO = DataInfo("text", 12, 257, "byte", tokenizer=make_tokenizer("byte"))
MASK = 257


def test_texts_ids_masks_and_holes():
    ids, given, bounds = given_rows.template(["ab", None, 99, {"masks": 2}, None, "z"], INFO, MASK)
    assert given.tolist() == [True] * 2 + [False] * 5 + [True] * 3 + [False, True]
    assert ids[given].tolist() == [97, 98, 99, MASK, MASK, 122]
    assert bounds.tolist() == [[0, 0]] * 2 + [[0, 12]] * 5 + [[0, 0]] * 3 + [[0, 12], [0, 0]]
    ids, given, bounds = given_rows.template([None, "", None, "ab", "", "c"], INFO, MASK)
    assert given.tolist() == [False] * 9 + [True] * 3  # holes side by side are one
    assert bounds[0].tolist() == [0, 12]
    assert given_rows.template([None], INFO, MASK)[1].sum() == 0


def test_holes_say_how_long_they_may_be(tmp_path):
    row = [{"hole": [2, 4]}, "ab", {"hole": [None, 3]}, {"hole": [1, 2]}, 99, {"hole": [1, None]}]
    _, given, bounds = given_rows.template(row, INFO, MASK)
    assert given.tolist() == [False] * 7 + [True] * 2 + [False, True, False]
    assert bounds.tolist() == [[2, 4]] * 7 + [[0, 0]] * 2 + [[1, 5], [0, 0], [1, 12]]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, (["a", None], row))))
    assert given_rows.read(path, INFO, MASK).bounds[1].tolist() == bounds.tolist()
    path.write_text(json.dumps(["a", None]))
    assert given_rows.read(path, INFO, MASK).bounds is None


def test_bounds_reach_the_sampler_row_by_row():
    """Whatever `sample.batch`: here of a sampler that writes them down."""
    echo = lambda params, extra, keys, tokens, given, bounds: Samples(
        bounds[..., 0], jnp.sum(given, axis=1), bounds[..., 1]
    )
    method = types.SimpleNamespace(sampler=lambda config, max_given: echo)
    config = base("flexmdm")
    config.sample.batch = 2
    rows = [["ab", {"hole": [i, 5 + i]}] for i in range(3)]
    ids, given, bounds = (
        np.stack(x) for x in zip(*(given_rows.template(r, INFO, MASK) for r in rows), strict=True)
    )
    mesh = partitioning.make_mesh(1, -1, 1, jax.devices()[:1])
    out = draw_rows(method, {}, {}, INFO, config, mesh, ids, given, bounds)
    np.testing.assert_array_equal(np.stack([out.tokens, out.step], axis=-1), bounds)


@pytest.mark.parametrize(
    "row, words",
    [
        ({"prefix": "a"}, "is no template"),
        (["ab"], "no hole"),
        (["a" * 12, None], "12 tokens and 1 holes of at least 0 in all, and a row holds 12"),
        (["a" * 8, {"hole": [3, 9]}, "b", None, {"hole": [1, 1]}], "9 tokens and 2 holes of at le"),
        ([MASK, None], "257 is the id of a mask"),  # a mask id in a prompt
        ([258, None], "id of 0 to 256"),
        ([{"hole": [3, 2]}], "no bounds of a hole; use .least, most."),
        ([{"hole": [0, 0]}], "no bounds of a hole"),
        ([{"hole": [-1, None]}], "no bounds of a hole"),
        ([{"hole": [1.5, None]}], "no bounds of a hole"),
        ([{"hole": 3}], "no bounds of a hole"),
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

import collections

import numpy as np
import pytest

from aodiff import data
from aodiff.config import base
from aodiff.data import brackets


def config(name="brackets", **changes):
    c = base().data
    c.update(dict(name=name, seq_len=16, lengths=(2, 4, 8, 16), eval_rows=4000) | changes)
    return c


def rows(c, split="validation"):
    source = data.open_splits(c)[split]
    return source.read(np.arange(len(source)))


def test_strings_are_balanced_and_uniform_among_those_of_their_length():
    found = rows(config())
    strings = [tuple(x[:n]) for x, n in zip(found["tokens"], found["length"], strict=True)]
    assert all(brackets.balanced(np.array(s)) for s in strings)
    assert not found["tokens"][np.arange(16) >= found["length"][:, None]].any()
    share = np.bincount(found["length"], minlength=17) / 4000
    np.testing.assert_allclose(share[[2, 4, 8, 16]], brackets.SHARES, atol=0.03)
    for n, catalan in ((4, 2), (8, 14)):
        counts = collections.Counter(s for s in strings if len(s) == n)
        assert len(counts) == catalan
        expected = sum(counts.values()) / catalan
        assert max(abs(c - expected) for c in counts.values()) < 4 * expected**0.5


def test_balance():
    for text, good in (("", 1), ("()", 1), ("(())()", 1), (")(", 0), ("((", 0), ("())(", 0)):
        assert brackets.balanced(np.array(["()".index(c) for c in text], int)) == bool(good)


def test_entropy_is_that_of_the_law():
    """flexmdm.md 17.1: 3.2530 nats a string, 6.6 brackets a string."""
    info = data.describe(config())
    assert abs(info.entropy * 6.6 - 3.2530) < 1e-3
    assert info.vocab_size == 2 and info.text(np.array([0, 1])) == "()"
    canvas = data.describe(config("brackets_canvas"))
    assert abs(canvas.entropy * 16 - 3.2530) < 1e-3 and canvas.vocab_size == 3


def test_a_canvas_holds_the_same_strings_and_ends():
    plain, canvas = rows(config()), rows(config("brackets_canvas"))
    end = np.arange(16) >= plain["length"][:, None]
    np.testing.assert_array_equal(canvas["tokens"], np.where(end, 2, plain["tokens"]))
    assert set(canvas) == {"tokens"}


def test_splits_do_not_share_rows_and_lengths_follow_the_row():
    c = config(lengths=(), seq_len=64)
    a, b = (rows(c, s)["tokens"] for s in ("validation", "test"))
    assert not np.array_equal(a, b)
    assert set(np.unique(rows(c)["length"])) == {4, 16, 32, 64}


@pytest.mark.parametrize("lengths", [(1, 2, 4, 8), (2, 4, 8), (2, 4, 8, 18), (2, 2, 4, 8)])
def test_bad_lengths_are_refused(lengths):
    with pytest.raises(data.DataError, match="four different even lengths"):
        data.describe(config(lengths=lengths))
    with pytest.raises(data.DataError, match="four different"):
        data.describe(config(lengths=(), seq_len=24))


def test_strings_with_holes_are_those_without():
    whole, holes = rows(config()), rows(config("brackets_infill"))
    canvas = rows(config("brackets_infill_canvas"))
    for name in ("tokens", "length"):
        np.testing.assert_array_equal(whole[name], holes[name])
    live = np.arange(16) < whole["length"][:, None]
    assert np.all((~holes["given"]).sum(1) > 0) and np.all(holes["given"][~live])
    np.testing.assert_array_equal(canvas["given"], holes["given"])
    np.testing.assert_array_equal(canvas["tokens"] == brackets.END, ~live)

"""Fifty random interval masks: backends, tiles and merging against what each query may see."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pallas_kernels as pk
from pallas_kernels.blocks import active_tiles, hull, padded_vectors, round_up
from pallas_kernels.masks import NEVER_SEEN, SEES_NOTHING
from pallas_kernels.merge import merge_attention
from pallas_kernels.reference import DEAD
from tests.pallas_kernels.cases import BACKENDS, BATCH, attend, tiled

# A compiled program per shape; masks are its data. The columns: rows, keys, streams, heads, key
# heads, with a lower bound, bq, bk, and which form of the kernel.
SHAPES = [
    (200, 200, 2, 4, 2, False, 128, 128, "kernel"),
    (130, 384, 1, 2, 2, True, 128, 256, "piped"),
    (384, 70, 1, 4, 1, False, 256, 128, "piped"),
    (257, 300, 2, 2, 1, True, 128, 128, "kernel"),
    (40, 33, 2, 2, 1, True, 128, 128, "piped"),
]
EXAMPLES = 50 // len(SHAPES)
DIM = 64
XLA = ("dense", "blocked")


@st.composite
def masks(draw, rows, keys, streams, bounded):
    """code, hi, lo of an interval mask: numpy int32."""
    seed = draw(st.integers(0, 2**32 - 1))
    codes = draw(st.sampled_from([1, 3, 20, 400]))  # few: many ties
    by_code = draw(st.booleans())  # keys in the order of their codes, so that tiles are skipped
    by_hi = draw(st.booleans())
    unused_keys, dead_rows = (draw(st.sampled_from([0.0, 0.2, 0.9])) for _ in range(2))
    empty = draw(st.booleans())  # one example of the batch sees nothing
    rng = np.random.default_rng(seed)
    code = rng.integers(0, codes, (BATCH, keys))
    hi = rng.integers(-1, codes, (BATCH, streams, rows))
    lo = rng.integers(0, codes, (BATCH, rows)) - rng.integers(0, codes)
    if by_code:
        code.sort(axis=-1)
    if by_hi:
        hi.sort(axis=-1)
        lo.sort(axis=-1)
    code[rng.random(code.shape) < unused_keys] = NEVER_SEEN
    hi[rng.random(hi.shape) < dead_rows] = SEES_NOTHING
    if empty:
        hi[0] = SEES_NOTHING
    code, hi, lo = (x.astype(np.int32) for x in (code, hi, lo))
    return code, hi, lo if bounded else None


def sees(code, hi, lo):
    """(B, S, L, Lk) bool, from the definition."""
    code = code[:, None, None, :]
    seen = code <= hi[..., None]
    return seen if lo is None else seen & (lo[:, None, :, None] <= code)


@functools.cache
def inputs(rows, keys, streams, heads, kv_heads):
    rng = np.random.default_rng(7)
    by_row = (BATCH, heads, streams, rows)
    shapes = [(*by_row, DIM), *[(BATCH, kv_heads, keys, DIM)] * 2, (*by_row, DIM), by_row]
    return [jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes]


def tiles_are_exact_where_they_can_be(code, hi, lo, seen, bq, bk):
    """An inactive tile has no visible pair; a mask without lower bound has a pair in each other."""
    rows, keys = round_up(hi.shape[-1], bq), round_up(code.shape[-1], bk)
    vectors = padded_vectors(pk.IntervalMask(code, hi, lo), rows, keys)
    active = np.asarray(active_tiles(*map(optional, vectors), bq, bk))
    padded = np.zeros((BATCH, hi.shape[1], rows, keys), bool)
    padded[:, :, : seen.shape[2], : seen.shape[3]] = seen
    any_pair = padded.reshape(BATCH, -1, rows // bq, bq, keys // bk, bk).any((1, 3, 5))
    assert not (any_pair & ~active).any()
    if lo is None:
        # The row of the greatest hi sees the key of the least code.
        np.testing.assert_array_equal(active, any_pair)
    bounds = np.asarray(hull(active))
    for place in np.ndindex(active.shape[:-1]):
        found = np.flatnonzero(active[place])
        want = (found[0], found[-1] + 1) if len(found) else (0, 0)
        assert tuple(bounds[place]) == want


def optional(x):
    return None if x is None else jnp.asarray(x)


def parts_merge_to_the_whole(q, k, v, mask, seen, want, seed):
    """Keys dealt at random to two hands, attended to apart."""
    mine = np.random.default_rng(seed).random(mask.code.shape) < 0.5
    hands = [
        pk.IntervalMask(jnp.where(hand, mask.code, NEVER_SEEN), mask.hi, mask.lo)
        for hand in (mine, ~mine)
    ]
    out, lse = merge_attention(*(dense(q, k, v, hand) for hand in hands))
    alive = np.broadcast_to(seen.any(-1)[:, None], lse.shape)
    np.testing.assert_allclose(out, want[0], rtol=0, atol=3e-5)
    np.testing.assert_allclose(lse[alive], want[1][alive], rtol=0, atol=3e-5)
    assert (np.asarray(lse)[~alive] == np.float32(DEAD)).all()


@jax.jit
def dense(q, k, v, mask):
    return pk.interval_attention(q, k, v, mask, return_lse=True, impl="xla_dense")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_random_interval_masks(shape):
    rows, keys, streams, heads, kv_heads, bounded, bq, bk, form = shape
    x = inputs(rows, keys, streams, heads, kv_heads)

    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None)
    @given(masks(rows, keys, streams, bounded), st.integers(0, 1000))
    def check(vectors, seed):
        seen = sees(*vectors)
        mask = pk.IntervalMask(*map(optional, vectors))
        np.testing.assert_array_equal(pk.visible(mask), seen)
        tiles_are_exact_where_they_can_be(*vectors, seen, bq, bk)
        dead, never = ~seen.any(-1), ~seen.any((1, 2))
        with jax.default_matmul_precision("highest"):
            want = [np.asarray(a) for a in attend(*x, mask, impl="reference")]
            parts_merge_to_the_whole(*x[:3], mask, seen, want, seed)
            for name in (*XLA, form):
                impl, changes = BACKENDS[name]
                config = None
                if changes is not None:
                    config = tiled(streams, rows, keys, bq, bk, changes)
                got = [np.asarray(a) for a in attend(*x, mask, impl=impl, config=config)]
                for what, g, w in zip(("o", "lse", "dq", "dk", "dv"), got, want, strict=True):
                    atol = 4e-5 if what.startswith("d") else 3e-5
                    np.testing.assert_allclose(
                        g, w, rtol=1e-6, atol=atol, err_msg=f"{name}, {what}"
                    )
                for a in (got[0], got[2]):
                    assert (np.moveaxis(a, 1, -1)[dead] == 0).all(), name
                for a in got[3:]:
                    assert (np.moveaxis(a, 1, 2)[never] == 0).all(), name

    check()

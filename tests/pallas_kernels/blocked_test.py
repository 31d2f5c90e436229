"""The blocked backend: ragged tiles, tiles that are not computed, memory, sharding."""

import collections
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pallas_kernels as pk
from pallas_kernels import blocked
from pallas_kernels.masks import segment_mask

B, H, D, BQ, BK = 2, 4, 8, 16, 8


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """16 rows of two streams and one head by 8 keys."""
    monkeypatch.setattr(blocked, "ROWS", 2 * BQ)
    monkeypatch.setattr(blocked, "KEYS", BK)


def inputs(streams=2, rows=50, keys=50, kv_heads=H, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    q = rng.normal(size=(B, H, streams, rows, D))
    k, v = rng.normal(size=(2, B, kv_heads, keys, D))
    return tuple(jnp.asarray(x, dtype) for x in (q, k, v))


def ranks(size):
    return jnp.stack([np.random.default_rng(b).permutation(size) for b in range(B)]).astype("int32")


def with_gradients(q, k, v, mask, impl):
    """o, lse, dq, dk, dv for cotangents that do not depend on `impl`."""
    attend = functools.partial(pk.interval_attention, impl=impl)
    if impl == "reference":
        attend = pk.attention_reference

    @jax.jit
    def run(q, k, v, mask):
        results, pull = jax.vjp(lambda *x: attend(*x, mask, return_lse=True), q, k, v)
        rng = np.random.default_rng(1)
        return *results, *pull(
            tuple(jnp.asarray(rng.normal(size=r.shape), r.dtype) for r in results)
        )

    return [np.asarray(x.astype(jnp.float32)) for x in run(q, k, v, mask)]


MASKS = {
    "causal": (pk.causal_streams(50), {}),
    "one_stream": (pk.causal_streams(50, (True,)), {"streams": 1}),
    "three_streams": (pk.causal_streams(50, (True, False, True)), {"streams": 3, "kv_heads": 2}),
    "rank": (pk.rank_streams(ranks(50), key_rank=ranks(77) // 2), {"keys": 77, "kv_heads": 1}),
    "few_rows": (pk.rank_streams(ranks(3), key_rank=ranks(40)), {"rows": 3, "keys": 40}),
    "lengths": (pk.length_mask(jnp.array([29, 0]), 50, streams=2), {}),
    "lower_bound": (pk.IntervalMask(ranks(50), jnp.stack([ranks(50)] * 2, 1), ranks(50) - 9), {}),
    "segments": (segment_mask(jnp.arange(100).reshape(B, 50) // 13), {"streams": 1}),
}


@pytest.mark.parametrize("name", MASKS)
def test_equals_the_reference_on_ragged_tiles(name):
    mask, shape = MASKS[name]
    x = inputs(**shape)
    got, want = (with_gradients(*x, mask, impl) for impl in ("xla_blocked", "reference"))
    for what, g, w in zip(("o", "lse", "dq", "dk", "dv"), got, want, strict=True):
        np.testing.assert_allclose(g, w, atol=2e-5, err_msg=what)


def test_one_mask_serves_a_whole_batch():
    one = pk.length_mask(jnp.array([29]), 50, streams=2)
    many = pk.length_mask(jnp.array([29, 29]), 50, streams=2)
    for got, want in zip(
        *(with_gradients(*inputs(), m, "xla_blocked") for m in (one, many)), strict=True
    ):
        np.testing.assert_array_equal(got, want)


def test_bfloat16_is_rounded_once_at_the_end():
    mask = MASKS["causal"][0]
    q, k, v = inputs(dtype=jnp.bfloat16)
    single = [x.astype(jnp.float32) for x in (q, k, v)]
    (o, lse), (exact, exact_lse) = (
        blocked.forward(*x, mask, scale=0.3) for x in ((q, k, v), single)
    )
    assert o.dtype == jnp.bfloat16
    np.testing.assert_array_equal(o, exact.astype(jnp.bfloat16))
    np.testing.assert_array_equal(lse, exact_lse)
    vectors = [mask, jnp.where(lse > -1e30, lse / np.log(2), 0.0), lse * 0.0]
    for got, want in zip(
        blocked.backward(q, k, v, *vectors, q, scale=0.3),
        blocked.backward(*single, *vectors, single[0], scale=0.3),
        strict=True,
    ):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_array_equal(got, want.astype(jnp.bfloat16))


def tiles_computed(monkeypatch, mask, x):
    """How many tiles the forward and the backward pass work on: 2 and 5 products each."""
    products = collections.Counter()

    def counting(dtype):
        def dot(a, b):
            size = 2.0 * a.shape[0] * a.shape[1] * b.shape[1]
            jax.debug.callback(lambda: products.update([size]))
            return jnp.dot(a, b)

        return dot

    monkeypatch.setattr(blocked, "_dot", counting)
    counts = []
    for products_a_tile, run in (
        (2, lambda q, k, v: blocked.forward(q, k, v, mask, scale=1.0)),
        (5, lambda q, k, v: blocked.backward(q, k, v, mask, *[q[..., 0]] * 2, q, scale=1.0)),
    ):
        products.clear()
        jax.block_until_ready(jax.jit(run)(*x))
        jax.effects_barrier()
        counts.append(sum(products.values()) // products_a_tile)
        assert sum(products.values()) % products_a_tile == 0
    assert counts[0] == counts[1]
    return counts[0]


def test_causal_attention_computes_a_triangle_of_tiles(monkeypatch):
    # Blocks of 16 rows see 2, 4, 6 and 7 blocks of 8 keys.
    assert tiles_computed(monkeypatch, pk.causal_streams(50), inputs()) == B * H * (2 + 4 + 6 + 7)


def test_each_example_computes_its_own_tiles(monkeypatch):
    """Lengths 29 and 0: two blocks of rows see four blocks of keys, and nothing sees nothing."""
    assert tiles_computed(monkeypatch, MASKS["lengths"][0], inputs()) == H * 2 * 4


def test_segments_compute_a_band_of_tiles(monkeypatch):
    """Keys before the lower bound are skipped as those after the upper one are."""
    ids = jnp.arange(64)[None] // 16
    x = tuple(a[:1] for a in inputs(streams=1, rows=64, keys=64, kv_heads=2))  # 16 rows a block
    assert tiles_computed(monkeypatch, segment_mask(ids), x) == 2 * 4 * 2


def compiled(length, monkeypatch):
    monkeypatch.setattr(blocked, "ROWS", 64)
    monkeypatch.setattr(blocked, "KEYS", 32)
    mask = pk.causal_streams(length)
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)

    @jax.jit
    def both(q, k, v, do):
        out, pull = jax.vjp(lambda *x: pk.interval_attention(*x, mask, impl="xla_blocked"), q, k, v)
        return out, pull(do)

    q, k = shape(1, 1, 2, length, D), shape(1, 1, length, D)
    return both.lower(q, k, k, q).compile()


def test_memory_is_linear_in_the_length(monkeypatch):
    short, long = (compiled(n, monkeypatch) for n in (2048, 4096))
    bytes_of = lambda c: c.memory_analysis().temp_size_in_bytes
    assert bytes_of(long) <= 2.2 * bytes_of(short)
    sizes = [
        math.prod(int(n) for n in dims.split(","))
        for dims in re.findall(r"\b(?:f32|s32|pred)\[([0-9,]+)\]", long.as_text())
    ]
    assert max(sizes) == 2 * 4096 * D  # q itself; 64 times smaller than scores


def test_works_on_shards():
    mesh = jax.make_mesh(
        (2, 2),
        ("data", "tensor"),
        devices=jax.devices()[:4],
        axis_types=(jax.sharding.AxisType.Auto,) * 2,
    )
    mask, shape = MASKS["rank"][0], {"keys": 77, "kv_heads": 2}
    x = inputs(**shape)
    heads = P("data", "tensor")

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(heads, heads, heads, P("data")),
        out_specs=heads,
        check_vma=False,
    )
    def sharded(q, k, v, mask):
        return pk.interval_attention(q, k, v, mask, impl="xla_blocked")

    grads = [
        jax.jit(jax.grad(lambda *x, f=f: jnp.sum(jnp.sin(f(*x, mask))), argnums=(0, 1, 2)))(*x)
        for f in (sharded, pk.attention_reference)
    ]
    for got, want in zip(*grads, strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)

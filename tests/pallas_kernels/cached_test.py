"""Attention over a cache against a loop over its slots, and the kernel simulated on a TPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.cached import cached_attention, fetched_block
from pallas_kernels.config import default_config

SLOTS = 300  # blocks of 128: the last one hangs over the end of the cache
LENGTHS = np.array([0, 1, 200, 256, 300], np.int32)
CONFIG = default_config(1, 16, SLOTS, generation="v5p", bk=128, interpret=True)


def inputs(queries, heads, kv_heads, dim=64, dtype=jnp.float32, lengths=LENGTHS):
    rng = np.random.default_rng(0)
    q = rng.normal(size=(len(lengths), queries, heads, dim))
    k, v = rng.normal(size=(2, len(lengths), kv_heads, SLOTS, dim))
    past = (np.arange(SLOTS) >= lengths[:, None])[:, None, :, None]
    k, v = (np.where(past, np.nan, x) for x in (k, v))
    return tuple(jnp.asarray(x, dtype) for x in (q, k, v))


def limits(queries, lengths=LENGTHS):
    """The last query sees all of its row, the one before it a slot less, and so on."""
    return np.maximum(lengths[:, None] - np.arange(queries)[::-1], 0).astype(np.int32)


def by_loop(q, k, v, limit, scale):
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros(q.shape)
    for b, t, h in np.ndindex(q.shape[:3]):
        n, g = limit[b, t], h * k.shape[1] // q.shape[2]
        if n:
            scores = scale * (k[b, g, :n] @ q[b, t, h])
            w = np.exp(scores - scores.max())
            out[b, t, h] = w / w.sum() @ v[b, g, :n]
    return out


@pytest.mark.parametrize("impl", ["pallas", "xla_dense"])
@pytest.mark.parametrize("queries, heads, kv_heads", [(1, 4, 4), (3, 4, 2), (3, 6, 1)])
def test_equals_the_loop(impl, queries, heads, kv_heads):
    q, k, v = inputs(queries, heads, kv_heads)
    limit = None if queries == 1 else limits(queries)
    call = functools.partial(cached_attention, impl=impl, config=CONFIG, scale=0.2)
    got = jax.jit(call)(q, k, v, LENGTHS, q_limit=limit)
    want = by_loop(q, k, v, limits(queries), 0.2)
    np.testing.assert_allclose(got, want, atol=3e-6)
    assert np.all(np.asarray(got)[0] == 0) and got.dtype == q.dtype


@pytest.mark.parametrize(
    "options", [{}, dict(impl="pallas", config=CONFIG)], ids=["auto", "pallas"]
)
def test_bfloat16(options):
    q, k, v = inputs(1, 2, 1, dim=128, dtype=jnp.bfloat16)
    want = by_loop(q, k, v, limits(1), 128**-0.5)
    got = jax.jit(functools.partial(cached_attention, **options))(q, k, v, LENGTHS)
    assert got.dtype == jnp.bfloat16
    error = np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)
    assert error < 2e-3


@pytest.mark.parametrize("dim, kernels", [(128, 1), (64, 0), (32, 0)])
def test_the_default_choice_goes_by_the_platform_compiled_for(dim, kernels):
    args = (*inputs(1, 2, 1, dim=dim), LENGTHS)
    lowered = jax.jit(cached_attention).trace(*args).lower(lowering_platforms=("tpu",))
    assert lowered.as_text().count("tpu_custom_call") == kernels


def test_a_limit_past_the_length_is_the_length():
    q, k, v = inputs(3, 2, 1)
    call = jax.jit(functools.partial(cached_attention, impl="xla_dense"))
    beyond = jnp.full((5, 3), SLOTS, jnp.int32)
    np.testing.assert_array_equal(call(q, k, v, LENGTHS, q_limit=beyond), call(q, k, v, LENGTHS))


def test_a_limit_below_zero_sees_nothing_and_fetches_nothing_before_the_cache():
    lengths = np.array([256], np.int32)
    q, k, v = inputs(1, 2, 1, lengths=lengths)
    config = default_config(1, 16, SLOTS, generation="v5p", bk=128, interpret="tpu")
    limit = jnp.full((1, 1), -1000, jnp.int32)
    try:
        got = cached_attention(q, k, v, lengths, q_limit=limit, impl="pallas", config=config)
        assert not np.asarray(got).any()
    finally:
        pltpu.reset_tpu_interpret_mode_state()


@pytest.mark.parametrize("queries", [1, 3])
def test_kernel_simulated_with_races_bounds_and_uninitialized_memory(queries):
    lengths = np.array([0, 130], np.int32)
    q, k, v = inputs(queries, 4, 2, lengths=lengths)
    config = default_config(1, 16, SLOTS, generation="v5p", bk=128, interpret="tpu")
    try:
        limit = limits(queries, lengths)
        call = functools.partial(cached_attention, impl="pallas", config=config, q_limit=limit)
        got = jax.jit(call)(q, k, v, lengths)
        np.testing.assert_allclose(got, by_loop(q, k, v, limit, 64**-0.5), atol=3e-6)
        from jax._src.pallas.mosaic.interpret import interpret_pallas_call

        assert not interpret_pallas_call.races.races_found
    finally:
        pltpu.reset_tpu_interpret_mode_state()


def test_blocks_past_the_length_are_not_fetched():
    """A step that asks for the block of the step before it fetches nothing."""
    blocks = lambda live: [int(fetched_block(jnp.int32(live), j, 128)) for j in range(4)]
    assert blocks(0) == blocks(1) == blocks(128) == [0, 0, 0, 0]
    assert blocks(129) == blocks(256) == [0, 1, 1, 1]
    assert blocks(500) == [0, 1, 2, 3]


def test_wrong_arguments_are_refused_in_one_sentence():
    q, k, v = inputs(1, 4, 2)
    for message, args, options in [
        ("'splash' is unknown; use one of: auto", (q, k, v, LENGTHS), dict(impl="splash")),
        ("one dtype", (q.astype(jnp.bfloat16), k, v, LENGTHS), {}),
        ("multiple of Hkv", (q[:, :, :3], k, v, LENGTHS), {}),
        ("same B and D", (q[..., :32], k, v, LENGTHS), {}),
        ("caches \\(B,Hkv,Smax,D\\)", (q, k, v[:, :, 1:], LENGTHS), {}),
        ("lengths \\(5,\\) int32", (q, k, v, LENGTHS[:3]), {}),
        ("q_limit \\(5, 1\\) int32", (q, k, v, LENGTHS), dict(q_limit=LENGTHS)),
        ("lie in \\[0, 300\\]", (q, k, v, LENGTHS + 1), {}),
        ("lie in \\[0, 300\\]", (q, k, v, LENGTHS - 1), {}),
        ("got 32", (*(x[..., :32] for x in (q, k, v)), LENGTHS), dict(impl="pallas")),
        ("float16", (*(x.astype(jnp.float16) for x in (q, k, v)), LENGTHS), dict(impl="pallas")),
    ]:
        with pytest.raises(ValueError, match=message) as error:
            cached_attention(*args, **options)
        assert "\n" not in str(error.value)
    checked = checkify.checkify(jax.jit(cached_attention))
    assert "lie in [0, 300]" in checked(q, k, v, LENGTHS + 1)[0].get()
    assert checked(q, k, v, LENGTHS)[0].get() is None

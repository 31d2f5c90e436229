"""The resident forward kernel against the dense reference, interpreted on the CPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import masks
from pallas_kernels.config import default_config
from pallas_kernels.forward import _plan, forward
from pallas_kernels.masks import NEVER_SEEN, IntervalMask
from pallas_kernels.reference import DEAD, attention_reference

LENGTH = 200
RNG = np.random.default_rng(0)
RANK = np.stack([RNG.permutation(LENGTH) for _ in range(2)]).astype(np.int32)
SEGMENTS = np.sort(RNG.integers(-1, 5, size=(2, LENGTH))).astype(np.int32)
MASKS = {
    "causal": masks.causal_streams(LENGTH),
    "rank": masks.rank_streams(jnp.asarray(RANK)),
    "groups": masks.rank_streams(jnp.asarray(RANK // 70 * 2), strict=(True, False)),
    "lengths": masks.length_mask(jnp.asarray([130, 0], jnp.int32), LENGTH),
    "segments": masks.segment_mask(jnp.asarray(SEGMENTS), rank=jnp.asarray(RANK), strict=(True,)),
}


def config(**changes):
    small = dict(bq=128, step=128, bk=128, rc=128, interpret=True)
    return default_config(2, LENGTH, LENGTH, generation="v5p", **small | changes)


def inputs(streams, length=LENGTH, heads=2, kv_heads=1, dim=64, dtype=jnp.float32):
    rng = np.random.default_rng(1)
    q = rng.normal(size=(2, heads, streams, length, dim))
    k, v = rng.normal(size=(2, 2, kv_heads, length, dim))
    return tuple(jnp.asarray(x, dtype) for x in (q, k, v))


def check(q, k, v, mask, config):
    scale = q.shape[-1] ** -0.5
    out, lse = jax.jit(lambda *x: forward(*x, mask, scale=scale, config=config))(q, k, v)
    want, want_lse = attention_reference(q, k, v, mask, return_lse=True)
    assert out.dtype == q.dtype
    out, want = np.asarray(out, np.float64), np.asarray(want, np.float64)
    if q.dtype == jnp.float32:
        np.testing.assert_allclose(out, want, atol=3e-5)
        np.testing.assert_allclose(lse, want_lse, atol=3e-5, rtol=1e-6)
    else:
        assert np.linalg.norm(out - want) < 2e-3 * np.linalg.norm(want)
        np.testing.assert_allclose(lse, want_lse, atol=1e-4, rtol=1e-6)
    dead = np.asarray(want_lse) == DEAD
    assert np.array_equal(np.asarray(lse)[dead], np.asarray(want_lse)[dead])
    assert not out[dead].any()


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_masks(name, fast):
    mask = MASKS[name]
    changes = dict(ahead=2, unroll=2, row_sum="mxu") if fast else {}
    check(*inputs(mask.streams), mask, config(**changes))


@pytest.mark.parametrize("name", ["causal", "rank"])
@pytest.mark.parametrize(
    "blocks", [dict(bq=128, bk=256), dict(bq=256, bk=128), dict(bq=384, bk=384, rc=256)]
)
def test_blocks(name, blocks):
    check(*inputs(2), MASKS[name], config(**blocks, step=blocks["bq"], unroll=2))


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2), (4, 1)])
def test_heads(heads, kv_heads):
    check(*inputs(2, heads=heads, kv_heads=kv_heads, dim=128), MASKS["causal"], config())


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", ["causal", "lengths"])
def test_bfloat16(dim, name):
    mask = MASKS[name]
    check(*inputs(mask.streams, dim=dim, dtype=jnp.bfloat16), mask, config())


@pytest.mark.parametrize("lengths", [(1, 128), (129, 200)])
def test_lengths(lengths):
    mask = masks.length_mask(jnp.asarray(lengths, jnp.int32), LENGTH)
    check(*inputs(1), mask, config(unroll=2))


def test_more_keys_than_rows_and_one_mask_for_all():
    q, k, v = inputs(1)
    code = np.where(np.arange(LENGTH) % 3 == 0, NEVER_SEEN, np.arange(LENGTH))[None]
    hi = np.arange(80)[None, None] * 2
    mask = IntervalMask(jnp.asarray(code, jnp.int32), jnp.asarray(hi, jnp.int32))
    check(q[..., :80, :], k, v, mask, config())


def test_what_no_row_sees_does_not_matter():
    q, k, v = inputs(2)
    mask = masks.rank_streams(jnp.asarray(np.arange(LENGTH, dtype=np.int32) // 64)[None])
    mask = dataclasses.replace(mask, hi=jnp.minimum(mask.hi, 1))  # keys from 128 on are not seen
    run = lambda k, v: forward(q, k, v, mask, scale=0.1, config=config())
    unseen = lambda x: x.at[:, :, 128:].set(jnp.nan)
    jax.tree.map(np.testing.assert_array_equal, run(unseen(k), unseen(v)), run(k, v))


@pytest.mark.parametrize("name", ["causal", "segments"])
def test_simulated_memories(name):
    mask = MASKS[name]
    try:
        check(*inputs(mask.streams, heads=1), mask, config(interpret="tpu", unroll=2))
    finally:
        pltpu.reset_tpu_interpret_mode_state()


LONG = 500
LONG_MASKS = {
    "causal": masks.causal_streams(LONG),
    "segments": masks.segment_mask(jnp.asarray(np.arange(2 * LONG).reshape(2, LONG) // 150 - 1)),
    "lengths": masks.length_mask(jnp.asarray([300, 0], jnp.int32), LONG),
}


@pytest.mark.parametrize("name", LONG_MASKS)
def test_windows(name):
    """VMEM for a part of the keys."""
    mask = LONG_MASKS[name]
    q, k, v = inputs(mask.streams, LONG)
    for changes in ({}, dict(ahead=2, unroll=2, row_sum="mxu")):
        small = config(
            vmem={"causal": 1700, "segments": 1200, "lengths": 1000}[name] << 10, **changes
        )
        call = jax.make_jaxpr(lambda *x, c=small: forward(*x, mask, scale=1.0, config=c))
        assert "fwdstream" in str(call(q, k, v))
        check(q, k, v, mask, small)


def test_vmem_too_small_for_a_step():
    q, k, v = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs(2))
    with pytest.raises(ValueError, match="128 rows and 128 keys a step needs .* of VMEM"):
        small = config(vmem=1 << 18)
        jax.eval_shape(lambda *x: forward(*x, MASKS["causal"], scale=1.0, config=small), q, k, v)


@pytest.mark.parametrize("dtype, rows", [(jnp.bfloat16, 2048), (jnp.float32, 1024)])
def test_rows_of_a_causal_step(dtype, rows):
    """All rows at once have no loop, but exact products of so many take a minute to compile."""
    q, k = (jax.ShapeDtypeStruct((1, 1, *n, 2048, 128), dtype) for n in ((2,), ()))
    wide = default_config(2, 2048, 2048, generation="tpu7x")
    plan = _plan(q, k, masks.causal_streams(2048), 1.0, wide)
    assert (plan.strict, plan.bq, plan.query_blocks) == ((False, True), rows, 2048 // rows)

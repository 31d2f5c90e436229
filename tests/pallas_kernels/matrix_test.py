"""Every backend against the oracle: outputs, lse and gradients over masks, shapes and types."""

import bisect
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels.reference import DEAD
from tests.pallas_kernels.cases import (
    BACKENDS,
    CAUSAL_ONLY,
    HERE,
    KERNEL,
    MASKS,
    Case,
    attend,
    config_of,
    inputs,
    mask_of,
    run,
    wanted,
)

# Every value of every column of the test matrix at least once; interval masks of one shape share a
# compiled program.
CASES = [
    Case("streams"),
    Case("rank"),
    Case("ties"),
    Case("prefix"),
    Case("streams_lengths"),
    Case("segments_rank", kv_heads=1),
    Case("segments", kv_heads=4, dtype="bfloat16", dim=128),
    Case("lengths_0_130", heads=2, dtype="bfloat16"),
    Case("lengths_1_200", heads=2, dtype="bfloat16"),
    Case("content_twice", heads=4, kv_heads=1, dim=48, rows=300, keys=300, bq=256, bk=128),
    Case("content", heads=2, kv_heads=2, dim=128, rows=300, keys=300, bq=128, bk=256),
    Case("query", heads=1, kv_heads=1, dim=256, dtype="bfloat16", bq=256, bk=256),
    Case("ties", heads=2, kv_heads=1, rows=130, keys=300, bq=128, bk=256),
]
# The other form of the kernel (order of products, unrolling, dQ) where that meets something new.
PIPED = ("streams", "segments_rank", "lengths_0_130", "content_twice", "content")
NAMES = ("o", "lse", "dq", "dk", "dv")


@pytest.mark.parametrize("name", MASKS)
def test_masks_say_what_they_mean(name):
    mask, seen = mask_of(name, 200, 200)
    got = np.broadcast_to(pk.visible(mask), seen.shape)
    np.testing.assert_array_equal(got, seen)
    assert seen.any()


def refused(case, backend):
    """What the refusal of a backend that cannot do a case must speak of, or None."""
    if backend in CAUSAL_ONLY:
        if mask_of(case.mask, case.rows, case.keys)[0].kind == "interval":
            return "causal"
        if backend == "cudnn":
            return "lse" if case.dtype == "bfloat16" else case.dtype
        if case.dim not in (64, 128, 256):
            return str(case.dim)
    return None


def test_every_implementation_is_among_the_backends():
    assert {impl for impl, _ in BACKENDS.values()} == {*pk.IMPLS} - {"auto"}


@pytest.mark.parametrize(
    "case, backend",
    [(c, b) for c in CASES for b in BACKENDS if b != "piped" or c.mask in PIPED],
    ids=str,
)
def test_equals_the_reference(case, backend):
    if reason := refused(case, backend):
        with pytest.raises(ValueError, match=f"{BACKENDS[backend][0]}.*{reason}"):
            run(case, backend)
        return
    equal(case, backend, run(case, backend))


LONG = dict(rows=384, keys=384)
TIGHT = [
    Case("streams", **LONG),
    Case("segments_rank", kv_heads=1, **LONG),
    Case("lengths_1_200", heads=2, dtype="bfloat16", **LONG),
    Case("content", heads=2, kv_heads=2, dim=128, **LONG),
]


def least(accepted):
    """The smallest VMEM, in bytes, that is not refused."""

    def fits(eighths):
        try:
            accepted(eighths * 2**17)
        except ValueError as error:
            assert "VMEM" in str(error)
            return False
        return True

    sizes = range(1, 128)
    return sizes[bisect.bisect_left(sizes, True, key=fits)] * 2**17


@pytest.mark.parametrize("case", TIGHT, ids=str)
def test_gradients_in_the_least_memory_that_is_not_refused(case):
    """Queries that VMEM cannot hold are cut apart, and the terms of dK and dV are added."""

    def traced(vmem):
        config = config_of(case, {**KERNEL, "vmem": vmem})
        call = functools.partial(attend, impl="pallas", config=config)
        return str(jax.make_jaxpr(call)(*inputs(case), mask_of(case.mask, case.rows, case.keys)[0]))

    vmem = least(traced)
    parts = lambda text: (text.count("name=bwd"), text.count("scan["))
    assert parts(traced(vmem)) > parts(traced(2**24)) == (1, 0)
    equal(case, "kernel", run(case, "kernel", vmem=vmem))


@pytest.mark.parametrize("case", TIGHT, ids=str)
def test_outputs_in_the_least_memory_that_is_not_refused(case):
    """Keys that VMEM cannot hold pass by the queries in windows."""
    mask = mask_of(case.mask, case.rows, case.keys)[0]
    q, k, v, *_ = inputs(case)

    def call(vmem):
        config = config_of(case, {**KERNEL, "vmem": vmem})
        return functools.partial(
            pk.interval_attention, mask=mask, impl="pallas", config=config, return_lse=True
        )

    vmem = least(lambda vmem: jax.eval_shape(call(vmem), q, k, v))
    streaming = lambda vmem: "name=fwdstream" in str(jax.make_jaxpr(call(vmem))(q, k, v))
    assert streaming(vmem) and not streaming(2**24)
    with jax.default_matmul_precision("highest"):
        got = jax.jit(call(vmem))(q, k, v)
    equal(case, "kernel", [np.asarray(x.astype(jnp.float32)) for x in got])


def equal(case, backend, got):
    """Asserts that o and lse, and gradients if they are there, are those of the reference."""
    want = wanted(case)
    assert got[0].shape == inputs(case)[0].shape
    seen = mask_of(case.mask, case.rows, case.keys)[1]
    dead = np.broadcast_to(~seen.any(-1)[:, None], got[1].shape)
    assert (got[1][dead] == np.float32(DEAD)).all()
    for name, g, w in zip(NAMES, got, want, strict=False):
        assert np.isfinite(g).all(), name
        if name == "lse":
            np.testing.assert_allclose(g[~dead], w[~dead], atol=3e-5, err_msg=name)
        elif case.dtype == "float32":
            atol = 3e-5 if name == "o" else 4e-5
            np.testing.assert_allclose(g, w, rtol=0, atol=atol, err_msg=name)
        else:
            error = np.linalg.norm(g - w) / np.linalg.norm(w)
            # Rounding the exact outputs makes 1.6e-3; dense rounds its probabilities too.
            most = {"o": 2.5e-3 if backend == "dense" else 2e-3}.get(name, 3e-3)
            assert error < most, (name, error)
            assert name != "o" or np.abs(g - w).max() < 1e-2
    for rows in got[0::2][:2]:  # o and dq
        assert (rows[dead] == 0).all()
    never = ~seen.any((1, 2))  # (B, Lk): seen by no row of any stream
    for gradient in got[3:]:
        assert (np.moveaxis(gradient, 1, 2)[never] == 0).all()


def test_dead_rows_and_unseen_keys_are_among_the_cases():
    seen = [mask_of(case.mask, case.rows, case.keys)[1] for case in CASES]
    assert sum((~s.any(-1)).any() for s in seen) >= 5
    assert sum((~s.any((1, 2))).any() for s in seen) >= 4
    assert any(not s[b].any() for s in seen for b in range(len(s)))  # an empty batch entry


def test_outputs_have_the_dtype_of_the_inputs():
    case = Case("query", heads=1, kv_heads=1, rows=8, keys=8)
    q, k, v, *_ = (x.astype(jnp.bfloat16) for x in inputs(case))
    for impl in {BACKENDS[name][0] for name in HERE}:
        out, lse = jax.eval_shape(
            lambda q, k, v, impl=impl: pk.interval_attention(
                q, k, v, pk.causal_streams(8, (True,)), return_lse=True, impl=impl
            ),
            q, k, v,
        )  # fmt: skip
        assert (out.dtype, out.shape) == (jnp.bfloat16, q.shape)
        assert (lse.dtype, lse.shape) == (jnp.float32, q.shape[:-1])


@pytest.mark.parametrize("name", ["streams", "prefix", "segments_rank"])
def test_gradients_of_the_reference_are_its_differences(name):
    """Central differences in float64 along random directions, of outputs and lse."""
    length, rng = 16, np.random.default_rng(3)
    if name == "segments_rank":
        ids = np.array([[0] * 5 + [1] * 7 + [-1] * 4], np.int32)
        r = np.array([[3, 1, 0, 4, 2, *range(7), 0, 0, 0, 0]], np.int32)
        mask = pk.segment_mask(ids, rank=r, strict=(False, True))
    else:
        mask = mask_of(name, length, length)[0]
    batch = 1 if mask.kind == "causal" else mask.hi.shape[0]
    with jax.enable_x64(True):
        shapes = [(batch, 2, 2, length, 4), (batch, 1, length, 4), (batch, 1, length, 4)]
        x = [jnp.asarray(rng.normal(size=s)) for s in shapes]
        do, dlse = rng.normal(size=shapes[0]), rng.normal(size=shapes[0][:-1])

        @jax.jit
        def loss(q, k, v):
            out, lse = pk.attention_reference(q, k, v, mask, return_lse=True)
            return jnp.sum(out * do) + jnp.sum(jnp.where(lse == DEAD, 0.0, lse) * dlse)

        assert loss(*x).dtype == jnp.float64
        grads = jax.grad(loss, argnums=(0, 1, 2))(*x)
        for n, g in enumerate(grads):
            for _ in range(4):
                step = rng.normal(size=x[n].shape)
                at = lambda t, n=n, step=step: loss(*x[:n], x[n] + t * step, *x[n + 1 :])
                h = 1e-4
                # Fourth order: the truncation error is about 1e-14.
                difference = (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h)
                np.testing.assert_allclose(np.sum(g * step), difference, rtol=1e-9, atol=1e-9)

"""What the entry points add to the kernels: a null key, a mesh, the choice of one, remat names."""

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels import dispatch
from pallas_kernels.masks import SEES_NOTHING
from tests.pallas_kernels.cases import BATCH, KERNEL, Case, config_of, inputs, mask_of

CASE = Case("streams", heads=4, kv_heads=2)
INTERPRETED = dict(impl="pallas", config=config_of(CASE, KERNEL))
FORMS = {"dense": dict(impl="xla_dense"), "kernel": INTERPRETED}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("per_example", [False, True])
def test_a_null_key_is_one_more_key_that_all_rows_see(form, per_example):
    """Outputs and gradients, the null key's among them; not even row 0 of the query is dead."""
    q, k, v, do, _ = inputs(CASE)
    rng = np.random.default_rng(2)
    shape = (2, *[BATCH] * per_example, CASE.kv_heads, CASE.dim)
    null = tuple(jnp.asarray(rng.normal(size=shape), jnp.float32))
    position = np.arange(CASE.rows, dtype=np.int32)
    hi = np.stack([position, position - 1])[None] + 1  # after the null key
    wide = pk.IntervalMask(np.arange(CASE.keys + 1, dtype=np.int32)[None], hi)

    def with_null(q, k, v, null):
        out = pk.two_stream_attention(
            q[:, :, 0], q[:, :, 1], k, v, mask_of("streams", 200, 200)[0], null_kv=null,
            **FORMS[form],
        )  # fmt: skip
        return jnp.stack(out, axis=2)

    def with_one_more(q, k, v, null):
        first = [jnp.broadcast_to(x, (BATCH, *x.shape[-2:]))[:, :, None] for x in null]
        k, v = (jnp.concatenate([a, b], axis=2) for a, b in zip(first, (k, v), strict=True))
        return pk.attention_reference(q, k, v, wide)

    def outputs(fn):
        def program(*x):
            out, pullback = jax.vjp(fn, *x)
            return out, *jax.tree.leaves(pullback(do))

        with jax.default_matmul_precision("highest"):
            return jax.jit(program)(q, k, v, null)

    got, want = outputs(with_null), outputs(with_one_more)
    assert np.abs(np.asarray(got[0])[:, :, 1, 0]).min() > 0
    for name, g, w in zip(("o", "dq", "dk", "dv", "dk0", "dv0"), got, want, strict=True):
        # Hundreds of rows are summed in the gradients of the null key.
        rtol, atol = (3e-6, 1e-4) if name.endswith("0") else (0, 4e-5)
        np.testing.assert_allclose(g, w, rtol=rtol, atol=atol, err_msg=name)


@pytest.mark.parametrize(
    "name, form",
    [(name, "dense") for name in ("prefix", "streams_lengths", "segments_rank")]
    + [(name, form) for name in ("streams", "one_row") for form in FORMS],
)
def test_over_a_mesh_as_on_one_device(name, form):
    """Batch over two axes, heads over the third; masks follow the batch or are one for all."""
    case = Case("rank" if name == "one_row" else name)
    devices = np.array(jax.devices()[:4]).reshape(2, 1, 2)
    mesh = jax.sharding.Mesh(devices, ("data", "fsdp", "model"))
    mask = mask_of(case.mask, case.rows, case.keys)[0]
    if name == "one_row":
        mask = jax.tree.map(lambda x: x[:1], mask)
    attend = functools.partial(pk.interval_attention, return_lse=True, **FORMS[form])

    def outputs(fn):
        def program(q, k, v, do, dlse):
            out, pullback = jax.vjp(lambda *x: fn(*x, mask), q, k, v)
            return *out, *pullback((do, dlse))

        with jax.default_matmul_precision("highest"):
            return jax.jit(program)(*inputs(case))

    got, want = outputs(pk.shard_attention(attend, mesh)), outputs(attend)
    for what, g, w in zip(("o", "lse", "dq", "dk", "dv"), got, want, strict=True):
        assert g.shape == w.shape
        np.testing.assert_allclose(g, w, rtol=0, atol=1e-5, err_msg=what)


def test_a_mask_of_one_row_is_that_of_every_example():
    case = Case("rank")
    mask = mask_of("rank", 200, 200)[0]
    shared = jax.tree.map(lambda x: x[:1], mask)
    spread = jax.tree.map(lambda x: jnp.broadcast_to(x, (BATCH, *x.shape[1:])), shared)
    q, k, v, *_ = inputs(case)
    for options in (*FORMS.values(), dict(impl="xla_blocked")):
        attend = jax.jit(functools.partial(pk.interval_attention, **options))
        np.testing.assert_array_equal(attend(q, k, v, shared), attend(q, k, v, spread))


@pytest.mark.parametrize("shared", ["code", "hi", "lo"])
def test_a_vector_of_one_row_goes_with_others_of_a_row_per_example(shared):
    case = Case("segments_rank")
    mask = mask_of(case.mask, case.rows, case.keys)[0]
    mixed = dataclasses.replace(mask, **{shared: getattr(mask, shared)[:1]})
    q, k, v, *_ = inputs(case)
    want = pk.attention_reference(q, k, v, mixed)
    assert not np.allclose(want, pk.attention_reference(q, k, v, mask))
    for options in (*FORMS.values(), dict(impl="xla_blocked")):
        got = jax.jit(functools.partial(pk.interval_attention, **options))(q, k, v, mixed)
        np.testing.assert_allclose(got, want, rtol=0, atol=3e-5)


@pytest.mark.parametrize(
    "rows, chosen", [(200, "xla_dense"), (512, "pallas on TPU, elsewhere xla_blocked")]
)
def test_auto_says_once_what_it_chose(rows, chosen, caplog):
    dispatch._log_once.cache_clear()
    q = jax.ShapeDtypeStruct((1, 2, 2, rows, 64), jnp.float32)
    k = jax.ShapeDtypeStruct((1, 1, rows, 64), jnp.float32)
    with caplog.at_level(logging.INFO, logger="pallas_kernels"):
        for _ in range(3):
            jax.eval_shape(
                lambda q, k: pk.interval_attention(q, k, k, pk.causal_streams(rows)), q, k
            )
    (record,) = caplog.records
    assert chosen in record.getMessage() and str(rows) in record.getMessage()


def test_auto_on_cpu_is_blocked_and_of_long_sequences():
    case = Case("streams", heads=2, kv_heads=1, rows=300, keys=300)
    q, k, v, *_ = inputs(case)
    mask = mask_of(case.mask, case.rows, case.keys)[0]
    auto, blocked = (
        jax.jit(functools.partial(pk.interval_attention, mask=mask, impl=impl))
        for impl in ("auto", "xla_blocked")
    )
    np.testing.assert_array_equal(auto(q, k, v), blocked(q, k, v))


def test_a_remat_policy_that_saves_the_named_results_runs_the_forward_once():
    q, k, v, do, _ = inputs(CASE)
    mask = mask_of("streams", 200, 200)[0]

    def forwards(policy):
        attend = jax.checkpoint(
            functools.partial(pk.interval_attention, mask=mask, **INTERPRETED), policy=policy
        )
        gradient = jax.grad(lambda *x: jnp.sum(attend(*x) * do), argnums=(0, 1, 2))
        return str(jax.make_jaxpr(gradient)(q, k, v)).count("name=fwdcausal")

    names = jax.checkpoint_policies.save_only_these_names(*pk.RESIDUALS)
    assert forwards(jax.checkpoint_policies.nothing_saveable) == 2
    assert forwards(names) == 1


def test_a_row_that_sees_nothing_has_a_finite_lse_that_no_gradient_passes():
    q, k, v, *_ = inputs(CASE)
    dead = jnp.full((BATCH, 2, CASE.rows), SEES_NOTHING, jnp.int32)
    mask = pk.IntervalMask(jnp.zeros((BATCH, CASE.keys), jnp.int32), dead)
    lse = lambda *x: jnp.sum(pk.interval_attention(*x, mask, return_lse=True)[1])
    for gradient in jax.grad(lse, argnums=(0, 1, 2))(q, k, v):
        assert not np.asarray(gradient).any()

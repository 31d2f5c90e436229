"""The backward kernels against automatic gradients of the dense reference, interpreted on CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import backward as resident
from pallas_kernels import masks, streaming_backward
from pallas_kernels.config import default_config
from pallas_kernels.reference import DEAD, attention_reference

L = 200
RANK = jnp.asarray(np.stack([np.random.default_rng(i).permutation(L) for i in range(2)]), jnp.int32)
SEGMENTS = jnp.asarray([[0] * 50 + [1] * 100 + [2] * 30 + [-1] * 20], jnp.int32)
MASKS = {
    "causal": masks.causal_streams(L),
    "causal_one": masks.causal_streams(L, (True,)),
    "rank": masks.rank_streams(RANK),
    "ties": masks.rank_streams(RANK // 7, strict=(True, False)),
    "lengths": masks.length_mask(jnp.asarray([0, 1]), L),
    "long_lengths": masks.length_mask(jnp.asarray([130, L]), L),
    "segments": masks.segment_mask(SEGMENTS),
    "segments_rank": masks.segment_mask(SEGMENTS, rank=RANK[:1], strict=(False, True)),
}
SMALL = dict(bwd_bq=128, bwd_bk=128, bwd_step=128, bwd_rc=128)
EXACT = jax.default_matmul_precision("highest")


def inputs(mask, heads, kv_heads, dim, dtype):
    """q, k, v, do and a cotangent of lse."""
    rng = np.random.default_rng(0)
    q, do = rng.normal(size=(2, 2, heads, mask.streams, L, dim))
    k, v = rng.normal(size=(2, 2, kv_heads, L, dim))
    dlse = rng.normal(size=(2, heads, mask.streams, L))
    return *(jnp.asarray(x, dtype) for x in (q, k, v, do)), jnp.asarray(dlse, jnp.float32)


def statistics(out, lse, do, dlse):
    """What the kernel takes: base-2 lse and delta."""
    lse2 = jnp.where(lse == DEAD, 0.0, lse * np.log2(np.e))
    return lse2, jnp.sum(out * do.astype(jnp.float32), axis=-1) - dlse


def compare(name, heads=2, kv_heads=1, dim=64, dtype=jnp.float32, tolerance=4e-5, **config):
    """Gradients of the kernel and of the reference, and that rows and keys without pairs get 0."""
    mask = MASKS[name]
    q, k, v, do, dlse = inputs(mask, heads, kv_heads, dim, dtype)
    with EXACT:
        reference = lambda q, k, v: attention_reference(q, k, v, mask, return_lse=True)
        (out, lse), vjp = jax.vjp(reference, q, k, v)
        dlse = jnp.where(lse == DEAD, 0.0, dlse)
        want = vjp((do.astype(jnp.float32), dlse))
        made = default_config(
            mask.streams, L, L, generation="v5p", **{**SMALL, "interpret": True, **config}
        )
        lse2, delta = statistics(out, lse, do, dlse)
        got = streaming_backward.backward(
            q, k, v, mask, lse2, delta, do, scale=dim**-0.5, config=made
        )
    seen = jnp.broadcast_to(masks.visible(mask), (2, mask.streams, L, L))
    unused = ~jnp.any(seen, axis=3)[:, None], ~jnp.any(seen, axis=(1, 2))[:, None]
    for g, w, alone in zip(got, want, (unused[0], unused[1], unused[1]), strict=True):
        assert g.dtype == dtype
        g, w = np.asarray(g, np.float32), np.asarray(w, np.float32)
        assert not np.any(g[np.broadcast_to(alone, g.shape[:-1])])
        if dtype == jnp.float32:
            np.testing.assert_allclose(g, w, atol=tolerance, rtol=0)
        else:
            assert np.linalg.norm(g - w) <= tolerance * np.linalg.norm(w)


@pytest.mark.parametrize("name", MASKS)
def test_equals_the_gradient_of_the_reference(name):
    compare(name)


@pytest.mark.parametrize(
    "name, options",
    [
        ("causal", dict(bwd_step=256)),  # all rows in one step
        ("causal", dict(kv_heads=2, bwd_bq=384, bwd_step=256, bwd_rc=256, bwd_dq="nt")),
        ("causal_one", dict(heads=4, kv_heads=1, dim=128, bwd_dq="nt")),
        ("ties", dict(bwd_bq=256, bwd_bk=128, kv_heads=2, bwd_dq="nt")),
        ("segments", dict(bwd_bq=128, bwd_bk=256, dim=256, kv_heads=2)),
        ("causal", dict(dtype=jnp.bfloat16, tolerance=3e-3)),
        ("rank", dict(dtype=jnp.bfloat16, tolerance=3e-3, bwd_dq="nt")),
    ],
)
def test_blocks_heads_and_types(name, options):
    compare(name, **options)


@pytest.mark.parametrize(
    "name, options", [("causal", dict(bwd_dq="nt")), ("long_lengths", dict(heads=1))]
)
def test_simulated_memories_show_no_race_and_no_unset_value(name, options):
    try:
        compare(name, interpret="tpu", **options)
    finally:
        pltpu.reset_tpu_interpret_mode_state()


@pytest.mark.parametrize(
    "name, kv_heads, mebibytes, parts",
    [
        ("causal", 1, 3.8, (2, 256, "causal")),
        ("causal", 2, 2.6, (1, 256, "causal")),
        ("rank", 1, 2.65, (1, 128, "interval")),
        ("segments", 1, 2.65, (1, 128, "interval")),
    ],
)
def test_parts_add_up(monkeypatch, name, kv_heads, mebibytes, parts):
    """Streams, then heads and rows, are cut apart until a part fits."""
    plans, best = [], resident.best_plan
    monkeypatch.setattr(resident, "best_plan", lambda *args: plans.append(best(*args)) or plans[-1])
    compare(name, kv_heads=kv_heads, vmem=int(mebibytes * 2**20))
    assert (plans[-1].streams, plans[-1].rows, plans[-1].kind) == parts


def test_what_does_not_fit_is_refused():
    q = jnp.zeros((1, 1, 1, 256, 64))
    row = jnp.zeros(q.shape[:-1])
    config = default_config(1, 256, 256, generation="v5p", vmem=2**20)
    with pytest.raises(ValueError, match="MiB of VMEM"):
        resident.backward(
            q, q[:, 0], q[:, 0], masks.causal_streams(256, (False,)), row, row, q, scale=1.0,
            config=config,
        )  # fmt: skip

"""Nothing reaches an output that its query may not see: by gradients, and by planted NaN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from tests.pallas_kernels.cases import (
    BACKENDS,
    BATCH,
    CAUSAL_ONLY,
    HERE,
    Case,
    attend,
    config_of,
    inputs,
    mask_of,
)

CAUSAL = Case("streams", heads=2, kv_heads=1)
RANK = Case("rank", heads=2, kv_heads=1)
POSITIONS = (0, 1, 127, 128, 199)  # around the edges of blocks
INTERVAL = [name for name in HERE if name not in CAUSAL_ONLY]
SKIPPING = [name for name in INTERVAL if name != "dense"]  # splash has blocks of its own


@functools.partial(jax.jit, static_argnames=("impl", "config"))
def gradients(q, k, v, do, mask, *, impl, config):
    """Gradients of <outputs, do> by the content and query stream's q, by k and by v."""

    def loss(content, query, k, v):
        out = pk.two_stream_attention(content, query, k, v, mask, impl=impl, config=config)
        return sum(jnp.sum(o * do[:, :, s]) for s, o in enumerate(out))

    return jax.grad(loss, argnums=(0, 1, 2, 3))(q[:, :, 0], q[:, :, 1], k, v)


@pytest.mark.parametrize("stream", [0, 1], ids=["content", "query"])
@pytest.mark.parametrize(
    "case, backend",
    [(CAUSAL, name) for name in HERE] + [(RANK, name) for name in INTERVAL],
    ids=str,
)
def test_a_row_depends_on_exactly_the_keys_it_may_see(case, backend, stream):
    """The query for a position never sees the content of that position or of a later rank."""
    impl, changes = BACKENDS[backend]
    q, k, v, do, _ = inputs(case)
    mask, seen = mask_of(case.mask, case.rows, case.keys)
    for position in POSITIONS:
        one = jnp.zeros_like(do).at[:, :, stream, position].set(do[:, :, stream, position])
        *dq, dk, dv = gradients(q, k, v, one, mask, impl=impl, config=config_of(case, changes))
        others = np.delete(np.asarray(dq[stream]), position, axis=2)
        assert not others.any() and not np.asarray(dq[1 - stream]).any()
        for b in range(BATCH):
            may = seen[b, stream, position]
            assert position not in np.flatnonzero(may) or stream == 0
            of_key, of_value = (np.abs(np.asarray(x[b, 0])).max(-1) for x in (dk, dv))
            assert not of_key[~may].any() and not of_value[~may].any()
            assert of_value[may].all()
            # The weight of an only key is 1 whatever the key is.
            assert of_key[may].all() or may.sum() == 1


PADDED = [
    Case("lengths_0_130", heads=2, dtype="bfloat16"),
    Case("streams_lengths"),
    Case("segments_rank", kv_heads=1),
]


@pytest.mark.parametrize("backend", INTERVAL)
@pytest.mark.parametrize("case", PADDED, ids=str)
def test_nan_in_padding_changes_nothing(case, backend):
    """In padded queries, keys and values, and in the cotangents of dead rows."""
    impl, changes = BACKENDS[backend]
    x = inputs(case)
    mask, seen = mask_of(case.mask, case.rows, case.keys)
    rows = jnp.asarray(seen.any(-1) | (np.asarray(mask.hi) > np.iinfo(np.int32).min))[:, None]
    keys = jnp.asarray(np.asarray(mask.code) < np.iinfo(np.int32).max)[:, None, :, None]
    used = (rows[..., None], keys, keys, rows[..., None], rows)
    assert not rows.all() and not keys.all()
    out = []
    for rubbish in (0, jnp.nan, jnp.inf):
        planted = [
            jnp.where(u, a, jnp.asarray(rubbish, a.dtype)) for u, a in zip(used, x, strict=True)
        ]
        results = attend(*planted, mask, impl=impl, config=config_of(case, changes))
        out.append([np.asarray(r.astype(jnp.float32)) for r in results])
    clean, *others = out
    assert all(np.isfinite(r).all() for r in clean)
    for other in others:
        for name, a, b in zip(("o", "lse", "dq", "dk", "dv"), clean, other, strict=True):
            np.testing.assert_array_equal(a, b, err_msg=name)
    for gradient in clean[3:]:
        assert (np.moveaxis(gradient, 1, 2)[~np.asarray(keys[:, 0, :, 0])] == 0).all()


def test_dense_attention_does_not_skip():
    """So that the next tests could fail: zero times NaN is NaN."""
    out, _ = rows_before_the_nan("dense", CAUSAL)
    assert np.isnan(out[1]).any()


@pytest.mark.parametrize("backend", SKIPPING)
def test_blocks_above_the_diagonal_are_not_computed(backend):
    """Keys and values of the second block are NaN; rows of the first one never see it."""
    for clean, planted in rows_before_the_nan(backend, CAUSAL):
        assert np.isfinite(clean).all()
        np.testing.assert_array_equal(clean, planted)


def rows_before_the_nan(backend, case):
    """Outputs and query gradients of rows 0 to 127, for keys from 128 on as they are and NaN."""
    impl, changes = BACKENDS[backend]
    q, k, v, do, dlse = inputs(case)
    mask = mask_of(case.mask, case.rows, case.keys)[0]
    out = []
    for value in (None, jnp.nan):
        late = jnp.arange(case.keys)[None, None, :, None] >= 128
        a, b = (x if value is None else jnp.where(late, value, x) for x in (k, v))
        results = attend(q, a, b, do, dlse, mask, impl=impl, config=config_of(case, changes))
        out.append([np.asarray(results[n])[:, :, :, :128] for n in (0, 2)])
    return list(zip(*out, strict=True))


@pytest.mark.parametrize("backend", SKIPPING)
def test_key_blocks_no_row_sees_are_not_computed(backend):
    """The third block of keys comes after all ranks that queries have; it is NaN."""
    case = Case("rank", heads=2, kv_heads=1, rows=256, keys=384)
    impl, changes = BACKENDS[backend]
    q, k, v, do, dlse = inputs(case)
    rank = jnp.tile(jnp.arange(384, dtype=jnp.int32), (BATCH, 1))
    mask = pk.rank_streams(rank[:, :256], key_rank=rank)
    late = jnp.arange(384)[None, None, :, None] >= 256
    clean, planted = (
        attend(q, a, b, do, dlse, mask, impl=impl, config=config_of(case, changes))
        for a, b in ((k, v), (jnp.where(late, jnp.nan, k), jnp.where(late, jnp.nan, v)))
    )
    for name, a, b in zip(("o", "lse", "dq", "dk", "dv"), clean, planted, strict=True):
        assert np.isfinite(np.asarray(a)).all()
        np.testing.assert_array_equal(a, b, err_msg=name)
    assert not np.asarray(clean[3])[:, :, 256:].any()

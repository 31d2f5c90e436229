"""Where attention is used at its edges: twice differentiated, padded with a null key, empty."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk

B, H, L, D = 2, 2, 9, 8
INTERPRET = pk.default_config(2, L, L, interpret=True)


def inputs(rows=L, batch=B):
    rng = np.random.default_rng(0)
    q = rng.normal(size=(batch, H, 2, rows, D))
    k, v = rng.normal(size=(2, batch, H, rows, D))
    return tuple(jnp.asarray(x, jnp.float32) for x in (q, k, v))


@pytest.mark.parametrize("impl", ["xla_dense", "xla_blocked", "pallas"])
def test_a_second_derivative_is_refused_and_not_wrong(impl):
    q, k, v = inputs()
    config = INTERPRET if impl == "pallas" else None

    def square(q):
        loss = lambda q: jnp.sum(
            pk.interval_attention(q, k, v, pk.causal_streams(L), impl=impl, config=config) ** 2
        )
        return jnp.sum(jax.grad(loss)(q) ** 2)

    assert np.isfinite(square(q))
    with pytest.raises(ValueError, match="differentiated once; use attention_reference"):
        jax.grad(square)(q)


def test_a_null_key_is_not_seen_by_padding_which_cannot_matter():
    q, k, v = inputs()
    mask = pk.length_mask(np.array([5, 0]), L, streams=2)
    null = tuple(jnp.asarray(np.random.default_rng(1).normal(size=(2, H, D)), jnp.float32))
    poisoned = q.at[0, :, :, 5:].set(jnp.nan).at[1].set(jnp.nan)

    def loss(null, q):
        out = pk.two_stream_attention(q[:, :, 0], q[:, :, 1], k, v, mask, null_kv=null)
        return sum(jnp.sum(o[0, :, :5] ** 2) for o in out), out

    (_, clean), want = jax.value_and_grad(loss, has_aux=True)(null, q)
    (_, out), got = jax.value_and_grad(loss, has_aux=True)(null, poisoned)
    for a, b in zip((*out, *got), (*clean, *want), strict=True):
        np.testing.assert_array_equal(a, b)
    for o in out:
        assert (o[1] == 0).all() and (o[0, :, 5:] == 0).all() and (o[0, :, :5] != 0).all()


@pytest.mark.parametrize("impl", ["xla_dense", "xla_blocked", "pallas"])
def test_an_empty_batch_has_an_empty_result(impl):
    out, lse = pk.interval_attention(
        *inputs(batch=0), pk.causal_streams(L), impl=impl, return_lse=True
    )
    assert out.shape == (0, H, 2, L, D) and lse.shape == (0, H, 2, L)


def test_segments_that_do_not_fit_their_integers():
    rank = np.tile(np.arange(L, dtype=np.int32), (1, 1))
    ids = np.full((1, L), 2**26, np.int32)
    with pytest.raises(ValueError, match="Segment ids must be below 134217727"):
        pk.segment_mask(ids + 2**27, rank=rank)
    with pytest.raises(ValueError, match=r"Ranks of segments must lie in \[0, 9\)"):
        pk.segment_mask(ids, rank=rank + 1)
    assert np.asarray(pk.visible(pk.segment_mask(ids, rank=rank))).sum() == L * (L + 1) // 2


@pytest.mark.parametrize("impl", ["xla_dense", "xla_blocked", "pallas"])
@pytest.mark.parametrize("rows", [1, 2])
def test_shortest_sequences(impl, rows):
    q, k, v = inputs(rows)
    mask = pk.causal_streams(rows)
    config = INTERPRET if impl == "pallas" else None
    got = pk.interval_attention(q, k, v, mask, impl=impl, config=config)
    np.testing.assert_allclose(got, pk.attention_reference(q, k, v, mask), atol=3e-5)
    assert (got[:, :, 1, 0] == 0).all()

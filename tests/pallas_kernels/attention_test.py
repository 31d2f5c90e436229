"""Interval masks and attention against loops, against each other, and on rows that see nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk

B, H, L, D = 2, 4, 6, 8
RANK = np.stack([np.random.default_rng(i).permutation(L) for i in range(B)]).astype(np.int32)


def inputs(streams=2, kv_heads=H, dtype=np.float32):
    rng = np.random.default_rng(0)
    q = rng.normal(size=(B, H, streams, L, D))
    k, v = rng.normal(size=(2, B, kv_heads, L, D))
    return tuple(jnp.asarray(x, dtype) for x in (q, k, v))


def by_loop(q, k, v, may):
    """Softmax attention row by row; may(b, s, i, j) says whether query i sees key j."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros(q.shape)
    for b, h, s, i in np.ndindex(q.shape[:4]):
        g = h * k.shape[1] // H
        keys = [j for j in range(L) if may(b, s, i, j)]
        if keys:
            w = np.exp(k[b, g, keys] @ q[b, h, s, i] / np.sqrt(D))
            out[b, h, s, i] = w / w.sum() @ v[b, g, keys]
    return out


LENGTHS = np.array([4, 0], np.int32)
GROUPS = RANK // 2
MASKS = {
    "causal": (pk.causal_streams(L), lambda b, s, i, j: j <= i - s),
    "causal_both": (pk.causal_streams(L, strict=(False, False)), lambda b, s, i, j: j <= i),
    "rank": (pk.rank_streams(RANK), lambda b, s, i, j: RANK[b, j] <= RANK[b, i] - s),
    "groups": (pk.rank_streams(GROUPS), lambda b, s, i, j: GROUPS[b, j] <= GROUPS[b, i] - s),
    "length": (
        pk.length_mask(LENGTHS, L, streams=2),
        lambda b, s, i, j: i < LENGTHS[b] and j < LENGTHS[b],
    ),
    "lower_bound": (
        pk.IntervalMask(RANK, np.stack([RANK, RANK - 1], 1), RANK - 2),
        lambda b, s, i, j: RANK[b, i] - 2 <= RANK[b, j] <= RANK[b, i] - s,
    ),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("kv_heads", [H, 2])
def test_reference_and_dense_equal_the_loop(name, kv_heads):
    mask, may = MASKS[name]
    q, k, v = inputs(kv_heads=kv_heads)
    want = by_loop(q, k, v, may)
    np.testing.assert_allclose(pk.attention_reference(q, k, v, mask), want, atol=1e-5)
    got = np.asarray(pk.interval_attention(q, k, v, mask))
    np.testing.assert_allclose(got, want, atol=3e-5)
    dead = ~np.asarray(pk.visible(mask)).any(-1)
    assert (np.moveaxis(got, 1, -1)[np.broadcast_to(dead, (B, 2, L))] == 0).all()


def test_gradients_equal_the_reference_and_dead_rows_have_none():
    mask = MASKS["rank"][0]
    q, k, v = inputs()
    target = jnp.asarray(np.random.default_rng(1).normal(size=q.shape), jnp.float32)
    grads = [
        jax.grad(lambda *a, f=f: jnp.sum(f(*a, mask) * target), argnums=(0, 1, 2))(q, k, v)
        for f in (pk.interval_attention, pk.attention_reference)
    ]
    for got, want in zip(*grads, strict=True):
        assert np.isfinite(got).all()
        np.testing.assert_allclose(got, want, atol=4e-5)
    for b in range(B):
        assert (np.asarray(grads[0][0])[b, :, 1, np.argmin(RANK[b])] == 0).all()


def test_natural_order_with_ranks_equals_permuted_causal():
    q, k, v = inputs()
    order = np.argsort(RANK, axis=1)
    p = lambda x, axis: np.stack([np.take(np.asarray(x)[b], order[b], axis=axis) for b in range(B)])
    permuted = pk.interval_attention(p(q, 2), p(k, 1), p(v, 1), pk.causal_streams(L))
    natural = pk.interval_attention(q, k, v, pk.rank_streams(RANK))
    np.testing.assert_allclose(permuted, p(np.asarray(natural), 2), atol=1e-5)


def test_packed_streams_equal_two_calls():
    q, k, v = inputs()
    packed = pk.interval_attention(q, k, v, pk.causal_streams(L, strict=(False, True)))
    for s, strict in enumerate((False, True)):
        mask = pk.causal_streams(L, strict=(strict,))
        one = pk.interval_attention(q[:, :, s : s + 1], k, v, mask)
        np.testing.assert_allclose(packed[:, :, s : s + 1], one, atol=1e-6)


def test_groups_singletons_are_ranks_and_members_are_independent():
    seen = np.asarray(pk.visible(pk.rank_streams(GROUPS)))
    np.testing.assert_array_equal(
        np.asarray(pk.visible(pk.rank_streams(2 * RANK))), np.asarray(pk.visible(MASKS["rank"][0]))
    )
    same = GROUPS[:, :, None] == GROUPS[:, None, :]
    assert not seen[:, 1][same].any() and seen[:, 0][same].all()


def test_probabilities_bf16_and_refusals():
    q, k, v = inputs(dtype=jnp.bfloat16)
    mask = pk.causal_streams(L)
    out, probs = pk.dense_attention(q, k, v, pk.visible(mask), return_probs=True)
    assert out.dtype == jnp.bfloat16 and probs.dtype == jnp.float32
    np.testing.assert_allclose(probs.sum(-1)[:, :, 0], 1, atol=1e-6)
    want = pk.attention_reference(q, k, v, mask)
    np.testing.assert_allclose(out.astype(np.float32), want, atol=1e-2)
    with pytest.raises(ValueError, match="xla_dense"):
        pk.interval_attention(q, k, v, mask, impl="flash")
    with pytest.raises(ValueError, match="multiple of Hkv"):
        pk.interval_attention(q, k[:, :3], v[:, :3], mask)

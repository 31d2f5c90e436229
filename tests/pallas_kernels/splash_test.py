"""The splash backend against the reference, and through it the roll that cuDNN shares."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import splash
from pallas_kernels.config import default_config
from pallas_kernels.masks import causal_streams, length_mask
from pallas_kernels.reference import DEAD, attention_reference

CONFIG = default_config(2, 256, 256, generation="v5p", interpret=True)


def inputs(streams, length, heads=2, kv_heads=1, dim=64, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    q, do = rng.normal(size=(2, 1, heads, streams, length, dim))
    k, v = rng.normal(size=(2, 1, kv_heads, length, dim))
    return tuple(jnp.asarray(x, dtype) for x in (q, k, v, do))


def grads(q, k, v, mask, do, dlse, scale):
    """Gradients of the reference; a dead row's lse is a constant."""

    def loss(q, k, v):
        o, lse = attention_reference(q, k, v, mask, scale=scale, return_lse=True)
        return jnp.sum(o * do) + jnp.sum(jnp.where(lse == DEAD, 0.0, lse) * dlse)

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)


@pytest.mark.parametrize(
    "strict, length, heads, kv_heads",
    [((False, True), 200, 2, 1), ((True,), 520, 1, 1), ((False, False), 40, 4, 2)],
)
def test_forward_and_backward_equal_the_reference(monkeypatch, strict, length, heads, kv_heads):
    monkeypatch.setattr(splash, "current_generation", lambda: "v4")  # 520 rows: two blocks of 384
    q, k, v, do = inputs(len(strict), length, heads, kv_heads)
    mask, scale = causal_streams(length, strict), 0.2
    options = dict(scale=scale, config=CONFIG)
    o, lse = jax.jit(functools.partial(splash.forward, **options))(q, k, v, mask)
    want_o, want_lse = attention_reference(q, k, v, mask, scale=scale, return_lse=True)
    np.testing.assert_allclose(o, want_o, atol=3e-6)
    np.testing.assert_allclose(lse, want_lse, rtol=2e-6, atol=2e-6)
    dead = np.zeros(o.shape[:-1], bool)
    dead[:, :, list(strict), 0] = True
    assert np.all(np.asarray(o)[dead] == 0) and np.all(np.asarray(lse)[dead] == DEAD)

    dlse = jnp.asarray(np.random.default_rng(1).normal(size=lse.shape), jnp.float32)
    delta = jnp.sum(o * do, axis=-1) - dlse
    lse2 = jnp.where(dead, 0.0, lse / np.log(2))
    backward = jax.jit(functools.partial(splash.backward, **options))
    got = backward(q, k, v, mask, lse2, delta, do)
    for g, w in zip(got, grads(q, k, v, mask, do, dlse, scale), strict=True):
        np.testing.assert_allclose(g, w, atol=1e-5)
    assert np.all(np.asarray(got[0])[dead] == 0)


def test_a_dead_row_sends_nothing_into_values_even_where_scores_are_huge():
    q, k, v, do = inputs(1, 128)
    q = q.at[:, :, :, 0].set(1e4)
    mask, options = causal_streams(128, (True,)), dict(scale=1.0, config=CONFIG)
    only_dead = jnp.zeros_like(do).at[:, :, :, 0].set(do[:, :, :, 0])

    @jax.jit
    def grads(q, k, v, do):
        _, lse = splash.forward(q, k, v, mask, **options)
        lse2 = jnp.where(lse == DEAD, 0.0, lse / np.log(2))
        return splash.backward(q, k, v, mask, lse2, jnp.zeros_like(lse), do, **options)

    got = grads(q, k, v, only_dead)
    assert all(np.all(np.asarray(g) == 0) for g in got)


def test_what_it_cannot_do_is_refused():
    q, k, *_ = inputs(1, 128)
    causal = causal_streams(128, (False,))
    assert splash.refusal(q, k, causal) is None
    assert "causal" in splash.refusal(q, k, length_mask(jnp.array([3]), 128))
    assert "float16" in splash.refusal(q.astype(jnp.float16), k, causal)
    assert "64, 128, 256, got 32" in splash.refusal(q[..., :32], k[..., :32], causal)

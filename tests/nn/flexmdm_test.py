import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from aodiff import partitioning
from aodiff.nn.flexmdm import MASKED, FlexMDM, FlexMDMConfig

TINY = FlexMDMConfig(
    vocab_size=5, capacity=9, num_layers=2, width=16, num_heads=2, cond_dim=6, qk_norm=True
)


@functools.cache
def model(**changes):
    cfg = dataclasses.replace(TINY, **changes)
    init = jax.jit(FlexMDM(cfg).init)
    params = partitioning.unbox(init(jax.random.key(0), TOKENS, LENGTH, ALPHA))
    leaves, tree = jax.tree.flatten(params)
    r = np.random.default_rng(0)
    return (
        cfg,
        params,
        tree.unflatten([jnp.asarray(r.normal(0, 0.3, x.shape), jnp.float32) for x in leaves]),
    )


@functools.cache
def program(cfg):
    return jax.jit(FlexMDM(cfg).apply)


def apply(cfg, params, *args):
    return program(cfg)(params, *args)


TOKENS = jnp.array([[6, 0, 5, 4, 5, 2, 5, 1, 3], [6, 5, 2, 0, 0, 0, 0, 0, 0]])
LENGTH, ALPHA = jnp.array([9, 3]), jnp.array([0.7, 0.2])


def by_hand(cfg, params, tokens, alpha):
    """An independent statement of the model in float64, one row of its own length."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params["params"])
    rms = lambda x, g: x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-5) * g["scale"]
    linear = lambda x, w: x @ w["kernel"] + w["bias"]
    silu = lambda x: x / (1 + np.exp(-x))
    tanh_gelu = lambda x: x / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))
    n, k = len(tokens), cfg.head_dim
    angle = 1000 * alpha * 10_000.0 ** (-np.arange(128) / 128)
    c = linear(np.concatenate([np.cos(angle), np.sin(angle)]), p["cond_in"])
    c = silu(linear(silu(c), p["cond_out"]))

    def turn(y):
        angle = np.arange(n)[:, None] * 10_000.0 ** (-np.arange(0, k, 2) / k)
        a, b = y[:, : k // 2], y[:, k // 2 :]
        return np.hstack(
            [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)]
        )

    x = p["embedding"][tokens]
    for layer in range(cfg.num_layers):
        w = jax.tree.map(lambda a, i=layer: a[i], p["blocks"])
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = np.split(linear(c, w["ada"]), 6)
        h, mixed = rms(x, w["attn_norm"]) * (1 + scale_a) + shift_a, 0
        for head in range(cfg.num_heads):
            q, key, value = (h @ w["qkv_kernel"][:, i, head] for i in range(3))
            q, key = turn(rms(q, w["q_norm"])), turn(rms(key, w["k_norm"]))
            mixed = (
                mixed
                + scipy.special.softmax(q @ key.T / k**0.5, -1) @ value @ w["out_kernel"][head]
            )
        x = x + gate_a * mixed
        h = rms(x, w["mlp_norm"]) * (1 + scale_m) + shift_m
        x = x + gate_m * linear(tanh_gelu(linear(h, w["fc"])), w["proj"])

    def head(name):
        shift, scale = np.split(linear(c, p[f"{name}_ada"]), 2)
        return rms(x, p[f"{name}_norm"]) * (1 + scale) + shift

    h = linear(head("gap"), p["gap_in"])
    h = h / 2 * (1 + scipy.special.erf(h / 2**0.5))
    return (head("head") @ p["head_kernel"])[:, : cfg.vocab_size], linear(h, p["gap_out"])


@pytest.mark.parametrize("classes", [0, 3])
def test_the_model_is_its_formulas(classes):
    cfg, _, params = model(classes=classes)
    out = apply(cfg, params, TOKENS, LENGTH, ALPHA)
    for b, n in enumerate(LENGTH.tolist()):
        logits, counts = by_hand(cfg, params, np.asarray(TOKENS[b, :n]), float(ALPHA[b]))
        np.testing.assert_allclose(out.logits[b, :n, :5], logits, atol=2e-4, rtol=2e-4)
        if classes:
            np.testing.assert_allclose(out.gap_logits[b, :n], counts, atol=2e-4, rtol=2e-4)
            mean = scipy.special.softmax(counts, -1) @ np.arange(4)
            np.testing.assert_allclose(np.exp(out.gap[b, :n]), mean, rtol=1e-3)
        else:
            np.testing.assert_allclose(out.gap[b, :n], counts[:, 0] - 1, atol=2e-4, rtol=2e-4)
    assert np.all(out.logits[..., 5:] == MASKED)


def test_at_the_start_it_says_nothing_whatever_has_come():
    cfg, params, _ = model()
    out = apply(cfg, params, TOKENS, LENGTH, ALPHA)
    assert not np.any(out.logits[..., :5])
    np.testing.assert_allclose(np.exp(out.gap), 0.37, atol=0.02)
    other = apply(cfg, params, TOKENS, LENGTH, 1 - ALPHA)
    np.testing.assert_array_equal(out.gap, other.gap)


def test_what_comes_after_a_row_is_invisible():
    cfg, _, params = model()
    a = apply(cfg, params, TOKENS, LENGTH, ALPHA)
    b = apply(cfg, params, TOKENS.at[1, 3:].set(5), LENGTH, ALPHA)
    short = apply(cfg, params, TOKENS[:, :3], jnp.array([3, 3]), ALPHA)
    for x, y, z in ((a.gap, b.gap, short.gap), (a.logits, b.logits, short.logits)):
        np.testing.assert_array_equal(x[1, :3], y[1, :3])
        np.testing.assert_allclose(x[1, :3], z[1, :3], atol=1e-5)


def test_logits_of_chosen_slots():
    cfg, _, params = model()
    slots = jnp.array([[2, 6, 4], [1, 0, 0]])
    chosen = apply(cfg, params, TOKENS, LENGTH, ALPHA, slots)
    every = apply(cfg, params, TOKENS, LENGTH, ALPHA)
    np.testing.assert_allclose(
        chosen.logits, jnp.take_along_axis(every.logits, slots[..., None], axis=1), atol=1e-5
    )
    np.testing.assert_array_equal(chosen.gap, every.gap)


def test_remat_changes_nothing():
    cfg, _, params = model()
    slopes = [
        jax.jit(
            jax.grad(lambda p, c=c: FlexMDM(c).apply(p, TOKENS, LENGTH, ALPHA).gap[1, :3].sum())
        )(params)
        for c in (cfg, dataclasses.replace(cfg, remat="full"))
    ]
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(slopes))
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), *slopes)


def test_flops_count_the_kernels():
    cfg, params, _ = model()
    p = params["params"]
    per_token = sum(x.size for x in jax.tree.leaves(p) if x.ndim > 1)
    per_token -= sum(p[k]["kernel"].size for k in ("cond_in", "cond_out", "head_ada", "gap_ada"))
    per_token -= p["embedding"].size + p["blocks"]["ada"]["kernel"].size
    # Biases and gains of all layers have two dimensions.
    per_token -= sum(x.size for x in jax.tree.leaves(p["blocks"]) if x.ndim == 2)
    assert cfg.forward_flops(1, 0) == 2 * per_token
    assert cfg.forward_flops(0, 1) == 2 * 2 * 2 * 16


@pytest.mark.parametrize("changes", [dict(num_heads=3), dict(remat="some"), dict(attention="fast")])
def test_shapes_that_do_not_fit_are_refused(changes):
    with pytest.raises(ValueError, match="heads|remat|attention"):
        dataclasses.replace(TINY, **changes)

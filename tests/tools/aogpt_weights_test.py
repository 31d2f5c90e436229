"""Released checkpoints: round trip, and parity with the published forward pass written in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import erf

from aodiff.nn.aogpt import AOGPT, AOGPTConfig
from aodiff.partitioning import unbox
from aodiff.tools.aogpt_weights import from_reference, to_reference

CFG = AOGPTConfig(vocab_size=128, seq_len=5, num_layers=2, width=16, num_heads=2, cond_dim=8)


def random_list(cfg):
    """Reference-shaped weights, linear layers output-major."""
    rng = np.random.default_rng(0)
    d, n, v, c, hd = cfg.width, cfg.seq_len, cfg.vocab_size, cfg.cond_dim, cfg.head_dim
    linear = lambda o, i: [(o, i), (o,)]
    block = [(d,), *linear(3 * d, d), *linear(d, d), (hd,), (hd,), (d,)]
    block += [*linear(4 * d, d), *linear(d, 4 * d), *linear(6 * d, c)]
    shapes = [(v, d), (n + 1, d), (n, c), (1, d), *block * cfg.num_layers]
    shapes += [(d,), *linear(2 * d, c), *linear(v, d)]
    return [rng.normal(size=s).astype(np.float32) * 0.3 for s in shapes]


def published_forward(weights, tokens, order, heads):
    """One sequence through the released network with its n + 1 slots; logits (n + 1, V)."""
    take = iter(weights)
    tok, pos, tpos, none = (next(take) for _ in range(4))
    d, n = tok.shape[1], len(order)
    rms = lambda x, g: x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-5) * g
    linear = lambda x, w, b: x @ w.T + b
    x = np.concatenate([none + pos[0], tok[tokens[order]] + pos[order + 1]])
    cond = np.concatenate([tpos[order], np.zeros((1, tpos.shape[1]), np.float32)])
    cond = cond / (1 + np.exp(-cond))
    causal = np.tril(np.ones((n + 1, n + 1), bool))
    for _ in range((len(weights) - 9) // 14):
        ln1, wq, bq, wo, bo, qn, kn, ln2, wf, bf, wp, bp, wa, ba = (next(take) for _ in range(14))
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = np.split(linear(cond, wa, ba), 6, -1)
        h = rms(x, ln1) * (1 + scale_a) + shift_a
        q, k, v = (
            np.moveaxis(t.reshape(n + 1, heads, -1), 1, 0)
            for t in np.split(linear(h, wq, bq), 3, -1)
        )
        q, k = rms(q, qn), rms(k, kn)
        s = q @ np.swapaxes(k, 1, 2) / np.sqrt(d // heads)
        s = np.exp(np.where(causal, s, -np.inf))
        h = np.moveaxis(s / s.sum(-1, keepdims=True) @ v, 0, 1).reshape(n + 1, d)
        x = x + gate_a * linear(h, wo, bo)
        h = linear(rms(x, ln2) * (1 + scale_m) + shift_m, wf, bf)
        x = x + gate_m * linear(h * (1 + erf(h / np.sqrt(2))) / 2, wp, bp)
    lnf, wa, ba, wh, bh = take
    shift, scale = np.split(linear(cond, wa, ba), 2, -1)
    return linear(rms(x, lnf) * (1 + scale) + shift, wh, bh)


def test_round_trip_and_same_tree_as_the_model():
    arrays = random_list(CFG)
    params = from_reference(arrays, CFG)
    for a, b in zip(arrays, to_reference(params, CFG), strict=True):
        np.testing.assert_array_equal(a, b)
    ids = jnp.zeros((1, CFG.seq_len), jnp.int32)
    own = unbox(jax.eval_shape(AOGPT(CFG).init, jax.random.key(0), ids, ids))
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(lambda x: x.shape, own)


def test_logits_equal_the_published_forward_pass_and_its_last_slot_is_idle():
    arrays = random_list(CFG)
    rng = np.random.default_rng(1)
    order = np.stack([rng.permutation(CFG.seq_len) for _ in range(3)])
    tokens = rng.integers(0, CFG.vocab_size, order.shape)
    want = np.stack(
        [published_forward(arrays, tokens[i], order[i], CFG.num_heads) for i in range(3)]
    )
    params = from_reference(arrays, CFG)
    got = AOGPT(CFG).apply(params, jnp.asarray(tokens, jnp.int32), jnp.asarray(order, jnp.int32))
    np.testing.assert_allclose(got, want[:, :-1], atol=2e-4, rtol=2e-4)
    assert np.abs(want).max() > 1


def test_wrong_depth_or_width_is_refused():
    arrays = random_list(CFG)
    with pytest.raises(ValueError, match="num_layers"):
        from_reference(arrays[:-1], CFG)
    with pytest.raises(ValueError, match="token table"):
        from_reference([arrays[0][:, :8], *arrays[1:]], CFG)

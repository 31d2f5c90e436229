"""Any-order decoders reduce to plain GPTs: a second forward pass in numpy, float64, one row.

Invariants 4 and 5 of aogpt.md section 14, the capture mapping of ordergpt.md section 18.5 on a real
decoder, and the weight-decay mask of every decoder (invariant 23).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import erf

from aodiff import optim
from aodiff.core import likelihood
from aodiff.nn.aogpt import AOGPT, INJECTIONS, AOGPTConfig
from aodiff.partitioning import unbox
from pallas_kernels import causal_streams

N, V = 5, 4
BASE = AOGPTConfig(vocab_size=V, seq_len=N, num_layers=2, width=8, num_heads=2, cond_dim=4)
TOKENS = np.array([3, 0, 2, 2, 1])
L2R, OTHER = np.arange(N), np.array([3, 0, 4, 1, 2])
FREQUENCY = 10_000.0 ** -np.array([0.0, 0.5])  # heads of 4


@functools.cache
def model(**changes):
    """(module, params far from their initial scale) of one configuration."""
    module = AOGPT(dataclasses.replace(BASE, **changes))
    shapes = unbox(jax.eval_shape(module.init, jax.random.key(0), *[jnp.zeros((1, N), int)] * 2))
    rng = np.random.default_rng(0)
    return module, jax.tree.map(lambda x: rng.normal(0, 0.5, x.shape).astype(np.float32), shapes)


def rms(x, gain=1.0):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-5) * gain


def turn(x, position):
    """RoPE: rotates the pairs (i, i + 2) of heads x (..., 4) at `position` (...)."""
    angle = np.asarray(position)[..., None] * FREQUENCY
    a, b = x[..., :2], x[..., 2:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def gpt(params, x, rope=False, qk_norm=True):
    """A plain pre-norm GPT on inputs x (n, d): logits (n, V) and attention (layers, H, n, n)."""
    layers, maps = params["blocks"], []
    for i in range(BASE.num_layers):
        w = jax.tree.map(lambda a, i=i: np.asarray(a[i], np.float64), layers)
        qkv = np.einsum("sd,dthk->thsk", rms(x, w["ln1"]["scale"]), w["qkv_kernel"])
        q, k, v = qkv + w["qkv_bias"].reshape(3, 2, 1, 4)
        if qk_norm:
            q, k = rms(q, w["q_norm"]["scale"]), rms(k, w["k_norm"]["scale"])
        if rope:
            q, k = turn(q, np.arange(N)), turn(k, np.arange(N))
        score = np.exp(q @ np.swapaxes(k, 1, 2) / 2) * np.tri(N)
        maps.append(score / score.sum(-1, keepdims=True))
        x = x + np.einsum("hsk,hkd->sd", maps[-1] @ v, w["out_kernel"]) + w["out_bias"]
        h = rms(x, w["ln2"]["scale"]) @ w["fc"]["kernel"] + w["fc"]["bias"]
        h = h * (1 + erf(h / np.sqrt(2))) / 2
        x = x + h @ w["proj"]["kernel"] + w["proj"]["bias"]
    z = rms(x, params["norm"]["scale"])
    return (z @ params["head_kernel"] + params["head_bias"])[:, :V], np.stack(maps)


def plain_inputs(params, order):
    """BOS, then the ids in generation order, each with the position row it belongs to."""
    before = order[:-1]
    x = np.concatenate([params["none"], params["tok"][TOKENS[before]]]).astype(np.float64)
    return x + params["pos"][np.concatenate([[0], before + 1])]


@pytest.fixture(scope="module")
def reduced():
    """AO-GPT without conditioning: `ada` kernels 0, gate biases 1, other modulation biases 0."""
    module, params = model()
    params = jax.tree.map(np.copy, params["params"])
    for ada in (params["ada"], params["blocks"]["ada"]):
        ada["kernel"][:], ada["bias"][:] = 0, 0
    params["blocks"]["ada"]["bias"].reshape(2, 6, -1)[:, [2, 5]] = 1
    capture = jax.jit(functools.partial(module.apply, capture=True))
    tokens = jnp.tile(TOKENS[None], (2, 1))
    logits, evidence = capture({"params": params}, tokens, jnp.asarray(np.stack([L2R, OTHER])))
    return params, np.asarray(logits)[..., :V], np.asarray(evidence)


def test_without_conditioning_aogpt_is_a_gpt_on_the_permuted_sequence(reduced):
    params, logits, _ = reduced
    for got, order in zip(logits, (L2R, OTHER), strict=True):
        want, _ = gpt(params, plain_inputs(params, order))
        np.testing.assert_allclose(got, want, atol=2e-5)
        targets = TOKENS[order]
        logp = want - np.log(np.exp(want).sum(-1, keepdims=True))
        mask = jnp.ones((1, N), bool)
        nll = likelihood.sequence_nll(
            lambda *_, got=got: jnp.asarray(got)[None],
            jnp.asarray(TOKENS)[None],
            jnp.asarray(order)[None],
            mask,
        )
        np.testing.assert_allclose(nll[0], -logp[np.arange(N), targets].sum(), rtol=1e-5)
    assert np.abs(logits[0] - logits[1]).max() > 0.1  # the order matters


def test_captured_evidence_is_the_attention_of_the_plain_gpt(reduced):
    """Query slot s predicts order[s], key slot r + 1 holds order[r]; r = s - 1 is left out."""
    params, _, evidence = reduced
    want = np.zeros_like(evidence)
    for order in (L2R, OTHER):
        attention = gpt(params, plain_inputs(params, order))[1].mean(1)
        for s in range(N):
            for r in range(s - 1):
                want[:, order[s], order[r]] += attention[:, s, r + 1] - 1 / (s + 1)
    np.testing.assert_allclose(evidence, want, atol=1e-5)
    assert np.abs(want).max() > 0.01


@pytest.mark.parametrize("qk_norm", [False, True])
def test_decoupled_rope_left_to_right_is_rope_with_a_rotated_query_projection(qk_norm):
    """With QK-norm the rotation passes through the norm where its gains are equal."""
    module, params = model(injection="decoupled_rope", qk_norm=qk_norm)
    params = jax.tree.map(np.copy, params["params"])
    blocks = params["blocks"]
    if qk_norm:
        blocks["q_norm"]["scale"][:] = 1
    ids, order = jnp.asarray(TOKENS)[None], jnp.asarray(L2R)[None]
    got = jax.jit(module.apply)({"params": params}, ids, order)[0, :, :V]
    x = np.concatenate([params["none"], params["tok"][TOKENS[:-1]]]).astype(np.float64)
    assert np.abs(got - gpt(params, x, True, qk_norm)[0]).max() > 1e-2  # not without R(1)
    blocks["qkv_kernel"][:, :, 0] = turn(blocks["qkv_kernel"][:, :, 0], 1)
    bias = blocks["qkv_bias"].reshape(2, 3, 2, 4)
    bias[:, 0] = turn(bias[:, 0], 1)
    np.testing.assert_allclose(got, gpt(params, x, True, qk_norm)[0], atol=2e-5)


@pytest.mark.parametrize("injection", ["decoupled_rope", "two_stream"])
def test_logits_do_not_change_when_all_positions_move(injection):
    module, params = model(injection=injection)
    params = jax.tree.map(jnp.asarray, params)
    order = jnp.asarray(OTHER)[None]
    own = jnp.concatenate([jnp.array([[-1]]), order[:, :-1]], axis=1)
    token = jnp.asarray(TOKENS)[jnp.maximum(own, 0)]

    def forward(m, keys_by, queries_by):
        """The body of AOGPT.__call__ with positions of their own for keys and for queries."""
        two = injection == "two_stream"
        x, at = m.embed(token, own, order), order + queries_by
        if two:
            x = jnp.concatenate([x, m.queries(order)], axis=1)
            at = jnp.concatenate([own + queries_by, at], axis=1)
        rows = m.rows(own + keys_by, at, causal_streams(N, strict=(False,) * (1 + two)))
        x, _ = m.blocks(x, rows.replace(streams=1 + two, keys=N), None)
        return m.logits(x[:, -N:], order)[0, :, :V]

    apply = jax.jit(lambda k, q: module.apply(params, k, q, method=forward))
    base = apply(0, 0)
    whole = jax.jit(module.apply)(params, jnp.asarray(TOKENS)[None], order)[0, :, :V]
    np.testing.assert_allclose(base, whole, atol=1e-5)
    np.testing.assert_allclose(apply(7, 7), base, atol=2e-5)
    assert np.abs(apply(7, 0) - base).max() > 1e-2


@pytest.mark.parametrize("injection", INJECTIONS)
def test_weight_decay_of_a_decoder_spares_biases_and_gains_only(injection):
    module = AOGPT(dataclasses.replace(BASE, injection=injection, norm="layer"))
    boxed = jax.eval_shape(module.init, jax.random.key(0), *[jnp.zeros((1, N), int)] * 2)
    for path, decayed in jax.tree_util.tree_leaves_with_path(optim.decay_mask(boxed)):
        assert decayed != path[-1].key.endswith(("bias", "scale")), path

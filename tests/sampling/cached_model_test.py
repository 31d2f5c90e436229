"""Cached decoding of the real model against its own full forward, for every target injection."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from aodiff.nn.aogpt import AOGPT, INJECTIONS, ROTARY, AOGPTConfig
from aodiff.sampling.anyorder import feed, generate
from aodiff.sampling.verify import verify_cache

N, V = 6, 5
VARIANTS = [(name, 1) for name in INJECTIONS] + [(name, 2) for name in ROTARY]


def build(n=N, vocab=V, seed=0, **kwargs):
    """A model with weights far from their initial values, so that every path matters."""
    sizes = dict(num_layers=2, width=8, num_heads=2, cond_dim=4)
    model = AOGPT(AOGPTConfig(vocab_size=vocab, seq_len=n, **(sizes | kwargs)))
    rows = jnp.arange(n)[None]
    shapes = jax.eval_shape(model.init, jax.random.key(0), rows, rows)
    rng = np.random.default_rng(seed)
    noise = lambda s: jnp.asarray(rng.normal(0, 0.4, s.shape), jnp.float32)  # noqa: E731
    return model, jax.tree.map(noise, shapes)


@functools.cache
def case(injection, num_sinks=1, unit_sizes=None):
    """Model, variables and its jitted full forward, compiled once per variant."""
    model, params = build(injection=injection, num_sinks=num_sinks, unit_sizes=unit_sizes)
    return model, params, jax.jit(model.apply)


def data(batch=2, seed=0):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, V, (batch, N))
    order = np.stack([rng.permutation(N) for _ in range(batch)])
    return jnp.asarray(tokens, jnp.int32), jnp.asarray(order, jnp.int32)


@pytest.mark.parametrize("injection,num_sinks", VARIANTS)
def test_cache_equals_full_forward(injection, num_sinks):
    model, params, _ = case(injection, num_sinks)
    found = verify_cache(model, params, *data(), steps=3)
    assert len(found) == 5 and max(found.values()) < 2e-5, found


def test_verify_cache_can_fail():
    """A cache that holds the previous target's keys is reported, in logits and in the cache."""
    model, params, _ = case("adaln", 1)

    class Late:
        init_cache = staticmethod(model.init_cache)

        def apply(self, params, *args, **kwargs):
            if kwargs:  # decode(token, own, target, ...): the first content row forgets its target
                args = (*args[:2], args[2].at[:, 0].set(0), *args[3:])
            return model.apply(params, *args, **kwargs)

    found = verify_cache(Late(), params, *data(), steps=N)
    assert found["sequential_logits"] > 1e-2 and found["sequential_cache"] > 1e-2


@pytest.mark.parametrize("injection,num_sinks", VARIANTS)
def test_parallel_step_gives_the_trained_conditionals(injection, num_sinks):
    """Each probe equals the full forward of the order in which its target comes next.

    Prompts of 2 and 1 tokens, then two content slots with three probes each. A probe's value
    therefore depends on the context and its own target alone, not on its fellow probes.
    """
    model, params, full = case(injection, num_sinks)
    tokens, order = data(seed=3)
    first = jnp.array([3, 2])

    def step(tokens, order):
        cache = model.init_cache(2, N + 1)
        _, cache = feed(model, params, tokens, order, cache, 0 * first, first, 3, 1)
        return feed(model, params, tokens, order, cache, first, 0 * first + 2, 2, 2)[0]

    logits = jax.jit(step)(tokens, order)
    for row, probe in itertools.product(range(2), range(2)):
        slot = int(first[row]) + 1  # the slot that holds the last context token
        swapped = np.array(order[row])
        swapped[[slot, slot + probe]] = swapped[[slot + probe, slot]]
        want = full(params, tokens, order.at[row].set(swapped))[row, slot]
        np.testing.assert_allclose(logits[row, probe], want, atol=2e-5)


@pytest.mark.parametrize(
    "variant", [("adaln",), ("two_stream", 2), ("adaln", 1, (2, 5, 3, 1, 4, 2))]
)
def test_greedy_generation_equals_greedy_full_forwards(variant):
    """Prompts of 0 and 3 tokens at scattered positions in one batch; the last variant has units."""
    model, params, full = case(*variant)
    tokens, order = data(seed=1)
    tokens = jnp.minimum(tokens, jnp.array(model.cfg.unit_sizes or [V] * N)[None] - 1)
    given = jnp.array([[False] * N, [True, False, False, True, False, True]])
    keys = jax.random.split(jax.random.key(0), 2)
    found = generate(model, params, keys, tokens, given, order, steps=N, temperature=0.0)
    canvas, asked = np.where(given, tokens, 0), np.array(given)
    realised = np.array([sorted(o, key=lambda p: not g[p]) for o, g in zip(order, given)])  # noqa: B905
    for slot in range(N):
        best = np.asarray(full(params, canvas, realised))[:, slot].argmax(-1)
        for row in range(2):
            position = realised[row, slot]
            if not asked[row, position]:
                canvas[row, position] = best[row]
                assert found.step[row, position] == slot - asked[row].sum()
    np.testing.assert_array_equal(found.tokens, canvas)


@pytest.fixture(scope="module")
def enumerated():
    """A model over 3^3 sequences and its exact joint under the order (2, 0, 1)."""
    model, params = build(3, 3, seed=4)
    sequences = jnp.array(list(itertools.product(range(3), repeat=3)), jnp.int32)
    order = jnp.array([2, 0, 1], jnp.int32)
    rows = jnp.broadcast_to(order[None], sequences.shape)
    logp = jax.nn.log_softmax(jax.jit(model.apply)(params, sequences, rows))
    picked = jnp.take_along_axis(logp, sequences[:, order][..., None], axis=2)
    return model, params, order, np.exp(np.asarray(picked.sum((1, 2)), np.float64))


def histogram(tokens):
    return np.bincount(np.asarray(tokens) @ [9, 3, 1], minlength=27)


def draw(enumerated, steps, num=8000, given=(False,) * 3, seed=0):
    model, params, order, _ = enumerated
    keys = jax.random.split(jax.random.key(seed), num)
    tokens = jnp.full((num, 3), 1, jnp.int32)
    given, order = (jnp.broadcast_to(jnp.asarray(x)[None], (num, 3)) for x in (given, order))
    return generate(model, params, keys, tokens, given, order, steps=steps).tokens


def test_samples_match_the_enumerated_joint(enumerated):
    joint = enumerated[-1]
    assert joint.sum() == pytest.approx(1, abs=1e-5)  # normalised over all 27 sequences
    counts = histogram(draw(enumerated, steps=3))
    assert stats.chisquare(counts, joint / joint.sum() * counts.sum()).pvalue > 0.01
    grouped = histogram(draw(enumerated, steps=1))  # all three tokens independent
    assert stats.chisquare(grouped, joint / joint.sum() * grouped.sum()).pvalue < 1e-6


def test_infilling_matches_the_enumerated_conditional(enumerated):
    """Position 2, first in the order, given as 1: the rest follows p(x_0, x_1 | x_2 = 1)."""
    joint = enumerated[-1] * (np.arange(27) % 3 == 1)
    counts = histogram(draw(enumerated, steps=3, given=(False, False, True)))
    assert counts[joint == 0].sum() == 0
    expected = joint[joint > 0] / joint.sum() * counts.sum()
    assert stats.chisquare(counts[joint > 0], expected).pvalue > 0.01

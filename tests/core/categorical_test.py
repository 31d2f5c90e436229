"""Token draws: marginals by chi-square, the nucleus fixture, and the range of the noise."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from aodiff.core import categorical

PROBS = np.array([0.5, 0.3, 0.15, 0.05])


def draw(logits, num=20_000, temperature=1.0, top_p=1.0, seed=0):
    keys = jax.random.split(jax.random.key(seed), num)
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32)[None], (num, len(logits)))
    fn = jax.jit(lambda k, x: categorical.sample(k, x, temperature, top_p))
    return np.bincount(np.asarray(fn(keys, rows)), minlength=len(logits))


def chi_square(counts, probs):
    expected = counts.sum() * np.asarray(probs) / np.sum(probs)
    assert np.all(counts[expected == 0] == 0)
    return stats.chisquare(counts[expected > 0], expected[expected > 0]).pvalue


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_marginals(temperature):
    counts = draw(np.log(PROBS), temperature=temperature)
    assert chi_square(counts, PROBS ** (1 / temperature)) > 0.01
    assert chi_square(counts, PROBS ** (1.3 / temperature)) < 1e-6  # the test can fail


def test_nucleus_marginals_after_temperature():
    # At T=0.5 the mass is 0.685, 0.247, 0.062, 0.007: 0.9 keeps two; at T=1 it would keep three.
    counts = draw(np.log(PROBS), temperature=0.5, top_p=0.9)
    assert chi_square(counts, [0.25, 0.09, 0, 0]) > 0.01


@pytest.mark.parametrize(
    "top_p,kept", [(0.7, {0, 1}), (0.49, {0}), (0.51, {0, 1}), (0.9, {0, 1, 2}), (0.01, {0})]
)
def test_nucleus_keeps_the_token_that_crosses(top_p, kept):
    shuffle = np.array([2, 0, 3, 1])  # the sort must be undone
    logits = jnp.log(jnp.asarray(PROBS, jnp.float32))[shuffle]
    found = categorical.nucleus(logits[None], top_p)[0]
    alive = np.flatnonzero(np.isfinite(np.asarray(found)))
    assert {int(shuffle[i]) for i in alive} == kept
    np.testing.assert_array_equal(found[alive], logits[alive])


def test_nucleus_breaks_ties_by_id():
    found = categorical.nucleus(jnp.zeros((1, 4)), 0.3)
    np.testing.assert_array_equal(np.isfinite(np.asarray(found[0])), [True, True, False, False])


def test_nucleus_bypassed_at_one():
    logits = jax.random.normal(jax.random.key(0), (2, 50_304)) * 8
    np.testing.assert_array_equal(categorical.nucleus(logits, 1.0), logits)


def test_padded_ids_are_never_drawn():
    logits = np.array([0.0, -1e9, 0.0, -np.inf, -1e30])
    for temperature, top_p in [(1.0, 1.0), (1e9, 1.0), (1.0, 0.99)]:
        counts = draw(logits, num=4000, temperature=temperature, top_p=top_p)
        assert counts[[1, 3, 4]].sum() == 0 and min(counts[0], counts[2]) > 1500
    assert draw([-5.0, -1e9], num=8, temperature=0)[0] == 8


def test_zero_temperature_is_greedy():
    assert draw(np.log(PROBS[::-1]), num=64, temperature=0)[3] == 64


def test_noise_has_full_resolution():
    """Above 11 nats the default noise has only e^-11 * 2^23 = 140 values, so draws collide."""

    def distinct(noise):
        tail = np.asarray(noise).ravel()
        tail = tail[tail > 11]
        return len(np.unique(tail)) / len(tail)

    size = 1 << 23
    assert distinct(categorical._gumbel(jax.random.split(jax.random.key(3), 1), (1, size))) > 0.98
    assert distinct(jax.random.gumbel(jax.random.key(4), (size,), mode="low")) < 0.8


def test_draw_depends_on_its_own_key_only():
    def keys():
        return jax.random.split(jax.random.key(1), 6)

    logits = jax.random.normal(jax.random.key(2), (6, 11))
    full = categorical.sample(keys(), logits, 1.0, 0.9)
    part = categorical.sample(keys()[2:4], logits[2:4], 1.0, 0.9)
    np.testing.assert_array_equal(full[2:4], part)
    grid = categorical.sample(keys().reshape(2, 3), logits.reshape(2, 3, 11), 1.0, 0.9)
    np.testing.assert_array_equal(full, grid.reshape(-1))


def test_bad_arguments_say_what_is_allowed():
    keys = jax.random.split(jax.random.key(0), 1)
    with pytest.raises(ValueError, match="temperature=-1"):
        categorical.sample(keys, jnp.zeros((1, 3)), -1.0, 1.0)
    with pytest.raises(ValueError, match="top_p=0"):
        categorical.nucleus(jnp.zeros((1, 3)), 0.0)


def alive(logits):
    return np.flatnonzero(np.isfinite(np.asarray(logits))).tolist()


def test_the_top_k_come_after_the_nucleus_and_ties_are_kept():
    logits = jnp.log(jnp.asarray([0.4, 0.2, 0.2, 0.15, 0.05], jnp.float32))
    for top_p, top_k, kept in ((1.0, 2, [0, 1, 2]), (0.5, 2, [0, 1]), (0.5, 1, [0]), (1.0, 9, 5)):
        found = categorical.shape(logits, 1.0, top_p, top_k)
        assert alive(found) == (list(range(5)) if kept == 5 else kept)
    greedy = categorical.shape(logits, 0.0, 1.0, 1)  # filters bear on scores even then
    assert alive(greedy) == [0] and greedy[0] == logits[0]
    with pytest.raises(ValueError, match="top_k=-1"):
        categorical.shape(logits, 1.0, 1.0, -1)


def test_gumbel_top_k_is_drawing_without_replacement():
    """Ordered pairs of four, at a temperature, against the closed form and Plackett-Luce."""
    scores, temperature, num = jnp.asarray([0.2, 1.0, -0.5, 0.0]), 0.6, 20_000
    keys = jax.random.split(jax.random.key(0), (num, 4))
    noisy = categorical.perturb(keys, jnp.broadcast_to(scores[None], (num, 4)), temperature)
    first, second = np.asarray(jnp.argsort(-noisy, axis=1))[:, :2].T
    weight = np.exp(np.asarray(scores, np.float64) / temperature)
    pairs = list(itertools.permutations(range(4), 2))
    law = [weight[a] / weight.sum() * weight[b] / (weight.sum() - weight[a]) for a, b in pairs]
    counts = [np.sum((first == a) & (second == b)) for a, b in pairs]
    assert chi_square(np.array(counts), law) > 0.01
    batch = jnp.broadcast_to((scores / temperature)[None], (len(pairs), 4))
    found = np.exp(categorical.plackett_luce(batch, jnp.asarray(pairs)))
    np.testing.assert_allclose(found, law, rtol=1e-5)
    assert found.sum() == pytest.approx(1.0, abs=1e-5)


def test_what_cannot_be_drawn_has_no_place_in_plackett_luce():
    scores = jnp.asarray([0.0, -jnp.inf, 1.0])
    assert categorical.plackett_luce(scores, jnp.array([1, 0])) == -jnp.inf
    assert float(categorical.plackett_luce(scores, jnp.array([2, 0]))) == pytest.approx(
        1 - np.log(1 + np.e), abs=1e-6
    )

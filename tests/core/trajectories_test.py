import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aodiff import rng
from aodiff.core import trajectories
from aodiff.nn.reveal_policy import log_policy
from tests.toy_denoiser import BOUND, ENTROPY, MASK, ROWS, N, ToyDenoiser, joint
from tests.toy_policy import GOLDEN, STATES, divergence, l_sas, optimal, policy, table

ORDERS = np.array(list(itertools.permutations(range(N))))


def follow(strength, choose, rows, keys=None):
    rows = jnp.asarray(rows, jnp.int32)
    blank = jnp.zeros(rows.shape, bool)
    keys = rng.example_keys(jax.random.key(0), jnp.arange(len(rows))) if keys is None else keys
    apply = ToyDenoiser(strength).apply
    return trajectories.follow(
        lambda shown: apply({}, shown), choose, rows, ~blank, blank, keys, steps=N, mask_id=MASK
    )


def in_orders(strength):
    """Every row in every order: rewards (27, 6, T)."""
    rows, orders = np.repeat(ROWS, 6, axis=0), np.tile(ORDERS, (27, 1))
    rank = jnp.asarray(np.argsort(orders, axis=1))
    choose = lambda logits, hidden, keys: (trajectories.best(-rank, hidden), {})
    return np.asarray(follow(strength, choose, rows).reward).T.reshape(27, 6, N)


@pytest.mark.parametrize("name", GOLDEN)
def test_policies_of_the_toy_have_their_known_numbers(name):
    kl, loss = GOLDEN[name]
    p = policy(name)
    assert abs(divergence(p, 1.0) - kl) < 1e-6 and abs(l_sas(p, 1.0) - loss) < 1e-6
    assert abs(divergence(p, 0.0)) < 1e-6 and abs(l_sas(p, 0.0) - ENTROPY) < 1e-6


def test_the_bound_is_above_the_divergence_and_tight_for_deterministic_orders():
    """decoding.md 10.2 c and d, and that no policy beats dynamic programming (i)."""
    draws = np.random.default_rng(0)
    for _ in range(100):
        strength = draws.uniform(0, 2)
        scores = dict(zip(STATES, draws.normal(0, 3, (len(STATES), N)), strict=True))
        p = table(scores.get)
        gap = l_sas(p, strength) - ENTROPY
        assert divergence(p, strength) <= gap + 1e-9
        assert l_sas(optimal(strength), strength) <= l_sas(p, strength) + 1e-9
    for name in ("l2r", "confidence", "optimal"):
        assert abs(divergence(policy(name), 1.0) - (GOLDEN[name][1] - ENTROPY)) < 1e-6


@pytest.mark.parametrize("name", ["l2r", "r2l", "confidence", "optimal", "worst"])
def test_rewards_telescope_to_the_likelihood_of_an_adaptive_order(name):
    scores = np.zeros((4, 4, 4, N))
    for state, chance in policy(name).items():
        scores[state] = chance
    scores = jnp.asarray(scores)
    apply = ToyDenoiser(1.0).apply

    def choose(logits, hidden, keys):
        far = jnp.abs(apply({}, jnp.asarray(STATES))[None] - logits[:, None]).max((2, 3))
        state = jnp.asarray(STATES)[jnp.argmin(far, axis=1)]
        return trajectories.best(scores[state[:, 0], state[:, 1], state[:, 2]], hidden), {}

    path = follow(1.0, choose, ROWS)
    assert abs(-joint() @ np.asarray(path.reward.sum(0)) - GOLDEN[name][1]) < 1e-5
    shown = np.asarray(path.hidden)
    assert np.array_equal(shown.sum(2), np.repeat([[3], [2], [1]], 27, axis=1))
    took = np.take_along_axis(shown, np.asarray(path.action)[..., None], axis=2)
    assert took.all()


@pytest.mark.parametrize("strength", BOUND)
def test_the_uniform_policy_has_the_masked_bound(strength):
    reward = in_orders(strength).sum(2).mean(1)
    assert abs(-joint() @ reward - BOUND[strength]) < 2e-6


def test_an_exact_denoiser_makes_all_orders_equal_and_teaches_nothing():
    reward = in_orders(0.0)
    total = reward.sum(2)
    assert np.ptp(total, axis=1).max() < 1e-5
    assert abs(-joint() @ total.mean(1) - ENTROPY) < 1e-5
    for name in ("batch_rms", "group_std"):
        found = trajectories.ADVANTAGES[name](jnp.asarray(reward), jnp.ones(reward.shape, bool))
        assert not np.any(found), name
    # Why rewards are not discounted: the orders would differ although none is better.
    discounted = joint() @ (reward @ 0.9 ** np.arange(N))
    assert np.ptp(discounted) > 1e-2


def test_the_gradient_of_the_surrogate_is_that_of_the_bound():
    """All rows and orders, weighted by their probabilities, against autodiff through the tree."""
    reward = in_orders(1.0).sum(2)
    scores = jnp.asarray(np.random.default_rng(0).normal(size=(len(STATES), N)))
    steps = []  # of every row and order: state, hidden, action
    for x, order in itertools.product(ROWS, ORDERS):
        state = np.full(N, MASK)
        for i in order:
            steps.append((STATES.index(tuple(state)), state == MASK, i))
            state[i] = x[i]
    where, masked, action = (jnp.asarray(np.array(v)) for v in zip(*steps, strict=True))

    def logv(scores):
        found = log_policy(scores[where], masked)
        return jnp.take_along_axis(found, action[:, None], axis=1)[:, 0].reshape(27, 6, N)

    def exact(scores):
        chance = jnp.exp(logv(scores).sum(2))
        return -jnp.sum(jnp.asarray(joint())[:, None] * chance * reward)

    def surrogate(scores):
        old = jax.lax.stop_gradient(logv(scores))
        weight = jnp.asarray(joint())[:, None] * jnp.exp(old.sum(2))
        advantage = jnp.broadcast_to(reward[..., None], (27, 6, N))
        loss, _ = trajectories.clipped_surrogate(logv(scores), old, advantage, 0.2)
        return jnp.sum(weight[..., None] * loss)

    a, b = jax.grad(exact)(scores), jax.grad(surrogate)(scores)
    assert float(jnp.abs(a).max()) > 1e-2
    np.testing.assert_allclose(a, b, atol=1e-6)


def test_advantages_are_centred_and_scaled_by_one_number():
    draws = np.random.default_rng(0)
    reward = jnp.asarray(draws.normal(size=(5, 4, 3)) * np.arange(1, 6)[:, None, None])
    active = jnp.ones(reward.shape, bool).at[:, :, 2].set(False)
    reward = jnp.where(active, reward, 0.0)
    total = np.asarray(reward.sum(2))
    centred = total - total.mean(1, keepdims=True)
    found = {name: np.asarray(f(reward, active)) for name, f in trajectories.ADVANTAGES.items()}
    rms, std = centred / np.sqrt((centred**2).mean()), centred / centred.std(1, keepdims=True)
    np.testing.assert_allclose(found["batch_rms"][:, :, 0], rms, rtol=1e-3)
    np.testing.assert_allclose(found["group_std"][:, :, 1], std, rtol=1e-3)
    to_go = np.stack([total, np.asarray(reward)[:, :, 1]], axis=2)
    to_go = to_go - to_go.mean(1, keepdims=True)
    expected = to_go / np.sqrt((to_go**2).mean())
    np.testing.assert_allclose(found["reward_to_go"][:, :, :2], expected, rtol=1e-3)
    assert all(not np.any(x[:, :, 2]) for x in found.values())


def test_the_clip_bounds_what_an_advantage_can_gain():
    logv = jnp.log(jnp.array([1.5, 0.5, 1.5, 0.5, 1.0]))
    advantage = jnp.array([1.0, 1.0, -1.0, -1.0, 2.0])
    loss, clipped = trajectories.clipped_surrogate(logv, jnp.zeros(5), advantage, 0.2)
    np.testing.assert_allclose(loss, [-1.2, -0.5, 1.5, 0.8, -2.0], rtol=1e-6)
    assert clipped.tolist() == [True, False, False, True, False]


def test_a_block_takes_the_whole_probability():
    """Semi-autoregressive: outside exactly 0, inside renormalised, as a policy of its own."""
    scores = jnp.asarray(np.random.default_rng(0).normal(size=(3, 8)))
    hidden = jnp.ones((3, 8), bool).at[:, 2].set(False)
    block = jnp.broadcast_to(jnp.arange(8)[None] // 4 == 0, hidden.shape)
    inside = np.asarray(jnp.exp(log_policy(scores, hidden & block)))
    whole = np.asarray(jnp.exp(log_policy(scores, hidden)))
    keep = np.asarray(hidden & block)
    assert np.all(inside[~keep] == 0) and np.allclose(inside.sum(1), 1)
    np.testing.assert_allclose(inside, whole * keep / (whole * keep).sum(1, keepdims=True), 1e-5)

"""Likelihood estimators against enumeration on a joint of V^n sequences."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aodiff.core import likelihood

V, N = 2, 4
SEQUENCES = np.array(list(itertools.product(range(V), repeat=N)), np.int32)
ORDERS = np.array(list(itertools.permutations(range(N))), np.int32)
JOINT = np.random.default_rng(0).dirichlet(np.full(V**N, 0.3)).astype(np.float32)
MASK = jnp.ones(SEQUENCES.shape, bool)


def invariant(tokens, order):
    """The exact conditionals of JOINT: logits that do not depend on the order of the context."""
    rank = likelihood.inverse(order)
    seen = rank[:, None, :] < jnp.arange(N)[None, :, None]
    differs = SEQUENCES[None] != tokens[:, None, :]
    fits = ~jnp.any(seen[:, :, None, :] & differs[:, None], axis=-1)
    value = jnp.asarray(SEQUENCES).T[order]  # (B, n, V^n)
    hit = value[..., None] == jnp.arange(V)[None, None, None, :]
    weight = jnp.where(fits, JOINT[None, None, :], 0.0)
    return jnp.log(jnp.einsum("bsm,bsmv->bsv", weight, hit.astype(jnp.float32)) + 1e-30)


def dependent(tokens, order):
    """A causal decoder whose conditionals depend on the order in which the context was read."""
    table, out = jax.random.normal(jax.random.key(1), (2, N, V, 8))
    step = jnp.arange(N)
    lag = step[:, None] - step[None, :]
    decay = jnp.where(lag > 0, 0.5 ** jnp.maximum(lag, 0), 0.0)
    held = table[order, jnp.take_along_axis(tokens, order, axis=1)]
    state = jnp.tanh(jnp.einsum("st,btd->bsd", decay, held) + 0.3)
    return jnp.einsum("bsd,bsvd->bsv", state, out[order])


def nll(apply, order):
    rows = jnp.broadcast_to(jnp.asarray(order)[None], SEQUENCES.shape)
    return np.asarray(_nll(apply, rows))


@functools.partial(jax.jit, static_argnums=0)
def _nll(apply, rows):
    return likelihood.sequence_nll(apply, jnp.asarray(SEQUENCES), rows, MASK)


def keys(seed, rows=V**N):
    return jax.random.split(jax.random.key(seed), rows)


@pytest.mark.parametrize("apply", [invariant, dependent])
def test_probabilities_sum_to_one_under_every_order(apply):
    totals = [np.exp(-nll(apply, order)).sum() for order in ORDERS[::5]]
    np.testing.assert_allclose(totals, 1.0, atol=2e-5)


def test_consistent_conditionals_give_the_joint_under_every_order():
    for order in ORDERS[::7]:
        np.testing.assert_allclose(np.exp(-nll(invariant, order)), JOINT, atol=1e-6)


def test_marginal_over_all_orders_is_normalised_and_below_the_mean():
    orders = jnp.broadcast_to(jnp.asarray(ORDERS)[:, None], (len(ORDERS), *SEQUENCES.shape))
    bound = likelihood.order_marginal_nll(dependent, jnp.asarray(SEQUENCES), orders, MASK)
    members = np.stack([nll(dependent, order) for order in ORDERS])
    np.testing.assert_allclose(np.exp(-bound).sum(), 1.0, atol=2e-5)
    np.testing.assert_allclose(bound, -np.log(np.exp(-members).mean(axis=0)), rtol=1e-5)
    assert (np.asarray(bound) <= members.mean(axis=0) + 1e-5).all()
    one = likelihood.order_marginal_nll(dependent, jnp.asarray(SEQUENCES), orders[3:4], MASK)
    np.testing.assert_allclose(one, members[3], rtol=1e-6)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def ensemble(apply, members, num_steps, seed=0):
    order = jnp.broadcast_to(jnp.array([[2, 0, 3, 1]]), SEQUENCES.shape)
    return likelihood.ensemble_nll(
        apply,
        jnp.asarray(SEQUENCES),
        order,
        keys(seed),
        MASK,
        members=members,
        num_steps=num_steps,
    )


def test_ensemble_of_one_is_the_plain_nll_and_a_subset_of_steps_is_a_part_of_it():
    total, count = ensemble(dependent, members=1, num_steps=N)
    np.testing.assert_allclose(total, nll(dependent, (2, 0, 3, 1)), rtol=1e-5)
    assert (np.asarray(count) == N).all()
    repeats = [np.asarray(ensemble(dependent, 1, 2, seed)[0]) for seed in range(64)]
    per_step = np.stack(repeats) / 2
    error = per_step.mean(axis=0) - np.asarray(total) / N
    assert np.abs(error.mean()) < 4 * per_step.mean(axis=1).std() / math.sqrt(64)


def test_ensemble_leaves_an_order_invariant_model_alone():
    total, _ = ensemble(invariant, members=4, num_steps=N)
    np.testing.assert_allclose(total, nll(invariant, (2, 0, 3, 1)), atol=1e-3)


def test_large_ensemble_approaches_the_mean_over_all_context_orders():
    base = (2, 0, 3, 1)
    exact = np.zeros(len(SEQUENCES))
    for step in range(N):
        contexts = [p + base[step:] for p in itertools.permutations(base[:step])]
        rows = [jnp.broadcast_to(jnp.array([c]), SEQUENCES.shape) for c in contexts]
        tokens = jnp.asarray(SEQUENCES)
        probs = [
            np.exp(-likelihood.slot_nll(dependent(tokens, r), tokens, r))[:, step] for r in rows
        ]
        exact -= np.log(np.mean(probs, axis=0))
        member_mean = -np.log(probs).mean(axis=0)
        assert (-np.log(np.mean(probs, axis=0)) <= member_mean + 1e-6).all()  # Jensen
    many, _ = ensemble(dependent, members=512, num_steps=N)
    single, _ = ensemble(dependent, members=1, num_steps=N)
    assert np.abs(np.asarray(many) - exact).max() < 0.2 * np.abs(np.asarray(single) - exact).max()


def test_permuted_context_is_uniform_and_keeps_the_rest():
    order = jnp.array([4, 1, 3, 0, 2])
    shuffle = jax.jit(jax.vmap(lambda key: likelihood.permute_context(key, order, 3)))
    shuffled = np.asarray(shuffle(keys(2, 6000)))
    assert (shuffled[:, 3:] == [0, 2]).all()
    _, counts = np.unique(shuffled[:, :3], axis=0, return_counts=True)
    assert len(counts) == 6
    assert ((counts - 1000) ** 2 / 1000).sum() < 20.5  # chi-square, 5 degrees of freedom, p = 0.001


def test_three_forms_of_the_masked_diffusion_loss_agree_with_the_any_order_loss():
    any_order = np.mean([nll(invariant, order) for order in ORDERS], axis=0)
    per_slot = {}  # (revealed set, target) -> NLL of every sequence
    for order in ORDERS:
        rows = jnp.broadcast_to(jnp.asarray(order)[None], SEQUENCES.shape)
        tokens = jnp.asarray(SEQUENCES)
        slots = np.asarray(likelihood.slot_nll(invariant(tokens, rows), tokens, rows))
        for s in range(N):
            per_slot[frozenset(order[:s].tolist()), int(order[s])] = slots[:, s]
    integral, by_length = 0.0, 0.0
    for k in range(1, N + 1):  # k masked positions
        beta = math.factorial(k - 1) * math.factorial(N - k) / math.factorial(N)
        for masked in itertools.combinations(range(N), k):
            seen = frozenset(range(N)) - set(masked)
            total = sum(per_slot[seen, p] for p in masked)
            integral = integral + beta * total
            by_length = by_length + total / (k * math.comb(N, k))
    np.testing.assert_allclose(integral, any_order, rtol=1e-4)
    np.testing.assert_allclose(by_length, any_order, rtol=1e-4)


def test_conditional_matches_the_joint():
    given = jnp.broadcast_to(jnp.array([[False, True, False, False]]), SEQUENCES.shape)
    target = jnp.broadcast_to(jnp.array([[True, False, False, True]]), SEQUENCES.shape)
    order = jnp.broadcast_to(jnp.arange(N)[None], SEQUENCES.shape)
    got = likelihood.conditional_nll(invariant, jnp.asarray(SEQUENCES), order, given, target)
    table = JOINT.reshape((V,) * N)
    both, context = table.sum(axis=2), table.sum(axis=(0, 2, 3))
    x = SEQUENCES
    expected = -np.log(both[x[:, 0], x[:, 1], x[:, 3]] / context[x[:, 1]])
    np.testing.assert_allclose(got, expected, atol=2e-4)


def test_natural_and_slot_views_are_inverse_and_rows_are_independent():
    order = jnp.array([[2, 0, 3, 1], [0, 1, 2, 3]])
    tokens = jnp.asarray(SEQUENCES[[5, 10]])
    slots = likelihood.slot_nll(dependent(tokens, order), tokens, order)
    natural = likelihood.to_natural(slots, order)
    np.testing.assert_array_equal(likelihood.to_slots(natural, order), slots)
    np.testing.assert_array_equal(natural[0, 3], slots[0, 2])
    single = likelihood.slot_nll(dependent(tokens[:1], order[:1]), tokens[:1], order[:1])
    np.testing.assert_allclose(slots[:1], single, rtol=1e-6)


def test_curves_keep_the_total():
    order = jnp.array([[2, 0, 3, 1]])
    values, mask = jnp.array([[1.0, 2.0, 4.0, 8.0]]), jnp.array([[True, True, True, False]])
    by_step = likelihood.curve_by_step(values, mask)
    by_gap = likelihood.curve_by_gap(values, order, mask)
    np.testing.assert_array_equal(by_step.total, [1, 2, 4, 0])
    np.testing.assert_array_equal(likelihood.nearest_gap(order), [[4, 2, 1, 1]])
    np.testing.assert_array_equal(by_gap.total, [0, 4, 2, 0, 1])
    np.testing.assert_array_equal(by_gap.count, [0, 1, 1, 0, 1])

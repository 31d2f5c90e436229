"""The bound against the toy whose law is known: its optimum, its parts, its mean over draws."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aodiff import rng
from aodiff.core import insertion
from aodiff.core.schedules import make_rise
from aodiff.data.pipeline import as_batch
from aodiff.methods.flexmdm import FlexMDMMethod
from tests.toy_insertion import (
    CODE,
    ENTROPY,
    LAW,
    LOSS,
    MASK,
    SPLIT,
    A,
    B,
    ToyInsertion,
    mistakes,
    posterior,
)

STRINGS, SHARES = list(LAW), np.array(list(LAW.values()))
ABSENT, MASKED, CLEAN = range(3)


def method(pair=("linear", "linear"), wrong=(0.0, 0.0), **changes):
    rises = map(make_rise, pair)
    return FlexMDMMethod(ToyInsertion(wrong), 2, *rises, **changes)


def batch_of(strings, **fields):
    rows = np.array([list(s) + [0] * (2 - len(s)) for s in strings])
    fields |= {"tokens": rows, "length": np.array([len(s) for s in strings])}
    return jax.tree.map(jnp.asarray, as_batch(fields, np.arange(len(rows))))


def mask_share(pair, t):
    """P(mask) in closed form (flexmdm.md 2.2), float64."""
    a, ab = (1.0 if s == "linear" else float(s[6:-1]) for s in pair)
    if a == ab:
        return -a * (1 - t) ** a * np.log(1 - t)
    return ((1 - t) ** a - (1 - t) ** ab) / (ab / a - 1)


@functools.cache
def quadrature(pair):
    """Everything that may have happened by some times: a batch, the hazards (R, 2), the weight of
    each row, and the string it is of."""
    node, weight = np.polynomial.legendre.leggauss(40)
    s = (node + 1) / 2
    times, weight = np.float32(1 - (1 - s) ** 2).astype(float), weight * (1 - s)
    rows, events, chances, where, when = [], [], [], [], []
    left = {"linear": lambda t: 1 - t}.get(pair[0], lambda t: (1 - t) ** float(pair[0][6:-1]))
    for (k, string), (t, w) in itertools.product(
        enumerate(STRINGS), zip(times, weight, strict=True)
    ):
        shares = left(t), mask_share(pair, t), 1 - left(t) - mask_share(pair, t)
        for happened in itertools.product((ABSENT, MASKED, CLEAN), repeat=len(string)):
            rows.append(string)
            padded = [*happened, ABSENT, ABSENT][:2]
            events.append(
                [[2.0 * (h == ABSENT) for h in padded], [2.0 * (h != CLEAN) for h in padded]]
            )
            chances.append(w * np.prod([shares[h] for h in happened]))
            where.append(k)
            when.append(t)
    events, time = np.array(events, np.float32), jnp.array(when, jnp.float32)
    batch = batch_of(rows) | {"time": time, "come": events[:, 0], "revealed": events[:, 1]}
    hazards = [np.asarray(make_rise(spec).hazard(time), np.float64) for spec in reversed(pair)]
    return batch, np.stack(hazards, axis=1), np.array(chances), np.array(where)


@functools.cache
def exact_terms(pair, wrong=(0.0, 0.0), seed=None):
    """Expected unmasking and insertion nats by string, (6, 2): a quadrature over times of a sum
    over everything that may have happened by then; of a model with `mistakes`, if there is a seed.
    """
    batch, hazards, chances, where = quadrature(pair)
    terms = jax.jit(functools.partial(method(pair, wrong).terms, train=False))
    found = terms({} if seed is None else mistakes(seed), batch)
    nats = np.stack([found.unmasking, found.insertion], axis=1).astype(np.float64)
    total = np.zeros((6, 2))
    np.add.at(total, where, chances[:, None] * hazards * nats)
    return total


LENGTHS = np.array([len(s) for s in STRINGS])
EXTRA = np.array([insertion.path_constant(n) for n in LENGTHS])


@pytest.mark.parametrize("pair", SPLIT)
def test_the_bound_is_the_likelihood_where_the_model_is_right(pair):
    """Of every string, for any schedules: flexmdm.md 3.6 and 15.8."""
    nats = exact_terms(pair).sum(1) - LENGTHS
    np.testing.assert_allclose(nats, -np.log(SHARES), atol=3e-5)
    assert abs(SHARES @ nats - ENTROPY) < 1e-5


@pytest.mark.parametrize("pair", SPLIT)
def test_the_loss_of_the_paper_has_its_optimum_and_its_split(pair):
    """It is the bound and a constant of each string; g log g - g is what the rate loss leaves."""
    unmasking, inserting = SHARES @ exact_terms(pair)
    # E of the sum of log g at the times of insertion is c(N); the mean number of these is N.
    divergence = inserting - SHARES @ LENGTHS + SHARES @ EXTRA
    np.testing.assert_allclose([unmasking, divergence], SPLIT[pair], atol=2e-5)
    assert abs(unmasking + divergence - LOSS) < 2e-5


def test_any_wrong_answer_raises_the_bound():
    """Of one state alone, wherever there is something to tell: flexmdm.md 15.9."""
    pair = ("power(1.7)", "power(2.89)")
    batch, hazards, chances, where = quadrature(pair)
    weight = jnp.asarray((SHARES[where] * chances)[:, None] * hazards, jnp.float32)

    @jax.jit
    def bound(offsets):
        terms = method(pair).terms(offsets, batch, train=False)
        return jnp.sum(weight * jnp.stack([terms.unmasking, terms.insertion], axis=1))

    right = {"letters": jnp.zeros((13, 2, 2)), "gaps": jnp.zeros((13, 3))}
    best, slope = jax.value_and_grad(bound)(right)
    assert all(np.abs(x).max() < 2e-5 for x in jax.tree.leaves(slope))
    f, gaps = (np.asarray(x) for x in posterior(make_rise(pair[0]).value(0.5)))
    for state, code in CODE.items():
        if state == (B, B):  # never was
            continue
        for i, s in enumerate(state):
            off = right | {"letters": right["letters"].at[code, i, 0].set(0.5)}
            assert (bound(off) > best + 2e-5) == (s == MASK and 0 < f[code, i, 0] < 1)
        for i in range(len(state) + 1):
            off = right | {"gaps": right["gaps"].at[code, i].set(-0.5)}
            assert (bound(off) > best + 2e-5) == (gaps[code, i] > 0)


def test_the_posterior_of_the_toy():
    """flexmdm.md 15.7: insertion power 1.7, time 0.4."""
    f, gap = posterior(make_rise("power(1.7)").value(0.4))
    np.testing.assert_allclose(f[CODE[(MASK,)], 0], (0.588335, 0.411665), atol=2e-6)
    np.testing.assert_allclose(gap[CODE[(MASK,)], :2], (0.313327, 0.313327), atol=2e-6)
    np.testing.assert_allclose(gap[CODE[(A,)], :2], (0.221903, 0.355044), atol=2e-6)
    np.testing.assert_allclose(f[CODE[(MASK, B)], 0], (1, 0), atol=2e-6)


def test_drawn_losses_and_the_evaluated_bound_have_the_exact_mean():
    pair, number = ("power(1.7)", "power(2.89)"), (20_000 * SHARES).round().astype(int)
    m = method(pair, (0.3, 0.2), last_time=1 - 1e-5, floor=0.0)
    exact = exact_terms(pair, (0.3, 0.2)).sum(1) - LENGTHS
    which = np.repeat(np.arange(6), number)
    batch = batch_of([STRINGS[k] for k in which])
    draw = lambda key: m.loss_fn({}, m.draw(key, batch, 0, {}, {})[0]).metrics["bound"].total
    bounds = np.asarray(jax.jit(jax.vmap(draw))(jax.random.split(rng.stream(0, 2), 30))) / 20_000
    assert abs(bounds.mean() - SHARES @ exact) < 4 * bounds.std() / 30**0.5 + 5e-4
    scores = jax.jit(m.bound(4).fn)({}, batch, rng.stream(0, rng.EVAL), {})
    for k, nll in enumerate(np.split(np.asarray(scores.nll), np.cumsum(number)[:-1])):
        assert abs(nll.mean() - exact[k]) < 4 * nll.std() / len(nll) ** 0.5 + 5e-4
    np.testing.assert_array_equal(scores.count, LENGTHS[which])
    curve = scores.curves["gap_calibration"]
    np.testing.assert_allclose(curve.total[:7] / curve.count[:7], np.exp(0.2), rtol=0.06)


def test_with_nothing_to_insert_it_is_masked_diffusion():
    """Tokens that have all come leave the loss of masked diffusion, with its weight."""
    m = method(("power(1000)", "power(2)"))
    batch = batch_of([(A, B)] * 400)
    drawn, _ = m.draw(rng.stream(0, rng.TRAIN), batch, 0, {}, {})
    drawn |= {"come": jnp.zeros((400, 2)), "time": jnp.full(400, 0.5)}
    masked = drawn["time"][:, None] < drawn["revealed"]
    out = m.loss_fn({}, drawn)
    terms = m.terms({}, drawn)
    assert np.all(terms.count == 0) and np.all(terms.mean_count < 1e-6)
    both = 0.6  # strings of two letters; aa 0.05, ab 0.35, ba 0.2
    expected = {
        (True, True): -np.log(0.4 / both) - np.log(0.35 / both),
        (True, False): 0.0,
        (False, True): -np.log(0.35 / 0.4),
        (False, False): 0.0,
    }
    by_hand = [expected[tuple(row)] for row in np.asarray(masked).tolist()]
    np.testing.assert_allclose(terms.unmasking, by_hand, atol=1e-4)
    weight = 2 * 0.5 / (0.5**2 + 1e-3)  # at time 0.5, with the floor of training
    np.testing.assert_allclose(out.loss.total, weight * np.sum(by_hand), rtol=1e-4)

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from aodiff.core.schedules import make_rise
from aodiff.sampling.flexible import Inserter, sample
from tests.toy_insertion import (
    ANCHOR,
    CODE,
    LAW,
    MASK,
    STATES,
    B,
    ToyInsertion,
    V,
    posterior,
)

LINEAR, POWERS = ("linear", "linear"), ("power(1.7)", "power(2.89)")
STRINGS = [*LAW, (B, B)]  # the last one is not in the law: two letters revealed at once
SHARES = np.array([LAW.get(s, 0.0) for s in STRINGS])


def inserter(pair=LINEAR, steps=4, **options):
    return Inserter(*map(make_rise, pair), steps, stop=0.0, **options)


def oracle(tokens, length, alpha):
    return ToyInsertion().apply({}, tokens, length, alpha)


def run(predict, choices, tokens, given, seed=0, mask=MASK, anchor=ANCHOR, **options):
    keys = jax.random.split(jax.random.key(seed), len(tokens))
    fn = lambda *a: sample(predict, *a, choices, mask_id=mask, anchor=anchor, **options)
    return jax.device_get(jax.jit(fn)(keys, jnp.asarray(tokens, jnp.int32), jnp.asarray(given)))


def draw_toy(choices, num=20_000, seed=0, **options):
    """How often each string of the toy was written."""
    nothing = np.zeros((num, 2), np.int32)
    out = run(oracle, choices, nothing, nothing > 0, seed, **options)
    assert np.all((out.tokens < V) & (out.lengths <= 2)[:, None])
    where = [tuple(row[:n]) for row, n in zip(out.tokens.tolist(), out.lengths, strict=True)]
    return np.array([where.count(s) for s in STRINGS])


def pvalue(found, law):
    kept = law > 0
    assert found[~kept].sum() == 0
    return scipy.stats.chisquare(found[kept], law[kept] / law.sum() * found.sum()).pvalue


# ---- the sampler as a chain of states, in numpy -------------------------------------------------


def insertions(mean, chance, room, rule):
    """Probabilities of the counts of each gap, as (counts, probability)."""
    rate = np.asarray(mean) * chance
    choices = [k for k in itertools.product(range(room + 1), repeat=len(rate)) if sum(k) <= room]
    if rule == "bernoulli":
        law = {}
        for k in itertools.product((0, 1), repeat=len(rate)):
            p = np.prod([r if x else 1 - r for x, r in zip(k, np.minimum(rate, 1), strict=True)])
            ways = [c for c in choices if sum(c) == min(sum(k), room) and np.all(np.array(c) <= k)]
            for c in ways:  # every subset of what was proposed is as likely
                law[c] = law.get(c, 0) + p / len(ways)
        return law.items()
    total = rate.sum()
    law = [scipy.stats.poisson.pmf(j, total) for j in range(room)]
    law.append(1 - sum(law))  # cut to the room
    spread = lambda k: math.factorial(sum(k)) / np.prod([math.factorial(x) for x in k])
    share = rate / total if total > 0 else rate
    return [(k, law[sum(k)] * spread(k) * np.prod(share ** np.array(k))) for k in choices]


@functools.cache
def chain(choices, pair, rule, rate="exact"):
    """Law of the strings that a sampler writes that reveals each mask on its own."""
    steps = choices
    alphas, reveal, come = map(np.asarray, inserter(pair, steps, rate=rate, count=rule).tables())
    law = dict.fromkeys(STATES, 0.0) | {(): 1.0}
    f_by_step, gap_by_step = (np.asarray(x, np.float64) for x in posterior(jnp.asarray(alphas)))
    for k in range(steps):
        after = dict.fromkeys(STATES, 0.0)
        for state, mass in law.items():
            f, gap = f_by_step[k, CODE[state]], gap_by_step[k, CODE[state]]
            options = [
                [(s, 1.0)]
                if s != MASK
                else [(MASK, 1 - reveal[k]), *((v, reveal[k] * f[i, v]) for v in range(V))]
                for i, s in enumerate(state)
            ]
            moves = list(insertions(gap[: len(state) + 1], come[k], 2 - len(state), rule))
            for picked in itertools.product(*options):
                p = mass * np.prod([q for _, q in picked])
                for numbers, q in moves:
                    new = [MASK] * numbers[0]
                    for (s, _), n in zip(picked, numbers[1:], strict=True):
                        new += [s] + [MASK] * n
                    after[tuple(new)] += p * q
        law = after
    found = np.zeros(7)
    for state, mass in law.items():  # what is masked is drawn from the law of its length
        found += mass * completions(state)
    return found


def completions(state):
    """Law of `STRINGS` of the length of `state` that read as it."""
    reads = lambda s: all(a in (MASK, b) for a, b in zip(state, s, strict=True))
    fits = np.array([len(s) == len(state) and reads(s) for s in STRINGS])
    return SHARES * fits / (SHARES @ fits) if SHARES @ fits else fits


def distance(law):
    return np.abs(law - SHARES).sum() / 2


@pytest.mark.parametrize(
    "pair, rule, rate, expected",
    [
        (LINEAR, "poisson", "exact", {4: 0.1260, 8: 0.0777, 32: 0.0231}),
        (LINEAR, "bernoulli", "exact", {4: 0.1714, 8: 0.0959}),
        (POWERS, "poisson", "exact", {4: 0.1224, 8: 0.0629, 32: 0.0158}),
        (POWERS, "poisson", "euler", {4: 0.1091, 8: 0.0473}),
        (("power(2.9)", "power(2.89)"), "poisson", "exact", {8: 0.0701}),
    ],
)
def test_the_chain_has_the_known_errors(pair, rule, rate, expected):
    """flexmdm.md 7.1: of first order in the number of steps."""
    found = {steps: distance(chain(steps, pair, rule, rate)) for steps in expected}
    assert found == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize(
    "pair, rule, rate",
    [
        (LINEAR, "poisson", "exact"),
        (LINEAR, "bernoulli", "exact"),
        (POWERS, "poisson", "euler"),
        (POWERS, "poisson", "exact"),
    ],
)
def test_samples_follow_the_chain(pair, rule, rate):
    found = draw_toy(inserter(pair, 4, count=rule, rate=rate))
    assert pvalue(found, chain(4, pair, rule, rate)) > 1e-3
    assert pvalue(found[:6], SHARES[:6]) < 1e-3  # four steps are too few, and that is seen


@pytest.mark.parametrize("score", ["random", "max_prob", "entropy", "l2r", "r2l"])
def test_with_many_steps_samples_follow_the_law(score):
    """Whatever chooses which mask comes first, from what is visible: flexmdm.md 7.4."""
    found = draw_toy(inserter(POWERS, 96, score=score), num=5000)
    assert found[6] < 10
    assert pvalue(found[:6], SHARES[:6]) > 1e-3

"""Laws that the sampler writes: strings of a toy whose law is known, and lengths alone."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from aodiff import rng
from aodiff.core.schedules import make_rise
from aodiff.sampling import counts
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


def draw_toy(choices, num):
    """How often each string of the toy was written."""
    net, nothing = functools.partial(ToyInsertion().apply, {}), jnp.zeros((num, 2), jnp.int32)
    fn = jax.jit(lambda *a: sample(net, *a, choices, mask_id=MASK, anchor=ANCHOR))
    out = jax.device_get(fn(jax.random.split(jax.random.key(0), num), nothing, nothing > 0))
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
        (LINEAR, "poisson", "exact", (0.1260, 0.0777, 0.0231, 0.0061, 0.0031)),
        (LINEAR, "bernoulli", "exact", (0.1714, 0.0959, 0.0269, 0.0070, 0.0035)),
        (POWERS, "poisson", "exact", (0.1224, 0.0629, 0.0158, 0.0039, 0.0020)),
        (POWERS, "poisson", "euler", (0.1091, 0.0473, 0.0126, 0.0033, 0.0017)),
        (
            ("power(2.9)", "power(2.89)"),
            "poisson",
            "exact",
            (0.1409, 0.0701, 0.0173, 0.0043, 0.0022),
        ),
    ],
)
def test_the_chain_has_the_known_errors(pair, rule, rate, expected):
    """flexmdm.md 7.1: of first order in the number of steps."""
    found = [distance(chain(steps, pair, rule, rate)) for steps in (4, 8, 32, 128, 256)]
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert found[3] == pytest.approx(2 * found[4], rel=0.05)


@pytest.mark.parametrize(
    "pair, rule, rate", [(LINEAR, "bernoulli", "exact"), (POWERS, "poisson", "euler")]
)
def test_samples_follow_the_chain(pair, rule, rate):
    found = draw_toy(inserter(pair, 4, count=rule, rate=rate), 20_000)
    assert pvalue(found, chain(4, pair, rule, rate)) > 1e-3
    assert pvalue(found[:6], SHARES[:6]) < 1e-3  # four steps are too few, and that is seen


@pytest.mark.parametrize("score", ["max_prob", "r2l"])
def test_with_many_steps_samples_follow_the_law(score):
    """Whatever chooses which mask comes first, from what is visible: flexmdm.md 7.4."""
    found = draw_toy(inserter(POWERS, 64, score=score), 2500)
    assert found[6] < 10
    assert pvalue(found[:6], SHARES[:6]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("steps, right", [(8, False), (256, True)])
def test_twenty_thousand_samples_tell_few_steps_from_many(steps, right):
    """flexmdm.md 15.13."""
    found = draw_toy(inserter(LINEAR, steps), 20_000)
    assert (pvalue(found[:6], SHARES[:6]) > 1e-3) == right


# ---- lengths alone ------------------------------------------------------------------------------

LENGTHS, MOST = {4: 0.1, 16: 0.4, 32: 0.4, 64: 0.1}, 64


@functools.partial(jax.jit, static_argnums=0)
def grow(rule, keys, alphas, chances):
    """Lengths (B,) of rows of which an oracle knows what is missing, evenly spread over the gaps;
    in a single gap for "thin"."""
    total = jnp.array(list(LENGTHS))
    logs = jnp.log(jnp.array(list(LENGTHS.values()))) + jax.scipy.special.gammaln(total + 1.0)
    slots = 1 if rule == "thin" else MOST + 1

    def one(n, step):
        i, alpha, chance = step
        missing = total[None] - n[:, None]
        there, missing = missing >= 0, jnp.maximum(missing, 0)
        weight = logs[None] - jax.scipy.special.gammaln(missing + 1.0)
        weight += missing * jnp.log1p(-alpha)
        law = jax.nn.softmax(jnp.where(there, weight, -jnp.inf), axis=1)
        share = jnp.sum(law[..., None] * jax.nn.one_hot(missing, MOST + 1), axis=1)
        mean = jnp.sum(law * missing, axis=1, keepdims=True)
        gaps = jnp.minimum(n + 1, slots)[:, None]
        open_ = jnp.arange(slots)[None] < gaps
        found = counts.draw(
            rule,
            counts.Gaps(
                keys=rng.fold(keys, i),
                mean=jnp.where(open_, mean / gaps, 0),
                logits=jnp.log(share)[:, None],
                open=open_,
                chance=chance,
                room=MOST - n,
            ),
        )
        return n + jnp.sum(found, axis=1), None

    steps = jnp.arange(len(alphas)), alphas, chances
    return jax.lax.scan(one, jnp.zeros(len(keys), jnp.int32), steps)[0]


@functools.cache
def grown(rule, rise, steps, last=True):
    """2000 lengths of an oracle; without the `last` step, as published samplers have it."""
    alphas, _, chances = inserter((rise, "linear"), steps).tables()
    chances = chances if last else chances.at[-1].set(0)
    return np.asarray(grow(rule, jax.random.split(jax.random.key(2), 2000), alphas, chances))


def length_distance(lengths):
    law = np.bincount(list(LENGTHS), list(LENGTHS.values()))
    return np.abs(np.bincount(lengths, minlength=MOST + 1) / len(lengths) - law).sum() / 2


@pytest.mark.parametrize(
    "rule, rise, steps, expected",
    [
        ("thin", "linear", 16, 0.0),
        ("thin", "power(1.7)", 16, 0.0),
        ("poisson", "linear", 16, 0.539),
        ("poisson", "sin", 16, 0.256),
        ("poisson", "power(1.7)", 16, 0.288),
        ("poisson", "linear", 64, 0.267),
        ("bernoulli", "linear", 16, 0.537),
        ("bernoulli", "sin", 16, 0.416),
    ],
)
def test_lengths_that_an_oracle_writes(rule, rise, steps, expected):
    """flexmdm.md 7.3: thinning is exact with any number of steps, the others are not."""
    assert abs(length_distance(grown(rule, rise, steps)) - expected) < 0.035


def test_lengths_are_short_with_one_mask_a_gap_or_without_the_last_step():
    error = lambda found: 4 * found.std() / len(found) ** 0.5
    for rule, rise, last, mean in (
        ("bernoulli", "sin", True, 22.7),
        ("thin", "linear", True, 26.0),
        ("thin", "linear", False, 26 * 15 / 16),
    ):
        found = grown(rule, rise, 16, last)
        assert abs(found.mean() - mean) < error(found) + 0.05
    for rule, expected in {"poisson": 0.782, "thin": 0.724}.items():
        assert abs(length_distance(grown(rule, "linear", 16, False)) - expected) < 0.035

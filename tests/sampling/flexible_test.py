import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from aodiff.core.schedules import make_rise
from aodiff.nn.flexmdm import Prediction
from aodiff.sampling import counts, flexible
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


def oracle(tokens, length, alpha, slots):
    return ToyInsertion().apply({}, tokens, length, alpha, slots)


def run(predict, choices, num, n, mask=MASK, anchor=ANCHOR):
    nothing = jnp.zeros((num, n), jnp.int32)
    fn = lambda *a: sample(predict, *a, choices, mask_id=mask, anchor=anchor)
    keys = jax.random.split(jax.random.key(0), num)
    return jax.device_get(jax.jit(fn)(keys, nothing, nothing > 0))


def draw_toy(choices, num):
    """How often each string of the toy was written."""
    out = run(oracle, choices, num, 2)
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
        (LINEAR, "bernoulli", "exact"),
        (POWERS, "poisson", "euler"),
        (POWERS, "poisson", "exact"),
    ],
)
def test_samples_follow_the_chain(pair, rule, rate):
    found = draw_toy(inserter(pair, 4, count=rule, rate=rate), 20_000)
    assert pvalue(found, chain(4, pair, rule, rate)) > 1e-3
    assert pvalue(found[:6], SHARES[:6]) < 1e-3  # four steps are too few, and that is seen


@pytest.mark.parametrize("score", ["random", "max_prob", "entropy", "r2l"])
def test_with_many_steps_samples_follow_the_law(score):
    """Whatever chooses which mask comes first, from what is visible: flexmdm.md 7.4."""
    found = draw_toy(inserter(POWERS, 64, score=score), 2500)
    assert found[6] < 10
    assert pvalue(found[:6], SHARES[:6]) > 1e-3


# ---- parts --------------------------------------------------------------------------------------


def gaps(mean, room, chance=0.5, logits=None, num=None):
    mean = jnp.asarray(mean, jnp.float32)
    mean = jnp.broadcast_to(mean[None], (num or 1, len(mean)))
    return counts.Gaps(
        keys=jax.random.split(jax.random.key(3), len(mean)),
        mean=mean,
        logits=None
        if logits is None
        else jnp.broadcast_to(logits[None], (*mean.shape, logits.shape[-1])),
        open=mean > 0,
        chance=jnp.float32(chance),
        room=jnp.full(len(mean), room),
    )


drawn = jax.jit(counts.draw, static_argnums=0)


@pytest.mark.parametrize("rule", ["poisson", "bernoulli", "floor_bernoulli", "thin"])
def test_counts_have_their_laws(rule):
    mean = np.array([0.6, 0.0, 3.0, 1.4] + [0.0] * 20)
    logits = np.full((24, 8), -np.inf)
    logits[:, 0] = 0
    logits[[0, 2, 3], :4] = np.log(np.array([[4, 6, 0, 0], [0, 0, 0, 10], [0, 6, 4, 0]]) + 1e-30)
    found = np.asarray(drawn(rule, gaps(mean, 100, 0.5, jnp.asarray(logits, jnp.float32), 6000)))
    expected = mean / 2 if rule != "bernoulli" else np.minimum(mean / 2, 1)
    error = found.std(0) / 6000**0.5
    assert np.all(np.abs(found.mean(0) - expected) <= 4 * error + 1e-6)
    assert abs(np.corrcoef(found[:, [0, 3]].T)[0, 1]) < 0.06
    if rule == "poisson":
        np.testing.assert_allclose(found.var(0), expected, atol=0.12)
    if rule == "thin":  # of 3 tokens each comes with its chance
        law = scipy.stats.binom.pmf(range(4), 3, 0.5) * 6000
        assert scipy.stats.chisquare(np.bincount(found[:, 2], minlength=4), law).pvalue > 1e-3


@pytest.mark.parametrize("rule", ["poisson", "floor_bernoulli"])
def test_rows_without_room_lose_masks_at_random(rule):
    """In the proportions of what was proposed, and never more than there is room for."""
    mean = np.array([8.0, 0.0, 4.0, 2.0])  # more than there are slots
    found = np.asarray(drawn(rule, gaps(mean, 3, 1.0, num=5000)))
    assert np.all(found.sum(1) <= 3) and (found.sum(1) == 3).mean() > 0.99
    share = found.sum(0) / found.sum()
    np.testing.assert_allclose(share, mean / mean.sum(), atol=0.02)
    if rule == "floor_bernoulli":  # a uniform subset of 14 masks
        law = scipy.stats.hypergeom.pmf(range(4), 14, 8, 3) * 5000
        assert scipy.stats.chisquare(np.bincount(found[:, 0], minlength=4), law).pvalue > 1e-3


def test_given_masks_are_slots_to_reveal():
    tokens, given = jnp.array([[1, MASK, 0, 1]]), jnp.array([[1, 1, 0, 1]], bool)
    state = flexible.begin(tokens, given, mask_id=MASK, anchor=ANCHOR)
    assert state.tokens.tolist() == [[ANCHOR, 1, MASK, 1, 0]]
    assert state.fixed.tolist() == [[1, 1, 0, 1, 0]] and state.open.tolist() == [[0, 0, 1, 0, 0]]


def test_masks_come_where_they_are_asked_for():
    tokens = jnp.array([[1, 0, 1, 0, 1, 1], [0, 0, 0, 0, 0, 0]])
    given = jnp.array([[1, 1, 0, 0, 1, 1], [0] * 6], bool)
    state = flexible.begin(tokens, given, mask_id=MASK, anchor=ANCHOR)
    assert state.tokens.tolist() == [[ANCHOR, 1, 0, 1, 1, 0, 0], [ANCHOR] + [0] * 6]
    assert state.length.tolist() == [5, 1]
    assert state.open.tolist() == [[0, 0, 1, 0, 0, 0, 0], [1] + [0] * 6]
    state = state.replace(step=jnp.int32(7))
    number = jnp.array([[0, 0, 2, 0, 0, 0, 0], [3] + [0] * 6])
    state = jax.jit(flexible.insert, static_argnums=2)(state, number, MASK)
    assert state.tokens.tolist() == [
        [ANCHOR, 1, 0, MASK, MASK, 1, 1],
        [ANCHOR, *[MASK] * 3, 0, 0, 0],
    ]
    assert state.length.tolist() == [7, 4]
    assert state.fixed.tolist() == [[1, 1, 1, 0, 0, 1, 1], [1] + [0] * 6]
    assert state.open.tolist() == [[0, 0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0, 0]]
    assert state.born.tolist() == [[-1, -1, -1, 7, 7, -1, -1], [-1, 7, 7, 7, -1, -1, -1]]
    state = jax.jit(flexible.insert, static_argnums=2)(
        state.replace(step=jnp.int32(8)), jnp.zeros((2, 7), jnp.int32).at[1, 1].set(1), MASK
    )
    assert state.born[1].tolist() == [-1, 7, 8, 7, 7, -1, -1]


LENGTHS = {4: 0.1, 16: 0.4, 32: 0.4, 64: 0.1}
CAPACITY = 65


def length_oracle(tokens, length, alpha, slots):
    """A law of lengths alone: all that is missing is behind the anchor, tokens are all 0."""
    total = np.array(list(LENGTHS))
    n = (length - 1)[:, None]
    missing = jnp.maximum(total[None] - n, 0)
    ways = jax.scipy.special.gammaln(total + 1.0)[None] - jax.scipy.special.gammaln(missing + 1.0)
    logs = jnp.log(jnp.array(list(LENGTHS.values())))[None] + ways
    logs += missing * jnp.log(jnp.maximum(1 - alpha, 1e-9))[:, None]
    law = jax.nn.softmax(jnp.where(total[None] >= n, logs, -1e9), axis=1)
    logits = jnp.full((*tokens.shape, 65), -jnp.inf).at[..., 0].set(0.0)
    rows = jnp.arange(len(tokens))[:, None]
    first = jnp.full((len(tokens), 65), -1e9).at[rows, missing].max(jnp.log(law + 1e-30))
    logits = logits.at[:, 0].set(first)
    gap = (
        jnp.full(tokens.shape, -30.0).at[:, 0].set(jnp.log(jnp.sum(law * missing, axis=1) + 1e-12))
    )
    return Prediction(jnp.zeros((*slots.shape, 4)).at[..., 1:].set(-1e9), gap, logits)


@pytest.mark.parametrize(
    "rule, rise, steps, low, high",
    [
        ("thin", "linear", 8, 0.0, 0.05),
        ("poisson", "linear", 16, 0.49, 0.60),
    ],
)
def test_lengths_that_an_oracle_writes(rule, rise, steps, low, high):
    """flexmdm.md 7.3: thinning is exact with any number of steps, Poisson counts are not."""
    num = 500
    choices = Inserter(
        make_rise(rise), make_rise(rise), steps, "l2r", count=rule, stop=0.0, drain=1
    )
    out = run(length_oracle, choices, num, CAPACITY - 1)
    found = np.bincount(out.lengths, minlength=CAPACITY) / num
    law = np.bincount(list(LENGTHS), list(LENGTHS.values()), CAPACITY)
    assert low <= np.abs(found - law).sum() / 2 <= high


def flat(tokens, length, alpha, slots):
    """Any of three tokens, as likely; four tokens are missing at the start, evenly spread."""
    gap = (
        jnp.log(4.0 * jnp.maximum(1 - alpha, 1e-6))[:, None]
        - jnp.log(length.astype(jnp.float32))[:, None]
    )
    return Prediction(
        jnp.zeros((*slots.shape, 5)).at[..., 3:].set(-1e9), jnp.broadcast_to(gap, tokens.shape)
    )


def writer(choices, n=16, predict=flat, few=None):
    """A sampler of rows of given keys."""

    @jax.jit
    def fn(keys):
        nothing = jnp.zeros((len(keys), n), jnp.int32)
        ids = dict(mask_id=3, anchor=4, few=few)
        return sample(predict, keys, nothing, nothing > 0, choices, **ids)

    return lambda keys: jax.device_get(fn(keys))


@functools.cache
def write(num=64, n=16, pair=LINEAR, steps=12, **options):
    keys = jax.random.split(jax.random.key(1), num)
    return writer(inserter(pair, steps, **options), n)(keys)


def test_rows_do_not_depend_on_each_other_nor_on_the_width_of_what_is_computed():
    keys = jax.random.split(jax.random.key(1), 64)
    fn = writer(inserter(POWERS, 8))
    whole, turned = fn(keys), fn(jnp.flip(keys))
    short = writer(inserter(POWERS, 8), predict=flexible.in_buckets(flat, (4, 8)), few=3)(keys)
    for name in ("tokens", "lengths", "step", "born", "calls"):
        np.testing.assert_array_equal(getattr(whole, name)[::-1], getattr(turned, name))
        np.testing.assert_array_equal(getattr(whole, name), getattr(short, name))
    assert len(np.unique(whole.lengths)) > 4


WINDOW = dict(window=(1, 1), score="max_prob")
POISSON = dict(reveal="poisson", score="confidence", num=400)


@pytest.mark.parametrize(
    "choices", [POISSON, WINDOW, dict(rate="tau"), dict(count="floor_bernoulli", score="l2r")]
)
def test_rows_are_whole_and_say_when_they_were_written(choices):
    out = write(**choices)
    live = np.arange(16) < out.lengths[:, None]
    assert np.all(out.tokens[live] < 3) and not out.tokens[~live].any()
    assert np.all(out.step[live] > out.born[live])  # masks are not revealed as they come
    assert np.all(out.step[live] < out.calls.max())
    assert np.all(out.calls >= 12) and np.all(out.calls <= 12 + 8)
    assert np.all(out.born[live] < 12) and np.all(out.born[live] >= 0)
    assert np.all(out.step[~live] == -1) and np.all(out.logp[live] < -1)


def test_a_window_of_one_writes_from_the_left():
    """At most one mask a step, and always the leftmost of those there are."""
    out = write(**WINDOW)
    for row, born, n in zip(out.step, out.born, out.lengths, strict=True):
        steps, born = row[:n], born[:n]
        during = steps < 12
        assert len(np.unique(steps[during])) == during.sum()
        for i in np.flatnonzero(during):
            assert not np.any((steps[:i] > steps[i]) & (born[:i] < steps[i]))


def test_lengths_grow_as_tokens_come():
    """flexmdm.md 17.3: E[n] is the share that has come times E[N]; here N is 4 on average."""
    out = write(**POISSON)
    born = np.where(out.born < 0, 99, out.born)
    for step in (1, 5, 8, 11):
        n = (born <= step).sum(1)
        assert abs(n.mean() - (step + 1) / 12 * 4) < 4 * n.std() / 400**0.5 + 0.05


def test_rows_that_expect_no_more_end_early():
    """They save calls, and none of them had a mask left."""
    keys = jax.random.split(jax.random.key(1), 64)
    early = writer(Inserter(*map(make_rise, POWERS), 64, stop=0.3))(keys)
    assert early.calls.mean() < 58 and np.all(early.tokens < 3)


def test_full_rows_stop_growing_and_say_so():
    out = write(n=3)
    assert out.lengths.max() == 3
    assert np.all((out.full > 0) >= (out.lengths == 3)) and np.all(out.full[out.lengths < 3] == 0)


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(score="best"), "max_prob"),
        (dict(reveal="all"), "binomial, poisson"),
        (dict(count="geometric"), "floor_bernoulli"),
        (dict(rate="exactly"), "exponential"),
        (dict(window=(0.5, 2)), "at least 1"),
        (dict(drain=0), "at least 1"),
        (dict(grid=(0.0, 0.5, 1.0)), "5 increasing"),
    ],
)
def test_choices_that_do_not_exist_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        inserter(**options)

"""Parts of the sampler by hand-made cases, and rows that it writes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from aodiff.core.schedules import make_rise
from aodiff.nn.flexmdm import Prediction
from aodiff.sampling import counts, flexible
from aodiff.sampling.flexible import Inserter, sample
from aodiff.sampling.growing import begin, insert
from aodiff.sampling.holes import Holes

LINEAR, POWERS = ("linear", "linear"), ("power(1.7)", "power(2.89)")
MASK, ANCHOR = 3, 4  # behind three tokens


def inserter(pair=LINEAR, steps=4, stop=0.0, **options):
    return Inserter(*map(make_rise, pair), steps, stop=stop, **options)


def drawn(rule, mean, room, chance, logits=None):
    """Counts of 5000 rows of these mean counts in their first gaps, (5000, 24)."""
    wide = lambda x, fill: np.pad(
        x, ((0, 24 - len(x)),) + ((0, 0),) * (x.ndim - 1), constant_values=fill
    )
    whole = lambda x: jnp.broadcast_to(jnp.asarray(x, jnp.float32)[None], (5000, *x.shape))
    mean = whole(wide(np.array(mean), 0))
    gaps = counts.Gaps(
        keys=jax.random.split(jax.random.key(3), 5000),
        mean=mean,
        logits=None if logits is None else whole(wide(logits, 0.0)),
        open=mean > 0,
        chance=jnp.float32(chance),
        room=jnp.full(5000, room),
    )
    return np.asarray(draw(rule, gaps))


draw = jax.jit(counts.draw, static_argnums=0)


@pytest.mark.parametrize("rule", ["poisson", "bernoulli", "floor_bernoulli", "thin"])
def test_counts_have_their_laws(rule):
    mean, logits = np.array([0.6, 0.0, 3.0, 1.4]), None
    if rule == "thin":
        law = np.array([[4, 6, 0, 0], [1, 0, 0, 0], [0, 0, 0, 10], [0, 6, 4, 0]])
        logits = np.log(law + 1e-30)
    found = drawn(rule, mean, 100, 0.5, logits)[:, :4]
    expected = mean / 2 if rule != "bernoulli" else np.minimum(mean / 2, 1)
    error = found.std(0) / 5000**0.5
    assert np.all(np.abs(found.mean(0) - expected) <= 4 * error + 1e-6)
    assert abs(np.corrcoef(found[:, [0, 3]].T)[0, 1]) < 0.06
    if rule == "poisson":
        np.testing.assert_allclose(found.var(0), expected, atol=0.13)
    if rule == "thin":  # of 3 tokens each comes with its chance
        law = scipy.stats.binom.pmf(range(4), 3, 0.5) * 5000
        assert scipy.stats.chisquare(np.bincount(found[:, 2], minlength=4), law).pvalue > 1e-3


@pytest.mark.parametrize("rule", ["poisson", "floor_bernoulli"])
def test_rows_without_room_lose_masks_at_random(rule):
    """In the proportions of what was proposed, and never more than there is room for."""
    mean = np.array([8.0, 0.0, 4.0, 2.0])
    found = drawn(rule, mean, 3, 1.0)[:, :4]
    assert np.all(found.sum(1) <= 3) and (found.sum(1) == 3).mean() > 0.99
    share = found.sum(0) / found.sum()
    np.testing.assert_allclose(share, mean / mean.sum(), atol=0.02)
    if rule == "floor_bernoulli":  # a uniform subset of 14 masks
        law = scipy.stats.hypergeom.pmf(range(4), 14, 8, 3) * 5000
        assert scipy.stats.chisquare(np.bincount(found[:, 0], minlength=4), law).pvalue > 1e-3


def test_holes_keep_their_bounds_and_lose_masks_at_random():
    """Holes behind slots 0 and 3 are at 10 of 3 and 4 of any number; the second needs 2."""
    proposed = np.array([6, 4, 0, 3, 1])
    whole = lambda x: jnp.broadcast_to(jnp.array(x)[None], (4000, 5))
    holes = Holes(whole([0, 0, 0, 3, 3]), whole([0, 0, 0, 2, 2]), whole([3, 3, 3, 9, 9]))
    keys, fit = jax.random.split(jax.random.key(4), 4000), jax.jit(counts.fit)
    wide, narrow = (
        np.asarray(fit(keys, whole(proposed), jnp.full(4000, room), holes)) for room in (7, 4)
    )
    assert np.all(wide[:, 3:] == proposed[3:]) and np.all(wide[:, :3].sum(1) == 3)
    law = scipy.stats.hypergeom.pmf(range(4), 10, 6, 3) * 4000
    assert scipy.stats.chisquare(np.bincount(wide[:, 0], minlength=4), law).pvalue > 1e-3
    second = narrow[:, 3:].sum(1)
    assert np.all(narrow.sum(1) == 4) and np.all(second >= 2)
    # Of 3 + 4 masks three go, each as likely, but no more than two of the second hole.
    gone = scipy.stats.hypergeom.pmf(range(4), 7, 4, 3)
    law = np.array([gone[0], gone[1], gone[2] + gone[3]]) * 4000
    assert scipy.stats.chisquare(np.bincount(4 - second, minlength=3), law).pvalue > 1e-3
    kept = np.asarray(fit(keys, whole([0, 3, 0, 0, 0]), jnp.full(4000, 4), holes))
    assert np.all(kept.sum(1) == 2)  # of 4 masks, 2 are for the second hole, in some later step
    mean = jnp.array([[1.0, 0, 2, 0.25, 0.25]])  # slot 1 is closed
    lift = jax.tree.map(lambda x: x[:1], holes).lift(mean, mean > 0)
    assert lift.tolist() == [[0, 0, 0, 0.75, 0.75]]
    fill = jax.jit(counts.fill)
    filled = np.asarray(fill(keys, whole([0] * 5), whole([1.0, 1, 1, 1, 3]), holes))
    assert np.all(filled.sum(1) == 2) and not filled[:, :3].any()
    law = scipy.stats.binom.pmf(range(3), 2, 0.75) * 4000
    assert scipy.stats.chisquare(np.bincount(filled[:, 4], minlength=3), law).pvalue > 1e-3


@pytest.mark.parametrize(
    "number, options, expected",
    [
        (2, {}, "0110111"),
        (2, dict(window=(1.5, 9)), "0110100"),  # masks count, not positions
        (2, dict(window=(9, 2)), "0110000"),
        (0, dict(window=(3, 9)), "0000000"),
        (2, dict(block=3), "0110000"),  # positions count, the anchor is none of them
        (2, dict(block=4), "0110100"),
        (2, dict(block=6, window=(1, 9)), "0110000"),
    ],
)
def test_which_masks_may_be_revealed(number, options, expected):
    masked = jnp.array([[c == "1" for c in "0110111"]])
    among = jax.jit(functools.partial(flexible.among, inserter=inserter(**options)))
    found = among(masked, jnp.array([number]))
    assert "".join("01"[int(x)] for x in found[0]) == expected


grow = jax.jit(insert, static_argnums=2)
start = jax.jit(functools.partial(begin, mask_id=MASK, anchor=ANCHOR))


def test_given_masks_are_slots_to_reveal():
    tokens, given = jnp.array([[1, MASK, 0, 1]]), jnp.array([[1, 1, 0, 1]], bool)
    state = start(tokens, given)
    assert state.tokens.tolist() == [[ANCHOR, 1, MASK, 1, 0]]
    assert state.fixed.tolist() == [[1, 1, 0, 1, 0]] and state.open.tolist() == [[0, 0, 1, 0, 0]]


def test_masks_come_where_they_are_asked_for():
    tokens = jnp.array([[1, 0, 1, 0, 1, 1], [0, 0, 0, 0, 0, 0]])
    given = jnp.array([[1, 1, 0, 0, 1, 1], [0] * 6], bool)
    state = start(tokens, given)
    assert state.tokens.tolist() == [[ANCHOR, 1, 0, 1, 1, 0, 0], [ANCHOR] + [0] * 6]
    assert state.length.tolist() == [5, 1]
    assert state.open.tolist() == [[0, 0, 1, 0, 0, 0, 0], [1] + [0] * 6]
    state = state.replace(step=jnp.int32(7))
    number = jnp.array([[0, 0, 2, 0, 0, 0, 0], [3] + [0] * 6])
    state = grow(state, number, MASK)
    assert state.tokens.tolist() == [
        [ANCHOR, 1, 0, MASK, MASK, 1, 1],
        [ANCHOR, *[MASK] * 3, 0, 0, 0],
    ]
    assert state.length.tolist() == [7, 4]
    assert state.fixed.tolist() == [[1, 1, 1, 0, 0, 1, 1], [1] + [0] * 6]
    assert state.open.tolist() == [[0, 0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0, 0]]
    assert state.born.tolist() == [[-1, -1, -1, 7, 7, -1, -1], [-1, 7, 7, 7, -1, -1, -1]]
    state = grow(
        state.replace(step=jnp.int32(8)), jnp.zeros((2, 7), jnp.int32).at[1, 1].set(1), MASK
    )
    assert state.born[1].tolist() == [-1, 7, 8, 7, 7, -1, -1]


def test_what_is_carried_along_is_what_looking_back_finds():
    """flexmdm.md 15.22: slots found again by going through the insertions from the last one on."""
    r, zero = np.random.default_rng(0), jnp.zeros((4, 12), jnp.int32)
    state, made = start(zero, zero > 0), []
    for step in range(6):
        live = np.arange(13) < np.asarray(state.length)[:, None]
        number = (r.random((4, 13)) < 0.4) & live
        number &= np.cumsum(number, axis=1) <= 13 - np.asarray(state.length)[:, None]
        made.append(number.astype(np.int32))
        state = grow(state.replace(step=jnp.int32(step)), jnp.asarray(made[-1]), MASK)
    assert state.length.max() > 8
    for row, n in enumerate(state.length):
        for at in range(n):
            slot, born = at, -1
            for step in reversed(range(6)):
                starts = np.arange(13) + np.cumsum(made[step][row]) - made[step][row]
                old = np.flatnonzero(starts[:n] == slot)
                if not len(old):
                    born = step
                    break
                slot = old[0]
            assert born == state.born[row, at]


def flat(tokens, length, alpha, slots):
    """Any of three tokens, as likely; four tokens are missing at the start, evenly spread."""
    gap = jnp.log(4.0 * jnp.maximum(1 - alpha, 1e-6))[:, None]
    gap = jnp.broadcast_to(gap - jnp.log(length.astype(jnp.float32))[:, None], tokens.shape)
    number = jnp.arange(7.0)[None, None]
    law = gap[..., None] * number - jax.scipy.special.gammaln(number + 1)
    return Prediction(jnp.zeros((*slots.shape, 5)).at[..., MASK:].set(-1e9), gap, law)


NOTHING = np.zeros((64, 16), np.int32), np.zeros((64, 16), bool), None


def writer(choices, predict=flat, few=None):
    """A sampler of rows of given keys and templates."""
    ids = dict(mask_id=MASK, anchor=ANCHOR, few=few)
    fn = jax.jit(
        lambda keys, tokens, given, bounds: sample(
            predict, keys, tokens, given, choices, bounds, **ids
        )
    )
    return lambda keys, *template: jax.device_get(fn(keys, *jax.tree.map(jnp.asarray, template)))


def test_rows_depend_on_their_own_key_alone_and_end_where_no_more_is_expected():
    """Whatever batch they are in and however many slots and masks are computed."""
    keys, choices = lambda: jax.random.split(jax.random.key(1), 64), inserter(POWERS, 16, stop=0.3)
    fn = writer(choices)
    whole, turned = fn(keys(), *NOTHING), fn(keys()[::-1], *NOTHING)
    part = [x if x is None else x[:40] for x in NOTHING]
    short = writer(choices, flexible.in_buckets(flat, (4, 8)), few=3)(keys()[:40], *part)
    for name in ("tokens", "lengths", "step", "born", "calls"):
        np.testing.assert_array_equal(getattr(whole, name)[::-1], getattr(turned, name))
        np.testing.assert_array_equal(getattr(whole, name)[:40], getattr(short, name))
    assert len(np.unique(whole.lengths)) > 4
    assert (whole.calls < 16).mean() > 0.5 and np.all(whole.tokens < MASK)


# Rows with nothing given, with a hole, with several holes, and with one that has to be filled up.
TEMPLATES = {
    (None,): [(0, 16)],
    (0, 1, None, 2, 2): [(3, 5)],
    (1, None, MASK, 2, None, 0): [(0, 1), (5, 16)],
    (None, 0, None): [(2, 2), (0, 0)],
    (2, None, 1, None): [(7, 7), (7, 9)],
    (None, 1): [(0, 2)],
}


def templates(num):
    """Arguments of a sampler and the pattern of each row."""
    tokens, given = np.zeros((num, 16), np.int32), np.zeros((num, 16), bool)
    bounds, patterns = np.zeros((num, 16, 2), np.int32), list(TEMPLATES) * num
    for row, pattern in enumerate(patterns[:num]):
        wide, holes, at = 17 - len(pattern), iter(TEMPLATES[pattern]), 0
        for i, token in enumerate(pattern):
            width = 1
            if token is None:
                width = wide - pattern[i + 1 :].count(None)
                wide -= width - 1
                bounds[row, at : at + width] = next(holes)
            else:
                tokens[row, at], given[row, at] = token, True
            at += width
    return (tokens, given, bounds), patterns[:num]


WAYS = {
    "growing": (inserter(steps=12, reveal="poisson", score="confidence"), 400, False),
    "leftmost": (inserter(steps=12, window=(1, 1), score="max_prob"), 60, True),
    "thin": (inserter(steps=12, rate="tau", count="thin", score="l2r", block=3), 60, True),
}


@functools.cache
def write(way):
    """Samples, and the template of each."""
    choices, num, fill = WAYS[way]
    nothing = jax.tree.map(lambda x: np.zeros((num, *x.shape[1:]), x.dtype), NOTHING)
    args, patterns = templates(num) if fill else (nothing, [(None,)] * num)
    return writer(choices)(jax.random.split(jax.random.key(1), num), *args), patterns


@pytest.mark.parametrize("way", WAYS)
def test_rows_are_whole_and_say_when_they_were_written(way):
    out, _ = write(way)
    live = np.arange(16) < out.lengths[:, None]
    assert np.all(out.tokens[live] < MASK) and not out.tokens[~live].any()
    written = live & (out.step >= 0)
    assert np.all(out.step[written] > out.born[written])  # masks are not revealed as they come
    assert np.all(out.step[live] < out.calls.max())
    assert np.all(out.calls >= 12) and np.all(out.calls <= 12 + 8)
    assert np.all(out.born[live] < 12) and np.all(out.born[live & ~written] < 0)
    assert np.all(out.step[~live] == -1) and np.all(out.logp[written] < -1)


@pytest.mark.parametrize("way", [way for way in WAYS if WAYS[way][2]])
def test_what_is_given_stays_and_holes_keep_their_bounds(way):
    out, patterns = write(way)
    reached = set()
    for row, born, n, pattern in zip(out.tokens, out.born, out.lengths, patterns, strict=True):
        ends = [-1, *np.flatnonzero(born[:n] < 0), n]
        fixed = [token for token in pattern if token is not None]
        assert len(ends) == len(fixed) + 2
        kept = row[ends[1:-1]]
        assert all(a == b or b == MASK for a, b in zip(kept, fixed, strict=True))
        widths, at = np.diff(ends) - 1, 0
        holes = iter(TEMPLATES[pattern])
        for token in (*pattern, ANCHOR):  # a gap before each of what is given, and at the end
            if token is None:
                least, most = next(holes)
                assert least <= widths[at] <= most
                reached |= {(pattern, int(widths[at]))}
                widths[at] = 0
            else:
                assert widths[at] == 0
                at += 1
    assert len(reached) > 15  # bounds leave the lengths free between them


def test_a_window_of_one_writes_from_the_left():
    """At most one mask a step, and always the leftmost of those there are."""
    out, _ = write("leftmost")
    for row, born, n in zip(out.step, out.born, out.lengths, strict=True):
        steps, born = row[:n], born[:n]
        during = (steps < 12) & (steps >= 0)
        assert len(np.unique(steps[during])) == during.sum()
        for i in np.flatnonzero(during):
            assert not np.any((steps[:i] > steps[i]) & (born[:i] < steps[i]))


def test_lengths_grow_as_tokens_come():
    """flexmdm.md 17.3: E[n] is the share that has come times E[N]; here N is 4 on average."""
    out, _ = write("growing")
    born = np.where(out.born < 0, 99, out.born)
    for step in (1, 5, 8, 11):
        n = (born <= step).sum(1)
        assert abs(n.mean() - (step + 1) / 12 * 4) < 4 * n.std() / 400**0.5 + 0.05


def test_full_rows_say_so():
    """Rows of one template need all the room there is; others seldom."""
    out, patterns = write("leftmost")
    full = out.lengths == 16
    assert np.all(full[[p == (2, None, 1, None) for p in patterns]]) and full.mean() < 0.5
    np.testing.assert_array_equal(out.full > 0, full)


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(score="best"), "max_prob"),
        (dict(reveal="all"), "binomial, poisson"),
        (dict(count="geometric"), "floor_bernoulli"),
        (dict(rate="exactly"), "exponential"),
        (dict(window=(0.5, 2)), "at least 1"),
        (dict(window=(1, "all")), "at least 1"),
        (dict(drain=0), "at least 1"),
        (dict(block=-1), "0 .no blocks."),
        (dict(stop=-1.0), "0 .never."),
        (dict(grid=(0.0, 0.5, 1.0)), "5 increasing"),
    ],
)
def test_choices_that_do_not_exist_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        inserter(**options)

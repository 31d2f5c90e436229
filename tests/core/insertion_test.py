import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from aodiff import rng
from aodiff.core import insertion
from aodiff.core.schedules import make_rise

MASK = 9
PAIRS = [("linear", "linear"), ("power(1.7)", "power(2.89)"), ("sin", "linear")]


def rises(pair):
    return tuple(make_rise(spec) for spec in pair)


@functools.partial(jax.jit, static_argnums=(1, 2))
def times(key, shape, pair):
    return insertion.event_times(jax.random.split(key, shape[0]), shape[1], *rises(pair))


corrupt = jax.jit(functools.partial(insertion.corrupt, mask_id=MASK))


@functools.cache
def example(batch=64, capacity=9, pair=PAIRS[0]):
    """Rows of digits behind an anchor 8, with 0 as an ordinary token, some of them fixed."""
    r = np.random.default_rng(0)
    tokens = r.integers(0, 8, (batch, capacity))
    tokens[:, 0] = 8
    length = r.integers(1, capacity + 1, batch)
    fixed = (r.random((batch, capacity)) < 0.3) & (np.arange(capacity) < length[:, None])
    fixed[:, 0] = True
    come, revealed = times(rng.stream(0, rng.TRAIN), (batch, capacity), pair)
    time = jnp.asarray(r.random(batch), jnp.float32)
    return jnp.asarray(tokens), jnp.asarray(length), jnp.asarray(fixed), come, revealed, time


def by_hand(tokens, length, fixed, come, revealed, time):
    """A row at a time, in plain Python."""
    kept = [j for j in range(length) if fixed[j] or time >= come[j]]
    shown = [tokens[j] if fixed[j] or time >= revealed[j] else MASK for j in kept]
    gaps = [b - a - 1 for a, b in zip(kept, [*kept[1:], length], strict=True)]
    return kept, shown, gaps


def test_rows_are_those_made_by_hand():
    args = example()
    state = jax.tree.map(np.asarray, corrupt(*args))
    for b, row in enumerate(zip(*map(np.asarray, args), strict=True)):
        kept, shown, gaps = by_hand(*row)
        n = state.length[b]
        assert n == len(kept) and state.tokens[b, :n].tolist() == shown
        assert state.origin[b, :n].tolist() == kept and np.all(state.origin[b, n:] == 9)
        assert state.gap[b, :n].tolist() == gaps and not state.gap[b, n:].any()
        assert state.target[b, :n].tolist() == [row[0][j] for j in kept]
        assert not state.tokens[b, n:].any() and not state.open[b, n:].any()
        np.testing.assert_array_equal(state.masked[b], state.tokens[b] == MASK)
        assert gaps and sum(gaps) == row[1] - n
        assert sum(g for g, o in zip(gaps, state.open[b, :n], strict=True) if o) == sum(gaps)


def test_packing_is_a_stable_sort():
    tokens, length, fixed, come, revealed, time = example()
    state = corrupt(*example())
    real = np.arange(9) < np.asarray(length)[:, None]
    keep = real & (np.asarray(fixed) | (np.asarray(time)[:, None] >= np.asarray(come)))
    order = np.argsort(~keep, axis=1, kind="stable")
    expected = np.where(np.sort(~keep, axis=1), 0, np.take_along_axis(np.asarray(tokens), order, 1))
    np.testing.assert_array_equal(state.target, expected)


def test_nothing_at_the_start_and_everything_at_the_end():
    tokens, length, fixed, come, revealed, time = example()
    end = corrupt(tokens, length, fixed, come, revealed, jnp.ones_like(time))
    exists = np.arange(9) < np.asarray(length)[:, None]
    np.testing.assert_array_equal(end.tokens, np.where(exists, tokens, 0))
    np.testing.assert_array_equal(end.length, length)
    assert not end.masked.any() and not end.gap.any()
    anchor = jnp.zeros_like(fixed).at[:, 0].set(True)
    start = corrupt(tokens, length, anchor, come, revealed, jnp.zeros_like(time))
    assert np.all(start.length == 1) and np.all(start.tokens[:, 0] == 8)
    np.testing.assert_array_equal(start.gap[:, 0], length - 1)
    given = corrupt(tokens, length, fixed, come, revealed, jnp.zeros_like(time))
    np.testing.assert_array_equal(given.length, jnp.sum(fixed, axis=1))
    assert not given.masked.any()
    free = corrupt(tokens, length, anchor, come, revealed, time)
    np.testing.assert_array_equal(jnp.sum(free.open, axis=1), free.length)  # a gap after each


def test_along_a_path_tokens_come_and_are_revealed_and_nothing_else_happens():
    tokens, length, fixed, come, revealed, time = example()
    before = corrupt(tokens, length, fixed, come, revealed, jnp.zeros_like(time))
    for t in np.linspace(0.1, 1, 10):
        now = corrupt(tokens, length, fixed, come, revealed, jnp.full_like(time, t))
        for b in range(len(tokens)):
            old, new = (
                {int(o): int(x) for o, x in zip(s.origin[b], s.tokens[b], strict=True) if o < 9}
                for s in (before, now)
            )
            assert old.keys() <= new.keys()
            assert all(new[o] == x or x == MASK for o, x in old.items())
        before = now


@pytest.mark.parametrize("pair", PAIRS)
def test_marginals_are_the_closed_ones(pair):
    come, revealed = (
        np.asarray(x).ravel() for x in times(rng.stream(1, rng.TRAIN), (500, 80), pair)
    )
    assert np.all(revealed >= come)
    ins, _ = rises(pair)
    for t in (0.1, 0.4, 0.63, 0.9, 0.99):
        alpha = float(ins.value(jnp.float32(t)))
        masked = float(insertion.masked_share(*rises(pair), np.array([t]))[0])
        for found, share in ((t < come, 1 - alpha), ((t >= come) & (t < revealed), masked)):
            assert abs(found.mean() - share) < 4 * np.sqrt(share * (1 - share) / len(come)) + 1e-4


def test_marginals_in_closed_form():
    t = np.linspace(0.01, 0.99, 50)
    linear, a, b = make_rise("linear"), 1.7, 2.89 / 1.7
    found = insertion.masked_share(linear, linear, t)
    np.testing.assert_allclose(found, -(1 - t) * np.log(1 - t), atol=1e-5)
    found = insertion.masked_share(make_rise("power(1.7)"), make_rise("power(2.89)"), t)
    np.testing.assert_allclose(found, ((1 - t) ** a - (1 - t) ** (a * b)) / (b - 1), atol=1e-5)


@pytest.mark.parametrize(
    "pair, mean, largest",
    [
        (("linear", "linear"), 0.25, 0.3679),
        (("sin", "linear"), 0.3183, 0.4833),
        (("power(1.7)", "power(2.89)"), 0.1619, 0.2756),
        (("power(2.9)", "power(2.89)"), 0.1912, 0.3685),
        (("power(1.8)", "power(3.24)"), 0.1516, 0.2665),
        (("cosine", "linear"), 0.1817, 0.3416),
    ],
)
def test_share_of_masks(pair, mean, largest):
    """flexmdm.md 2.2."""
    found = insertion.masked_share(*rises(pair), (np.arange(20_000) + 0.5) / 20_000)
    np.testing.assert_allclose([found.mean(), found.max()], [mean, largest], atol=2e-4)


def test_no_more_are_masked_than_there_is_room_for():
    """flexmdm.md 3.7."""
    assert abs(insertion.most_masked(*rises(PAIRS[1]), 768) - 288) <= 2
    assert abs(insertion.most_masked(*rises(PAIRS[0]), 1024) - 472) <= 2
    assert insertion.most_masked(*rises(PAIRS[0]), 3) == 3
    most, share = insertion.most_masked(*rises(PAIRS[0]), 200), 1 / math.e
    assert scipy.stats.binom.sf(most, 200, share) < 1e-8


@pytest.mark.parametrize("pair", PAIRS)
def test_lengths_are_binomial_whatever_the_unmasking(pair):
    come, _ = times(rng.stream(2, rng.TRAIN), (4000, 10), pair)
    n = (np.asarray(come) <= 0.4).sum(1)
    alpha = float(rises(pair)[0].value(jnp.float32(0.4)))
    expected = scipy.stats.binom.pmf(np.arange(11), 10, alpha) * 4000
    big = expected > 5
    found = np.bincount(n, minlength=11)
    stat = np.sum((found[big] - expected[big]) ** 2 / expected[big])
    assert scipy.stats.chi2.sf(stat, big.sum() - 1) > 1e-4


def test_masks_are_gathered_in_order():
    masked = jnp.array([[0, 1, 0, 1, 1], [0, 0, 0, 0, 1], [0] * 5], bool)
    slots, real = insertion.first_masked(masked, 2)
    np.testing.assert_array_equal(real, [[1, 1], [1, 0], [0, 0]])
    np.testing.assert_array_equal(slots[0], [1, 3])
    assert slots[1, 0] == 4


@pytest.mark.parametrize(
    "fixed, length, expected",
    [
        ("100000", 5, "111110"),  # no prompt
        ("111000", 6, "001111"),  # a prompt
        ("111000", 3, "001000"),  # a prompt and nothing else
        ("110011", 6, "011100"),  # a middle between a prefix and a suffix
        ("110011", 5, "011100"),
        ("101101", 6, "110110"),  # anchors with free tokens between them, the last one a suffix
    ],
)
def test_where_rows_are_open(fixed, length, expected):
    fixed = jnp.array([[c == "1" for c in fixed]])
    found = insertion.openings(fixed, jnp.array([length]))
    assert "".join("01"[int(x)] for x in found[0]) == expected


def test_gaps_before_tokens():
    """The anchor's gap is the one in front, and the last is read at the length of the row."""
    args = example()
    state = corrupt(*args)
    gap, there = insertion.gaps_before(state.gap, state.length)
    for b in range(len(args[0])):
        n = int(state.length[b]) - 1  # tokens without the anchor
        origin = np.asarray(state.origin[b, 1 : n + 1]) - 1
        ends = np.concatenate([[-1], origin, [int(args[1][b]) - 1]])
        assert np.asarray(gap[b])[np.asarray(there[b])].tolist() == (np.diff(ends) - 1).tolist()


def test_rate_loss_is_the_divergence_up_to_a_constant():
    gap, z = jnp.arange(5.0), jnp.linspace(-2, 2, 5)
    mean = jnp.exp(z)
    phi = lambda z, g: jnp.exp(z) - g + jnp.where(g > 0, g * (jnp.log(jnp.maximum(g, 1)) - z), 0)
    constant = phi(z, gap) - insertion.rate_loss(z, gap)
    np.testing.assert_allclose(
        constant, phi(z + 1, gap) - insertion.rate_loss(z + 1, gap), atol=2e-5
    )
    slope = jax.vmap(jax.grad(insertion.rate_loss))(z, gap)
    np.testing.assert_allclose(slope, mean - gap, atol=1e-5)
    np.testing.assert_allclose(jax.vmap(jax.grad(phi))(z, gap), mean - gap, atol=1e-5)


def test_mean_of_classes():
    logits = jax.random.normal(jax.random.key(0), (3, 5))
    expected = np.asarray(jax.nn.softmax(logits)) @ np.arange(5)
    np.testing.assert_allclose(jnp.exp(insertion.class_log_mean(logits)), expected, rtol=1e-5)


def test_constant_of_paths():
    """flexmdm.md 3.6; and simulated: the sum of the logs of the gaps that tokens fall into."""
    known = {
        0: 0,
        1: 0,
        2: 0.6931,
        3: 1.5607,
        4: 2.5132,
        8: 6.6918,
        16: 15.657,
        64: 72.065,
        256: 301.77,
        1024: 1224.72,
    }
    for n, value in known.items():
        assert abs(insertion.path_constant(n) - value) < 6e-4 * max(1, value / 10)
    r, sums = np.random.default_rng(0), []
    for _ in range(4000):
        left, total = list(r.permutation(5)), 0.0
        there = [-1, 5]
        for j in left:
            i = np.searchsorted(there, j)
            total += np.log(there[i] - there[i - 1] - 1)
            there.insert(i, j)
        sums.append(total)
    assert abs(np.mean(sums) - insertion.path_constant(5)) < 4 * np.std(sums) / np.sqrt(4000)

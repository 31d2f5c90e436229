import itertools

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats

from aodiff.core import corruption


def row_keys(num):
    return jax.random.split(jax.random.key(1), num)


def test_strata_hold_one_point_each():
    for num in (1, 7, 10, 49):  # 1 / 49 * 49 < 1 in floating point
        points = np.sort(corruption.strata(jax.random.key(num), num))
        assert len(points) == num and points[0] > 0 and points[-1] <= 1
        np.testing.assert_array_equal(np.ceil(points * num - 1e-5), np.arange(1, num + 1))


def test_strata_are_spread_over_rows():
    first = [float(corruption.strata(jax.random.key(i), 4)[0]) for i in range(200)]
    assert scipy.stats.kstest(first, "uniform").pvalue > 1e-3


def test_exact_counts_are_uniform_subsets():
    maskable = jnp.broadcast_to(jnp.array([True, True, False, True, True])[None], (6000, 5))
    hidden = np.asarray(corruption.mask_count(row_keys(6000), maskable, jnp.full(6000, 2)))
    assert (hidden.sum(1) == 2).all() and not hidden[:, 2].any()
    subsets = list(itertools.combinations((0, 1, 3, 4), 2))
    counts = [sum(tuple(np.flatnonzero(h)) == s for h in hidden) for s in subsets]
    assert scipy.stats.chisquare(counts).pvalue > 1e-3


def test_rates_hide_independently():
    maskable = jnp.ones((4000, 3), bool)
    rate = jnp.where(jnp.arange(4000) < 2000, 0.2, 0.7)
    hidden = np.asarray(corruption.mask_with_rate(row_keys(4000), maskable, rate))
    for part, p in ((hidden[:2000], 0.2), (hidden[2000:], 0.7)):
        expected = 2000 * scipy.stats.binom.pmf(np.arange(4), 3, p)
        assert scipy.stats.chisquare(np.bincount(part.sum(1), minlength=4), expected).pvalue > 1e-3


def test_counts_are_uniform_and_never_empty():
    sizes = jnp.full(10_000, 5)
    counts = corruption.stratified_counts(corruption.strata(jax.random.key(0), 10_000), sizes)
    np.testing.assert_array_equal(np.bincount(counts, minlength=6), [0] + [2000] * 5)
    ends = corruption.stratified_counts(jnp.array([1e-9, 1.0, 0.5]), jnp.array([3, 3, 0]))
    np.testing.assert_array_equal(ends, [1, 3, 0])


def test_a_share_of_the_rows_is_cut_to_uniform_lengths():
    points = corruption.strata(jax.random.key(0), 4000)
    lengths = jnp.where(points > 0.9, 3, 8)
    cut = np.asarray(corruption.cut_lengths(points, lengths, 0.5, 4))
    np.testing.assert_array_equal(np.bincount(cut, minlength=9), [0, 0, 0, 400, *[400] * 4, 2000])
    # Rows below the shortest stay whole.
    rows = corruption.cut_lengths(jnp.array([1e-9, 0.5, 1.0]), jnp.array([2, 0, 4]), 1.0, 4)
    np.testing.assert_array_equal(rows, [2, 0, 4])


def test_context_weighs_by_distance_to_what_is_known():
    """mdm.md 13.20."""
    visible = np.random.default_rng(0).random((3, 60)) < 0.5
    visible[0], visible[1] = True, False
    weight = np.asarray(corruption.context_weight(jnp.asarray(visible)))
    gap = np.abs(np.subtract.outer(np.arange(60), np.arange(60)))
    expected = [
        [
            sum(0.15 * 0.7 ** (gap[i, j] - 1) for j in np.flatnonzero(row) if j != i)
            for i in range(60)
        ]
        for row in visible
    ]
    np.testing.assert_allclose(weight, expected, atol=1e-6)
    np.testing.assert_allclose(weight[0, 25:35], 1, atol=1e-3)  # half of it at the ends
    np.testing.assert_allclose(weight[0, [0, -1]], 0.5, atol=1e-3)
    assert not weight[1].any()


def test_losses_vary_most_with_independent_times_and_least_with_counts():
    """mdm.md 14, for 64 positions whose cross entropy is the share that is hidden."""
    maskable = jnp.ones((32, 64), bool)

    def loss(hidden, weight):
        return jnp.sum(weight * hidden.sum(1) ** 2 / 64)

    def independent(key):
        time = 1e-3 + (1 - 1e-3) * jax.random.uniform(jax.random.fold_in(key, 32), (32,))
        return by_time(key, time)

    def stratified(key):
        return by_time(key, 1e-3 + (1 - 1e-3) * corruption.strata(jax.random.fold_in(key, 32), 32))

    def by_time(key, time):
        return loss(corruption.mask_with_rate(jax.random.split(key, 32), maskable, time), 1 / time)

    def counted(key):
        points = corruption.strata(jax.random.fold_in(key, 32), 32)
        counts = corruption.stratified_counts(points, maskable.sum(1))
        return loss(corruption.mask_count(jax.random.split(key, 32), maskable, counts), 64 / counts)

    spread = [
        jnp.std(jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(0), 400)))
        for draw in (independent, stratified, counted)
    ]
    assert spread[0] > 2 * spread[1] > 4 * spread[2], spread


def test_the_shift_of_the_strata_is_nobodys_own_draw():
    keys = jax.random.split(jax.random.key(0), 500)
    point = jax.vmap(lambda k: corruption.strata(k, 1)[0])(keys)
    own = jax.vmap(lambda k: jax.random.uniform(jax.random.fold_in(k, 0), (3,)))(keys)
    for column in own.T:
        assert abs(np.corrcoef(point, column)[0, 1]) < 5 / np.sqrt(500)

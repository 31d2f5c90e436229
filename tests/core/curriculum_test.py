import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aodiff.core.curriculum import (
    Curriculum,
    gumbel_order,
    linear_profile,
    marginal_entropy,
    orient,
)

PHASES = Curriculum.of(1000, (0.05, 0.3), (0.36, 0.64), 0.5, 0.70)
shares = jax.vmap(PHASES.share, (0, None))


def share(steps, freeze_step=-1):
    return np.asarray(shares(jnp.asarray(steps), jnp.int32(freeze_step)))


def test_phase_boundaries_in_steps():
    assert PHASES == Curriculum(50, 300, 360, 640, 500, 60)


@pytest.mark.parametrize(
    "bad",
    [dict(shift=(0.2, 0.64)), dict(freeze_from=0.7), dict(settle=1.2), dict(warmup=(-0.1, 0))],
)
def test_fractions_out_of_order_are_refused(bad):
    good = dict(warmup=(0.05, 0.3), shift=(0.36, 0.64), freeze_from=0.5, settle=0.70)
    with pytest.raises(ValueError, match="must not decrease"):
        Curriculum.of(1000, **(good | bad))


def test_share_rises_linearly_to_four_fifths_and_waits_for_the_freeze():
    np.testing.assert_allclose(
        share([0, 359, 360, 500, 640, 999]), [0, 0, 0, 0.4, 0.8, 0.8], atol=1e-6
    )


@pytest.mark.parametrize("freeze", [500, 560, 640, 700])
def test_share_is_monotone_and_one_once_settled(freeze):
    p = share(np.arange(1001), freeze)
    assert (np.diff(p) >= 0).all() and np.diff(p).max() < 0.02
    assert p[freeze - 1] < 0.81 and p[freeze + 59] < 1 and (p[freeze + 60 :] == 1).all()
    np.testing.assert_array_equal(p[:freeze], share(np.arange(freeze)))


def test_gumbel_without_strength_is_uniform():
    keys = jax.random.split(jax.random.key(0), 6000)
    draw = jax.vmap(gumbel_order, (0, None, None))
    orders = np.asarray(draw(keys, jnp.array([1.0, 0.5, 0.0]), 0.0))
    counts = [np.all(orders == p, axis=1).sum() for p in itertools.permutations(range(3))]
    chi_square = sum((c - 1000) ** 2 / 1000 for c in counts)
    assert sum(counts) == 6000 and chi_square < 20.5  # 99.9 % of chi-square with 5 degrees


@pytest.mark.parametrize("kappa", [1.5, 16.0, 64.0])
def test_gumbel_agreement_with_the_sorted_order_is_a_mean_of_tanh(kappa):
    n = 16
    priority = np.linspace(1, 0, n)
    keys = jax.random.split(jax.random.key(1), 2000)
    orders = jax.vmap(gumbel_order, (0, None, None))(keys, jnp.asarray(priority), kappa)
    rank = np.argsort(np.asarray(orders), axis=1)
    i, j = np.triu_indices(n, 1)
    tau = np.sign(rank[:, j] - rank[:, i]).mean()
    want = np.tanh(kappa * (priority[i] - priority[j]) / 2).mean()
    assert abs(tau - want) < 0.02


def test_linear_profile_prefers_information_that_arrives_early():
    falling = jnp.array([[3.0, 2.0, 1.0], [1.0, 2.0, 3.0]])
    weights = np.array([1.0, 0.55, 0.1]) / 1.65
    np.testing.assert_allclose(linear_profile(falling), np.asarray(falling) @ weights, rtol=1e-6)


def test_marginal_entropy_averages_units():
    counts = np.array([[1, 1, 0], [4, 0, 0], [2, 2, 2]])
    assert marginal_entropy(counts) == pytest.approx((np.log(2) + 0 + np.log(3)) / 3)


def test_the_first_direction_is_the_cheaper_one():
    assert orient(-0.1, 1.0, None, 0) == (1, 0)
    assert orient(0.1, 1.0, None, 0) == (-1, 0)


def test_later_directions_follow_the_previous_one_whatever_the_eigenvector_sign():
    assert orient(0.1, 0.1, 2.0, 0) == (1, 0)  # worse, but not clearly
    assert orient(-0.1, 0.1, -2.0, 0) == (-1, 0)


def test_only_three_clear_doubts_in_a_row_flip():
    doubts, signs = 0, []
    for gap in (0.4, 0.4, 0.1, 0.4, 0.4, 0.4):
        sign, doubts = orient(gap, 0.1, 1.0, doubts)
        signs.append(sign)
    assert signs == [1, 1, 1, 1, 1, -1] and doubts == 0
    # The eigenvector's own sign is irrelevant: the same doubts seen from the other end.
    assert orient(-0.4, 0.1, -1.0, 2) == (1, 0)

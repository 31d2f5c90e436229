"""Rows alike are found alike, rows that differ in one way are found to differ in that way alone."""

import numpy as np
import pytest
from scipy import stats

from aodiff.evals import compare

CATEGORICAL = np.array([False, False, True, True])


def draw(rows: int, seed: int) -> np.ndarray:
    """Two dependent numbers, a category that follows from them, and one of its own."""
    rng = np.random.default_rng(seed)
    a = rng.normal(size=rows)
    b = a + 0.3 * rng.normal(size=rows)
    return np.stack([a, b, (a + b > 0) + 1.0, rng.integers(0, 3, rows)], axis=1)


def shuffled(rows: np.ndarray) -> np.ndarray:
    """The same columns, each in an order of its own: marginals stay, dependencies go."""
    rng = np.random.default_rng(9)
    return np.stack([rng.permutation(column) for column in rows.T], axis=1)


@pytest.fixture(scope="module")
def real():
    return draw(400, 0)


def test_rows_of_the_same_law_cannot_be_told_apart(real):
    auc = compare.detection_auc(real, draw(500, 1), CATEGORICAL)
    assert abs(auc["logistic"] - 0.5) < 0.06 and abs(auc["boosting"] - 0.5) < 0.06
    bootstrap = real[np.random.default_rng(2).integers(0, 400, 4000)]
    assert compare.association_error(real, bootstrap, CATEGORICAL) < 0.02
    assert compare.marginal_error(real, bootstrap, CATEGORICAL) < 0.03
    assert compare.association_error(real, real, CATEGORICAL) == 0
    assert compare.marginal_error(real, real, CATEGORICAL) == 0


def test_lost_dependencies_are_found_by_boosting_and_in_pairs_but_not_in_marginals(real):
    fake = shuffled(real)
    auc = compare.detection_auc(real, fake, CATEGORICAL)
    assert auc["boosting"] > 0.85 > 0.65 > auc["logistic"]
    # Three of six pairs were dependent, each with an association near 1.
    assert compare.association_error(real, fake, CATEGORICAL) > 0.35
    assert compare.marginal_error(real, fake, CATEGORICAL) == 0


def test_a_shift_of_one_column_is_found_by_both_and_in_marginals(real):
    fake = draw(400, 1) + [6.0, 0, 0, 0]
    assert min(compare.detection_auc(real, fake, CATEGORICAL).values()) > 0.95
    assert compare.marginal_error(real, fake, CATEGORICAL) > 0.25  # one column of four at 1


def test_missing_cells_alone_do_not_tell_or_break(real):
    a, b = real.copy(), draw(400, 1)
    gaps = np.random.default_rng(3).random(a.shape) < 0.2
    a[gaps] = b[gaps] = np.nan
    auc = compare.detection_auc(a, b, CATEGORICAL)
    assert abs(auc["boosting"] - 0.5) < 0.08
    assert np.isfinite(compare.association_error(a, b, CATEGORICAL))
    assert 0 < compare.nearest_ratio(a, b, draw(50, 4), CATEGORICAL) < 3


def test_associations_by_their_formulas(real):
    found = compare.associations(real, CATEGORICAL)
    assert found[0, 1] == pytest.approx(stats.pearsonr(real[:, 0], real[:, 1]).statistic)
    table = np.array(
        [[np.sum((real[:, 2] == i) & (real[:, 3] == j)) for j in range(3)] for i in (1, 2)]
    )
    cramer = np.sqrt(stats.chi2_contingency(table, correction=False).statistic / len(real))
    assert found[2, 3] == pytest.approx(cramer)  # the smaller side has two categories
    # The correlation ratio squared is the R squared of a regression on the category.
    group = real[:, 2]
    fit = np.where(group == 1, real[group == 1, 0].mean(), real[group == 2, 0].mean())
    r2 = 1 - np.var(real[:, 0] - fit) / np.var(real[:, 0])
    assert found[0, 2] == found[2, 0] == pytest.approx(np.sqrt(r2))
    np.testing.assert_array_equal(np.diag(found), 1)
    assert compare.associations(np.ones((5, 2)), np.zeros(2, bool))[0, 1] == 0  # constant columns


def test_distances_by_hand():
    assert compare.total_variation(np.array([0, 0, 1, 2]), np.array([0, 3])) == pytest.approx(0.5)
    real, fake = np.array([[0.0], [1], [2], [3]]), np.array([[2.0], [3], [4], [5]])
    assert compare.marginal_error(real, fake, np.array([False])) == 0.5  # half is below all of fake
    assert compare.marginal_error(real, fake, np.array([True])) == 0.5


def test_copies_are_near_and_unseen_rows_are_as_far_as_unseen_rows(real):
    train, unseen = draw(400, 5), draw(400, 6)
    assert compare.nearest_ratio(train, real, train[:100], CATEGORICAL) == 0
    assert 0.75 < compare.nearest_ratio(train, real, unseen, CATEGORICAL) < 1.33


def test_efficacy_of_a_label(real):
    test = draw(300, 7)
    assert compare.efficacy(real, test, CATEGORICAL, label=2) > 0.9
    assert abs(compare.efficacy(shuffled(real), test, CATEGORICAL, label=2) - 0.5) < 0.15
    assert compare.efficacy(real, test, CATEGORICAL, label=1) > 0.8  # R squared; 0.917 is possible
    assert compare.efficacy(shuffled(real), test, CATEGORICAL, label=1) < 0.1
    one = real[real[:, 2] == 1]
    assert compare.efficacy(one, test, CATEGORICAL, label=2) == 0.5  # nothing but one class seen
    gaps = real.copy()
    gaps[:50, 2] = np.nan
    assert compare.efficacy(gaps, test, CATEGORICAL, label=2) > 0.9

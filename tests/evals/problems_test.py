"""What scores are worth: pass@k, standard errors, comparisons in pairs."""

import itertools
import math

import numpy as np
import pytest

from aodiff.evals import problems


def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer():
    for samples, passed in ((5, 0), (5, 2), (6, 6), (6, 1)):
        right = [True] * passed + [False] * (samples - passed)
        for k in range(1, samples + 1):
            subsets = list(itertools.combinations(right, k))
            share = sum(any(s) for s in subsets) / len(subsets)
            assert problems.pass_at_k(samples, passed, k) == pytest.approx(share)


def test_pass_at_k_needs_k_answers():
    with pytest.raises(ValueError, match="pass@3 needs 3 answers"):
        problems.pass_at_k(2, 1, 3)


def test_the_error_of_a_share_is_binomial():
    mean, error = problems.mean_and_error([1] * 30 + [0] * 70)
    assert mean == pytest.approx(0.3)
    assert error == pytest.approx(math.sqrt(0.3 * 0.7 / 99))
    assert problems.mean_and_error([1.0]) == (1.0, 0.0)


def test_mcnemar_by_counting():
    ours = [1] * 8 + [0] * 2 + [1] * 5 + [0] * 5
    theirs = [0] * 8 + [1] * 2 + [1] * 5 + [0] * 5
    found = problems.paired(ours, theirs)
    tail = sum(math.comb(10, i) for i in (0, 1, 2)) / 2**10
    assert found.p_value == pytest.approx(2 * tail)
    assert (found.ahead, found.behind, found.test) == (8, 2, "McNemar")
    assert found.difference == pytest.approx(6 / 20)
    difference = np.array(ours) - np.array(theirs)
    assert found.error == pytest.approx(difference.std(ddof=1) / math.sqrt(20))


def test_equal_systems_do_not_differ():
    found = problems.paired([1, 0, 1], [1, 0, 1])
    assert (found.difference, found.p_value) == (0.0, 1.0)


def test_shares_of_several_samples_are_compared_by_their_differences():
    rng = np.random.default_rng(0)
    theirs = rng.integers(0, 4, 50) / 4
    found = problems.paired(theirs + 0.25, theirs + rng.choice([0, 0.25], 50))
    assert found.test == "paired t" and found.p_value < 1e-4 and found.behind == 0

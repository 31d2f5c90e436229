import itertools

import numpy as np
import pytest

from aodiff.data import brackets
from aodiff.evals import infill

LAW = np.array([0, 0, 0.3, 0, 0.5, 0, 0.2])


def strings(n):
    every = (np.array(s) for s in itertools.product((0, 1), repeat=n))
    return [tuple(s.tolist()) for s in every if brackets.balanced(s)]


def every_hole():
    """Probability of each (before, after, hole), by enumeration."""
    found = {}
    for n in (2, 4, 6):
        for s in strings(n):
            for a, b in itertools.combinations(range(n + 1), 2):
                key = s[:a], s[b:], s[a:b]
                found[key] = found.get(key, 0) + LAW[n] / len(strings(n)) / (n * (n + 1) / 2)
    return found


def test_the_law_of_a_hole_is_that_of_enumeration():
    holes = every_hole()
    assert abs(sum(holes.values()) - 1) < 1e-12
    for before, after in {(a, b) for a, b, _ in holes}:
        law = np.zeros(7)
        for (a, b, hole), p in holes.items():
            law[len(hole)] += p * ((a, b) == (before, after))
        found = infill.law_of_hole(np.array(before, int), np.array(after, int), LAW)
        np.testing.assert_allclose(found, law / law.sum(), atol=1e-12)


def test_a_guess_knows_how_much_there_is():
    holes, law = every_hole(), np.zeros(7)
    for (a, b, hole), p in holes.items():
        law[len(a) + len(hole) + len(b)] += p * (len(a) + len(b) == 3)
    np.testing.assert_allclose(infill.guess(3, LAW), law / law.sum())


@pytest.mark.parametrize(
    "steps, low, high", [(4, 0, 0), (5, 2, 1), (3, 0, 1), (4, 1, 0), (2, 3, 0)]
)
def test_paths_are_counted(steps, low, high):
    walks = (low + np.cumsum(w) for w in itertools.product((1, -1), repeat=steps))
    assert infill.paths(steps, low, high) == sum(w[-1] == high and w.min() >= 0 for w in walks)


def test_holes_are_uniform_and_never_empty():
    draws = np.random.default_rng(0).random((30_000, 2))
    found = brackets.hole(draws, np.full(len(draws), 3), 5)
    counts = np.unique(found, axis=0, return_counts=True)[1]
    assert len(counts) == 6 and np.all(abs(counts - 5000) < 300) and not found[:, 3:].any()


def test_parts_stand_where_they_are_told_to():
    sides = [(np.array([0, 0]), np.array([1])), (np.array([], int), np.array([], int))]
    tokens, given = infill.placed(sides, np.array([4, 2]), 5)
    assert tokens[0].tolist() == [0, 0, 2, 1, 2] and given[0].tolist() == [1, 1, 0, 1, 1]
    assert given[1].tolist() == [0, 0, 1, 1, 1]

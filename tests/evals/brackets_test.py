import numpy as np
import pytest

from aodiff.evals.brackets import cut, distances


def test_distances_of_lengths_by_hand():
    law = np.array([0, 0, 0.5, 0, 0.5])
    assert distances(np.array([2, 4]), law) == {"tv": 0, "ks": 0, "w1": 0}
    found = distances(np.array([2, 3]), law)  # a half is one token short
    assert found == pytest.approx({"tv": 0.5, "ks": 0.5, "w1": 0.5})
    found = distances(np.array([0, 0]), law)
    assert found == pytest.approx({"tv": 1, "ks": 1, "w1": 3})


def test_strings_end_at_the_end_symbol():
    assert cut(np.array([0, 1, 2, 0])).tolist() == [0, 1] and cut(np.array([0, 1])).tolist() == [
        0,
        1,
    ]
    assert cut(np.array([2, 0])).tolist() == []

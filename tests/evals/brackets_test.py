import numpy as np
import pytest

from aodiff.config import base
from aodiff.evals import brackets
from aodiff.evals.brackets import distances
from aodiff.evals.trained import ended
from aodiff.sampling.samples import Samples


def test_distances_of_lengths_by_hand():
    law = np.array([0, 0, 0.5, 0, 0.5])
    assert distances(np.array([2, 4]), law) == {"tv": 0, "ks": 0, "w1": 0}
    found = distances(np.array([2, 3]), law)  # a half is one token short
    assert found == pytest.approx({"tv": 0.5, "ks": 0.5, "w1": 0.5})
    found = distances(np.array([0, 0]), law)
    assert found == pytest.approx({"tv": 1, "ks": 1, "w1": 3})


def test_strings_end_at_their_length_or_an_end_symbol():
    rows = np.array([[0, 1, 2, 0], [0, 1, 0, 0], [2, 0, 0, 0]])
    out = Samples(rows, np.array([4, 3, 4]), rows)
    assert [row.tolist() for row in ended(out, 2)] == [[0, 1], [0, 1, 0], []]


def test_numbers_of_strings_by_hand():
    law = np.array([0, 0, 0.5, 0, 0.5])
    found = brackets.of_strings([np.array([0, 1]), np.array([0, 1]), np.array([1, 0])], law)
    assert found["balanced"] == pytest.approx(2 / 3) == found["distinct"]
    assert found["mean_length"] == 2 and found["length_w1"] == 1


def test_ways_to_sample_are_those_of_the_method():
    config = base("flexmdm")
    assert brackets.ways(config) == {"as asked": {}}
    config.eval.steps = (4, 8)
    grown = brackets.ways(config)
    assert grown["Poisson, sin/8"] == dict(insertion="sin", unmasking="linear", steps=8)
    assert not any("thin" in name for name in grown)
    config.model.classes = 4
    assert brackets.ways(config)["thin, linear/4"]["count"] == "thin"
    for method, ways in {"mdm": {"random", "likely first"}, "aogpt": {"in its order"}}.items():
        config = base(method)
        config.eval.steps = (4,)
        assert {name.partition("/")[0] for name in brackets.ways(config)} == ways


def test_a_line_for_each_way():
    numbers = {f"a/4/{c}": 0.5 for c in brackets.COLUMNS} | {"excess": 1.0, "data/length_tv": 0.25}
    lines = brackets.table(numbers).splitlines()
    assert "+1.000" in lines[0] and lines[2].split() == ["a/4"] + ["0.500"] * 7
    assert lines[3].split()[:4] == ["data", "nan", "nan", "0.250"]
    assert brackets.panels(numbers)["share balanced"] == {"a": [(0.5, 0.5)]}

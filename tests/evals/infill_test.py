import dataclasses
import itertools
import json
import pathlib
import types

import numpy as np
import pytest

from aodiff import data
from aodiff.config import base
from aodiff.data import brackets
from aodiff.evals import infill
from aodiff.sampling.samples import Samples

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


@dataclasses.dataclass
class Writer:
    """Fills every hole with opening brackets: one where it may, all there are where it is told."""

    name: str
    workdir: pathlib.Path

    def __post_init__(self):
        self.config = base("flexmdm")
        self.config.data.update(
            dict(name=self.name, seq_len=16, lengths=(2, 4, 8, 16), eval_rows=64)
        )
        self.config.eval.samples = 50
        self.info = data.describe(self.config.data)
        self.splits = data.open_splits(self.config.data)
        self.method = types.SimpleNamespace(grows=not self.name.endswith(data.CANVAS))

    def picked(self, split, most):
        return np.arange(most)

    def complete(self, tokens, given, **sample):
        if not self.method.grows:
            return Samples(np.where(given, tokens, 0), np.full(50, 16), given, calls=np.ones(50))
        rows = [np.concatenate([t[: g.argmin()], [0], t[g.argmin() :][g[g.argmin() :]]])
                for t, g in zip(tokens, given, strict=True)]  # fmt: skip
        lengths = np.array([len(r) for r in rows])
        out = np.stack([np.pad(r, (0, 16 - len(r))) for r in rows])
        return Samples(out, lengths, given, calls=np.ones(50))


@pytest.mark.parametrize("name", brackets.INFILL)
def test_strings_are_judged_whole(name, tmp_path):
    found = infill.measure(Writer(name, tmp_path))
    ways = ["inserted"] if name == "brackets_infill" else ["told", "guessed"]
    outcomes = json.loads((tmp_path / "infill.json").read_text())
    assert list(outcomes) == ways and len(infill.table(found).splitlines()) == 1 + len(ways)
    for way in ways:
        assert 0 < found[f"{way}/right"] <= found[f"{way}/balanced"] < 0.5
        assert found[f"{way}/right"] == np.mean(outcomes[way])
    if ways == ["inserted"]:  # one bracket a hole
        assert found["inserted/length_tv"] > 0.2
    else:
        assert found["told/length_w1"] < 0.6

import dataclasses
import json
import pathlib
import types

import numpy as np
import pytest

from aodiff import data
from aodiff.config import base
from aodiff.data import mazes as paths
from aodiff.data.maze import survey
from aodiff.evals import mazes
from aodiff.sampling.samples import Samples

# 0 1 2
# 3 # 5
# 6 7 8
RING = survey(np.array([[1, 1, 1], [1, 0, 1], [1, 1, 1]], bool))
GOOD = {"walls": False, "jumps": False, "order": True, "ends": True, "right": True}
GOOD |= {"shortest": True}


@pytest.mark.parametrize(
    "path, stops, but",
    [
        ([0, 1, 2], [0, 2], {}),
        ([0, 3, 6, 7, 8, 5, 2], [0, 2], {"shortest": False}),
        ([0, 1, 2, 1, 0], [0, 2, 0], {}),
        ([0, 1, 2, 5, 2], [0, 5, 2], {}),
        ([0, 1, 0, 1, 2], [0, 2], {"shortest": False}),
        ([0, 1, 2], [0, 5, 2], {"order": False}),
        ([2, 5, 2, 1, 0], [2, 0, 5, 0], {"order": False}),
        ([3, 4, 5], [3, 5], {"walls": True}),
        ([0, 2], [0, 2], {"jumps": True}),
        ([0, 0, 1], [0, 1], {"jumps": True}),
        ([1, 2, 3], [1, 3], {"jumps": True}),  # the next id, but in the next row
        ([0, 1, 2, 5], [0, 2], {"ends": False}),
        ([1, 0, 1, 2], [0, 2], {"ends": False}),
        ([], [0, 2], {"ends": False, "order": False}),
    ],
)
def test_paths_are_judged(path, stops, but):
    found = mazes.judge(np.array(path, int), np.array(stops), RING)
    wrong = {"right": False, "shortest": False} if but.keys() - {"shortest"} else {}
    assert found == GOOD | but | wrong


def test_subgoals_are_set_apart_or_in_places():
    stops = np.array([[0, 2, 8], [3, 5, 9]])
    tokens, given = mazes.apart(stops, 7, 9)
    assert np.flatnonzero(given[0]).tolist() == [0, 2, 6] and tokens[0][given[0]].tolist() == [
        0,
        2,
        8,
    ]
    assert np.flatnonzero(given[1]).tolist() == [0, 6] and tokens[1][given[1]].tolist() == [3, 5]
    places = np.zeros((2, 6), bool)
    places[0, [0, 2, 4]] = places[1, [0, 5]] = True
    tokens, given = mazes.placed(stops, places, 9)
    assert tokens[0].tolist() == [0, 9, 2, 9, 8, 9] and given[0].tolist() == [1, 0, 1, 0, 1, 1]
    assert tokens[1][[0, 5]].tolist() == [3, 5] and given[1].tolist() == [1, 0, 0, 0, 0, 1]


def test_places_are_those_of_a_path_with_as_many_subgoals():
    of = lambda stops, rows: paths.Paths(np.array(stops), rows, rows)
    others = of([[1, 2, 9], [1, 2, 3], [4, 5, 9]], np.eye(3, dtype=bool))
    found = mazes.drawn(of([[7, 8, 0]] * 20 + [[7, 8, 9]] * 20, None), others, 9)
    assert np.all(found[:20] == [0, 1, 0]) and set(np.argmax(found[20:], axis=1)) == {0, 2}


@dataclasses.dataclass
class Walker:
    """Writes the path of the data where it knows the places of all subgoals, or inserts it; where
    it only has a prompt it writes no more than its first cell."""

    name: str
    workdir: pathlib.Path
    method: str = "mdm"

    def __post_init__(self):
        self.config = base("flexmdm" if self.name == "maze" else self.method)
        changes = dict(name=self.name, seq_len=30, clues=(2, 4), maze=(7, 0.3), eval_rows=50)
        self.config.data.update(changes)
        self.config.eval.samples = 50
        self.info = data.describe(self.config.data)
        self.splits = data.open_splits(self.config.data)
        self.method = types.SimpleNamespace(flops=lambda widths, squares: 1e9 * widths)

    def picked(self, split, most):
        return np.arange(most)

    def complete(self, tokens, given, **sample):
        fields = self.splits["validation"].read(np.arange(50))
        rows, ones = fields["tokens"].astype(int), np.ones(50)
        if self.name == "maze":
            starts = tokens[np.arange(50), given.argmax(1)]
            assert np.all(starts == rows[:, 0])
            return Samples(rows, fields["length"], given, calls=ones, widths=ones, squares=ones)
        assert np.all(tokens[:, :4] == rows[:, :4])
        told = np.all((tokens == rows) | ~given, axis=1) & given[:, 4:].any(1)
        first = np.where(np.arange(30) < 5, rows, 49)
        out = np.where(told[:, None], rows, first)
        return Samples(out, np.full(50, 30), given, calls=ones, widths=ones, squares=ones)


def test_a_canvas_is_measured_in_all_ways_and_paired_with_the_run_above(tmp_path):
    walker = Walker("maze", tmp_path)
    walker.config.eval.steps = (4, 8)
    several = mazes.measure(walker)
    assert set(several) >= {"inserted/4/right", "inserted/8/right"}
    head, first, *_ = (line.split() for line in mazes.table(several).splitlines())
    assert head[-3:] == ["right[2]", "right[3]", "right[4]"] and first[-3:] == ["1.000"] * 3
    walker.config.eval.steps = ()
    found = mazes.measure(walker)
    assert found["inserted/right"] == 1 and found["inserted/length"] == found["data/length"]
    assert found["inserted/gflops"] == 1 and "inserted/behind" not in found
    (tmp_path / "mdm").mkdir()
    arm = mazes.measure(Walker("maze_canvas", tmp_path / "mdm"))
    assert len(mazes.table(arm).splitlines()) == 1 + 6 + 1
    for way in ("random", "likely first"):
        assert arm[f"told, {way}/right"] == 1 and arm[f"told, {way}/behind"] == 0
        assert arm[f"prompt, {way}/right"] == 0 and arm[f"prompt, {way}/behind"] == 1
        assert arm[f"prompt, {way}/length"] == 1
        assert arm[f"drawn, {way}/right"] < 1
    outcomes = json.loads((tmp_path / "mdm" / mazes.OUTCOMES).read_text())
    assert np.mean(outcomes["right"]["drawn, random"]) == arm["drawn, random/right"]
    sizes = np.array(outcomes["subgoals"])
    assert set(sizes) == {2, 3, 4} and arm["told, random/right[4]"] == 1
    left = mazes.measure(Walker("maze_canvas", tmp_path / "mdm", "aogpt"))
    assert left["prompt/behind"] == 1 and "told/right" not in left


def test_the_difference_is_paired(tmp_path):
    walker = Walker("maze_canvas", tmp_path / "mdm")
    record = {"split": "validation", "right": {"inserted": [1, 1, 0, 0]}}
    (tmp_path / mazes.OUTCOMES).write_text(json.dumps(record))
    found = mazes.behind(walker, {"a": [1, 0, 0, 0], "b": [1, 1, 0, 0], "c": [1]})
    assert found["a/behind"] == 0.25 and found["a/behind_se"] == pytest.approx(np.sqrt(3) / 8)
    assert found["b/behind"] == found["b/behind_se"] == 0 and "c/behind" not in found

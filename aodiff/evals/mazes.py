"""Mazes: is what was written a path through free cells that visits the subgoals in their order.

A model that inserts starts from the subgoals, with room for any number of cells between two of
them. A canvas reads them in a prompt and writes all of the path ("prompt"); or it is told where
they stand, too: in the places of another path of as many subgoals ("drawn"), or in those of the
path itself ("told"). Source: flexmdm.md 9 and 17.2.
"""

import json
import math
from collections.abc import Mapping

import jax
import numpy as np

from aodiff import data
from aodiff.data import DataInfo, mazes
from aodiff.data.maze import Maze
from aodiff.data.mazes import Paths
from aodiff.evals.trained import Trained, as_asked, before_end
from aodiff.writers import replace_text

FAULTS = ("walls", "jumps", "order", "ends")
COLUMNS = ("right", "right_se", "shortest", *FAULTS, "length", "calls", "gflops")
PAIRED = ("behind", "behind_se")
OUTCOMES = "maze.json"
OTHERS = 4096  # training paths of which places are drawn


def fits(info: DataInfo) -> bool:
    """Whether rows are paths through a maze."""
    return info.name in mazes.NAMES


def judge(path: np.ndarray, stops: np.ndarray, maze: Maze) -> dict[str, bool]:
    """What is true of a path (n,) of cells that should visit `stops` (K,) in their order.

    walls: it enters a wall. jumps: it goes to a cell that is not beside the last. order: it visits
    all of them in their order. ends: it begins at the first and ends at the last. right: all is
    well. shortest: it is right, and no path is shorter.
    """
    cells = iter(path.tolist())
    row, column = np.divmod(path, len(maze.free))
    found = {
        "walls": not maze.free.ravel()[path].all(),
        "jumps": bool(np.any(np.abs(np.diff(row)) + np.abs(np.diff(column)) != 1)),
        "order": all(stop in cells for stop in stops.tolist()),
        "ends": len(path) > 0 and path[0] == stops[0] and path[-1] == stops[-1],
    }
    right = found["order"] and found["ends"] and not (found["walls"] or found["jumps"])
    least = 1 + maze.steps[stops[:-1], stops[1:]].sum()
    return found | {"right": bool(right), "shortest": bool(right and len(path) == least)}


def measure(trained: Trained) -> dict[str, float]:
    """Numbers of paths between the subgoals of `eval.samples` rows of `eval.split`, keys
    "<way>/<number>".

    right: share of paths that are right, with its standard error, and "right[K]" of those with K
    subgoals. shortest, walls, jumps, order, ends: shares, see `judge`. length: mean number of
    cells; "data" has that of the data. calls, gflops: of the network, per path. behind: in the
    share that is right, behind the run this one is compared with, paired by row, with its standard
    error; of several ways of that run it is the first.

    Writes `maze.json`, the outcome of each row.
    """
    config, maze = trained.config, mazes.make_maze(trained.config.data)
    picked = trained.picked(config.eval.split, config.eval.samples)
    splits = mazes.open_splits(config.data)
    truth = splits[config.eval.split].paths(picked)
    others = splits["train"].paths(np.arange(OTHERS))
    stops = [row[row != maze.end] for row in truth.stops]
    sizes = np.array([len(s) for s in stops])
    found = {"data/length": (truth.tokens != maze.end).sum(1).mean()}
    outcomes = {}
    for name, (tokens, given, sample) in templates(trained, truth, others, maze.end).items():
        out = trained.complete(tokens, given, **sample)
        written = [
            path_of(row[:length], trained, maze.end)
            for row, length in zip(out.tokens, out.lengths, strict=True)
        ]
        judged = [judge(*pair, maze) for pair in zip(written, stops, strict=True)]
        numbers = {key: np.mean([j[key] for j in judged]) for key in judged[0]}
        right = np.array([j["right"] for j in judged])
        numbers["right_se"] = right.std() / math.sqrt(len(right))
        numbers["length"] = np.mean([len(path) for path in written])
        numbers |= {f"right[{k}]": right[sizes == k].mean() for k in np.unique(sizes)}
        if out.calls is not None:
            flops = trained.method.flops(out.widths, out.squares)
            numbers |= {"calls": np.mean(out.calls), "gflops": np.mean(flops) / 1e9}
        outcomes[name] = right.astype(int).tolist()
        found |= {f"{name}/{key}": float(value) for key, value in numbers.items()}
    found |= behind(trained, outcomes)
    if jax.process_index() == 0:
        record = {"split": config.eval.split, "subgoals": sizes.tolist(), "right": outcomes}
        replace_text(trained.workdir / OUTCOMES, json.dumps(record))
    return found


def path_of(row: np.ndarray, trained: Trained, end: int) -> np.ndarray:
    """The cells of a written row (n,), without the prompt and what comes after an end symbol."""
    if trained.info.name.endswith(data.CANVAS):
        row = row[trained.config.data.clues[1] :]
    return before_end(row, end)


def templates(
    trained: Trained, truth: Paths, others: Paths, end: int
) -> dict[str, tuple[np.ndarray, np.ndarray, dict]]:
    """Rows (N, n), what is given of them and values of `config.sample`, by the name of a way."""
    asked = as_asked(trained.config)
    n, most = trained.info.seq_len, truth.stops.shape[1]
    if not trained.info.name.endswith(data.CANVAS):
        ways = {f"inserted/{k}": asked | {"steps": k} for k in trained.config.eval.steps}
        rows = apart(truth.stops, n, end)
        return {name: (*rows, way) for name, way in (ways or {"inserted": asked}).items()}
    behind_prompt = lambda tokens, given: (
        np.concatenate([truth.stops, tokens], axis=1),
        np.concatenate([np.ones(truth.stops.shape, bool), given], axis=1),
    )
    nothing = np.zeros((len(truth.stops), n - most), int)
    starts = {"prompt": behind_prompt(nothing, nothing > 0)}
    if trained.config.method.name != "mdm":
        return {"prompt": (*starts["prompt"], asked)}
    starts["drawn"] = behind_prompt(*placed(truth.stops, drawn(truth, others, end), end))
    starts["told"] = behind_prompt(*placed(truth.stops, truth.given, end))
    return {
        f"{name}, {way}": (*rows, asked | {"order": order})
        for name, rows in starts.items()
        for way, order in (("random", "random"), ("likely first", "max_prob"))
    }


def apart(stops: np.ndarray, n: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows (N, n) of subgoals with a hole between any two, whose width says nothing: the last one
    takes up the rest of the row."""
    tokens, given = np.zeros((len(stops), n), int), np.zeros((len(stops), n), bool)
    for row, there, cells in zip(tokens, given, stops, strict=True):
        *first, last = cells[cells != end]
        at = np.append(2 * np.arange(len(first)), n - 1)
        row[at], there[at] = [*first, last], True
    return tokens, given


def placed(stops: np.ndarray, places: np.ndarray, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows (N, n) with subgoals in the places (N, n) bool, and ended after the last of them."""
    tokens, given = np.full(places.shape, end), places.copy()
    for row, there, where, cells in zip(tokens, given, places, stops, strict=True):
        row[where] = cells[cells != end]
        there[np.flatnonzero(where)[-1] :] = True
    return tokens, given


def drawn(truth: Paths, others: Paths, end: int) -> np.ndarray:
    """For each path the places (n,) bool of the subgoals of another that has as many."""
    random = np.random.default_rng(0)
    number, among = ((p.stops != end).sum(1) for p in (truth, others))
    picked = [random.choice(np.flatnonzero(among == k)) for k in number]
    return others.given[picked]


def behind(trained: Trained, outcomes: Mapping[str, list[int]]) -> dict[str, float]:
    """By how much each way is behind the run that this one is compared with, if it is there."""
    path = trained.workdir.parent / OUTCOMES
    if not path.exists():
        return {}
    record, found = json.loads(path.read_text()), {}
    first = next(iter(record["right"].values()))
    for name, right in outcomes.items():
        if record["split"] == trained.config.eval.split and len(right) == len(first):
            difference = np.subtract(first, right)
            found[f"{name}/behind"] = difference.mean()
            found[f"{name}/behind_se"] = difference.std() / math.sqrt(len(difference))
    return found


def table(numbers: Mapping[str, float]) -> str:
    """The numbers of `measure`, a line for each way."""
    names = [key.removesuffix("/right") for key in numbers if key.endswith("/right")]
    head = f"{names[0]}/"
    by_size = [k.removeprefix(head) for k in numbers if k.startswith(f"{head}right[")]
    paired = PAIRED if f"{head}behind" in numbers else ()
    columns = (*COLUMNS, *by_size, *paired)
    lines = [f"{'paths through a maze':<22}" + "".join(f"{c:>10}" for c in columns)]
    for name in (*names, "data"):
        cells = (numbers.get(f"{name}/{column}", math.nan) for column in columns)
        lines.append(f"{name:<22}" + "".join(f"{cell:>10.3f}" for cell in cells))
    return "\n".join(lines)

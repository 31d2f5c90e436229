"""Paths through a maze by way of subgoals: the maze is always the same, a model learns its walls.

"maze" are paths of their own length, of which the subgoals are given; in "maze_canvas" the same
paths stand behind a prompt of their subgoals and are filled up with an end symbol, which fills up
the prompt too. Source: Kim et al. (FlexMDM), arXiv 2509.01025, and flexmdm.md 9.
"""

import dataclasses
import functools

import numpy as np
from ml_collections import ConfigDict

from aodiff.data.info import CANVAS, DataError, DataInfo
from aodiff.data.maze import Maze, carve, survey
from aodiff.data.sources import GeneratedSource, generated_spans
from aodiff.data.synthetic import ROWS, uniforms

VERSION = 1
NAMES = ("maze", "maze" + CANVAS)


@functools.lru_cache(maxsize=4)
def _maze(side: int, share: float, seed: int) -> Maze:
    return survey(carve(side, share, seed))


def make_maze(config: ConfigDict) -> Maze:
    """The maze of `config`; raises DataError for a size or a share that cannot be."""
    given = tuple(config.maze)
    if not (len(given) == 2 and given[0] >= 3 and given[0] % 2 == 1 and 0 <= given[1] <= 1):
        raise DataError(
            f"data.maze={given} is not (cells of a side, share of walls to open); "
            "give an odd number of at least 3 and a share in [0, 1]"
        )
    return _maze(int(given[0]), float(given[1]), config.law_seed)


def longest_leg(config: ConfigDict) -> int:
    """Most steps from a subgoal to the next: so many that a path always fits the canvas.

    Raises:
      DataError: numbers of subgoals that cannot be, or a row that does not hold them.
    """
    clues = tuple(config.clues)
    if not (len(clues) == 2 and 2 <= clues[0] <= clues[1]):
        raise DataError(
            f"data.clues={clues} must be the lowest and the highest number of subgoals of a path "
            "through a maze, 2 or more, its two ends included"
        )
    leg = (config.seq_len - clues[1] - 1) // (clues[1] - 1)
    if leg < 2:
        raise DataError(
            f"data.seq_len={config.seq_len} holds no path by way of {clues[1]} subgoals beside "
            f"them; use at least {4 * clues[1] - 1}"
        )
    return leg


def describe(config: ConfigDict) -> DataInfo:
    """The paths of `config`."""
    longest_leg(config)
    canvas = config.name.endswith(CANVAS)
    return DataInfo(
        name=config.name,
        seq_len=config.seq_len,
        vocab_size=make_maze(config).end + canvas,
        unit="cell",
    )


def subgoals(maze: Maze, leg: int, draws: np.ndarray) -> np.ndarray:
    """Cells (N, K): the first is any free one, each other any at 2 to `leg` steps from its last.

    Args:
      draws: (N, K) uniform numbers of [0, 1).
    """
    among = (maze.steps >= 2) & (maze.steps <= leg)
    count = among.sum(1)
    if not count[maze.free.ravel()].all():
        raise DataError("a cell of the maze has no other at two steps; use a larger data.maze")
    order = np.argsort(~among, axis=1, kind="stable")
    cells = np.flatnonzero(maze.free)
    found = [cells[(draws[:, 0] * len(cells)).astype(int)]]
    for draw in draws.T[1:]:
        last = found[-1]
        found.append(order[last, (draw * count[last]).astype(int)])
    return np.stack(found, axis=1)


def walk(
    maze: Maze, stops: np.ndarray, number: np.ndarray, draws: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Paths (N, n), ended by end symbols, and which of their cells are subgoals, (N, n) bool.

    Each step goes to any neighbour that is nearer to the next subgoal.

    Args:
      stops: (N, K) cells. number: (N,) how many of them a path has. draws: (N, n) uniform numbers.
    """
    tokens, given = np.full(draws.shape, maze.end), np.zeros(draws.shape, bool)
    rows, at, goal = np.arange(len(stops)), stops[:, 0], np.ones(len(stops), int)
    tokens[:, 0], given[:, 0] = at, True
    for t in range(1, draws.shape[1]):
        live = goal < number
        aim = stops[rows, np.minimum(goal, number - 1)]
        near = maze.near[at]
        left = maze.steps[at, aim][:, None] - 1
        nearer = (near >= 0) & (maze.steps[near, aim[:, None]] == left)
        pick = (draws[:, t] * nearer.sum(1)).astype(int)[:, None]
        side = np.argmax(np.cumsum(nearer, axis=1) > pick, axis=1)
        at = np.where(live, near[rows, side], at)
        tokens[:, t] = np.where(live, at, maze.end)
        given[:, t] = live & (at == aim)
        goal += given[:, t]
    return tokens, given


@dataclasses.dataclass(frozen=True)
class Paths:
    """Paths: `stops` (N, K) are their subgoals and `tokens` (N, n) their cells, both ended by end
    symbols; `given` (N, n) bool are the places of the subgoals in them."""

    stops: np.ndarray
    tokens: np.ndarray
    given: np.ndarray


def paths(
    maze: Maze, clues: tuple[int, int], leg: int, n: int, seed: int, rows: np.ndarray
) -> Paths:
    """Paths `rows` of stream `seed`; the number of their subgoals is uniform in `clues`."""
    low, most = clues
    draws = uniforms(seed, ROWS, rows, 1 + most + n)
    number = low + (draws[:, 0] * (most - low + 1)).astype(int)
    stops = subgoals(maze, leg, draws[:, 1 : 1 + most])
    tokens, given = walk(maze, stops, number, draws[:, 1 + most :])
    stops = np.where(np.arange(most) < number[:, None], stops, maze.end)
    return Paths(stops, tokens, given)


@dataclasses.dataclass(frozen=True, eq=False)
class PathsSource(GeneratedSource):
    """Paths with subgoals given in their places, or behind a prompt of them on a canvas."""

    end: int = 0
    canvas: bool = False

    def paths(self, rows: np.ndarray) -> Paths:
        """The paths of these rows."""
        return self.sample(np.asarray(rows, np.int64) + self.start)

    def read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        found = self.paths(rows)
        front = np.ones(found.stops.shape, bool)
        if self.canvas:
            tokens = np.concatenate([found.stops, found.tokens], axis=1)
            given = np.concatenate([front, np.zeros(found.given.shape, bool)], axis=1)
            return {"tokens": tokens.astype(np.uint16), "given": given}
        live = np.concatenate([found.tokens != self.end, ~front], axis=1)
        tokens = np.concatenate([found.tokens, np.zeros(front.shape, int)], axis=1)
        return {
            "tokens": np.where(live, tokens, 0).astype(np.uint16),
            "length": live.sum(1).astype(np.uint16),
            "given": np.concatenate([found.given, ~front], axis=1),
        }


def open_splits(config: ConfigDict) -> dict[str, PathsSource]:
    """Paths by split, those held out first."""
    maze, leg = make_maze(config), longest_leg(config)
    clues, canvas = tuple(config.clues), config.name.endswith(CANVAS)
    sample = functools.partial(paths, maze, clues, leg, config.seq_len - clues[1], config.law_seed)
    numbers = (*config.maze, *clues, config.law_seed, config.seq_len)
    name = f"{config.name}/{VERSION} {numbers}"
    parts = {
        "fields": ("tokens",) + ("length",) * (not canvas) + ("given",),
        "end": maze.end,
        "canvas": canvas,
    }
    return {
        split: PathsSource(sample, start, length, config.seq_len, name, **parts)
        for split, (start, length) in generated_spans(config).items()
    }

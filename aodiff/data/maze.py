"""A maze: which cells of a square are free, what is beside what and how far from what.

It is drawn by a seed. Source: flexmdm.md 9.
"""

import dataclasses

import numpy as np

from aodiff.data.synthetic import LAW, uniforms

SIDES = ((-1, 0), (1, 0), (0, -1), (0, 1))


@dataclasses.dataclass(frozen=True, eq=False)
class Maze:
    """A square of which some cells are walls; a cell is row * side + column.

    free: (side, side) bool. near: (cells, 4) int, free cells beside a free one, or -1.
    steps: (cells, cells) int16, length of the shortest path between two free cells, else -1.
    """

    free: np.ndarray
    near: np.ndarray
    steps: np.ndarray

    @property
    def end(self) -> int:
        """The id after those of the cells, which ends a path on a canvas."""
        return self.free.size


def carve(side: int, share: float, seed: int) -> np.ndarray:
    """Free cells (side, side) of a random maze, any two of which are joined by a path.

    Cells of even row and column are rooms. Walls between them, in random order, are opened where
    they part what is not joined yet (Kruskal); of the others, each with probability `share`.
    """
    free = np.zeros((side, side), bool)
    free[::2, ::2] = True
    row, column = np.divmod(np.arange(side * side), side)
    walls = np.flatnonzero((row + column) % 2)
    draws = uniforms(seed, LAW, np.arange(2), len(walls))
    joined = np.arange(side * side)
    for i in np.argsort(draws[0]):
        wall = int(walls[i])
        step = side if wall // side % 2 else 1
        rooms = joined[wall - step], joined[wall + step]
        apart = rooms[0] != rooms[1]
        free.flat[wall] = apart or draws[1, i] < share
        if apart:
            joined[joined == rooms[1]] = rooms[0]
    return free


def survey(free: np.ndarray) -> Maze:
    """What is next to what, and how far from what, in a maze of free cells (side, side)."""
    side, cells = len(free), free.size
    row, column = np.divmod(np.arange(cells), side)
    near = np.full((cells, len(SIDES)), -1)
    for k, (down, right) in enumerate(SIDES):
        r, c = row + down, column + right
        inside = (r >= 0) & (r < side) & (c >= 0) & (c < side)
        there = inside & free[r % side, c % side] & free.ravel()
        near[there, k] = (r * side + c)[there]
    steps = np.full((cells, cells), -1, np.int16)
    front = np.eye(cells, dtype=bool)[free.ravel()]
    found = np.full(front.shape, -1, np.int16)
    for distance in range(cells):
        found[front] = distance
        reached = np.zeros_like(front)
        for k in range(len(SIDES)):  # what is beside a cell is reached from it
            at = near[:, k] >= 0
            reached[:, at] |= front[:, near[at, k]]
        front = reached & (found < 0)
        if not front.any():
            break
    steps[free.ravel()] = found
    return Maze(free, near, steps)

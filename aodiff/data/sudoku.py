"""Sudoku: completed grids and their symmetries, a solver, and boards as people write them.

A symbol's id is its digit minus one.
"""

import dataclasses
import functools
import itertools

import numpy as np

from aodiff.data.info import DataError
from aodiff.data.synthetic import uniforms

VERSION = 1
LIMIT = 100_000  # boards to look at for a solution; real puzzles take a few hundred
FILLED = 2  # what the random numbers of a backtracking search are for; see synthetic.uniforms


@functools.cache
def units(side: int) -> np.ndarray:
    """The rows, columns and boxes of a board, (3 * side, side) int cell numbers."""
    box, cell = round(side**0.5), np.arange(side * side).reshape(side, side)
    boxes = cell.reshape(box, box, box, box).swapaxes(1, 2).reshape(side, side)
    return np.concatenate([cell, cell.T, boxes])


def valid(grids: np.ndarray) -> np.ndarray:
    """Whether each of the grids (..., cells) has every symbol once in every unit."""
    side = round(grids.shape[-1] ** 0.5)
    return np.all(np.sort(grids[..., units(side)], axis=-1) == np.arange(side), axis=(-1, -2))


def solutions(
    givens: np.ndarray,
    most: int = 2,
    draw: np.random.Generator | None = None,
    limit: int | None = None,
) -> list:
    """Completions of a board, at most `most` of them, by search at the tightest cell.

    Args:
      givens: (cells,) int, -1 where blank.
      draw: random order of the symbols tried; None is increasing order.
      limit: boards to look at; None is all.

    Returns:
      A list of (cells,) int arrays; empty if the givens contradict.

    Raises:
      TimeoutError: the limit was reached.
    """
    side = round(len(givens) ** 0.5)
    peers = [np.unique(units(side)[(units(side) == c).any(1)]) for c in range(len(givens))]
    free = np.ones((len(givens), side), bool)
    board, found = np.full(len(givens), -1), []

    def place(board, free, cell, symbol):
        if not free[cell, symbol]:
            return None
        board, free = board.copy(), free.copy()
        board[cell] = symbol
        free[peers[cell], symbol] = False
        free[cell] = False
        return board, free

    state = (board, free)
    for cell in np.flatnonzero(givens >= 0):
        state = state and place(*state, cell, givens[cell])
    stack = [state] if state else []
    looked = 0
    while stack and len(found) < most:
        board, free = stack.pop()
        looked += 1
        if limit is not None and looked > limit:
            raise TimeoutError(f"looked at {limit} boards")
        blank = board < 0
        if not blank.any():
            found.append(board)
            continue
        options = np.where(blank, free.sum(1), side + 1)
        cell = int(np.argmin(options))
        symbols = np.flatnonzero(free[cell])
        if draw is not None:
            symbols = draw.permutation(symbols)
        stack += [place(board, free, cell, s) for s in symbols[::-1]]
    return found


@functools.cache
def all_small_grids() -> np.ndarray:
    """The 288 grids of side 4, (288, 16) uint16, in lexicographic order."""
    rows = list(itertools.permutations(range(4)))
    grids = np.array([sum(g, ()) for g in itertools.product(rows, repeat=4)], np.uint16)
    return grids[valid(grids)]


@functools.cache
def base_grids(first: int, number: int) -> np.ndarray:
    """Grids of side 9 from a seeded search, (number, 81) uint16; grid i depends on i alone."""
    blank = np.full(81, -1)
    return np.array(
        [
            solutions(blank, 1, np.random.default_rng((VERSION, FILLED, i)))[0]
            for i in range(first, first + number)
        ],
        np.uint16,
    )


def symmetric(base: np.ndarray, rows: np.ndarray, seed: int) -> np.ndarray:
    """Row r: a random base grid under a random symmetry, (len(rows), 81) uint16.

    Symbols are renamed; bands, rows in a band, stacks and columns in a stack are permuted; the
    board may be transposed. A pure function of (base, seed, row number).
    """
    draws = uniforms(seed, FILLED, rows, 2 + 9 + 2 * (3 + 9))
    grid = base[(draws[:, 0] * len(base)).astype(int)].reshape(-1, 9, 9)
    rename = np.argsort(draws[:, 2:11], axis=1)

    def lines(x):
        bands, inside = np.argsort(x[:, :3], axis=1), np.argsort(x[:, 3:].reshape(-1, 3, 3), axis=2)
        inside = np.take_along_axis(inside, bands[:, :, None], axis=1)
        return (bands[:, :, None] * 3 + inside).reshape(-1, 9)

    grid = np.take_along_axis(grid, lines(draws[:, 11:23])[:, :, None], axis=1)
    grid = np.take_along_axis(grid, lines(draws[:, 23:])[:, None], axis=2)
    grid = np.where(draws[:, 1, None, None] < 0.5, grid, grid.swapaxes(1, 2))
    return np.take_along_axis(rename, grid.reshape(-1, 81).astype(int), axis=1).astype(np.uint16)


@dataclasses.dataclass(frozen=True)
class Digits:
    """Symbols 0 .. side - 1 shown as digits 1 .. side, 0 or "." where blank."""

    side: int

    def text(self, ids: np.ndarray) -> str:
        return "".join(str(int(i) + 1) for i in ids)

    def values(self, ids: np.ndarray) -> list[int]:
        return [int(i) + 1 for i in ids]

    def parse(self, row: list) -> tuple[np.ndarray, np.ndarray]:
        """Ids (cells,) and given (cells,) bool of digits, null where blank; raises DataError."""
        text = "".join("0" if v is None else str(v) for v in row)
        ids, given = parse_board(text, self.side)
        solve(text, ids, given)
        return ids, given


def parse_board(text: str, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids int32 and given bool, (cells,), of a board written as digits, 0 or "." where blank.

    Raises:
      DataError: wrong length or symbols, or two equal givens in one row, column or box.
    """
    cells, digits = side * side, "".join(text.split()).replace(".", "0")
    if len(digits) != cells or not set(digits) <= set("0123456789"[: side + 1]):
        raise DataError(
            f"puzzle {text[:90]!r} is not {cells} digits of 0 to {side}; write one digit per cell, "
            "0 or . where blank."
        )
    ids = np.array([int(d) for d in digits], np.int32) - 1
    for unit in units(side):
        seen = ids[unit][ids[unit] >= 0]
        if len(np.unique(seen)) < len(seen):
            twice = np.bincount(seen).argmax() + 1
            raise DataError(
                f"puzzle {text[:90]!r} contradicts itself: {twice} stands twice in cells "
                f"{unit.tolist()}; correct the puzzle."
            )
    return np.maximum(ids, 0), ids >= 0


def solve(text: str, ids: np.ndarray, given: np.ndarray) -> np.ndarray:
    """A solution (cells,) of the board `text`; raises DataError if none is found."""
    try:
        found = solutions(np.where(given, ids, -1), 1, limit=LIMIT)
    except TimeoutError:
        raise DataError(
            f"puzzle {text[:90]!r} has no solution that is found in {LIMIT} steps; correct it, or "
            "give its solution."
        ) from None
    if not found:
        raise DataError(f"puzzle {text[:90]!r} has no solution; correct it.")
    return found[0]

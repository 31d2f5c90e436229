"""Sudoku as data: whole grids, grids of which some cells are given as clues, and files of puzzles.

A denoiser trained on whole grids has met every set of clues.
"""

import csv
import dataclasses
import functools
import gzip
import hashlib
import itertools
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from aodiff.data.info import DataError, DataInfo, Stats
from aodiff.data.pipeline import permute
from aodiff.data.sources import ArraySource, GeneratedSource, Source
from aodiff.data.sudoku import (
    VERSION,
    Digits,
    all_small_grids,
    base_grids,
    parse_board,
    solutions,
    solve,
    symmetric,
)
from aodiff.data.synthetic import uniforms
from aodiff.data.tables import shuffle_and_cut

SEEDS = 64  # essentially different 9x9 grids that all others are symmetries of
SIDES = {"sudoku4": 4, "sudoku": 9}
FILE = "puzzles"  # the data set of a user's file, at data.dir
CLUES = 3  # what the random numbers of clues are for; see synthetic.uniforms


@dataclasses.dataclass(frozen=True, eq=False)
class Clued:
    """Puzzles: grids of `source` in turn, row r with clues of its own, a pure function of r.

    Attributes:
      clues: lowest and highest number of cells that are given; each is as likely.
      unique: cells are taken away only while the solution stays the only one.
      start: first row of this split in the stream of all clues.
      length: declared number of puzzles.
    """

    source: Source
    clues: tuple[int, int]
    unique: bool
    seed: int
    start: int
    length: int
    fields: tuple[str, ...] = ("tokens", "given")

    def __len__(self) -> int:
        return self.length

    @property
    def fingerprint(self) -> str:
        law = (self.source.fingerprint, self.clues, self.unique, self.seed, self.start, self.length)
        return hashlib.sha256(f"{VERSION} {law}".encode()).hexdigest()

    @property
    def stats(self) -> Stats:
        return Stats(self.length, self.length * self.source.read(np.zeros(1, int))["tokens"].size)

    def read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        tokens = self.source.read(np.asarray(rows) % len(self.source))["tokens"]
        cells = tokens.shape[1]
        draws = uniforms(self.seed, CLUES, np.asarray(rows) + self.start, 1 + cells)
        low, high = self.clues
        counts = low + (draws[:, 0] * (high - low + 1)).astype(int)
        order = np.argsort(draws[:, 1:], axis=1)
        given = np.argsort(order, axis=1) < counts[:, None]
        if self.unique:
            each = zip(tokens.tolist(), order.tolist(), counts.tolist(), strict=True)
            kept = [unique_clues(tuple(grid), tuple(o), count) for grid, o, count in each]
            given = np.array(kept).reshape(-1, cells)
        return {"tokens": tokens, "given": given}


@functools.lru_cache(maxsize=2**16)  # a puzzle of side 9 takes a tenth of a second
def unique_clues(grid: tuple[int, ...], order: tuple[int, ...], count: int) -> np.ndarray:
    """Clues (cells,) bool that have `grid` (cells,) as their only solution.

    Cells are taken away from the end of `order` on, where that leaves one solution, until `count`
    are left or no more can go.
    """
    board = np.array(grid)
    for cell in order[::-1]:
        if np.sum(board >= 0) == count:
            break
        board[cell] = -1
        if len(solutions(board, 2)) > 1:
            board[cell] = grid[cell]
    return board >= 0


@dataclasses.dataclass(frozen=True)
class Puzzles:
    """tokens (N, cells) int32, the solutions; given (N, cells) bool, the clues; and, where the file
    says so, the difficulty of each as the mean number of guesses of a solver, (N,)."""

    tokens: np.ndarray
    given: np.ndarray
    guesses: np.ndarray | None = None


def read_puzzles(path: Path, side: int, most: int | None = None) -> Puzzles:
    """Puzzles of a CSV file (may be gzip) with columns puzzle, and maybe solution, mean_guesses.

    Raises:
      DataError: a file, column, puzzle or solution that is not as it should be; says which line.
    """
    if not path.is_file():
        raise DataError(f"there is no puzzle file {path}; pass the path of a CSV file.")
    opened = gzip.open if path.suffix == ".gz" else open
    found = []
    try:
        with opened(path, "rt", newline="", encoding="utf-8-sig") as file:
            for line, row in enumerate(itertools.islice(csv.DictReader(file), most), 2):
                row = {(k or "").lower(): v or "" for k, v in row.items()}
                if "puzzle" not in row:
                    raise DataError(f"{path} has columns {list(row)}; it needs a column puzzle.")
                try:
                    found.append(_puzzle(row, side))
                except DataError as e:
                    raise DataError(f"{path} line {line}: {e}") from None
    except (UnicodeDecodeError, EOFError, OSError, csv.Error) as e:
        raise DataError(
            f"{path} cannot be read as CSV ({e}); give UTF-8 text, or gzip of it."
        ) from e
    if not found:
        raise DataError(f"{path} holds no puzzle; give one with at least one line of data.")
    return Puzzles(*map(np.array, zip(*found, strict=True)))


def _puzzle(row: dict[str, str], side: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Solution, clues and mean guesses (NaN: not known) of a line; raises DataError."""
    ids, known = parse_board(row["puzzle"], side)
    if "solution" not in row:
        solved, full = solve(row["puzzle"], ids, known), known | True
    else:
        solved, full = parse_board(row["solution"], side)
    if not full.all() or np.any(known & (ids != solved)):
        raise DataError("the solution does not complete the puzzle; correct it.")
    guesses = row.get("mean_guesses") or "nan"
    try:
        return solved, known, float(guesses)
    except ValueError:
        raise DataError(f"mean_guesses is {guesses!r}; give a number, or nothing.") from None


def describe(config: ConfigDict) -> DataInfo:
    """The board of `config`; raises DataError for a length or clues that do not fit."""
    sides = {side * side: side for side in (4, 9)}
    side = SIDES.get(config.name, sides.get(config.seq_len, 9))
    cells = side * side
    if config.seq_len != cells:
        raise DataError(
            f"{config.name} has {cells} cells, data.seq_len is {config.seq_len}; set "
            f"data.seq_len={cells}."
        )
    clues = tuple(config.clues)
    whole = all(type(c) is int for c in clues)
    if clues and not (whole and len(clues) == 2 and 0 <= clues[0] <= clues[1] < cells):
        raise DataError(
            f"data.clues={clues} must be the lowest and the highest number of given cells, of "
            f"0 to {cells - 1}, or () for whole grids."
        )
    if config.name == FILE and (clues or config.dir is None):
        raise DataError(
            "data.name=puzzles needs data.dir, the path of a CSV file, and takes its clues from "
            "there: leave data.clues empty."
        )
    return DataInfo(
        name=config.name,
        seq_len=cells,
        vocab_size=side,
        unit="cell",
        codec=Digits(side),
        grid=(side, side),
        entropy=np.log(288) / 16 if side == 4 and not clues and config.name != FILE else None,
    )


def open_splits(config: ConfigDict) -> dict[str, Source]:
    """Grids by split, whole or with clues; of a file, its puzzles.

    Grids of side 4 are all that there are, split 75/12.5/12.5; of side 9 symmetries of base grids
    that the splits do not share; puzzles of a file are split as rows of a table are.
    """
    info = describe(config)
    if config.name == FILE:
        path = Path(config.dir)
        return _file_splits(path, info.grid[0], path.stat().st_mtime_ns if path.is_file() else 0)
    grids = _small_splits() if config.name == "sudoku4" else _large_splits(config)
    if not config.clues:
        return grids
    sizes = {"train": config.train_rows}
    return {
        split: Clued(
            source,
            tuple(config.clues),
            config.unique,
            config.law_seed,
            start=part * 2**40,
            length=sizes.get(split, config.eval_rows),
        )
        for part, (split, source) in enumerate(sorted(grids.items()))
    }


def _small_splits() -> dict[str, Source]:
    grids = all_small_grids()
    grids = grids[permute(np.arange(len(grids)), len(grids), seed=0)]
    parts = np.split(grids, [36, 72])
    return {
        split: ArraySource({"tokens": rows}, Stats(len(rows), rows.size))
        for split, rows in zip(("validation", "test", "train"), parts, strict=True)
    }


def _large_splits(config: ConfigDict) -> dict[str, Source]:
    sizes = {"train": config.train_rows, "validation": config.eval_rows, "test": config.eval_rows}
    found = {}
    for part, (split, length) in enumerate(sizes.items()):
        base = base_grids(part * SEEDS, SEEDS if split == "train" else SEEDS // 4)
        found[split] = GeneratedSource(
            sample=functools.partial(_sample, base, config.law_seed),
            start=part * 2**40,
            length=length,
            seq_len=81,
            law=f"sudoku/{VERSION} ({config.law_seed}, {SEEDS})",
        )
    return found


def _sample(base: np.ndarray, seed: int, rows: np.ndarray) -> np.ndarray:
    return symmetric(base, rows, seed)


@functools.lru_cache(maxsize=2)
def _file_splits(path: Path, side: int, stamp: int) -> dict[str, Source]:
    found = read_puzzles(path, side)
    if len(found.tokens) < 8:
        raise DataError(f"{path} has {len(found.tokens)} puzzles; at least 8 are needed.")
    validation, test, train = shuffle_and_cut(found.tokens, 2)
    splits = {}
    for split, rows in (("train", train), ("validation", validation), ("test", test)):
        fields = {"tokens": found.tokens, "given": found.given, "guesses": found.guesses}
        arrays = {name: values[rows] for name, values in fields.items()}
        splits[split] = ArraySource(arrays, Stats(len(rows), arrays["tokens"].size))
    return splits

"""Tables, and the digits, which are kept as one: scikit-learn's own, and CSV files of the user.

`data.name="csv"` reads the file `data.dir`; a name of FILES reads its files in the folder
`data.dir`. A column is numeric when all its cells are. An empty cell is missing: it gets an id of
its own, which is predicted like any value. NAME.columns.json beside a file states what columns are
to be instead ("bins", "categories" or "drop"), and whose missing cells stay out of the score.
"""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from absl import logging
from ml_collections import ConfigDict

from aodiff.data.codecs import Categories, Codec, Columns, Levels, absent, fit_column
from aodiff.data.csv_files import Cells, Kind, beside, join, read_csv, read_kinds, typed
from aodiff.data.info import DataError, DataInfo, Stats
from aodiff.data.pipeline import permute
from aodiff.data.prepared import data_dir
from aodiff.data.sources import ArraySource, Source

DIGIT_MAX = 16  # scikit-learn's digits count black pixels in 4x4 blocks
DIGIT_GRID = (8, 8)
HELD_OUT = 0.125  # of the rows, for validation and again for test
FEWEST_ROWS = 16
MOST_CATEGORIES = 1024  # of a column: its embedding and its share of the head grow with them

Splits = dict[str, np.ndarray]  # (rows, L) float, or object where a column is text


def _scikit(loader: str, label: str, **options) -> Callable[[], tuple[tuple[str, ...], np.ndarray]]:
    """Loads a table of scikit-learn: its features, then what they predict as `label`."""

    def load() -> tuple[tuple[str, ...], np.ndarray]:
        from sklearn import datasets

        bunch = getattr(datasets, loader)(**options)
        names = (*map(str, bunch.feature_names), label)
        return names, np.column_stack([bunch.data, bunch.target])

    return load


def _digits() -> np.ndarray:
    from sklearn.datasets import load_digits

    return load_digits().data


TABLES = {
    "breast_cancer": _scikit("load_breast_cancer", "label"),
    "wine": _scikit("load_wine", "label"),
    "diabetes": _scikit("load_diabetes", "progression", scaled=False),
    "iris": _scikit("load_iris", "label"),
}
# Files of a table by part: a training and a test part are kept apart, other parts are joined.
FILES = {
    "adult": {"train": "adult_train.csv", "test": "adult_test.csv"},
    "california_housing": {"all": "housing.csv"},
    "wine_quality": {"red": "winequality-red.csv", "white": "winequality-white.csv"},
    "abalone": {"all": "abalone.csv"},
}


def split_rows(values: np.ndarray) -> Splits:
    """Splits 75/12.5/12.5 by a fixed permutation of the rows; equal rows stay together."""
    validation, test, train = shuffle_and_cut(values, 2)
    return {"train": values[train], "validation": values[validation], "test": values[test]}


def shuffle_and_cut(values: np.ndarray, parts: int) -> list[np.ndarray]:
    """Row numbers of `parts` parts of HELD_OUT of the rows each, and of the rest.

    By a fixed permutation; equal rows of `values` stay together.
    """
    numbers: dict[tuple, int] = {}
    distinct = [numbers.setdefault(tuple(row), len(numbers)) for row in values.tolist()]
    place = np.argsort(permute(np.arange(len(numbers)), len(numbers), seed=0))[distinct]
    order = np.argsort(place, kind="stable")
    cuts = round(HELD_OUT * len(values)) * np.arange(1, parts + 1)
    first = np.searchsorted(place[order], place[order][cuts])  # of the rows equal to that at a cut
    return np.split(order, first)


def fit_columns(splits: Splits, kinds: Mapping[str, Kind], levels: int, source: str) -> Columns:
    """Fits the codec of every column on the training rows.

    Only whether a column has missing cells is read off all splits.

    Args:
      splits: values by split.
      kinds: what each column is to be, by name.
      levels: quantile bins of a numeric column.
      source: for messages.

    Raises:
      DataError: a column without values, with one value, or with too many categories.
    """
    columns = []
    for i, (name, kind) in enumerate(kinds.items()):
        cells = splits["train"][:, i]
        gaps = any(absent(values[:, i]).any() for values in splits.values())
        distinct = set(cells[~absent(cells)].tolist())
        what = f"column {name!r} of {source}"
        drop = f'state {{"{name}": "drop"}} in {beside(Path(source)).name}'
        if not distinct:
            raise DataError(f"{what} is empty in every training row; fill it in, or {drop}.")
        # A gap here and there is something to learn, unless it is not scored or has no bin.
        learnable = absent(cells).any() and kind.missing == "category" and kind.kind != "bins"
        if len(distinct) == 1 and not learnable:
            raise DataError(
                f"{what} is {distinct.pop()!r} in every training row, which leaves nothing to "
                f"learn; {drop}."
            )
        column = fit_column(cells, levels, kind.kind, kind.missing if gaps else None)
        if isinstance(column, Categories) and len(column.known) > MOST_CATEGORIES:
            raise DataError(
                f"{what} has {len(column.known)} categories, at most {MOST_CATEGORIES} are allowed;"
                f' {drop}, or "bins" if it is a number.'
            )
        columns.append(column)
    return Columns(tuple(kinds), tuple(columns))


def _files(config: ConfigDict) -> dict[str, Path]:
    """Files of the table in `data.dir`, or in the folder of its name there; by part."""
    if config.name == "csv":
        if not config.dir:
            raise DataError("data.name='csv' reads the file data.dir, which is not set; set it.")
        return {"all": Path(config.dir).expanduser()}
    names, folder = FILES[config.name], data_dir(config.dir)
    if (folder / config.name).is_dir():
        folder = folder / config.name
    for name in names.values():
        if not (folder / name).is_file():
            raise DataError(
                f"{config.name} is {' and '.join(names.values())}, and {folder} holds no {name}; "
                "set data.dir to the folder of the files."
            )
    return {part: folder / name for part, name in names.items()}


def _wines(parts: dict[str, Cells]) -> dict[str, Cells]:
    """One name for the quality, which the white wines call class, and the color as a column."""
    return {
        color: Cells(
            {"color": [color] * len(cells)}
            | {{"class": "quality"}.get(n, n): column for n, column in cells.columns.items()},
            cells.places,
        )
        for color, cells in parts.items()
    }


def _read_splits(name: str, files: dict[str, Path]) -> tuple[Splits, dict[str, Kind]]:
    """Values by split, and the kinds of their columns by name."""
    parts = {part: read_csv(path) for part, path in files.items()}
    if name == "wine_quality":
        parts = _wines(parts)
    cells, first = join(list(parts.values())), next(iter(files.values()))
    stated = read_kinds(first)
    if unknown := [column for column in stated if column not in cells.columns]:
        raise DataError(
            f"{beside(first)} names a column {unknown[0]!r} that {first} does not have; its "
            f"columns are {', '.join(cells.columns)}."
        )
    dropped = [column for column, kind in stated.items() if kind.kind == "drop"]
    kinds = {c: stated.get(c, Kind()) for c in cells.columns if c not in dropped}
    if dropped:
        logging.info("%s drops %s", beside(first), ", ".join(dropped))
    if not kinds:
        raise DataError(f"{beside(first)} drops every column; keep some.")
    if len(cells) < FEWEST_ROWS:
        raise DataError(f"{first} has {len(cells)} rows; at least {FEWEST_ROWS} are needed.")
    values = np.stack([typed(cells, c, kind.kind) for c, kind in kinds.items()], axis=1)
    if "test" not in parts:
        return split_rows(values), kinds
    values, test = np.split(values, [len(parts["train"])])
    validation, train = shuffle_and_cut(values, 1)
    return {"train": values[train], "validation": values[validation], "test": test}, kinds


@functools.lru_cache(maxsize=4)
def _load(
    name: str, levels: int, files: tuple[tuple[str, Path], ...] = (), stamps: tuple = ()
) -> tuple[Codec, Splits]:
    """Codec and values by split; `stamps` tell a file that changed from the one already read."""
    del stamps
    if name == "digits":
        return Levels(levels, DIGIT_MAX, DIGIT_GRID[0] * DIGIT_GRID[1]), split_rows(_digits())
    if files:
        splits, kinds = _read_splits(name, dict(files))
        return fit_columns(splits, kinds, levels, str(files[0][1])), splits
    names, values = TABLES[name]()
    splits = split_rows(values)
    return fit_columns(splits, dict.fromkeys(names, Kind()), levels, name), splits


def load(config: ConfigDict) -> tuple[Codec, Splits]:
    """Codec and values by split of `config`; files that did not change are read once.

    Raises:
      DataError: bad files, or `data.levels` or `data.seq_len` do not fit.
    """
    if not 2 <= config.levels <= 1024:
        raise DataError(f"data.levels is {config.levels}; it must be between 2 and 1024.")
    if config.name == "csv" or config.name in FILES:
        files = _files(config)
        paths = [*files.values(), beside(next(iter(files.values())))]
        stamps = tuple((p, p.stat().st_mtime_ns, p.stat().st_size) for p in paths if p.is_file())
        codec, splits = _load(config.name, config.levels, tuple(files.items()), stamps)
    else:
        codec, splits = _load(config.name, config.levels)
    width = splits["train"].shape[1]
    if config.seq_len != width:
        raise DataError(
            f"{config.name} has {width} units per row, data.seq_len is {config.seq_len}; set "
            f"data.seq_len={width}."
        )
    return codec, splits


def describe(config: ConfigDict) -> DataInfo:
    """The table or image set of `config`; its columns are known once its rows are read."""
    codec, _ = load(config)
    shared = dict(name=config.name, seq_len=config.seq_len, codec=codec)
    if isinstance(codec, Levels):
        return DataInfo(**shared, vocab_size=config.levels, unit="pixel", grid=DIGIT_GRID)
    sizes = codec.sizes
    return DataInfo(
        **shared, vocab_size=max(sizes), unit="column", unit_sizes=sizes, names=codec.names
    )


def open_splits(config: ConfigDict) -> dict[str, Source]:
    """Its encoded rows by split; logs how many held-out values training never saw."""
    codec, splits = load(config)
    sources = {}
    for split, values in splits.items():
        tokens, present = codec.encode(values)
        if isinstance(codec, Columns):
            for name, count in unseen(codec, tokens, present).items():
                logging.warning(
                    "%s %s: %d cells of column %r hold values not seen in training and count as "
                    "other",
                    *(config.name, split, count, name),
                )
        stats = Stats(len(tokens), int(present.sum()))
        sources[split] = ArraySource({"tokens": tokens, "present": present}, stats, repr(codec))
    return sources


def unseen(codec: Columns, ids: np.ndarray, present: np.ndarray) -> dict[str, int]:
    """How many cells of encoded rows (rows, L) are values not seen in training, by column."""
    counts = {
        name: int((present[:, i] & (ids[:, i] == column.other)).sum())
        for i, (name, column) in enumerate(zip(codec.names, codec.columns, strict=True))
        if isinstance(column, Categories)
    }
    return {name: count for name, count in counts.items() if count}

"""Rows of numbers to ids and back: the images and tables that come with scikit-learn."""

import dataclasses
import functools
from typing import Protocol

import numpy as np
from ml_collections import ConfigDict

from aodiff.data.info import DataError, DataInfo, Stats
from aodiff.data.pipeline import permute
from aodiff.data.sources import ArraySource, Source

DIGIT_MAX = 16  # scikit-learn's digits count black pixels in 4x4 blocks
HELD_OUT = 0.125  # of the rows, for validation and again for test


class Codec(Protocol):
    """Values (rows, L) to ids and back."""

    def encode(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns ids uint16 and present bool, both (rows, L)."""

    def decode(self, ids: np.ndarray) -> np.ndarray:
        """Returns the value that stands for each id, (rows, L)."""

    def text(self, ids: np.ndarray) -> str:
        """One row of ids (L,) for a person to read."""


@dataclasses.dataclass(frozen=True)
class Levels:
    """Values 0 .. maximum in `levels` equal steps; decodes to the middle of a step."""

    levels: int
    maximum: int

    def encode(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ids = np.floor(values * self.levels / (self.maximum + 1)).astype(np.uint16)
        return ids, np.ones(ids.shape, bool)

    def decode(self, ids: np.ndarray) -> np.ndarray:
        return np.asarray(ids) * (self.maximum / max(1, self.levels - 1))

    def text(self, ids: np.ndarray) -> str:
        return " ".join(map(str, np.asarray(ids).tolist()))


@dataclasses.dataclass(frozen=True)
class Categories:
    """The values seen in training, sorted, and a last id for any other."""

    values: tuple[float, ...]

    @property
    def size(self) -> int:
        return len(self.values) + 1

    def encode(self, values: np.ndarray) -> np.ndarray:
        ids = np.searchsorted(self.values, values)
        seen = np.take(self.values, np.minimum(ids, len(self.values) - 1)) == values
        return np.where(seen, ids, len(self.values))

    def decode(self, ids: np.ndarray) -> np.ndarray:
        return np.append(self.values, np.nan)[ids]


@dataclasses.dataclass(frozen=True)
class Bins:
    """Quantile bins of the training values; decodes to the median of a bin.

    Attributes:
      edges: (size + 1,) increasing; values outside fall into the end bins.
      medians: (size,).
    """

    edges: tuple[float, ...]
    medians: tuple[float, ...]

    @property
    def size(self) -> int:
        return len(self.medians)

    @property
    def log_widths(self) -> np.ndarray:
        """Adds to the nats of an id to make them the nats of a density, (size,)."""
        return np.log(np.diff(self.edges))

    def encode(self, values: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.edges[1:-1], values, side="right")

    def decode(self, ids: np.ndarray) -> np.ndarray:
        return np.asarray(self.medians)[ids]


def fit_column(values: np.ndarray, bins: int) -> Categories | Bins:
    """Fits one column of the training split: categories up to `bins` distinct values, else bins."""
    values = values[~np.isnan(values)]
    distinct = np.unique(values)
    if len(distinct) <= bins:
        return Categories(tuple(distinct.tolist()))
    edges = np.unique(np.quantile(values, np.linspace(0, 1, bins + 1)))
    ids = np.searchsorted(edges[1:-1], values, side="right")
    medians = [float(np.median(values[ids == i])) for i in range(len(edges) - 1)]
    return Bins(tuple(edges.tolist()), tuple(medians))


@dataclasses.dataclass(frozen=True)
class Columns:
    """One position per column; ids are local to their column. Missing cells are NaN."""

    names: tuple[str, ...]
    columns: tuple[Categories | Bins, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(column.size for column in self.columns)

    def encode(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        present = ~np.isnan(values)
        ids = [c.encode(v) for c, v in zip(self.columns, values.T, strict=True)]
        return np.where(present, np.stack(ids, axis=1), 0).astype(np.uint16), present

    def decode(self, ids: np.ndarray) -> np.ndarray:
        values = [c.decode(i) for c, i in zip(self.columns, np.asarray(ids).T, strict=True)]
        return np.stack(values, axis=1)

    def text(self, ids: np.ndarray) -> str:
        values = self.decode(np.asarray(ids)[None])[0]
        return ", ".join(f"{n} {v:g}" for n, v in zip(self.names, values, strict=True))


def split_rows(values: np.ndarray) -> dict[str, np.ndarray]:
    """Splits 75/12.5/12.5 by a fixed permutation of the rows."""
    held_out = round(HELD_OUT * len(values))
    order = permute(np.arange(len(values)), len(values), seed=0)
    validation, test, train = np.split(values[order], [held_out, 2 * held_out])
    return {"train": train, "validation": validation, "test": test}


def _digits() -> tuple[tuple[str, ...], np.ndarray]:
    from sklearn.datasets import load_digits

    values = load_digits().data
    return tuple(f"pixel {i}" for i in range(values.shape[1])), values


def _breast_cancer() -> tuple[tuple[str, ...], np.ndarray]:
    from sklearn.datasets import load_breast_cancer

    return _with_label(load_breast_cancer())


def _wine() -> tuple[tuple[str, ...], np.ndarray]:
    from sklearn.datasets import load_wine

    return _with_label(load_wine())


def _with_label(bunch) -> tuple[tuple[str, ...], np.ndarray]:
    return (*map(str, bunch.feature_names), "label"), np.column_stack([bunch.data, bunch.target])


# Number of units and loader; the width is here so that describing digits opens nothing.
TABLES = {"digits": (64, _digits), "breast_cancer": (31, _breast_cancer), "wine": (14, _wine)}


@functools.lru_cache(maxsize=4)
def _load(name: str, levels: int) -> tuple[Codec, dict[str, np.ndarray]]:
    names, values = TABLES[name][1]()
    splits = split_rows(values)
    if name == "digits":
        return Levels(levels, DIGIT_MAX), splits
    columns = tuple(fit_column(column, levels) for column in splits["train"].T)
    return Columns(names, columns), splits


def _check(config: ConfigDict) -> None:
    width = TABLES[config.name][0]
    if config.seq_len != width:
        raise DataError(
            f"{config.name} has {width} units per row, data.seq_len is {config.seq_len}; set "
            f"data.seq_len={width}."
        )
    if not 2 <= config.levels <= 1024:
        raise DataError(f"data.levels is {config.levels}; it must be between 2 and 1024.")


def describe(config: ConfigDict) -> DataInfo:
    """The table or image set of `config`, without reading it."""
    _check(config)
    shared = dict(name=config.name, seq_len=config.seq_len)
    if config.name == "digits":
        codec = Levels(config.levels, DIGIT_MAX)
        return DataInfo(**shared, vocab_size=config.levels, unit="pixel", codec=codec, grid=(8, 8))
    codec = _load(config.name, config.levels)[0]
    sizes = codec.sizes
    return DataInfo(**shared, vocab_size=max(sizes), unit="column", unit_sizes=sizes, codec=codec)


def open_splits(config: ConfigDict) -> dict[str, Source]:
    """Its encoded rows by split."""
    _check(config)
    codec, splits = _load(config.name, config.levels)
    sources = {}
    for split, values in splits.items():
        tokens, present = codec.encode(values)
        stats = Stats(len(tokens), int(present.sum()))
        sources[split] = ArraySource({"tokens": tokens, "present": present}, stats)
    return sources

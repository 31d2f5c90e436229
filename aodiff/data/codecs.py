"""Rows of values to ids and back: levels of gray, and columns of categories and quantile bins."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from aodiff.data.info import DataError

OTHER = "other"  # what an id for values not seen in training decodes to
MISSING = ("category", "unknown")  # a missing cell is predicted like any value, or never scored


class Codec(Protocol):
    """Values (rows, L), in natural order, to ids and back."""

    def encode(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns ids uint16 and present bool, both (rows, L)."""

    def decode(self, ids: np.ndarray) -> np.ndarray:
        """Returns the value that stands for each id, (rows, L)."""

    def values(self, ids: np.ndarray) -> dict[str, Any] | list[Any]:
        """One row of ids (L,) as values that JSON can hold."""

    def parse(self, row: Mapping[str, Any] | Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
        """Inverse of `values`, None where nothing is given: ids int32 and given bool, both (L,).

        Raises:
          DataError: a name or value that the data do not have.
        """

    def text(self, ids: np.ndarray) -> str:
        """One row of ids (L,) for a person to read."""


def parse_row(
    row: Mapping[str, Any] | Sequence[Any],
    names: Sequence[str],
    parse: Callable[[int, Any], int],
) -> tuple[np.ndarray, np.ndarray]:
    """A row by position or by name to ids int32 and given bool, (L,); None is not given.

    Args:
      row: L values, or some values by name.
      names: what the positions are called.
      parse: id of a value at a position; raises DataError.

    Raises:
      DataError: a name that is not one of `names`, another number of values, or `parse` refuses.
    """
    if isinstance(row, Mapping):
        if unknown := [name for name in row if name not in names]:
            raise DataError(f"{unknown[0]!r} is not one of {', '.join(names)}; rename or drop it.")
        row = [row.get(name) for name in names]
    if isinstance(row, str) or len(row) != len(names):
        count = "a text" if isinstance(row, str) else f"{len(row)} values"
        raise DataError(
            f"a row of {count} was given; give {len(names)} values, null where nothing is known."
        )
    given = np.array([value is not None for value in row])
    ids = [0 if value is None else parse(i, value) for i, value in enumerate(row)]
    return np.array(ids, np.int32), given


def number(value: Any) -> float | None:
    """A finite number, or None when `value` is not one."""
    try:
        result = float(value)
    except (TypeError, ValueError):
        return None
    return result if np.isfinite(result) else None


def plain(value: float | str) -> float | int | str:
    """A value as JSON and people write it: whole numbers without a point."""
    if isinstance(value, str):
        return value
    return int(value) if float(value).is_integer() else float(value)


@dataclasses.dataclass(frozen=True)
class Levels:
    """Values 0 .. maximum in `levels` equal steps; decodes to the middle of a step."""

    levels: int
    maximum: int
    length: int

    def encode(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ids = np.floor(values * self.levels / (self.maximum + 1)).astype(np.uint16)
        return ids, np.ones(ids.shape, bool)

    def decode(self, ids: np.ndarray) -> np.ndarray:
        return np.asarray(ids) * (self.maximum / max(1, self.levels - 1))

    def values(self, ids: np.ndarray) -> list[float]:
        return [plain(value) for value in self.decode(ids).tolist()]

    def parse(self, row: Mapping[str, Any] | Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
        return parse_row(row, [f"pixel {i}" for i in range(self.length)], self._parse)

    def _parse(self, position: int, value: Any) -> int:
        level = number(value)
        if level is None or not 0 <= level <= self.maximum:
            raise DataError(
                f"pixel {position} is {value!r}; give a number from 0 to {self.maximum}, or null."
            )
        return int(self.encode(np.array(level))[0])

    def text(self, ids: np.ndarray) -> str:
        return " ".join(map(str, np.asarray(ids).tolist()))


@dataclasses.dataclass(frozen=True)
class Categories:
    """The values of a column seen in training, sorted, then `missing` if cells are, then `other`.

    Attributes:
      known: numbers, or texts.
      missing: one of MISSING, or None when no cell is.
    """

    known: tuple[float, ...] | tuple[str, ...]
    missing: str | None = None

    @property
    def size(self) -> int:
        return len(self.known) + (self.missing is not None) + 1

    @property
    def gap(self) -> int:
        """Id of a missing cell."""
        return len(self.known)

    @property
    def other(self) -> int:
        """Id of a value not seen in training."""
        return self.size - 1

    @property
    def log_widths(self) -> np.ndarray:
        """Zero for every id: a category has no width, (size,)."""
        return np.zeros(self.size)

    def encode(self, values: np.ndarray) -> np.ndarray:
        known = np.asarray(self.known)
        values = np.asarray(values).astype(known.dtype.type)
        ids = np.searchsorted(known, values)
        seen = known[np.minimum(ids, len(known) - 1)] == values
        return np.where(seen, ids, self.other)

    def decode(self, ids: np.ndarray) -> np.ndarray:
        texts = isinstance(self.known[0], str)
        gap = [] if self.missing is None else ["" if texts else np.nan]
        values = [*self.known, *gap, OTHER if texts else np.nan]
        return np.array(values, object if texts else float)[ids]

    def value(self, i: int) -> float | int | str:
        values = [*map(plain, self.known), *([] if self.missing is None else [""]), OTHER]
        return values[i]

    def parse(self, value: Any) -> int | None:
        """Id of a known value or of "other", or None."""
        wanted = number(value)
        if isinstance(self.known[0], str):  # a code such as 20 may come as a number
            wanted = value if wanted is None or isinstance(value, str) else str(plain(wanted))
        if wanted in self.known:
            return self.known.index(wanted)
        return self.other if value == OTHER else None

    @property
    def allowed(self) -> str:
        values = [str(plain(value)) for value in self.known]
        return f"one of {', '.join(values[:10])}{', ...' if len(values) > 10 else ''}"


@dataclasses.dataclass(frozen=True)
class Bins:
    """Quantile bins of the training values, then `missing` if cells are.

    Attributes:
      edges: (bins + 1,) increasing; values outside fall into the end bins.
      medians: (bins,) of the training values inside, to which ids decode.
      missing: one of MISSING, or None when no cell is.
    """

    edges: tuple[float, ...]
    medians: tuple[float, ...]
    missing: str | None = None

    @property
    def size(self) -> int:
        return len(self.medians) + (self.missing is not None)

    @property
    def gap(self) -> int:
        """Id of a missing cell."""
        return len(self.medians)

    @property
    def log_widths(self) -> np.ndarray:
        """Adds to the nats of an id to make them the nats of a density; 0 for missing, (size,)."""
        return np.append(np.log(np.diff(self.edges)), [0.0] * (self.missing is not None))

    def encode(self, values: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.edges[1:-1], np.asarray(values).astype(float), side="right")

    def decode(self, ids: np.ndarray) -> np.ndarray:
        return np.append(self.medians, np.nan)[ids]

    def value(self, i: int) -> float | int | str:
        return plain(float(f"{self.medians[i]:.10g}")) if i < len(self.medians) else ""

    def parse(self, value: Any) -> int | None:
        """Id of the bin of a number, or None."""
        wanted = number(value)
        return None if wanted is None else int(self.encode(np.array(wanted)))

    allowed = "a number"


def absent(values: np.ndarray) -> np.ndarray:
    """Which cells of a column are missing: NaN among numbers, "" among texts."""
    if values.dtype.kind == "f":
        return np.isnan(values)
    return (values == "") | (values != values)


def bin_edges(values: np.ndarray, bins: int) -> np.ndarray:
    """Edges of at most `bins` bins with nearly equal numbers of `values` (n,), none empty.

    Quantiles, unless two coincide: then a value that fills a bin alone gets one, and the rest share
    the others. A column of mostly zeros would fall into a single bin otherwise.
    """
    edges = np.quantile(values, np.linspace(0, 1, bins + 1))
    filled = np.bincount(np.searchsorted(edges[1:-1], values, side="right"), minlength=bins)
    if filled.all() and (np.diff(edges) > 0).all():
        return edges
    distinct, counts = np.unique(values, return_counts=True)
    heavy = np.zeros(len(distinct), bool)
    share = 1.0  # rows of a bin that no value fills alone; few values have a bin each
    while len(distinct) > bins:
        share = counts[~heavy].sum() / (bins - heavy.sum())
        if (heavy == (counts >= share)).all():
            break
        heavy = counts >= share
    weights = np.minimum(counts, share)
    owner = np.floor((np.cumsum(weights) - weights / 2) / share)
    starts = np.flatnonzero(np.diff(owner) > 0) + 1
    between = (distinct[starts - 1] + distinct[starts]) / 2
    return np.concatenate([distinct[:1], between, distinct[-1:]])


def fit_column(
    values: np.ndarray, bins: int, kind: str | None = None, missing: str | None = None
) -> Categories | Bins:
    """Fits one column of the training split.

    Args:
      values: (rows,) numbers, NaN where missing, or texts, "" where missing; not all are.
      bins: how many quantile bins a numeric column gets at most.
      kind: "categories" or "bins"; None bins numbers of more than `bins` distinct values.
      missing: one of MISSING, or None when no cell of any split is missing.
    """
    values = values[~absent(values)]
    if isinstance(values[0], str):
        return Categories(tuple(sorted(set(values.tolist()))), missing)
    values = values.astype(float)
    distinct = np.unique(values)
    if kind == "categories" or (kind is None and len(distinct) <= bins):
        return Categories(tuple(distinct.tolist()), missing)
    edges = bin_edges(values, bins)
    ids = np.searchsorted(edges[1:-1], values, side="right")
    medians = [float(np.median(values[ids == i])) for i in range(len(edges) - 1)]
    return Bins(tuple(edges.tolist()), tuple(medians), missing)


@dataclasses.dataclass(frozen=True)
class Columns:
    """One position per column; ids are local to their column."""

    names: tuple[str, ...]
    columns: tuple[Categories | Bins, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(column.size for column in self.columns)

    def encode(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Values float, NaN where missing, or object with texts, "" where missing: (rows, L)."""
        ids, present = np.zeros(values.shape, np.uint16), np.ones(values.shape, bool)
        for i, (column, cells) in enumerate(zip(self.columns, values.T, strict=True)):
            gaps = absent(cells)
            ids[~gaps, i] = column.encode(cells[~gaps])
            if column.missing is not None:
                ids[gaps, i] = column.gap
            present[:, i] = ~gaps | (column.missing == "category")
        return ids, present

    def decode(self, ids: np.ndarray) -> np.ndarray:
        """(rows, L) float, or object when a column is text; NaN or "" where missing."""
        values = [c.decode(i) for c, i in zip(self.columns, np.asarray(ids).T, strict=True)]
        return np.stack(values, axis=1)

    def values(self, ids: np.ndarray) -> dict[str, Any]:
        cells = zip(self.names, self.columns, np.asarray(ids).tolist(), strict=True)
        return {name: column.value(i) for name, column, i in cells}

    def parse(self, row: Mapping[str, Any] | Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
        return parse_row(row, self.names, self._parse)

    def _parse(self, position: int, value: Any) -> int:
        column = self.columns[position]
        if value == "" and column.missing is not None:
            return column.gap
        result = column.parse(value)
        if result is None:
            raise DataError(
                f"column {self.names[position]!r} is {value!r}; give {column.allowed}, or null "
                "where nothing is known."
            )
        return result

    def text(self, ids: np.ndarray) -> str:
        cells = self.values(ids).items()
        return ", ".join(f"{n} {v if isinstance(v, str) else f'{v:g}'}" for n, v in cells)

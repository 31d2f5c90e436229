"""CSV files to typed columns. Whatever is wrong with a file is one sentence with its line."""

import csv
import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from aodiff.data.codecs import MISSING, number
from aodiff.data.info import DataError

KINDS = ("bins", "categories", "drop")


@dataclasses.dataclass(frozen=True)
class Cells:
    """A file, or several, as they stand: a cell is a text, "" where missing.

    Attributes:
      columns: name -> one text per row.
      places: file and line, on which each row ends.
    """

    columns: dict[str, list[str]]
    places: list[tuple[Path, int]]

    def __len__(self) -> int:
        return len(self.places)


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a column is to be: one of KINDS, or None to decide by its cells; one of MISSING."""

    kind: str | None = None
    missing: str = "category"


def read_csv(path: Path) -> Cells:
    """Reads a file of comma, semicolon or tab separated values whose first line has the names.

    Raises:
      DataError: no such file, not UTF-8 (a byte-order mark is accepted), no rows, bad quotes,
        unnamed or repeated columns, or a row of another length.
    """
    if not path.is_file():
        raise DataError(f"{path} is no file; put the CSV file there or change data.dir.")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 (byte {error.start} is {error.object[error.start]:#04x}); save "
            "it as UTF-8."
        ) from error
    header = text.partition("\n")[0]
    delimiter = max(",;\t", key=header.count)
    reader = csv.reader(
        io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True, strict=True
    )
    rows, lines = [], []
    try:
        for row in reader:
            if row:  # a blank line holds no row
                rows.append([cell.strip() for cell in row])
                lines.append(reader.line_num)
    except csv.Error as error:
        raise DataError(
            f"{path}, line {reader.line_num}: {error}; repair the quotes of that line."
        ) from error
    if len(rows) < 2:
        raise DataError(
            f"{path} holds no rows; the first line names the columns, every other is a row."
        )
    names = rows[0]
    _check_names(path, names)
    for row, line in zip(rows, lines, strict=True):
        if len(row) != len(names):
            raise DataError(
                f"{path}, line {line} has {len(row)} cells and the first line names {len(names)} "
                "columns; repair the line."
            )
    columns = map(list, zip(*rows[1:], strict=True))
    return Cells(dict(zip(names, columns, strict=True)), [(path, line) for line in lines[1:]])


def join(parts: Sequence[Cells]) -> Cells:
    """The rows of several files as those of one.

    Raises:
      DataError: their columns differ.
    """
    first = parts[0]
    for part in parts[1:]:
        if list(part.columns) != list(first.columns):
            raise DataError(
                f"{part.places[0][0]} has the columns {', '.join(part.columns)}, and "
                f"{first.places[0][0]} {', '.join(first.columns)}; give both the same."
            )
    columns = {name: sum((part.columns[name] for part in parts), []) for name in first.columns}
    return Cells(columns, sum((part.places for part in parts), []))


def _check_names(path: Path, names: list[str]) -> None:
    if all(number(name) is not None for name in names):
        raise DataError(
            f"{path} starts with numbers ({', '.join(names[:3])}); name the columns in the first "
            "line."
        )
    for i, name in enumerate(names):
        if not name:
            raise DataError(f"{path}: column {i + 1} has no name; name it in the first line.")
        if name in names[:i]:
            raise DataError(f"{path} names two columns {name!r}; rename one of them.")


def beside(path: Path) -> Path:
    """Where the kinds of the columns of a CSV file are stated."""
    return path.with_suffix(".columns.json")


def read_kinds(path: Path) -> dict[str, Kind]:
    """Column kinds stated beside a CSV file, in NAME.columns.json; without it none are.

    Its entries are column -> kind, or column -> {"kind": kind, "missing": "unknown"}.

    Raises:
      DataError: not JSON, or a kind that does not exist.
    """
    path = beside(path)
    if not path.is_file():
        return {}
    try:
        stated = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise DataError(f"{path} is not JSON ({error}); repair it.") from error
    if not isinstance(stated, Mapping):
        raise DataError(f'{path} is not an object; write {{"column": "bins", ...}}.')
    result = {}
    for name, value in stated.items():
        value = value if isinstance(value, Mapping) else {"kind": value}
        kind, missing = value.get("kind"), value.get("missing", "category")
        if set(value) - {"kind", "missing"} or kind not in (*KINDS, None) or missing not in MISSING:
            raise DataError(
                f"{path} states {json.dumps(stated[name])} for column {name!r}; a kind is one of "
                f"{', '.join(KINDS)}, missing is one of {', '.join(MISSING)}."
            )
        result[name] = Kind(kind, missing)
    return result


def typed(cells: Cells, name: str, kind: str | None) -> np.ndarray:
    """One column as float64, NaN where missing, or as texts (object), "" where missing.

    A column is numeric when all its cells are, whatever its kind.

    Raises:
      DataError: a cell of a numeric column is no number.
    """
    column = cells.columns[name]
    numbers = [np.nan if cell == "" else number(cell) for cell in column]
    if None not in numbers:
        return np.array(numbers, float)
    row = numbers.index(None)
    path, line = cells.places[row]
    where = f"{path}, line {line}: column {name!r} is {column[row]!r}"
    if kind == "bins":
        raise DataError(f"{where}, not a number; repair the cell, or leave it empty if missing.")
    if kind is None and any(value is not None and value == value for value in numbers):
        raise DataError(
            f"{where} and holds numbers too; repair the cell, leave it empty if missing, or state "
            f"its kind in {beside(cells.places[0][0]).name}."
        )
    return np.array(column, object)

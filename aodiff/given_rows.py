"""Rows to complete, read from JSON lines, and rows of ids as people read and give them."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aodiff.data import DataError, DataInfo

Row = Mapping[str, Any] | Sequence[Any]  # some values by name, or a value or None by position


@dataclasses.dataclass(frozen=True)
class GivenRows:
    """Rows with gaps, in natural order.

    tokens: (rows, L) int32, 0 where nothing is given.
    given: (rows, L) bool.
    values: each row as it came.
    """

    tokens: np.ndarray
    given: np.ndarray
    values: tuple[Row, ...]


def read(path: pathlib.Path, info: DataInfo) -> GivenRows:
    """Reads one row a line: a list with null where to write, or an object of values by name.

    Values are the codec's (numbers, category names, places) where the data have one, else ids.

    Raises:
      DataError: one sentence with the number of the line.
    """
    if not path.is_file():
        raise DataError(f"sample.given={path} is no file; name one with a row to complete per line")
    tokens, given, values = [], [], []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            ids, here = parse(row, info)
        except json.JSONDecodeError as e:
            raise DataError(
                f"{path} line {number} is no JSON ({e.msg}); write a list or an object"
            ) from None
        except DataError as e:
            raise DataError(f"{path} line {number}: {e}") from None
        tokens.append(ids)
        given.append(here)
        values.append(row)
    if not tokens:
        raise DataError(f"{path} is empty; write one row to complete per line")
    return GivenRows(np.stack(tokens).astype(np.int32), np.stack(given), tuple(values))


def parse(row: Any, info: DataInfo) -> tuple[np.ndarray, np.ndarray]:
    """Ids (L,) and given (L,) bool, in natural order, of a row with gaps; raises DataError."""
    named = info.codec is not None and info.names is not None
    if not isinstance(row, list) and not (named and isinstance(row, dict)):
        kinds = "a list, or an object by name," if named else "a list"
        raise DataError(f"{row!r:.60} is no row; write {kinds} with null for what is not known")
    if info.codec is not None:
        return info.codec.parse(row)
    if len(row) != info.seq_len:
        raise DataError(f"the row has {len(row)} entries; give {info.seq_len} ids or null")
    sizes = info.natural(np.asarray(info.unit_sizes or [info.vocab_size] * info.seq_len)).tolist()
    for i, (value, size) in enumerate(zip(row, sizes, strict=True)):
        if value is not None and not (type(value) is int and 0 <= value < size):
            raise DataError(f"{value!r} at position {i} is no id; use 0 to {size - 1}, or null")
    given = np.array([value is not None for value in row])
    return np.array([value or 0 for value in row], np.int32), given


def content(tokens: np.ndarray, length: int, row: Row, info: DataInfo) -> dict:
    """What a sample's record says of ids (L,) in natural order that complete `row`.

    Given values are repeated as they came, not as the codec rounds them.
    """
    if info.codec is None:
        text = info.text(info.hidden(tokens)[:length])
        return {"tokens": tokens.tolist(), "text": text}
    values = info.codec.values(tokens)
    keys = list(values) if isinstance(values, dict) else range(len(values))
    for key, value in row.items() if isinstance(row, dict) else zip(keys, row, strict=False):
        if value is not None:
            values[key] = value
    return {"values": values}

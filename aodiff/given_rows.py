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


def read(path: pathlib.Path, info: DataInfo, mask: int | None = None) -> GivenRows:
    """Reads one row a line: a list with null where to write, or an object of values by name.

    Values are the codec's (numbers, category names, places) where the data have one, else ids. With
    the id of a mask, lines are templates of rows that grow, see `template`.

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
            ids, here = parse(row, info) if mask is None else template(row, info, mask)
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


def template(row: Any, info: DataInfo, mask: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids (L,) and given (L,) bool of a row with holes; raises DataError.

    A row is a list of texts, ids, {"masks": n} for n tokens to reveal, and null for a hole that
    takes any number of tokens, none included. Where holes begin and end is all that their width
    says here.
    """
    if not isinstance(row, list):
        raise DataError(f"{row!r:.60} is no template; write a list with null where tokens may come")
    parts = [None if x is None else _piece(x, info, mask) for x in row]
    parts = [p for i, p in enumerate(parts) if p is not None or i == 0 or parts[i - 1] is not None]
    holes = sum(p is None for p in parts)
    if not holes:
        raise DataError("the template has no hole; write null where tokens may come")
    slack = info.seq_len - sum(len(p) for p in parts if p is not None)
    if slack < holes:
        raise DataError(
            f"the template has {info.seq_len - slack} tokens and {holes} holes, and a row holds "
            f"{info.seq_len} (data.seq_len); shorten it"
        )
    widths = iter([slack - holes + 1] + [1] * (holes - 1))
    filled = [np.full(next(widths), -1) if p is None else p for p in parts]
    ids = np.concatenate(filled).astype(np.int32)
    return np.maximum(ids, 0), ids >= 0


def _piece(value: Any, info: DataInfo, mask: int) -> np.ndarray:
    """The ids of one entry of a template."""
    if isinstance(value, str) and info.tokenizer is not None:
        return np.asarray(info.tokenizer.encode(value), np.int32)
    if type(value) is int and 0 <= value < info.vocab_size:
        return np.array([value], np.int32)
    if isinstance(value, dict) and value.keys() == {"masks"} and type(value["masks"]) is int:
        if value["masks"] > 0:
            return np.full(value["masks"], mask, np.int32)
    kinds = "a text, " if info.tokenizer is not None else ""
    raise DataError(
        f"{value!r:.60} is no part of a template; use {kinds}an id of 0 to {info.vocab_size - 1}, "
        'null for a hole, or {"masks": n} for n tokens to reveal'
    )


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

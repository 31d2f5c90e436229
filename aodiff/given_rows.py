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
    bounds: (rows, L, 2) int32, the least and the most tokens of the hole that a position is in, 0
      at those that are given; None: holes take any number.
    """

    tokens: np.ndarray
    given: np.ndarray
    values: tuple[Row, ...]
    bounds: np.ndarray | None = None


def read(path: pathlib.Path, info: DataInfo, mask: int | None = None) -> GivenRows:
    """Reads one row a line: a list with null where to write, or an object of values by name.

    Values are the codec's (numbers, category names, places) where the data have one, else ids. With
    the id of a mask, lines are templates of rows that grow, see `template`.

    Raises:
      DataError: one sentence with the number of the line.
    """
    if not path.is_file():
        raise DataError(f"sample.given={path} is no file; name one with a row to complete per line")
    found, values = [], []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            found.append(parse(row, info) if mask is None else template(row, info, mask))
        except json.JSONDecodeError as e:
            raise DataError(
                f"{path} line {number} is no JSON ({e.msg}); write a list or an object"
            ) from None
        except DataError as e:
            raise DataError(f"{path} line {number}: {e}") from None
        values.append(row)
    if not found:
        raise DataError(f"{path} is empty; write one row to complete per line")
    tokens, given, *bounds = (np.stack(part) for part in zip(*found, strict=True))
    if bounds and np.all(bounds[0][~given] == (0, info.seq_len)):
        bounds = []
    return GivenRows(tokens.astype(np.int32), given, tuple(values), *bounds)


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


def template(row: Any, info: DataInfo, mask: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids (L,), given (L,) bool and bounds (L, 2) of a row with holes; raises DataError.

    A row is a list of texts, ids, {"masks": n} for n tokens to reveal, null for a hole that takes
    any number of tokens, none included, and {"hole": [least, most]} for one of bounded length, null
    for no bound. Where holes begin and end is all that their width says here. A hole that is to
    take more than its model would no longer follows the model; one that may take less does.
    """
    if not isinstance(row, list):
        raise DataError(f"{row!r:.60} is no template; write a list with null where tokens may come")
    parts = []
    for value in row:
        part = _piece(value, info, mask)
        if isinstance(part, tuple) and parts and isinstance(parts[-1], tuple):
            part = tuple(map(sum, zip(parts.pop(), part, strict=True)))  # side by side they are one
        if len(part):
            parts.append(part)
    holes = [part for part in parts if isinstance(part, tuple)]
    if not holes:
        raise DataError("the template has no hole; write null where tokens may come")
    slack = info.seq_len - sum(len(part) for part in parts if not isinstance(part, tuple))
    least = sum(low for low, _ in holes)
    if slack < max(len(holes), least):
        raise DataError(
            f"the template has {info.seq_len - slack} tokens and {len(holes)} holes of at least "
            f"{least} in all, and a row holds {info.seq_len} (data.seq_len); shorten it"
        )
    widths = iter([slack - len(holes) + 1] + [1] * (len(holes) - 1))
    wide = [(np.full(next(widths), -1), p) if isinstance(p, tuple) else (p, (0, 0)) for p in parts]
    ids = np.concatenate([ids for ids, _ in wide]).astype(np.int32)
    bounds = np.concatenate([np.tile(np.int32(bound), (len(ids), 1)) for ids, bound in wide])
    return np.maximum(ids, 0), ids >= 0, np.minimum(bounds, info.seq_len)


def _piece(value: Any, info: DataInfo, mask: int) -> np.ndarray | tuple[int, int]:
    """The ids of one entry of a template, or the least and the most tokens of a hole."""
    if value is None:
        return 0, info.seq_len
    if isinstance(value, dict) and value.keys() == {"hole"}:
        return _bounds(value["hole"], info.seq_len)
    if isinstance(value, str) and info.tokenizer is not None:
        return np.asarray(info.tokenizer.encode(value), np.int32)
    if type(value) is int and value == mask:
        raise DataError(f'{mask} is the id of a mask; write {{"masks": n}} for n tokens to reveal')
    if type(value) is int and 0 <= value < info.vocab_size:
        return np.array([value], np.int32)
    if isinstance(value, dict) and value.keys() == {"masks"} and type(value["masks"]) is int:
        if value["masks"] > 0:
            return np.full(value["masks"], mask, np.int32)
    kinds = "a text, " if info.tokenizer is not None else ""
    raise DataError(
        f"{value!r:.60} is no part of a template; use {kinds}an id of 0 to {info.vocab_size - 1}, "
        'null or {"hole": [least, most]} for a hole, or {"masks": n} for n tokens to reveal'
    )


def _bounds(value: Any, most: int) -> tuple[int, int]:
    """The bounds of a hole as a template states them; null is no bound."""
    if isinstance(value, list) and len(value) == 2:
        low, high = 0 if value[0] is None else value[0], most if value[1] is None else value[1]
        if type(low) is int and type(high) is int and 0 <= low <= high and high > 0:
            return low, high
    raise DataError(
        f"{value!r:.60} are no bounds of a hole; use [least, most] with 0 <= least <= most and "
        "most at least 1, or null for either"
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

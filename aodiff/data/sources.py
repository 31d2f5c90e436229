"""Random access to fixed-size rows: four kinds of source, read by the batch.

Reading is batch-level on purpose: a Python call per row costs more than everything else together.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from aodiff.data.info import DataError, Stats


class Source(Protocol):
    """Rows 0 .. len-1 of a split, in the order of its file."""

    fields: tuple[str, ...]
    fingerprint: str
    stats: Stats

    def __len__(self) -> int: ...

    def read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Returns each field, (len(rows), ...), of `rows` (int64, any order, repeats allowed)."""


def hash_arrays(arrays: Mapping[str, np.ndarray]) -> str:
    """Returns a sha256 over names, dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(array.data)
    return digest.hexdigest()


@dataclasses.dataclass(frozen=True, eq=False)
class ArraySource:
    """Rows held in memory: `arrays` by field, equal first dimension.

    `codec` names what the ids stand for, as part of the fingerprint.
    """

    arrays: Mapping[str, np.ndarray]
    stats: Stats
    codec: str = ""

    def __len__(self) -> int:
        return len(self.arrays["tokens"])

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(self.arrays)

    @functools.cached_property
    def fingerprint(self) -> str:
        codec = {"codec": np.frombuffer(self.codec.encode(), np.uint8)} if self.codec else {}
        return hash_arrays({**self.arrays, **codec})

    def read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        return {name: array[rows] for name, array in self.arrays.items()}


def generated_spans(config) -> dict[str, tuple[int, int]]:
    """First row and number of rows of each split of a generator's stream.

    Held-out rows come first, so that train_rows can change without changing them.
    """
    held = config.eval_rows
    return {
        "train": (2 * held, config.train_rows),
        "validation": (0, held),
        "test": (held, held),
    }


@dataclasses.dataclass(frozen=True, eq=False)
class GeneratedSource:
    """Row r is `sample(start + r)`, a pure function; nothing is stored.

    Attributes:
      sample: int64 row numbers (B,) -> tokens (B, L).
      start: first row of this split in the generator's stream, so that splits never overlap.
      length: declared number of rows.
      law: a string that names generator, version and every parameter.
    """

    sample: Callable[[np.ndarray], np.ndarray]
    start: int
    length: int
    seq_len: int
    law: str
    fields: tuple[str, ...] = ("tokens",)

    def __len__(self) -> int:
        return self.length

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.law} {self.start} {self.length}".encode()).hexdigest()

    @property
    def stats(self) -> Stats:
        return Stats(self.length, self.length * self.seq_len)

    def read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        return {"tokens": self.sample(np.asarray(rows, np.int64) + self.start)}


def check_size(path: Path, expected: int) -> None:
    """Raises DataError unless the file at `path` has `expected` bytes."""
    if not path.is_file():
        raise DataError(f"{path} is missing; copy it again or prepare the data again.")
    size = path.stat().st_size
    if size != expected:
        raise DataError(
            f"{path} is truncated or altered: it has {size} bytes, data.json says {expected}; "
            "copy it again or prepare the data again."
        )


@dataclasses.dataclass(frozen=True, eq=False)
class TokensSource:
    """Memory-mapped matrices, one little-endian file per field.

    Attributes:
      files: field -> (path, dtype string, shape of one row).
    """

    files: Mapping[str, tuple[Path, str, tuple[int, ...]]]
    stats: Stats
    fingerprint: str

    def __post_init__(self):
        for path, dtype, shape in self.files.values():
            width = np.dtype(dtype).itemsize * int(np.prod(shape, dtype=np.int64))
            check_size(path, self.stats.rows * width)

    def __len__(self) -> int:
        return self.stats.rows

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(self.files)

    @functools.cached_property
    def _maps(self) -> dict[str, np.ndarray]:
        return {
            # A map of an empty file is an error, an empty split is not.
            name: np.memmap(path, dtype, "r", shape=(len(self), *shape))
            if len(self)
            else np.zeros((0, *shape), dtype)
            for name, (path, dtype, shape) in self.files.items()
        }

    def read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        rows = np.asarray(rows, np.int64)
        # Pages are touched in file order, then rows go back to the order asked for.
        sort = np.argsort(rows, kind="stable")
        result = {}
        for name, array in self._maps.items():
            gathered = np.empty((len(rows), *array.shape[1:]), array.dtype)
            gathered[sort] = array[rows[sort]]
            result[name] = gathered
        return result


@dataclasses.dataclass(frozen=True, eq=False)
class ArrayRecordSource:
    """Rows of an array_record split: a random-access sequence of dicts, as tfds opens it.

    Attributes:
      records: has `len` and `[i]`.
      name: for messages.
    """

    records: Any
    name: str
    fingerprint: str

    def __len__(self) -> int:
        return len(self.records)

    @functools.cached_property
    def _first(self) -> dict[str, np.ndarray]:
        return self.read(np.zeros(1, np.int64))

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(self._first)

    @property
    def stats(self) -> Stats:
        return Stats(len(self), len(self) * self._first["tokens"].size)

    def read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        try:
            records = [self.records[row] for row in np.asarray(rows).tolist()]
        except Exception as error:
            raise DataError(
                f"{self.name}: rows {min(rows)} to {max(rows)} cannot be read ({error}); copy the "
                "files again."
            ) from error
        return {name: np.stack([record[name] for record in records]) for name in records[0]}


@dataclasses.dataclass(frozen=True, eq=False)
class PermutedSource:
    """Hides the order of the units of `source` behind a fixed permutation (L,)."""

    source: Source
    permutation: tuple[int, ...]

    def __post_init__(self):
        if uneven := {"length", "prompt_len"} & set(self.source.fields):
            raise DataError(
                f"rows have their own {' and '.join(sorted(uneven))}, which a hidden permutation "
                "would scatter; leave data.permute_seed at None."
            )

    def __len__(self) -> int:
        return len(self.source)

    @property
    def fields(self) -> tuple[str, ...]:
        return self.source.fields

    @property
    def stats(self) -> Stats:
        return self.source.stats

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.source.fingerprint} {self.permutation}".encode()).hexdigest()

    def read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        columns = np.asarray(self.permutation)
        return {
            name: array[:, columns] if array.ndim > 1 else array
            for name, array in self.source.read(rows).items()
        }

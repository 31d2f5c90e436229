"""Documents of different length to rows of equal length, at preparation time."""

import dataclasses
from collections.abc import Iterable, Iterator

import numpy as np

from aodiff.data.info import DataError, Stats
from aodiff.data.sources import ArraySource
from aodiff.data.tokenizers import Tokenizer


def text_bytes(tokenizer: Tokenizer, ids: np.ndarray) -> int:
    """Bytes of text in `ids` (n,); without decoding where one id is one byte."""
    if tokenizer.unit == "byte":
        return int(np.count_nonzero(ids != tokenizer.eos))
    if tokenizer.unit in ("character", "symbol"):
        return len(ids)
    return len(tokenizer.decode(ids).encode())


def end_document(tokenizer: Tokenizer, ids: np.ndarray) -> np.ndarray:
    """Appends the tokenizer's eos, if it has one."""
    return ids if tokenizer.eos is None else np.append(ids, ids.dtype.type(tokenizer.eos))


@dataclasses.dataclass
class Concat:
    """Joins the documents of a split and cuts every `length` ids; the last partial row is dropped.

    Attributes:
      dropped_tokens: ids waiting for a full row; after the last document, ids that no row holds.
      dropped_documents: always 0 here.
    """

    length: int
    dropped_documents: int = 0

    def __post_init__(self):
        self._rest: list[np.ndarray] = []
        self.dropped_tokens = 0

    def add(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        """Takes one document (n,) and returns the rows it completes, `tokens` (rows, length)."""
        self._rest.append(ids)
        self.dropped_tokens += len(ids)
        if self.dropped_tokens < self.length:
            return {"tokens": np.zeros((0, self.length), ids.dtype)}
        stream = np.concatenate(self._rest)
        cut = len(stream) - len(stream) % self.length
        self._rest, self.dropped_tokens = [stream[cut:].copy()], len(stream) - cut
        return {"tokens": stream[:cut].reshape(-1, self.length)}

    def rest(self) -> np.ndarray:
        """Ids that no row holds yet."""
        return np.concatenate(self._rest) if self._rest else np.zeros(0, np.uint16)


@dataclasses.dataclass
class Pad:
    """One document per row, filled up with `pad_id`; `length` says how much of a row is real.

    Attributes:
      too_long: what happens to documents over `length`: "drop", "truncate", "split" or "error".
      dropped_tokens, dropped_documents: counts of what was left out.
    """

    length: int
    pad_id: int
    too_long: str = "drop"
    dropped_documents: int = 0
    dropped_tokens: int = 0

    def add(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        """Takes one document (n,); returns `tokens` (rows, length) and `length` (rows,)."""
        pieces = [ids]
        if len(ids) > self.length:
            if self.too_long == "error":
                raise DataError(
                    f"a document has {len(ids)} tokens, rows have {self.length}; raise --length or "
                    "pass --too_long=drop, truncate or split."
                )
            pieces = {
                "drop": [],
                # The last id is the eos, which a shortened document keeps.
                "truncate": [np.append(ids[: self.length - 1], ids[-1])],
                "split": [ids[i : i + self.length] for i in range(0, len(ids), self.length)],
            }[self.too_long]
            self.dropped_documents += not pieces
            self.dropped_tokens += len(ids) - sum(map(len, pieces))
        tokens = np.full((len(pieces), self.length), self.pad_id, ids.dtype)
        for row, piece in zip(tokens, pieces, strict=True):
            row[: len(piece)] = piece
        return {"tokens": tokens, "length": np.array([len(p) for p in pieces], np.uint16)}

    def rest(self) -> np.ndarray:
        """Padding leaves nothing waiting."""
        return np.zeros(0, np.uint16)


def encoded(documents: Iterable[str], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Ids of each document with its eos."""
    for text in documents:
        yield end_document(tokenizer, tokenizer.encode(text))


def pack_in_memory(documents: list[str], tokenizer: Tokenizer, length: int) -> ArraySource:
    """Concatenates a corpus of a few megabytes into an in-memory source of rows (rows, length)."""
    stream = np.concatenate(list(encoded(documents, tokenizer)))
    rows = len(stream) // length
    if rows == 0:
        raise DataError(
            f"a split of {len(stream)} tokens fills no row of {length}; lower data.seq_len."
        )
    tokens = stream[: rows * length].reshape(rows, length)
    total = text_bytes(tokenizer, tokens.reshape(-1))
    return ArraySource({"tokens": tokens}, Stats(rows, tokens.size, total, len(documents)))

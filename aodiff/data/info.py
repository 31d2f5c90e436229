"""What a data set is to the rest of the library, and the one exception bad data raises."""

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from aodiff.data.codecs import Codec
    from aodiff.data.tokenizers import Tokenizer


CANVAS = "_canvas"  # ends the names of data whose rows are filled up with an end symbol


class DataError(Exception):
    """Missing or bad data: one sentence with what came, what is allowed and what to do."""


@dataclasses.dataclass(frozen=True)
class DataInfo:
    """What a model, an evaluator and a figure need to know before any file is opened.

    Attributes:
      name: data set name, as in `config.data.name`.
      seq_len: L, units of a row.
      vocab_size: V, number of ids (the largest unit's, when `unit_sizes` is given).
      unit: what one position holds: "byte", "character", "token", "pixel", "column", "symbol",
        "bone", "joint" or "coordinate".
      unit_sizes: number of ids of each unit, (L,), or None when all units share one vocabulary.
      tokenizer: text to ids and back, or None.
      codec: rows of numbers to ids and back, or None.
      grid: (height, width) of a row in natural order, or None when it is a line.
      names: what to call each natural position, (L,), or None.
      edges: known links (i, j) between natural positions, such as bones, or None. For figures and
        measures alone: training never sees them.
      xy: where figures draw each natural position, (L, 2) with y upwards, or None.
      permutation: natural position of each unit, (L,): hidden[u] = natural[permutation[u]]; None
        when rows come in natural order.
      entropy: exact entropy of the source in nats per position, or None when it is not known.
    """

    name: str
    seq_len: int
    vocab_size: int
    unit: str
    unit_sizes: tuple[int, ...] | None = None
    tokenizer: "Tokenizer | None" = None
    codec: "Codec | None" = None
    grid: tuple[int, int] | None = None
    names: tuple[str, ...] | None = None
    edges: tuple[tuple[int, int], ...] | None = None
    xy: tuple[tuple[float, float], ...] | None = None
    permutation: tuple[int, ...] | None = None
    entropy: float | None = None

    def natural(self, rows: np.ndarray) -> np.ndarray:
        """Undoes the hidden permutation along the last axis, (..., L)."""
        if self.permutation is None:
            return rows
        return rows[..., np.argsort(self.permutation)]

    def hidden(self, rows: np.ndarray) -> np.ndarray:
        """Applies the hidden permutation along the last axis, (..., L)."""
        return rows if self.permutation is None else rows[..., np.asarray(self.permutation)]

    def text(self, tokens: np.ndarray) -> str:
        """One row of ids (L,), in the order the model sees, as text for a person to read."""
        row = self.natural(np.asarray(tokens))
        if self.tokenizer is not None:
            return self.tokenizer.decode(row)
        if self.codec is not None:
            return self.codec.text(row)
        return " ".join(str(t) for t in row.tolist())


@dataclasses.dataclass(frozen=True)
class Stats:
    """Size of a split; `bytes` of text in its rows and `documents` are 0 for data without text."""

    rows: int
    tokens: int
    bytes: int = 0
    documents: int = 0

"""Balanced strings of brackets, of several lengths: their entropy and their grammar are known.

"brackets" are rows of their own length; "brackets_canvas" are the same, filled up with an end
symbol, for models of rows of one length; of "brackets_infill" all is given but a hole.
Source: Kim et al. (FlexMDM), arXiv 2509.01025, and flexmdm.md 9; strings are uniform among those of
their length.
"""

import dataclasses
import functools

import numpy as np
from ml_collections import ConfigDict
from scipy.special import gammaln

from aodiff.data.info import CANVAS, DataError, DataInfo
from aodiff.data.sources import GeneratedSource, Source, generated_spans
from aodiff.data.synthetic import ROWS, uniforms
from aodiff.data.tokenizers import make_tokenizer

VERSION = 1
NAMES = ("brackets", "brackets" + CANVAS)
INFILL = ("brackets_infill", "brackets_infill" + CANVAS)
HOLES = 3  # purpose of random numbers, beside those of aodiff/data/synthetic.py
OPEN, CLOSE, END = range(3)
SHARES = (0.1, 0.4, 0.4, 0.1)
PARTS = (16, 4, 2, 1)  # of the row, where no lengths are given


def uniform_dyck(draws: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Balanced strings, uniform among those of their length: ids (N, L), 0 beyond it.

    Of the rotations of h opening and h + 1 closing brackets one has all but its last bracket
    balanced, the one that begins after the first minimum (cycle lemma).

    Args:
      draws: (N, L + 1) uniform numbers of [0, 1). lengths: (N,) even.
    """
    at = np.arange(draws.shape[1])[None]
    size = lengths[:, None] + 1
    order = np.argsort(np.where(at < size, draws, 2.0), axis=1)
    steps = np.where(order < size // 2, 1, -1)
    height = np.where(at < size, np.cumsum(steps, axis=1), len(draws.T))
    start = np.argmin(height, axis=1)[:, None] + 1
    turned = np.take_along_axis(steps, (start + at) % size, axis=1)[:, :-1]
    return np.where(at[:, :-1] < lengths[:, None], turned < 0, 0).astype(np.uint16)


def balanced(ids: np.ndarray) -> bool:
    """Whether a string of ids (n,) is balanced."""
    height = np.cumsum(np.where(ids == OPEN, 1, -1))
    return not len(ids) or (height.min() >= 0 and height[-1] == 0)


def law_of_lengths(config: ConfigDict) -> np.ndarray:
    """Probability of each length 0 .. seq_len.

    Raises:
      DataError: lengths that are odd or do not fit.
    """
    n = config.seq_len
    lengths = tuple(config.lengths) or tuple(n // part for part in PARTS)
    fits = len(lengths) == 4 == len(set(lengths)) and all(0 < x <= n and not x % 2 for x in lengths)
    if not fits:
        raise DataError(
            f"data.lengths={lengths} with rows of {n}; give four different even lengths up to "
            f"data.seq_len, or () and a seq_len of at least {2 * PARTS[0]} in steps of it"
        )
    return np.bincount(lengths, SHARES, n + 1)


def entropy(law: np.ndarray) -> float:
    """Nats of a string: of its length, and of one among the Catalan number of its length."""
    lengths = np.flatnonzero(law)
    half, share = lengths / 2, law[lengths]
    ways = gammaln(2 * half + 1) - 2 * gammaln(half + 1) - np.log(half + 1)
    return float(share @ (ways - np.log(share)))


def describe(config: ConfigDict) -> DataInfo:
    """The strings of `config`; the entropy is per bracket, or per symbol of a canvas."""
    law = law_of_lengths(config)
    canvas = config.name.endswith(CANVAS)
    tokenizer = make_tokenizer("symbols:()." if canvas else "symbols:()")
    size = config.seq_len if canvas else law @ np.arange(len(law))
    return DataInfo(
        name=config.name,
        seq_len=config.seq_len,
        vocab_size=tokenizer.vocab_size,
        unit=tokenizer.unit,
        tokenizer=tokenizer,
        entropy=entropy(law) / size if config.name in NAMES else None,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class BracketsSource(GeneratedSource):
    """Rows with their `length` in the place of end symbols, or on a canvas; with a seed of holes,
    all that is outside of one is given."""

    canvas: bool = False
    holes: int | None = None

    def read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        tokens = super().read(rows)["tokens"]
        live = tokens != END
        fields = {"tokens": tokens}
        if not self.canvas:
            fields = {"tokens": np.where(live, tokens, 0), "length": live.sum(1).astype(np.uint16)}
        if self.holes is not None:
            draws = uniforms(self.holes, HOLES, np.asarray(rows, np.int64) + self.start, 2)
            fields["given"] = ~hole(draws, live.sum(1), tokens.shape[1])
        return fields


def hole(draws: np.ndarray, lengths: np.ndarray, n: int) -> np.ndarray:
    """Where a row has its hole, (N, n) bool: uniform among all of one token or more.

    Args:
      draws: (N, 2) uniform numbers of [0, 1). lengths: (N,) of at least 1.
    """
    ends = np.floor(draws * np.stack([lengths + 1, lengths], axis=1)).astype(int)
    ends[:, 1] += ends[:, 1] >= ends[:, 0]
    first, last = ends.min(1)[:, None], ends.max(1)[:, None]
    return (np.arange(n) >= first) & (np.arange(n) < last)


def strings(law: np.ndarray, seed: int, rows: np.ndarray) -> np.ndarray:
    """Rows (N, L) uint16 of stream `seed`, ended by end symbols; numbers (N,) int64."""
    draws = uniforms(seed, ROWS, rows, len(law) + 1)
    lengths = np.searchsorted(np.cumsum(law)[:-1], draws[:, 0], side="right")
    found = uniform_dyck(draws[:, 1:], lengths)
    return np.where(np.arange(found.shape[1])[None] < lengths[:, None], found, END).astype(
        np.uint16
    )


def open_splits(config: ConfigDict) -> dict[str, Source]:
    """Strings by split, those held out first."""
    law = law_of_lengths(config)
    numbers = (*np.flatnonzero(law).tolist(), config.law_seed, config.seq_len)
    canvas, holes = config.name.endswith(CANVAS), config.name in INFILL
    parts = {
        "fields": ("tokens",) + ("length",) * (not canvas) + ("given",) * holes,
        "canvas": canvas,
        "holes": config.law_seed if holes else None,
    }
    sample = functools.partial(strings, law, config.law_seed)
    name = f"{config.name}/{VERSION} {numbers}"
    return {
        split: BracketsSource(sample, start, length, config.seq_len, name, **parts)
        for split, (start, length) in generated_spans(config).items()
    }

"""Brackets: are samples balanced, and as long as they should be.

Source: flexmdm.md 10.1 and 10.4. Total variation alone would count a length that is off by one in
full, where all lengths are even; so the distance in tokens stands beside it.
"""

import numpy as np

from aodiff.data import DataInfo, brackets
from aodiff.evals.trained import Trained


def fits(info: DataInfo) -> bool:
    """Whether rows are strings of brackets."""
    return info.name in brackets.NAMES


def measure(trained: Trained) -> dict[str, float]:
    """Numbers of `eval.samples` strings, written as `config.sample` says.

    balanced: share of balanced strings. distinct: share of different ones. length_tv, length_ks,
    length_w1: distances of their lengths from the law, the last in tokens; "..._data" are those of
    as many rows of the data. mean_length and what it should be. excess: nats per string above the
    entropy. calls: network calls a string.
    """
    config, info = trained.config, trained.info
    law, n = brackets.law_of_lengths(config.data), info.seq_len
    shape = (config.eval.samples, n)
    nothing = np.zeros(shape, np.int32)
    as_asked = {key: value for key, value in config.sample.to_dict().items() if key != "given"}
    out = trained.complete(nothing, nothing > 0, **as_asked)
    strings = [cut(row[:length]) for row, length in zip(out.tokens, out.lengths, strict=True)]
    lengths = np.array([len(s) for s in strings])
    noise = np.random.default_rng(0).choice(n + 1, len(strings), p=law)
    found = {f"length_{k}": v for k, v in distances(lengths, law).items()}
    found |= {f"length_{k}_data": v for k, v in distances(noise, law).items()}
    return found | {
        "balanced": np.mean([brackets.balanced(s) for s in strings]),
        "distinct": len({tuple(s) for s in strings}) / len(strings),
        "mean_length": lengths.mean(),
        "mean_length_data": law @ np.arange(n + 1),
        "excess": trained.nats_per_row - brackets.entropy(law),
        "calls": float(np.mean(out.calls)),
    }


def cut(row: np.ndarray) -> np.ndarray:
    """What comes before the first end symbol."""
    ends = np.flatnonzero(row == brackets.END)
    return row[: ends[0]] if len(ends) else row


def distances(lengths: np.ndarray, law: np.ndarray) -> dict[str, float]:
    """Total variation, Kolmogorov-Smirnov and Wasserstein-1 of lengths (N,) from a law (n + 1,)."""
    share = np.bincount(lengths, minlength=len(law)) / len(lengths)
    gap = np.abs(np.cumsum(share - law))
    return {"tv": np.abs(share - law).sum() / 2, "ks": gap.max(), "w1": gap.sum()}

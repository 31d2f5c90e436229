"""Text: bits per byte, closeness of the order to reading order, and token counts of samples."""

import numpy as np

from aodiff.core.orders import kendall_tau
from aodiff.data import DataInfo
from aodiff.evals.compare import total_variation
from aodiff.evals.trained import Trained


def fits(info: DataInfo) -> bool:
    """Whether rows are text."""
    return info.tokenizer is not None


def measure(trained: Trained) -> dict[str, float]:
    """Numbers of text; "..._data" are those of training rows in the place of samples.

    bits_per_byte: on `eval.split`.
    tau_l2r, abs_tau_l2r: Kendall's tau of the order samples were written in to reading order.
    unigram_tv, bigram_tv: total variation to the token counts of `eval.split`.
    """
    config, found = trained.config, {"bits_per_token": trained.own["bits_per_token"]}
    if "bits_per_byte" in trained.own:
        found["bits_per_byte"] = trained.own["bits_per_byte"]
    tau = np.array(
        [kendall_tau(np.argsort(step), np.arange(len(step))) for step in _distinct(trained)]
    )
    found |= {"tau_l2r": tau.mean(), "abs_tau_l2r": np.abs(tau).mean()}
    real, _ = trained.rows(config.eval.split, config.eval.samples)
    train, _ = trained.rows("train", config.eval.samples)
    vocab = trained.info.vocab_size
    for name, rows in {"": trained.samples.tokens, "_data": train}.items():
        found[f"unigram_tv{name}"] = total_variation(rows.ravel(), real.ravel())
        found[f"bigram_tv{name}"] = total_variation(bigrams(rows, vocab), bigrams(real, vocab))
    return found


def _distinct(trained: Trained) -> np.ndarray:
    """The steps of the first samples; one fixed order gives one row, random orders several."""
    return np.unique(trained.samples.step[:32], axis=0)


def bigrams(rows: np.ndarray, vocab: int) -> np.ndarray:
    """A number for each pair of neighbours in rows (rows, L), (rows (L - 1),) int64."""
    rows = rows.astype(np.int64)
    return (rows[:, :-1] * vocab + rows[:, 1:]).ravel()

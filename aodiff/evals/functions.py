"""Functions of Python: do samples parse, how long are they, in which order were they written, and
does a line that was taken out come back.
"""

import numpy as np

from aodiff.core.empirical import entropy
from aodiff.data import DataInfo, functions
from aodiff.data.functions import parses
from aodiff.evals import any_order
from aodiff.evals.trained import Trained


def fits(info: DataInfo) -> bool:
    """Whether rows are functions."""
    return info.name == functions.NAME


def measure(trained: Trained) -> dict[str, float]:
    """Numbers of `eval.samples` functions, written as `config.sample` says.

    parses: share that are Python. mean_length, unigram_entropy in bits: "..._data" are those of
    rows of `eval.split`; length_w1: distance of lengths from these, in tokens. cbc, rub, rub_plus,
    obw: of the samples that parse, over statements that hold several (any_order.py);
    "..._left_to_right" and "..._random" are those of the same programs in such orders.
    line_exact, line_parses: for models whose rows grow, of functions of which one line, of unknown
    length, was written anew: shares that are as they were, and that are Python.
    """
    config, info = trained.config, trained.info
    as_asked = {key: value for key, value in config.sample.to_dict().items() if key != "given"}
    nothing = np.zeros((config.eval.samples, info.seq_len), np.int32)
    out = trained.complete(nothing, nothing > 0, **as_asked)
    rows = [row[:n] for row, n in zip(out.tokens, out.lengths, strict=True)]
    tokens, scored = trained.rows(config.eval.split, config.eval.samples)
    real = [row[: np.sum(live)] for row, live in zip(tokens, scored, strict=True)]
    lengths = [np.array([len(row) for row in some]) for some in (rows, real)]
    found = {
        "parses": np.mean([parses(info.text(row)) and len(row) > 0 for row in rows]),
        "length_w1": wasserstein(*lengths),
        "calls": float(np.mean(out.calls)),
    }
    for end, some in (("", rows), ("_data", real)):
        found[f"mean_length{end}"] = np.mean([len(row) for row in some])
        counts = np.bincount(np.concatenate(some), minlength=info.vocab_size)
        found[f"unigram_entropy{end}"] = entropy(counts) / np.log(2)
    found |= orders(info, rows, out.step)
    if getattr(trained.method, "grows", False):
        found |= lines(trained, real, as_asked)
    return found


def wasserstein(a: np.ndarray, b: np.ndarray) -> float:
    """Wasserstein-1 distance of two samples of whole numbers."""
    from scipy.stats import wasserstein_distance

    return float(wasserstein_distance(a, b)) if len(a) and len(b) else float("nan")


def orders(info: DataInfo, rows: list[np.ndarray], steps: np.ndarray) -> dict[str, float]:
    """Mean any-order scores of the rows that parse, and of their null orders."""
    found = {}
    for row, step in zip(rows, steps, strict=True):
        text = info.text(row)
        if not text.strip() or not parses(text):
            continue
        ends = [len(info.text(row[: i + 1])) for i in range(len(row))]
        characters = any_order.character_steps(np.diff([0, *ends]), step[: len(row)])
        tree = any_order.tree(text)
        kinds = {"": any_order.scores(tree, tree.steps(characters))}
        kinds |= {f"_{name}": value for name, value in any_order.nulls(tree).items()}
        for kind, scores in kinds.items():
            for name in any_order.SCORES:
                if f"split/{name}" in scores:
                    found.setdefault(name + kind, []).append(scores[f"split/{name}"])
    return {name: float(np.mean(values)) for name, values in found.items()}


def lines(trained: Trained, rows: list[np.ndarray], as_asked: dict) -> dict[str, float]:
    """Takes one line out of each function of three lines or more and has it written anew."""
    holes = [hole for row in rows if (hole := line_hole(row, trained.info)) is not None]
    if not holes:
        return {}
    n = trained.info.seq_len
    tokens, given = np.zeros((len(holes), n), np.int32), np.zeros((len(holes), n), bool)
    for i, (row, first, last) in enumerate(holes):
        after = len(row) - last
        tokens[i, :first], given[i, :first] = row[:first], True
        tokens[i, n - after :], given[i, n - after :] = row[last:], True
    out = trained.complete(tokens, given, **as_asked)
    new = [row[:length] for row, length in zip(out.tokens, out.lengths, strict=True)]
    exact = [np.array_equal(a, row) for a, (row, _, _) in zip(new, holes, strict=True)]
    valid = [parses(trained.info.text(row)) for row in new]
    return {"line_exact": np.mean(exact), "line_parses": np.mean(valid)}


def line_hole(row: np.ndarray, info: DataInfo) -> tuple[np.ndarray, int, int] | None:
    """A row with the first and one past the last token of its middle line, if it has three."""
    breaks = [i for i, token in enumerate(row) if "\n" in info.text(np.array([token]))]
    if len(breaks) < 2:
        return None
    middle = (len(breaks) - 1) // 2
    first, last = breaks[middle] + 1, breaks[middle + 1]
    return (row, first, last) if first < last else None

"""Functions of Python: do samples parse, how long are they, in which order were they written, and
does a line that was taken out come back.
"""

from collections.abc import Mapping

import jax
import numpy as np

from aodiff.core.empirical import entropy
from aodiff.data import DataInfo, functions
from aodiff.data.functions import parses
from aodiff.evals import any_order
from aodiff.evals.trained import Trained, as_asked, ended
from aodiff.figures_trace import trace
from aodiff.sampling.samples import Samples

NULLS = ("", "_left_to_right", "_random")


def fits(info: DataInfo) -> bool:
    """Whether rows are functions."""
    return info.name in functions.NAMES


def measure(trained: Trained) -> dict[str, float]:
    """Numbers of `eval.samples` functions, written as `config.sample` says.

    parses: share that are Python, parses_se: its standard error. mean_length, unigram_entropy in
    bits: "..._data" are those of rows of `eval.split`; length_w1: distance of lengths from these,
    in tokens. cbc, rub, rub_plus, obw: of the samples, or the most lines of them that are Python,
    which have statements that hold several, `programs` in number, over these statements
    (any_order.py); "..._left_to_right" and "..._random" are those of the same programs in such
    orders.
    line_exact, line_parses: for models whose rows grow, of functions of which one line, of unknown
    length, was written anew: shares that are as they were, and that are Python.

    Writes `trace.png`, the longest sample that parses as it grew.
    """
    config, info = trained.config, trained.info
    nothing = np.zeros((config.eval.samples, info.seq_len), np.int32)
    out = trained.complete(nothing, nothing > 0, **as_asked(config))
    rows = ended(out, info.tokenizer.eos)
    tokens, scored = trained.rows(config.eval.split, config.eval.samples)
    ids = Samples(tokens, scored.sum(axis=1), tokens)
    real = ended(ids, info.tokenizer.eos)
    lengths = [np.array([len(row) for row in some]) for some in (rows, real)]
    valid = [is_program(info, row) for row in rows]
    found = {
        "parses": np.mean(valid),
        "parses_se": np.std(valid, ddof=1) / np.sqrt(len(valid)),
        "length_w1": wasserstein(*lengths),
        "calls": info.seq_len if out.calls is None else float(np.mean(out.calls)),
    }
    for end, some in (("", rows), ("_data", real)):
        found[f"mean_length{end}"] = np.mean([len(row) for row in some])
        counts = np.bincount(np.concatenate(some), minlength=info.vocab_size)
        found[f"unigram_entropy{end}"] = entropy(counts) / np.log(2)
    found |= orders(info, rows, out.step)
    if getattr(trained.method, "grows", False):
        found |= lines(trained, real)
    if jax.process_index() == 0:
        row = max(range(len(rows)), key=lambda i: (is_program(info, rows[i]), len(rows[i])))
        live = slice(0, len(rows[row]))
        pieces = [info.text(token[None]) for token in rows[row]]
        born = out.born if out.born is None else out.born[row, live]
        trace(trained.workdir / "trace.png", pieces, out.step[row, live], born)
    return found


def is_program(info: DataInfo, row: np.ndarray) -> bool:
    """Whether ids are those of a program, and any."""
    return len(row) > 0 and parses(info.text(row))


def table(numbers: Mapping[str, float]) -> str:
    """The numbers of `measure`: of texts, of orders of writing, of a line written anew."""
    cells = lambda names: "".join(f"{numbers.get(n, float('nan')):>16.3f}" for n in names)
    parse = f"{numbers['parses']:.3f} +- {numbers['parses_se']:.3f}"
    lines = [f"{'':<24}{'samples':>16}{'data':>16}", f"{'parse':<24}{parse:>16}{'1':>16}"]
    for name in ("mean_length", "unigram_entropy"):
        lines.append(f"{name.replace('_', ' '):<24}{cells([name, name + '_data'])}")
    lines.append(f"{'length off, tokens (W1)':<24}{cells(['length_w1'])}")
    head = "".join(f"{name:>16}" for name in ("as written", "left to right", "random"))
    lines.append(f"{'order of statements':<24}{head}{int(numbers['programs']):>8} programs")
    for name in any_order.SCORES:
        lines.append(f"{name:<24}{cells([name + null for null in NULLS])}")
    if "line_exact" in numbers:
        lines.append(f"{'a line written anew':<24}{'exact':>16}{'parses':>16}")
        lines.append(f"{'':<24}{cells(['line_exact', 'line_parses'])}")
    return "\n".join(lines)


def wasserstein(a: np.ndarray, b: np.ndarray) -> float:
    """Wasserstein-1 distance of two samples of whole numbers."""
    from scipy.stats import wasserstein_distance

    return float(wasserstein_distance(a, b)) if len(a) and len(b) else float("nan")


def orders(info: DataInfo, rows: list[np.ndarray], steps: np.ndarray) -> dict[str, float]:
    """Mean any-order scores of the programs in rows, and of their null orders."""
    found = {}
    for row, step in zip(rows, steps, strict=True):
        part = any_order.program(info.text(row))
        if part is None:
            continue
        start, source = part
        ends = [len(info.text(row[: i + 1])) for i in range(len(row))]
        characters = any_order.character_steps(np.diff([0, *ends]), step[: len(row)])
        tree = any_order.tree(source)
        characters = characters[start : start + len(source)]
        kinds = {"": any_order.scores(tree, tree.steps(characters))}
        kinds |= {f"_{name}": value for name, value in any_order.nulls(tree).items()}
        for kind, scores in kinds.items():
            for name in any_order.SCORES:
                if f"split/{name}" in scores:
                    found.setdefault(name + kind, []).append(scores[f"split/{name}"])
    means = {name: float(np.mean(values)) for name, values in found.items()}
    return {"programs": len(found.get(any_order.SCORES[0], []))} | means


def lines(trained: Trained, rows: list[np.ndarray]) -> dict[str, float]:
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
    out = trained.complete(tokens, given, **as_asked(trained.config))
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

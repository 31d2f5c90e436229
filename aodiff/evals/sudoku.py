"""Sudoku: the share of puzzles each decoder solves, by difficulty, and what it costs."""

import json
import math
import pathlib
from collections.abc import Mapping

import jax
import numpy as np

from aodiff.data import DataInfo
from aodiff.data.pipeline import as_batch
from aodiff.data.sudoku import Digits, valid
from aodiff.evals.trained import Trained
from aodiff.figures import plt, save
from aodiff.writers import replace_text

LEVELS = 4  # groups by number of clues, at most
FEW = 4.0  # mean guesses of a solver, below which they are few


def fits(info: DataInfo) -> bool:
    """Whether rows are Sudoku boards."""
    return isinstance(info.codec, Digits)


def decoders(config) -> tuple[str, ...]:
    """The values of `sample.order` to compare."""
    return tuple(config.eval.decoders) or (config.sample.order,)


def measure(trained: Trained) -> dict[str, float]:
    """Solves `eval.samples` puzzles of `eval.split` with each decoder; tokens are greedy.

    valid: share of boards that keep the rules and the clues, which is what counts where a puzzle
      has several solutions; `valid_se` its standard error, `valid[level]` by difficulty.
    exact: share of boards equal to the stated solution. cells: share of blank cells that are.
    calls, gflops: of the network, per puzzle.

    Writes `sudoku.json`, the outcome of each puzzle, for paired comparisons, and `sudoku.png`.
    """
    c = trained.config
    rows = trained.picked(c.eval.split, c.eval.samples)
    fields = trained.splits[c.eval.split].read(rows)
    tokens = trained.info.natural(fields["tokens"].astype(np.int32))
    given = trained.info.natural(as_batch(fields, rows)["given"])
    levels = difficulty(given, fields.get("guesses"))
    found, outcomes = {}, {}
    for name in decoders(c):
        out = trained.complete(tokens, given, order=name, temperature=0.0)
        same = out.tokens == tokens
        solved = valid(out.tokens) & np.all(same | ~given, axis=1)
        outcomes[name] = solved.astype(int).tolist()
        calls = math.nan if out.calls is None else out.calls.mean()
        numbers = {
            "valid": solved.mean(),
            "valid_se": math.sqrt(solved.var() / len(solved)),
            "exact": same.all(axis=1).mean(),
            "cells": same[~given].mean(),
            "calls": calls,
            "gflops": calls * tokens.shape[1] * trained.method.flops_per_token() / 1e9,
        }
        for level in sorted(set(levels), key=lambda level: (len(level), level)):
            numbers[f"valid[{level}]"] = solved[np.array(levels) == level].mean()
        found |= {f"{name}/{key}": float(value) for key, value in numbers.items()}
    if jax.process_index() == 0:
        record = {"split": c.eval.split, "levels": levels, "valid": outcomes}
        replace_text(trained.workdir / "sudoku.json", json.dumps(record))
        bars(trained.workdir / "sudoku.png", found)
    return found


def difficulty(given: np.ndarray, guesses: np.ndarray | None = None) -> list[str]:
    """A word for each puzzle: how often a solver had to guess, or else how many clues there are."""
    if guesses is not None and np.isfinite(guesses).all():
        words = np.array(["no guesses", "few guesses", "many guesses"])
        return words[np.digitize(guesses, [1e-9, FEW])].tolist()
    counts = given.sum(axis=1)
    if len(np.unique(counts)) <= LEVELS:
        return [str(count) for count in counts]
    low, width = counts.min(), -(-(np.ptp(counts) + 1) // LEVELS)
    first = low + (counts - low) // width * width
    last = first + width - 1
    return [f"{a}-{b}" for a, b in zip(first, last, strict=True)]


def _names(numbers: Mapping[str, float]) -> list[str]:
    return [key.removesuffix("/valid_se") for key in numbers if key.endswith("/valid_se")]


def table(numbers: Mapping[str, float]) -> str:
    """The numbers of `measure`, a line for each decoder."""
    names = _names(numbers)
    levels = [k[len(names[0]) + 7 : -1] for k in numbers if k.startswith(f"{names[0]}/valid[")]
    wide = max(12, *(len(level) + 2 for level in levels)) if levels else 0
    head = "".join(f"{level:>{wide}}" for level in levels)
    title = f"{'decoder':<16}{'solved':>18}{'exact':>8}{'cells':>8}{'calls':>8}{'GFLOP':>9}"
    lines = [f"{title}{head}   solved by clues or guesses" if len(levels) > 1 else title]
    for name in names:
        keys = ("valid", "valid_se", "exact", "cells", "calls", "gflops")
        n = {key: numbers.get(f"{name}/{key}", math.nan) for key in keys}
        line = f"{name:<16}{n['valid']:>9.3f} +- {n['valid_se']:.3f}{n['exact']:>8.3f}"
        line += f"{n['cells']:>8.3f}{n['calls']:>8.1f}{n['gflops']:>9.3f}"
        if len(levels) > 1:
            line += "".join(f"{numbers[f'{name}/valid[{level}]']:>{wide}.3f}" for level in levels)
        lines.append(line)
    return "\n".join(lines)


def bars(path: pathlib.Path, numbers: Mapping[str, float]) -> None:
    """Share of puzzles solved by each decoder, with two standard errors."""
    names = _names(numbers)
    figure, axes = plt.subplots(figsize=(6, 0.5 * len(names) + 1.2))
    solved = [numbers[f"{name}/valid"] for name in names]
    error = [2 * numbers[f"{name}/valid_se"] for name in names]
    axes.barh(names, solved, xerr=error)
    axes.set(xlim=(0, 1), xlabel="share of puzzles solved, +- 2 standard errors")
    axes.invert_yaxis()
    save(figure, path)

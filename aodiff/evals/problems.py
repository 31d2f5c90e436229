"""What a set of problems with checkable answers is, and what a score on it is worth."""

import dataclasses
import gzip
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from scipy import stats

from aodiff.data.info import DataError


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether an answer is right, and in a few words how it was found or why it is not.

    mode: of answers that can be read in several ways, the first that is right; "": none is.
    """

    ok: bool
    how: str
    mode: str = ""


@dataclasses.dataclass(frozen=True)
class Problem:
    """One problem.

    Attributes:
      id: as published; the row number where the file has none.
      ask: the request to a model that chats.
      plain: the text that a model which does not chat continues.
      solution: what follows `plain`, or answers `ask`, where this problem is a worked example.
      reference: a full answer, which must be found right.
      suffix: what comes after the answer, of problems that ask to fill a gap.
    """

    id: str
    ask: str
    plain: str
    solution: str
    reference: str
    suffix: str = ""


@dataclasses.dataclass(frozen=True)
class EvalSet:
    """Problems by id in the order of the file, and `judge`: (id, text of an answer) -> verdicts.

    modes: the ways in which an answer can be read; the first alone makes it right.
    """

    name: str
    problems: Mapping[str, Problem]
    judge: Callable[[Iterable[tuple[str, str]]], Iterator[Verdict]]
    citation: str
    modes: Sequence[str] = ()


def messages(problem: Problem, examples: Sequence[Problem] = ()) -> list[tuple[str, str]]:
    """(role, content) of a conversation that asks for one problem, worked examples before it."""
    turns = []
    for example in examples:
        turns += [("user", example.ask), ("assistant", example.solution)]
    return [*turns, ("user", problem.ask)]


def plain_prompt(problem: Problem, examples: Sequence[Problem] = ()) -> str:
    """The text that asks a base model for one problem, worked examples before it."""
    return "".join(f"{e.plain}{e.solution}\n\n" for e in examples) + problem.plain


def read_rows(path: Path, fields: Sequence[str]) -> list[dict]:
    """Objects of a .jsonl file (or .jsonl.gz), or of the list in a .json file.

    Raises:
      DataError: no such file, not JSON, or an object that lacks one of `fields`.
    """
    if not path.is_file():
        raise DataError(f"{path} is no file; give the path of one.")
    try:
        data = gzip.open(path).read() if path.suffix == ".gz" else path.read_bytes()
        text = data.decode("utf-8-sig")
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
        raise DataError(f"{path} is not UTF-8 text ({error}); give a JSON lines file.") from error
    # JSON lines end with a newline and with nothing else that ends lines in Unicode.
    lines = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    rows = []
    try:
        if path.suffix == ".json":
            rows = [(i, row) for i, row in enumerate(json.loads(text), 1)]
        for i, line in () if rows else lines:
            rows.append((i, json.loads(line)))
    except (ValueError, TypeError) as error:
        where = f"{path}, line {lines[len(rows)][0]}" if len(rows) < len(lines) else f"{path}"
        raise DataError(f"{where} is not JSON ({error}); repair it.") from error
    for i, row in rows:
        missing = [repr(f) for f in fields if not isinstance(row, dict) or f not in row]
        if missing:
            raise DataError(
                f"{path}, line {i} has no {', '.join(missing)}; each line is an object with "
                f"{', '.join(fields)}."
            )
    if not rows:
        raise DataError(f"{path} holds no rows; give a file with some.")
    return [row for _, row in rows]


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Unbiased estimate of the chance that one of `k` answers passes, from `passed` of `samples`.

    Source: Chen et al. 2021, 1 - C(n - c, k) / C(n, k).

    Raises:
      ValueError: fewer samples than `k`.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs {k} answers to each problem, got {samples}.")
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def pass_at(right: Mapping[str, Sequence[bool]], k: int) -> tuple[float, float]:
    """Mean of pass@k over problems and its standard error, from which answers are right by problem.

    Raises:
      ValueError: a problem with fewer answers than `k`.
    """
    return mean_and_error([pass_at_k(len(ok), sum(ok), k) for ok in right.values()])


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean over problems and its standard error, 0 of a single problem."""
    values = np.asarray(values, float)
    return float(values.mean()), float(stats.sem(values)) if len(values) > 1 else 0.0


@dataclasses.dataclass(frozen=True)
class Paired:
    """Two systems on the same problems: mean difference, its standard error, two-sided p-value,
    and on how many problems each is ahead."""

    difference: float
    error: float
    p_value: float
    ahead: int
    behind: int
    test: str


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Paired:
    """Compares the shares of right answers per problem of two systems.

    Exact McNemar test where every share is 0 or 1, else a paired t-test.
    """
    ours, theirs = np.asarray(ours, float), np.asarray(theirs, float)
    difference, error = mean_and_error(ours - theirs)
    ahead, behind = int((ours > theirs).sum()), int((ours < theirs).sum())
    if np.isin([ours, theirs], (0, 1)).all():
        test = "McNemar"
        p = stats.binomtest(ahead, ahead + behind).pvalue if ahead + behind else 1.0
    else:
        test = "paired t"
        p = stats.ttest_rel(ours, theirs).pvalue if ahead + behind else 1.0
    return Paired(difference, error, float(p), ahead, behind, test)

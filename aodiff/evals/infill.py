"""A hole of unknown length in a string of brackets: is what was written right, and as long as the
law of what was taken out says.

A model that inserts is asked once. A canvas has to be told where the rest of the string stands: it
is told the true length, or one drawn from the law of lengths given how much there is already.
Source: flexmdm.md 17.2.
"""

import json
import math
from collections.abc import Mapping

import jax
import numpy as np

from aodiff.data import DataInfo, brackets
from aodiff.data.pipeline import as_batch
from aodiff.evals.brackets import distances
from aodiff.evals.trained import Trained, as_asked, ended
from aodiff.writers import replace_text

COLUMNS = ("right", "right_se", "balanced", "length_tv", "length_w1", "calls")


def fits(info: DataInfo) -> bool:
    """Whether rows are strings of brackets with holes."""
    return info.name in brackets.INFILL


def measure(trained: Trained) -> dict[str, float]:
    """Numbers of holes in `eval.samples` strings of `eval.split`, keys "<way>/<number>".

    right: share of strings that are balanced and as long as strings may be, with its standard
    error; balanced: share of balanced ones. length_tv, length_w1: distances of the lengths of what
    was written, over all strings, from their exact law given what was kept. calls: network calls.

    Writes `infill.json`, the outcome of each string.
    """
    config, law = trained.config, brackets.law_of_lengths(trained.config.data)
    picked = trained.picked(config.eval.split, config.eval.samples)
    fields = trained.splits[config.eval.split].read(picked)
    tokens, kept = fields["tokens"].astype(np.int32), as_batch(fields, picked)["given"]
    whole = ended_lengths(tokens, fields.get("length"))
    holes = kept.argmin(axis=1)
    sides = [
        (row[:first], rest(row, given, length))
        for row, given, first, length in zip(tokens, kept, holes, whole, strict=True)
    ]
    exact = np.mean([law_of_hole(*side, law) for side in sides], axis=0)
    found, outcomes = {}, {}
    for name, (start, given) in templates(trained, sides, whole, law).items():
        out = trained.complete(start, given, **as_asked(config))
        strings = ended(out, brackets.END)
        sizes = np.array([len(s) for s in strings])
        written = sizes - [len(a) + len(b) for a, b in sides]
        balanced = np.array([brackets.balanced(s) for s in strings])
        right = balanced & (law[sizes] > 0)
        off = distances(np.maximum(written, 0), exact)
        numbers = {
            "right": right.mean(),
            "right_se": right.std() / math.sqrt(len(right)),
            "balanced": balanced.mean(),
            "length_tv": off["tv"],
            "length_w1": off["w1"],
            "calls": np.mean(out.calls),
        }
        outcomes[name] = right.astype(int).tolist()
        found |= {f"{name}/{key}": float(value) for key, value in numbers.items()}
    if jax.process_index() == 0:
        replace_text(trained.workdir / "infill.json", json.dumps(outcomes))
    return found


def ended_lengths(tokens: np.ndarray, length: np.ndarray | None) -> np.ndarray:
    """Lengths (N,) of rows of their own length, or of those on a canvas."""
    return (tokens != brackets.END).sum(1) if length is None else length.astype(int)


def rest(row: np.ndarray, given: np.ndarray, length: int) -> np.ndarray:
    """What comes after the hole of a string."""
    return row[np.flatnonzero(~given[:length])[-1] + 1 : length]


def templates(
    trained: Trained, sides: list[tuple[np.ndarray, np.ndarray]], whole: np.ndarray, law: np.ndarray
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Rows (N, n) and what is given of them, by the name of a way to fill the holes."""
    n = trained.info.seq_len
    if getattr(trained.method, "grows", False):  # a hole takes any number of tokens
        return {"inserted": placed(sides, np.full(len(sides), n), n)}
    random = np.random.default_rng(0)
    chances = [guess(len(a) + len(b), law) for a, b in sides]
    guessed = np.array([random.choice(len(law), p=p) for p in chances])
    return {"told": placed(sides, whole, n), "guessed": placed(sides, guessed, n)}


def placed(
    sides: list[tuple[np.ndarray, np.ndarray]], lengths: np.ndarray, n: int
) -> tuple[np.ndarray, np.ndarray]:
    """Strings with their ends in place, for strings of `lengths`, then end symbols, all given."""
    tokens = np.full((len(sides), n), brackets.END, np.int32)
    given = np.ones((len(sides), n), bool)
    for row, there, (before, after), length in zip(tokens, given, sides, lengths, strict=True):
        row[: len(before)] = before
        row[length - len(after) : length] = after
        there[len(before) : length - len(after)] = False
    return tokens, given


# ---- exact laws ---------------------------------------------------------------------------------


def guess(kept: int, law: np.ndarray) -> np.ndarray:
    """Law (n + 1,) of the length of a string of which `kept` brackets stand around a hole."""
    size = np.arange(len(law))
    chance = np.where(size > kept, law / np.maximum(size * (size + 1), 1), 0)  # of such a hole
    return chance / chance.sum()


def law_of_hole(before: np.ndarray, after: np.ndarray, law: np.ndarray) -> np.ndarray:
    """Exact law (n + 1,) of the number of brackets in the hole between two parts of a string."""
    kept = len(before) + len(after)
    low = int(np.sum(np.where(before == brackets.OPEN, 1, -1)))
    high = -int(np.sum(np.where(after == brackets.OPEN, 1, -1)))
    found = np.zeros(len(law))
    for size, chance in enumerate(guess(kept, law)):
        if chance:
            ways = paths(size - kept, low, high)
            found[size - kept] = chance * ways / paths(size, 0, 0)
    return found / found.sum()


def paths(steps: int, low: int, high: int) -> int:
    """Ways from height `low` to `high` in steps of one up or down, never below 0 (reflection)."""
    if (steps + high - low) % 2:
        return 0
    ways = lambda ups: math.comb(steps, ups) if 0 <= ups <= steps else 0
    return ways((steps + high - low) // 2) - ways((steps + high + low) // 2 + 1)


def table(numbers: Mapping[str, float]) -> str:
    """The numbers of `measure`, a line for each way."""
    head = "".join(f"{column.removeprefix('length_'):>12}" for column in COLUMNS)
    lines = [f"{'a hole of unknown length':<26}{head}"]
    for name in dict.fromkeys(key.partition("/")[0] for key in numbers):
        cells = "".join(f"{numbers[f'{name}/{column}']:>12.3f}" for column in COLUMNS)
        lines.append(f"{name:<26}{cells}")
    return "\n".join(lines)

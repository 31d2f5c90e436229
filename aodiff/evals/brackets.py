"""Brackets: are samples balanced, and as long as they should be, for several ways to sample.

Source: flexmdm.md 7.3, 10.1 and 10.4. Total variation alone would count a length that is off by one
in full, where all lengths are even; so the distance in tokens stands beside it.
"""

import math
from collections.abc import Mapping

import jax
import numpy as np

from aodiff.data import DataInfo, brackets
from aodiff.evals.trained import Trained, as_asked, ended
from aodiff.figures_trace import over_calls, trace

SINE = dict(insertion="sin", unmasking="linear")
# Values of `config.sample` by the name of a way to sample: of rows that grow, and of a canvas.
GROWING = {
    "Poisson, linear": dict(insertion="linear", unmasking="linear"),
    "Poisson, sin": SINE,
    "Poisson, power": dict(insertion="power(2.9)", unmasking="power(2.89)"),
    "Bernoulli, sin": SINE | dict(count="bernoulli"),
    "likely first, sin": SINE | dict(order="max_prob"),
}
THIN = dict(insertion="linear", unmasking="linear", count="thin")
CANVAS = {"random": dict(order="random"), "likely first": dict(order="max_prob")}
COLUMNS = ("calls", "balanced", "length_tv", "length_ks", "length_w1", "mean_length", "distinct")


PANELS = {"share balanced": "balanced", "length off, tokens (W1)": "length_w1"}


def fits(info: DataInfo) -> bool:
    """Whether rows are strings of brackets."""
    return info.name in brackets.NAMES


def ways(config) -> dict[str, dict]:
    """Values of `config.sample` by the name of a way to sample: as it says itself, or, with
    `eval.steps`, several ways with as many calls each."""
    if not config.eval.steps:
        return {"as asked": {}}
    if "insertion" in config.sample:
        found = GROWING | ({"thin, linear": THIN} if config.model.classes else {})
    elif config.method.name == "mdm":
        found = CANVAS
    else:  # one token a call
        return {"in its order": {}}
    return {
        f"{name}/{steps}": sample | {"steps": steps}
        for name, sample in found.items()
        for steps in config.eval.steps
    }


def measure(trained: Trained) -> dict[str, float]:
    """Numbers of `eval.samples` strings in each of the `ways`, keys "<way>/<number>".

    balanced: share of balanced strings. distinct: share of different ones. length_tv, length_ks,
    length_w1: distances of their lengths from the law, the last in tokens; "data/..." are those of
    as many rows of the data. mean_length and what it should be. calls: network calls a string.
    excess: nats per string above the entropy.

    Writes `brackets.png` where there are several ways, and `trace.png`, one row as it grew.
    """
    config, info = trained.config, trained.info
    law, n = brackets.law_of_lengths(config.data), info.seq_len
    nothing = np.zeros((config.eval.samples, n), np.int32)
    found = {"excess": trained.nats_per_row - brackets.entropy(law)}
    noise = np.random.default_rng(0).choice(n + 1, len(nothing), p=law)
    found |= {f"data/length_{k}": v for k, v in distances(noise, law).items()}
    found["data/mean_length"] = law @ np.arange(n + 1)
    for name, sample in ways(config).items():
        out = trained.complete(nothing, nothing > 0, **(as_asked(config) | sample))
        numbers = of_strings(ended(out, brackets.END), law)
        numbers["calls"] = np.mean(out.calls) if out.calls is not None else n
        found |= {f"{name}/{key}": value for key, value in numbers.items()}
    if jax.process_index() == 0:
        row = int(np.argmax(out.lengths))
        live = slice(0, out.lengths[row])
        pieces = [info.text(token[None]) for token in out.tokens[row, live]]
        born = out.born if out.born is None else out.born[row, live]
        trace(trained.workdir / "trace.png", pieces, out.step[row, live], born)
        if config.eval.steps:
            over_calls(trained.workdir / "brackets.png", panels(found))
    return found


def of_strings(strings: list[np.ndarray], law: np.ndarray) -> dict[str, float]:
    """What `measure` says of strings of ids, given the law of their lengths."""
    lengths = np.array([len(s) for s in strings])
    found = {f"length_{k}": v for k, v in distances(lengths, law).items()}
    return found | {
        "balanced": np.mean([brackets.balanced(s) for s in strings]),
        "distinct": len({tuple(s) for s in strings}) / len(strings),
        "mean_length": lengths.mean(),
    }


def distances(lengths: np.ndarray, law: np.ndarray) -> dict[str, float]:
    """Total variation, Kolmogorov-Smirnov and Wasserstein-1 of lengths (N,) from a law (n + 1,)."""
    share = np.bincount(lengths, minlength=len(law)) / len(lengths)
    gap = np.abs(np.cumsum(share - law))
    return {"tv": np.abs(share - law).sum() / 2, "ks": gap.max(), "w1": gap.sum()}


def _names(numbers: Mapping[str, float]) -> list[str]:
    return [key.removesuffix("/balanced") for key in numbers if key.endswith("/balanced")]


def panels(numbers: Mapping[str, float]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Balance and distance of lengths against calls, by way."""
    found = {}
    for label, key in PANELS.items():
        lines = found.setdefault(label, {})
        for name in _names(numbers):
            point = numbers[f"{name}/calls"], numbers[f"{name}/{key}"]
            lines.setdefault(name.partition("/")[0], []).append(point)
    return found


def table(numbers: Mapping[str, float]) -> str:
    """The numbers of `measure`, a line for each way."""
    lines = [f"bound {numbers['excess']:+.3f} nats a string from the entropy"]
    head = "".join(f"{column.removeprefix('length_'):>13}" for column in COLUMNS)
    lines.append(f"{'way/steps':<24}{head}")
    for name in (*_names(numbers), "data"):
        cells = (numbers.get(f"{name}/{column}", math.nan) for column in COLUMNS)
        lines.append(f"{name:<24}" + "".join(f"{cell:>13.3f}" for cell in cells))
    return "\n".join(lines)

"""How long a canvas should be: accuracy against cost for fixed canvases and for rows that grow.

Each way of decoding is measured with and without stopping at the first end symbol, as that is an
option of all of them and saves most (decoding.md 13, 15.2).
"""

import json
import math
from collections.abc import Mapping

import jax
import numpy as np

from aodiff.config import ConfigError
from aodiff.data import DataInfo
from aodiff.data.pipeline import as_batch
from aodiff.evals.trained import Trained
from aodiff.figures_canvas import cost_figure
from aodiff.writers import replace_text

CROP = " + crop"
FIXED = "fixed "


def fits(info: DataInfo) -> bool:
    """Whether rows are questions with answers that end."""
    return info.tokenizer is not None and info.tokenizer.eos is not None


def arms(config) -> dict[str, dict]:
    """Values of `config.sample` by the name of a way of decoding.

    Rows that grow go from the first to the second number of `sample.canvas`.

    Raises:
      ConfigError: there is nothing to compare.
    """
    if not (config.eval.canvases and config.sample.canvas):
        raise ConfigError(
            f"eval.canvases={tuple(config.eval.canvases)} and sample.canvas="
            f"{tuple(config.sample.canvas)} leave the measure canvas nothing to compare; name the "
            "lengths of some fixed canvases, and the first and last length of a row that grows"
        )
    room, trial = tuple(config.sample.canvas), config.sample.carve.to_dict()
    found = {f"{FIXED}{n}": dict(canvas=(n, n), grow="none") for n in config.eval.canvases}
    for name, tau in {"always grow": 9.0, "CARVE 0.02": 0.02, "CARVE 0.05": 0.05}.items():
        found[name] = dict(canvas=room, grow="carve", carve=trial | {"tau": tau})
    # DAEDAL reveals all that is likely, which a fixed canvas may as well.
    fast = dict(schedule="threshold(0.9)")
    found[f"threshold {room[1]}"] = fast | dict(canvas=room[1:] * 2, grow="none")
    found["DAEDAL"] = fast | dict(canvas=room, grow="daedal")
    return {
        name + CROP * crop: sample | {"crop": crop, "temperature": 0.0}
        for crop in (False, True)
        for name, sample in found.items()
    }


def measure(trained: Trained) -> dict[str, float]:
    """Answers `eval.samples` questions of `eval.split` in each way; tokens are greedy.

    accuracy: share of answers that are exact up to their end, `accuracy_se` its standard error.
    gflops, calls: of the network per row, analytic, at the length the row had in each call.
    canvas: mean length of a row over its calls. written: mean length of an answer.
    cut: share of rows without an end symbol, for which the canvas was too short.
    difference, difference_se: of accuracy to the best fixed canvas, paired by question.

    Writes `canvas.json`, the outcome for each question, and `canvas.png`.
    """
    c, end = trained.config, trained.info.tokenizer.eos
    rows = trained.picked(c.eval.split, c.eval.samples)
    fields = trained.splits[c.eval.split].read(rows)
    tokens = fields["tokens"].astype(np.int32)
    given = as_batch(fields, rows)["given"]
    prompt = given.sum(axis=1)
    truth = answers(tokens, prompt, np.full(len(rows), tokens.shape[1]), end)
    found, outcomes = {}, {}
    for name, sample in arms(c).items():
        out = trained.complete(tokens, given, **sample)
        written = answers(out.tokens, prompt, out.lengths, end)
        right = np.array([a == b for a, b in zip(written, truth, strict=True)])
        size = np.array([len(a) for a in written])
        numbers = {
            "accuracy": right.mean(),
            "accuracy_se": math.sqrt(right.var() / len(right)),
            "gflops": trained.method.flops(out.widths, out.squares).mean() / 1e9,
            "calls": out.calls.mean(),
            "canvas": (out.widths / np.maximum(out.calls, 1)).mean(),
            "written": size.mean(),
            "cut": (prompt + size == out.lengths).mean(),
        }
        outcomes[name] = right.astype(int).tolist()
        found |= {f"{name}/{key}": float(value) for key, value in numbers.items()}
    best = best_fixed(found)
    for name, right in outcomes.items():
        gain = np.subtract(right, outcomes[best])
        found[f"{name}/difference"] = float(gain.mean())
        found[f"{name}/difference_se"] = float(gain.std() / math.sqrt(len(gain)))
    if jax.process_index() == 0:
        record = {"split": c.eval.split, "length": [len(a) for a in truth], "right": outcomes}
        replace_text(trained.workdir / "canvas.json", json.dumps(record))
        cost_figure(trained.workdir / "canvas.png", series(found))
    return found


def answers(tokens: np.ndarray, start: np.ndarray, stop: np.ndarray, end: int) -> list[list[int]]:
    """What stands from `start` on, up to the first end symbol or `stop`, row by row."""
    found = []
    for row, first, last in zip(tokens.tolist(), start.tolist(), stop.tolist(), strict=True):
        row = row[first:last]
        found.append(row[: row.index(end)] if end in row else row)
    return found


def names(numbers: Mapping[str, float]) -> list[str]:
    """The ways of decoding that `numbers` are of."""
    return [key.removesuffix("/accuracy") for key in numbers if key.endswith("/accuracy")]


def best_fixed(numbers: Mapping[str, float]) -> str:
    """The most accurate fixed canvas without crop; of equal ones the cheapest."""
    fixed = [n for n in names(numbers) if n.startswith(FIXED) and not n.endswith(CROP)]
    return max(fixed, key=lambda n: (numbers[f"{n}/accuracy"], -numbers[f"{n}/gflops"]))


def series(numbers: Mapping[str, float]) -> dict[str, dict[str, dict[str, float]]]:
    """Lines of the figure: fixed canvases by length, each way of growing on its own."""
    lines = {}
    for name in names(numbers):
        fixed = name.startswith(FIXED)
        line = "fixed canvas" + CROP * name.endswith(CROP) if fixed else name
        point = name.removeprefix(FIXED).removesuffix(CROP)
        keys = ("gflops", "accuracy", "accuracy_se")
        lines.setdefault(line, {})[point] = {key: numbers[f"{name}/{key}"] for key in keys}
    return lines


def table(numbers: Mapping[str, float]) -> str:
    """The numbers of `measure`, a line for each way of decoding, and where CARVE saves."""
    best = best_fixed(numbers)
    lines = [
        f"{'canvas':<20}{'exact answers':>18}{'- ' + best:>18}{'GFLOP':>9}{'share':>7}"
        f"{'calls':>7}{'canvas':>8}{'written':>9}{'cut':>7}"
    ]
    for name in names(numbers):
        n = {key.removeprefix(f"{name}/"): value for key, value in numbers.items()}
        gain = f"{n['difference']:+.3f} +- {n['difference_se']:.3f}" if name != best else "-"
        share = n["gflops"] / numbers[f"{best}/gflops"]
        lines.append(
            f"{name:<20}{n['accuracy']:>9.3f} +- {n['accuracy_se']:.3f}{gain:>18}"
            f"{n['gflops']:>9.4f}{share:>7.2f}{n['calls']:>7.1f}{n['canvas']:>8.1f}"
            f"{n['written']:>9.1f}{n['cut']:>7.3f}"
        )
    carve = [name for name in names(numbers) if name.startswith("CARVE") and name.endswith(CROP)]
    return "\n".join([*lines, *(saving(numbers, name) for name in carve)])


def saving(numbers: Mapping[str, float], name: str) -> str:
    """How what a way with crop saves of the FLOPs of the best fixed canvas splits in two."""
    best = best_fixed(numbers)
    whole, cropped, grown = (numbers[f"{n}/gflops"] for n in (best, best + CROP, name))
    return (
        f"{name} saves {1 - grown / whole:.1%} of the FLOPs of {best}: crop alone "
        f"{1 - cropped / whole:.1%}, growth the other {(cropped - grown) / whole:.1%}, which is "
        f"{1 - grown / cropped:.1%} of {best}{CROP}."
    )

"""What can be measured of a trained model beside its likelihood, by name."""

import json
import math
import pathlib
from collections.abc import Callable, Mapping

import jax
from absl import logging

from aodiff import distributed
from aodiff.config import ConfigError, on_split, scored_splits
from aodiff.data import DataInfo, Source
from aodiff.evals import (
    brackets,
    canvas,
    functions,
    image,
    infill,
    mazes,
    order,
    pose,
    sudoku,
    table,
    text,
)
from aodiff.evals.trained import Trained, decoding
from aodiff.methods import one_sentence
from aodiff.methods.base import Method
from aodiff.writers import replace_text

__all__ = ["MEASURES", "TABLES", "Trained", "check", "check_decoders", "measure"]

# Each returns named numbers and may write figures to `workdir`; chosen by `config.eval.measures`.
MEASURES: dict[str, Callable[[Trained], dict[str, float]]] = {
    "order": order.measure,
    "table": table.measure,
    "pose": pose.measure,
    "image": image.measure,
    "text": text.measure,
    "sudoku": sudoku.measure,
    "canvas": canvas.measure,
    "brackets": brackets.measure,
    "infill": infill.measure,
    "maze": mazes.measure,
    "functions": functions.measure,
}
# What data a measure is for; one that is not here is for all.
FITS: dict[str, tuple[Callable[[DataInfo], bool], str]] = {
    "table": (table.fits, "tables"),
    "pose": (pose.fits, "poses"),
    "image": (image.fits, "images"),
    "text": (text.fits, "text"),
    "sudoku": (sudoku.fits, "Sudoku boards"),
    "canvas": (canvas.fits, "questions with answers that end"),
    "brackets": (brackets.fits, "brackets"),
    "infill": (infill.fits, "brackets with holes"),
    "maze": (mazes.fits, "paths through a maze"),
    "functions": (functions.fits, "functions"),
}
# How a run's summary shows the numbers of a measure; of others it says nothing.
TABLES: dict[str, Callable[[Mapping[str, float]], str]] = {
    "sudoku": sudoku.table,
    "canvas": canvas.table,
    "brackets": brackets.table,
    "infill": infill.table,
    "maze": mazes.table,
    "functions": functions.table,
}


def check(config, info: DataInfo) -> None:
    """Raises ConfigError unless every measure of `config.eval.measures` exists and fits the data"""
    for name in config.eval.measures:
        if name not in MEASURES:
            raise ConfigError(
                f"eval.measures names {name!r}, which is unknown; use some of {', '.join(MEASURES)}"
            )
        fits, kind = FITS.get(name, (lambda info: True, ""))
        if not fits(info):
            raise ConfigError(
                f"eval.measures names {name!r}, which is for {kind}, and {info.name} has none; "
                "leave it out"
            )
    if config.eval.measures and "own" not in config.eval.orders:
        raise ConfigError(
            f"eval.orders={config.eval.orders} lacks own, which eval.measures starts from; add own "
            "to eval.orders or empty eval.measures"
        )
    if config.eval.measures and config.eval.samples < 20:
        raise ConfigError(
            f"eval.samples={config.eval.samples} is too few to compare with data; use 20 or more"
        )


def check_decoders(config, method: Method) -> None:
    """Raises ConfigError unless the method decodes as the measures will ask it to."""
    asked = []
    if "sudoku" in config.eval.measures:
        asked += [dict(order=name, temperature=0.0) for name in sudoku.decoders(config)]
    if "canvas" in config.eval.measures:
        asked += canvas.arms(config).values()
    if "brackets" in config.eval.measures:
        asked += brackets.ways(config).values()
    with one_sentence():
        for sample in asked:
            method.sampler(decoding(config, **sample), 0)


def measured(config, workdir: pathlib.Path, step: int) -> bool:
    """Whether `workdir/measures.json` holds the measures of the config, taken as it asks for them,
    at `step` and on the split to report."""
    path = workdir / "measures.json"
    record = json.loads(path.read_text()) if path.exists() else {"measures": ()}
    wanted = _asked(on_split(config, scored_splits(config)[-1]), step)
    return wanted.items() <= record.items() and set(config.eval.measures) <= set(record["measures"])


def _asked(config, step: int) -> dict:
    """What the numbers of a measure depend on beside the run, as JSON gives it back."""
    groups = {name: config[name].to_dict() for name in ("eval", "sample")}
    for key in ("every", "report_split", "measures"):
        del groups["eval"][key]
    asked = {"step": step, "split": config.eval.split, "data": config.data.name, **groups}
    return json.loads(json.dumps(asked))


def measure(
    setup,
    params,
    extra,
    splits: dict[str, Source],
    step: int,
    workdir: pathlib.Path,
    record: pathlib.Path,
) -> dict[str, float]:
    """Takes the measures of `config.eval.measures` and writes `workdir/measures.json`.

    Args:
      setup: the `Setup` of the run; `config.eval.split` is what samples are compared with.
      params, extra: the model at `step`.
      splits: sources by split.
      record: the evaluation of this model.

    Returns:
      Scalars to log: "measure/<measure>/<key>".
    """
    distributed.barrier(f"measures of {workdir} at {step}")  # process 0 wrote the record
    trained = Trained(
        setup.method,
        params,
        extra,
        setup.info,
        setup.config,
        setup.mesh,
        splits,
        step,
        workdir,
        json.loads(record.read_text())["results"],
    )
    found = {}
    for name in setup.config.eval.measures:
        numbers = {key: float(value) for key, value in MEASURES[name](trained).items()}
        found[name] = {key: value for key, value in numbers.items() if math.isfinite(value)}
        if name not in TABLES:
            words = ", ".join(f"{key} {value:.4g}" for key, value in found[name].items())
            logging.info("%s: %s", name, words)
    if jax.process_index() == 0:
        record = _asked(setup.config, step) | {"measures": found}
        replace_text(workdir / "measures.json", json.dumps(record, indent=1))
    return {
        f"measure/{name}/{key}": value
        for name, numbers in found.items()
        for key, value in numbers.items()
    }

"""The last thing a run prints: its numbers, its comparison runs, its files, the next commands."""

import json
import math
import pathlib

import numpy as np

from aodiff.evals import TABLES
from aodiff.evaluate import format_result, records, reported_step


def run_summary(config, workdir: pathlib.Path, commands: list[str]) -> str:
    """What the run of `config` in `workdir` found, its figures, and the `commands` to type next."""
    record = chosen_record(workdir, config)
    width = max(len(name) for name in record["results"])
    lines = [f"{record['split']} of {record['data']} after {record['step']} steps{how(config)}"]
    for name, result in record["results"].items():
        lines.append(f"  {name:<{width}}  {format_result(result)}")
    runs = run_dirs(config, workdir)
    for name, path in runs.items():
        for table in tables(path):
            lines += ["", f"{name}: {table}" if config.compare else table]
    if config.compare:
        lines += ["", "with equal compute", comparison_table(runs, config)]
    figures = sorted(str(path) for path in workdir.rglob("*.png"))
    return "\n".join(["", *lines, "", "figures: " + ", ".join(figures), *commands])


def measures(workdir: pathlib.Path) -> dict[str, dict[str, float]]:
    """What a run measured of its model, by measure and key; {} if nothing."""
    path = workdir / "measures.json"
    return json.loads(path.read_text())["measures"] if path.exists() else {}


def tables(workdir: pathlib.Path) -> list[str]:
    """Those of the measures that are shown as tables."""
    return [TABLES[name](found) for name, found in measures(workdir).items() if name in TABLES]


def run_dirs(config, workdir: pathlib.Path) -> dict[str, pathlib.Path]:
    """Directories by name: the run of `config`, first, and its comparison runs."""
    return {config.method.name: workdir} | {name: workdir / name for name in config.compare}


def how(config) -> str:
    """Words for the step at which a run is reported, empty for its last."""
    if config.eval.report_split is None:
        return ""
    return f", each run at its step with the lowest own NLL on {config.eval.split}"


def comparison_table(workdirs: dict[str, pathlib.Path], config) -> str:
    """Chosen evaluations of several runs side by side, and paired differences to the first run.

    Numbers are per token, or per row where runs count other tokens (those of a canvas).

    "own" is each run's training order: exact for one fixed order, a bound for a random one. The
    difference is over rows scored by both runs, so its standard error leaves out what rows share.
    """
    records = {name: chosen_record(path, config) for name, path in workdirs.items()}
    first = next(iter(records.values()))
    counted = {r["results"]["own"]["tokens"] for r in records.values() if "own" in r["results"]}
    unit = "token" if len(counted) < 2 else "row"
    names = [f"{order} order, nats/{unit}" for order in ("own", "any")]
    lines = [f"{'run':<14}{names[0]:>26}{names[1]:>26}{'own - first':>22}"]
    for name, record in records.items():
        cells = [_cell(record, key, unit) for key in ("own", "any")]
        delta = "" if record is first else _difference(record, first, unit)
        lines.append(f"{name:<14}{cells[0]:>26}{cells[1]:>26}{delta:>22}")
    return "\n".join(lines)


def _difference(record: dict, first: dict, unit: str) -> str:
    if "own" not in record["results"] or "own" not in first["results"]:
        return "-"
    difference = np.subtract(record["row_nll"]["own"], first["row_nll"]["own"])
    own = record["results"]["own"]
    scale = own["rows"] / own["tokens"] if unit == "token" else 1.0
    se = difference.std(ddof=1) / math.sqrt(len(difference))
    return f"{difference.mean() * scale:+.4f} +- {se * scale:.4f}"


def chosen_record(workdir: pathlib.Path, config) -> dict:
    """The evaluation record by which a run is judged, see `reported_step`."""
    split = config.eval.report_split or config.eval.split
    return records(workdir, split)[reported_step(workdir, config)]


def _cell(record: dict, key: str, unit: str) -> str:
    if key not in record["results"]:
        return "-"
    result, rows = record["results"][key], np.array(record["row_nll"][key])
    numbers = result["nats_per_token"], result["nats_per_token_se"]
    if unit == "row":
        numbers = rows.mean(), rows.std(ddof=1) / math.sqrt(len(rows))
    bound = "" if result["estimator"].startswith("exact") else "<= "
    return f"{bound}{numbers[0]:.4f} +- {numbers[1]:.4f}"

"""What a study found: means, standard errors, paired differences, criteria; text, JSON, figure."""

import dataclasses
import itertools
import json
import math
import pathlib

import numpy as np

from aodiff import data, figures_ordergpt, figures_study, study
from aodiff.core.orders import kendall_tau
from aodiff.summary import chosen_record, how, measures, run_dirs
from aodiff.writers import replace_text


class CriteriaError(Exception):
    """A study ran to its end and did not pass its criteria."""


@dataclasses.dataclass(frozen=True)
class Result:
    """One training as it is reported.

    own, any: nats per token, NaN where not evaluated. rows: own NLL per row, in nats per token of
    an average row. step: of the reported evaluation. seconds: of training steps and of finding the
    order. measures: "measure/key" -> number.
    """

    own: float
    any: float
    rows: np.ndarray
    step: int
    steps: int
    seconds: float
    measures: dict[str, float]


Table = dict[str, dict[str, Result]]  # run -> arm -> result


def read(config, workdir: pathlib.Path) -> Table:
    """The results of all runs of a study, or of the one run of another config."""
    if not study.is_study(config):
        return {workdir.name: _read_run(config, workdir)}
    return {name: _read_run(c, workdir / name) for name, c in study.members(config).items()}


def _read_run(config, workdir: pathlib.Path) -> dict[str, Result]:
    costs = _json(workdir / "order_seconds.json")
    return {
        arm: _read_arm(config, path, costs.get(arm, 0.0))
        for arm, path in run_dirs(config, workdir).items()
    }


def _read_arm(config, workdir: pathlib.Path, seconds: float) -> Result:
    record = chosen_record(workdir, config)
    results, goodput = record["results"], _json(workdir / "goodput.json")
    own = results["own"]
    return Result(
        own=own["nats_per_token"],
        any=results.get("any", {}).get("nats_per_token", math.nan),
        rows=np.array(record["row_nll"]["own"]) * own["rows"] / own["tokens"],
        step=record["step"],
        steps=goodput["step"],
        seconds=goodput["seconds"]["step"] + seconds,
        measures={
            f"{name}/{key}": value
            for name, numbers in measures(workdir).items()
            for key, value in numbers.items()
        },
    )


def _json(path: pathlib.Path) -> dict:
    return json.loads(path.read_text()) if path.exists() else {}


def mean_and_error(values) -> tuple[float, float]:
    """Mean of finite values and its standard error, NaN for fewer than two."""
    values = np.asarray([v for v in values if math.isfinite(v)], np.float64)
    if not len(values):
        return math.nan, math.nan
    error = values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return float(values.mean()), float(error)


def difference(table: Table, arm: str, first: str) -> dict[str, float]:
    """Own NLL of `arm` minus that of `first`, positive where `first` is better.

    Returns:
      mean; error over runs, each paired by seed and permutation; row_error over the rows of the
      split, each averaged over runs, which is what another test sample would change.
    """
    mean, error = mean_and_error([run[arm].own - run[first].own for run in table.values()])
    rows = np.mean([run[arm].rows - run[first].rows for run in table.values()], axis=0)
    return {"mean": mean, "error": error, "row_error": mean_and_error(rows)[1]}


def natural_order(config, units) -> np.ndarray:
    """The natural positions (L,) of `units` of a run, which its hidden permutation numbered."""
    info = data.describe(config.data)
    return np.argsort(info.natural(np.arange(info.seq_len)))[np.asarray(units)]


def learned_orders(config, workdir: pathlib.Path) -> list[tuple[int, np.ndarray]]:
    """The seed and the learned order, in natural positions (L,), of every run that has one."""
    orders = []
    for name, c in study.members(config).items():
        path = workdir / name / "order.json"
        if path.exists():
            orders.append((c.seed, natural_order(c, json.loads(path.read_text()))))
    return orders


def stability(orders: list[tuple[int, np.ndarray]]) -> tuple[float, int]:
    """Mean |Kendall tau| between `learned_orders` whose seeds differ, and the number of pairs."""
    taus = [
        abs(kendall_tau(a, b)) for (s, a), (t, b) in itertools.combinations(orders, 2) if s != t
    ]
    return mean_and_error(taus)[0], len(taus)


def judge(config, table: Table) -> dict[str, tuple[bool, str]]:
    """Passed or not, and a line, for each of `config.criteria`.

    A criterion speaks of "measure/key" of the main run, of its NLL ("nll/own", "nll/any") or of
    what an arm's own NLL lies above it ("gain/<arm>"). A run without the number fails it.
    """
    values = []
    for run in table.values():
        main = next(iter(run.values()))
        gains = {f"gain/{arm}": result.own - main.own for arm, result in run.items()}
        values.append(main.measures | gains | {"nll/own": main.own, "nll/any": main.any})
    found = {}
    for name, (low, high, share) in config.criteria.items():
        numbers = [v.get(name, math.nan) for v in values]
        good = sum(low <= x <= high for x in numbers)
        passed = good >= share * len(numbers) - 1e-9
        found[name] = (
            passed,
            (
                f"{'passed' if passed else 'FAILED'} {name} in [{low:g}, {high:g}] in {good} of "
                f"{len(numbers)} runs, {share:.0%} wanted: {' '.join(f'{x:.4g}' for x in numbers)}"
            ),
        )
    return found


def check(config, workdir: pathlib.Path) -> None:
    """Raises CriteriaError, one line, unless all of `config.criteria` pass."""
    if config.criteria:
        failed = [
            line for passed, line in judge(config, read(config, workdir)).values() if not passed
        ]
        if failed:
            raise CriteriaError("; ".join(failed))


def study_summary(config, workdir: pathlib.Path, commands: list[str]) -> str:
    """The tables of a study as text; also writes `workdir/study.json` and `workdir/study.png`.

    Args:
      commands: what to type next for one of its runs, each without its directory.
    """
    table = read(config, workdir)
    arms = list(next(iter(table.values())))
    first, *others = arms
    means = {
        arm: {
            key: mean_and_error([getattr(run[arm], key) for run in table.values()])
            for key in ("own", "any", "step", "steps", "seconds")
        }
        for arm in arms
    }
    differences = {arm: difference(table, arm, first) for arm in others}
    judged = judge(config, table)
    orders = learned_orders(config, workdir)
    tau, pairs = stability(orders)
    split = config.eval.report_split or config.eval.split
    lines = [
        f"{len(table)} runs of {config.data.name}, {split} split{how(config)}",
        "nats per token, mean +- standard error over runs; differences are paired by run",
        "",
        f"{'run':<16}{'own order':>20}{'any order':>20}{f'own - {first}':>22}{'over rows':>12}"
        f"{f'{first}':>20}{'step':>12}{'seconds':>10}",
    ]
    for arm, m in means.items():
        d = differences.get(arm)
        cells = ["", "", ""]
        if d:
            cells = [_pm(d["mean"], d["error"], "+"), f"+- {d['row_error']:.4f}", _verdict(d)]
        step = f"{m['step'][0]:.0f}/{m['steps'][0]:.0f}"
        lines.append(
            f"{arm:<16}{_pm(*m['own']):>20}{_pm(*m['any']):>20}{cells[0]:>22}{cells[1]:>12}"
            f"{cells[2]:>20}{step:>12}{m['seconds'][0]:>10.1f}"
        )
    measures = _measures(table, arms)
    if measures:
        lines += ["", f"{'measure':<34}" + "".join(f"{arm:>20}" for arm in arms)]
        for key, row in measures.items():
            lines.append(f"{key:<34}" + "".join(f"{_pm(*row[arm]):>20}" for arm in arms))
    if pairs:
        lines += ["", f"learned orders of different seeds: mean |tau| {tau:.3f} over {pairs} pairs"]
    if judged:
        lines += ["", *(line for _, line in judged.values())]
    record = {
        "split": split,
        "means": means,
        "differences": differences,
        "measures": measures,
        "stability": {"mean_abs_tau": tau, "pairs": pairs},
        "criteria": {name: passed for name, (passed, _) in judged.items()},
        "runs": {
            name: {arm: dataclasses.asdict(r) | {"rows": r.rows.tolist()} for arm, r in run.items()}
            for name, run in table.items()
        },
    }
    replace_text(workdir / "study.json", json.dumps(_finite(record), indent=1))
    own = {arm: [run[arm].own for run in table.values()] for arm in arms}
    drawn = [workdir / "study.png"]
    figures_study.study(drawn[0], own, config.data.name)
    if len(orders) > 1:
        drawn.append(workdir / "stability.png")
        info = data.describe(config.data)
        figures_ordergpt.stability(drawn[1], np.stack([order for _, order in orders]), info)
    lines += ["", f"figures: {', '.join(map(str, drawn))}, and those of each run"]
    lines += [f"{command} --workdir={workdir / next(iter(table))}" for command in commands]
    return "\n".join(["", *lines])


def _finite(tree):
    """`tree` with None for NaN, which JSON does not know."""
    if isinstance(tree, dict):
        return {key: _finite(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_finite(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


def _measures(table: Table, arms: list[str]) -> dict[str, dict[str, tuple[float, float]]]:
    keys = {key: None for run in table.values() for arm in arms for key in run[arm].measures}
    return {
        key: {
            arm: mean_and_error([run[arm].measures.get(key, math.nan) for run in table.values()])
            for arm in arms
        }
        for key in keys
    }


def _pm(mean: float, error: float, sign: str = "") -> str:
    if math.isnan(mean):
        return "-"
    return f"{mean:{sign}.4f}" + ("" if math.isnan(error) else f" +- {error:.4f}")


def _verdict(d: dict[str, float]) -> str:
    """The first run against an arm, in the larger of the standard errors over runs and rows."""
    if math.isnan(d["error"]):
        return "-"
    word = "wins" if d["mean"] > 0 else "loses"
    return f"{word} by {abs(d['mean']) / max(d['error'], d['row_error'], 1e-12):.1f} SE"

"""Likelihood evaluation over a split: one pass, every row once, noise keyed by the row's id."""

import json
import math
import pathlib
import re
from collections.abc import Callable

import jax
import numpy as np
from absl import logging
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from aodiff import data, figures, rng
from aodiff.config import ConfigError
from aodiff.data import DataInfo, Source, Stats
from aodiff.data.pipeline import eval_batches
from aodiff.methods.base import Method
from aodiff.partitioning import batch_sharding
from aodiff.writers import replace_text

Scorers = dict[str, tuple[str, Callable]]  # name -> (estimator, compiled on its first batch)


def open_splits(config) -> dict[str, Source]:
    """Opens the data; raises ConfigError if there is no split to evaluate on."""
    splits = data.open_splits(config.data)
    for key in ("split", "report_split"):
        if config.eval[key] not in (*splits, None):
            raise ConfigError(
                f"eval.{key}={config.eval[key]!r} is not a split of {config.data.name}; use one of "
                f"{', '.join(splits)}"
            )
    return splits


def make_scorers(method: Method, config, mesh: Mesh) -> Scorers:
    """The evaluations of the method, for `evaluate`; made once a run, they are traced once."""
    replicated = NamedSharding(mesh, PartitionSpec())
    return {
        name: (e.estimator, _with_stream(e.fn, config.seed, replicated))
        for name, e in method.evaluations(config).items()
    }


def record_path(workdir: pathlib.Path, config, step: int, trained_on: str) -> pathlib.Path:
    """`eval/<split>-<step>.json`, with the name of the data in front if they are other data."""
    name = f"{config.eval.split}-{step}.json"
    if config.data.name != trained_on:
        name = re.sub(r"\W+", "_", config.data.name).strip("_") + "-" + name
    return workdir / "eval" / name


def records(workdir: pathlib.Path, split: str) -> dict[int, dict]:
    """The evaluation records of a split in `workdir/eval`, on the data of the run, by step."""
    paths = (workdir / "eval").glob(f"{split}-[0-9]*.json")
    return {int(path.stem.split("-")[-1]): json.loads(path.read_text()) for path in paths}


def reported_step(workdir: pathlib.Path, config) -> int:
    """The evaluated step by which a run is judged: the last.

    With `eval.report_split` it is the one where own is lowest on `eval.split`, so that a run that
    overfits is not held to its end; the reported split has no part in the choice.

    Raises:
      ConfigError: there is no evaluation.
    """
    found = records(workdir, config.eval.split)
    if not found:
        raise ConfigError(
            f"{workdir / 'eval'} holds no evaluation of {config.eval.split}; rerun its training, "
            "which makes up for it, or set eval.report_split to None"
        )
    if config.eval.report_split is None:
        return max(found)
    return min(found, key=lambda step: found[step]["results"]["own"]["nats_per_token"])


def evaluate(
    scorers: Scorers,
    params,
    extra,
    source,
    info: DataInfo,
    config,
    mesh: Mesh,
    *,
    step: int,
    path: pathlib.Path,
    figure: bool = True,
) -> dict[str, dict]:
    """Scores `config.eval.split` with every scorer.

    Writes `path`, from `record_path`, and a `figure` beside it (process 0), and returns the new
    "results": per evaluation name nats/token with standard error over rows, bits, perplexity,
    counts, estimator and parameter source. Totals are divided once, by the number of scored tokens.
    """
    results, rows = {}, {}
    for name, (estimator, fn) in scorers.items():
        nll, count, curves, tokens = [], [], {}, 0
        for batch in eval_batches(source, config.eval.batch, batch_sharding(mesh)):
            with jax.set_mesh(mesh):
                scores, real, mask = jax.device_get(fn(params, batch, extra))
            tokens += int(mask.sum())
            nll.append(scores.nll[real].astype(np.float64))
            count.append(scores.count[real].astype(np.float64))
            curves = jax.tree.map(np.add, curves, scores.curves) if curves else scores.curves
        nll, count = np.concatenate(nll), np.concatenate(count)
        if len(nll) != len(source):
            raise AssertionError(f"scored {len(nll)} rows of a split of {len(source)}")
        results[name] = _summary(nll, count, tokens, source.stats) | {
            "estimator": estimator,
            "params": config.eval.params,
            "curves": {k: _curve(c) for k, c in curves.items()},
        }
        rows[name] = nll.tolist()
        logging.info("%s %s", name, format_result(results[name]))
    record = {
        "split": config.eval.split,
        "step": step,
        "data": info.name,
        "fingerprint": source.fingerprint,
        "seed": config.seed,
        "results": results,
        "row_nll": rows,
    }
    if jax.process_index() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        record = _merged(path, record)
        replace_text(path, json.dumps(record, indent=1))
        if figure:
            figures.nll_curves(path.with_suffix(".png"), record["results"])
    return results


def _merged(path: pathlib.Path, new: dict) -> dict:
    """`new` with the other results of the record at `path`, if it scored the same rows alike."""
    old = json.loads(path.read_text()) if path.exists() else {}
    kinds = {result["params"] for r in (old, new) for result in r.get("results", {}).values()}
    if len(kinds) > 1 or any(old.get(k) != new[k] for k in ("step", "fingerprint", "seed")):
        return new
    return new | {key: old[key] | new[key] for key in ("results", "row_nll")}


def _with_stream(fn, seed: int, sharding: NamedSharding) -> Callable:
    """Scores of a batch, which rows are no padding, and which tokens there are to score.

    The seed is an argument of the compiled program, so that runs of all seeds share it.
    """

    def scored(params, batch, extra, seed):
        scores = fn(params, batch, rng.stream(seed, rng.EVAL), extra)
        return scores, batch["example_id"] >= 0, batch["loss_mask"]

    compiled = jax.jit(scored, out_shardings=sharding)
    return lambda params, batch, extra: compiled(params, batch, extra, np.uint32(seed))


def _summary(nll: np.ndarray, count: np.ndarray, tokens: int, stats: Stats) -> dict:
    """Ratio estimate sum(nll) / sum(count) with its standard error over rows.

    `tokens` are all there are in the split; an estimator may score a part of them.
    """
    mean = nll.sum() / count.sum()
    residual = nll - mean * count
    se = math.sqrt((residual**2).sum() / max(len(nll) - 1, 1) * len(nll)) / count.sum()
    summary = {
        "nats_per_token": mean,
        "nats_per_token_se": se,
        "bits_per_token": mean / math.log(2),
        "perplexity": math.exp(min(mean, 700.0)),
        "tokens": int(count.sum()),
        "rows": len(nll),
        "documents": stats.documents,
        "bytes": stats.bytes,
    }
    if stats.bytes:
        tokens_per_byte = tokens / stats.bytes
        summary["bits_per_byte"] = mean * tokens_per_byte / math.log(2)
        summary["bits_per_byte_se"] = se * tokens_per_byte / math.log(2)
    return summary


def _curve(acc) -> list[float | None]:
    return [float(t / c) if c else None for t, c in zip(acc.total, acc.count, strict=True)]


def format_result(result: dict) -> str:
    """One line: the number users compare, its standard error, and what kind of number it is."""
    text = f"{result['nats_per_token']:.4f} +- {result['nats_per_token_se']:.4f} nats/token"
    if "bits_per_byte" in result:
        text += f", {result['bits_per_byte']:.4f} bits/byte"
    return f"{text} ({result['estimator']}; {result['params']} parameters)"

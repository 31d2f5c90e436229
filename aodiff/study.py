"""A run with its comparison runs, and a study: the same over several seeds and permutations."""

import dataclasses
import json
import pathlib
import time
from typing import Any

import jax
import ml_collections
import numpy as np
from absl import logging

from aodiff import accounting, arms, distributed, evaluate, stages, train
from aodiff import config as config_lib
from aodiff.config import ConfigError
from aodiff.core import empirical
from aodiff.data.pipeline import as_batch
from aodiff.writers import replace_text

FINISHED = "finished.json"  # in a run's directory: the config that it and all its arms finished


@dataclasses.dataclass
class Progress:
    """How many trainings a study has, and how long those of this session took."""

    total: int
    done: int = 0
    timed: int = 0
    seconds: float = 0.0

    def skip(self, number: int) -> None:
        self.done += number

    def add(self, seconds: float) -> None:
        self.done, self.timed, self.seconds = self.done + 1, self.timed + 1, self.seconds + seconds

    def __str__(self) -> str:
        done = f"{self.done} of {self.total} trainings done"
        if not self.timed:
            return done
        left = (self.total - self.done) * self.seconds / self.timed
        return f"{done}, {accounting.duration(left)} left"


def is_study(config) -> bool:
    """Whether the config asks for several runs."""
    return bool(config.study.seeds or config.study.permute_seeds)


def members(config) -> dict[str, ml_collections.ConfigDict]:
    """The runs of a study by directory name, "seed<S>-perm<P>", "seed<S>" without permutation.

    Raises:
      ConfigError: the study has a bad value, which its runs alone would not show.
    """
    config_lib.finalize(config)
    seeds = config.study.seeds or (config.seed,)
    permutations = config.study.permute_seeds or (config.data.permute_seed,)
    found = {}
    for seed in seeds:
        for permutation in permutations:
            c = ml_collections.ConfigDict(config).copy_and_resolve_references()
            c.seed = seed
            c.data.permute_seed = seed if permutation == -1 else permutation
            c.study.seeds, c.study.permute_seeds = (), ()
            hidden = "" if permutation is None else f"-perm{c.data.permute_seed}"
            found[f"seed{seed}{hidden}"] = c
    return found


def member(config, workdir: pathlib.Path, mode: str) -> ml_collections.ConfigDict:
    """The config of the one run of a study in `workdir`, for evaluation and sampling.

    Raises:
      ConfigError: `workdir` is not that of a run.
    """
    found = members(config)
    if workdir.name not in found:
        raise ConfigError(
            f"--mode={mode} works on one run and this config is a study of {len(found)}; name its "
            f"directory, for example --workdir={workdir / next(iter(found))}"
        )
    return found[workdir.name]


def train_runs(
    config,
    workdir: pathlib.Path,
    profile: tuple[int, int] = (0, 0),
    progress: Progress | None = None,
) -> None:
    """Trains the run of `config` in `workdir`, then its comparison runs in folders of their own."""
    progress = progress or Progress(1 + len(config.compare))
    begin = time.perf_counter()
    first = stages.run if stages.has_stages(config) else train.train
    first(config, workdir, profile=profile)
    for name, order in config.compare.items():
        progress.add(time.perf_counter() - begin)
        logging.info("comparison run %s, order %s; %s", name, order, progress)
        begin = time.perf_counter()
        if order in config_lib.FOUND:
            order = f"file({found_order(config, workdir, name, order)})"
        train.train(arms.arm(config, order), workdir / name)
    progress.add(time.perf_counter() - begin)


def found_order(config, workdir: pathlib.Path, name: str, order: str) -> pathlib.Path:
    """The file that holds an order of `config.FOUND`, written first unless it is there.

    Process 0 writes `<order>_order.json` and, in seconds, what it cost to `order_seconds.json`.
    """
    if order == config_lib.LEARNED:
        distributed.barrier(f"order {name} of {workdir}")
        return workdir / "order.json"
    path = workdir / f"{order}_order.json"
    if jax.process_index() == 0 and not path.exists():
        begin = time.perf_counter()
        source = evaluate.open_splits(config)["train"]
        rows = np.linspace(0, len(source) - 1, min(len(source), empirical.ROWS)).astype(np.int64)
        batch = as_batch(source.read(rows), rows)
        units = empirical.ORDERS[order](batch["tokens"], batch["loss_mask"])
        seconds = time.perf_counter() - begin
        logging.info("order %s from %d training rows in %.2f s", order, len(rows), seconds)
        costs = workdir / "order_seconds.json"
        known = json.loads(costs.read_text()) if costs.exists() else {}
        replace_text(costs, json.dumps(known | {name: round(seconds, 3)}))
        replace_text(path, json.dumps(units.tolist()))
    distributed.barrier(f"order {name} of {workdir}")
    return path


def run_study(config, workdir: pathlib.Path, profile: tuple[int, int] = (0, 0)) -> None:
    """Trains every run of a study; finished ones are skipped, an interrupted one goes on.

    Args:
      profile: the steps to trace of every run, not of its comparison runs.
    """
    runs = members(config)
    train.set_up(next(iter(runs.values())))  # a bad value is refused before the first run
    each = 1 + len(config.compare)
    progress = Progress(each * len(runs))
    for name, c in runs.items():
        path, wanted = workdir / name / FINISHED, _plain(c)
        if path.exists() and json.loads(path.read_text()) == wanted:
            progress.skip(each)
            continue
        logging.info("study: run %s; %s", name, progress)
        train_runs(c, workdir / name, profile, progress)
        if jax.process_index() == 0:
            replace_text(path, json.dumps(wanted))


def _plain(config) -> Any:
    """The config of a run as JSON gives it back, without what changes no number."""
    c = config_lib.finalize(config).to_dict()
    return json.loads(json.dumps({k: v for k, v in c.items() if k not in ("criteria", "log")}))

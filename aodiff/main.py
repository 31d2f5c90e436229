"""`python -m aodiff.main --config=configs/aogpt.py[:preset] [--workdir=...] [--mode=...]`."""

import dataclasses
import pathlib
import shlex
import sys

import jax
from absl import app, flags, logging
from ml_collections import config_flags

from aodiff import (
    distributed,
    evals,
    host_memory,
    profiling,
    stages,
    study,
    study_summary,
    train,
    writers,
)
from aodiff.checkpoint import CheckpointError
from aodiff.config import ConfigError, default_workdir, on_split, scored_splits
from aodiff.data import DataError
from aodiff.evaluate import evaluate, make_scorers, open_splits, record_path
from aodiff.generate import generate
from aodiff.summary import run_summary, tables

_CONFIG = config_flags.DEFINE_config_file("config", help_string="a file of configs/, with :preset")
_WORKDIR = flags.DEFINE_string("workdir", None, "where the run lives; default runs/<config name>")
_MODE = flags.DEFINE_enum("mode", "train", ["train", "eval", "sample"], "what to do")
_COORDINATOR = flags.DEFINE_string("coordinator", None, "host:port of process 0")
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "number of processes")
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "this process, from 0")
_PROFILE = flags.DEFINE_string("profile", "", "steps to trace, such as 10:13")
SENTENCES = (
    *(ConfigError, DataError, CheckpointError),
    *(train.TrainingError, study_summary.CriteriaError),
)


def run(config, workdir: pathlib.Path) -> None:
    """Trains (with its comparison runs, or a whole study), evaluates or samples."""
    is_study = study.is_study(config)
    if _MODE.value == "train":
        train_all = study.run_study if is_study else study.train_runs
        train_all(config, workdir, profiling.parse_window(_PROFILE.value))
        if jax.process_index() == 0:
            again = shlex.join(["python", "-m", "aodiff.main", *sys.argv[1:]])
            commands = [f"{again} --mode=eval", f"{again} --mode=sample"]
            show = study_summary.study_summary if is_study else run_summary
            logging.info("%s", show(config, workdir, commands))
            if stages.has_stages(config) and not is_study:
                logging.info("%s", stages.table(config, workdir))
            study_summary.check(config, workdir)
        return
    config = study.member(config, workdir, _MODE.value) if is_study else config
    config = stages.member(config, workdir)
    setup = train.set_up(config)
    step, trained_on, *model = train.restore(setup, workdir, config[_MODE.value].params)
    if _MODE.value == "eval":
        splits = open_splits(setup.config)
        scorers = make_scorers(setup.method, setup.config, setup.mesh)
        for split in scored_splits(setup.config):
            at = dataclasses.replace(setup, config=on_split(setup.config, split))
            path = record_path(workdir, at.config, step, trained_on)
            rest = splits[split], at.info, at.config, at.mesh
            evaluate(scorers, *model, *rest, step=step, path=path)
        if config.eval.measures:  # of the last split, which is the one to report
            evals.measure(at, *model, splits, step, workdir, path)
            if jax.process_index() == 0:
                logging.info("%s", "\n".join(tables(workdir)))
    else:
        rest = setup.info, setup.config, setup.mesh
        generate(setup.method, *model, *rest, step=step, workdir=workdir)


def local_path(workdir: str) -> pathlib.Path:
    """The workdir as a path; a URL would silently become a local folder of that name."""
    if "://" in workdir:
        raise ConfigError(
            f"--workdir={workdir} is a URL, not a path; mount the bucket, for example with "
            "gcsfuse, and pass the path it is mounted at"
        )
    return pathlib.Path(workdir)


def main(_: list[str]) -> None:
    writers.set_up_logging()
    host_memory.keep_freed_memory()
    try:
        default = default_workdir(flags.FLAGS["config"].config_filename)
        workdir = local_path(_WORKDIR.value or str(default))
        connect = _COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value
        distributed.start(*connect, preemptible=_MODE.value == "train")
        if jax.process_index():
            logging.set_verbosity(logging.WARNING)
        run(_CONFIG.value, workdir)
    except distributed.Preempted as e:
        logging.info("%s", e)
    except SENTENCES as e:
        sys.exit(" ".join(str(e).split()))
    except OSError as e:
        sys.exit(f"{e}; put that right and rerun the same command, it continues where it can")


def parse(argv: list[str]) -> list[str]:
    """Reads the flags; a bad one is one line, not a traceback."""
    try:
        rest = flags.FLAGS(argv)
        if flags.FLAGS["config"].value is None:
            sys.exit("--config is missing; try --config=configs/aogpt.py:smoke")
        return rest
    except (flags.Error, ConfigError, AttributeError, KeyError, TypeError, ValueError) as e:
        what = "no such key in base() of aodiff/config.py: "
        what = what if isinstance(e, AttributeError | KeyError) else ""
        sys.exit(what + " ".join(str(e).split()).strip("\"'"))


if __name__ == "__main__":
    app.run(main, flags_parser=parse)

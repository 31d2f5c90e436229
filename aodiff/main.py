"""`python -m aodiff.main --config=configs/aogpt.py[:preset] [--workdir=...] [--mode=...]`."""

import pathlib
import shlex
import sys

from absl import app, flags, logging
from ml_collections import config_flags

from aodiff import distributed, profiling, writers
from aodiff.checkpoint import CheckpointError
from aodiff.config import ConfigError, arm
from aodiff.data import DataError, open_splits
from aodiff.evaluate import comparison_table, evaluate
from aodiff.generate import generate
from aodiff.train import TrainingError, restore, set_up, train

_CONFIG = config_flags.DEFINE_config_file("config", help_string="a file of configs/, with :preset")
_WORKDIR = flags.DEFINE_string("workdir", None, "where the run lives; default runs/<config name>")
_MODE = flags.DEFINE_enum("mode", "train", ["train", "eval", "sample"], "what to do")
_COORDINATOR = flags.DEFINE_string("coordinator", None, "host:port of process 0")
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "number of processes")
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "this process, from 0")
_PROFILE = flags.DEFINE_string("profile", "", "steps to trace, such as 10:13")

SENTENCES = (ConfigError, DataError, CheckpointError, TrainingError, OSError, TimeoutError)


def run(config, workdir: pathlib.Path) -> None:
    """Trains (with its comparison arms), evaluates or samples."""
    if _MODE.value == "train":
        train(config, workdir, profile=profiling.parse_window(_PROFILE.value))
        for name, order in config.compare.items():
            logging.info("comparison run %s, order %s", name, order)
            train(arm(config, order), workdir / name)
        if config.compare:
            runs = {config.method.name: workdir} | {n: workdir / n for n in config.compare}
            logging.info("held-out NLL\n%s", comparison_table(runs, config.eval.split))
        for mode in ("eval", "sample"):
            command = ["python", "-m", "aodiff.main", *sys.argv[1:], f"--mode={mode}"]
            logging.info("%s: %s", mode, shlex.join(command))
        return
    setup = set_up(config)
    c, common = setup.config, (setup.info, setup.config, setup.mesh)
    step, params, extra = restore(setup, workdir, c[_MODE.value].params)
    if _MODE.value == "eval":
        source = open_splits(c.data)[c.eval.split]
        evaluate(setup.method, params, extra, source, *common, step=step, workdir=workdir)
    else:
        logging.info(
            "%s", generate(setup.method, params, extra, *common, step=step, workdir=workdir)
        )


def main(argv: list[str]) -> None:
    del argv
    writers.set_up_logging(verbose=not _PROCESS_ID.value)
    name = pathlib.Path(config_flags.get_config_filename(flags.FLAGS["config"])).stem
    workdir = pathlib.Path(_WORKDIR.value or f"runs/{name}")
    try:
        if _MODE.value == "train" or _COORDINATOR.value:
            distributed.start(_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value)
        run(_CONFIG.value, workdir)
    except distributed.Preempted as e:
        logging.info("%s", e)
    except SENTENCES as e:
        sys.exit(f"{e}")


def parse(argv: list[str]) -> list[str]:
    """Reads the flags; a bad one is one line, not a traceback."""
    try:
        return flags.FLAGS(argv)
    except (
        flags.Error,
        ConfigError,
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
        OSError,
    ) as e:
        sys.exit(f"{e}")


if __name__ == "__main__":
    app.run(main, flags_parser=parse)

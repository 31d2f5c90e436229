"""Where numbers go: the console and `metrics.jsonl` always, TensorBoard and W&B on request."""

import json
import logging as std_logging
import math
import pathlib
from typing import Protocol

import jax
from absl import logging

from aodiff.config import ConfigError


class Writer(Protocol):
    """Takes scalars of a step; `text` is a line for people."""

    def write(self, step: int, scalars: dict[str, float]) -> None: ...

    def text(self, step: int, line: str) -> None: ...

    def close(self) -> None: ...


def set_up_logging() -> None:
    """Plain lines with the time; see `keep` for those of other libraries."""
    handler = logging.get_absl_handler()
    handler.setFormatter(std_logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    handler.addFilter(keep)
    # A failed save is reported once, by `checkpoint`; asyncio would add a traceback per file.
    std_logging.getLogger("asyncio").setLevel(std_logging.CRITICAL)
    logging.set_verbosity(logging.INFO)


def keep(record: std_logging.LogRecord) -> bool:
    """Other libraries may warn, in a line: what they raise as well needs no traceback here."""
    if record.pathname.startswith(str(pathlib.Path(__file__).parent)):
        return True
    record.exc_info = None
    return record.levelno >= std_logging.WARNING


class Console:
    """Logs text lines; scalars are for the other writers."""

    def write(self, step: int, scalars: dict[str, float]) -> None:
        pass

    def text(self, step: int, line: str) -> None:
        logging.info("%s", line)

    def close(self) -> None:
        pass


class Jsonl:
    """One JSON object a line. Opened at step s, it keeps the entries up to s and drops the rest."""

    def __init__(self, path: pathlib.Path, step: int):
        self.kept = read_jsonl(path, step)
        if path.exists():
            lines = "".join(_line(e) for e in self.kept)
            if lines != path.read_text():
                replace_text(path, lines)
        self._file = path.open("a", buffering=1)

    def write(self, step: int, scalars: dict[str, float]) -> None:
        finite = {k: v if math.isfinite(v) else None for k, v in scalars.items()}
        self._file.write(_line({"step": step} | finite))

    def text(self, step: int, line: str) -> None:
        pass

    def close(self) -> None:
        self._file.close()


def replace_text(path: pathlib.Path, text: str) -> None:
    """Writes a file that is, at any moment, either the old one or the new one."""
    new = path.with_suffix(".tmp")
    new.write_text(text)
    new.replace(path)


def _line(entry: dict) -> str:
    return json.dumps(entry) + "\n"


def read_jsonl(path: pathlib.Path, step: int | None = None) -> list[dict]:
    """The entries of a metrics file up to `step` (None: all); a torn last line is left out."""
    entries = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            break
        if step is None or entry["step"] <= step:
            entries.append(entry)
    return entries


class TensorBoard:
    """Event files through tensorboardX, which needs no TensorFlow."""

    def __init__(self, workdir: pathlib.Path, step: int):
        try:
            import tensorboardX
        except ImportError as e:
            raise ConfigError(
                "log.tensorboard=True needs tensorboardX; pip install 'aodiff[tensorboard]'"
            ) from e
        self._writer = tensorboardX.SummaryWriter(str(workdir / "tensorboard"), purge_step=step + 1)

    def write(self, step: int, scalars: dict[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def text(self, step: int, line: str) -> None:
        self._writer.add_text("log", line, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """Weights & Biases; the run id is the workdir's name, so that a restart continues it."""

    def __init__(self, workdir: pathlib.Path, config):
        try:
            import wandb
        except ImportError as e:
            raise ConfigError("log.wandb=True needs wandb; pip install 'aodiff[wandb]'") from e
        self._run = wandb.init(
            project="aodiff", id=workdir.name, resume="allow", dir=workdir, config=config.to_dict()
        )

    def write(self, step: int, scalars: dict[str, float]) -> None:
        self._run.log(scalars, step=step)

    def text(self, step: int, line: str) -> None:
        pass

    def close(self) -> None:
        self._run.finish()


class Writers:
    """All writers of a run; only process 0 has any."""

    def __init__(self, workdir: pathlib.Path, config, step: int):
        self.kept: list[dict] = read_jsonl(workdir / "metrics.jsonl", step)
        self._writers: list[Writer] = []
        if jax.process_index() == 0:
            self._writers = [Console(), Jsonl(workdir / "metrics.jsonl", step)]
            if config.log.tensorboard:
                self._writers.append(TensorBoard(workdir, step))
            if config.log.wandb:
                self._writers.append(WandB(workdir, config))

    def evaluated(self, step: int, record: pathlib.Path) -> bool:
        """True if an evaluation of `step` was there when the run was opened, and its record is."""
        written = (e["step"] == step and any(k.startswith("eval/") for k in e) for e in self.kept)
        return record.exists() and any(written)

    def write(self, step: int, scalars: dict[str, float]) -> None:
        for w in self._writers:
            w.write(step, scalars)

    def text(self, step: int, line: str) -> None:
        for w in self._writers:
            w.text(step, line)

    def close(self) -> None:
        for w in self._writers:
            w.close()

"""A trained run opened by its folder alone, with the config that it was trained with."""

import ast
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_collections

from aodiff import checkpoint, train
from aodiff.config import ConfigError, base


@dataclasses.dataclass(frozen=True)
class Run:
    """A run at its newest step, or at the one it is judged by."""

    setup: train.Setup
    step: int
    params: Any
    extra: Any
    workdir: Path


def open_run(workdir: Path, flag: str, choices: Sequence[str] = ()) -> Run:
    """Restores a run.

    Args:
      workdir: of the run. flag: what named it, for messages.
      choices: "key=value" that replace values of the group `sample` of its config.

    Raises:
      ConfigError, DataError, CheckpointError: no such run, no such key, or a bad value.
    """
    found, step = checkpoint.existing(workdir, flag)
    stored = found.meta(step)["config"]
    found.close()
    # A key that is younger than the run had its default value then.
    config = ml_collections.ConfigDict(_merged(base(stored["method"]["name"]).to_dict(), stored))
    for choice in choices:
        key, _, value = choice.partition("=")
        if key not in config.sample or not value:
            raise ConfigError(
                f"--sample={choice} is not key=value with a key of the group sample of this run; "
                f"keys are {', '.join(config.sample)}"
            )
        given, old = _value(value), config.sample[key]
        try:
            config.sample[key] = type(old)(given) if isinstance(old, list | tuple) else given
        except TypeError as error:
            raise ConfigError(
                f"--sample={choice} is a {type(given).__name__}, and {key} is a "
                f"{type(old).__name__}, now {old!r}; give one"
            ) from error
    setup = train.set_up(config)
    step, _, params, extra = train.restore(setup, workdir, setup.config.sample.params)
    return Run(setup, step, params, extra, workdir)


def _merged(old: dict, new: dict) -> dict:
    nested = {k: _merged(old[k], v) for k, v in new.items() if isinstance(old.get(k), dict)}
    return old | new | nested


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text

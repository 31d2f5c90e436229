"""Trace windows, and a stack dump when a step hangs."""

import contextlib
import faulthandler
import pathlib
import sys
from collections.abc import Iterator

import jax

from aodiff.config import ConfigError

HANG_SECONDS = 600.0


def parse_window(spec: str) -> tuple[int, int]:
    """Reads "10:13", steps 10 to 12, as (10, 13); "" is an empty window.

    Raises:
      ConfigError: anything else.
    """
    if not spec:
        return 0, 0
    parts = spec.split(":")
    if len(parts) != 2 or not all(p.isdigit() for p in parts) or int(parts[0]) >= int(parts[1]):
        raise ConfigError(
            f"--profile={spec} is not a window of steps; write it like --profile=10:13"
        )
    return int(parts[0]), int(parts[1])


class Profiler:
    """Traces the steps of a window into `path` (view it with xprof)."""

    def __init__(self, window: tuple[int, int], path: pathlib.Path):
        self._window, self._path = window, path

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Wraps one step; a step that hangs logs every thread's stack and goes on waiting."""
        first, last = self._window
        if step == first:
            jax.profiler.start_trace(str(self._path))
        faulthandler.dump_traceback_later(HANG_SECONDS, file=sys.__stderr__)
        try:
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            if step == last - 1:
                jax.profiler.stop_trace()

"""Parameter counts, analytic FLOPs, step timing, and where the wall time of a run went."""

import contextlib
import json
import math
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import jax

from aodiff.writers import replace_text

# Peak dense bfloat16 FLOP/s of one JAX device, from the vendors' data sheets.
PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
}
PHASES = ("start_up", "compile", "restore", "data_wait", "step", "eval", "save", "lost")


def count_params(params: Any) -> int:
    """Number of scalars in a tree of arrays or shapes."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(params))


def num_bytes(tree: Any) -> int:
    """Bytes of a tree of arrays or shapes, over all devices, each element once."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def peak_flops(device_kind: str) -> float | None:
    """Peak FLOP/s of a device kind, the longest matching name of `PEAK_FLOPS`; None if unknown."""
    names = [name for name in PEAK_FLOPS if device_kind.startswith(name)]
    return PEAK_FLOPS[max(names, key=len)] if names else None


def mfu(flops_per_token: float, tokens_per_second: float) -> float | None:
    """Model FLOPs utilisation of training (three times the forward FLOPs); None on a CPU."""
    peak = peak_flops(jax.devices()[0].device_kind)
    if peak is None:
        return None
    return 3.0 * flops_per_token * tokens_per_second / (peak * jax.device_count())


def duration(seconds: float) -> str:
    """Seconds as people write them: 42 s, 3 min 20 s, 5 h 12 min."""
    s = round(seconds)
    if s < 60:
        return f"{s} s"
    if s < 3600:
        return f"{s // 60} min {s % 60} s"
    return f"{s // 3600} h {s % 3600 // 60} min"


class Goodput:
    """Seconds by phase, summed over restarts and kept in `workdir/goodput.json`.

    `lost` holds the step time of work that a restart had to redo.
    """

    def __init__(self, path: pathlib.Path):
        self._path = path
        stored = json.loads(path.read_text()) if path.exists() else {}
        self.seconds = {phase: stored.get("seconds", {}).get(phase, 0.0) for phase in PHASES}
        self.starts = stored.get("starts", 0) + 1
        self.step = stored.get("step", 0)
        self.steps_run = stored.get("steps_run", 0)

    @contextlib.contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - begin

    def resume(self, step: int) -> None:
        """Counts the steps between `step` and the last one recorded as lost."""
        redone = max(self.step - step, 0)
        if self.steps_run:
            lost = self.seconds["step"] * redone / self.steps_run
            self.seconds["step"] -= lost
            self.seconds["lost"] += lost
            self.steps_run -= redone
        self.step = step

    def advance(self, step: int) -> None:
        """Records that training has reached `step`."""
        self.steps_run += step - self.step
        self.step = step

    def write(self) -> None:
        """Saves the totals; only process 0 calls it."""
        record = {
            "seconds": {k: round(v, 3) for k, v in self.seconds.items()},
            "starts": self.starts,
            "step": self.step,
            "steps_run": self.steps_run,
            "goodput": round(self.seconds["step"] / max(sum(self.seconds.values()), 1e-9), 4),
        }
        replace_text(self._path, json.dumps(record, indent=1))


class StepTimer:
    """Throughput since the last reading, from the phases of a `Goodput`."""

    def __init__(self, goodput: Goodput, tokens_per_step: int, flops_per_token: float):
        self._goodput, self._tokens, self._flops = goodput, tokens_per_step, flops_per_token
        self._last = self._now()
        self._step = goodput.step

    def _now(self) -> tuple[float, float]:
        return self._goodput.seconds["step"], self._goodput.seconds["data_wait"]

    def read(self, step: int) -> dict[str, float]:
        """perf/* scalars of the steps since the last call."""
        now = self._now()
        compute, wait = (b - a for a, b in zip(self._last, now, strict=True))
        count = max(step - self._step, 1)
        self._last, self._step = now, step
        seconds = max(compute + wait, 1e-9)
        rate = self._tokens * count / seconds
        perf = {
            "perf/step_seconds": seconds / count,
            "perf/tokens_per_second": rate,
            "perf/data_wait_fraction": wait / seconds,
        }
        utilisation = mfu(self._flops, rate)
        return perf if utilisation is None else perf | {"perf/mfu": utilisation}

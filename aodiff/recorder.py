"""The metrics of training on their way from the device to the writers."""

import math

import jax

from aodiff import accounting
from aodiff.metrics import Mean, Sum, Window
from aodiff.writers import Writers


class TrainingError(Exception):
    """Training cannot go on: one sentence with the step, the reason and what to do."""


class Recorder:
    """Takes the metrics of every step, reads them one step late, and writes a line now and then.

    setup: the `Setup` of the run; window: the state of an interrupted logging window, or None.
    """

    def __init__(self, setup, writers: Writers, goodput, checkpoints, window: dict | None):
        c = setup.config
        tokens = c.train.global_batch * setup.info.seq_len
        self.window = Window(window)
        self._config, self._writers, self._goodput = c, writers, goodput
        self._checkpoints = checkpoints
        self._timer = accounting.StepTimer(goodput, tokens, setup.method.flops_per_token())
        self._pending: tuple[int, dict[str, Mean | Sum]] | None = None
        self._nonfinite = 0

    def push(self, step: int, metrics: dict[str, Mean | Sum]) -> None:
        """Takes the metrics of the step just dispatched and reads those of the step before."""
        previous, self._pending = self._pending, (step, metrics)
        if previous is not None:
            self._read(*previous)

    def drain(self) -> None:
        """Waits for the step in flight and reads its metrics."""
        previous, self._pending = self._pending, None
        if previous is not None:
            with self._goodput.measure("step"):
                self._read(*previous)

    def _read(self, step: int, metrics: dict[str, Mean | Sum]) -> None:
        metrics = jax.device_get(metrics)
        self.window.add(metrics)
        self._nonfinite = self._nonfinite + 1 if metrics["nonfinite"].total else 0
        if self._nonfinite >= self._config.optim.max_nonfinite:
            raise TrainingError(
                f"loss or gradient is not finite at step {step} (loss "
                f"{float(metrics['loss'].total)}, {self._nonfinite} steps in a row); "
                f"the last checkpoint is step {self._checkpoints.latest()} in "
                f"{self._checkpoints.path}; lower optim.lr or look at the data, then start again "
                "from it"
            )
        if step % self._config.log.every == 0 or step == self._config.train.num_steps:
            self._write(step)

    def _write(self, step: int) -> None:
        self._goodput.advance(step)
        scalars = {f"train/{k}": v for k, v in self.window.pop().items()}
        scalars["train/nll_bits_per_token"] = scalars["train/loss"] / math.log(2)
        scalars |= self._timer.read(step)
        self._writers.write(step, scalars)
        left = (self._config.train.num_steps - step) * scalars["perf/step_seconds"]
        self._writers.text(
            step,
            f"step {step}/{self._config.train.num_steps}  loss {scalars['train/loss']:.4f} "
            f"nats/token  {scalars['perf/tokens_per_second']:,.0f} tokens/s  "
            f"{accounting.duration(left)} left",
        )
        if jax.process_index() == 0:
            self._goodput.write()

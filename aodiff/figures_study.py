"""The figure of a study: the likelihood of every run and arm, and what each arm loses."""

import math
import pathlib

import numpy as np

from aodiff.figures import plt, save


def study(path: pathlib.Path, own: dict[str, list[float]], title: str) -> None:
    """Own NLL per arm, a point a run; and its paired difference to the first arm, with errors.

    Args:
      own: arm -> nats per token of every run, runs in the same order for all arms.
      title: what the runs are of.
    """
    arms = list(own)
    values = np.array([own[arm] for arm in arms], np.float64)  # (arms, runs)
    runs = values.shape[1]
    delta = values - values[0]
    rows = np.arange(len(arms))
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 1.2 + 0.45 * len(arms)), sharey=True)
    left.plot(values, rows[:, None] + np.zeros_like(values), "o", ms=4, color="0.7")
    left.errorbar(values.mean(1), rows, xerr=_error(values), fmt="o", color="C0", capsize=3)
    left.set_yticks(rows, arms)
    left.invert_yaxis()
    left.set_xlabel("own order, nats per token")
    left.set_title(f"{title}: {runs} runs, mean and standard error", size=10)
    colors = ["C2" if mean > 0 else "C3" for mean in delta.mean(1)]
    right.barh(rows, delta.mean(1), xerr=_error(delta), color=colors, height=0.6, capsize=3)
    right.axvline(0, color="0.3", lw=1)
    right.set_xlabel("nats per token above the first, paired by run")
    right.set_title(f"green: {arms[0]} is better", size=10)
    for axes in (left, right):
        axes.grid(alpha=0.3, axis="x")
    save(figure, path)


def _error(values: np.ndarray) -> np.ndarray:
    """Standard error over runs (arms,), 0 for one run."""
    runs = values.shape[1]
    return values.std(1, ddof=1) / math.sqrt(runs) if runs > 1 else np.zeros(len(values))

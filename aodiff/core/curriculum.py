"""From uniform to learned orders: shares, samplers, and when to begin and to freeze.

Functions of the step are traceable, so that one compiled train step serves every phase.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

TOP_SHARE = 0.8  # share of learned orders at the end of the shift


@dataclasses.dataclass(frozen=True)
class Curriculum:
    """Phase boundaries in steps (ordergpt.md section 10).

    P0 warm-up ends between `earliest` and `latest` with the context gain; the share of learned
    orders rises from 0 to 0.8 over [shift, shift_end]; the order freezes between `freeze_from` and
    `shift_end`; the share then rises to 1 within `settle` steps.
    """

    earliest: int
    latest: int
    shift: int
    shift_end: int
    freeze_from: int
    settle: int

    @classmethod
    def of(cls, num_steps, warmup, shift, freeze_from, settle) -> "Curriculum":
        """Builds it from fractions of `num_steps`; `settle` is the fraction at which P3 ends.

        Raises:
          ValueError: unless 0 <= warmup[0] <= warmup[1] <= shift[0] <= freeze_from <= shift[1] <=
            settle <= 1 and shift[0] < shift[1].
        """
        points = (0.0, *warmup, shift[0], freeze_from, shift[1], settle, 1.0)
        if list(points) != sorted(points) or shift[0] == shift[1]:
            raise ValueError(
                f"got warmup={warmup}, shift={shift}, freeze_from={freeze_from}, settle={settle}; "
                "fractions of the run must not decrease in the order warmup, shift[0], "
                "freeze_from, shift[1], settle"
            )
        step = [round(p * num_steps) for p in points]
        return cls(step[1], step[2], step[3], step[5], step[4], step[6] - step[5])

    def share(self, step: jax.Array, freeze_step: jax.Array) -> jax.Array:
        """Share of learned orders at `step`, float32; `freeze_step` < 0: not yet frozen."""
        frozen = freeze_step >= 0
        shifted = jnp.where(frozen, jnp.minimum(step, freeze_step), step)
        base = TOP_SHARE * _ramp(shifted, self.shift, self.shift_end)
        settled = jnp.where(frozen, _ramp(step, freeze_step, freeze_step + self.settle), 0.0)
        return base + (1.0 - base) * settled


def _ramp(step: jax.Array, start: int | jax.Array, end: int | jax.Array) -> jax.Array:
    """0 until `start`, 1 from `end` on, linear between."""
    span = jnp.maximum(jnp.float32(end) - jnp.float32(start), 1.0)
    return jnp.clip((jnp.float32(step) - jnp.float32(start)) / span, 0.0, 1.0)


def gumbel_order(key: jax.Array, priority: jax.Array, kappa: jax.Array) -> jax.Array:
    """Draws one Plackett-Luce order (n,) int32: kappa 0 is uniform, kappa -> inf sorts `priority`.

    P(i before j) = sigmoid(kappa (priority_i - priority_j)).
    """
    noise = jax.random.gumbel(key, priority.shape, mode="high")
    return jnp.argsort(-(kappa * priority + noise)).astype(jnp.int32)


def linear_profile(nll: jax.Array) -> jax.Array:
    """Weighs per-slot losses (B, n) by 1 for the first step falling to 0.1 for the last, (B,).

    The total is equal in both directions for a perfect model; early steps tell them apart.
    """
    weight = jnp.linspace(1.0, 0.1, nll.shape[1])
    return nll @ (weight / weight.sum())


def marginal_entropy(counts: np.ndarray) -> float:
    """Mean over units of the empirical entropy, nats; counts (n, V) of the values seen."""
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    return float(-np.sum(share * np.log(np.where(share > 0, share, 1.0)), axis=1).mean())


def orient(
    gap: float, error: float, agreement: float | None, doubts: int, patience: int = 3
) -> tuple[int, int]:
    """Chooses the direction of a line, with hysteresis.

    Args:
      gap: mean profile loss of the line minus that of its reverse; negative favours the line.
      error: standard error of `gap`.
      agreement: correlation of the line's priorities with the previous, oriented ones; None if
        there were none.
      doubts: refreshes in a row on which the direction in use was clearly worse.
      patience: doubts that make it flip; clearly means by more than 3 standard errors.

    Returns:
      (+1 to keep the line or -1 to reverse it, the new count of doubts).

    Source: ordergpt.md section 8.5.
    """
    if agreement is None:
        return (1 if gap <= 0 else -1), 0
    sign = 1 if agreement >= 0 else -1
    doubts = doubts + 1 if sign * gap > 3 * error else 0
    return (-sign, 0) if doubts >= patience else (sign, doubts)

"""Noise schedules: alpha(t) is the probability that a position is still clean at time t in [0, 1].

alpha(0) = 1 and alpha(1) = 0: time 1 is the fully masked row.
"""

import dataclasses
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp

Fn = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """alpha(t), its inverse t(alpha), and weight(t) = -alpha'(t) / (1 - alpha(t)), in closed form.

    The weight of a masked position's cross entropy makes the loss a bound on the likelihood
    (Sahoo et al., arXiv 2406.07524, eq. 10); the bound itself does not depend on the schedule.
    """

    alpha: Fn
    inverse: Fn
    weight: Fn


def linear() -> Schedule:
    return polynomial(1.0)


def polynomial(power: float) -> Schedule:
    """alpha = 1 - t ** power."""
    return Schedule(
        alpha=lambda t: 1 - t**power,
        inverse=lambda a: (1 - a) ** (1 / power),
        weight=lambda t: power / t,
    )


def cosine() -> Schedule:
    """alpha = 1 - cos(pi / 2 (1 - t)) = 1 - sin(pi t / 2)."""
    half = jnp.pi / 2
    return Schedule(
        alpha=lambda t: 1 - jnp.sin(half * t),
        inverse=lambda a: jnp.arcsin(1 - a) / half,
        weight=lambda t: half / jnp.tan(half * t),
    )


def discrete(schedule: Schedule, steps: int) -> Schedule:
    """`schedule` in `steps` equal steps: a time is the end of the step it falls into.

    Its loss bounds the likelihood of the sampler that reveals at these times, each step at once:
    MD4's loss with a finite number of times (Shi et al., arXiv 2406.04329; mdm.md 2.1).
    """

    def ends(t: jax.Array) -> tuple[jax.Array, jax.Array]:
        step = jnp.maximum(jnp.ceil(t * steps), 1)
        return schedule.alpha((step - 1) / steps), schedule.alpha(step / steps)

    def weight(t: jax.Array) -> jax.Array:
        before, now = ends(t)
        return steps * (before - now) / (1 - now)

    return Schedule(alpha=lambda t: ends(t)[1], inverse=schedule.inverse, weight=weight)


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "linear": linear,
    "poly": polynomial,
    "cosine": cosine,
}


def make_schedule(spec: str) -> Schedule:
    """Builds the schedule of a spec: "linear", "cosine" or "poly(2)".

    Raises:
      ValueError: unknown name, or an argument that does not fit.
    """
    match = re.fullmatch(r"(\w+)(?:\(([\d.]+)\))?", spec)
    name, argument = match.groups() if match else (spec, None)
    takes_one = name == "poly"
    if name not in SCHEDULES or takes_one != (argument is not None):
        raise ValueError(f"Schedule {spec!r} is unknown; use one of: linear, cosine, poly(2).")
    return SCHEDULES[name](float(argument)) if takes_one else SCHEDULES[name]()

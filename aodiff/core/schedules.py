"""Schedules of masking and of insertion, in closed form.

Two conventions, each that of its method: a `Schedule` says which part of a row is still clean when
time runs from data (0) to the fully masked row (1); a `Rise` says which part of a row has come when
time runs from the empty row (0) to data (1).
"""

import dataclasses
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

Fn = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """alpha(t), its inverse t(alpha), and weight(t) = -alpha'(t) / (1 - alpha(t)), in closed form.

    alpha(t) is the probability that a position is still clean at time t in [0, 1], 1 at first and 0
    at the end.

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


# ---- what has come by a time --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Rise:
    """The share of tokens that have come by time t in [0, 1], all elementwise in float32.

    Written by what is left of it, so that nothing cancels near the end. Source: flexmdm.md 2.3;
    Kim et al. (FlexMDM), arXiv 2509.01025.

    Attributes:
      left: 1 - value(t), which falls from 1 to 0.
      time_of: the time at which `left` is a number in [0, 1].
    """

    left: Fn
    time_of: Fn

    def value(self, t: jax.Array) -> jax.Array:
        return 1 - self.left(t)

    def inverse(self, value: jax.Array) -> jax.Array:
        return self.time_of(1 - value)

    def deriv(self, t: jax.Array) -> jax.Array:
        """value'(t)."""
        t = jnp.asarray(t, jnp.float32)
        return -jax.jvp(self.left, (t,), (jnp.ones_like(t),))[1]

    def hazard(self, t: jax.Array, floor: float = 0.0) -> jax.Array:
        """value'(t) / (1 - value(t) + floor): the rate of coming of what has not come yet."""
        return self.deriv(t) / (self.left(t) + floor)

    def step_prob(self, start: jax.Array, end: jax.Array) -> jax.Array:
        """The probability that what has not come by `start` has come by `end`, in [0, 1]."""
        return 1 - self.left(end) / jnp.maximum(self.left(start), TINY)


TINY = 1e-30


def rising_power(power: float) -> Rise:
    """value = 1 - (1 - t) ** power."""
    return Rise(lambda t: (1 - t) ** power, lambda left: 1 - left ** (1 / power))


def rising_sine() -> Rise:
    """value = sin(pi t / 2): fast at first."""
    return Rise(
        lambda t: 2 * jnp.sin(jnp.pi / 4 * (1 - t)) ** 2,
        lambda left: 1 - 4 / jnp.pi * jnp.arcsin(jnp.sqrt(left / 2)),
    )


def rising_cosine() -> Rise:
    """value = 1 - cos(pi t / 2): slow at first."""
    return Rise(
        lambda t: jnp.sin(jnp.pi / 2 * (1 - t)), lambda left: 1 - 2 / jnp.pi * jnp.arcsin(left)
    )


def rising_polynomial(power: float) -> Rise:
    """value = t ** power."""
    return Rise(
        lambda t: -jnp.expm1(power * jnp.log(jnp.maximum(t, TINY))),
        lambda left: (1 - left) ** (1 / power),
    )


def rising_geometric(first: float, last: float, normalised: bool = True) -> Rise:
    """value = exp(-first ** (1 - t) last ** t), mapped onto 0 to 1 if `normalised`.

    As it is, it begins at exp(-first) and ends at exp(-last): some tokens never come.
    """
    rate = np.log(first / last)
    span = np.exp(-last) - np.exp(-first) if normalised else 1.0
    end = 0.0 if normalised else -np.expm1(-last)

    def left(t: jax.Array) -> jax.Array:
        missing = last * jnp.expm1(rate * (1 - t))
        return (end - np.exp(-last) * jnp.expm1(-missing)) / span

    def time_of(left: jax.Array) -> jax.Array:
        missing = -jnp.log1p(-(left * span - end) / np.exp(-last))
        return 1 - jnp.log1p(missing / last) / rate

    return Rise(left, time_of)


def rising_log_linear(share: float, scale: float) -> Rise:
    """value = (1 - share) t + share log(1 + scale t) / log(1 + scale)."""

    def left(t: jax.Array) -> jax.Array:
        logs = -jnp.log1p(-scale / (1 + scale) * (1 - t)) / np.log1p(scale)
        return (1 - share) * (1 - t) + share * logs

    if share == 1:  # has a closed form
        return Rise(
            left,
            lambda left: 1 + jnp.expm1(-left * np.log1p(scale)) * (1 + scale) / scale,
        )
    return Rise(left, bisection(left))


def rising_logit_power(up: float, down: float) -> Rise:
    """value = t ** up / (t ** up + (1 - t) ** down)."""

    def left(t: jax.Array) -> jax.Array:
        return (1 - t) ** down / (t**up + (1 - t) ** down)

    return Rise(left, bisection(left))


def bisection(left: Fn, steps: int = 30) -> Fn:
    """The inverse of a function that falls from 1 to 0 over [0, 1], to float32's resolution."""

    def time_of(wanted: jax.Array) -> jax.Array:
        def halve(_, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            middle = (ends[0] + ends[1]) / 2
            later = left(middle) > wanted
            return jnp.where(later, middle, ends[0]), jnp.where(later, ends[1], middle)

        wanted = jnp.asarray(wanted, jnp.float32)
        start = jnp.zeros_like(wanted), jnp.ones_like(wanted)
        return jax.lax.fori_loop(0, steps, halve, start)[1]

    return time_of


# Name -> (constructor, usual arguments).
RISES: dict[str, tuple[Callable[..., Rise], tuple[float, ...]]] = {
    "linear": (lambda: rising_power(1.0), ()),
    "power": (rising_power, (1.7,)),
    "quadratic": (lambda: rising_power(2.0), ()),
    "sin": (rising_sine, ()),
    "cosine": (rising_cosine, ()),
    "polynomial": (rising_polynomial, (2.0,)),
    "geometric": (rising_geometric, (10.0, 0.01)),
    "log_linear": (rising_log_linear, (1.0, 75.0)),
    "logit_power": (rising_logit_power, (1.5, 2.0)),
}


def make_rise(spec: str) -> Rise:
    """Builds the rise of a spec: a name of `RISES`, with its numbers as in "power(1.7)".

    Raises:
      ValueError: unknown name, arguments that do not fit, or a curve that does not go from 0 to 1.
    """
    match = re.fullmatch(r"(\w+)(?:\(([\d.,\s]+)\))?", spec)
    name, numbers = match.groups() if match else (spec, None)
    usual = RISES.get(name, (None, ()))[1]
    try:
        given = [float(x) for x in numbers.split(",")] if numbers else []
    except ValueError:
        given = None
    if name not in RISES or given is None or len(given) != len(usual):
        known = [
            f"{n}({', '.join(f'{x:g}' for x in a)})" if a else n for n, (_, a) in RISES.items()
        ]
        raise ValueError(f"Schedule {spec!r} is unknown; use one of: {'; '.join(known)}.")
    rise = RISES[name][0](*given)
    check_ends(rise, spec)
    return rise


def check_ends(rise: Rise, name: str) -> None:
    """Raises ValueError unless nothing has come at time 0 and everything at time 1."""
    with jax.ensure_compile_time_eval():  # also where a traced function builds it
        first, last = (float(rise.value(jnp.float32(t))) for t in (0.0, 1.0))
    if not abs(first) < 1e-5 > abs(last - 1):
        raise ValueError(
            f"Schedule {name!r} goes from {first:.4g} to {last:.4g}, not from 0 to 1; use numbers "
            "above 0, or a normalised schedule."
        )

"""Accumulators that keep total and count apart, so that padding and unequal splits stay exact."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class Mean:
    """A mean as total / count, both float32 scalars; divided once, at the very end."""

    total: jax.Array
    count: jax.Array

    @classmethod
    def of(cls, values: jax.Array, mask: jax.Array) -> "Mean":
        """Sums `values` where `mask` (bool, same shape) is True."""
        total = jnp.sum(jnp.where(mask, values, 0.0), dtype=jnp.float32)
        return cls(total, jnp.sum(mask, dtype=jnp.float32))

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.count + other.count)

    def value(self) -> jax.Array:
        return self.total / jnp.maximum(self.count, 1e-20)


@flax.struct.dataclass
class Sum:
    """A plain sum over everything seen."""

    total: jax.Array

    def __add__(self, other: "Sum") -> "Sum":
        return Sum(self.total + other.total)

    def value(self) -> jax.Array:
        return self.total


def merge(a: Any, b: Any) -> Any:
    """Adds two equal-structured trees of accumulators."""
    return jax.tree.map(lambda x, y: x + y, a, b, is_leaf=lambda x: isinstance(x, Mean | Sum))


class Window:
    """Reduces the accumulators of several steps on the host, in float64.

    `state` is a JSON-ready dict of totals and counts; a checkpoint keeps it, so that a resumed run
    logs the numbers of an uninterrupted one.
    """

    def __init__(self, state: dict[str, list[float]] | None = None):
        self.state = dict(state or {})

    def add(self, metrics: dict[str, Mean | Sum]) -> None:
        """Adds the fetched metrics of one step."""
        for name, acc in metrics.items():
            new = [float(acc.total)] + ([float(acc.count)] if isinstance(acc, Mean) else [])
            old = self.state.get(name, [0.0] * len(new))
            self.state[name] = [a + b for a, b in zip(old, new, strict=True)]

    def pop(self) -> dict[str, float]:
        """Returns the value of every metric and starts a new window."""
        found = {k: v[0] / max(v[1], 1e-20) if len(v) == 2 else v[0] for k, v in self.state.items()}
        self.state = {}
        return found

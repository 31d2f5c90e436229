"""Accumulators that keep total and count apart, so that padding and unequal splits stay exact."""

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


def merge(a, b):
    """Adds two equal-structured trees of accumulators."""
    return jax.tree.map(lambda x, y: x + y, a, b, is_leaf=lambda x: isinstance(x, Mean | Sum))


def values(tree) -> dict:
    """Turns a flat dict of accumulators into a dict of scalars."""
    return {name: acc.value() for name, acc in tree.items()}

"""Building blocks: initialisers, projections, norms, rotary embedding.

Parameters are float32 and carry logical axes; layers cast them to the compute dtype at use.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from aodiff.partitioning import shard

EPSILON = 1e-5
ROPE_BASE = 10000.0

Init = Callable[..., jax.Array]


def normal_init(stddev: float, truncated: bool = True) -> Init:
    """Normal of standard deviation `stddev`, cut at 3 of them without re-scaling if `truncated`."""

    def init(key, shape, dtype=jnp.float32):
        if truncated:
            return stddev * jax.random.truncated_normal(key, -3.0, 3.0, shape, dtype)
        return stddev * jax.random.normal(key, shape, dtype)

    return init


def param(module: nn.Module, name: str, init: Init, shape: tuple, axes: tuple) -> jax.Array:
    """Declares a float32 parameter of `module` with one logical axis name (or None) a dimension."""
    return module.param(name, nn.with_logical_partitioning(init, axes), shape, jnp.float32)


def along_last(vector: jax.Array, ndim: int) -> jax.Array:
    """Reshapes a vector so that it broadcasts along the last of `ndim` dimensions."""
    return vector.reshape((1,) * (ndim - 1) + (-1,))


def lookup(table: jax.Array, ids: jax.Array, dtype: str, axis: str | None = None) -> jax.Array:
    """Rows `ids` (...) of an embedding table (V, D), in `dtype`.

    Gathering from a table that is sharded along D, over the axis that also shards the batch, would
    make XLA replicate the result; so the table is gathered first, except along `axis` of V.
    """
    return shard(table.astype(dtype), axis, None)[ids]


def matmul(x: jax.Array, kernel: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
    """x (..., D) @ kernel (D, F), accumulated in `dtype` (default: that of x).

    Flattened to one matrix of rows: the gradient of a batched product with respect to the kernel
    is three times slower under XLA on CPUs.
    """
    rows = jnp.dot(x.reshape(-1, x.shape[-1]), kernel, preferred_element_type=dtype)
    return rows.reshape(*x.shape[:-1], kernel.shape[-1])


class Linear(nn.Module):
    """(..., D) @ kernel (D, F) + bias (F,), in the compute dtype."""

    features: int
    axes: tuple[str | None, str | None]
    kernel_init: Init
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = param(self, "kernel", self.kernel_init, (x.shape[-1], self.features), self.axes)
        bias = param(self, "bias", nn.initializers.zeros, (self.features,), self.axes[1:])
        y = matmul(x.astype(self.dtype), kernel.astype(self.dtype))
        return y + along_last(bias.astype(self.dtype), y.ndim)


class Norm(nn.Module):
    """RMS norm with a gain ("rms") or LayerNorm with gain and bias ("layer"), in float32."""

    kind: str
    axis: str = "embed"
    epsilon: float = EPSILON

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.astype(jnp.float32)
        shape, axes = (x.shape[-1],), (self.axis,)
        if self.kind == "layer":
            x = x - jnp.mean(x, axis=-1, keepdims=True)
        scale = param(self, "scale", nn.initializers.ones, shape, axes)
        y = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.epsilon)
        y = y * along_last(scale, y.ndim)
        if self.kind == "layer":
            y = y + along_last(param(self, "bias", nn.initializers.zeros, shape, axes), y.ndim)
        return y


def rotary(
    positions: jax.Array, head_dim: int, base: float = ROPE_BASE
) -> tuple[jax.Array, jax.Array]:
    """Returns cos and sin (B, 1, R, K/2) float32 of the rotation at `positions` (B, R)."""
    frequency = base ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle = positions.astype(jnp.float32)[:, None, :, None] * along_last(frequency, 4)
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, cos_sin: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the whole head of x (B, H, R, K), first half paired with second half."""
    cos, sin = cos_sin
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

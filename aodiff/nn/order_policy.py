"""OrderMLP: predicts every unit's generation priority from the attention evidence."""

import flax.linen as nn
import jax
import jax.numpy as jnp

STUDENTS = ("row", "flat")


class OrderMLP(nn.Module):
    """Student of the spectral teacher.

    kind: "row", one MLP shared by all units over that unit's row and column (parameters linear in
      n); or "flat", one MLP over the whole matrix.
    width: hidden units of "row"; "flat" has 16 x width and 8 x width.
    """

    kind: str
    width: int

    @nn.compact
    def __call__(self, depends: jax.Array, graph: jax.Array) -> jax.Array:
        """Returns logits (n,) float32, larger is earlier.

        Args:
          depends: (n, n) dependency of target (row) on source (column), z-scored, zero diagonal.
          graph: (n, n) reciprocal graph, z-scored, zero diagonal.

        Source: ordergpt.md section 9.2.
        """
        if self.kind == "flat":
            x = nn.gelu(nn.Dense(16 * self.width)(depends.reshape(-1)))
            return nn.Dense(depends.shape[0])(nn.gelu(nn.Dense(8 * self.width)(x)))
        x = jnp.concatenate([graph, depends, depends.T], axis=1)
        return nn.Dense(1)(nn.gelu(nn.Dense(self.width)(x)))[:, 0]


def z_score(values: jax.Array) -> jax.Array:
    """Returns `values` (n,) with mean 0 and standard deviation 1."""
    centred = values - jnp.mean(values)
    return centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred)) + 1e-12)


def order_loss(logits: jax.Array, priority: jax.Array) -> jax.Array:
    """Mean squared error of the z-scored logits (n,) to the z-scored priorities (n,)."""
    return jnp.mean(jnp.square(z_score(logits) - z_score(jax.lax.stop_gradient(priority))))

"""Bounds of how many tokens the holes of a row take, in one step of insertion.

Where a hole may take a number at most, masks are taken away at random, as for rows without room.
Where it needs a number, what its model expects is raised, and in the last step what still lacks is
put in: such rows no longer follow the model. Source: flexmdm.md 8.
"""

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class Holes:
    """Holes of rows (B, C), each behind a given slot and up to the next one.

    Attributes:
      owner: (B, C) int32, the given slot that a slot stands behind, or is.
      due, left: (B, C) int32, masks that the hole of a slot still needs, and can take at most.
    """

    owner: jax.Array
    due: jax.Array
    left: jax.Array

    def needed(self, counts: jax.Array) -> jax.Array:
        """Masks (B,) of rows whose holes get `counts` (B, C), or what they need if it is more."""
        first = self.owner == jnp.arange(self.owner.shape[1])[None]
        mine = jnp.maximum(total(counts, self.owner), self.due)
        return jnp.sum(jnp.where(first, mine, 0), axis=1)

    def lift(self, mean: jax.Array, open: jax.Array) -> jax.Array:
        """What holes need beyond the mean counts (B, C) of their open gaps, in equal parts."""
        lacking = jnp.maximum(self.due - total(mean, self.owner), 0)
        gaps = jnp.maximum(total(open.astype(jnp.int32), self.owner), 1)
        return jnp.where(open, lacking / gaps, 0)


def total(x: jax.Array, owner: jax.Array) -> jax.Array:
    """Sums of x (B, C) over the slots of one owner (B, C), at each of them."""
    rows = jnp.arange(x.shape[0])[:, None]
    return jnp.take_along_axis(jnp.zeros_like(x).at[rows, owner].add(x), owner, axis=1)

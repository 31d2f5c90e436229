"""From attention to dependency evidence: how much predicting unit i uses unit j, beyond uniform.

Everything here is in position space: rows are targets i, columns are sources j. The query slot s
predicts order[s]; key slot 0 is the start vector and key slot r >= 1 holds order[r - 1].
"""

import jax
import jax.numpy as jnp

from aodiff.core.orders import inverse


def _visible(rank: jax.Array, drop_last: bool) -> jax.Array:
    """(B, n, n) bool, True where source j is revealed before target i (and not the slot before)."""
    target, source = rank[:, :, None], rank[:, None, :]
    # The last revealed source sits at the query slot itself, where its content also travels through
    # the residual stream, so its attention weight is not comparable.
    return source < target - 1 if drop_last else source < target


def excess_sum(probs: jax.Array, order: jax.Array, drop_last: bool = True) -> jax.Array:
    """Sums the attention in excess of a uniform share over a batch.

    Args:
      probs: (B, H, n, n) float32 attention probabilities [query slot, key slot], causal.
      order: (B, n) int32, order[b, s] is the position predicted at slot s.
      drop_last: leaves out the most recently revealed source.

    Returns:
      (n, n) float32 [target i, source j]: sum over examples where j is visible to i of
      mean over heads of attention - 1 / (number of revealed positions + 1).

    Source: ordergpt.md sections 5.1, 5.2 and 6 (target-to-observed read-out, background removed).
    """
    rank = inverse(order)
    n = rank.shape[1]
    heads = jnp.mean(probs.astype(jnp.float32), axis=1)
    rows = jnp.take_along_axis(heads, rank[:, :, None], axis=1)
    slots = jnp.minimum(rank + 1, n - 1)  # the last revealed position is never a source
    attention = jnp.take_along_axis(rows, slots[:, None, :], axis=2)
    uniform = 1.0 / (rank[:, :, None] + 1).astype(jnp.float32)
    excess = jnp.where(_visible(rank, drop_last), attention - uniform, 0.0)
    return jax.lax.stop_gradient(jnp.sum(excess, axis=0))


def visible_count(order: jax.Array, drop_last: bool = True) -> jax.Array:
    """Returns (n, n) float32, the number of examples in which source j is visible to target i."""
    return jnp.sum(_visible(inverse(order), drop_last), axis=0, dtype=jnp.float32)

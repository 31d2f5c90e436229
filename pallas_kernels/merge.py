"""Exact combination of attention over two disjoint sets of keys."""

import jax
import jax.numpy as jnp


def merge_attention(
    first: tuple[jax.Array, jax.Array], second: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Attention of the same queries over the keys of both parts; associative, differentiable.

    Args:
      first, second: o (..., D) and its natural lse (...) float32, `DEAD` for a row that saw no key.

    Returns:
      o in the dtype of the first, and lse float32. A row dead in one part is the other part's row
      exactly, one dead in both is dead.
    """
    (o1, lse1), (o2, lse2) = first, second
    if o1.shape != o2.shape or lse1.shape != lse2.shape or o1.shape[:-1] != lse1.shape:
        raise ValueError(
            f"merge_attention takes two pairs of o (..., D) and lse (...) of equal shapes, got "
            f"{o1.shape}, {lse1.shape} and {o2.shape}, {lse2.shape}."
        )
    lse1, lse2 = lse1.astype(jnp.float32), lse2.astype(jnp.float32)
    # DEAD is finite and huge: its weight underflows to 0 beside a live row, and DEAD + log 2 rounds
    # to DEAD beside a dead one, so neither needs a branch.
    top = jax.lax.stop_gradient(jnp.maximum(lse1, lse2))
    weight1, weight2 = jnp.exp(lse1 - top), jnp.exp(lse2 - top)
    total = weight1 + weight2
    share1, share2 = weight1 / total, weight2 / total
    o = share1[..., None] * o1.astype(jnp.float32) + share2[..., None] * o2.astype(jnp.float32)
    return o.astype(o1.dtype), top + jnp.log(total)

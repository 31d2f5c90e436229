"""Attention with materialised scores, written for XLA: the path for short sequences."""

import jax
import jax.numpy as jnp


def dense_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    seen: jax.Array,
    *,
    scale: float | None = None,
    return_probs: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Masked softmax attention; scores, softmax and its sums in float32.

    Args:
      q: (B, H, S, L, D). k, v: (B, Hkv, Lk, D), H a multiple of Hkv.
      seen: bool, broadcastable to (B, S, L, Lk); a row without any True gives exactly zero.
      scale: of the scores, default D ** -0.5.
      return_probs: also return the probabilities (B, H, S, L, Lk) float32.
    """
    batch, heads, streams, length, dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    scale = dim**-0.5 if scale is None else scale
    # All query heads and streams of one key head are rows of a single matmul.
    rows = q.reshape(batch, kv_heads, group * streams * length, dim)
    scores = jnp.einsum("bhqd,bhkd->bhqk", rows, k, preferred_element_type=jnp.float32) * scale
    scores = scores.reshape(batch, kv_heads, group, streams, length, -1)
    seen = seen[:, None, None]
    scores = jnp.where(seen, scores, -1e30)
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.where(seen, jnp.exp(scores - top), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    probs = weights / jnp.where(total > 0, total, 1.0)
    mixed = probs.reshape(batch, kv_heads, group * streams * length, -1).astype(v.dtype)
    out = jnp.einsum("bhqk,bhkd->bhqd", mixed, v, preferred_element_type=jnp.float32)
    out = out.astype(q.dtype).reshape(q.shape)
    if not return_probs:
        return out
    return out, probs.reshape(batch, heads, streams, length, -1)

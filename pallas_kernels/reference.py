"""Dense attention in float32 with the exact semantics of every kernel: the truth for tests."""

import jax
import jax.numpy as jnp

from pallas_kernels.masks import IntervalMask, visible


def attention_reference(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: IntervalMask, *, scale: float | None = None
) -> jax.Array:
    """Softmax attention over the keys each row may see; a row that sees none gives exactly zero.

    Args:
      q: (B, H, S, L, D). k, v: (B, Hkv, Lk, D), H a multiple of Hkv.
      mask: who sees whom.
      scale: of the scores, default D ** -0.5.

    Returns:
      (B, H, S, L, D) float32.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    k, v = (jnp.repeat(x, group, axis=1) for x in (k, v))
    precision = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("bhsld,bhmd->bhslm", q, k, precision=precision) * scale
    seen = visible(mask)[:, None]
    # Selected before and after the exponential, so dead rows have zero gradients and not NaN.
    top = jnp.max(jnp.where(seen, scores, -1e30), axis=-1, keepdims=True)
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, scores - top, 0.0)), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1.0)
    return jnp.einsum("bhslm,bhmd->bhsld", weights, v, precision=precision)

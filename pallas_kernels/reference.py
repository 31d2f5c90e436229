"""Dense attention in float32 with the exact semantics of every kernel: the truth for tests."""

import jax
import jax.numpy as jnp

from pallas_kernels.masks import IntervalMask, visible

DEAD = -0.7 * float(jnp.finfo(jnp.float32).max)  # lse of a row that sees no key, and masked scores


def attention_reference(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: IntervalMask,
    *,
    scale: float | None = None,
    return_lse: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Softmax attention over the keys each row may see; a row that sees none gives exactly zero.

    Args:
      q: (B, H, S, L, D). k, v: (B, Hkv, Lk, D), H a multiple of Hkv.
      mask: who sees whom.
      scale: of the scores, default D ** -0.5.
      return_lse: also return log sum exp of the scores.

    Returns:
      (B, H, S, L, D), and (B, H, S, L) natural logarithms, `DEAD` for a row that sees no key; both
      float32, or float64 for float64 inputs.
    """
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    k, v = (jnp.repeat(x, group, axis=1) for x in (k, v))
    precision = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("bhsld,bhmd->bhslm", q, k, precision=precision) * scale
    seen = visible(mask)[:, None]
    # Selected before and after the exponential, so dead rows have zero gradients and not NaN.
    top = jax.lax.stop_gradient(jnp.max(jnp.where(seen, scores, DEAD), axis=-1, keepdims=True))
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, scores - top, 0.0)), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    alive = total > 0
    total = jnp.where(alive, total, 1.0)
    out = jnp.einsum("bhslm,bhmd->bhsld", weights / total, v, precision=precision)
    if not return_lse:
        return out
    return out, jnp.where(alive, jnp.log(total) + top, DEAD)[..., 0]

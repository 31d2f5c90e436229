"""The one entry point for attention: picks an implementation by name."""

import jax

from pallas_kernels.dense import dense_attention
from pallas_kernels.masks import IntervalMask, visible

IMPLS = ("auto", "xla_dense")


def interval_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: IntervalMask,
    *,
    scale: float | None = None,
    impl: str = "auto",
) -> jax.Array:
    """Masked attention, differentiable; rows that see no key give exactly zero.

    Args:
      q: (B, H, S, L, D), S streams that share keys and values.
      k, v: (B, Hkv, Lk, D), H a multiple of Hkv.
      mask: who sees whom.
      scale: of the scores, default D ** -0.5.
      impl: one of `IMPLS`.

    Returns:
      (B, H, S, L, D) in the dtype of q.
    """
    if impl not in IMPLS:
        raise ValueError(f"Attention {impl!r} is unknown; use one of: {', '.join(IMPLS)}.")
    if q.ndim != 5 or k.ndim != 4 or k.shape != v.shape or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"Attention takes q (B,H,S,L,D) and k, v (B,Hkv,Lk,D) with H a multiple of Hkv, got "
            f"{q.shape}, {k.shape} and {v.shape}."
        )
    return dense_attention(q, k, v, visible(mask), scale=scale)

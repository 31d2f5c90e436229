"""The Pallas backend: which of the TPU kernels a shape needs."""

import jax

from pallas_kernels.blocks import pad
from pallas_kernels.config import DTYPES, HEAD_SIZES, AttentionConfig, default_config
from pallas_kernels.masks import IntervalMask


def refusal(q: jax.Array, k: jax.Array, mask: IntervalMask) -> str | None:
    """Says why the kernels cannot do this, or None."""
    if q.dtype not in DTYPES:
        return f"takes bfloat16 and float32, got {q.dtype}"
    if q.shape[-1] > HEAD_SIZES[-1]:
        return f"takes heads of at most {HEAD_SIZES[-1]}, got {q.shape[-1]}"
    return None

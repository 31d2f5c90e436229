"""The Pallas backend: head sizes that the TPU kernels do not have are padded to the next one."""

import jax

from pallas_kernels import forward as resident_forward
from pallas_kernels import streaming_backward
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


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: IntervalMask,
    *,
    scale: float,
    config: AttentionConfig | None,
) -> tuple[jax.Array, jax.Array]:
    """Returns o (B, H, S, L, D) and its natural lse (B, H, S, L); as every backend's `forward`."""
    config = config or default_config(*q.shape[2:4], k.shape[2])
    out, lse = resident_forward.forward(*_padded(q, k, v), mask, scale=scale, config=config)
    return out[..., : q.shape[-1]], lse


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: IntervalMask,
    lse2: jax.Array,
    delta: jax.Array,
    do: jax.Array,
    *,
    scale: float,
    config: AttentionConfig | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns dq, dk, dv; as every backend's `backward`."""
    config = config or default_config(*q.shape[2:4], k.shape[2])
    q, k, v, do, dim = *_padded(q, k, v, do), q.shape[-1]
    grads = streaming_backward.backward(q, k, v, mask, lse2, delta, do, scale=scale, config=config)
    return tuple(x[..., :dim] for x in grads)


def _padded(*arrays: jax.Array) -> list[jax.Array]:
    size = next(s for s in HEAD_SIZES if s >= arrays[0].shape[-1])
    return [pad(x, x.ndim - 1, size) for x in arrays]

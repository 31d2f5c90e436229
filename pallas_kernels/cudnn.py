"""The cuDNN backend: flash attention of NVIDIA GPUs through JAX, for causal masks by the roll.

Not run on hardware; tested as far as its HLO. `attention` is differentiated by JAX and gives no
lse (cuDNN's is rounded to the dtype of q), so it stands outside the custom VJP of the others.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.blocks import pad, round_up
from pallas_kernels.masks import IntervalMask
from pallas_kernels.roll import roll_down, roll_up

DTYPES = (jnp.bfloat16, jnp.float16)
MAX_HEAD = 256  # before Hopper 128, which JAX checks


def refusal(q: jax.Array, k: jax.Array, mask: IntervalMask) -> str | None:
    """Says why cuDNN cannot do this, or None."""
    if mask.kind != "causal":
        return "takes causal masks only, got an interval mask"
    if q.dtype not in DTYPES:
        return f"takes bfloat16 and float16, got {q.dtype}"
    if q.shape[-1] % 8 or q.shape[-1] > MAX_HEAD:
        return f"takes heads of a multiple of 8 up to {MAX_HEAD}, got {q.shape[-1]}"
    return None


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: IntervalMask, *, scale: float
) -> jax.Array:
    """Attention under a causal mask, differentiable.

    Args:
      q: (B, H, S, L, D). k, v: (B, Hkv, L, D), of one dtype, bfloat16 or float16.

    Returns:
      (B, H, S, L, D) in the dtype of q; exactly zero for row 0 of strict streams.

    Raises:
      RuntimeError: JAX was installed without CUDA.
      NotImplementedError: this GPU or version of cuDNN cannot do it.
    """
    length = q.shape[3]
    even = round_up(length, 2)  # JAX refuses to differentiate cuDNN's attention at odd lengths
    rolled, k, v = (pad(x, 2, even).swapaxes(1, 2) for x in (roll_up(q, mask.strict), k, v))
    o = jax.nn.dot_product_attention(
        rolled, k, v, scale=scale, is_causal=True, implementation="cudnn"
    )
    return roll_down(o.swapaxes(1, 2)[:, :, :length], mask.strict)

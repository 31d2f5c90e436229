"""The splash backend: JAX's own TPU kernel, for causal masks by the roll.

Upstream code with no promise of stability (written against jax 0.10.2); a second opinion on our own
kernels. Its backward takes lse and delta as ours does, so this module has the interface of every
backend and its lse is differentiable. Unlike the other backends it has no scale of its own: q is
scaled in its own dtype first, which rounds bfloat16 queries once more unless the scale is a power
of two.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask

from pallas_kernels.blocks import even_block, pad, round_up
from pallas_kernels.config import DTYPES, HEAD_SIZES, AttentionConfig, current_generation
from pallas_kernels.masks import IntervalMask
from pallas_kernels.reference import DEAD
from pallas_kernels.roll import roll_down, roll_up

LN_2 = float(np.log(2))


def refusal(q: jax.Array, k: jax.Array, mask: IntervalMask) -> str | None:
    """Says why splash cannot do this, or None."""
    if mask.kind != "causal":
        return "takes causal masks only, got an interval mask"
    if q.dtype not in DTYPES:
        return f"takes bfloat16 and float32, got {q.dtype}"
    if q.shape[-1] not in HEAD_SIZES:
        return f"takes heads of {', '.join(map(str, HEAD_SIZES))}, got {q.shape[-1]}"
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
    """Attention under a causal mask.

    Args:
      q: (B, H, S, L, D). k, v: (B, Hkv, L, D), of one dtype, bfloat16 or float32.
      config: only its `interpret` matters, where "tpu" is True; splash has blocks of its own.

    Returns:
      o (B, H, S, L, D) in the dtype of q, and its natural lse (B, H, S, L) float32.
    """
    kernel, rows = _kernel(q, config)
    with _precision(q):
        o, (lse,) = jax.vmap(kernel)(_queries(q, mask, scale, rows), *_keys(rows, k, v))
    o, lse = (x[:, :, : q.shape[3]] for x in (o, lse))
    return roll_down(o, mask.strict), roll_down(lse, mask.strict, DEAD)


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
    """Gradients of `forward`.

    Args:
      q, k, v, mask, scale, config: as of `forward`.
      lse2: lse in base 2, 0 for dead rows. delta: sum(o * do) minus the cotangent of lse. Both
        (B, H, S, L) float32.
      do: cotangent of o.

    Returns:
      dq, dk, dv in the dtypes of q, k, v.
    """
    kernel, rows = _kernel(q, config)
    blocks = kernel.kwargs["block_sizes"]
    one = lambda q, k, v, lse, delta, do: splash._splash_attention_bwd_dkv(
        q,
        k,
        v,
        None,
        None,
        lse,
        do,
        delta,
        bq=blocks.block_q_dkv,
        bkv=blocks.block_kv_dkv,
        bkv_compute=blocks.block_kv_dkv_compute,
        mask_info=kernel.dkv_mask_info,
        use_fused_bwd_kernel=True,
        **{x: getattr(blocks, x) for x in ("q_layout", "k_layout", "v_layout")},
        **{x: kernel.kwargs[x] for x in _SHARED},
    )
    up = lambda x: pad(roll_up(x, mask.strict), 2, rows)
    with _precision(q):
        dq, dk, dv = jax.vmap(one)(
            _queries(q, mask, scale, rows),
            *_keys(rows, k, v),
            up(lse2 * LN_2),
            up(delta),
            up(do),
        )
    length = q.shape[3]
    dq = roll_down(dq[:, :, :length].astype(jnp.float32) * scale, mask.strict)
    return dq.astype(q.dtype), dk[:, :, :length], dv[:, :, :length]


_SHARED = ("is_mqa", "mask_value", "attn_logits_soft_cap", "mask_function", "interpret")


def _kernel(
    q: jax.Array, config: AttentionConfig | None
) -> tuple[splash.SplashAttentionKernel, int]:
    """Returns the kernel for one example, and the length rows and keys must be padded to."""
    # At 2048 rows the best of seven on every generation (static schedules); splash's own default
    # of 128 costs several times more.
    small = current_generation() == "v4" or q.shape[4] * q.dtype.itemsize > 512  # bytes of VMEM
    block = even_block(q.shape[3], 512 if small else 1024)
    compute = next(c for c in (512, 384, block) if block % c == 0)
    rows = round_up(q.shape[3], block)
    causal = splash_attention_mask.CausalMask((rows, rows))
    kernel = splash.make_splash_mha(
        splash_attention_mask.MultiHeadMask([causal] * (q.shape[1] * q.shape[2])),
        block_sizes=splash.BlockSizes(
            block_q=block,
            block_kv=block,
            block_kv_compute=compute,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_kv_dkv_compute=compute,
            use_fused_bwd_kernel=True,
        ),
        head_shards=1,
        q_seq_shards=1,
        save_residuals=True,
        interpret=bool(config and config.interpret),
    )
    return kernel, rows


def _queries(q, mask, scale, rows):
    scaled = (q.astype(jnp.float32) * scale).astype(q.dtype)
    return pad(roll_up(scaled, mask.strict), 2, rows)


def _keys(rows, *arrays):
    return (pad(x, 2, rows) for x in arrays)


def _precision(q):
    """Splash names no precision, and the default for float32 is one bfloat16 pass."""
    return jax.default_matmul_precision("highest" if q.dtype == jnp.float32 else "default")

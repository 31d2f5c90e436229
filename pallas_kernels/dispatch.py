"""The entry points: argument checks, choice of an implementation, and the one custom VJP."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import blocked, cudnn, kernels, splash
from pallas_kernels.config import MIN_LENGTH, AttentionConfig
from pallas_kernels.dense import dense_attention, once
from pallas_kernels.masks import NEVER_SEEN, SEES_NOTHING, IntervalMask, visible
from pallas_kernels.merge import merge_attention
from pallas_kernels.reference import DEAD

# Each has refusal(q, k, mask), why it cannot do that, or None; and forward and backward, but for
# cudnn, which JAX differentiates.
BACKENDS = {"pallas": kernels, "splash": splash, "xla_blocked": blocked, "cudnn": cudnn}
IMPLS = ("auto", "xla_dense", *BACKENDS)
PLATFORMS = {"pallas": "tpu", "splash": "tpu", "cudnn": "gpu"}  # the others run anywhere
LOG2_E = float(np.log2(np.e))
RESIDUALS = ("aodiff_attn_out", "aodiff_attn_lse")  # names for remat policies


def interval_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: IntervalMask,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    impl: str = "auto",
    config: AttentionConfig | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Masked attention, differentiable; rows that see no key give exactly zero.

    Args:
      q: (B, H, S, L, D), S streams that share keys and values.
      k, v: (B, Hkv, Lk, D), H a multiple of Hkv; all three bfloat16 or float32.
      mask: who sees whom.
      scale: of the scores, default D ** -0.5.
      return_lse: also return log sum exp of the scores, differentiable too.
      impl: one of `IMPLS`. "auto" is dense for short sequences, else Pallas on TPU where it can,
        and blocked XLA elsewhere; any other choice is obeyed or refused.
      config: block sizes of the Pallas kernels, default by shape and TPU generation.

    Returns:
      (B, H, S, L, D) in the dtype of q, and with `return_lse` (B, H, S, L) float32, natural
      logarithms, `DEAD` for a row that sees no key.
    """
    _check(q, k, v, mask, impl)
    mask = _of_one_batch(mask)
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    impl = _resolve(q, k, mask, config) if impl == "auto" else impl
    if reason := refusal(impl, q, k, mask):
        raise ValueError(reason)
    if impl == "cudnn":
        if return_lse:
            raise ValueError("Attention 'cudnn' has no lse in float32; use 'xla_blocked' for that.")
        return cudnn.attention(q, k, v, mask, scale=scale)
    # Nothing in padding may matter, and zero times NaN is NaN: in outputs and in gradients.
    rows, keys = _padding(mask)
    q, k, v = _blank(rows, q), _blank(keys, k), _blank(keys, v)
    if not q.size:
        out, lse = jnp.zeros_like(q), jnp.full(q.shape[:-1], DEAD)
    elif impl == "xla_dense":
        out, lse = dense_attention(q, k, v, visible(mask), scale=scale, return_lse=True)
    else:
        out, lse = _attend(q, k, v, mask, scale, impl, config)
    out, lse = _blank(rows, out), _blank(rows, lse[..., None], DEAD)[..., 0]
    return (out, lse) if return_lse else out


def refusal(
    impl: str, q: jax.ShapeDtypeStruct, k: jax.ShapeDtypeStruct, mask: IntervalMask
) -> str | None:
    """Says in a sentence why `impl` cannot attend with these shapes and this mask, or None."""
    reason = BACKENDS[impl].refusal(q, k, mask) if impl in BACKENDS else None
    others = ", ".join(name for name in IMPLS if name != impl)
    return reason and f"Attention {impl!r} {reason}; use one of: {others}."


def two_stream_attention(
    q_content: jax.Array,
    q_query: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: IntervalMask,
    *,
    scale: float | None = None,
    null_kv: tuple[jax.Array, jax.Array] | None = None,
    impl: str = "auto",
    config: AttentionConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Content and query stream over the same keys and values, in one call (XLNet, eq. 1-2).

    Args:
      q_content, q_query: (B, H, L, D). k, v: (B, Hkv, Lk, D).
      mask: of two streams.
      null_kv: key and value (Hkv, D) or (B, Hkv, D) that every row sees, so that none is dead but
        padding.
      scale, impl, config: as of `interval_attention`.

    Returns:
      The outputs of the two streams, (B, H, L, D) each.
    """
    q = jnp.stack([q_content, q_query], axis=2)
    options = dict(scale=scale, impl=impl, config=config)
    if null_kv is None:
        out = interval_attention(q, k, v, mask, **options)
        return out[:, :, 0], out[:, :, 1]
    part = interval_attention(q, k, v, mask, return_lse=True, **options)
    group = q.shape[1] // k.shape[1]
    spread = lambda x: jnp.repeat(jnp.broadcast_to(x, (k.shape[0], *x.shape[-2:])), group, axis=1)
    key, value = (spread(x)[:, :, None, None] for x in null_kv)
    value = jnp.broadcast_to(value, q.shape).astype(q.dtype)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    rows, _ = _padding(mask)
    q, value = _blank(rows, q), _blank(rows, value)
    score = jnp.sum(q.astype(jnp.float32) * key.astype(jnp.float32), axis=-1, keepdims=True)
    out, _ = merge_attention(part, (value, _blank(rows, score * scale, DEAD)[..., 0]))
    return out[:, :, 0], out[:, :, 1]


def _of_one_batch(mask: IntervalMask) -> IntervalMask:
    """Spreads vectors of one row next to others of a row per example: backends take no mixture."""
    rows = max((x.shape[0] for x in jax.tree.leaves(mask)), default=1)
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *x.shape[1:])), mask)


def _padding(mask: IntervalMask) -> tuple[jax.Array | None, jax.Array | None]:
    """Rows (B or 1, 1, S, L, 1) and keys (B or 1, 1, Lk, 1) that are padding; None: none can be."""
    if mask.kind == "causal":
        return None, None
    rows, keys = mask.hi == SEES_NOTHING, mask.code == NEVER_SEEN
    return rows[:, None, :, :, None], keys[:, None, :, None]


def _blank(where: jax.Array | None, x: jax.Array, value: float = 0.0) -> jax.Array:
    return x if where is None else jnp.where(where, jnp.asarray(value, x.dtype), x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _attend(q, k, v, mask, scale, impl, config):
    """(out, lse); `impl` is a backend, or "tpu/elsewhere", two of them."""
    return _by_platform(impl, "forward", config, q, k, v, mask, scale=scale)


def _attend_fwd(q, k, v, mask, scale, impl, config):
    out, lse = _attend(q, k, v, mask, scale, impl, config)
    out, lse = map(checkpoint_name, (out, lse), RESIDUALS)
    return (out, lse), (q, k, v, mask, out, lse)


def _attend_bwd(scale, impl, config, saved, cotangents):
    """Subtracting the cotangent of lse in delta is all that a differentiable lse costs."""
    q, k, v, mask, out, lse = saved
    dout, dlse = once(cotangents)
    q, k, v = once((q, k, v))
    lse2 = jnp.where(lse > DEAD / 2, lse * LOG2_E, 0.0)
    delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1) - dlse
    dout = dout.astype(q.dtype)
    grads = _by_platform(impl, "backward", config, q, k, v, mask, lse2, delta, dout, scale=scale)
    no_gradient = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), mask)
    return *grads, no_gradient


_attend.defvjp(_attend_fwd, _attend_bwd)


def _by_platform(impl, what, config, *args, scale):
    call = lambda name: functools.partial(getattr(BACKENDS[name], what), scale=scale, config=config)
    first, *rest = impl.split("/")
    if not rest:
        return call(first)(*args)
    # By the platform compiled for: a program for a TPU may be compiled where there is none.
    return jax.lax.platform_dependent(*args, tpu=call(first), default=call(rest[0]))


def _resolve(q, k, mask, config) -> str:
    if max(q.shape[3], k.shape[2]) < MIN_LENGTH and config is None:
        impl = "xla_dense"
    elif kernels.refusal(q, k, mask) is None:
        impl = "pallas/xla_blocked"
    else:
        impl = "xla_blocked"
    _log_once(impl, q.shape[3], k.shape[2], q.shape[4], q.dtype.name)
    return impl


@functools.cache
def _log_once(impl: str, rows: int, keys: int, dim: int, dtype: str) -> None:
    text = impl.replace("/", " on TPU, elsewhere ")
    what = f"{rows} rows, {keys} keys, head size {dim}, {dtype}"
    logging.getLogger("pallas_kernels").info("attention auto: %s (%s)", text, what)


def _check(q, k, v, mask, impl) -> None:
    if impl not in IMPLS:
        raise ValueError(f"Attention {impl!r} is unknown; use one of: {', '.join(IMPLS)}.")
    if q.ndim != 5 or k.ndim != 4 or k.shape != v.shape or q.shape[::4] != k.shape[::3]:
        raise ValueError(
            f"Attention takes q (B,H,S,L,D) and k, v (B,Hkv,Lk,D), got {q.shape}, {k.shape} and "
            f"{v.shape}."
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"Attention with {q.shape[1]} query heads needs their number to be a multiple of Hkv, "
            f"got {k.shape[1]} key heads."
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"Attention takes q, k and v of one dtype, got {q.dtype}, {k.dtype} and {v.dtype}; "
            "cast them."
        )
    if mask.kind == "causal":
        if (mask.length, mask.length, mask.streams) != (q.shape[3], k.shape[2], q.shape[2]):
            raise ValueError(
                f"A causal mask of {mask.streams} streams and length {mask.length} does not fit "
                f"q {q.shape} and k {k.shape}."
            )
        return
    for name, got, want in (
        ("code", mask.code, (q.shape[0], k.shape[2])),
        ("hi", mask.hi, (q.shape[0], *q.shape[2:4])),
        ("lo", mask.lo, (q.shape[0], q.shape[3])),
    ):
        if got is not None and (got.shape[1:] != want[1:] or got.shape[0] not in (1, want[0])):
            raise ValueError(f"Mask vector {name} must have shape {want} here, got {got.shape}.")
        # Unsigned ranks are the trap: 0 - 1 wraps, and a strict row of rank 0 would see every key.
        if got is not None and got.dtype != jnp.int32:
            raise ValueError(f"Mask vector {name} must be int32, got {got.dtype}; cast it first.")

"""Attention with materialised scores, written for XLA: the path for short sequences."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.reference import DEAD


def dense_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    seen: jax.Array,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    return_probs: bool = False,
) -> jax.Array | tuple[jax.Array, ...]:
    """Masked softmax attention; scores, softmax and its sums in float32.

    Args:
      q: (B, H, S, L, D). k, v: (B, Hkv, Lk, D), H a multiple of Hkv.
      seen: bool, broadcastable to (B, S, L, Lk); a row without any True gives exactly zero.
      scale: of the scores, default D ** -0.5.
      return_lse: also return log sum exp of the scores (B, H, S, L) float32, `DEAD` where a row
        sees nothing.
      return_probs: also return the probabilities (B, H, S, L, Lk) float32, without gradient.
    """
    batch, heads, streams, length, dim = q.shape
    scale = dim**-0.5 if scale is None else scale
    # All query heads and streams of one key head are rows of a single matmul.
    grouped = (batch, k.shape[1], heads // k.shape[1] * streams * length)
    out, lse, probs = _attend(q.reshape(*grouped, dim), k, v, seen, scale, streams)
    results = [out.reshape(q.shape)]
    if return_lse:
        results.append(lse.reshape(q.shape[:-1]))
    if return_probs:
        results.append(jax.lax.stop_gradient(probs).reshape(*q.shape[:-1], -1))
    return tuple(results) if len(results) > 1 else results[0]


@jax.custom_jvp
def once(x: Any) -> Any:
    """The identity, of what a backward rule uses: its own derivative would be wrong in silence."""
    return x


@once.defjvp
def _once_jvp(primals, tangents):
    raise ValueError(
        "Attention can be differentiated once; use attention_reference for higher derivatives."
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attend(q, k, v, seen, scale, streams):
    """q (B, Hkv, G*S*L, D) -> output of that shape, lse, probabilities (B, Hkv, G*S*L, Lk)."""
    weights, total, lse = _weights(q, k, seen, scale, streams)
    # Without a gradient nothing else needs the probabilities: D numbers a row to divide, not Lk.
    out = _weighted(weights, v) / total
    return out.astype(q.dtype), lse, weights / total


def _attend_fwd(q, k, v, seen, scale, streams):
    weights, total, lse = _weights(q, k, seen, scale, streams)
    probs = weights / total
    out = _weighted(probs, v).astype(q.dtype)
    return (out, lse, probs), (q, k, v, seen, out, probs)


def _weights(q, k, seen, scale, streams):
    """exp(scores - top), 0 where not seen; their sums over keys, 1 for dead rows; the lse."""
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k, preferred_element_type=jnp.float32) * scale
    by_row = (*scores.shape[:2], -1, streams, seen.shape[-2], scores.shape[-1])
    rows = jnp.where(seen[:, None, None], scores.reshape(by_row), DEAD).reshape(scores.shape)
    top = jnp.maximum(jnp.max(rows, axis=-1, keepdims=True), DEAD / 2)  # dead rows: exp gives 0
    weights = jnp.exp(rows - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    lse = jnp.where(total > 0, jnp.log(total) + top, DEAD)[..., 0]
    return weights, jnp.maximum(total, 1.0), lse  # a row that sees a key has 1 in its sum


def _weighted(weights, v):
    return jnp.einsum(
        "bhqk,bhkd->bhqd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
    )


def _attend_bwd(scale, streams, saved, cotangents):
    """The row sum of p * dp is taken as that of out * dout: D numbers a row instead of Lk."""
    q, k, v, seen, out, probs = saved
    dout, dlse, _ = once(cotangents)
    q, k, v = once((q, k, v))
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    row_sum = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1, keepdims=True)
    row_sum -= dlse[..., None]
    dscores = probs * (product("bhqd,bhkd->bhqk", dout, v) - row_sum) * scale
    dscores = dscores.astype(q.dtype)
    dv = product("bhqk,bhqd->bhkd", probs.astype(v.dtype), dout)
    dq = product("bhqk,bhkd->bhqd", dscores, k)
    dk = product("bhqk,bhqd->bhkd", dscores, q)
    no_gradient = np.zeros(seen.shape, jax.dtypes.float0)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), no_gradient


_attend.defvjp(_attend_fwd, _attend_bwd)

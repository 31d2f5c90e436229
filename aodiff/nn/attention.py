"""What the rows of a forward pass are to each other, and attention among them."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from aodiff.core import evidence
from aodiff.partitioning import RULES
from pallas_kernels import (
    IntervalMask,
    dense_attention,
    interval_attention,
    shard_attention,
    visible,
)


class KVCache(NamedTuple):
    """Keys and values (N, B, H, T, K); inside the scan over layers without the leading N."""

    k: jax.Array
    v: jax.Array


@flax.struct.dataclass
class Rows:
    """Everything the blocks need to know about their rows x (B, R, D), the same for all layers.

    R = streams * L rows: the content stream first, then the query stream. The first `keys` rows
    give keys and values.

    cond: (B, R, C) AdaLN condition. added: (B, R, D) target embedding added at each block input.
    target: (B, R) int32 natural position a row predicts. rope_q, rope_k: cos and sin of `rotary`.
    mask: IntervalMask, or bool (B, 1, R, T + keys) when there is a cache.
    order: (B, L) if the blocks shall return evidence. keep: (start, stop) of the rows whose keys
    and values go to the cache, or None.
    """

    mask: IntervalMask | jax.Array
    target: jax.Array
    cond: jax.Array | None = None
    added: jax.Array | None = None
    rope_q: tuple[jax.Array, jax.Array] | None = None
    rope_k: tuple[jax.Array, jax.Array] | None = None
    order: jax.Array | None = None
    streams: int = flax.struct.field(pytree_node=False, default=1)
    keys: int = flax.struct.field(pytree_node=False, default=0)
    keep: tuple[int, int] | None = flax.struct.field(pytree_node=False, default=None)


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, rows: Rows, cache: KVCache | None, impl: str
) -> tuple[jax.Array, KVCache | jax.Array | None]:
    """Attention of all rows.

    Args:
      q: (B, H, R, K). k, v: (B, H, keys, K).
      rows: mask, streams and what to return.
      cache: keys and values (B, H, T, K) before those of this call.
      impl: as of `interval_attention`.

    Returns:
      (B, H, R, K), and the new keys and values (with `rows.keep`), or the evidence (n, n) of the
      predicting stream summed over the batch (with `rows.order`), or None.
    """
    streams = q.reshape(*q.shape[:2], rows.streams, -1, q.shape[-1])
    extra = None
    if rows.keep is not None:
        start, stop = rows.keep
        extra = KVCache(k[:, :, start:stop], v[:, :, start:stop])
    if cache is not None:
        k = jnp.concatenate([cache.k, k], axis=2)
        v = jnp.concatenate([cache.v, v], axis=2)
    if rows.order is not None:
        out, probs = dense_attention(streams, k, v, visible(rows.mask), return_probs=True)
        extra = evidence.excess_sum(probs[:, :, -1], rows.order)
    elif isinstance(rows.mask, IntervalMask):
        out = on_each_device(
            functools.partial(interval_attention, impl=impl), streams, k, v, rows.mask
        )
    else:
        out = dense_attention(streams, k, v, rows.mask)
    return out.reshape(q.shape), extra


def on_each_device(
    fn: Callable[..., jax.Array], q: jax.Array, k: jax.Array, v: jax.Array, mask: IntervalMask
) -> jax.Array:
    """`fn(q, k, v, mask)`, under a mesh by every device on its own rows of the batch and heads."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return fn(q, k, v, mask)
    batch = RULES["batch"]
    if q.shape[0] % math.prod(mesh.shape[a] for a in batch):
        batch = ()  # a few rows, as for initialisation: every device computes all
    split = shard_attention(fn, mesh, batch_axes=batch, head_axis=RULES["act_heads"])
    return split(q, k, v, mask)


def decode_mask(
    valid: jax.Array, probes: int, cache_valid: jax.Array, *, sinks: int, probe_keys: bool
) -> jax.Array:
    """Who sees whom when a cache is extended: m content rows, then the probes.

    Args:
      valid: (B, m) bool content rows. cache_valid: (B, T) bool cache slots.
      probes: number of probe rows.
      sinks: number of leading content rows that come before the cache.
      probe_keys: a probe stands in place of the last valid content row, sees itself and not that
        row; otherwise it is a query-stream row and sees all valid content rows.

    Returns:
      (B, 1, m + probes, T + m [+ probes]) bool.
    """
    batch, m = valid.shape
    slot = jnp.arange(m)
    content = (slot[None, :, None] >= slot[None, None, :]) & valid[:, None, :]
    before = valid & (slot[None, :] != last_valid(valid)) if probe_keys else valid
    seen = [content, jnp.broadcast_to(before[:, None, :], (batch, probes, m))]
    if probe_keys:
        itself = jnp.broadcast_to(jnp.eye(probes, dtype=bool)[None], (batch, probes, probes))
        seen = [
            jnp.pad(seen[0], ((0, 0), (0, 0), (0, probes))),
            jnp.concatenate([seen[1], itself], axis=2),
        ]
    seen = jnp.concatenate(seen, axis=1)
    after = jnp.arange(seen.shape[1]) >= sinks
    cached = cache_valid[:, None, :] & after[None, :, None]
    return jnp.concatenate([cached, seen], axis=2)[:, None]


def last_valid(valid: jax.Array) -> jax.Array:
    """(B, 1) int32, the index of the last True of `valid` (B, m); 0 where there is none."""
    slot = jnp.arange(valid.shape[1])
    return jnp.max(jnp.where(valid, slot[None, :], 0), axis=1, keepdims=True)

"""Interval masks: which key a query may see, in O(L) integers instead of a dense L x L array.

A query sees a key iff lo <= code <= hi. Ties in `code` give semi-autoregressive groups.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

NEVER_SEEN = np.iinfo(np.int32).max  # code of a padded key
SEES_NOTHING = np.iinfo(np.int32).min  # hi of a dead query row


@jax.tree_util.register_pytree_node_class
class IntervalMask(NamedTuple):
    """code (B, Lk), hi (B, S, L), lo (B, L) or None, all int32; kind "interval" or "causal".

    Of kind "causal" the vectors are implied by shape: code = 0..Lk-1, hi[s] = row - strict[s], and
    `code`, `hi` carry one batch row that is the same for all.
    """

    code: jax.Array
    hi: jax.Array
    lo: jax.Array | None = None
    kind: Literal["interval", "causal"] = "interval"

    def tree_flatten(self):
        return (self.code, self.hi, self.lo), self.kind

    @classmethod
    def tree_unflatten(cls, kind, children):
        return cls(*children, kind=kind)


def causal_streams(length: int, strict: tuple[bool, ...] = (False, True)) -> IntervalMask:
    """Slots in generation order: row q of stream s sees keys 0..q, without q if strict[s]."""
    rows = np.arange(length, dtype=np.int32)
    hi = np.stack([rows - int(s) for s in strict])
    return IntervalMask(rows[None], hi[None], kind="causal")


def rank_streams(
    rank: jax.Array, *, key_rank: jax.Array | None = None, strict: tuple[bool, ...] = (False, True)
) -> IntervalMask:
    """Natural order, with ranks: a query sees keys of rank <= its own, or < if strict.

    Args:
      rank: (B, L) int32 rank of every query; equal ranks form a group.
      key_rank: (B, Lk) int32, default `rank`.
      strict: one flag a stream.
    """
    hi = jnp.stack([rank - int(s) for s in strict], axis=1)
    return IntervalMask(rank if key_rank is None else key_rank, hi)


def length_mask(lengths: jax.Array, length: int, *, streams: int = 1) -> IntervalMask:
    """Bidirectional attention among the first `lengths[b]` of `length` rows; the rest is dead."""
    inside = jnp.arange(length, dtype=jnp.int32)[None, :] < lengths[:, None]
    hi = jnp.where(inside, 0, SEES_NOTHING).astype(jnp.int32)
    code = jnp.where(inside, 0, NEVER_SEEN).astype(jnp.int32)
    return IntervalMask(code, jnp.repeat(hi[:, None], streams, axis=1))


def visible(mask: IntervalMask) -> jax.Array:
    """Returns the dense mask (B or 1, S, L, Lk) bool, True where a query may see a key."""
    code = mask.code[:, None, None, :]
    seen = (code <= mask.hi[..., None]) & (code != NEVER_SEEN)
    return seen if mask.lo is None else seen & (code >= mask.lo[:, None, :, None])

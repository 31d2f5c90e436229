"""Interval masks: which key a query may see, in O(L) integers instead of a dense L x L array.

A query sees a key iff lo <= code <= hi. Ties in `code` give semi-autoregressive groups. Causal
masks are implied by shape: nothing is stored, nothing is loaded.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

NEVER_SEEN = np.iinfo(np.int32).max  # code of a padded key
SEES_NOTHING = np.iinfo(np.int32).min  # hi of a dead query row


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IntervalMask:
    """code (B, Lk), hi (B, S, L), lo (B, L) or None, all int32; None for a causal mask.

    A causal mask has `strict`, one flag a stream, and `length`: code = 0..length-1 and hi = row
    minus one if strict. Nothing else may be given with it.
    """

    code: jax.Array | None = None
    hi: jax.Array | None = None
    lo: jax.Array | None = None
    strict: tuple[bool, ...] | None = dataclasses.field(default=None, metadata={"static": True})
    length: int | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def kind(self) -> str:
        """ "causal" or "interval"."""
        return "interval" if self.strict is None else "causal"

    @property
    def streams(self) -> int:
        return self.hi.shape[1] if self.strict is None else len(self.strict)


def causal_streams(length: int, strict: tuple[bool, ...] = (False, True)) -> IntervalMask:
    """Slots in generation order: row q of stream s sees keys 0..q, without q if strict[s]."""
    return IntervalMask(strict=tuple(bool(s) for s in strict), length=length)


def rank_streams(
    rank: jax.Array,
    *,
    key_rank: jax.Array | None = None,
    strict: tuple[bool, ...] = (False, True),
    debug: bool = False,
) -> IntervalMask:
    """Natural order, with ranks: a query sees keys of rank <= its own, or < if strict.

    Args:
      rank: (B, L) int32 rank of every query; equal ranks form a group.
      key_rank: (B, Lk) int32, default `rank`.
      strict: one flag a stream.
      debug: check that every row of `rank` is a permutation of 0..L-1; inside jit the check needs
        `jax.experimental.checkify.checkify`.
    """
    if debug:
        require(
            jnp.all(jnp.sort(rank, axis=-1) == jnp.arange(rank.shape[-1])[None]),
            "Every row of rank must be a permutation of 0..L-1; leave debug off for groups.",
        )
    hi = jnp.stack([rank - int(s) for s in strict], axis=1)
    return IntervalMask(rank if key_rank is None else key_rank, hi)


def length_mask(lengths: jax.Array, length: int, *, streams: int = 1) -> IntervalMask:
    """Bidirectional attention among the first `lengths[b]` of `length` rows; the rest is dead.

    Args:
      lengths: (B,) int32 in [0, length]; checked where the values are known, and inside jit under
        `jax.experimental.checkify.checkify`.
    """
    require(
        jnp.all((lengths >= 0) & (lengths <= length)),
        f"Lengths must lie in [0, {length}], the number of rows.",
    )
    inside = jnp.arange(length, dtype=jnp.int32)[None, :] < lengths[:, None]
    hi = jnp.where(inside, 0, SEES_NOTHING).astype(jnp.int32)
    code = jnp.where(inside, 0, NEVER_SEEN).astype(jnp.int32)
    return IntervalMask(code, jnp.repeat(hi[:, None], streams, axis=1))


def segment_mask(
    segment_ids: jax.Array, *, rank: jax.Array | None = None, strict: tuple[bool, ...] = (False,)
) -> IntervalMask:
    """Packed rows: attention inside a segment, bidirectional or by rank.

    Args:
      segment_ids: (B, L) int32, sorted along a row for tiles to be skipped; negative is padding.
        With `rank` below 2**31 / (2 L); checked as the lengths of `length_mask`.
      rank: (B, L) int32 in [0, L), rank of a position inside its segment.
      strict: one flag a stream; needs `rank`.
    """
    length = segment_ids.shape[-1]
    if rank is None and any(strict):
        raise ValueError("segment_mask with a strict stream needs rank; give rank or strict=False.")
    width = 1 if rank is None else 1 << length.bit_length()
    most = NEVER_SEEN // width
    require(
        jnp.all(segment_ids < most),
        f"Segment ids must be below {most} to leave room for ranks; number them from 0 in a row.",
    )
    if rank is not None:
        require(
            jnp.all((rank >= 0) & (rank < length)), f"Ranks of segments must lie in [0, {length})."
        )
    start = segment_ids * width
    inside = segment_ids >= 0
    own = start if rank is None else start + rank
    code = jnp.where(inside, own, NEVER_SEEN)
    hi = jnp.stack([jnp.where(inside, own - int(s), SEES_NOTHING) for s in strict], axis=1)
    return IntervalMask(code, hi, jnp.where(inside, start, 0))


def vectors(mask: IntervalMask) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns code (B or 1, Lk), hi (B or 1, S, L) and lo of any mask; hi is below NEVER_SEEN."""
    if mask.kind == "interval":
        return mask.code, jnp.minimum(mask.hi, NEVER_SEEN - 1), mask.lo
    rows = np.arange(mask.length, dtype=np.int32)
    return rows[None], np.stack([rows - int(s) for s in mask.strict])[None], None


def visible(mask: IntervalMask) -> jax.Array:
    """Returns the dense mask (B or 1, S, L, Lk) bool, True where a query may see a key."""
    code, hi, lo = vectors(mask)
    code = code[:, None, None, :]
    seen = code <= hi[..., None]
    return seen if lo is None else seen & (code >= lo[:, None, :, None])


def require(holds: jax.Array, message: str) -> None:
    """Raises ValueError where `holds` is known and false, else leaves it to a checkify check."""
    if isinstance(holds, jax.core.Tracer):
        checkify.debug_check(holds, message)
    elif not holds:
        raise ValueError(message)

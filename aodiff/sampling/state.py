"""The state of decoding rows, and what moves it on besides tokens: blocks, calls and the end."""

import flax.struct
import jax
import jax.numpy as jnp

from aodiff.core import corruption


@flax.struct.dataclass
class State:
    """Partly decoded rows: B rows of C positions, of which the first `length` are live.

    Attributes:
      tokens: (B, C) int32, the mask id where nothing is decided yet, 0 beyond the length.
      length: (B,) int32 live positions.
      fixed: (B, C) bool, given positions, which never change.
      block_start, block_end: (B,) int32, the positions that may be revealed now.
      used: (B,) int32 calls used in the block. size: (B,) int32 masks when the block was begun.
      when: (B, C) int32, the step that revealed a position; -1: none.
      logp: (B, C) float32 log probability of each revealed token.
      step: (B,) int32 steps made. calls: (B,) int32 network calls, those of `Grow` included.
      widths, squares: (B,) float32 sums over the calls of the positions that were computed, all of
        the row but for a cache, and of them times the length.
      cropped: (B,) bool, the row ended early and its next step fills what is masked.
      done: (B,) bool.
    """

    tokens: jax.Array
    length: jax.Array
    fixed: jax.Array
    block_start: jax.Array
    block_end: jax.Array
    used: jax.Array
    size: jax.Array
    when: jax.Array
    logp: jax.Array
    step: jax.Array
    calls: jax.Array
    widths: jax.Array
    squares: jax.Array
    cropped: jax.Array
    done: jax.Array


def begin(
    tokens: jax.Array,
    given: jax.Array,
    *,
    block: int,
    mask_id: int,
    length: jax.Array | None = None,
) -> State:
    """The state before the first step; arguments as those of `decode` and `Decoder`."""
    batch, capacity = tokens.shape
    length = jnp.full(batch, capacity, jnp.int32) if length is None else length.astype(jnp.int32)
    none, nothing = jnp.zeros(batch, jnp.int32), jnp.zeros(batch, bool)
    exists = jnp.arange(capacity)[None] < length[:, None]
    fixed = given & exists
    state = State(
        tokens=jnp.where(fixed, tokens, jnp.where(exists, mask_id, 0)).astype(jnp.int32),
        length=length,
        fixed=fixed,
        block_start=none,
        block_end=none,
        used=none,
        size=none,
        when=jnp.full((batch, capacity), -1, jnp.int32),
        logp=jnp.zeros((batch, capacity), jnp.float32),
        step=none,
        calls=none,
        widths=jnp.zeros(batch, jnp.float32),
        squares=jnp.zeros(batch, jnp.float32),
        cropped=nothing,
        done=nothing,
    )
    first = jnp.argmax(masked_positions(state, mask_id), axis=1).astype(jnp.int32)
    return advance(state.replace(block_start=first, block_end=first), block, mask_id)


def narrowed(state: State, width: int) -> State:
    """The first `width` positions of the rows, for steps of rows that are no longer."""
    return jax.tree.map(lambda x: x[:, :width] if x.ndim == 2 else x, state)


def widened(part: State, state: State) -> State:
    """`state` with what became of its first positions in `part`."""

    def put(new: jax.Array, old: jax.Array) -> jax.Array:
        return old.at[:, : new.shape[1]].set(new) if new.ndim == 2 else new

    return jax.tree.map(put, part, state)


def check_buckets(buckets: tuple[int, ...], n: int) -> None:
    """Raises ValueError unless widths at which steps are compiled too fit rows of n positions."""
    whole = all(type(w) is int for w in buckets)
    if not whole or list(buckets) != sorted({w for w in buckets if 0 < w < n}):
        raise ValueError(
            f"sample.buckets={buckets} are not ascending widths between 0 and the {n} "
            "positions of a row; use () for none"
        )


def spend(state: State, rows: jax.Array, width: jax.Array | None = None) -> State:
    """Counts one network call at the present length for rows (B,) bool.

    Args:
      width: (B,) int32 positions that are computed, None: all of the row.
    """
    width = jnp.where(rows, state.length if width is None else width, 0).astype(jnp.float32)
    return state.replace(
        calls=state.calls + rows,
        widths=state.widths + width,
        squares=state.squares + width * state.length,
    )


def masked_positions(state: State, mask_id: int) -> jax.Array:
    """Live positions (B, C) bool that are not decided yet; a given mask id is decided."""
    return (state.tokens == mask_id) & ~state.fixed & live(state)


def live(state: State) -> jax.Array:
    """Positions (B, C) bool before the length of each row."""
    return corruption.live(state.length, state.tokens.shape[1])


def in_block(state: State) -> jax.Array:
    """Positions (B, C) bool of the present block."""
    at = jnp.arange(state.tokens.shape[1])[None]
    return (at >= state.block_start[:, None]) & (at < state.block_end[:, None])


def advance(state: State, block: int, mask_id: int) -> State:
    """Moves rows whose block is full on to the next block with a mask, and marks finished rows."""
    masked = masked_positions(state, mask_id)
    full = ~jnp.any(masked & in_block(state), axis=1) & jnp.any(masked, axis=1)
    width = block or masked.shape[1]
    ahead = jnp.argmax(masked, axis=1).astype(jnp.int32) - state.block_end
    start = state.block_end + ahead // width * width
    state = state.replace(
        block_start=jnp.where(full, start, state.block_start),
        block_end=jnp.where(full, start + width, state.block_end),
        used=jnp.where(full, 0, state.used),
        done=~jnp.any(masked, axis=1),
    )
    size = jnp.sum(masked & in_block(state), axis=1, dtype=jnp.int32)
    return state.replace(size=jnp.where(full, size, state.size))

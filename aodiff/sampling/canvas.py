"""Rows that grow while they are decoded: masks inserted at a place, with static shapes.

Rows have room for their greatest length from the start, and only `State.length` moves. Source:
decoding.md 9.3.
"""

import jax
import jax.numpy as jnp

from aodiff.core.categorical import jensen_shannon
from aodiff.sampling.state import State


def insert(state: State, after: jax.Array, number: jax.Array, mask_id: int) -> State:
    """Inserts number[b] masks after position after[b] of row b; what follows moves right.

    The block is left as it was. Rows must have the room, which is the caller's to see to.

    Args:
      after, number: (B,) int32.
    """
    at = jnp.arange(state.tokens.shape[1])[None]
    first, last = after[:, None], (after + number)[:, None]
    source = jnp.where(at <= first, at, jnp.maximum(at - number[:, None], 0))
    new = (at > first) & (at <= last)
    length = state.length + number

    def moved(x: jax.Array, fill: jax.typing.ArrayLike) -> jax.Array:
        return jnp.where(new, fill, jnp.take_along_axis(x, source, axis=1))

    tokens = jnp.where(at < length[:, None], moved(state.tokens, mask_id), 0)
    return state.replace(
        tokens=tokens,
        length=length,
        fixed=moved(state.fixed, False),
        when=moved(state.when, -1),
        logp=moved(state.logp, 0.0),
    )


def aligned(x: jax.Array, after: jax.Array, number: jax.Array) -> jax.Array:
    """Of the longer rows x (B, C, ...), what stands at each position (B, C) of the shorter ones."""
    at = jnp.arange(x.shape[1])[None]
    source = jnp.minimum(at + jnp.where(at > after[:, None], number[:, None], 0), x.shape[1] - 1)
    return jnp.take_along_axis(x, source.reshape(*source.shape, *[1] * (x.ndim - 2)), axis=1)


def densest(values: jax.Array, start: jax.Array, end: jax.Array, window: int) -> jax.Array:
    """Middles (B,) int32 of the windows with the greatest sum; of equal ones the leftmost.

    The window of c holds the `window` positions c - window / 2 + 1 .. c + window / 2, all of them
    in [start, end); where none fits it is the last position before `end`.

    Args:
      values: (B, C) float32. start, end: (B,) int32. window: even.
    """
    half = window // 2
    at = jnp.arange(values.shape[1])[None]
    inside = (at >= start[:, None]) & (at < end[:, None])
    # Summed from zero in each window: differences of running totals would break ties by rounding.
    padded = jnp.pad(jnp.where(inside, values, 0.0), ((0, 0), (half - 1, half)))
    sums = sum(padded[:, i : i + values.shape[1]] for i in range(window))
    fits = (at - half + 1 >= start[:, None]) & (at + half < end[:, None])
    best = jnp.argmax(jnp.where(fits, sums, -jnp.inf), axis=1)
    return jnp.where(jnp.any(fits, axis=1), best, end - 1).astype(jnp.int32)


def shift(base: jax.Array, other: jax.Array, at: jax.Array) -> jax.Array:
    """Mean Jensen-Shannon divergence (B,) in nats of two laws per position, over positions `at`.

    A chunk of positions at a time, so that no third array of the size of the logits is needed.

    Args:
      base, other: (B, C, V) logits. at: (B, C) bool; a row without any has 0.
    """
    flat = [x.reshape(-1, x.shape[-1]) for x in (base, other)]
    found = jax.lax.map(lambda pair: jensen_shannon(*pair), tuple(flat), batch_size=64)
    found = jnp.where(at, found.reshape(at.shape), 0.0)
    return jnp.sum(found, axis=1) / jnp.maximum(jnp.sum(at, axis=1), 1)


def room(given: jax.Array, start: int, most: int) -> tuple[jax.Array, jax.Array]:
    """Live positions of rows at first and at most, both (B,) int32.

    Args:
      given: (B, C) bool, all of which are live.
      start, most: positions beside the given ones, as far as C allows; 0 is all.
    """
    capacity = given.shape[1]
    known = jnp.sum(given, axis=1, dtype=jnp.int32)
    reach = jnp.max(jnp.where(given, jnp.arange(capacity)[None] + 1, 0), axis=1)
    lengths = (jnp.clip(known + (n or capacity), reach, capacity) for n in (start, most))
    return tuple(lengths)

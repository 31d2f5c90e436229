"""Rows that grow: what is given, with holes between, and masks that are inserted into the holes.

Source: flexmdm.md 7.5 and 8.
"""

import flax.struct
import jax
import jax.numpy as jnp

from aodiff.core import corruption
from aodiff.core.insertion import scatter
from aodiff.sampling.holes import Holes, total
from aodiff.sampling.state import live


@flax.struct.dataclass
class Growing:
    """Rows that grow: the fields of `state.State` that there are, and

    open: (B, C) bool, slots after which masks may be inserted. born: (B, C) int32, the step that
    inserted a slot; -1: it was given. bounds: (B, C, 2) int32, the least and the most tokens of the
    hole after a given slot, 0 where there is none; None: holes have no bounds. full: (B,) int32
    steps of insertion after which a row was at its capacity. step: () int32.
    """

    tokens: jax.Array
    length: jax.Array
    fixed: jax.Array
    open: jax.Array
    when: jax.Array
    born: jax.Array
    bounds: jax.Array | None
    logp: jax.Array
    calls: jax.Array
    widths: jax.Array
    squares: jax.Array
    full: jax.Array
    done: jax.Array
    step: jax.Array


def begin(
    tokens: jax.Array,
    given: jax.Array,
    bounds: jax.Array | None = None,
    *,
    mask_id: int,
    anchor: int,
) -> Growing:
    """Rows of an anchor and what is given, closed up; open wherever something was left out.

    Args:
      tokens: (B, n) int32; a given mask is one token that is to be revealed.
      given: (B, n) bool; a run of positions that are not given, of any width, is a hole that takes
        any number of tokens.
      bounds: (B, n, 2) int32, least and most tokens of the hole that a position is in, 0 at those
        that are given; what is given and the least of all holes are n at most.
    """
    batch, n = tokens.shape
    front = lambda x, fill: jnp.concatenate([jnp.full_like(x[:, :1], fill), x], axis=1)
    keep = front(given, True)
    ahead = lambda x: jnp.concatenate([x, jnp.zeros_like(x[:, :1])], axis=1)
    place = jnp.where(keep, jnp.cumsum(keep, axis=1) - 1, n + 1)
    none, zero = jnp.full((batch, n + 1), -1, jnp.int32), jnp.zeros(batch, jnp.int32)
    return Growing(
        tokens=scatter(front(tokens, anchor), place, 0),
        length=jnp.sum(keep, axis=1, dtype=jnp.int32),
        fixed=scatter(front(tokens != mask_id, True), place, False),
        open=scatter(ahead(~given), place, False),
        when=none,
        born=none,
        bounds=None if bounds is None else scatter(ahead(bounds), place, 0),
        logp=jnp.zeros((batch, n + 1), jnp.float32),
        calls=zero,
        widths=zero.astype(jnp.float32),
        squares=zero.astype(jnp.float32),
        full=zero,
        done=zero > 0,
        step=jnp.int32(0),
    )


def insert(state: Growing, counts: jax.Array, mask_id: int) -> Growing:
    """Inserts counts (B, C) masks behind each slot; rows must have the room."""
    capacity = state.tokens.shape[1]
    at = jnp.arange(capacity)[None]
    place = jnp.where(live(state), at + jnp.cumsum(counts, axis=1) - counts, capacity)
    length = state.length + jnp.sum(counts, axis=1)
    old = scatter(live(state), place, False)
    exists = corruption.live(length, capacity)
    moved = lambda x, fill: scatter(x, place, fill)
    return state.replace(
        tokens=jnp.where(exists & ~old, mask_id, moved(state.tokens, 0)),
        length=length,
        fixed=moved(state.fixed, False),
        open=moved(state.open, True) & exists,
        when=moved(state.when, -1),
        born=jnp.where(exists & ~old, state.step, moved(state.born, -1)),
        bounds=None if state.bounds is None else moved(state.bounds, 0),
        logp=moved(state.logp, 0.0),
    )


def holes(state: Growing) -> Holes | None:
    """What the holes of a state may take and still need, None where they have no bounds."""
    if state.bounds is None:
        return None
    exists = live(state)
    at = jnp.broadcast_to(jnp.arange(exists.shape[1])[None], exists.shape)
    came = exists & (state.born >= 0)
    owner = jax.lax.cummax(jnp.where(exists & ~came, at, 0), axis=1)
    taken = total(came.astype(jnp.int32), owner)
    least, most = (jnp.take_along_axis(state.bounds[..., i], owner, axis=1) for i in range(2))
    due = jnp.where(state.done[:, None], 0, jnp.maximum(least - taken, 0))
    return Holes(owner, due, most - taken)

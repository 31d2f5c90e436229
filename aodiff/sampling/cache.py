"""The dual cache of Fast-dLLM: between refreshes a block alone is computed.

All other positions, those behind the block too, are seen as they were when the row was last
computed as a whole: an approximation, whose answer is exact right after a refresh. Every row is
refreshed in its own time. Source: Wu et al., arXiv 2505.22618; decoding.md 7.2.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from aodiff.sampling.state import State, spend


class Cached(NamedTuple):
    """A denoiser whose positions see the others by a cache, arrays (N, B, ...).

    Attributes:
      fill: tokens (B, C) int32, length (B,) int32 -> the cache of whole rows.
      at: tokens, length, positions (B, w) int32, cache -> their logits (B, w, V), and the cache
        with these positions renewed.
    """

    fill: Callable[[jax.Array, jax.Array], Any]
    at: Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]


@flax.struct.dataclass
class Store:
    """The cache, the block (B,) int32 that each row was filled in last, and its steps since."""

    cache: Any
    block: jax.Array
    age: jax.Array


def empty(cached: Cached, state: State) -> Store:
    """A store that no row has filled yet."""
    shapes = jax.eval_shape(cached.fill, state.tokens, state.length)
    cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return Store(cache, jnp.full_like(state.length, -1), jnp.zeros_like(state.length))


def look(
    cached: Cached, store: Store, state: State, at: jax.Array, every: int
) -> tuple[jax.Array, Store, State]:
    """The logits (B, w, V) of the block, at positions (B, w), after the refreshes that are due.

    A row is refreshed when it begins a block and after `every` steps. The block is computed in any
    case, which is counted as a part of the refresh: one call of the length of the row, and one of
    the width of the block where there is none.
    """
    due = ~state.done & ((store.block != state.block_start) | (store.age >= every))

    def refresh(cache: Any) -> Any:
        rows = lambda x: due.reshape(1, -1, *[1] * (x.ndim - 2))
        fresh = cached.fill(state.tokens, state.length)
        return jax.tree.map(lambda new, old: jnp.where(rows(new), new, old), fresh, cache)

    cache = jax.lax.cond(jnp.any(due), refresh, lambda cache: cache, store.cache)
    logits, cache = cached.at(state.tokens, state.length, at, cache)
    narrow = jnp.minimum(state.block_end, state.length) - state.block_start
    state = spend(state, ~state.done, jnp.where(due, state.length, narrow))
    return logits, Store(cache, state.block_start, jnp.where(due, 1, store.age + 1)), state

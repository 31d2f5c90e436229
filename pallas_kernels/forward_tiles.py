"""The online softmax of the forward kernels, one chunk of rows at a time.

All query streams of a block are rows of the same score tiles. Statistics of a row are replicated
over 128 lanes; scores, exponents and sums are float32, exponentials base 2.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.lowering import LANES, NN, NT, product
from pallas_kernels.reference import DEAD

LN2 = math.log(2.0)
TINY = 2.0**-60  # the sum of a dead row; others sum to at least 1
SUBLANES = 8


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static facts of a kernel."""

    streams: int
    bq: int
    bk: int
    cut: int  # keys of a piece of the diagonal
    rc: int
    ahead: int
    unroll: int
    ones: bool  # the MXU sums rows, with ones next to the values
    scale2: float  # of scores whose exponential is base 2
    exact: bool  # float32 inputs: no rounding of operands
    strict: tuple[bool, ...] | None  # of a causal mask
    batched: bool  # every example has its own mask
    query_blocks: int
    window: int  # keys in VMEM
    windows: int

    @property
    def chunks(self) -> list[tuple[int, int, int]]:
        """(stream, first row, rows): what one step of the softmax works on."""
        starts = range(0, self.bq, self.rc)
        return [(s, r, min(self.rc, self.bq - r)) for s in range(self.streams) for r in starts]


class Refs(NamedTuple):
    """q, o (S, bq, D); k, v (keys, D); lse (S, 1, bq); top, total (S, bq, 128); acc (S, bq, D)."""

    q: Any
    k: Any
    v: Any
    o: Any
    lse: Any
    top: Any
    total: Any
    acc: Any


class Tile(NamedTuple):
    """Scores of one chunk of rows against some keys; `first` of its rows has no running state."""

    stream: int
    row: int
    rows: int
    key: Any
    keys: int
    first: bool = False
    seen: Callable[[], jax.Array] | None = None  # (rows, keys) bool
    floor: Callable[[], Any] = lambda: DEAD / 2  # the least maximum of rows in their first tile

    @property
    def at(self) -> tuple:
        return (self.stream, pl.ds(self.row, self.rows))


def run(tiles: list[Tile], refs: Refs, plan: Plan) -> None:
    """Works through tiles, issuing `plan.ahead` score products before the softmax they precede.

    The first block of keys always needs one: without it, 2307 instead of 1758 cycles on v5p.
    """
    ahead = max(plan.ahead, 1) if tiles[0].first else plan.ahead
    waiting = []
    for tile in tiles:
        waiting.append((tile, _scores(tile, refs, plan)))
        if len(waiting) > ahead:
            _absorb(*waiting.pop(0), refs, plan)
    for item in waiting:
        _absorb(*item, refs, plan)


def _scores(tile: Tile, refs: Refs, plan: Plan) -> jax.Array:
    k = refs.k[pl.ds(tile.key, tile.keys)]
    scores = product(refs.q[tile.at], k, NT, exact=plan.exact) * plan.scale2
    return scores if tile.seen is None else jnp.where(tile.seen(), scores, DEAD)


def _absorb(tile: Tile, scores: jax.Array, refs: Refs, plan: Plan) -> None:
    """One step of the online softmax."""
    top = jnp.broadcast_to(jnp.max(scores, axis=1, keepdims=True), (tile.rows, LANES))
    # Masked scores are below the least maximum: a row that sees nothing sums to exactly zero.
    before = tile.floor() if tile.first else refs.top[tile.at]
    top = jnp.maximum(before, top)
    p = jnp.exp2(scores - lanes(top, tile.keys))
    # The MXU rounds to bfloat16 by itself at the same rate; packing p would cost vector slots.
    v = refs.v[pl.ds(tile.key, tile.keys)].astype(jnp.float32)
    if plan.ones:
        v = jnp.concatenate([jnp.ones((tile.keys, LANES), v.dtype), v], axis=1)
    out = product(p, v, NN, exact=plan.exact)
    if plan.ones:
        total, out = out[:, :LANES], out[:, LANES:]
    else:
        total = jnp.broadcast_to(jnp.sum(p, axis=1, keepdims=True), (tile.rows, LANES))
    if tile.first:
        total = jnp.maximum(total, TINY)  # has an inverse even if the row is dead
    else:
        shrink = jnp.exp2(before - top)
        out += refs.acc[tile.at] * lanes(shrink, out.shape[1])
        total += refs.total[tile.at] * shrink
    refs.top[tile.at], refs.total[tile.at], refs.acc[tile.at] = top, total, out


def finish(refs: Refs, plan: Plan) -> None:
    """Normalises; rows that saw no key are zero already."""
    for stream, row, rows in plan.chunks:
        at = (stream, pl.ds(row, rows))
        inverse = _reciprocal(refs.total[at], plan)
        refs.o[at] = (refs.acc[at] * lanes(inverse, refs.acc.shape[-1])).astype(refs.o.dtype)
    for stream in range(plan.streams):
        top, total = _as_rows(refs.top[stream]), _as_rows(refs.total[stream])
        lse = jnp.where(total > 0.5, (top + jnp.log2(total)) * LN2, DEAD)
        for n in range(plan.bq // LANES):
            refs.lse[stream, :, pl.ds(n * LANES, LANES)] = lse[n : n + 1]


def _as_rows(x: jax.Array) -> jax.Array:
    """Lane-replicated (n * 128, 128) as (n, 128): one select a register, where transposes wait."""
    index = functools.partial(lax.broadcasted_iota, jnp.int32, (1, SUBLANES, LANES))
    x = x.reshape(-1, LANES // SUBLANES, SUBLANES, LANES)
    picked = x[:, 0]
    for n in range(1, x.shape[1]):  # lanes 8n..8n+7 are of rows 8n..8n+7
        picked = jnp.where(index(2) >> 3 == n, x[:, n], picked)
    return jnp.sum(jnp.where(index(2) & 7 == index(1), picked, 0.0), axis=1)


def write_dead(refs: Refs) -> None:
    """The result of rows that all see no key."""
    refs.o[...] = jnp.zeros(refs.o.shape, refs.o.dtype)
    refs.lse[...] = jnp.full(refs.lse.shape, DEAD, jnp.float32)


def lanes(x: jax.Array, count: int) -> jax.Array:
    """Lane-replicated (rows, 128) as (rows, count)."""
    if count <= LANES:
        return x[:, :count]
    return jnp.concatenate([x] * (count // LANES), axis=1)


def _reciprocal(x: jax.Array, plan: Plan) -> jax.Array:
    if plan.exact:
        return 1.0 / x
    guess = pl.reciprocal(x, approx=True)
    return guess * (2.0 - x * guess)  # Newton

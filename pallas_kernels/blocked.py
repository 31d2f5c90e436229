"""Online-softmax attention in plain XLA, tile by tile: the default on CPUs, linear in memory.

For every block of query rows a loop with dynamic bounds runs over the blocks of keys that some row
of it may see; such loops have no automatic gradient, so the backward pass is written by hand.

What makes it fast with XLA on CPUs (jax 0.10.2, two x86 cores with AVX-512, float32):
- The key heads are taken one by one. Products of two matrices reach 230 GFLOP/s a core, those
  batched over heads a fifth less, those with a transposed left side 60 to 130.
- A tile of 512 by 256 is the smallest whose products XLA spreads over cores. One of 256 by 128
  takes less CPU time, as less of it is masked, but keeps a single core busy: as fast up to 1024
  keys (50 ms; the other takes 44 or 70, from process to process), a fifth slower at 2048.
- Tiles are cut from the arrays as they are, and results are added to arrays in place. Three
  quarters of the time of a tile are its seven products, a seventh its two exponentials.

CPU time of forward and backward in ms, causal, two streams, batch 2, 4 heads of 64, on a machine
busy with other work (python -m pallas_kernels.bench): 63 at length 1024 and 214 at 2048. Dense
attention takes 259 and 1053, or 174 and 671 if the process keeps freed memory. Scratch memory is 4
and 6 MB against 201 and 805.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.blocks import active_tiles, hull, pad, padded_vectors, round_up
from pallas_kernels.config import AttentionConfig
from pallas_kernels.masks import IntervalMask
from pallas_kernels.reference import DEAD

ROWS = 256  # of a tile: of all streams and query heads that share a key head
KEYS = 128  # of a tile
LONG = 1024  # keys; beyond it both are doubled
LOG2_E = math.log2(math.e)


def refusal(q: jax.Array, k: jax.Array, mask: IntervalMask) -> None:
    """There is nothing this backend cannot do."""


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: IntervalMask,
    *,
    scale: float,
    config: AttentionConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention and its normaliser.

    Args:
      q: (B, H, S, L, D). k, v: (B, Hkv, Lk, D), H a multiple of Hkv, any L and Lk.
      mask: who sees whom.
      scale: of the scores.
      config: bq and bk of it are the size of a tile, default by `ROWS` and `KEYS`.

    Returns:
      o (B, H, S, L, D) in the dtype of q, and its natural lse (B, H, S, L) float32; zero and `DEAD`
      for a row that sees no key.
    """
    tiles = _tiles(q, k, mask, config and (config.bq, config.bk))
    dot = _dot(q.dtype)
    queries, keys, values = tiles.rows(q), tiles.keys(k), tiles.keys(v)

    def block(at, results):
        q, (seen, bounds) = tiles.block(queries, at), tiles.limits(at)

        def tile(j, carry):
            top, total, acc = carry
            scores = dot(q, tiles.tile(keys, at, j).T) * (scale * LOG2_E)
            scores = jnp.where(seen(j), scores, DEAD)
            new_top = jnp.maximum(top, jnp.max(scores, axis=1))
            weights = jnp.exp2(scores - new_top[:, None])
            shrink = jnp.exp2(top - new_top)
            total = total * shrink + jnp.sum(weights, axis=1)
            acc = acc * shrink[:, None] + dot(weights, tiles.tile(values, at, j))
            return new_top, total, acc

        rows = q.shape[:1]
        empty = jnp.full(rows, DEAD), jnp.zeros(rows), jnp.zeros(q.shape)
        top, total, acc = lax.fori_loop(*bounds, tile, empty)
        alive = top > DEAD / 2  # every weight of a row that saw nothing is 1
        total = jnp.where(alive, total, 1.0)
        out = acc * jnp.where(alive, 1 / total, 0.0)[:, None]
        lse = jnp.where(alive, top / LOG2_E + jnp.log(total), DEAD)
        return [tiles.put(x, y, at) for x, y in zip(results, (out, lse), strict=True)]

    nothing = [jnp.zeros(queries.shape, q.dtype), jnp.zeros(queries.shape[:3])]
    return tuple(tiles.from_rows(x) for x in tiles.for_blocks(block, nothing))


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: IntervalMask,
    lse2: jax.Array,
    delta: jax.Array,
    do: jax.Array,
    *,
    scale: float,
    config: AttentionConfig | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of `forward`, from probabilities computed anew.

    Args:
      q, k, v, mask, scale: as of `forward`.
      lse2: lse in base 2, 0 for a row that sees no key. delta: sum of o * do, minus the gradient of
        the natural lse. Both (B, H, S, L) float32.
      do: (B, H, S, L, D), the gradient of o.
      config: bwd_bq and bwd_bk of it are the size of a tile, default by `ROWS` and `KEYS`.

    Returns:
      dq, dk, dv in the dtypes of q, k, v.
    """
    tiles = _tiles(q, k, mask, config and (config.bwd_bq, config.bwd_bk))
    dot = _dot(q.dtype)
    of_rows = [tiles.rows(x) for x in (q, do, lse2, delta)]
    keys, values = tiles.keys(k), tiles.keys(v)
    keys_t = keys.mT

    def block(at, results):
        q, do, lse2, delta = (tiles.block(x, at) for x in of_rows)
        seen, bounds = tiles.limits(at)
        all_dq, *of_keys = results

        # Scores have a row for every key here, so that none of the five products takes its left
        # side transposed, for which XLA has no fast code on CPUs.
        def tile(j, carry):
            dqt, dk, dv = carry
            scores = dot(tiles.tile(keys, at, j), q.T) * (scale * LOG2_E)
            probs = jnp.where(seen(j).T, jnp.exp2(scores - lse2[None]), 0.0)
            dscores = probs * (dot(tiles.tile(values, at, j), do.T) - delta[None])
            dqt = dqt + dot(tiles.tile(keys_t, at, j, axis=2), dscores) * scale
            dk = tiles.add(dk, dot(dscores, q) * scale, at, j)
            return dqt, dk, tiles.add(dv, dot(probs, do), at, j)

        dqt, *of_keys = lax.fori_loop(*bounds, tile, (jnp.zeros(q.T.shape), *of_keys))
        return tiles.put(all_dq, dqt.T, at), *of_keys

    nothing = jnp.zeros(of_rows[0].shape, q.dtype), jnp.zeros(keys.shape), jnp.zeros(keys.shape)
    dq, dk, dv = tiles.for_blocks(block, nothing)
    dk, dv = (x[:, : k.shape[2]].reshape(k.shape) for x in (dk, dv))
    return tiles.from_rows(dq), dk.astype(k.dtype), dv.astype(v.dtype)


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """The score matrices of all key heads, cut into tiles; N = B * Hkv of them.

    A matrix has H / Hkv * S groups of L rows, all padded to a multiple of bq, and Lk columns padded
    to a multiple of bk. A block is `bq` rows of every group: R rows. `at` is its place: the matrix
    and the number of the block in it.
    """

    heads: int
    kv_heads: int
    streams: int
    length: int
    bq: int
    bk: int
    code: jax.Array
    hi: jax.Array
    lo: jax.Array | None
    hulls: jax.Array  # (B or 1, blocks, 2), the blocks of keys that a block of rows may see

    def rows(self, x: jax.Array) -> jax.Array:
        """(B, H, S, L, ...) -> (N, groups, padded L, ...)."""
        x = x.reshape(x.shape[0] * self.kv_heads, -1, *x.shape[3:])
        return pad(x, 2, self.hi.shape[-1])

    def from_rows(self, x: jax.Array) -> jax.Array:
        """The inverse of `rows`."""
        x = x[:, :, : self.length]
        return x.reshape(-1, self.heads, self.streams, *x.shape[2:])

    def keys(self, x: jax.Array) -> jax.Array:
        """(B, Hkv, Lk, D) -> (N, padded Lk, D)."""
        return pad(x.reshape(-1, *x.shape[2:]), 1, self.code.shape[-1])

    def for_blocks(self, body: Callable[[Any, Any], Any], results: Any) -> Any:
        """Folds `body(at, results)` over all blocks of rows."""
        blocks = self.hulls.shape[1]
        matrices = jax.tree.leaves(results)[0].shape[0]
        step = lambda t, results: body((lax.div(t, blocks), lax.rem(t, blocks)), results)
        return lax.fori_loop(0, matrices * blocks, step, results)

    def block(self, x: jax.Array, at: tuple) -> jax.Array:
        """The rows (R, ...) float32 of a block, of `x` as `rows` returns it."""
        start, size = self._place(x, at)
        x = lax.dynamic_slice(x, start, size)
        return x.reshape(-1, *x.shape[3:]).astype(jnp.float32)

    def put(self, x: jax.Array, y: jax.Array, at: tuple) -> jax.Array:
        """x with the rows of a block set to y, in place inside a loop."""
        start, size = self._place(x, at)
        return lax.dynamic_update_slice(x, y.reshape(size).astype(x.dtype), start)

    def _place(self, x, at):
        rest = x.shape[3:]
        return (at[0], 0, at[1] * self.bq, *[0] * len(rest)), (1, x.shape[1], self.bq, *rest)

    def tile(self, x: jax.Array, at: tuple, j: jax.Array, axis: int = 1) -> jax.Array:
        """Block j of keys along `axis` of x (N, ...), for the matrix of `at`; float32."""
        x = lax.dynamic_index_in_dim(x, at[0], keepdims=False)
        return lax.dynamic_slice_in_dim(x, j * self.bk, self.bk, axis - 1).astype(jnp.float32)

    def add(self, x: jax.Array, y: jax.Array, at: tuple, j: jax.Array) -> jax.Array:
        """x (N, padded Lk, D) with y added to block j of keys, in place inside a loop."""
        y = (self.tile(x, at, j) + y)[None]
        return lax.dynamic_update_slice(x, y, (at[0], j * self.bk, 0))

    def limits(self, at: tuple) -> tuple[Callable[[jax.Array], jax.Array], jax.Array]:
        """What the rows of a block may see.

        Returns:
          A function from a block of keys to (R, bk) bool, and the first and one past the last block
          of keys for which any of it is true.
        """
        vectors = self.code, self.hi, self.lo, self.hulls
        example = lax.div(at[0], self.kv_heads) if self.code.shape[0] > 1 else 0
        pick = functools.partial(lax.dynamic_index_in_dim, index=example, keepdims=False)
        code, hi, lo, hulls = jax.tree.map(pick, vectors)
        groups = self.heads // self.kv_heads, self.streams, self.bq

        def of_rows(x):
            x = lax.dynamic_slice_in_dim(x, at[1] * self.bq, self.bq, x.ndim - 1)
            return jnp.broadcast_to(lax.expand_dims(x, range(3 - x.ndim)), groups).reshape(-1, 1)

        hi, lo = jax.tree.map(of_rows, (hi, lo))

        def seen(j):
            tile = lax.dynamic_slice_in_dim(code, j * self.bk, self.bk)[None]
            return tile <= hi if lo is None else (tile <= hi) & (tile >= lo)

        return seen, lax.dynamic_index_in_dim(hulls, at[1], keepdims=False)


def _tiles(q: jax.Array, k: jax.Array, mask: IntervalMask, size: tuple[int, int] | None) -> _Tiles:
    heads, streams, length = q.shape[1:4]
    kv_heads, keys = k.shape[1:3]
    times = 2 if keys > LONG else 1
    bq, bk = size or (times * ROWS * kv_heads // (heads * streams), times * KEYS)
    bq, bk = min(max(bq, 1), length), min(bk, keys)
    code, hi, lo = padded_vectors(mask, round_up(length, bq), round_up(keys, bk))
    hulls = hull(active_tiles(code, hi, lo, bq, bk))
    return _Tiles(heads, kv_heads, streams, length, bq, bk, code, hi, lo, hulls)


def _dot(dtype: jnp.dtype) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The product of float32 matrices, exact if the inputs were float32."""
    exact = lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
    return functools.partial(jnp.dot, precision=exact)

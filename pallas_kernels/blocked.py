"""Online-softmax attention in plain XLA, tile by tile: the default on CPUs, linear in memory."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.blocks import active_tiles, hull, pad, padded_vectors
from pallas_kernels.config import AttentionConfig
from pallas_kernels.masks import IntervalMask
from pallas_kernels.reference import DEAD

BLOCK = 128  # keys, and query rows of one stream, of a tile
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
      config: bq and bk of it are the size of a tile, default `BLOCK`.

    Returns:
      o (B, H, S, L, D) in the dtype of q, and its natural lse (B, H, S, L) float32; zero and `DEAD`
      for a row that sees no key.
    """
    bq, bk = (BLOCK, BLOCK) if config is None else (config.bq, config.bk)
    tiles = Tiles(*q.shape[:4], *k.shape[1:3], bq, bk)
    dot = _dot(q.dtype)

    def head(operands):
        code, kt, v, *of_rows = operands

        def block(operands):
            q, hi, lo, (start, stop) = operands

            def tile(j, carry):
                top, total, acc = carry
                scores = dot(q, kt[j]) * (scale * LOG2_E)
                scores = jnp.where(_seen(code[j], hi, lo), scores, DEAD)
                new_top = jnp.maximum(top, jnp.max(scores, axis=1))
                weights = jnp.exp2(scores - new_top[:, None])
                shrink = jnp.exp2(top - new_top)
                total = total * shrink + jnp.sum(weights, axis=1)
                return new_top, total, acc * shrink[:, None] + dot(weights, v[j])

            rows = q.shape[:1]
            empty = jnp.full(rows, DEAD), jnp.zeros(rows), jnp.zeros(q.shape)
            top, total, acc = lax.fori_loop(start, stop, tile, empty)
            alive = top > DEAD / 2  # the weights of a row that saw nothing are 1
            total = jnp.where(alive, total, 1.0)
            out = acc * jnp.where(alive, 1 / total, 0.0)[:, None]
            return out, jnp.where(alive, top / LOG2_E + jnp.log(total), DEAD)

        return lax.map(block, of_rows)

    code, *limits = tiles.limits(mask)
    keys, values = (tiles.keys(x.astype(jnp.float32)) for x in (k, v))
    of_rows = [tiles.rows(q.astype(jnp.float32)), *limits]
    out, lse = lax.map(head, (code, keys.mT, values, *of_rows))
    return tiles.from_rows(out).astype(q.dtype), tiles.from_rows(lse)


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
      config: bwd_bq and bwd_bk of it are the size of a tile, default `BLOCK`.

    Returns:
      dq, dk, dv in the dtypes of q, k, v.
    """
    bq, bk = (BLOCK, BLOCK) if config is None else (config.bwd_bq, config.bwd_bk)
    tiles = Tiles(*q.shape[:4], *k.shape[1:3], bq, bk)
    dot = _dot(q.dtype)

    def head(operands):
        code, k, kt, vt, *of_rows = operands

        def block(carry, operands):
            q, do, lse2, delta, hi, lo, (start, stop) = operands

            def tile(j, carry):
                dq, dkt, dvt = carry
                scores = dot(q, kt[j]) * (scale * LOG2_E)
                seen = _seen(code[j], hi, lo)
                probs = jnp.where(seen, jnp.exp2(scores - lse2[:, None]), 0.0)
                dscores = probs * (dot(do, vt[j]) - delta[:, None])
                dq = dq + dot(dscores, k[j])
                dkt = dkt.at[j].add(dot(q.T, dscores))
                return dq, dkt, dvt.at[j].add(dot(do.T, probs))

            dq, *carry = lax.fori_loop(start, stop, tile, (jnp.zeros(q.shape), *carry))
            return carry, dq

        (dkt, dvt), dq = lax.scan(block, [jnp.zeros(kt.shape)] * 2, of_rows)
        return dq, dkt, dvt

    code, *limits = tiles.limits(mask)
    keys, values = (tiles.keys(x.astype(jnp.float32)) for x in (k, v))
    of_rows = [tiles.rows(x.astype(jnp.float32)) for x in (q, do, lse2, delta)]
    dq, dkt, dvt = lax.map(head, (code, keys, keys.mT, values.mT, *of_rows, *limits))
    dq, dk, dv = tiles.from_rows(dq), tiles.from_keys(dkt.mT), tiles.from_keys(dvt.mT)
    return (dq * scale).astype(q.dtype), (dk * scale).astype(k.dtype), dv.astype(v.dtype)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The score matrices of (B, H, S, L) query rows and (B, Hkv, Lk) keys, cut into tiles.

    The query heads and streams of one key head are rows of the same tile.
    """

    batch: int
    heads: int
    streams: int
    length: int
    kv_heads: int
    key_length: int
    bq: int
    bk: int

    @property
    def grid(self) -> tuple[int, int]:
        """Blocks of rows, blocks of keys."""
        return -(-self.length // self.bq), -(-self.key_length // self.bk)

    def rows(self, x: jax.Array) -> jax.Array:
        """(B, H, S, L, ...) -> (B * Hkv, nq, H / Hkv * S * bq, ...), zeros at the end."""
        nq, last = self.grid[0], x.shape[4:]
        x = pad(x, 3, nq * self.bq)
        x = x.reshape(self.batch * self.kv_heads, -1, nq, self.bq, *last)
        return jnp.swapaxes(x, 1, 2).reshape(x.shape[0], nq, -1, *last)

    def from_rows(self, x: jax.Array) -> jax.Array:
        """The inverse of `rows`."""
        nq, last = self.grid[0], x.shape[3:]
        x = jnp.swapaxes(x.reshape(x.shape[0], nq, -1, self.bq, *last), 1, 2)
        x = x.reshape(self.batch, self.heads, self.streams, -1, *last)
        return x[:, :, :, : self.length]

    def keys(self, x: jax.Array) -> jax.Array:
        """(B, Hkv, Lk, D) -> (B * Hkv, nk, bk, D), zeros at the end."""
        x = pad(x, 2, self.grid[1] * self.bk)
        return x.reshape(self.batch * self.kv_heads, -1, self.bk, x.shape[-1])

    def from_keys(self, x: jax.Array) -> jax.Array:
        """The inverse of `keys`."""
        x = x.reshape(self.batch, self.kv_heads, -1, x.shape[-1])
        return x[:, :, : self.key_length]

    def limits(self, mask: IntervalMask) -> tuple[jax.Array | None, ...]:
        """code, hi and lo laid out by `keys` and `rows`, and the active hull of every row block.

        Returns:
          (B * Hkv, nk, bk), (B * Hkv, nq, R), the same or None, and (B * Hkv, nq, 2), all int32.
        """
        nq, nk = self.grid
        code, hi, lo = padded_vectors(mask, nq * self.bq, nk * self.bk)
        bounds = hull(active_tiles(code, hi, lo, self.bq, self.bk))
        shape = (self.batch, self.heads, self.streams, nq * self.bq)
        spread = lambda x: jnp.broadcast_to(
            x[:, None], (self.batch, self.kv_heads, *x.shape[1:])
        ).reshape(-1, *x.shape[1:])
        return (
            spread(code.reshape(-1, nk, self.bk)),
            self.rows(jnp.broadcast_to(hi[:, None], shape)),
            None if lo is None else self.rows(jnp.broadcast_to(lo[:, None, None], shape)),
            spread(bounds),
        )


def _seen(code: jax.Array, hi: jax.Array, lo: jax.Array | None) -> jax.Array:
    """(R, bk) bool from code (bk,), hi and lo (R,)."""
    code = code[None]
    seen = code <= hi[:, None]
    return seen if lo is None else seen & (code >= lo[:, None])


def _dot(dtype: jnp.dtype) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Product of float32 matrices, exact to the bits of the dtype of the inputs."""
    exact = lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
    return functools.partial(jnp.dot, precision=exact)

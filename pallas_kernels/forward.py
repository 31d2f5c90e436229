"""Forward attention for TPUs: one KV head stays in VMEM while query blocks pass by.

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
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import lowering
from pallas_kernels.blocks import pad, padded_vectors, round_up, tile_lists
from pallas_kernels.config import AttentionConfig
from pallas_kernels.lowering import LANES, NN, NT
from pallas_kernels.masks import SEES_NOTHING, IntervalMask
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
    query_blocks: int
    key_blocks: int
    batched: bool  # every example has its own mask

    @property
    def chunks(self) -> list[tuple[int, int, int]]:
        """(stream, first row, rows): what one step of the softmax works on."""
        starts = range(0, self.bq, self.rc)
        return [(s, r, min(self.rc, self.bq - r)) for s in range(self.streams) for r in starts]


class Refs(NamedTuple):
    """q, o (S, bq, D); k, v (Lk, D); lse (S, 1, bq); top, total (S, bq, 128); acc (S, bq, D)."""

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


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: IntervalMask,
    *,
    scale: float,
    config: AttentionConfig,
) -> tuple[jax.Array, jax.Array]:
    """Attention with a head's keys and values resident in VMEM.

    Args:
      q: (B, H, S, L, D). k, v: (B, Hkv, Lk, D), H a multiple of Hkv; values of keys that no row
        sees must be finite.
      mask: who sees whom. scale: of the scores. config: block sizes.

    Returns:
      (B, H, S, L, D) in the dtype of q, zero in rows that see no key, and log sum exp
      (B, H, S, L) float32, natural, `DEAD` in those rows.

    Raises:
      ValueError: VMEM cannot hold the keys and values of a head.
    """
    batch, heads, streams, length, dim = q.shape
    group = heads // k.shape[1]
    plan = _plan(q, k, mask, scale, config)
    rows, keys = plan.query_blocks * plan.bq, plan.key_blocks * plan.bk
    q, k, v = pad(q, 3, rows), pad(k, 2, keys), pad(v, 2, keys)
    blocks = [
        (q, (None, None, streams, plan.bq, dim), lambda b, n, g, i: (b, n * group + g, 0, i, 0)),
        (k, (None, None, keys, dim), lambda b, n, g, i: (b, n, 0, 0)),
        (v, (None, None, keys, dim), lambda b, n, g, i: (b, n, 0, 0)),
    ]
    tables = []
    if mask.kind == "interval":
        code, hi, lo = padded_vectors(mask, rows, keys)
        tables = tile_lists(code, hi, lo, plan.bq, plan.bk)
        spread = lambda x: jnp.broadcast_to(x[..., None], (*x.shape, LANES))
        own = lambda b: b if plan.batched else 0
        blocks.append((code[:, None], (None, 1, keys), lambda b, n, g, i: (own(b), 0, 0)))
        blocks.append(
            (spread(hi), (None, streams, plan.bq, LANES), lambda b, n, g, i: (own(b), 0, i, 0))
        )
        if lo is not None:
            blocks.append((spread(lo), (None, plan.bq, LANES), lambda b, n, g, i: (own(b), i, 0)))
    out = [
        (jax.ShapeDtypeStruct(q.shape, q.dtype), *blocks[0][1:]),
        (
            jax.ShapeDtypeStruct((batch, heads, streams, 1, rows), jnp.float32),
            (None, None, streams, 1, plan.bq),
            lambda b, n, g, i: (b, n * group + g, 0, 0, i),
        ),
    ]
    scratch = [((streams, plan.bq, columns), jnp.float32) for columns in (LANES, LANES, dim)]
    lowering.check_vmem(
        f"Attention over {keys} resident keys of size {dim}",
        lowering.vmem_bytes(
            [(tuple(n or 1 for n in shape), x.dtype) for x, shape, _ in blocks + out],
            scratch,
            4 * plan.rc * plan.bk * 4,
        ),
        config,
    )
    spec = lambda shape, index: pl.BlockSpec(shape, lambda *ids: index(*ids[:4]))
    o, lse = pl.pallas_call(
        functools.partial(_interval_kernel if tables else _causal_kernel, plan=plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tables),
            grid=(batch, k.shape[1], group, plan.query_blocks),
            in_specs=[spec(*b[1:]) for b in blocks],
            out_specs=[spec(*b[1:]) for b in out],
            scratch_shapes=[pltpu.VMEM(*s) for s in scratch],
        ),
        out_shape=[b[0] for b in out],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=config.vmem,
        ),
        cost_estimate=_cost(q, k, plan),
        interpret=lowering.interpret(config),
        name=f"fwd{mask.kind}",
    )(*tables, *(b[0] for b in blocks))
    return o[:, :, :, :length], lse[:, :, :, 0, :length]


def _plan(q: jax.Array, k: jax.Array, mask: IntervalMask, scale: float, config: AttentionConfig):
    causal = mask.kind == "causal"
    bq = config.step if causal else config.bq
    query_blocks = round_up(q.shape[3], bq) // bq
    # The keys before a block on the diagonal of a causal mask are a multiple of its rows.
    bk = _divisor(bq, config.bk) if causal else config.bk
    return Plan(
        streams=q.shape[2],
        bq=bq,
        bk=bk,
        cut=config.bk,
        rc=config.rc,
        ahead=config.ahead,
        unroll=config.unroll,
        ones=config.row_sum == "mxu" and q.shape[-1] <= LANES,
        scale2=scale / LN2,
        exact=q.dtype == jnp.float32,
        strict=mask.strict,
        query_blocks=query_blocks,
        key_blocks=query_blocks * bq // bk if causal else round_up(k.shape[2], bk) // bk,
        batched=not causal and mask.code.shape[0] > 1,
    )


def _divisor(size: int, most: int) -> int:
    """The largest multiple of 128 up to `most` that divides `size`."""
    return max(n for n in range(LANES, most + 1, LANES) if size % n == 0)


def _cost(q: jax.Array, k: jax.Array, plan: Plan) -> pl.CostEstimate:
    """Of all pairs, or half of them for a causal mask."""
    pairs = q.size // q.shape[-1] * k.shape[2] // (1 if plan.strict is None else 2)
    return pl.CostEstimate(
        flops=4 * pairs * q.shape[-1],
        transcendentals=pairs,
        bytes_accessed=2 * (q.size + k.size) * q.dtype.itemsize,
    )


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
    scores = lowering.product(refs.q[tile.at], k, NT, exact=plan.exact) * plan.scale2
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
    out = lowering.product(p, v, NN, exact=plan.exact)
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


def _causal_kernel(*refs: Any, plan: Plan) -> None:
    """The diagonal goes first: it needs the mask and is cut to what each chunk sees; all keys
    before it are seen by all rows."""
    refs, block = Refs(*refs), pl.program_id(3)

    def diagonal(stream, row, rows, key):
        keys = min(plan.cut, row + rows - key)
        offset = row - key - plan.strict[stream]
        index = functools.partial(lax.broadcasted_iota, jnp.int32, (rows, keys))
        seen = None if offset >= keys - 1 else lambda: index(1) - index(0) <= offset
        return Tile(stream, row, rows, _aligned(block * plan.bq + key), keys, key == 0, seen)

    run(
        [diagonal(*c, key) for c in plan.chunks for key in range(0, c[1] + c[2], plan.cut)],
        refs,
        plan,
    )
    if plan.query_blocks > 1:
        count = block * (plan.bq // plan.bk)
        before = lambda j: [Tile(*c, _aligned(j * plan.bk), plan.bk) for c in plan.chunks]
        _sweep(0, count >> plan.unroll - 1, before, refs, plan)
        _last_odd(count, before, refs, plan)
    finish(refs, plan)


def _interval_kernel(counts: Any, order: Any, *refs: Any, plan: Plan) -> None:
    """Works through the list of active key blocks, those first that need the mask: code (1, Lk),
    hi (S, bq, 128) and perhaps lo (bq, 128)."""
    (q, k, v, code, hi, *lo), refs = refs[:-5], refs[-5:]
    refs, block = Refs(q, k, v, *refs), pl.program_id(3)
    if plan.batched:
        block += pl.program_id(0) * plan.query_blocks
    masked, count = counts[2 * block], counts[2 * block + 1]

    def seen(key, stream, row, rows):
        codes, at = code[:, pl.ds(key, plan.bk)], pl.ds(row, rows)
        seen = codes <= lanes(hi[stream, at], plan.bk)
        for x in lo:
            seen &= codes >= lanes(x[at], plan.bk)
        return seen

    def floor(stream, row, rows):
        # Dead rows take part in tiles that all others see: nothing adds to so high a maximum.
        return jnp.where(hi[stream, pl.ds(row, rows)] == SEES_NOTHING, -DEAD, DEAD / 2)

    def tiles(place, first=False, mask=True):
        key = _aligned(order[block * plan.key_blocks + place] * plan.bk)
        bind = functools.partial
        return [
            Tile(*c, key, plan.bk, first, bind(seen, key, *c) if mask else None, bind(floor, *c))
            for c in plan.chunks
        ]

    @pl.when(count > 0)
    def _():
        run(tiles(0, first=True), refs, plan)
        loops = count - 1 >> plan.unroll - 1
        middle = jnp.minimum(jnp.maximum(masked - 1, 0) + plan.unroll - 1 >> plan.unroll - 1, loops)
        _sweep(0, middle, lambda t: tiles(t + 1), refs, plan)
        _sweep(middle, loops, lambda t: tiles(t + 1, mask=False), refs, plan)
        _last_odd(count - 1, lambda t: tiles(t + 1), refs, plan)
        finish(refs, plan)

    @pl.when(count == 0)
    def _():
        refs.o[...] = jnp.zeros(refs.o.shape, refs.o.dtype)
        refs.lse[...] = jnp.full(refs.lse.shape, DEAD, jnp.float32)


def _sweep(start: Any, stop: Any, tiles: Callable[[Any], list[Tile]], refs: Refs, plan: Plan):
    """Runs key blocks start..stop - 1, in units of `plan.unroll`."""
    n = plan.unroll

    def step(t, _):
        run([tile for u in range(n) for tile in tiles(t * n + u)], refs, plan)

    lax.fori_loop(start, stop, step, None)


def _last_odd(count: Any, tiles: Callable[[Any], list[Tile]], refs: Refs, plan: Plan) -> None:
    if plan.unroll == 2:
        pl.when(count & 1 == 1)(lambda: run(tiles(count - 1), refs, plan))


def _aligned(start: Any) -> Any:
    return pl.multiple_of(start, LANES)

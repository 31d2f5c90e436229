"""Backward of interval attention on TPU: one kernel, five products a tile, no [L, Lk] array.

Q, dO and dQ of a query head stay in VMEM while key blocks pass by. Score tiles are transposed
(keys on sublanes, queries on lanes), so that lse and delta of a query are rows that broadcast.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.blocks import active_tiles, hull, pad, padded_vectors, round_up
from pallas_kernels.config import AttentionConfig
from pallas_kernels.lowering import LANES, NN, NT, interpret, product
from pallas_kernels.masks import IntervalMask

CHUNK = 256  # queries of one stream whose scores are in flight at a time
TN = (((0,), (0,)), ((), ()))  # a.T @ b
TT = (((0,), (1,)), ((), ()))  # a.T @ b.T
LOG2_E = float(np.log2(np.e))


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a kernel knows when it is traced."""

    scale: float
    strict: tuple[bool, ...] | None  # of a causal mask
    streams: int
    rows: int  # queries of a stream, padded
    bq: int
    bk: int
    group: int  # query heads of a key head
    dq: str
    dkv: str
    exact: bool


@dataclasses.dataclass(frozen=True)
class Piece:
    """Scores of `rows` queries of one stream, from row `start`, with the first keys of a block."""

    stream: int
    start: jax.Array | int
    rows: int
    keys: int


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
    config: AttentionConfig,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of attention.

    Args:
      q, do: (B, H, S, L, D). k, v: (B, Hkv, Lk, D). All bfloat16 or float32.
      mask: who sees whom.
      lse2: (B, H, S, L) float32, base-2 log sum exp of the scores; 0 for a row that sees no key.
      delta: (B, H, S, L) float32, <out, do> less the cotangent of the (natural) lse.
      scale: of the scores.
      config: block sizes, dQ layout and VMEM limit.

    Returns:
      Gradients of q, k, v in their dtypes, accumulated in float32.
    """
    batch, heads, streams, length, dim = q.shape
    kv_heads, kv_length = k.shape[1:3]
    bq, bk = config.bwd_bq, config.bwd_bk
    causal = mask.kind == "causal"
    if causal:
        bq = math.gcd(bq, bk)  # the loop starts where a key block's diagonal ends
    rows = round_up(length, bk if causal else bq)
    keys = round_up(kv_length, bk)
    steps, group = keys // bk, heads // kv_heads
    plan = Plan(
        scale=scale,
        strict=mask.strict,
        streams=streams,
        rows=rows,
        bq=bq,
        bk=bk,
        group=group,
        dq=config.bwd_dq,
        dkv=getattr(config, "bwd_dkv", "tn"),
        exact=q.dtype == jnp.float32,
    )
    q, do = (pad(x, 3, rows) for x in (q, do))
    k, v = (pad(x, 2, keys) for x in (k, v))
    lse2, delta = (pad(x, 3, rows) for x in (lse2, delta))

    head = lambda b, h, g, j, *_: (b, h * group + g, 0, 0)
    resident = pl.BlockSpec((1, 1, streams, rows, dim), lambda *i: (*head(*i), 0))
    statistics = pl.BlockSpec((1, 1, streams, rows), head)
    key_block = pl.BlockSpec((1, 1, bk, dim), lambda b, h, g, j, *_: (b, h, j, 0))
    arrays = [q, do, lse2, delta, k, v]
    specs = [resident, resident, statistics, statistics, key_block, key_block]
    if plan.dq == "nt":
        arrays.append(k.swapaxes(2, 3))
        specs.append(pl.BlockSpec((1, 1, dim, bk), lambda b, h, g, j, *_: (b, h, 0, j)))
    prefetch = []
    if not causal:
        code, hi, lo = padded_vectors(mask, rows, keys)
        prefetch = [hull(active_tiles(code, hi, lo, bq, bk).swapaxes(1, 2))]
        example = lambda x, b: b if x.shape[0] > 1 else 0
        code = jnp.broadcast_to(code[..., None], (*code.shape, LANES))
        arrays += [code, hi]
        specs += [
            pl.BlockSpec((1, bk, LANES), lambda b, h, g, j, *_: (example(code, b), j, 0)),
            pl.BlockSpec((1, streams, rows), lambda b, *_: (example(hi, b), 0, 0)),
        ]
        if lo is not None:
            arrays.append(lo[:, None])
            specs.append(pl.BlockSpec((1, 1, rows), lambda b, *_: (example(lo, b), 0, 0)))

    # Until a group's last query head the output window stays on block 0 and nothing is written.
    kv_out = pl.BlockSpec(
        (1, 1, bk, dim), lambda b, h, g, j, *_: (b, h, jnp.where(g == group - 1, j, 0), 0)
    )
    q_out = resident
    if causal:
        q_out = pl.BlockSpec(
            (1, 1, streams, bk, dim), lambda b, h, g, j, *_: (b, h * group + g, 0, j, 0)
        )
    acc = lambda how, n: (dim, n) if how == "nt" else (n, dim)
    blocks = steps if group > 1 else 1
    scratch = [
        pltpu.VMEM((streams, *acc(plan.dq, rows)), jnp.float32),
        pltpu.VMEM((blocks, *acc(plan.dkv, bk)), jnp.float32),
        pltpu.VMEM((blocks, *acc(plan.dkv, bk)), jnp.float32),
    ]
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    dq, dk, dv = pl.pallas_call(
        functools.partial(_kernel, plan=plan, has_lo=not causal and lo is not None),
        out_shape=(shape(q), shape(k), shape(v)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetch),
            grid=(batch, kv_heads, group, steps),
            in_specs=specs,
            out_specs=(q_out, kv_out, kv_out),
            scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=config.vmem,
        ),
        interpret=interpret(config),
        name="bwdcausal" if causal else "bwdinterval",
    )(*prefetch, *arrays)
    return dq[:, :, :, :length], dk[:, :, :kv_length], dv[:, :, :kv_length]


def _kernel(*refs, plan: Plan, has_lo: bool) -> None:
    refs = list(refs)
    causal = plan.strict is not None
    hull_ref = None if causal else refs.pop(0)
    q, do, lse2, delta, k, v = refs[:6]
    del refs[:6]
    kt = refs.pop(0) if plan.dq == "nt" else None
    code, hi, lo = None, None, None
    if not causal:
        code, hi = refs[:2]
        del refs[:2]
        lo = refs.pop(0) if has_lo else None
    dq, dk, dv, dq_acc, dk_acc, dv_acc = refs
    bq, bk, rows, streams = plan.bq, plan.bk, plan.rows, plan.streams
    group, step = pl.program_id(2), pl.program_id(3)
    slot = step if plan.group > 1 else 0
    dot = functools.partial(product, exact=plan.exact)
    cast = lambda x: x.astype(q.dtype)
    c = plan.scale * LOG2_E

    def at(p: Piece):
        return pl.ds(
            p.start if isinstance(p.start, int) else pl.multiple_of(p.start, LANES), p.rows
        )

    def scores(p: Piece):
        """K Q^T and V dO^T."""
        return (
            dot(k[0, 0, : p.keys], q[0, 0, p.stream, at(p)], NT),
            dot(v[0, 0, : p.keys], do[0, 0, p.stream, at(p)], NT),
        )

    def accumulate(p: Piece, s, dp, visible):
        row = lambda ref: ref[0, 0, pl.ds(p.stream, 1), at(p)]
        w = jnp.exp2(s * c - row(lse2))
        if visible is not None:
            w = jnp.where(visible(p), w, 0.0)
        ds = cast(w * (dp - row(delta)))
        w = cast(w)
        for acc, left, right in ((dv_acc, w, do), (dk_acc, ds, q)):
            right = right[0, 0, p.stream, at(p)]
            if plan.dkv == "nt":
                acc[slot, :, : p.keys] += dot(right, left, TT)
            else:
                acc[slot, : p.keys] += dot(left, right, NN)
        if plan.dq == "nt":
            dq_acc[p.stream, :, at(p)] += dot(kt[0, 0, :, : p.keys], ds, NN)
        else:
            dq_acc[p.stream, at(p)] += dot(ds, k[0, 0, : p.keys], TN)

    def tile(pieces, visible):
        """Scores of a piece are issued before the softmax of the one before it."""
        ahead = scores(pieces[0])
        for n, piece in enumerate(pieces):
            s, dp = ahead
            if n + 1 < len(pieces):
                ahead = scores(pieces[n + 1])
            accumulate(piece, s, dp, visible)

    def whole(i):
        size = math.gcd(CHUNK, bq)
        return [Piece(s, i * bq + r, size, bk) for r in range(0, bq, size) for s in range(streams)]

    def by_limits(p: Piece):
        key = code[0, :, :]
        key = jnp.concatenate([key] * (p.rows // LANES), axis=1)
        seen = key <= hi[0, pl.ds(p.stream, 1), at(p)]
        return seen if lo is None else seen & (key >= lo[0, :, at(p)])

    def by_order(p: Piece):
        shape = (p.keys, p.rows)
        key = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
        row = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        return key - row <= p.start - step * bk - int(plan.strict[p.stream])

    @pl.when(step == 0)
    def _():
        dq_acc[...] = jnp.zeros_like(dq_acc)

    @pl.when(group == 0)
    def _():
        dk_acc[slot] = jnp.zeros(dk_acc.shape[1:], jnp.float32)
        dv_acc[slot] = jnp.zeros(dv_acc.shape[1:], jnp.float32)

    def finish(out, at_out, acc, factor, how):
        x = acc * factor if factor else acc
        out[at_out] = cast(x.T if how == "nt" else x)

    if causal:
        jax.lax.fori_loop(
            (step + 1) * (bk // bq), rows // bq, lambda i, _: tile(whole(i), None), None
        )
        size = math.gcd(CHUNK, bk)
        start = pl.multiple_of(step * bk, bk)
        tile(
            [
                Piece(s, start + r, size, r + size)
                for r in range(0, bk, size)
                for s in range(streams)
            ],
            by_order,
        )
        for s in range(streams):
            here = (s, slice(None), pl.ds(start, bk)) if plan.dq == "nt" else (s, pl.ds(start, bk))
            finish(dq, (0, 0, s), dq_acc[here], plan.scale, plan.dq)
    else:
        b = pl.program_id(0) if hull_ref.shape[0] > 1 else 0
        jax.lax.fori_loop(
            hull_ref[b, step, 0],
            hull_ref[b, step, 1],
            lambda i, _: tile(whole(i), by_limits),
            None,
        )

        @pl.when(step == pl.num_programs(3) - 1)
        def _():
            for s in range(streams):
                for r in range(0, rows, bq):
                    here = (s, slice(None), pl.ds(r, bq)) if plan.dq == "nt" else (s, pl.ds(r, bq))
                    finish(dq, (0, 0, s, pl.ds(r, bq)), dq_acc[here], plan.scale, plan.dq)

    @pl.when(group == plan.group - 1)
    def _():
        finish(dk, (0, 0), dk_acc[slot], plan.scale, plan.dkv)
        finish(dv, (0, 0), dv_acc[slot], None, plan.dkv)

"""Forward attention for TPUs: the keys of a head stay in VMEM while query blocks pass by.

Where VMEM does not hold them all, windows of keys pass by a query block instead.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import lowering
from pallas_kernels.blocks import pad, padded_vectors, round_up, tile_lists
from pallas_kernels.config import AttentionConfig, causal_step
from pallas_kernels.forward_kernels import causal_kernel, interval_kernel, spot
from pallas_kernels.forward_tiles import LN2, Plan
from pallas_kernels.lowering import LANES
from pallas_kernels.masks import IntervalMask


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: IntervalMask,
    *,
    scale: float,
    config: AttentionConfig,
) -> tuple[jax.Array, jax.Array]:
    """Attention with scores only in VMEM.

    Args:
      q: (B, H, S, L, D). k, v: (B, Hkv, Lk, D), H a multiple of Hkv; values of keys that no row
        sees must be finite.
      mask: who sees whom. scale: of the scores. config: block sizes.

    Returns:
      (B, H, S, L, D) in the dtype of q, zero in rows that see no key, and log sum exp
      (B, H, S, L) float32, natural, `DEAD` in those rows.

    Raises:
      ValueError: VMEM cannot hold one step.
    """
    batch, heads, streams, length, dim = q.shape
    group = heads // k.shape[1]
    plan = _plan(q, k, mask, scale, config)
    rows, keys = plan.query_blocks * plan.bq, plan.windows * plan.window
    arrays = dict(q=pad(q, 3, rows), k=pad(k, 2, keys), v=pad(v, 2, keys))
    tables = []
    if plan.strict is None:
        code, hi, lo = padded_vectors(mask, rows, keys)
        tables = tile_lists(code, hi, lo, plan.bq, plan.bk, plan.windows)
        spread = lambda x: jnp.broadcast_to(x[..., None], (*x.shape, LANES))
        arrays |= dict(code=code[:, None], hi=spread(hi))
        arrays |= {} if lo is None else dict(lo=spread(lo))

    def window(b, i, w, tables):
        return tables[2][spot(plan, b, i, w)] if plan.windows > 1 else 0

    own = lambda b: b if plan.batched else 0
    places = dict(
        q=lambda b, n, g, i, w, *_: (b, n * group + g, 0, i, 0),
        k=lambda b, n, g, i, w, *t: (b, n, window(b, i, w, t), 0),
        v=lambda b, n, g, i, w, *t: (b, n, window(b, i, w, t), 0),
        code=lambda b, n, g, i, w, *t: (own(b), 0, window(b, i, w, t)),
        hi=lambda b, n, g, i, w, *_: (own(b), 0, i, 0),
        lo=lambda b, n, g, i, w, *_: (own(b), i, 0),
        o=lambda b, n, g, i, w, *_: (b, n * group + g, 0, i, 0),
        lse=lambda b, n, g, i, w, *_: (b, n * group + g, 0, 0, i),
    )
    shapes = _shapes(plan, q)
    spec = lambda name: pl.BlockSpec(shapes[name][0], places[name])
    o, lse = pl.pallas_call(
        functools.partial(interval_kernel if tables else causal_kernel, plan=plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tables),
            grid=(batch, k.shape[1], group, plan.query_blocks, plan.windows),
            in_specs=[spec(name) for name in arrays],
            out_specs=[spec("o"), spec("lse")],
            scratch_shapes=[pltpu.VMEM(*s) for s in _scratch(plan, q)],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads, streams, rows, dim), q.dtype),
            jax.ShapeDtypeStruct((batch, heads, streams, 1, rows), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * 2 + ("arbitrary",) * 3,
            vmem_limit_bytes=config.vmem,
        ),
        cost_estimate=_cost(q, k, mask),
        interpret=lowering.interpret(config),
        name=f"fwd{mask.kind}" if plan.windows == 1 else "fwdstream",
    )(*tables, *arrays.values())
    return o[:, :, :, :length], lse[:, :, :, 0, :length]


def _plan(
    q: jax.Array, k: jax.Array, mask: IntervalMask, scale: float, config: AttentionConfig
) -> Plan:
    """The causal kernel if its keys fit into VMEM, else as few windows of keys as make them fit."""
    size = lambda rows: -(-q.shape[3] // rows)  # in blocks
    keys = round_up(k.shape[2], config.bk)
    plan = Plan(
        streams=q.shape[2],
        bq=config.bq,
        bk=config.bk,
        cut=config.bk,
        rc=config.rc,
        ahead=config.ahead,
        unroll=1 if q.dtype == jnp.float32 else config.unroll,  # long programs as they are
        ones=config.row_sum == "mxu" and q.shape[-1] <= LANES,
        scale2=scale / LN2,
        exact=q.dtype == jnp.float32,
        strict=None,
        batched=mask.kind == "interval" and mask.code.shape[0] > 1,
        query_blocks=size(config.bq),
        window=keys,
        windows=1,
    )
    plans = []
    if mask.kind == "causal":
        step = config.step
        if plan.exact:  # a long step of exact products takes a minute to compile
            step = causal_step(step, 2048 // plan.streams)
        rows = size(step) * step
        # The keys before a block on the diagonal are a multiple of its rows.
        fits = [n for n in range(LANES, config.bk + 1, LANES) if step % n == 0]
        changes = dict(bq=step, bk=max(fits), query_blocks=size(step), window=rows)
        plans = [dataclasses.replace(plan, strict=mask.strict, **changes)]
    for windows in range(1, keys // config.bk + 1):
        window = round_up(-(-keys // windows), config.bk)
        plans.append(dataclasses.replace(plan, window=window, windows=-(-keys // window)))
    for plan in plans:
        if (needed := _vmem_bytes(plan, q, mask)) <= config.vmem:
            return plan
    lowering.check_vmem(f"Attention of {plan.bq} rows and {plan.bk} keys a step", needed, config)


def _shapes(plan: Plan, q: jax.Array) -> dict[str, tuple[tuple[int | None, ...], jnp.dtype]]:
    """Shape and dtype of the block of every array."""
    rows, keys, dim = (plan.streams, plan.bq), plan.window, q.shape[-1]
    return dict(
        q=((None, None, *rows, dim), q.dtype),
        k=((None, None, keys, dim), q.dtype),
        v=((None, None, keys, dim), q.dtype),
        code=((None, 1, keys), jnp.int32),
        hi=((None, *rows, LANES), jnp.int32),
        lo=((None, plan.bq, LANES), jnp.int32),
        o=((None, None, *rows, dim), q.dtype),
        lse=((None, None, plan.streams, 1, plan.bq), jnp.float32),
    )


def _scratch(plan: Plan, q: jax.Array) -> list[tuple[tuple[int, ...], jnp.dtype]]:
    """Maximum, sum and accumulator of every row."""
    widths = (LANES, LANES, q.shape[-1])
    return [((plan.streams, plan.bq, width), jnp.float32) for width in widths]


def _vmem_bytes(plan: Plan, q: jax.Array, mask: IntervalMask) -> int:
    shapes = _shapes(plan, q)
    unused = ("code", "hi", "lo") if plan.strict else ("lo",) if mask.lo is None else ()
    blocks = [(tuple(n or 1 for n in s), t) for x, (s, t) in shapes.items() if x not in unused]
    # What the compiler takes for scores in flight; exact products split their operands, too.
    tiles = plan.streams * plan.bq * plan.cut * (6 if plan.exact else 4)
    return lowering.vmem_bytes(blocks, _scratch(plan, q), tiles)


def _cost(q: jax.Array, k: jax.Array, mask: IntervalMask) -> pl.CostEstimate:
    """Of all pairs, or half of them for a causal mask."""
    pairs = q.size // q.shape[-1] * k.shape[2] // (2 if mask.kind == "causal" else 1)
    return pl.CostEstimate(
        flops=4 * pairs * q.shape[-1],
        transcendentals=pairs,
        bytes_accessed=2 * (q.size + k.size) * q.dtype.itemsize,
    )

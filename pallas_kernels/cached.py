"""Attention over a key-value cache, for decoding: inference only.

The cache fills in generation order, so what a query may see is always a prefix of it, and blocks
past that are neither fetched nor computed. Several key heads make a step, so that blocks short
enough for short caches are transfers long enough to hide latencies: a step of bfloat16 takes
1242-1412 cycles against 2238-3840 for its transfer from HBM, 2070 against 2494 on 7x (heads of 128,
8 key heads; static schedule, not run on hardware).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.blocks import even_block, pad, round_up
from pallas_kernels.chips import CHIPS, MIB
from pallas_kernels.config import (
    DTYPES,
    HEAD_SIZES,
    AttentionConfig,
    current_generation,
    default_config,
)
from pallas_kernels.dense import dense_attention
from pallas_kernels.lowering import LANES, NN, NT, interpret, product
from pallas_kernels.masks import require
from pallas_kernels.reference import DEAD

CACHED_IMPLS = ("auto", "pallas", "xla_dense")
STEP = {"tpu7x": 4 * MIB}  # keys and values of a step, 2 MiB elsewhere
MIN_BLOCK = 512  # keys of one head in a step, at least
MAX_HEADS = 8  # key heads of a step, each unrolled
ROWS = 16  # query rows of a key head are padded to multiples of this
MAX_ROWS = 128
LOG2_E = float(np.log2(np.e))


def cached_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    lengths: jax.Array,
    *,
    q_limit: jax.Array | None = None,
    scale: float | None = None,
    impl: str = "auto",
    config: AttentionConfig | None = None,
) -> jax.Array:
    """Attention of T queries a row over the filled part of its cache; not differentiable.

    Args:
      q: (B, T, H, D).
      k_cache, v_cache: (B, Hkv, Smax, D), H a multiple of Hkv; of the dtype of q. What lies past
        the filled part, NaN included, changes nothing.
      lengths: (B,) int32 in [0, Smax], filled slots; checked where the values are known, and inside
        jit under `jax.experimental.checkify.checkify`.
      q_limit: (B, T) int32, query t of row b sees slots < min(q_limit[b, t], lengths[b]); default
        lengths.
      scale: of the scores, default D ** -0.5.
      impl: one of `CACHED_IMPLS`; "auto" is the Pallas kernel on TPU for heads of 128 and
        256, dense elsewhere.
      config: its `bk`, `vmem` and `interpret` are those of the Pallas kernel.

    Returns:
      (B, T, H, D) in the dtype of q; exactly zero for a query that sees no slot.
    """
    _check(q, k_cache, v_cache, lengths, q_limit, impl)
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    limits = jnp.broadcast_to(lengths[:, None], q.shape[:2])
    if q_limit is not None:
        limits = jnp.clip(q_limit, 0, limits)  # below 0 the kernel would fetch before the cache
    reason = _refusal(q, k_cache)
    if impl == "pallas" and reason:
        raise ValueError(f"Cached attention 'pallas' {reason}; use one of: auto, xla_dense.")
    pallas = functools.partial(_pallas, scale=scale, config=config)
    dense = functools.partial(_dense, scale=scale)
    args = q, k_cache, v_cache, limits
    if impl == "pallas":
        return pallas(*args)
    # XLA keeps narrow heads without padding to 128 lanes; for the kernel it would copy the cache.
    if impl == "xla_dense" or reason or q.shape[-1] < LANES:
        return dense(*args)
    return jax.lax.platform_dependent(*args, tpu=pallas, default=dense)


def _dense(q, k, v, limits, *, scale):
    slots = jnp.arange(k.shape[2], dtype=jnp.int32)
    seen = slots[None, None, :] < limits[:, :, None]
    # Zero times NaN is NaN.
    v = jnp.where(jnp.any(seen, axis=1)[:, None, :, None], v, jnp.zeros((), v.dtype))
    q = jnp.moveaxis(q, 2, 1)[:, :, None]
    out = dense_attention(q, k, v, seen[:, None], scale=scale)
    return jnp.moveaxis(out[:, :, 0], 1, 2)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the kernel knows when it is traced."""

    scale: float
    queries: int  # T
    group: int  # query heads of a key head; row t * group + g is head g of query t
    heads: int  # key heads of a step
    bk: int
    steps: int  # blocks of the whole cache
    exact: bool


def _plan(q, k, scale, config) -> tuple[Plan, AttentionConfig]:
    batch, kv_heads, slots, dim = k.shape
    generation = current_generation()
    step = STEP.get(generation, 2 * MIB)
    step //= 2 * max(dim, LANES) * q.dtype.itemsize  # now in keys times heads
    bk = config.bk if config else MIN_BLOCK
    # The cores of a device share the outer steps of the grid.
    cores = CHIPS[generation].cores_per_device
    fits = lambda n: n * bk <= step and kv_heads % n == 0 and batch * kv_heads // n >= cores
    heads = max(filter(fits, range(1, MAX_HEADS + 1)), default=1)
    if config is None:
        bk = even_block(slots, max(MIN_BLOCK, step // heads))
        config = default_config(1, ROWS, slots, bk=bk)
    plan = Plan(
        scale=scale,
        queries=q.shape[1],
        group=q.shape[2] // kv_heads,
        heads=heads,
        bk=bk,
        steps=-(-slots // bk),
        exact=q.dtype == jnp.float32,
    )
    return plan, config


def _pallas(q, k, v, limits, *, scale, config):
    plan, config = _plan(q, k, scale, config)
    batch, queries, _, dim = q.shape
    kv_heads, slots = k.shape[1:3]
    rows = round_up(queries * plan.group, ROWS)
    grouped = q.reshape(batch, queries, kv_heads, plan.group, dim).swapaxes(1, 2)
    grouped = pad(grouped.reshape(batch, kv_heads, queries * plan.group, dim), 2, rows)

    cache = pl.BlockSpec(
        (None, plan.heads, plan.bk, dim),
        lambda b, h, j, live, _: (b, h, fetched_block(live[b], j, plan.bk), 0),
    )
    per_head = pl.BlockSpec((None, plan.heads, rows, dim), lambda b, h, j, *_: (b, h, 0, 0))
    out = pl.pallas_call(
        functools.partial(_kernel, plan),
        name="cached",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, kv_heads // plan.heads, plan.steps),
            in_specs=[per_head, cache, cache],
            out_specs=per_head,
            scratch_shapes=[
                pltpu.VMEM((plan.heads, rows, LANES), jnp.float32),
                pltpu.VMEM((plan.heads, rows, LANES), jnp.float32),
                pltpu.VMEM((plan.heads, rows, dim), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(grouped.shape, q.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=config.vmem
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * q.size * slots,
            transcendentals=q.size // dim * slots,
            bytes_accessed=2 * q.nbytes + k.nbytes + v.nbytes,
        ),
        interpret=interpret(config),
    )(jnp.max(limits, axis=1), limits.reshape(-1), grouped, k, v)
    out = out[:, :, : queries * plan.group].reshape(batch, kv_heads, queries, plan.group, dim)
    return out.swapaxes(1, 2).reshape(q.shape)


def fetched_block(live: jax.Array, step: jax.Array, bk: int) -> jax.Array:
    """The block of keys of a step: past the last live one that one, which is not fetched again."""
    return jnp.minimum(step, jax.lax.div(live - 1, bk))


def _kernel(plan, live_ref, limits_ref, q_ref, k_ref, v_ref, o_ref, top_ref, total_ref, acc_ref):
    """One block of keys; live_ref (B,) and limits_ref (B * T,) int32 in SMEM, the rest in VMEM."""
    row, step = pl.program_id(0), pl.program_id(2)
    live, start = live_ref[row], step * plan.bk

    @pl.when(step == 0)
    def _():
        top_ref[...] = jnp.full_like(top_ref, DEAD)
        total_ref[...] = jnp.zeros_like(total_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    @pl.when(start < live)
    def _():
        # All score products first: a head's softmax hides behind the products of the others.
        products = [
            product(q_ref[head], k_ref[head], NT, exact=plan.exact) for head in range(plan.heads)
        ]
        seen = _slots(start, products[0].shape, 1) < _limit(plan, limits_ref, row, q_ref.shape[1])
        filled = _slots(start, v_ref.shape[1:], 0) < live
        for head, scores in enumerate(products):
            scores = jnp.where(seen, scores * (plan.scale * LOG2_E), DEAD)
            before = top_ref[head]
            top = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
            weights = jnp.exp2(scores - top[:, :1])
            kept = jnp.exp2(before - top)
            top_ref[head] = top
            total_ref[head] = kept * total_ref[head] + jnp.sum(weights, axis=1, keepdims=True)
            v = v_ref[head]
            v = jnp.where(filled, v, jnp.zeros_like(v))  # zero times NaN is NaN
            out = product(weights.astype(v.dtype), v, NN, exact=plan.exact)
            acc_ref[head] = kept[:, :1] * acc_ref[head] + out

    @pl.when(step == plan.steps - 1)
    def _():
        alive = top_ref[...] > DEAD / 2
        inverse = jnp.where(alive, 1.0 / jnp.where(alive, total_ref[...], 1.0), 0.0)
        o_ref[...] = (acc_ref[...] * inverse[..., :1]).astype(o_ref.dtype)


def _slots(start, shape, axis):
    return start + jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def _limit(plan, limits_ref, row, rows):
    """How many slots each row of a tile sees: a scalar for a single query, else (rows, 1)."""
    first = row * plan.queries
    limit = limits_ref[first]
    if plan.queries > 1:
        index = jax.lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
        for t in range(1, plan.queries):
            limit = jnp.where(index >= t * plan.group, limits_ref[first + t], limit)
    return limit


def _refusal(q, k_cache) -> str | None:
    """Says why the kernel cannot do this, or None."""
    if q.dtype not in DTYPES:
        return f"takes bfloat16 and float32, got {q.dtype}"
    if q.shape[-1] not in HEAD_SIZES:
        return f"takes heads of {', '.join(map(str, HEAD_SIZES))}, got {q.shape[-1]}"
    rows = q.shape[1] * q.shape[2] // k_cache.shape[1]
    if rows > MAX_ROWS:
        return f"takes at most {MAX_ROWS} query rows (T * H / Hkv) of a key head, got {rows}"
    return None


def _check(q, k_cache, v_cache, lengths, q_limit, impl) -> None:
    if impl not in CACHED_IMPLS:
        raise ValueError(
            f"Cached attention {impl!r} is unknown; use one of: {', '.join(CACHED_IMPLS)}."
        )
    shapes = f"{q.shape}, {k_cache.shape} and {v_cache.shape}"
    if q.ndim != 4 or k_cache.ndim != 4 or k_cache.shape != v_cache.shape:
        raise ValueError(
            f"Cached attention takes q (B,T,H,D) and caches (B,Hkv,Smax,D), got {shapes}."
        )
    batch, queries, heads, dim = q.shape
    if (batch, dim) != (k_cache.shape[0], k_cache.shape[3]) or heads % k_cache.shape[1]:
        raise ValueError(
            "Cached attention needs the same B and D in q (B,T,H,D) and caches (B,Hkv,Smax,D), and "
            f"H a multiple of Hkv, got {shapes}."
        )
    if not q.dtype == k_cache.dtype == v_cache.dtype:
        raise ValueError(
            f"Cached attention takes q and caches of one dtype, got {q.dtype}, {k_cache.dtype} and "
            f"{v_cache.dtype}; cast them."
        )
    for name, x, shape in (("lengths", lengths, (batch,)), ("q_limit", q_limit, (batch, queries))):
        if x is not None and (x.shape != shape or x.dtype != jnp.int32):
            raise ValueError(
                f"Cached attention takes {name} {shape} int32 here, got {x.shape} {x.dtype}."
            )
    slots = k_cache.shape[2]
    require(
        jnp.all((lengths >= 0) & (lengths <= slots)),
        f"Lengths of a cache of {slots} slots must lie in [0, {slots}].",
    )

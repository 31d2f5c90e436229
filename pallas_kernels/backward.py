"""Backward of interval attention on TPU: one kernel, five products a tile, no [L, Lk] array.

Q, dO and dQ of a query head stay in VMEM while blocks of keys pass by, so gradients are summed
there, in a fixed order.
"""

import itertools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.backward_tiles import Plan, Tiles, causal, interval
from pallas_kernels.blocks import active_tiles, hull, pad, padded_vectors, round_up
from pallas_kernels.config import AttentionConfig
from pallas_kernels.lowering import LANES, buffer_bytes, check_vmem, interpret
from pallas_kernels.masks import IntervalMask

KERNELS = {"causal": causal, "interval": interval}
INPUTS = ("q", "do", "k", "v", "lse2", "delta")


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
    partial: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of attention.

    Args:
      q, do: (B, H, S, L, D). k, v: (B, Hkv, Lk, D). All bfloat16 or all float32, and finite.
      mask: who sees whom.
      lse2: (B, H, S, L) float32, base-2 log sum exp of the scores; 0 for a row that sees no key.
      delta: (B, H, S, L) float32, <out, do> less the cotangent of the (natural) lse.
      scale: of the scores.
      config: block sizes, layout and VMEM limit.
      partial: leave dK and dV in float32, to be added to others.

    Returns:
      Gradients of q, k and v in their dtypes, accumulated in float32.

    Raises:
      ValueError: Q, dO and dQ of a head do not fit; `streaming_backward` cuts them to pieces.
    """
    plan = best_plan(q, k, mask, scale, config, partial)
    check_vmem("The backward of this many rows", vmem(plan, q.shape[-1], q.dtype), config)
    length, kv_length, keys = q.shape[3], k.shape[2], plan.steps * plan.bk
    q, do, lse2, delta = (pad(x, 3, plan.rows) for x in (q, do, lse2, delta))
    k, v = (pad(x, 2, keys) for x in (k, v))
    arrays, hulls = [q, do, k, v, lse2, delta], []
    if plan.kind == "interval":
        code, hi, lo = padded_vectors(mask, plan.rows, keys)
        hulls = [hull(active_tiles(code, hi, lo, plan.bq, plan.bk).swapaxes(1, 2))]
        batch = hulls[0].shape[0]  # vectors of one row are shared by all examples
        arrays += [jnp.broadcast_to(code[..., None], (batch, keys, LANES)), hi]
        arrays += [] if lo is None else [lo[:, None]]
    inputs, outputs, scratch = _blocks(plan, q.shape[-1])
    names = [*(["hull"] if hulls else []), *inputs, *outputs, *scratch]
    of_keys = jnp.float32 if partial else k.dtype
    dq, dk, dv = pl.pallas_call(
        lambda *refs: KERNELS[plan.kind](Tiles(plan, dict(zip(names, refs, strict=True)))),
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct(k.shape, of_keys),
            jax.ShapeDtypeStruct(v.shape, of_keys),
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(hulls),
            grid=(k.shape[0], k.shape[1], plan.group, plan.steps),
            in_specs=list(inputs.values()),
            out_specs=list(outputs.values()),
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch.values()],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=config.vmem,
        ),
        interpret=interpret(config),
        name=f"bwd{plan.kind}",
    )(*hulls, *arrays)
    return dq[:, :, :, :length], dk[:, :, :kv_length], dv[:, :, :kv_length]


def best_plan(
    q: jax.Array,
    k: jax.Array,
    mask: IntervalMask,
    scale: float,
    config: AttentionConfig,
    partial: bool = False,
) -> Plan:
    """The plan to be preferred among those that fit in VMEM, or the smallest one if none does."""
    dim, causal = q.shape[-1], mask.kind == "causal"
    size = config.bwd_step if causal else config.bwd_bk
    if q.dtype == jnp.float32:
        size = min(size, 512)  # a long step of exact products takes a minute to compile
    # Steps of 256 keys cost 1.5 times as much (v6e twice): better cut the rows, if there are many.
    sizes = [size, *(s for s in (512, 256) if s < size and (s == 512 or q.shape[3] <= 2048))]
    for bk, buffers in itertools.product(sizes, (2, 1)):
        # Behind the diagonal of a key block, a causal mask's loop starts with a whole query block.
        bq = (
            math.gcd(config.bwd_bq, bk)
            if causal
            else min(config.bwd_bq, round_up(q.shape[3], LANES))
        )
        vectors = [x for x in (mask.code, mask.hi, mask.lo) if x is not None]
        plan = Plan(
            kind=mask.kind,
            scale=scale,
            strict=mask.strict,
            lower=mask.lo is not None,
            shared=all(x.shape[0] == 1 for x in vectors),
            streams=q.shape[2],
            rows=round_up(q.shape[3], bk if causal else bq),
            bq=bq,
            bk=bk,
            steps=-(-k.shape[2] // bk),
            group=q.shape[1] // k.shape[1],
            chunk=math.gcd(config.bwd_rc, bk if causal else bq),
            wide=config.bwd_dq == "nt",
            exact=q.dtype == jnp.float32,
            buffers=buffers,
            partial=partial,
        )
        if vmem(plan, dim, q.dtype) <= config.vmem:
            break
    return plan


def vmem(plan: Plan, dim: int, dtype: jnp.dtype) -> int:
    """Bytes of VMEM a plan needs."""
    inputs, outputs, scratch = _blocks(plan, dim)
    types = {"lse2": jnp.float32, "delta": jnp.float32} | dict.fromkeys(("code", "hi", "lo"), "i4")
    if plan.partial:
        types |= {"dk": jnp.float32, "dv": jnp.float32}
    size = lambda name, spec: buffer_bytes(spec.block_shape, types.get(name, dtype))
    blocks = sum(2 * size(*x) for x in (inputs | outputs).items())
    blocks -= (2 - plan.buffers) * sum(size(name, inputs[name]) for name in ("q", "do"))
    # Spilled registers, per key: the most that the compilers' messages say (0.0.42, 0.0.52).
    kibi = {(False, False): 5.25, (False, True): 6.75, (True, False): 11, (True, True): 16}
    spilled = (kibi[plan.exact, dim > LANES] + (plan.kind == "interval")) * plan.bk * 1024
    return blocks + sum(buffer_bytes(s, jnp.float32) for s in scratch.values()) + int(spilled)


def _blocks(plan: Plan, dim: int) -> tuple[dict, dict, dict]:
    """Blocks of the inputs and outputs, and shapes of float32 scratch, by name."""
    group, streams, rows, bk = plan.group, plan.streams, plan.rows, plan.bk
    head = lambda b, h, g, j, *_: (b, h * group + g, 0, 0, 0)
    resident = pl.BlockSpec((1, 1, streams, rows, dim), head)
    once = pl.BlockSpec((1, 1, streams, rows, dim), head, pipeline_mode=pl.Buffered(plan.buffers))
    row = pl.BlockSpec((1, 1, streams, rows), lambda *i: head(*i)[:4])
    block = pl.BlockSpec((1, 1, bk, dim), lambda b, h, g, j, *_: (b, h, j, 0))
    inputs = dict(zip(INPUTS, (once, once, block, block, row, row), strict=True))
    # Until the last query head of a group the window stays on block 0, and nothing is written.
    last = lambda b, h, g, j, *_: (b, h, jnp.where(g == group - 1, j, 0), 0)
    of_keys = pl.BlockSpec((1, 1, bk, dim), last)
    if plan.kind == "causal":
        diagonal = lambda b, h, g, j, *_: (b, h * group + g, 0, j, 0)
        resident = pl.BlockSpec((1, 1, streams, bk, dim), diagonal)
    else:
        example = lambda b: 0 if plan.shared else b
        vector = lambda n: pl.BlockSpec((1, n, rows), lambda b, *_: (example(b), 0, 0))
        code = pl.BlockSpec((1, bk, LANES), lambda b, h, g, j, *_: (example(b), j, 0))
        inputs |= {"code": code, "hi": vector(streams)} | ({"lo": vector(1)} if plan.lower else {})
    outputs = {"dq": resident, "dk": of_keys, "dv": of_keys}
    slots = plan.steps if group > 1 else 1
    flip = lambda n: (dim, n) if plan.wide else (n, dim)
    scratch = {} if plan.whole else {"dq_acc": (streams, *flip(rows))}
    scratch |= {"dk_acc": (slots, bk, dim), "dv_acc": (slots, *flip(bk))}
    return inputs, outputs, scratch

"""Backward of sequences whose queries do not fit in VMEM: the resident kernel, part by part.

Gradients of the keys are sums over queries. So streams, heads of a group and runs of rows are cut
apart until one part fits, and dK and dV of the parts are added in float32. Against kernels that
stream blocks of queries this saves two of seven products, and costs a pass over dK and dV a part.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import backward as resident
from pallas_kernels.blocks import pad, round_up
from pallas_kernels.config import TILE, AttentionConfig
from pallas_kernels.masks import SEES_NOTHING, IntervalMask, vectors


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
    """As `pallas_kernels.backward.backward`, of any length."""
    options = dict(scale=scale, config=config)
    streams, rows = q.shape[2:4]
    if _fits(q, k, mask, config, partial):
        return resident.backward(q, k, v, mask, lse2, delta, do, **options, partial=partial)
    if streams > 1:
        config = dataclasses.replace(config, bwd_bq=config.bwd_bq * streams)  # as many rows a tile
        options, parts = dict(scale=scale, config=config), []
        for s in range(streams):
            of = lambda x, s=s: x[:, :, s : s + 1]
            parts.append(
                backward(
                    of(q),
                    k,
                    v,
                    _stream(mask, s),
                    of(lse2),
                    of(delta),
                    of(do),
                    **options,
                    partial=True,
                )
            )
        dq, dk, dv = zip(*parts, strict=True)
        dq, dk, dv = jnp.concatenate(dq, axis=2), sum(dk), sum(dv)
    else:
        dq, dk, dv = _by_parts(q, k, v, mask, lse2, delta, do, **options)
    return (dq, dk, dv) if partial else (dq, dk.astype(k.dtype), dv.astype(v.dtype))


def _stream(mask: IntervalMask, s: int) -> IntervalMask:
    if mask.kind == "causal":
        return dataclasses.replace(mask, strict=mask.strict[s : s + 1])
    return dataclasses.replace(mask, hi=mask.hi[:, s : s + 1])


def _fits(q, k, mask: IntervalMask, config: AttentionConfig, partial: bool) -> bool:
    plan = resident.best_plan(q, k, mask, 1.0, config, partial)
    return resident.vmem(plan, q.shape[-1], q.dtype) <= config.vmem


def _by_parts(q, k, v, mask, lse2, delta, do, *, scale, config):
    """dq and float32 dk and dv of one stream, whose heads and rows are cut apart."""
    batch, heads, _, length, dim = q.shape
    group = heads // k.shape[1]
    rows, part_mask = length, mask
    one = lambda: jax.ShapeDtypeStruct((batch, k.shape[1], 1, rows, dim), q.dtype)
    while rows > TILE and not _fits(one(), k, part_mask, config, True):
        rows = round_up(rows // 2, min(config.bwd_bq, max(TILE, rows // 2 // TILE * TILE)))
        part_mask = IntervalMask(*vectors(mask))  # a part of a triangle is none
    count = -(-length // rows)

    def cut(x: jax.Array) -> jax.Array:
        """(batch, heads, 1, length, ...) as (group * count, batch, kv_heads, 1, rows, ...)."""
        x = pad(x, 3, rows * count)
        x = x.reshape(batch, -1, group, 1, count, rows, *x.shape[4:])
        return jnp.moveaxis(x, (2, 4), (0, 1)).reshape(-1, *x.shape[:2], 1, rows, *x.shape[6:])

    def limits(x: jax.Array, value: int) -> jax.Array:
        """(batch, ..., length) as (group * count, batch, ..., rows)."""
        x = pad(jnp.asarray(x), x.ndim - 1, rows * count, value)
        x = jnp.moveaxis(x.reshape(*x.shape[:-1], count, rows), -2, 0)
        return jnp.tile(x, (group, *[1] * (x.ndim - 1)))

    parts = {"q": q, "lse2": lse2, "delta": delta, "do": do}
    parts = {name: cut(x) for name, x in parts.items()}
    if part_mask.kind == "interval":
        parts["hi"] = limits(part_mask.hi, SEES_NOTHING)
        parts |= {} if part_mask.lo is None else {"lo": limits(part_mask.lo, 0)}

    def add(sums, part):
        here = {name: part.pop(name) for name in ("hi", "lo") if name in part}
        grads = resident.backward(
            **part,
            k=k,
            v=v,
            mask=dataclasses.replace(part_mask, **here),
            scale=scale,
            config=config,
            partial=True,
        )
        # Fused with what takes its results, the kernel loses its VMEM limit (libtpu 0.0.42).
        dq, *terms = jax.lax.optimization_barrier(grads)
        return [total + term for total, term in zip(sums, terms, strict=True)], dq

    zeros = [jnp.zeros(x.shape, jnp.float32) for x in (k, v)]
    (dk, dv), dq = jax.lax.scan(add, zeros, parts)
    dq = dq.reshape(group, count, batch, -1, 1, rows, dim)
    dq = jnp.moveaxis(dq, (0, 1), (2, 4)).reshape(batch, heads, 1, -1, dim)
    return dq[:, :, :, :length], dk, dv

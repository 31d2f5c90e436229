"""Attention under a mesh: the compiler cannot partition a kernel, so each device calls its own."""

import math
from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec

from pallas_kernels.masks import IntervalMask


def shard_attention(
    fn: Callable,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    *,
    batch_axes: tuple[str, ...] = ("data", "fsdp"),
    head_axis: str = "model",
) -> Callable:
    """Returns `fn(q, k, v, mask)` split over a mesh: batch over `batch_axes`, heads over one axis.

    Args:
      fn: takes q (B, H, ...), k, v (B, Hkv, ...) and a mask, and returns one array or several of
        the axes (B, H, ...), as `interval_attention` does. It sees the rows and heads of a device.
      mesh: its axes must include those named; Hkv must divide over `head_axis`.
    """
    missing = [a for a in (*batch_axes, head_axis) if a not in mesh.axis_names]
    if missing:
        raise ValueError(
            f"shard_attention needs mesh axis {missing[0]!r}, the mesh has "
            f"{', '.join(mesh.axis_names)}; name its axes in batch_axes and head_axis."
        )
    rows, heads = math.prod(mesh.shape[a] for a in batch_axes), mesh.shape[head_axis]

    def sharded(q: jax.Array, k: jax.Array, v: jax.Array, mask: IntervalMask):
        for what, size, axes, parts in (
            ("batch", q.shape[0], " x ".join(batch_axes), rows),
            ("key head", k.shape[1], head_axis, heads),
        ):
            if size % parts:
                raise ValueError(
                    f"Attention with {what} size {size} does not divide over mesh axis {axes} of "
                    f"size {parts}; change one of them."
                )
        whole = PartitionSpec(batch_axes, head_axis)
        # A vector that is the same for the whole batch has one row, which every device holds.
        vector = lambda x: PartitionSpec(batch_axes if x.shape[0] == q.shape[0] else None)
        split = jax.shard_map(
            fn,
            mesh=mesh,
            in_specs=(whole, whole, whole, jax.tree.map(vector, mask)),
            out_specs=whole,
            check_vma=False,
        )
        return split(q, k, v, mask)

    return sharded

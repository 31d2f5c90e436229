"""Mesh, logical axis names, shardings of parameters and batches, constraints on activations.

Parameters and activations use different logical names because `embed` is sharded over `fsdp` as a
parameter and must not be as an activation, where the batch already uses that axis.
"""

from typing import Any

import flax.linen as nn
import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from aodiff.config import ConfigError

MESH_AXES = ("data", "fsdp", "model")

RULES = {  # logical axis -> mesh axes; None is unsharded
    "embed": "fsdp",
    "heads": "model",
    "head_dim": None,
    "mlp": "model",
    "vocab": "model",
    "layers": None,
    "batch": ("data", "fsdp"),
    "seq": None,
    "segment": None,
    "act_embed": None,
    "act_heads": "model",
    "act_mlp": "model",
    "act_vocab": "model",
}


def mesh_sizes(data: int, fsdp: int, model: int, count: int) -> tuple[int, int, int]:
    """Returns (data, fsdp, model) for `count` devices with the one -1 resolved, or raises."""
    sizes = [data, fsdp, model]
    given = dict(zip(MESH_AXES, sizes, strict=True))
    if sizes.count(-1) > 1 or any(s < 1 and s != -1 for s in sizes):
        raise ConfigError(f"Mesh {given} needs sizes of at least 1, at most one of them -1.")
    rest = 1
    for size in sizes:
        rest *= 1 if size == -1 else size
    if -1 in sizes and count % rest == 0:
        sizes[sizes.index(-1)] = count // rest
        rest = count
    if rest != count:
        raise ConfigError(
            f"Mesh {given} does not fit {count} devices; the product of its sizes must be "
            f"{count}, or set one of them to -1."
        )
    return tuple(sizes)


def make_mesh(data: int = 1, fsdp: int = -1, model: int = 1, devices=None) -> Mesh:
    """Returns a (data, fsdp, model) mesh over `devices` (default: all); one size may be -1."""
    devices = jax.devices() if devices is None else list(devices)
    sizes = mesh_sizes(data, fsdp, model, len(devices))
    # Large 2-D TPU tori reject narrow `model` axes unless physical axes may be split.
    grid = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * 3)


def spec_of(names: tuple[str | None, ...]) -> PartitionSpec:
    """Returns the PartitionSpec of logical `names`; an unknown name raises."""
    unknown = [n for n in names if n is not None and n not in RULES]
    if unknown:
        raise ConfigError(f"Unknown logical axis {unknown[0]!r}; use one of: {', '.join(RULES)}.")
    return PartitionSpec(*(None if n is None else RULES[n] for n in names))


def shard(x: jax.Array, *names: str | None) -> jax.Array:
    """Constrains activation `x` to its logical axes; without an active mesh a no-op."""
    spec = spec_of(names)
    if len(names) != x.ndim:
        raise ValueError(f"shard got {len(names)} names {names} for an array of shape {x.shape}.")
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, spec)


def check_divisible(
    what: str, shape: tuple[int, ...], names: tuple[str | None, ...], mesh: Mesh
) -> None:
    """Raises ConfigError if a dimension of `shape` does not split evenly over its mesh axes."""
    for dim, (size, name, axes) in enumerate(zip(shape, names, spec_of(names), strict=True)):
        axes = (axes,) if isinstance(axes, str) else axes or ()
        parts = 1
        for axis in axes:
            parts *= mesh.shape[axis]
        if size % parts:
            low, high = size // parts * parts, -(-size // parts) * parts
            near = f"{low} or {high}" if low else f"{high}"
            raise ConfigError(
                f"{what} dimension {dim} ({name}) of size {size} does not divide over mesh axis "
                f"{' x '.join(axes)} of size {parts}; the nearest sizes that work: {near}."
            )


def _is_boxed(x: Any) -> bool:
    return isinstance(x, nn.meta.AxisMetadata)


def param_names(boxed: Any) -> Any:
    """Returns the tree of logical names, one tuple a parameter; unboxed leaves get all None."""
    return jax.tree.map(
        lambda p: tuple(p.names) if _is_boxed(p) else (None,) * p.ndim, boxed, is_leaf=_is_boxed
    )


def param_shardings(boxed: Any, mesh: Mesh) -> Any:
    """Returns the NamedSharding of every parameter, after checking that all dimensions divide.

    Args:
      boxed: parameters, concrete or abstract, still boxed with their logical names.
      mesh: as `make_mesh` returns it.
    """

    def one(path, p):
        value = nn.meta.unbox(p)
        names = tuple(p.names) if _is_boxed(p) else (None,) * value.ndim
        where = "/".join(str(getattr(k, "key", getattr(k, "name", k))) for k in path)
        check_divisible(f"Parameter {where}", value.shape, names, mesh)
        return NamedSharding(mesh, spec_of(names))

    return jax.tree_util.tree_map_with_path(one, boxed, is_leaf=_is_boxed)


def unbox(boxed: Any) -> Any:
    """Strips the logical names; call it outside any mesh context when the values are abstract."""
    return nn.meta.unbox(boxed)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of every batch array: rows over data and fsdp, everything else whole."""
    return NamedSharding(mesh, spec_of(("batch",)))

"""Prints the resolved config, the parameter table with shardings, and what a batch holds.

  python -m aodiff.tools.show_config --config=configs/aogpt.py:owt_small [--devices=16]

No parameter is created and no data are read.
"""

import math
import sys
from typing import Any

import jax
from absl import app, flags
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from aodiff import config as config_lib
from aodiff import partitioning
from aodiff.main import SENTENCES, parse
from aodiff.train import Setup, set_up

_DEVICES = flags.DEFINE_integer("devices", None, "pretend to have so many; default: those attached")


def describe_mesh(mesh_config: Any, count: int) -> AbstractMesh:
    """The configured mesh over `count` devices that need not exist."""
    sizes = partitioning.mesh_sizes(mesh_config.data, mesh_config.fsdp, mesh_config.model, count)
    return AbstractMesh(sizes, partitioning.MESH_AXES, axis_types=(AxisType.Auto,) * 3)


def config_lines(config: Any) -> list[str]:
    """One line per key; a * marks what differs from the base config of the method."""
    values = config_lib.flatten(config)
    base = config_lib.flatten(config_lib.base(config.method.name))
    width = max(map(len, values))
    return [
        f"{' ' if key in base and base[key] == value else '*'} {key:{width}}  {value!r}"
        for key, value in values.items()
    ]


def parameter_rows(params: Any) -> list[tuple[str, str, int, str]]:
    """(name, shape, number of scalars, sharding) of every parameter of an abstract state."""
    rows = []
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        name = "/".join(str(getattr(k, "key", getattr(k, "name", k))) for k in path)
        rows.append((name, "x".join(map(str, x.shape)), math.prod(x.shape), _spec(x.sharding)))
    return rows


def _spec(sharding: NamedSharding) -> str:
    """Mesh axes by dimension; axes of size 1 do not cut anything and are left out."""
    sizes = dict(sharding.mesh.shape)
    parts = []
    for axes in sharding.spec:
        axes = (axes,) if isinstance(axes, str) else axes or ()
        parts.append("+".join(a for a in axes if sizes[a] > 1) or "-")
    return " ".join(parts) if set(parts) - {"-"} else "replicated"


def report(setup: Setup) -> str:
    """The three tables as text."""
    c = setup.config
    rows = parameter_rows(setup.abstract.params)
    total = sum(count for _, _, count, _ in rows)
    rows.append(("total", "", total, " ".join(f"{k}={v}" for k, v in setup.mesh.shape.items())))
    name, shape = (max(len(row[i]) for row in rows) for i in (0, 1))
    lines = ["config (* differs from the base)", *config_lines(c), "", "parameters"]
    lines += [f"  {n:{name}}  {s:{shape}}  {k:>15,}  {where}" for n, s, k, where in rows]
    lines += ["", f"batch of {c.train.global_batch} rows"]
    for key, x in setup.method.batch_spec(c.train.global_batch).items():
        lines.append(f"  {key:12} {'x'.join(map(str, x.shape)):12} {x.dtype}  rows over data+fsdp")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    del argv
    try:
        config = flags.FLAGS.config
        count = _DEVICES.value or jax.device_count()
        print(report(set_up(config, mesh=describe_mesh(config.mesh, count))))
    except SENTENCES as error:
        sys.exit(f"{error}")


if __name__ == "__main__":
    flags.mark_flag_as_required("config")
    app.run(main, flags_parser=parse)

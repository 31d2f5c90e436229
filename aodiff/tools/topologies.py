"""TPU slices by name: generations, sizes, and a device mesh for a slice that is not attached.

Memory per device is what libtpu's compiler allows (read from its out-of-memory messages, libtpu
0.0.52); peak rates are the vendor's bfloat16 figures per device.
"""

import dataclasses
import math
import re

import numpy as np
from jax.experimental import mesh_utils, topologies
from jax.sharding import AxisType, Mesh

from aodiff.config import ConfigError
from aodiff.partitioning import MESH_AXES, mesh_sizes


@dataclasses.dataclass(frozen=True)
class Generation:
    """One TPU generation, per JAX device (v4 and tpu7x expose two devices per chip)."""

    hbm_gib: float  # usable by a program
    peak_tflops: float  # bfloat16
    devices_per_chip: int
    cores_in_name: int  # what the number of an accelerator type counts, per chip
    dims: int  # torus dimensions of a topology string


GENERATIONS = {
    "v4": Generation(15.25, 137.5, devices_per_chip=2, cores_in_name=2, dims=3),
    "v5e": Generation(15.75, 197.0, devices_per_chip=1, cores_in_name=1, dims=2),
    "v5p": Generation(95.73, 459.0, devices_per_chip=1, cores_in_name=2, dims=3),
    "v6e": Generation(31.24, 918.0, devices_per_chip=1, cores_in_name=1, dims=2),
    "tpu7x": Generation(94.74, 1153.5, devices_per_chip=2, cores_in_name=2, dims=3),
}
ALIASES = {"v5litepod": "v5e", "v5lite": "v5e", "v7x": "tpu7x"}
EXAMPLES = "v5e:4x4, v6e:16x16, v5p:2x2x2, v4:2x2x2, tpu7x:2x2x1, or a type like v6e-16"


@dataclasses.dataclass(frozen=True)
class Slice:
    """A parsed topology: `name` is what libtpu understands, e.g. v5e:4x4."""

    generation: str
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.generation}:{'x'.join(map(str, self.shape))}"

    @property
    def spec(self) -> Generation:
        return GENERATIONS[self.generation]

    @property
    def num_devices(self) -> int:
        return math.prod(self.shape) * self.spec.devices_per_chip


def parse(text: str) -> Slice:
    """Parses "v5e:4x4" or an accelerator type such as "v6e-16" or "v5p-8" (which counts cores).

    Raises:
      ConfigError: an unknown generation, a malformed size, or a size no slice has.
    """
    match = re.fullmatch(r"([a-z0-9]+?)(?::(\d+(?:x\d+)+)|-(\d+))", text.strip().lower())
    generation = ALIASES.get(match[1], match[1]) if match else None
    if generation not in GENERATIONS:
        raise ConfigError(f"Unknown TPU topology {text!r}; use one like {EXAMPLES}.")
    spec = GENERATIONS[generation]
    if match[2]:
        shape = tuple(int(d) for d in match[2].split("x"))
        if len(shape) != spec.dims or not all(shape):
            raise ConfigError(
                f"Topology {text!r} has {len(shape)} dimensions; "
                f"a {generation} slice has {spec.dims} positive ones: use one like {EXAMPLES}."
            )
        return Slice(generation, shape)
    chips, rest = divmod(int(match[3]), spec.cores_in_name)
    smallest = (1, 1) if spec.dims == 2 else (2, 2, 1)
    if rest or chips & (chips - 1) or chips < math.prod(smallest):
        raise ConfigError(
            f"{text!r} is not a whole slice: the number of a {generation} type counts "
            f"{'cores, two per chip' if spec.cores_in_name == 2 else 'chips'}, a power of two; "
            f"use one like {EXAMPLES}."
        )
    return Slice(generation, _grow(smallest, chips))


def _grow(shape: tuple[int, ...], chips: int) -> tuple[int, ...]:
    """Doubles the last smallest side until `chips` is reached: 4x4, 4x8, 8x8; 2x2x2, 2x2x4, ..."""
    sides = list(shape)
    while math.prod(sides) < chips:
        smallest = min(sides)
        last = len(sides) - 1 - sides[::-1].index(smallest)
        sides[last] *= 2
    return tuple(sides)


def devices(slice_: Slice, num_slices: int = 1) -> list:
    """Returns the described (not attached) devices of `num_slices` equal slices.

    Raises:
      ConfigError: libtpu is absent or refuses the size.
    """
    kwargs = {"num_slices": num_slices} if num_slices > 1 else {}
    try:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=slice_.name, **kwargs)
    except ImportError as error:
        raise ConfigError(MISSING) from error
    except Exception as error:  # jaxlib has no narrower type for a refused topology
        text = " ".join(str(error).split())
        if "not installed" in text:
            raise ConfigError(MISSING) from error
        raise ConfigError(
            f"libtpu refuses topology {slice_.name!r} ({text[:160]}); use one like {EXAMPLES}."
        ) from error
    return list(topology.devices)


MISSING = (
    "Compiling for a TPU needs libtpu, which is not installed; run: pip install 'aodiff[tpu]' "
    "(a checkout: pip install -e '.[tpu]')."
)


def make_mesh(flat: list, sizes: tuple[int, int, int], num_slices: int = 1) -> Mesh:
    """Arranges described devices as (data, fsdp, model); `data` spans the slices.

    Args:
      flat: what `devices` returned.
      sizes: as configured, one of them may be -1.
      num_slices: number of equal slices in `flat`.
    """
    data, fsdp, model = sizes = mesh_sizes(*sizes, len(flat))
    if data % num_slices:
        raise ConfigError(
            f"mesh.data is {data} for {num_slices} slices; make it a multiple of the number of "
            f"slices, e.g. --config.mesh.data={num_slices}."
        )
    if flat[0].device_kind == "TPU v4":  # two devices per chip, which mesh_utils refuses
        grid = np.array(flat).reshape(sizes)
    elif num_slices > 1:
        grid = mesh_utils.create_hybrid_device_mesh(
            (data // num_slices, fsdp, model),
            (num_slices, 1, 1),
            flat,
            allow_split_physical_axes=True,
        )
    else:
        grid = mesh_utils.create_device_mesh(sizes, flat, allow_split_physical_axes=True)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * 3)

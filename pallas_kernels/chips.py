"""TPU generations: the figures kernels and their cost models need, per TensorCore.

Peaks, bandwidths and core counts are the vendor's (v4, v6e and 7x bandwidths: JAX's Pallas TPU
hardware table); usable VMEM, the MXU's rows per cycle and the delay slots are what the compiler's
schedules say (libtpu 0.0.52); the clock is peak / MXU work per cycle, for v4 the published one.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Chip:
    """One generation."""

    name: str
    topology: str  # the smallest one libtpu describes
    device_kinds: tuple[str, ...]  # what jax.Device.device_kind says
    cores: int  # TensorCores per chip
    cores_per_device: int  # of one JAX device
    clock_ghz: float
    mxus: int  # per core
    mxu_width: int
    mxu_rows: int  # rows a MXU takes per cycle, bfloat16
    delay_slots: int  # cycles of a schedule that still run after a branch is taken
    vmem_bytes: int  # usable, per core
    hbm_gbps: float  # GB/s per chip
    peak_tflops: float  # bfloat16, per chip

    @property
    def core_hbm_gbps(self) -> float:
        """HBM bandwidth of one core's share."""
        return self.hbm_gbps / self.cores

    def mxu_cycles(self, rows: int, depth: int, columns: int) -> float:
        """Cycles of a (rows, depth) x (depth, columns) product with every MXU of a core busy."""
        tiles = -(-depth // self.mxu_width) * -(-columns // self.mxu_width)
        return rows * tiles / (self.mxus * self.mxu_rows)


MIB = 2**20

CHIPS = {
    "v4": Chip(
        name="v4",
        topology="v4:2x2x1",
        device_kinds=("TPU v4",),
        cores=2,
        cores_per_device=1,
        clock_ghz=1.05,
        mxus=4,
        mxu_width=128,
        mxu_rows=1,
        delay_slots=1,
        vmem_bytes=16 * MIB,
        hbm_gbps=1230.0,
        peak_tflops=275.0,
    ),
    "v5e": Chip(
        name="v5e",
        topology="v5e:2x2x1",
        device_kinds=("TPU v5 lite", "TPU v5e"),
        cores=1,
        cores_per_device=1,
        clock_ghz=1.5,
        mxus=4,
        mxu_width=128,
        mxu_rows=1,
        delay_slots=4,
        vmem_bytes=128 * MIB,
        hbm_gbps=819.0,
        peak_tflops=197.0,
    ),
    "v5p": Chip(
        name="v5p",
        topology="v5p:2x2x1",
        device_kinds=("TPU v5", "TPU v5p"),
        cores=2,
        cores_per_device=2,
        clock_ghz=1.75,
        mxus=4,
        mxu_width=128,
        mxu_rows=1,
        delay_slots=4,
        vmem_bytes=64 * MIB,
        hbm_gbps=2765.0,
        peak_tflops=459.0,
    ),
    "v6e": Chip(
        name="v6e",
        topology="v6e:2x2",
        device_kinds=("TPU v6 lite", "TPU v6e"),
        cores=1,
        cores_per_device=1,
        clock_ghz=1.75,
        mxus=2,
        mxu_width=256,
        mxu_rows=2,
        delay_slots=4,
        vmem_bytes=128 * MIB,
        hbm_gbps=1640.0,
        peak_tflops=918.0,
    ),
    "tpu7x": Chip(
        name="tpu7x",
        topology="tpu7x:2x2x1",
        device_kinds=("TPU7x", "TPU v7x", "TPU v7"),
        cores=2,
        cores_per_device=1,
        clock_ghz=2.2,
        mxus=2,
        mxu_width=256,
        mxu_rows=2,
        delay_slots=6,
        vmem_bytes=64 * MIB,
        hbm_gbps=7400.0,
        peak_tflops=2307.0,
    ),
}


def generation_of(device_kind: str) -> str | None:
    """Returns the generation's name of a JAX device kind such as "TPU v5 lite", or None."""
    return next((c.name for c in CHIPS.values() if device_kind in c.device_kinds), None)

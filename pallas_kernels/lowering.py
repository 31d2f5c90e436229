"""What every kernel shares: products, how to run without a TPU, and VMEM arithmetic."""

import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.blocks import round_up
from pallas_kernels.chips import MIB
from pallas_kernels.config import AttentionConfig

LANES = 128
NT = (((1,), (1,)), ((), ()))  # a @ b.T
NN = (((1,), (0,)), ((), ()))  # a @ b


def interpret(config: AttentionConfig) -> bool | pltpu.InterpretParams:
    """The `interpret` argument of a pallas_call."""
    if config.interpret != "tpu":
        return config.interpret
    # Two cores share the parallel grid dimensions: one alone could not race.
    return pltpu.InterpretParams(
        detect_races=True,
        out_of_bounds_reads="raise",
        uninitialized_memory="nan",
        num_cores_or_threads=2,
    )


def product(a: jax.Array, b: jax.Array, dims: tuple, *, exact: bool) -> jax.Array:
    """dot_general in float32; a TPU rounds operands to bfloat16 unless `exact`."""
    precision = jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(a, b, dims, precision, preferred_element_type=jnp.float32)


def buffer_bytes(shape: tuple[int, ...], dtype: jnp.dtype) -> int:
    """VMEM of one buffer: the last two dimensions are padded to whole (8, 128) tiles of 4 bytes."""
    size = jnp.dtype(dtype).itemsize
    rows, columns = (1, *shape)[-2:]
    padded = round_up(rows, 32 // size) if rows > 1 else 1
    return math.prod(shape[:-2]) * padded * round_up(columns, LANES) * size


def vmem_bytes(
    blocks: Iterable[tuple[tuple[int, ...], jnp.dtype]],
    scratch: Iterable[tuple[tuple[int, ...], jnp.dtype]],
    values: int,
) -> int:
    """VMEM of a kernel: every block twice (one is fetched meanwhile), scratch, `values` bytes of
    tiles that do not fit the registers."""
    return (
        2 * sum(buffer_bytes(*b) for b in blocks) + sum(buffer_bytes(*s) for s in scratch) + values
    )


def check_vmem(what: str, needed: int, config: AttentionConfig) -> None:
    """Raises ValueError if `needed` bytes exceed what the configuration allows."""
    if needed > config.vmem:
        raise ValueError(
            f"{what} needs {needed / MIB:.1f} MiB of VMEM, the kernels may use "
            f"{config.vmem / MIB:.1f} MiB; use smaller blocks."
        )

"""Block sizes of the kernels, by TPU generation (static schedules; kernels.md section 7)."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.blocks import round_up
from pallas_kernels.chips import CHIPS, generation_of

HEAD_SIZES = (64, 128, 256)  # what the kernels take; other sizes are padded up to the next
DTYPES = (jnp.bfloat16, jnp.float32)
TILE = 128  # block sizes are multiples of this, the lanes of a register
MIN_LENGTH = 256  # shorter sequences: dense scores are as fast
CHOICES = {  # allowed values of fields of AttentionConfig
    "unroll": (1, 2),
    "row_sum": ("vector", "mxu"),
    "bwd_dq": ("tn", "nt"),
    "interpret": (False, True, "tpu"),
}


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Sizes are rows or keys. Everything else about a kernel follows from shapes and mask.

    bq: query rows of one stream in a forward step. bk: keys of a forward tile.
    step: rows of one stream in a step of the causal forward. rc: rows of a chunk of a tile.
    ahead: score products issued before the softmax of a chunk. unroll: key blocks per loop
    iteration. row_sum: "mxu" has it sum rows, by ones next to the values, if it has columns to
    spare.
    bwd_bq, bwd_bk: the same for the backward. bwd_dq: "nt" accumulates dQ and dV transposed.
    bwd_step: keys of a step of the causal backward. bwd_rc: queries of a chunk of a masked tile.
    vmem: bytes the kernels may use. interpret: run on CPU, True plainly, "tpu" simulating the
    memories of a TPU and reporting races, reads out of bounds and of uninitialised memory.
    """

    bq: int
    bk: int
    step: int
    rc: int
    ahead: int
    unroll: Literal[1, 2]
    row_sum: Literal["vector", "mxu"]
    bwd_bq: int
    bwd_bk: int
    bwd_dq: Literal["tn", "nt"]
    bwd_step: int
    bwd_rc: int
    vmem: int
    interpret: bool | Literal["tpu"] = False

    def __post_init__(self) -> None:
        for name in ("bq", "bk", "step", "rc", "bwd_bq", "bwd_bk", "bwd_step", "bwd_rc"):
            if (size := getattr(self, name)) < TILE or size % TILE:
                raise ValueError(f"Block size {name} must be a multiple of {TILE}, got {size}.")
        for name, allowed in CHOICES.items():
            if (choice := getattr(self, name)) not in allowed:
                listed = ", ".join(map(repr, allowed))
                raise ValueError(f"Configuration {name} must be one of {listed}, got {choice!r}.")


def current_generation() -> str:
    """The generation compiled for: of the mesh in scope or of the default device, else v5p."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    kind = described.device_kind if described is not None else jax.devices()[0].device_kind
    return generation_of(kind) or "v5p"


def default_config(
    streams: int, rows: int, keys: int, *, generation: str | None = None, **changes
) -> AttentionConfig:
    """The best known blocks for `rows` queries per stream and `keys` keys.

    Args:
      generation: a name of `CHIPS`, default `current_generation()`.
      changes: fields of AttentionConfig to set otherwise.
    """
    generation = generation or current_generation()
    if generation not in CHIPS:
        raise ValueError(
            f"TPU generation {generation!r} is unknown; use one of: {', '.join(CHIPS)}."
        )
    wide = generation in ("v6e", "tpu7x")
    bq = min(max(1024 // streams // TILE, 1) * TILE, round_up(rows, TILE))
    bk = min(512, round_up(keys, TILE))
    most = (1024 if generation == "v4" else 2048) // streams
    if wide and streams <= 2 and rows <= 2048:
        most = 2048  # no loop: 10-18 % fewer cycles, for about twice the time to compile
    config = AttentionConfig(
        bq=bq,
        bk=bk,
        step=causal_step(rows, most),
        rc=256,
        ahead=3 if wide else 0,
        unroll=2 if wide else 1,
        row_sum="mxu" if wide else "vector",
        bwd_bq=_even(rows, max(1024 // streams, 256) if wide else 512),
        bwd_bk=bk,
        bwd_dq="nt" if wide else "tn",
        bwd_step=_even(keys, 1024),
        bwd_rc=256 if wide else 128,
        vmem=CHIPS[generation].vmem_bytes * (31 if generation == "v4" else 24) // 32,
    )
    return dataclasses.replace(config, **changes)


def causal_step(rows: int, most: int) -> int:
    """The step of at most `most` that pads `rows` least, at the price of about 64 rows a step.

    Multiples of 256 or 384, so that large blocks of keys divide it, or all rows at once.
    """
    if rows <= most:
        return round_up(rows, TILE)
    sizes = [n for n in range(2 * TILE, most + 1, TILE) if n % 256 == 0 or n % 384 == 0]
    return min(sizes or [TILE], key=lambda n: -(-rows // n) * (n + 64))


def _even(size: int, most: int) -> int:
    """The block of at most `most` that pads `size` least: a multiple of 256, or of 128 if alone."""
    blocks = -(-size // most)
    return round_up(-(-size // blocks), 128 if blocks == 1 else 256)

"""The shape of a masked diffusion model and what its forward passes cost."""

import dataclasses

import jax
import numpy as np

from aodiff.nn.layers import EPSILON, ROPE_BASE
from aodiff.nn.transformer import REMAT
from pallas_kernels import IMPLS, refusal, segment_mask

MLPS = ("swiglu", "gelu", "gelu_tanh")
NORMS = ("rms", "layer")
POSITIONS = ("rope", "learned", "grid")


@dataclasses.dataclass(frozen=True)
class MDMConfig:
    """Shape of a masked diffusion model.

    Attributes:
      vocab_size: ids 0 .. vocab_size - 1 may be emitted; the others never are.
      mask_id: None is `vocab_size`, an id of its own.
      table_size: rows of the embedding; None is enough of them, rounded up to 128.
      mlp: "swiglu" (three matrices), "gelu" (two) or "gelu_tanh" (two with biases, as GPT-2 has),
        `mlp_dim` wide.
      position: "rope", "learned" (a table added to the tokens), or "grid" (one table for each of
        the labellings `groups`, such as the rows, columns and boxes of a Sudoku).
      norm: "rms", or "layer" with a bias.
      head_bias: the logits have a bias; not with a tied head or `unit_sizes`.
      shift: logits of position i are read at i - 1, as models that were autoregressive once do.
      unit_sizes: number of ids of each position, when positions differ; also one head each.
    """

    vocab_size: int
    seq_len: int
    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int | None = None
    mlp: str = "swiglu"
    mlp_dim: int | None = None
    position: str = "learned"
    groups: tuple[tuple[int, ...], ...] = ()
    rope_base: float = ROPE_BASE
    norm: str = "rms"
    norm_epsilon: float = EPSILON
    qkv_bias: bool = False
    qk_norm: bool = False
    tied_head: bool = False
    head_bias: bool = False
    shift: bool = False
    mask_id: int | None = None
    table_size: int | None = None
    unit_sizes: tuple[int, ...] | None = None
    dtype: str = "float32"
    remat: str = "none"
    attention: str = "auto"
    kernel_std: float = 0.02

    def __post_init__(self):
        for name, allowed in (
            ("mlp", MLPS),
            ("norm", NORMS),
            ("position", POSITIONS),
            ("remat", REMAT),
            ("attention", IMPLS),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"model.{name}={getattr(self, name)!r} is unknown; use one of: "
                    f"{', '.join(allowed)}."
                )
        if self.width % self.num_heads or (self.position == "rope" and self.head_dim % 2):
            raise ValueError(
                f"Width {self.width} with {self.num_heads} heads does not give whole even head "
                "sizes; change one of them."
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is no multiple of num_kv_heads={self.kv_heads}; "
                "change one of them."
            )
        if not 0 <= self.mask < self.rows:
            raise ValueError(
                f"mask id {self.mask} is outside the embedding table of {self.rows} rows; it must "
                "lie inside."
            )
        if self.unit_sizes is not None and (self.tied_head or len(self.unit_sizes) != self.seq_len):
            raise ValueError(
                f"unit_sizes needs one size for each of the {self.seq_len} positions and an untied "
                f"head, got {len(self.unit_sizes)} sizes and tied_head={self.tied_head}."
            )
        if self.head_bias and (self.tied_head or self.unit_sizes is not None):
            raise ValueError(
                "head_bias=True needs a head of its own for all positions; drop it, tied_head and "
                "unit_sizes."
            )
        if (self.position == "grid") != bool(self.groups):
            raise ValueError(
                f"model.position={self.position!r} with {len(self.groups)} labellings of the "
                'positions; position="grid" is for boards, use "learned" or "rope" elsewhere.'
            )
        k = jax.ShapeDtypeStruct((1, self.kv_heads, self.seq_len, self.head_dim), self.dtype)
        q = k.update(shape=(1, self.num_heads, 1, self.seq_len, self.head_dim))
        mask = segment_mask(np.zeros((1, self.seq_len), np.int32))
        if reason := refusal(self.attention, q, k, mask):
            raise ValueError(f"model.attention: {reason}")

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def hidden(self) -> int:
        return self.mlp_dim or 4 * self.width

    @property
    def mask(self) -> int:
        return self.vocab_size if self.mask_id is None else self.mask_id

    @property
    def rows(self) -> int:
        """Rows of the embedding table."""
        enough = max(self.vocab_size, self.mask + 1 if self.mask_id is None else 0)
        return self.table_size or -(-enough // 128) * 128

    @property
    def logits_size(self) -> int:
        return self.rows if self.unit_sizes is None else max(self.unit_sizes)


def forward_flops(cfg: MDMConfig, widths: float, squares: float) -> float:
    """2 FLOPs per multiply-add of forward passes, from the sums of their lengths and squares."""
    d, kv = cfg.width, cfg.kv_heads * cfg.head_dim
    mlp = (3 if cfg.mlp == "swiglu" else 2) * d * cfg.hidden
    kernels = cfg.num_layers * (2 * d * d + 2 * d * kv + mlp) + d * cfg.logits_size
    return 2.0 * (kernels * widths + cfg.num_layers * 2 * d * squares)


def forward_flops_per_token(cfg: MDMConfig) -> float:
    """FLOPs per position of one forward pass over a full row; attention reads all of it."""
    return forward_flops(cfg, 1, cfg.seq_len)

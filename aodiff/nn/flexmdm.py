"""The transformer of masked diffusion with insertion: what stands under the masks of a row, and how
many tokens are missing behind each of its tokens.

A row begins with an anchor and has its own length; what comes after is invisible. The share of
tokens that have come, not the time, modulates every block: the answers depend on nothing else, so
one model serves all schedules (flexmdm.md 2.4). Source: Kim et al. (FlexMDM), arXiv 2509.01025;
flexmdm.md section 4.1.
"""

import dataclasses

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from aodiff.core.insertion import class_log_mean
from aodiff.nn.attention import on_each_device
from aodiff.nn.layers import (
    Linear,
    Norm,
    along_last,
    lookup,
    matmul,
    normal_init,
    param,
    rotary,
    rotate,
)
from aodiff.nn.transformer import REMAT, gated, modulate
from aodiff.partitioning import shard
from pallas_kernels import IMPLS, IntervalMask, interval_attention, length_mask, refusal

MASKED = -1e9  # logit of an id that may not be emitted
WAVES = 256  # width of the sinusoid of the condition
SCALE = 1000.0  # by which it is stretched: in [0, 1] most waves would be flat
MOST_RATE = 15.0  # of the log of a mean count


@dataclasses.dataclass(frozen=True)
class FlexMDMConfig:
    """Shape of a model.

    Attributes:
      vocab_size: ids 0 .. vocab_size - 1 may be emitted; then come the mask and the anchor.
      capacity: most slots of a row, the anchor included; for checks alone.
      cond_dim: width of what modulates the blocks.
      classes: 0: a gap has the log of its mean count; K > 0: logits of 0, 1, ..., K or more.
    """

    vocab_size: int
    capacity: int
    num_layers: int
    width: int
    num_heads: int
    cond_dim: int = 128
    classes: int = 0
    qk_norm: bool = False
    tied_head: bool = False
    dtype: str = "float32"
    remat: str = "none"
    attention: str = "auto"
    kernel_std: float = 0.02

    def __post_init__(self):
        for name, allowed in (("remat", REMAT), ("attention", IMPLS)):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"model.{name}={getattr(self, name)!r} is unknown; use one of: "
                    f"{', '.join(allowed)}."
                )
        if self.width % self.num_heads or self.head_dim % 2:
            raise ValueError(
                f"Width {self.width} with {self.num_heads} heads does not give whole even head "
                "sizes; change one of them."
            )
        q = jax.ShapeDtypeStruct((1, self.num_heads, 1, self.capacity, self.head_dim), self.dtype)
        k = q.update(shape=(1, self.num_heads, self.capacity, self.head_dim))
        mask = length_mask(np.full(1, self.capacity, np.int32), self.capacity)
        if reason := refusal(self.attention, q, k, mask):
            raise ValueError(f"model.attention: {reason}")

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads

    @property
    def mask(self) -> int:
        return self.vocab_size

    @property
    def anchor(self) -> int:
        return self.vocab_size + 1

    @property
    def rows(self) -> int:
        """Rows of the embedding table, and logits."""
        return -(-(self.vocab_size + 2) // 128) * 128

    def forward_flops(self, widths: float, squares: float) -> float:
        """2 FLOPs per multiply-add of forward passes, from the sums of lengths and squares."""
        d = self.width
        kernels = self.num_layers * 12 * d * d + d * (self.rows + d + self.classes + 1)
        return 2.0 * (kernels * widths + self.num_layers * 2 * d * squares)


@flax.struct.dataclass
class Prediction:
    """logits (B, K, V) float32 of the slots asked for; gap (B, C) float32, the log of the mean
    count of tokens missing after each slot; gap_logits (B, C, classes + 1) float32 or None."""

    logits: jax.Array
    gap: jax.Array
    gap_logits: jax.Array | None = None


class Block(nn.Module):
    """Pre-norm attention and MLP, modulated; the gates are zero at first."""

    cfg: FlexMDMConfig

    @nn.compact
    def __call__(
        self, x: jax.Array, cond: jax.Array, mask: IntervalMask, rope
    ) -> tuple[jax.Array, None]:
        cfg, d, k = self.cfg, self.cfg.width, self.cfg.head_dim
        dtype = jnp.dtype(cfg.dtype)
        init, zeros = normal_init(cfg.kernel_std), nn.initializers.zeros
        ada = Linear(6 * d, (None, "embed"), zeros, dtype, name="ada")(cond)[:, None]
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = jnp.split(ada, 6, axis=-1)

        h = modulate(Norm("rms", name="attn_norm")(x), shift_a, scale_a).astype(dtype)
        axes = ("embed", None, "heads", "head_dim")
        kernel = param(self, "qkv_kernel", init, (d, 3, cfg.num_heads, k), axes).astype(dtype)
        q, keys, values = jnp.einsum("bld,dthk->tbhlk", h, kernel)
        if cfg.qk_norm:
            q = Norm("rms", "head_dim", name="q_norm")(q)
            keys = Norm("rms", "head_dim", name="k_norm")(keys)
        q, keys = (rotate(y, rope).astype(dtype) for y in (q, keys))
        attend = lambda *args: interval_attention(*args, impl=cfg.attention)
        out = on_each_device(attend, q[:, :, None], keys, values, mask)[:, :, 0]
        shape, axes = (cfg.num_heads, k, d), ("heads", "head_dim", "embed")
        kernel = param(self, "out_kernel", init, shape, axes).astype(dtype)
        h = jnp.einsum("bhlk,hkd->bld", out, kernel)
        x = shard(x + gated(h, gate_a), "batch", "seq", "act_embed")

        h = modulate(Norm("rms", name="mlp_norm")(x), shift_m, scale_m).astype(dtype)
        h = Linear(4 * d, ("embed", "mlp"), init, dtype, name="fc")(h)
        h = Linear(d, ("mlp", "embed"), init, dtype, name="proj")(nn.gelu(h))
        return shard(x + gated(h, gate_m), "batch", "seq", "act_embed"), None


class FlexMDM(nn.Module):
    """Tokens under masks and counts of missing tokens, of rows of any length."""

    cfg: FlexMDMConfig

    @nn.compact
    def __call__(
        self, tokens: jax.Array, length: jax.Array, cond: jax.Array, slots: jax.Array | None = None
    ) -> Prediction:
        """One forward pass.

        Args:
          tokens: (B, C) int32, `cfg.anchor` first and `cfg.mask` where not revealed; any C.
          length: (B,) int32 live slots, anchor included; what comes after is never seen.
          cond: (B,) float32 in [0, 1], the share of tokens that have come.
          slots: (B, K) int32 slots whose logits are wanted; None: all.

        Returns:
          `Prediction`; ids that may not be emitted have `MASKED`.
        """
        cfg, d, dtype = self.cfg, self.cfg.width, jnp.dtype(self.cfg.dtype)
        init, zeros = normal_init(cfg.kernel_std), nn.initializers.zeros
        dense = lambda n, init, name, to=dtype: Linear(n, (None, None), init, to, name=name)
        c = dense(cfg.cond_dim, normal_init(WAVES**-0.5), "cond_in")(waves(cond, WAVES))
        c = nn.silu(dense(cfg.cond_dim, normal_init(cfg.cond_dim**-0.5), "cond_out")(nn.silu(c)))

        table = param(self, "embedding", normal_init(0.02), (cfg.rows, d), ("vocab", "embed"))
        x = shard(lookup(table, tokens, dtype, "act_vocab"), "batch", "seq", "act_embed")
        block = Block
        if cfg.remat != "none":
            block = nn.remat(Block, policy=REMAT[cfg.remat], prevent_cse=False)
        blocks = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(nn.broadcast,) * 3,
            length=cfg.num_layers,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )(cfg, name="blocks")
        rope = rotary(jnp.arange(tokens.shape[1])[None], cfg.head_dim)
        x, _ = blocks(x, c, length_mask(length, tokens.shape[1]), rope)

        def head(x: jax.Array, name: str) -> jax.Array:
            ada = Linear(2 * d, (None, "embed"), zeros, dtype, name=f"{name}_ada")(c)[:, None]
            return modulate(Norm("rms", name=f"{name}_norm")(x), *jnp.split(ada, 2, -1))

        wanted = x if slots is None else jnp.take_along_axis(x, slots[..., None], axis=1)
        kernel = table.T
        if not cfg.tied_head:
            kernel = param(self, "head_kernel", zeros, (d, cfg.rows), ("embed", "vocab"))
        hidden = head(wanted, "head").astype(dtype)
        logits = matmul(hidden, kernel.astype(dtype), jnp.float32)
        emitted = along_last(jnp.arange(cfg.rows) < cfg.vocab_size, 3)
        logits = shard(jnp.where(emitted, logits, MASKED), "batch", "seq", "act_vocab")

        h = Linear(d, ("embed", None), init, dtype, name="gap_in")(head(x, "gap"))
        return Prediction(logits, *gap_answer(h, cfg.classes))


def gap_answer(h: jax.Array, classes: int) -> tuple[jax.Array, jax.Array | None]:
    """The fields `gap` and `gap_logits` of a prediction, of h (B, C, D); part of a module."""
    out = Linear(classes + 1, (None, None), normal_init(1e-3), jnp.float32, name="gap_out")
    counts = out(nn.gelu(h, approximate=False))
    if classes:
        return class_log_mean(counts), counts
    # The mean count begins at 0.37.
    return jnp.clip(counts[..., 0] - 1.0, -MOST_RATE, MOST_RATE), None


def waves(x: jax.Array, width: int) -> jax.Array:
    """Cosines and sines (B, width) float32 of numbers (B,) of [0, 1]."""
    half = width // 2
    frequency = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = SCALE * x.astype(jnp.float32)[:, None] * frequency[None]
    return jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=1)

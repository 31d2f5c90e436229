"""Insertion on top of a masked diffusion model, such as a published one of billions of weights.

The model stays what it is; the norms of its blocks are modulated by the time, and a second head
says how many tokens are missing behind each slot. At first the modulation does nothing, whatever
the time: tokens are predicted as before. Source: Kim et al. (FlexMDM), arXiv 2509.01025, with one
modulation for several blocks; arXiv 2607.26504, one for each; flexmdm.md 4.2 and 4.3.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp

from aodiff.core.corruption import live
from aodiff.nn import mdm_config
from aodiff.nn.flexmdm import Prediction, gap_answer, waves
from aodiff.nn.layers import Linear, Norm, along_last, matmul, normal_init, param
from aodiff.nn.mdm import MASKED, MDM
from aodiff.nn.mdm_config import MDMConfig


@dataclasses.dataclass(frozen=True)
class RetrofitConfig:
    """Shape of a model.

    Attributes:
      base: the model it begins with; its rows are as long as those here, the anchor included.
      anchor: id of the first slot of every row, one of the base's table that is never emitted.
      modulators: each is of equally many blocks in a row; None: one for each block.
      classes: as of `FlexMDMConfig`.
    """

    base: MDMConfig
    anchor: int
    modulators: int | None = None
    classes: int = 0

    def __post_init__(self):
        if self.base.position != "rope" or self.base.unit_sizes is not None:
            raise ValueError(
                f"model.position={self.base.position!r} with rows that grow; use a model with "
                '"rope" and one vocabulary for all positions.'
            )
        if not 0 <= self.anchor < self.base.rows or self.anchor == self.mask:
            raise ValueError(
                f"model.anchor_id={self.anchor} must be a row of the embedding table of "
                f"{self.base.rows} rows and not the mask id {self.mask}; choose another."
            )
        if self.parts < 1 or self.base.num_layers % self.parts:
            raise ValueError(
                f"model.modulators={self.parts} do not share out {self.base.num_layers} blocks; "
                "use a divisor of them, or None for one each."
            )

    @property
    def capacity(self) -> int:
        return self.base.seq_len

    @property
    def mask(self) -> int:
        return self.base.mask

    @property
    def parts(self) -> int:
        return self.base.num_layers if self.modulators is None else self.modulators

    def forward_flops(self, widths: float, squares: float) -> float:
        """2 FLOPs per multiply-add of forward passes, from the sums of lengths and squares."""
        d = self.base.width
        head = 2.0 * d * (d + self.classes + 1) * widths
        return mdm_config.forward_flops(self.base, widths, squares) + head


class Retrofit(nn.Module):
    """As `aodiff.nn.flexmdm.FlexMDM`; the weights of the base are in the group "base"."""

    cfg: RetrofitConfig

    @nn.compact
    def __call__(
        self, tokens: jax.Array, length: jax.Array, cond: jax.Array, slots: jax.Array | None = None
    ) -> Prediction:
        """One forward pass; see `FlexMDM`. What is emitted behind a slot may be read at it."""
        cfg, d, dtype = self.cfg, self.cfg.base.width, jnp.dtype(self.cfg.base.dtype)
        init, base = normal_init(cfg.base.kernel_std), MDM(cfg.base, name="base")
        h = nn.silu(Linear(4 * d, ("embed", "mlp"), init, dtype, name="time_in")(waves(cond, d)))
        h = Linear(d, ("mlp", "embed"), init, dtype, name="time_out")(h)
        shape, axes, zeros = (cfg.parts, d, 2 * d), ("layers", "embed", None), nn.initializers.zeros
        kernel = param(self, "ada_kernel", zeros, shape, axes)
        bias = param(self, "ada_bias", zeros, shape[::2], axes[::2])
        segments = jnp.where(live(length, tokens.shape[1]), 0, -1)
        x = base.states(tokens, segments, modulation(kernel, bias, h, cfg.base.num_layers))

        at = jnp.arange(tokens.shape[1])[None] if slots is None else slots
        logits = base.logits(jnp.take_along_axis(x, base.read(at)[..., None], axis=1))
        ids = along_last(jnp.arange(logits.shape[-1]), 3)
        h = Norm("layer", name="gap_norm")(x).astype(dtype)
        gap = gap_answer(Linear(d, ("embed", None), init, dtype, name="gap_in")(h), cfg.classes)
        return Prediction(jnp.where(ids == cfg.anchor, MASKED, logits), *gap)


def modulation(
    kernel: jax.Array, bias: jax.Array, h: jax.Array, num_layers: int
) -> tuple[jax.Array, jax.Array]:
    """(shift, scale) of the norms of every block, (num_layers, B, 1, D) each, of h (B, D).

    Args:
      kernel: (P, D, 2 D), each of equally many blocks; scales come first. bias: (P, 2 D).
    """

    def one(weights: tuple[jax.Array, jax.Array]) -> jax.Array:
        kernel, bias = (w.astype(h.dtype) for w in weights)
        return matmul(h, kernel) + along_last(bias, 2)

    both = jax.lax.map(one, (kernel, bias))  # so that no two kernels are gathered at once
    both = jnp.repeat(both[:, :, None], num_layers // len(kernel), axis=0)
    scale, shift = jnp.split(both, 2, axis=-1)
    return shift, scale

"""CARVE: a row grows where the model is least certain, if that leaves its predictions alone.

A longer row is tried, its predictions at the positions that were masked before are compared with
those of the present row, and it is kept if they moved little. The place of the new masks follows
from the present predictions, so the two network calls of a trial come one after the other. Source:
Bouhedja et al., arXiv 2608.30922; decoding.md section 9.
"""

import dataclasses

import jax
import jax.numpy as jnp

from aodiff.sampling import canvas
from aodiff.sampling.denoise import Denoise, Grow
from aodiff.sampling.policies import neg_entropy
from aodiff.sampling.state import State, masked_positions, spend


@dataclasses.dataclass(frozen=True)
class Carve:
    """The choices of CARVE.

    Attributes:
      growth: masks inserted at a time, at most.
      interval: steps from one trial to the next, the first is in the first step.
      window: even width of the windows whose entropies are summed to find the place.
      tau: nats; a longer row is kept if its predictions moved by less on average. 0: rows never
        grow; more than log 2: they always do.
      decided: whether positions that are decided count with the entropy that the network has there
        (the paper's), or as certain: a model that never learned to predict what it sees has
        entropies there that mean nothing, and masks then tear apart what is written.
    """

    growth: int = 16
    interval: int = 16
    window: int = 8
    tau: float = 0.02
    decided: bool = False

    def __post_init__(self):
        for name, low in (("growth", 0), ("interval", 1), ("window", 2)):
            if getattr(self, name) < low:
                raise ValueError(
                    f"sample.carve.{name}={getattr(self, name)} is too small; use {low} or more"
                )
        if self.window % 2:
            raise ValueError(f"sample.carve.window={self.window} is odd; use an even width")
        if not self.tau >= 0:
            raise ValueError(
                f"sample.carve.tau={self.tau} is no divergence; use 0 (never grow) or more, 0.02 "
                "is usual"
            )


def carve(denoise: Denoise, options: Carve, mask_id: int, most: jax.Array, blocks: bool) -> Grow:
    """CARVE for `decode`.

    Args:
      denoise: as that of `decode`, for the longer rows.
      most: (B,) int32 greatest length of each row.
      blocks: whether rows are written block by block: the block then gets as many more calls as
        masks. Else the number of calls is that of the greatest length from the start.
    """

    def trial(state: State, logits: jax.Array, wants: jax.Array) -> tuple[State, jax.Array]:
        number = jnp.where(wants, jnp.minimum(options.growth, most - state.length), 0)
        end = jnp.minimum(state.block_end, state.length)
        masked = masked_positions(state, mask_id)
        entropy = jnp.where(masked | options.decided, -neg_entropy(logits), 0.0)
        after = canvas.densest(entropy, state.block_start, end, options.window)
        longer = spend(canvas.insert(state, after, number, mask_id), wants)
        other = denoise(longer.tokens, longer.length).astype(jnp.float32)
        moved = canvas.shift(logits, canvas.aligned(other, after, number), masked)
        longer = longer.replace(
            block_end=longer.block_end + number,
            used=longer.used - number if blocks else longer.used,
        )
        spent = {name: getattr(longer, name) for name in ("calls", "widths", "squares")}
        keep = wants & (moved < options.tau)
        state = _select(keep, longer, state.replace(**spent))
        return state, jnp.where(keep[:, None, None], other, logits)

    def grow(state: State, logits: jax.Array, keys: jax.Array) -> tuple[State, jax.Array]:
        del keys
        open_ = jnp.any(masked_positions(state, mask_id), axis=1) & ~state.done & ~state.cropped
        wants = open_ & (state.step % options.interval == 0) & (state.length < most)
        if options.growth == 0:
            return state, logits
        return jax.lax.cond(
            jnp.any(wants),
            trial,
            lambda state, logits, wants: (state, logits),
            state,
            logits,
            wants,
        )

    return grow


def _select(rows: jax.Array, one: State, other: State) -> State:
    """One state or the other by row, rows (B,) bool."""

    def pick(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.where(rows.reshape(-1, *[1] * (a.ndim - 1)), a, b)

    return jax.tree.map(pick, one, other)

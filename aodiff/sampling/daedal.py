"""DAEDAL: rows grow until the model sees an end, and where it is least sure.

Before the first token a row is lengthened until enough of its end is predicted to be the end symbol
(stage 1). Later a mask that the model knows least about becomes several (stage 2). Source: Li et
al., arXiv 2508.00819; decoding.md section 8.
"""

import dataclasses

import jax
import jax.numpy as jnp

from aodiff.sampling import canvas
from aodiff.sampling.denoise import Denoise, Grow
from aodiff.sampling.policies import max_prob
from aodiff.sampling.state import State, masked_positions, spend


@dataclasses.dataclass(frozen=True)
class Daedal:
    """The choices of DAEDAL; its decoder is "threshold(0.9)" in blocks.

    Attributes:
      growth: masks that a row is lengthened by, and masks that one becomes; 1 is no growth.
      window: positions at the end of a row that should be end symbols.
      enough: mean probability of the end symbol in the window at which stage 1 ends.
      sure: the same at which stage 2 inserts nothing.
      unsure: only a mask of lower probability than this becomes several.
    """

    growth: int = 8
    window: int = 32
    enough: float = 0.5
    sure: float = 0.9
    unsure: float = 0.1

    def __post_init__(self):
        for name, low in (("growth", 1), ("window", 2)):
            if getattr(self, name) < low:
                raise ValueError(
                    f"sample.daedal.{name}={getattr(self, name)} is too small; use {low} or more"
                )
        for name in ("enough", "sure", "unsure"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(
                    f"sample.daedal.{name}={getattr(self, name)} is no probability; use 0 to 1"
                )


def end_confidence(
    state: State, logits: jax.Array, mask_id: int, end: int, window: int
) -> jax.Array:
    """Mean probability (B,) float32 of the end symbol over the last predicted ends of each row.

    Of the positions that are not given and whose most likely token is `end`, the last `window`
    count; where there are fewer, those that lack count as 0. A position that is decided predicts
    its token.
    """
    masked = masked_positions(state, mask_id)
    at = jnp.arange(state.tokens.shape[1])[None]
    decided = (state.tokens == end) & (at < state.length[:, None]) & ~state.fixed
    chance = jnp.exp(jax.nn.log_softmax(logits, axis=2)[..., end])
    chance = jnp.where(decided, 1.0, chance)
    counts = decided | (masked & (jnp.argmax(logits, axis=2) == end))
    from_end = jnp.cumsum(counts[:, ::-1], axis=1)[:, ::-1]
    return jnp.sum(jnp.where(counts & (from_end <= window), chance, 0.0), axis=1) / window


def daedal(denoise: Denoise, options: Daedal, mask_id: int, end: int, most: jax.Array) -> Grow:
    """DAEDAL for `decode`.

    Args:
      denoise: as that of `decode`, for the longer rows.
      end: id of the end symbol. most: (B,) int32 greatest length of each row.
    """

    def wants(state: State, logits: jax.Array, bar: float) -> jax.Array:
        open_ = ~state.done & ~state.cropped & (state.length < most)
        return open_ & (end_confidence(state, logits, mask_id, end, options.window) < bar)

    def append(state: State, logits: jax.Array, rows: jax.Array, number: int, token: int):
        """Puts `number` of a token behind some of the rows, and what the network then says."""
        number = jnp.where(rows, jnp.minimum(number, most - state.length), 0)
        rows = number > 0
        state = spend(canvas.insert(state, state.length - 1, number, token), rows)
        new = denoise(state.tokens, state.length).astype(jnp.float32)
        return state, jnp.where(rows[:, None, None], new, logits)

    def lengthened(state: State, logits: jax.Array) -> tuple[State, jax.Array]:
        """Stage 1, which ends with half a window of end symbols behind the row."""

        def more(carry: tuple[State, jax.Array]) -> tuple[State, jax.Array]:
            return append(*carry, wants(*carry, options.enough), options.growth, mask_id)

        found = jax.lax.while_loop(
            lambda carry: jnp.any(wants(*carry, options.enough)), more, (state, logits)
        )
        return append(*found, ~state.done, options.window // 2, end)

    def split(state: State, logits: jax.Array) -> tuple[State, jax.Array]:
        """Stage 2: of the masks that stay in this step, the one the model knows least about."""
        at = jnp.arange(state.tokens.shape[1])[None]
        inside = (at >= state.block_start[:, None]) & (at < state.block_end[:, None])
        masked = masked_positions(state, mask_id) & inside
        chance = max_prob(logits)
        revealed = jnp.argmax(jnp.where(masked, chance, -1.0), axis=1)[:, None]
        stays = masked & (at != revealed) & (chance < options.unsure)
        least = jnp.argmin(jnp.where(stays, chance, 2.0), axis=1).astype(jnp.int32)
        rows = wants(state, logits, options.sure) & jnp.any(stays, axis=1)
        number = jnp.where(rows, jnp.minimum(options.growth - 1, most - state.length), 0)
        # The new masks are as unlikely as the one they come from: none is revealed in this step.
        behind = jnp.maximum(at - number[:, None], least[:, None])
        source = jnp.where(at <= least[:, None], at, behind)
        spread = jnp.take_along_axis(logits, source[..., None], axis=1)
        return canvas.insert(state, least, number, mask_id), spread

    def grow(state: State, logits: jax.Array, keys: jax.Array) -> tuple[State, jax.Array]:
        del keys
        if options.growth == 1:
            return state, logits
        same = lambda state, logits: (state, logits)
        state, logits = jax.lax.cond(jnp.all(state.step == 0), lengthened, same, state, logits)
        return split(state, logits)

    return grow

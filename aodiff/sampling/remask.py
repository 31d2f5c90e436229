"""Decoders that take tokens back: in every step the least confident positions are masked again.

All positions that are not given compete with the probability of a freshly drawn token; of R of them
the R (1 - (i + 1) / T) least confident are masked after step i of T. "topk" gives all others their
new token (Ye et al., diffusion-vs-AR), "p2" lets those that had one keep it. Both make T calls.
Source: decoding.md 6.5.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aodiff.sampling.policies import ranks
from aodiff.sampling.state import State

KINDS = ("topk", "p2")
SHARES = {  # of the positions that are masked after a share x of the steps
    "linear": lambda x: 1 - x,
    "cosine": lambda x: np.cos(np.pi / 2 * x),
}


def check(decoder: Any) -> None:
    """Raises ValueError for what a `Decoder` that re-masks cannot combine with."""
    if decoder.remask not in KINDS:
        raise ValueError(
            f"sample.remask={decoder.remask!r} is unknown; use '' or one of {', '.join(KINDS)}"
        )
    if decoder.score != "confidence" or decoder.schedule not in SHARES:
        raise ValueError(
            f"sample.remask={decoder.remask!r} with score {decoder.score!r} and schedule "
            f"{decoder.schedule!r}; it needs confidence, and linear or cosine"
        )
    if decoder.block or decoder.crop or decoder.late:
        raise ValueError(
            f"sample.remask={decoder.remask!r} works on whole rows, whose tokens are not final "
            "before the last call; leave out blocks, crop and late ids"
        )


def step(
    decoder: Any,
    state: State,
    mask_id: int,
    eligible: jax.Array,
    proposal: jax.Array,
    logp: jax.Array,
    noise: jax.Array,
) -> State:
    """The state after one step.

    Args:
      eligible: (B, C) bool, all positions that are not given, of rows that are not done.
      proposal: (B, C) int32 drawn tokens. logp: (B, C) float32 their log probabilities.
      noise: (B, C) Gumbel noise, which `decoder.noise` and the share to mask scale.
    """
    steps = decoder.steps
    shares = SHARES[decoder.schedule](np.arange(1, steps + 1) / steps)
    share = jnp.asarray(shares, jnp.float32)[jnp.minimum(state.used, steps - 1)][:, None]
    num = jnp.sum(eligible, axis=1, keepdims=True)
    # The small term keeps what is whole on paper from being rounded down.
    num_masked = jnp.floor(num * share + 1e-4).astype(jnp.int32)
    score = logp + decoder.noise * share * noise
    _, place = ranks(score, eligible, jnp.zeros_like(eligible))
    hide = eligible & (place >= num - num_masked)
    reveal = eligible & ~hide
    if decoder.remask == "p2":
        reveal &= state.tokens == mask_id
    state = state.replace(
        tokens=jnp.where(hide, mask_id, jnp.where(reveal, proposal, state.tokens)),
        when=jnp.where(hide, -1, jnp.where(reveal, state.step[:, None], state.when)),
        logp=jnp.where(hide, 0.0, jnp.where(reveal, logp, state.logp)),
        used=state.used + ~state.done,
        step=state.step + ~state.done,
    )
    return state.replace(done=state.done | (state.used >= steps))

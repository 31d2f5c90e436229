"""Decoding of masked diffusion models: one jitted loop, decoders as choices of its parts.

A step predicts every masked position, ranks the eligible ones (the score), says how many to reveal
(the schedule) and reveals those. A revealed token is final. Source: decoding.md sections 2 to 7.
"""

import dataclasses
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp

from aodiff.core import categorical
from aodiff.sampling.samples import Samples
from aodiff.sampling.schedule import reveal_table

Denoise = Callable[[jax.Array], jax.Array]  # tokens (B, n) -> logits (B, n, V) float32


def _probability(logp: jax.Array, proposal: jax.Array) -> jax.Array:
    return jnp.take_along_axis(logp, proposal[..., None], axis=2)[..., 0]


def _margin(logp: jax.Array, proposal: jax.Array) -> jax.Array:
    first, second = jnp.moveaxis(jnp.exp(jax.lax.top_k(logp, 2)[0]), 2, 0)
    return first - second


def _entropy(logp: jax.Array, proposal: jax.Array) -> jax.Array:
    return jnp.sum(jnp.exp(logp) * jnp.maximum(logp, -1e9), axis=2)


# Each scores log probabilities (B, n, V) and proposed tokens (B, n): higher is revealed earlier.
# "confidence" looks at the token that was drawn, so that likely tokens come first: unless tokens
# are greedy, its samples do not follow the model even where all conditionals are exact.
SCORES: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "confidence": _probability,
    "max_prob": lambda logp, proposal: jnp.max(logp, axis=2),
    "margin": _margin,
    "entropy": _entropy,
}
# How many to reveal: a share of what is left per step, or what passes a bar on its probability.
SCHEDULES = ("linear", "cosine", "threshold", "factor")


@dataclasses.dataclass(frozen=True)
class Decoder:
    """The choices of a decoder.

    Attributes:
      score: a key of `SCORES`, or an order of positions (then `decode` is given one).
      schedule: "linear" or "cosine" spread the positions of a block over its steps;
        "threshold(p)" reveals all of probability p or more, "factor(f)" the longest run of ranks
        r = 1, 2, ... of probability 1 - f / (r + 1) or more (Fast-dLLM), both at least one.
      steps: network calls for a row without given tokens.
      block: positions are revealed block by block; the whole length is no blocks.
    """

    score: str
    schedule: str
    steps: int
    block: int

    def check(self, n: int) -> None:
        """Raises ValueError for choices that do not fit rows of length n."""
        name, _ = self.bar
        if name not in SCHEDULES:
            raise ValueError(
                f"sample.schedule={self.schedule!r} is unknown; use linear, cosine, threshold(0.9) "
                "or factor(1)"
            )
        if not 1 <= self.block <= n or n % self.block:
            raise ValueError(
                f"sample.block={self.block} does not divide the {n} positions of a row; use a "
                "divisor, or 0 for no blocks"
            )
        blocks = n // self.block
        if not blocks <= self.steps <= n or self.steps % blocks:
            raise ValueError(
                f"sample.steps={self.steps} with {blocks} blocks of {self.block}; use a multiple "
                f"of {blocks} up to {n}, at least one call a block and one token a call"
            )

    @property
    def bar(self) -> tuple[str, float]:
        """Name and number of the schedule."""
        match = re.fullmatch(r"(threshold|factor)\(([\d.]+)\)", self.schedule)
        if match:
            return match[1], float(match[2])
        plain = self.schedule in ("linear", "cosine")
        return (self.schedule, 0.0) if plain else ("", 0.0)


def decode(
    denoise: Denoise,
    keys: jax.Array,
    tokens: jax.Array,
    given: jax.Array,
    decoder: Decoder,
    *,
    mask_id: int,
    order: jax.Array | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
) -> Samples:
    """Fills the positions that are not given; a row depends on its own key and tokens only.

    Args:
      denoise: logits of partly masked rows, ids that may not be emitted at or below -1e8.
      keys: (B,) typed keys.
      tokens: (B, n) int32; entries that are not given are ignored. given: (B, n) bool.
      order: (B, n) int32 permutations for a decoder whose score is an order.
      temperature, top_p: of the tokens, 0 is greedy; scores are of the law before either.

    Returns:
      Samples with, beside its tokens and steps, `logp` (B, n) of each revealed token before
      temperature and nucleus, and `calls` (B,), the network calls of a row.
    """
    batch, n = tokens.shape
    blocks = n // decoder.block
    per_block = decoder.steps // blocks
    table = jnp.asarray(reveal_table(decoder.block, per_block, "cosine"))
    rank = None if order is None else jnp.argsort(order, axis=1)
    block_of = jnp.arange(n) // decoder.block
    position = jnp.arange(n)

    def unfinished(carry):
        return jnp.any(carry[0] == mask_id)

    def step(carry):
        shown, when, logps, calls, used, at, size = carry
        masked = shown == mask_id
        active = jnp.any(masked, axis=1)
        # The first block with a mask; its own count of steps starts when it does.
        now = jnp.min(jnp.where(masked, block_of[None], blocks), axis=1)
        eligible = masked & (block_of[None] == now[:, None])
        left = jnp.sum(eligible, axis=1)
        used, size = jnp.where(now == at, used, 0), jnp.where(now == at, size, left)
        logits = denoise(shown)
        logp = jax.nn.log_softmax(logits.astype(jnp.float32), axis=2)
        step_keys = jax.vmap(jax.random.fold_in)(keys, calls)
        cell_keys = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))(
            step_keys, position
        )
        proposal = categorical.sample(cell_keys, logits, temperature, top_p)
        chance = _probability(logp, proposal)
        if rank is None:
            score = SCORES[decoder.score](logp, proposal)
        else:
            score = -rank.astype(jnp.float32)
        score = jnp.where(eligible, score, -jnp.inf)
        # Stable: ties go to the lower position.
        by_score = jnp.argsort(-score, axis=1, stable=True)
        place = jnp.argsort(by_score, axis=1)
        passes = jnp.take_along_axis(jnp.where(eligible, jnp.exp(chance), -1.0), by_score, axis=1)
        if decoder.schedule == "cosine":
            count = table[size, used + 1] - table[size, used]
        else:
            count = _count(decoder, left, per_block - used, passes)
        count = jnp.clip(count, jnp.minimum(left, 1), left)
        reveal = eligible & (place < count[:, None])
        return (
            jnp.where(reveal, proposal, shown),
            jnp.where(reveal, calls[:, None], when),
            jnp.where(reveal, chance, logps),
            calls + active,
            used + 1,
            now,
            size,
        )

    shown = jnp.where(given, tokens, mask_id).astype(jnp.int32)
    none = jnp.zeros(batch, jnp.int32)
    start = (shown, jnp.full((batch, n), -1), jnp.zeros((batch, n)), none, none, none - 1, none)
    shown, when, logps, calls, *_ = jax.lax.while_loop(unfinished, step, start)
    return Samples(shown, jnp.full(batch, n, jnp.int32), when, logps, calls)


def _count(decoder: Decoder, left: jax.Array, steps: jax.Array, passes: jax.Array) -> jax.Array:
    """Positions to reveal (B,) of `left` in the block, in which `steps` calls remain.

    passes: (B, n) probabilities by rank, -1 where a position is not eligible.
    """
    name, number = decoder.bar
    if name == "threshold":
        return jnp.sum(passes >= number, axis=1)
    if name == "factor":
        bar = 1 - number / (jnp.arange(1, passes.shape[1] + 1) + 1.0)
        return jnp.sum(jnp.cumprod(passes >= bar[None], axis=1), axis=1)
    return -(-left // jnp.maximum(steps, 1))

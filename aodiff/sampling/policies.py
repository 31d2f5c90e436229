"""Which position comes first (scores) and how many come at once (counts), as literal dicts.

Source: decoding.md sections 3, 5 and 7.1; the names of LLaDA, Dream, MDLM, Fast-dLLM and CARVE.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from aodiff.core import categorical
from aodiff.sampling.schedule import reveal_table


@dataclasses.dataclass(frozen=True)
class View:
    """What a score may look at in one step. Whatever it leaves alone is never computed.

    Attributes:
      logits: (B, C, V) float32, the law p of each position.
      shaped: (B, C, V) float32, the law q after temperature, nucleus and top-k (-inf: dropped).
      proposal: (B, C) int32, the token that a position would get.
      keys: (B, C) typed keys of this step.
    """

    logits: jax.Array
    shaped: jax.Array
    proposal: jax.Array
    keys: jax.Array


def chance(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """Probabilities (B, C) of `ids` (B, C) under `logits` (B, C, V)."""
    return jnp.exp(log_chance(logits, ids))


def log_chance(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """Log probabilities (B, C) of `ids` (B, C) under `logits` (B, C, V)."""
    chosen = jnp.take_along_axis(logits, ids[..., None], axis=2)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=2)


def max_prob(logits: jax.Array) -> jax.Array:
    """Probabilities (B, C) of the most likely token."""
    return jnp.exp(jnp.max(logits, axis=2) - jax.nn.logsumexp(logits, axis=2))


def _margin(logits: jax.Array) -> jax.Array:
    # Two passes for the maximum are faster than a partial sort.
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
    others = jnp.where(ids == categorical.best(logits)[..., None], -jnp.inf, logits)
    second = jnp.exp(jnp.max(others, axis=2) - jax.nn.logsumexp(logits, axis=2))
    return max_prob(logits) - second


def neg_entropy(logits: jax.Array) -> jax.Array:
    """Minus the entropies (B, C) in nats of `logits` (B, C, V)."""
    law = jax.nn.softmax(logits, axis=2)
    mean = jnp.sum(jnp.where(law > 0, law * logits, 0.0), axis=2)
    return mean - jax.nn.logsumexp(logits, axis=2)


def _uniform(keys: jax.Array) -> jax.Array:
    return jax.vmap(jax.vmap(jax.random.uniform))(keys)


def _position(view: View) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.float32, view.proposal.shape, 1)


# Higher is revealed earlier. "confidence" looks at the token that was drawn, so that likely tokens
# come first: unless tokens are greedy, its samples do not follow the model even where all
# conditionals are exact. "random" is fresh in every step. margin and entropy are of q (Dream).
SCORES: dict[str, Callable[[View], jax.Array]] = {
    "confidence": lambda v: chance(v.logits, v.proposal),
    "confidence_filtered": lambda v: chance(v.shaped, v.proposal),
    "max_prob": lambda v: max_prob(v.logits),
    "margin": lambda v: _margin(v.shaped),
    "entropy": lambda v: neg_entropy(v.shaped),
    "random": lambda v: _uniform(v.keys),
    "l2r": lambda v: -_position(v),
    "r2l": _position,
}


def ranks(score: jax.Array, eligible: jax.Array, late: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Positions (B, C) by falling score, and the place of each; ties go to the lower position.

    Those that are `late` come behind the others, and those not `eligible` behind all.
    """
    at = jax.lax.broadcasted_iota(jnp.int32, score.shape, 1)
    group = jnp.where(eligible, late.astype(jnp.int32), 2)
    _, _, by_score = jax.lax.sort((group, -score, at), dimension=1, num_keys=3)
    return by_score, jnp.argsort(by_score, axis=1)


@dataclasses.dataclass(frozen=True)
class Budget:
    """What a count may look at in one step, of the block that is being filled.

    Attributes:
      left, size: (B,) int32 masks now, and when the block was begun.
      used: (B,) int32 calls of the block before this one.
      steps: calls of a block. width: most positions of a block. number: the rule's parameter.
      passes: (B, C) float32 probabilities of the proposals by rank, -1 beyond the last mask.
      eligible: (B, C) bool. keys: (B, C) typed keys of this step.
    """

    left: jax.Array
    size: jax.Array
    used: jax.Array
    steps: int
    width: int
    number: float
    passes: jax.Array
    eligible: jax.Array
    keys: jax.Array

    @property
    def remaining(self) -> jax.Array:
        """Calls (B,) that the block has left, this one included."""
        return jnp.maximum(self.steps - self.used, 1)


def _cosine(b: Budget) -> jax.Array:
    table = jnp.asarray(reveal_table(b.width, b.steps, "cosine"))
    at = jnp.minimum(b.used, b.steps - 1)
    return table[b.size, at + 1] - table[b.size, at]


def _dream(b: Budget) -> jax.Array:
    time = np.linspace(1.0, 1e-3, b.steps + 1)
    share = np.append(1 - time[1:-1] / time[:-2], 1.0).astype(np.float32)  # all at the last
    return jnp.floor(b.left * jnp.asarray(share)[jnp.minimum(b.used, b.steps - 1)])


def _factor(b: Budget) -> jax.Array:
    bar = 1 - b.number / (jnp.arange(1, b.passes.shape[1] + 1) + 1.0)
    return jnp.sum(jnp.cumprod(b.passes >= bar[None], axis=1), axis=1)


def _binomial(b: Budget) -> jax.Array:
    share = 1 / b.remaining
    return jnp.sum(b.eligible & (_uniform(b.keys) < share[:, None]), axis=1)


# "linear" spreads what is left over the calls that are left: LLaDA's table, and CARVE's rule, which
# stays defined when rows grow. "ancestral" reveals each position with its chance in MDLM's process:
# with the score "random" that is MDLM's sampler.
COUNTS: dict[str, Callable[[Budget], jax.Array]] = {
    "linear": lambda b: -(-b.left // b.remaining),
    "cosine": _cosine,
    "dllm": lambda b: jnp.round(b.left / b.remaining),
    "dream": _dream,
    "ancestral": _binomial,
    "threshold": lambda b: jnp.sum(b.passes >= b.number, axis=1),
    "factor": _factor,
    "one": lambda b: jnp.ones_like(b.left),
}
MAY_REVEAL_NONE = ("dream", "ancestral")
WITH_NUMBER = ("threshold", "factor")  # written "threshold(0.9)"
AT_MOST_ONE_CALL_A_TOKEN = ("linear", "cosine")
FIXED_SIZE = ("cosine",)  # counted from the size of a block at its start, so that it cannot grow

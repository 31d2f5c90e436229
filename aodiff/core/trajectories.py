"""Orders of revealing as trajectories: their rewards, and how a policy learns from them.

A state is a row of which some positions are hidden; an action is one of these; the true token is
revealed there (teacher forcing) and its log probability is the reward, undiscounted, so that a
trajectory's sum is the log likelihood of the row in that order. Source: SAS, arXiv 2606.23567;
decoding.md 10 and 11.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from aodiff import rng

# logits (B, n, V), hidden (B, n) bool, keys (B,) -> action (B,) int32, and what to keep of the step
Choose = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]
Denoise = Callable[[jax.Array], jax.Array]


class Trajectory(NamedTuple):
    """Steps of B rows, time first: hidden (T, B, n) bool before the step, action (T, B) int32,
    reward (T, B) float32 nats, 0 once nothing is hidden, and `kept` of the policy."""

    hidden: jax.Array
    action: jax.Array
    reward: jax.Array
    kept: Any


def follow(
    denoise: Denoise,
    choose: Choose,
    tokens: jax.Array,
    hidden: jax.Array,
    missing: jax.Array,
    keys: jax.Array,
    *,
    steps: int,
    mask_id: int,
) -> Trajectory:
    """Reveals the hidden positions of each row one by one, as `choose` says.

    Args:
      denoise: logits (B, n, V) of rows of which the masked positions hold `mask_id`.
      tokens: (B, n) int32, the true tokens. hidden: (B, n) bool, to reveal.
      missing: (B, n) bool, masked for good.
      keys: (B,) typed keys.
      steps: T, at least the largest number of hidden positions of a row.
    """
    position = jnp.arange(tokens.shape[1])

    def step(hidden: jax.Array, t: jax.Array):
        logits = denoise(jnp.where(hidden | missing, mask_id, tokens))
        action, kept = choose(logits, hidden, rng.fold(keys, t))
        at = hidden & (position[None] == action[:, None])
        nll = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), tokens)
        reward = -jnp.sum(jnp.where(at, nll, 0.0), axis=1)
        return hidden & ~at, Trajectory(hidden, action, reward, kept)

    return jax.lax.scan(step, hidden, jnp.arange(steps))[1]


def best(scores: jax.Array, hidden: jax.Array) -> jax.Array:
    """The hidden position (B,) int32 of the highest score (B, n); the lowest of equal ones."""
    return jnp.argmax(jnp.where(hidden, scores, -jnp.inf), axis=1).astype(jnp.int32)


def draw(logv: jax.Array, hidden: jax.Array, keys: jax.Array) -> jax.Array:
    """A hidden position (B,) int32 from log probabilities (B, n) of each row."""
    noise = jax.vmap(lambda k: jax.random.gumbel(k, logv.shape[1:], mode="high"))(keys)
    return best(logv + noise, hidden)


# ---- learning -----------------------------------------------------------------------------------


def _deviation(value: jax.Array) -> jax.Array:
    """`value` (B, G, ...) minus its mean over the group; what float32 sums cannot tell is equal."""
    mean = jnp.mean(value, axis=1, keepdims=True)
    return jnp.where(jnp.abs(value - mean) < 1e-5 * (1.0 + jnp.abs(mean)), 0.0, value - mean)


def _per_step(advantage: jax.Array, active: jax.Array) -> jax.Array:
    return jnp.where(active, advantage[..., None], 0.0)


def _batch_rms(reward: jax.Array, active: jax.Array) -> jax.Array:
    found = _deviation(jnp.sum(reward, axis=2))
    number = jnp.maximum(jnp.sum(jnp.any(active, axis=2), dtype=jnp.float32), 1.0)
    return _per_step(found / (jnp.sqrt(jnp.sum(jnp.square(found)) / number) + 1e-4), active)


def _group_std(reward: jax.Array, active: jax.Array) -> jax.Array:
    found = _deviation(jnp.sum(reward, axis=2))
    std = jnp.sqrt(jnp.mean(jnp.square(found), axis=1, keepdims=True))
    return _per_step(found / (std + 1e-4), active)


def _reward_to_go(reward: jax.Array, active: jax.Array) -> jax.Array:
    found = jnp.where(active, _deviation(jnp.cumsum(reward[..., ::-1], axis=2)[..., ::-1]), 0.0)
    number = jnp.maximum(jnp.sum(active, dtype=jnp.float32), 1.0)
    return found / (jnp.sqrt(jnp.sum(jnp.square(found)) / number) + 1e-4)


# Rewards and active steps (B, G, T) of G trajectories of each of B rows -> advantages (B, G, T).
# "batch_rms" and "reward_to_go" divide by one number for all rows. Dividing each row by its own
# spread, the textbook "group_std", weighs rows by its inverse and moves the optimum away from that
# of the bound (decoding.md 11.5).
ADVANTAGES: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "batch_rms": _batch_rms,
    "group_std": _group_std,
    "reward_to_go": _reward_to_go,
}


def clipped_surrogate(
    logv: jax.Array, old: jax.Array, advantage: jax.Array, clip: float
) -> tuple[jax.Array, jax.Array]:
    """The loss min(ratio A, clipped ratio A) with its sign turned, and where the clip was active.

    All arrays (...) float32: log probabilities of the actions now and when drawn, advantages.
    """
    ratio = jnp.exp(logv - old)
    plain = ratio * advantage
    bounded = jnp.clip(ratio, 1.0 - clip, 1.0 + clip) * advantage
    return -jnp.minimum(plain, bounded), bounded < plain

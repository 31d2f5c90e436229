"""Drawing tokens from logits: temperature, nucleus, and Gumbel noise of stated precision.

Everything is float32. The uniforms behind the noise have full float32 resolution (`mode="high"`),
so the largest noise is near 32 nats; the default mode caps it near 16 and cuts events rarer than
about 1e-7, which acts like a lower temperature (aogpt.md 8.4).
"""

import jax
import jax.numpy as jnp

EXCLUDED = (
    -1e8
)  # a logit at or below this is a padded id: it has probability zero at any temperature


def nucleus(logits: jax.Array, top_p: float) -> jax.Array:
    """Keeps the shortest prefix of the sorted distribution whose mass reaches `top_p`.

    The token that crosses `top_p` is kept, ties are broken by the lower id, and at least one token
    stays. `top_p >= 1` returns the logits unchanged, so rounding in the sum cannot drop a tail.

    Args:
      logits: (..., V) float32.
      top_p: mass in (0, 1].

    Returns:
      (..., V) float32 with -inf at the ids that were dropped.

    Source: Xue et al., arXiv 2506.19935, section 5.3 setting; deviations of the reference code in
    aogpt.md 13.5 and 13.6.
    """
    if not top_p > 0:
        raise ValueError(f"top_p={top_p} keeps no token; give a mass in (0, 1]")
    if top_p >= 1:
        return logits
    axis = logits.ndim - 1
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, axis)
    sorted_logits, ids = jax.lax.sort((-logits, ids), dimension=axis, num_keys=2)
    probs = jax.nn.softmax(-sorted_logits, axis=-1)
    kept = jnp.cumsum(probs, axis=-1) - probs < top_p  # mass before the token
    _, kept = jax.lax.sort((ids, kept), dimension=axis, num_keys=1)
    return jnp.where(kept, logits, -jnp.inf)


def shape(logits: jax.Array, temperature: float, top_p: float, top_k: int = 0) -> jax.Array:
    """The law that tokens are drawn from: temperature, then nucleus, then the `top_k` best.

    Args:
      logits: (..., V), any float dtype; ids at or below `EXCLUDED` are never drawn.
      temperature: divides the logits; 0 leaves them, as the other two then only bear on scores.
      top_p: nucleus mass in (0, 1]; 1 turns it off.
      top_k: ids that are kept, and all that tie with the last of them; 0 keeps all.

    Returns:
      (..., V) float32 logits, -inf at the ids that were dropped.
    """
    if not temperature >= 0:
        raise ValueError(f"temperature={temperature} is not allowed; give 0 (greedy) or more")
    if top_k < 0:
        raise ValueError(f"top_k={top_k} is not allowed; give a number of ids, or 0 for all")
    logits = logits.astype(jnp.float32)
    logits = jnp.where(logits <= EXCLUDED, -jnp.inf, logits / (temperature or 1.0))
    logits = nucleus(logits, top_p)
    if 0 < top_k < logits.shape[-1]:
        last = jax.lax.top_k(logits, top_k)[0][..., -1:]
        logits = jnp.where(logits >= last, logits, -jnp.inf)
    return logits


def sample(
    keys: jax.Array, logits: jax.Array, temperature: float, top_p: float, top_k: int = 0
) -> jax.Array:
    """Draws one id per distribution, by the Gumbel-max trick.

    Args:
      keys: (...) typed keys, one per distribution: a draw does not depend on its neighbours.
      logits, temperature, top_p, top_k: see `shape`; temperature 0 takes the most likely id.

    Returns:
      (...) int32 ids.
    """
    shaped = shape(logits, temperature, top_p, top_k)
    return best(logits if temperature == 0 else shaped + _gumbel(keys, shaped.shape))


def best(logits: jax.Array) -> jax.Array:
    """Most likely ids (...) int32 of logits (..., V); of equal ones the lowest.

    Two plain reductions, which XLA vectorises on CPUs as it does not with `argmax`.
    """
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    top = jnp.max(logits, axis=-1, keepdims=True)
    return jnp.min(jnp.where(logits == top, ids, logits.shape[-1] - 1), axis=-1)


def perturb(keys: jax.Array, scores: jax.Array, temperature: float) -> jax.Array:
    """scores (...) / temperature with Gumbel noise of `keys` (...): Gumbel-top-k.

    The k largest are k draws without replacement from the softmax of scores / temperature, in the
    order they were drawn (Plackett-Luce).
    """
    return scores / temperature + gumbel(keys)


def gumbel(keys: jax.Array) -> jax.Array:
    """One Gumbel variable (...) float32 for each of `keys` (...)."""
    return _gumbel(keys, (*keys.shape, 1))[..., 0]


def plackett_luce(scores: jax.Array, chosen: jax.Array) -> jax.Array:
    """Log probability (...) of drawing `chosen` in this order without replacement.

    Args:
      scores: (..., n) float32 logits; -inf is never drawn.
      chosen: (..., k) int32 distinct indices.
    """
    picked = jax.nn.one_hot(chosen, scores.shape[-1], dtype=bool)
    before = jnp.cumsum(picked, axis=-2) - picked > 0
    left = jnp.where(before, -jnp.inf, scores[..., None, :])
    taken = jnp.take_along_axis(scores, chosen, axis=-1)
    return jnp.sum(taken - jax.nn.logsumexp(left, axis=-1), axis=-1)


def jensen_shannon(first: jax.Array, second: jax.Array) -> jax.Array:
    """Jensen-Shannon divergence (...) in nats, 0 to log 2, of two laws as logits (..., V)."""
    logs = [jax.nn.log_softmax(x.astype(jnp.float32), axis=-1) for x in (first, second)]
    middle = jnp.logaddexp(*logs) - jnp.log(2.0)
    parts = [jnp.sum(jnp.where(x > -jnp.inf, jnp.exp(x) * (x - middle), 0.0), -1) for x in logs]
    return jnp.maximum(0.5 * (parts[0] + parts[1]), 0.0)


def _gumbel(keys: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    def one(key: jax.Array) -> jax.Array:
        return jax.random.gumbel(key, shape[-1:], jnp.float32, mode="high")

    return jax.vmap(one)(keys.reshape(-1)).reshape(shape)

"""Likelihood estimators of any-order models.

`apply(tokens, order) -> logits (B, n, V)` in slot order; token ids (B, n) int32 are in natural
order, generation orders are (B, n) int32; results are nats. Source: Xue et al., arXiv 2506.19935
(AO); the order-marginal bound follows Eso-LMs, arXiv 2506.01928, Theorem 3.1.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from aodiff.core.orders import inverse
from aodiff.metrics import Mean

Apply = Callable[[jax.Array, jax.Array], jax.Array]


def slot_nll(logits: jax.Array, tokens: jax.Array, order: jax.Array) -> jax.Array:
    """Returns -log p of the token each slot predicts, (B, n) float32 in slot order."""
    targets = jnp.take_along_axis(tokens, order, axis=1)
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)


def to_natural(values: jax.Array, order: jax.Array) -> jax.Array:
    """Moves per-slot values (B, n) to the natural positions they belong to."""
    return jnp.take_along_axis(values, inverse(order), axis=1)


def to_slots(values: jax.Array, order: jax.Array) -> jax.Array:
    """Moves per-position values (B, n) into generation order; the inverse of `to_natural`."""
    return jnp.take_along_axis(values, order, axis=1)


def sequence_nll(apply: Apply, tokens: jax.Array, order: jax.Array, mask: jax.Array) -> jax.Array:
    """Exact -log p(x | order) per row, (B,), summed over positions where `mask` (B, n) is True."""
    nll = slot_nll(apply(tokens, order), tokens, order)
    return jnp.sum(jnp.where(to_slots(mask, order), nll, 0.0), axis=1)


def order_marginal_nll(
    apply: Apply, tokens: jax.Array, orders: jax.Array, mask: jax.Array
) -> jax.Array:
    """-log of the mean over `orders` (K, B, n) of p(x | order), per row (B,).

    An upper bound on -log p(x) in expectation, non-increasing in K; K = 1 is the one-order NLL.
    """
    nll = jax.lax.map(lambda order: sequence_nll(apply, tokens, order, mask), orders)
    return jnp.log(orders.shape[0]) - jax.nn.logsumexp(-nll, axis=0)


def permute_context(key: jax.Array, order: jax.Array, step: jax.Array) -> jax.Array:
    """Shuffles order[:step] uniformly and keeps the rest; order (n,), step scalar."""
    index = jnp.arange(order.shape[0])
    shuffled = jax.random.uniform(key, order.shape)
    return order[jnp.argsort(jnp.where(index < step, shuffled, 1.0 + index))]


def ensemble_nll(
    apply: Apply,
    tokens: jax.Array,
    order: jax.Array,
    keys: jax.Array,
    mask: jax.Array,
    *,
    members: int,
    num_steps: int,
) -> tuple[jax.Array, jax.Array]:
    """Context-order ensemble (AO section 4.2) on a random subset of steps.

    At step i the probabilities of x[order[i]] under `members` orders of the context order[:i] are
    averaged; member 0 is the identity. Steps are drawn per row without replacement, so the mean
    over steps stays unbiased.

    Args:
      keys: (B,) one key per row.
      members: M >= 1; M = 1 is the plain NLL of those steps.
      num_steps: steps scored per row, at most n.

    Returns:
      nll (B,) summed over the scored steps and count (B,) of scored steps.
    """
    batch, n = tokens.shape
    step_key, member_key = jax.vmap(lambda k: tuple(jax.random.split(k)), out_axes=0)(keys)
    steps = jax.vmap(lambda k: jax.random.permutation(k, n))(step_key)[:, :num_steps]

    def logp(step: jax.Array, member: jax.Array, key: jax.Array) -> jax.Array:
        shuffled = jax.vmap(permute_context)(key, order, step)
        used = jnp.where(member == 0, order, shuffled)
        nll = slot_nll(apply(tokens, used), tokens, used)
        return -jnp.take_along_axis(nll, step[:, None], axis=1)[:, 0]

    def at_step(index: jax.Array) -> jax.Array:
        step = steps[:, index]

        def at_member(member: jax.Array) -> jax.Array:
            fold = jax.vmap(lambda k: jax.random.fold_in(k, index * members + member))
            return logp(step, member, fold(member_key))

        logps = jax.lax.map(at_member, jnp.arange(members))
        return jnp.log(members) - jax.nn.logsumexp(logps, axis=0)

    nll = jax.lax.map(at_step, jnp.arange(num_steps)).T  # (B, num_steps)
    scored = jnp.take_along_axis(to_slots(mask, order), steps, axis=1)
    return jnp.sum(jnp.where(scored, nll, 0.0), axis=1), jnp.sum(scored, axis=1, dtype=jnp.float32)


def conditional_order(order: jax.Array, given: jax.Array, target: jax.Array) -> jax.Array:
    """Reorders `order` (B, n): given positions first, then targets, then the rest, ties kept."""
    group = jnp.where(given, 0, jnp.where(target, 1, 2))
    return jnp.take_along_axis(order, jnp.argsort(to_slots(group, order), axis=1), axis=1)


def conditional_nll(
    apply: Apply, tokens: jax.Array, order: jax.Array, given: jax.Array, target: jax.Array
) -> jax.Array:
    """-log p(x_target | x_given) per row, (B,), along the relative order of `order`.

    Args:
      given, target: (B, n) bool, disjoint; the remaining positions come last and are not scored.
    """
    return sequence_nll(apply, tokens, conditional_order(order, given, target), target)


def curve_by_step(nll: jax.Array, mask: jax.Array) -> Mean:
    """Mean NLL by generation step: total and count (n,) of slot-order `nll` and `mask` (B, n)."""
    return Mean(
        jnp.sum(jnp.where(mask, nll, 0.0), axis=0), jnp.sum(mask, axis=0, dtype=jnp.float32)
    )


def nearest_gap(order: jax.Array) -> jax.Array:
    """Distance from order[s] to the nearest position revealed before s, (B, n); n if none is."""
    n = order.shape[1]
    distance = jnp.abs(order[:, :, None] - order[:, None, :])
    seen = jnp.tril(jnp.ones((n, n), bool), -1)[None]
    return jnp.min(jnp.where(seen, distance, n), axis=2)


def curve_by_gap(nll: jax.Array, order: jax.Array, mask: jax.Array) -> Mean:
    """Mean NLL by `nearest_gap`: total and count (n + 1,) indexed by the gap."""
    gap = nearest_gap(order)

    def add(values: jax.Array) -> jax.Array:
        return jnp.zeros(order.shape[1] + 1).at[gap].add(jnp.where(mask, values, 0.0))

    return Mean(add(nll), add(jnp.ones_like(nll)))

"""Masking: which positions of a row are hidden, and how the amounts are spread over a batch.

Amounts (times, counts) belong to the global batch and are stratified over it; which positions are
hidden is drawn by row, from the row's own key.
"""

import jax
import jax.numpy as jnp


def strata(key: jax.Array, num: int) -> jax.Array:
    """Draws `num` points of (0, 1], one in each of `num` equal parts, in random order.

    One shift for all: the points cover the interval evenly whatever the draw, and no row owns a
    part of it.
    """
    # Far from the rows' own keys, which fold in their numbers.
    shift_key, order_key = jax.random.split(jax.random.fold_in(key, 2**31 - 1))
    # Whole numbers are permuted: a float range of step 1 / num may round to num + 1 entries.
    place = jax.random.permutation(order_key, jnp.arange(num))
    return (place + 1.0 - jax.random.uniform(shift_key)) / num


def mask_with_rate(keys: jax.Array, maskable: jax.Array, rate: jax.Array) -> jax.Array:
    """Hides each maskable position of row b with probability rate[b].

    Args:
      keys: (B,) typed keys. maskable: (B, n) bool. rate: (B,) float32.

    Returns:
      (B, n) bool, True where hidden.
    """
    draws = jax.vmap(lambda k: jax.random.uniform(k, maskable.shape[1:]))(keys)
    return maskable & (draws < rate[:, None])


def mask_count(keys: jax.Array, maskable: jax.Array, count: jax.Array) -> jax.Array:
    """Hides exactly count[b] maskable positions of row b, a uniform subset.

    Args:
      keys: (B,) typed keys. maskable: (B, n) bool. count: (B,) int32, at most those maskable.

    Returns:
      (B, n) bool, True where hidden.
    """
    draws = jax.vmap(lambda k: jax.random.uniform(k, maskable.shape[1:]))(keys)
    first = jnp.argsort(jnp.where(maskable, draws, 2.0), axis=1)
    rank = jnp.argsort(first, axis=1)
    return maskable & (rank < count[:, None])


def stratified_counts(points: jax.Array, sizes: jax.Array) -> jax.Array:
    """Numbers of positions to hide, uniform on 1 .. sizes[b], for `points` (B,) in (0, 1].

    Rows with nothing to hide get 0. The bound of a row is the mean over its counts l of
    size / l times the summed cross entropy of l hidden positions (mdm.md 2.2).
    """
    return jnp.clip(jnp.ceil(points * sizes), jnp.minimum(sizes, 1), sizes).astype(jnp.int32)


def live(length: jax.Array, n: int) -> jax.Array:
    """The first `length` (B,) of n positions, (B, n) bool; the others are padding."""
    return jnp.arange(n)[None] < length[:, None]


def cut_lengths(points: jax.Array, lengths: jax.Array, share: float, shortest: int) -> jax.Array:
    """Lengths (B,) int32 of rows of which a share is cut, for `points` (B,) in (0, 1].

    Those cut are uniform on shortest .. lengths[b]; shorter rows stay whole (mdm.md 2.4).
    """
    drawn = shortest - 1 + jnp.ceil(points / share * (lengths - shortest + 1))
    cut = jnp.clip(drawn.astype(jnp.int32), jnp.minimum(shortest, lengths), lengths)
    return jnp.where(points <= share, cut, lengths)


def context_weight(visible: jax.Array, near: float = 0.3) -> jax.Array:
    """How much of its neighbourhood every position knows, (B, n) float32 in [0, 1).

    The sum of near (1 - near)^(d - 1) / 2 over the visible positions (B, n) bool at a distance d of
    1 or more: close ones count most. CART of Ye et al. (Dream), arXiv 2508.15487; mdm.md 2.5.
    """
    position = jnp.arange(visible.shape[1])
    distance = jnp.abs(position[:, None] - position[None])
    share = jnp.where(distance > 0, near * (1 - near) ** (distance - 1.0) / 2, 0.0)
    return visible.astype(jnp.float32) @ share

"""Deletion and masking: rows of which a part has not come yet and a part is not known yet.

A token comes, as a mask, at one time and is revealed at a later one. What has come stands packed at
the front of a row of fixed capacity, behind an anchor that is always there; how many tokens are
missing behind each of them is the gap after it. Source: Kim et al. (FlexMDM), arXiv 2509.01025;
flexmdm.md section 2.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aodiff.core.corruption import live
from aodiff.core.schedules import Rise


class Partial(NamedTuple):
    """Rows at a time between nothing and data; B rows of C slots, of which `length` are live.

    tokens (B, C) int32, the mask id where not revealed, 0 beyond the length; origin (B, C) int32,
    the index of each slot in the data, C beyond; target (B, C) int32, its true token; masked (B, C)
    bool; gap (B, C) int32, tokens missing between a slot and the next; open (B, C) bool, live
    slots after which there may be any.
    """

    tokens: jax.Array
    length: jax.Array
    origin: jax.Array
    target: jax.Array
    masked: jax.Array
    gap: jax.Array
    open: jax.Array


def event_times(
    keys: jax.Array, n: int, insertion: Rise, unmasking: Rise
) -> tuple[jax.Array, jax.Array]:
    """When each of n tokens comes and when it is revealed, both (B, n) float32 in [0, 1].

    The first has the distribution function of `insertion`, the second that of `unmasking` given
    that it is later (flexmdm.md 2.1).

    Args:
      keys: (B,) typed keys.
    """
    draws = jax.vmap(lambda key: jax.random.uniform(key, (2, n)))(keys)
    come = insertion.time_of(draws[:, 0])
    return come, unmasking.time_of(draws[:, 1] * unmasking.left(come))


def openings(fixed: jax.Array, length: jax.Array) -> jax.Array:
    """After which tokens (B, C) of whole rows there may be insertions, bool.

    Not inside a prompt or any run of fixed tokens, and not at the end of a row that ends in a fixed
    token behind free ones, which is a suffix; after the last token of a prompt there may be.

    Args:
      fixed: (B, C) bool, tokens that are always there. length: (B,) int32 of the whole rows.
    """
    exists = live(length, fixed.shape[1])
    free = exists & ~fixed
    before_free = jnp.concatenate([free[:, 1:], jnp.zeros_like(free[:, :1])], axis=1)
    last = jnp.arange(fixed.shape[1])[None] == length[:, None] - 1
    suffix = fixed & (jnp.cumsum(free, axis=1) > 0)
    return exists & (free | before_free | (last & ~suffix))


def corrupt(
    tokens: jax.Array,
    length: jax.Array,
    fixed: jax.Array,
    come: jax.Array,
    revealed: jax.Array,
    time: jax.Array,
    mask_id: int,
) -> Partial:
    """Rows at `time`, with static shapes.

    Args:
      tokens: (B, C) int32, the anchor first. length: (B,) int32, the anchor included; what a token
        is says nothing about where a row ends.
      fixed: (B, C) bool, tokens that are there from the start, the anchor among them.
      come, revealed: (B, C) float32, from `event_times`. time: (B,) float32.
    """
    capacity = tokens.shape[1]
    at = jnp.broadcast_to(jnp.arange(capacity)[None], tokens.shape)
    noisy = live(length, capacity) & ~fixed
    keep = live(length, capacity) & ~(noisy & (time[:, None] < come))
    masked = noisy & (time[:, None] < revealed)
    place = jnp.where(keep, jnp.cumsum(keep, axis=1) - 1, capacity)
    pack = lambda x, fill: scatter(x, place, fill)
    number = jnp.sum(keep, axis=1, dtype=jnp.int32)
    exists = live(number, capacity)
    origin = pack(at, capacity)
    following = jnp.concatenate([origin[:, 1:], jnp.full_like(origin[:, :1], capacity)], axis=1)
    following = jnp.minimum(following, length[:, None])
    return Partial(
        tokens=pack(jnp.where(masked, mask_id, tokens), 0),
        length=number,
        origin=origin,
        target=pack(tokens, 0),
        masked=pack(masked, False),
        gap=jnp.where(exists, following - origin - 1, 0),
        open=pack(openings(fixed, length), False),
    )


def scatter(x: jax.Array, place: jax.Array, fill: jax.typing.ArrayLike) -> jax.Array:
    """x (B, C) moved to the slots `place` (B, C) of rows full of `fill`; those outside are gone."""
    rows = jnp.arange(x.shape[0])[:, None]
    return jnp.full_like(x, fill).at[rows, place].set(x, mode="drop")


def gaps_before(gap: jax.Array, length: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gaps after slots, anchor included, as gaps before tokens of rows without an anchor.

    Returns:
      (B, C) int32 and which of them there are, (B, C) bool: gap i is before token i, and the one
      behind the last token is at the length of the row. Only models trained so can read them.
    """
    return gap, live(length, gap.shape[1])


def masked_share(insertion: Rise, unmasking: Rise, times: np.ndarray) -> np.ndarray:
    """Probability that a token is there and masked at each of `times` (T,), float64.

    left_u(t) times the integral of insertion'(s) / left_u(s) up to t (flexmdm.md 2.2).
    """
    grid = 1 - np.linspace(1, 1e-3, 4001) ** 2  # finer where the integrand may be steep
    grid = np.unique(
        np.concatenate([grid, np.linspace(0, 1e-2, 501), 1 - np.geomspace(1, 1e-6, 2001)])
    )
    left = np.asarray(insertion.left(jnp.asarray(grid, jnp.float32)), np.float64)
    kept = np.asarray(unmasking.left(jnp.asarray(grid, jnp.float32)), np.float64)
    parts = -np.diff(left) / np.sqrt(kept[1:] * kept[:-1])
    inner = np.concatenate([[0.0], np.cumsum(parts)])
    return np.interp(times, grid, kept * inner)


def most_masked(insertion: Rise, unmasking: Rise, n: int) -> int:
    """How many of n tokens are masked at once at most, but for one row in 10^8 (flexmdm.md 3.7)."""
    share = masked_share(insertion, unmasking, 1 - np.geomspace(1, 1e-5, 4001)).max()
    return min(n, int(np.ceil(n * share + 6 * np.sqrt(n * share * (1 - share)))))


def first_masked(masked: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
    """Slots (B, most) int32 of the first masks of each row, and which of these there are, bool."""
    slots = jnp.argsort(~masked, axis=1, stable=True)[:, :most]
    return slots, jnp.take_along_axis(masked, slots, axis=1)


# ---- losses -------------------------------------------------------------------------------------


def rate_loss(log_mean: jax.Array, gap: jax.Array) -> jax.Array:
    """exp(z) - g z: the divergence of the mean count exp(z) from g, up to what only g decides.

    With the hazard of insertion and the cross entropy of masks it makes, less the number of tokens,
    a bound on the likelihood of a string and its length (flexmdm.md 3.6).
    """
    return jnp.exp(log_mean) - gap * log_mean


def class_log_mean(logits: jax.Array) -> jax.Array:
    """Log of the mean count (...) of logits (..., K + 1) of 0, 1, ..., and of K or more."""
    counts = jnp.arange(logits.shape[-1], dtype=jnp.float32)
    logs = jnp.where(counts > 0, jnp.log(jnp.maximum(counts, 1)), -jnp.inf)
    logs = logs.reshape((1,) * (logits.ndim - 1) + (-1,))
    return jax.nn.logsumexp(jax.nn.log_softmax(logits) + logs, axis=-1)


def path_constant(n: int) -> float:
    """What the variational loss of the paper has more than the bound, for a row of n tokens, nats.

    The expected sum of the logs of the gaps that tokens fall into when they come in uniform order:
    c(n) = log n + 2 / n sum of c(k) for k below n.
    """
    found, total = [0.0, 0.0], 0.0
    for m in range(2, n + 1):
        total += found[m - 1]
        found.append(np.log(m) + 2 / m * total)
    return float(found[n])

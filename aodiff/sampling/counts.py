"""How many masks are inserted in each gap: rules, and rows without room for all of them.

Source: flexmdm.md 7.3 and 7.5.
"""

import math
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from aodiff import rng


@flax.struct.dataclass
class Gaps:
    """What a rule may look at in one step.

    Attributes:
      keys: (B,) typed keys of this step.
      mean: (B, C) float32 mean counts of missing tokens, 0 where there is no open gap.
      logits: (B, C, K + 1) of 0, 1, ..., K of them, or None.
      open: (B, C) bool.
      chance: () float32, with which a missing token comes in this step.
      room: (B,) int32 masks that a row can take.
    """

    keys: jax.Array
    mean: jax.Array
    logits: jax.Array | None
    open: jax.Array
    chance: jax.Array
    room: jax.Array


def _poisson(g: Gaps) -> jax.Array:
    """Independent Poisson counts; given that they are cut to the room, a multinomial of it."""
    rate = g.mean * g.chance
    ends = jnp.cumsum(rate, axis=1)
    number = jax.vmap(jax.random.poisson)(rng.fold(g.keys, 0), ends[:, -1])
    number = jnp.minimum(number, g.room)
    points = uniform(rng.fold(g.keys, 1), rate.shape[1]) * ends[:, -1:]
    at = jax.vmap(lambda e, p: jnp.searchsorted(e, p, side="right"))(ends, points)
    drawn = jnp.arange(rate.shape[1])[None] < number[:, None]
    rows = jnp.arange(rate.shape[0])[:, None]
    return jnp.zeros_like(rate, jnp.int32).at[rows, at].add(drawn.astype(jnp.int32), mode="drop")


def _bernoulli(g: Gaps) -> jax.Array:
    return uniform(g.keys, g.mean.shape[1]) < g.mean * g.chance


def _floor_bernoulli(g: Gaps) -> jax.Array:
    rate = g.mean * g.chance
    return jnp.floor(rate) + (uniform(g.keys, rate.shape[1]) < rate - jnp.floor(rate))


def _thin(g: Gaps) -> jax.Array:
    """A binomial part of a number drawn from its law, in one draw: exact for one gap."""
    most = g.logits.shape[-1] - 1
    missing, coming = np.mgrid[: most + 1, : most + 1]
    ways = np.array([[math.comb(m, c) for c in range(most + 1)] for m in range(most + 1)])
    left = jnp.asarray(np.maximum(missing - coming, 0), jnp.float32)
    coming = jnp.asarray(coming, jnp.float32)
    table = jnp.asarray(ways, jnp.float32) * g.chance**coming * (1 - g.chance) ** left
    law = jax.nn.softmax(g.logits) @ table
    ends = jnp.cumsum(law, axis=-1)
    points = uniform(g.keys, law.shape[1])[..., None] * ends[..., -1:]
    return jnp.sum(ends[..., :-1] <= points, axis=-1)


# "poisson" has the right mean and too much spread, "bernoulli" is short where a gap misses much,
# "thin" needs a model with model.classes and is exact for one gap with any number of steps.
COUNTS: dict[str, Callable[[Gaps], jax.Array]] = {
    "poisson": _poisson,
    "bernoulli": _bernoulli,
    "floor_bernoulli": _floor_bernoulli,
    "thin": _thin,
}


def draw(rule: str, gaps: Gaps) -> jax.Array:
    """Counts (B, C) int32 by a rule of `COUNTS`, as far as there is room."""
    counts = jnp.where(gaps.open, COUNTS[rule](gaps).astype(jnp.int32), 0)
    return fit(rng.fold(gaps.keys, 2), counts, gaps.room)


def fit(keys: jax.Array, counts: jax.Array, room: jax.Array) -> jax.Array:
    """Takes single masks away at random, each as likely as any other, until there is room.

    Args:
      keys: (B,). counts: (B, C) int32. room: (B,) int32 most of a row.
    """

    def excess(counts: jax.Array) -> jax.Array:
        return jnp.sum(counts, axis=1) - room

    def one(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        i, counts = carry
        point = uniform(rng.fold(keys, i), 1) * jnp.sum(counts, axis=1, keepdims=True)
        ends = jnp.cumsum(counts, axis=1)
        at = jnp.sum(ends <= point.astype(jnp.int32), axis=1)
        taken = (jnp.arange(counts.shape[1])[None] == at[:, None]) & (excess(counts) > 0)[:, None]
        return i + 1, counts - taken

    start = jnp.int32(0), counts.astype(jnp.int32)
    return jax.lax.while_loop(lambda c: jnp.any(excess(c[1]) > 0), one, start)[1]


def uniform(keys: jax.Array, n: int) -> jax.Array:
    """(B, n) float32 of `keys` (B,); a draw does not depend on n."""
    at = jnp.broadcast_to(jnp.arange(n), (len(keys), n))
    return jax.vmap(jax.vmap(jax.random.uniform))(rng.cell_keys(keys, at))

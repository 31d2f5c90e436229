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
from aodiff.sampling.holes import Holes, total


@flax.struct.dataclass
class Gaps:
    """What a rule may look at in one step.

    Attributes:
      keys: (B,) typed keys of this step.
      mean: (B, C) float32 mean counts of missing tokens, 0 where there is no open gap.
      logits: (B, C, K + 1) of 0, 1, ..., K of them, or None.
      open: (B, C) bool.
      chance: () float32, with which a missing token comes in this step.
      room: (B,) int32 masks that a row can take, at least what its holes need.
      holes: bounds of what holes take, or None.
      last: () bool, no later step inserts.
    """

    keys: jax.Array
    mean: jax.Array
    logits: jax.Array | None
    open: jax.Array
    chance: jax.Array
    room: jax.Array
    holes: Holes | None = None
    last: jax.typing.ArrayLike = False


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
    """Counts (B, C) int32 by a rule of `COUNTS`, as far as there is room and holes allow."""
    counts = jnp.where(gaps.open, COUNTS[rule](gaps).astype(jnp.int32), 0)
    if gaps.holes is None:
        return fit(rng.fold(gaps.keys, 2), counts, gaps.room)
    lift = gaps.holes.lift(gaps.mean, gaps.open)
    more = _floor_bernoulli(gaps.replace(keys=rng.fold(gaps.keys, 3), mean=lift))
    counts = fit(rng.fold(gaps.keys, 2), counts + more.astype(jnp.int32), gaps.room, gaps.holes)
    weight = jnp.where(gaps.last & gaps.open, gaps.mean + lift, 0)
    return fill(rng.fold(gaps.keys, 4), counts, weight, gaps.holes)


def fit(
    keys: jax.Array, counts: jax.Array, room: jax.Array, holes: Holes | None = None
) -> jax.Array:
    """Takes single masks away at random, each as likely as any other, until there is room.

    Masks are taken from holes that have too many first, and never where a hole needs them.

    Args:
      keys: (B,). counts: (B, C) int32. room: (B,) int32 most of a row.
    """

    def loose(counts: jax.Array) -> jax.Array:
        """(B, C) int32 masks of which one has to go, none where all is well."""
        if holes is None:
            return counts * (jnp.sum(counts, axis=1) > room)[:, None]
        mine = total(counts, holes.owner)
        over = mine > holes.left
        crowded = (holes.needed(counts) > room)[:, None] & (mine > holes.due)
        return counts * jnp.where(
            jnp.any(over & (counts > 0), axis=1, keepdims=True), over, crowded
        )

    take = lambda i, counts: counts - pick(rng.fold(keys, i), loose(counts))
    return _until(take, counts, lambda counts: jnp.any(loose(counts) > 0))


def fill(keys: jax.Array, counts: jax.Array, weight: jax.Array, holes: Holes) -> jax.Array:
    """Adds what holes need beyond counts (B, C) to their gaps, in proportion to `weight` (B, C)."""

    def wanted(counts: jax.Array) -> jax.Array:
        return jnp.where(total(counts, holes.owner) < holes.due, weight, 0)

    add = lambda i, counts: counts + pick(rng.fold(keys, i), wanted(counts))
    return _until(add, counts, lambda counts: jnp.any(wanted(counts) > 0))


def pick(keys: jax.Array, weight: jax.Array) -> jax.Array:
    """One cell of each row, (B, C) int32 with a 1 there, in proportion to `weight` (B, C), none
    where all are 0."""
    ends = jnp.cumsum(weight, axis=1)
    point = uniform(keys, 1) * ends[:, -1:]
    at = jnp.sum(ends <= point, axis=1, keepdims=True)
    return (jnp.arange(weight.shape[1])[None] == at).astype(jnp.int32)


def _until(
    move: Callable[[jax.Array, jax.Array], jax.Array],
    counts: jax.Array,
    going: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """`move`, given how often it was made before, while `going`."""
    start = jnp.int32(0), counts.astype(jnp.int32)
    step = lambda carry: (carry[0] + 1, move(*carry))
    return jax.lax.while_loop(lambda carry: going(carry[1]), step, start)[1]


def uniform(keys: jax.Array, n: int) -> jax.Array:
    """(B, n) float32 of `keys` (B,); a draw does not depend on n."""
    at = jnp.broadcast_to(jnp.arange(n), (len(keys), n))
    return jax.vmap(jax.vmap(jax.random.uniform))(rng.cell_keys(keys, at))

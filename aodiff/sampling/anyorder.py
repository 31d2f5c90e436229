"""Cached any-order generation: sequential, parallel, and infilling around given tokens.

The realised order of a row is its given positions, then its targets. Slot 0 is the start vector and
slot s holds the token at order[s - 1]; the cache entry of a slot is final once the next element of
the order is known, and the order always tells. One network call does three things at once:

    call 0   prefill: content rows are the start and all given tokens; probes ask for group 0
    call i   content rows are the tokens of call i - 1, cached for good; probes ask for group i

Probes repeat the last content row with other targets, see the cache and the content before it, and
are not cached. With order (2, 0, 3, 1) in two calls of two tokens (token@own position -> target):

    call 0   content: start -> 2               probes: start -> 2, start -> 0
    call 1   content: x2@2 -> 0, x0@0 -> 3     probes: x0@0 -> 3, x0@0 -> 1

Tokens drawn by one call are independent given the past, the only approximation; one token per call
is exact ancestral sampling.

Source: Xue et al., arXiv 2506.19935, section 5 and aogpt.md 8.1 to 8.5 (static shapes).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aodiff import rng
from aodiff.core import categorical
from aodiff.sampling.samples import Samples
from aodiff.sampling.schedule import reveal_schedule, reveal_table


def realised_order(order: jax.Array, given: jax.Array) -> jax.Array:
    """Moves given positions to the front, keeping the relative order of `order` on both sides.

    Args:
      order: (B, n) int32 permutations.
      given: (B, n) bool by natural position.
    """
    is_target = ~jnp.take_along_axis(given, order, axis=1)
    moved = jnp.argsort(is_target, axis=1, stable=True)
    return jnp.take_along_axis(order, moved, axis=1)


def generate(
    model: Any,
    params: Any,
    keys: jax.Array,
    tokens: jax.Array,
    given: jax.Array,
    order: jax.Array,
    *,
    steps: int,
    schedule: str = "linear",
    temperature: float = 1.0,
    top_p: float = 1.0,
    max_given: int | None = None,
) -> Samples:
    """Fills the positions that are not given, in `steps` network calls at most.

    May be called under `jit`; the values of `order` are then not checked. A row's result depends on
    its own key, tokens and order only: the noise of a token is keyed by (row key, position).

    Args:
      model: an `AOGPT`, or anything with its `decode` and `init_cache`.
      params: variables for `model.apply`.
      keys: (B,) typed keys, one per row.
      tokens: (B, n) int32 in natural order; entries that are not given are ignored.
      given: (B, n) bool by natural position; rows may differ in how many they give.
      order: (B, n) int32 permutations. Given positions are moved to the front; targets keep the
        relative order they have here.
      steps: network calls for a row without given tokens, 1 to n; n is exact sampling. A row with
        fewer targets than steps takes one call per target.
      schedule: "linear" or "cosine", see `reveal_schedule`.
      temperature: 0 is greedy.
      top_p: nucleus mass; 1 is off.
      max_given: the most positions given in any row, a static size of the compiled program. None
        counts them, and under `jit`, where they cannot be counted, stands for n.

    Returns:
      Samples: tokens (B, n) int32 natural order, lengths (B,) all n, step (B, n) the call that
      filled a position, -1 where it was given.

    Raises:
      ValueError: shapes that disagree, an order that is no permutation, unknown schedule, steps
        outside 1..n, more given positions than `max_given`.
    """
    n = tokens.shape[1]
    _check_rows(tokens, given=given, order=order)
    _check_permutations(order)
    reveal_schedule(n, steps, schedule)  # raises for a request it cannot meet
    least, most = _given_range(given, max_given)
    table = reveal_table(n, steps, schedule)
    width = int(np.diff(table[n - most : n - least + 1], axis=1).max(initial=1))
    return _generate(
        model,
        params,
        keys,
        tokens,
        given,
        order,
        table,
        most=most,
        width=width,
        temperature=temperature,
        top_p=top_p,
    )


@functools.partial(jax.jit, static_argnames=("model", "most", "width", "temperature", "top_p"))
def _generate(model, params, keys, tokens, given, order, table, *, most, width, temperature, top_p):
    batch, n = tokens.shape
    order = realised_order(order, given)
    num_given = jnp.sum(given, axis=1, dtype=jnp.int32)[:, None]
    revealed = jnp.take(table, n - num_given[:, 0], axis=0)  # (B, steps + 1)
    # Call i feeds slots fed[i] .. fed[i + 1] - 1 and draws order[drawn[i] : drawn[i + 1]].
    drawn = num_given + revealed
    fed = jnp.concatenate([jnp.zeros_like(num_given), 1 + drawn], axis=1)
    calls = jnp.max(jnp.sum(jnp.diff(revealed, axis=1) > 0, axis=1))

    def call(rows, i, carry):
        tokens, step, cache = carry
        first, count = fed[:, i], fed[:, i + 1] - fed[:, i]
        logits, cache = feed(model, params, tokens, order, cache, first, count, rows, width)
        position = _gather(order, drawn[:, i], width)
        token_keys = rng.cell_keys(keys, position)
        ids = categorical.sample(token_keys, logits, temperature, top_p)
        wanted = jnp.arange(width)[None] < (drawn[:, i + 1] - drawn[:, i])[:, None]
        target = jnp.where(wanted, position, n)  # n is dropped
        return _put(tokens, target, ids), _put(step, target, jnp.full_like(ids, i)), cache

    tokens = jnp.where(given, tokens, 0).astype(jnp.int32)
    cache = model.init_cache(batch, max(n - 1 + width, most + 1))
    carry = (tokens, jnp.full_like(tokens, -1), cache)
    prefill = most + 1 > width  # else the first call fits the loop, and only one body is compiled
    if prefill:
        carry = call(most + 1, 0, carry)
    tokens, step, _ = jax.lax.fori_loop(int(prefill), calls, functools.partial(call, width), carry)
    return Samples(tokens, jnp.full(batch, n, jnp.int32), step)


def feed(
    model: Any,
    params: Any,
    tokens: jax.Array,
    order: jax.Array,
    cache: Any,
    first: jax.Array,
    count: jax.Array,
    rows: int,
    probes: int,
) -> tuple[jax.Array, Any]:
    """One network call: content slots first .. first + count - 1 of each row, then probes.

    Args:
      tokens: (B, n) natural order, filled at the positions the content slots hold.
      cache: holds slots 0 .. first - 1 at their own index; its length leaves room for `rows` more.
      first, count: (B,) int32; count <= rows. A row with count 0 is finished, its logits are noise.
      rows, probes: static widths.

    Returns:
      logits (B, probes, V) float32 for the targets that follow the last content slot, and the cache
      with the content slots written.
    """
    length = cache.k.shape[3]
    slot = first[:, None] + jnp.arange(rows)[None]
    own = jnp.where(slot == 0, -1, _gather(order, first - 1, rows))
    logits, new = model.apply(
        params,
        jnp.take_along_axis(tokens, jnp.maximum(own, 0), axis=1),
        own,
        _gather(order, first, rows),
        jnp.arange(rows)[None] < count[:, None],
        _gather(order, first + count - 1, probes),
        cache,
        jnp.arange(length)[None] < first[:, None],
        method="decode",
    )
    return logits, jax.tree.map(lambda old, rows: _write(old, rows, first), cache, new)


def _write(cache, rows, first):
    """Puts rows (N, B, H, m, K) at slots first (B,) of cache (N, B, H, T, K)."""

    def one(cache, rows, start):
        return jax.lax.dynamic_update_slice_in_dim(cache, rows.astype(cache.dtype), start, axis=2)

    return jax.vmap(one, in_axes=(1, 1, 0), out_axes=1)(cache, rows, first)


def _put(array, index, values):
    """array[b, index[b]] = values[b]; by row, so that a sharded batch needs no communication."""
    return jax.vmap(lambda a, i, v: a.at[i].set(v, mode="drop"))(array, index, values)


def _gather(order, first, width):
    """order[first : first + width] of each row, (B, width); indices past an end repeat that end."""
    index = first[:, None] + jnp.arange(width)[None]
    return jnp.take_along_axis(order, jnp.clip(index, 0, order.shape[1] - 1), axis=1)


def _concrete(array) -> bool:
    """Whether the host may read the values."""
    if isinstance(array, jax.core.Tracer):
        return False
    return not isinstance(array, jax.Array) or array.is_fully_addressable


def _check_rows(tokens, **others):
    for name, array in others.items():
        if array.shape != tokens.shape:
            raise ValueError(
                f"{name} has shape {array.shape} but tokens {tokens.shape}; both are (batch, n)"
            )
    if others.get("given") is not None and others["given"].dtype != bool:
        raise ValueError(
            f"given has dtype {others['given'].dtype}; pass a bool mask by position, not positions"
        )


def _check_permutations(order):
    if not _concrete(order):
        return
    wrong = np.any(np.sort(np.asarray(order), axis=1) != np.arange(order.shape[1])[None], axis=1)
    if wrong.any():
        raise ValueError(
            f"order row {int(np.argmax(wrong))} is not a permutation of 0..{order.shape[1] - 1}; "
            "every position must appear once"
        )


def _given_range(given, max_given) -> tuple[int, int]:
    """Least and most positions given in a row, as far as the host can tell."""
    n = given.shape[1]
    if not _concrete(given):
        return 0, n if max_given is None else max_given
    counts = np.asarray(given).sum(axis=1)
    least, most = int(counts.min()), int(counts.max())
    if max_given is not None and most > max_given:
        raise ValueError(f"a row gives {most} positions but max_given={max_given}; raise max_given")
    return (least, most) if max_given is None else (0, max_given)

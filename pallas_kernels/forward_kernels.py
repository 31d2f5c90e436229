"""The kernels of the forward: which tiles a block of queries works through, in which order."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.forward_tiles import Plan, Refs, Tile, finish, lanes, run, write_dead
from pallas_kernels.lowering import LANES
from pallas_kernels.masks import SEES_NOTHING
from pallas_kernels.reference import DEAD


def causal_kernel(*refs: Any, plan: Plan) -> None:
    """The diagonal goes first: it needs the mask and is cut to what each chunk sees; all keys
    before it are seen by all rows."""
    refs, block = Refs(*refs), pl.program_id(3)

    def diagonal(stream, row, rows, key):
        keys = min(plan.cut, row + rows - key)
        offset = row - key - plan.strict[stream]
        index = functools.partial(lax.broadcasted_iota, jnp.int32, (rows, keys))
        seen = None if offset >= keys - 1 else lambda: index(1) - index(0) <= offset
        return Tile(stream, row, rows, _aligned(block * plan.bq + key), keys, key == 0, seen)

    run(
        [diagonal(*c, key) for c in plan.chunks for key in range(0, c[1] + c[2], plan.cut)],
        refs,
        plan,
    )
    if plan.query_blocks > 1:
        count = block * (plan.bq // plan.bk)
        before = lambda j: [Tile(*c, _aligned(j * plan.bk), plan.bk) for c in plan.chunks]
        _sweep(0, count >> plan.unroll - 1, before, refs, plan)
        if plan.bq // plan.bk % 2:
            _last_odd(count, before, refs, plan)
    finish(refs, plan)


def interval_kernel(*refs: Any, plan: Plan) -> None:
    """Works through the list of active key blocks of a window, those first that need the mask:
    code (1, keys), hi (S, bq, 128) and perhaps lo (bq, 128)."""
    tables = 2 if plan.windows == 1 else 3
    (counts, order, *fetched), refs = refs[:tables], refs[tables:]
    (code, hi, *lo), refs = refs[3:-5], Refs(*refs[:3], *refs[-5:])
    batch, block = pl.program_id(0), pl.program_id(3)
    window = pl.program_id(4) if fetched else 0
    start = fetched[0][spot(plan, batch, block, 0)] if fetched else 0  # the first active window
    here = spot(plan, batch, block, window)
    masked, count = counts[2 * here], counts[2 * here + 1]

    def seen(key, stream, row, rows):
        codes, at = code[:, pl.ds(key, plan.bk)], pl.ds(row, rows)
        seen = codes <= lanes(hi[stream, at], plan.bk)
        for x in lo:
            seen &= codes >= lanes(x[at], plan.bk)
        return seen

    def floor(stream, row, rows):
        # Dead rows take part in tiles that all others see: nothing adds to so high a maximum.
        return jnp.where(hi[stream, pl.ds(row, rows)] == SEES_NOTHING, -DEAD, DEAD / 2)

    def tiles(place, first=False, mask=True):
        key = _aligned(order[here * (plan.window // plan.bk) + place] * plan.bk)
        bind = functools.partial
        return [
            Tile(*c, key, plan.bk, first, bind(seen, key, *c) if mask else None, bind(floor, *c))
            for c in plan.chunks
        ]

    def continue_at(done, then=lambda: None):
        loops = count - done >> plan.unroll - 1
        middle = jnp.maximum(masked - done, 0) + plan.unroll - 1 >> plan.unroll - 1
        middle = jnp.minimum(middle, loops)
        _sweep(0, middle, lambda t: tiles(t + done), refs, plan)
        _sweep(middle, loops, lambda t: tiles(t + done, mask=False), refs, plan)
        _last_odd(count - done, lambda t: tiles(t + done), refs, plan, then)

    any_key = counts[2 * spot(plan, batch, block, start) + 1] > 0
    if not fetched:

        @pl.when(any_key)
        def _():
            run(tiles(0, first=True), refs, plan)
            continue_at(1, then=lambda: finish(refs, plan))

        pl.when(jnp.logical_not(any_key))(lambda: write_dead(refs))
        return
    begins = window == start
    pl.when(begins & any_key)(lambda: run(tiles(0, first=True), refs, plan))
    pl.when(count > 0)(lambda: continue_at(begins.astype(jnp.int32)))
    ends = window == plan.windows - 1
    pl.when(ends & any_key)(lambda: finish(refs, plan))
    pl.when(ends & jnp.logical_not(any_key))(lambda: write_dead(refs))


def spot(plan: Plan, batch: Any, block: Any, window: Any) -> Any:
    """Where the tables speak of a window of keys and a block of queries."""
    block = batch * plan.query_blocks + block if plan.batched else block
    return block * plan.windows + window


def _sweep(start: Any, stop: Any, tiles: Callable[[Any], list[Tile]], refs: Refs, plan: Plan):
    """Runs key blocks start..stop - 1, in units of `plan.unroll`."""
    n = plan.unroll

    def step(t, _):
        run([tile for u in range(n) for tile in tiles(t * n + u)], refs, plan)

    lax.fori_loop(start, stop, step, None)


def _last_odd(
    count: Any,
    tiles: Callable[[Any], list[Tile]],
    refs: Refs,
    plan: Plan,
    then: Callable[[], None] = lambda: None,
) -> None:
    """Runs the key block that a sweep in units of two leaves, and `then` in the same line of code,
    where it fills gaps between products."""
    if plan.unroll == 1:
        then()
        return
    odd = count & 1 == 1

    @pl.when(odd)
    def _():
        run(tiles(count - 1), refs, plan)
        then()

    pl.when(jnp.logical_not(odd))(then)


def _aligned(start: Any) -> Any:
    return pl.multiple_of(start, LANES)

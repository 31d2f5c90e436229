"""Which tiles of the score matrix have to be computed, from the vectors of a mask."""

import jax
import jax.numpy as jnp

from pallas_kernels.masks import NEVER_SEEN, SEES_NOTHING, IntervalMask, vectors


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple


def even_block(size: int, most: int) -> int:
    """The block, a multiple of 128 and at most `most`, that covers `size` in the fewest blocks and,
    of those, with the least padding."""
    return round_up(-(-size // -(-size // most)), 128)


def pad(x: jax.Array, axis: int, size: int, value: int = 0) -> jax.Array:
    """Pads `axis` of x at its end to `size`."""
    if x.shape[axis] == size:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths, constant_values=value)


def padded_vectors(
    mask: IntervalMask, rows: int, keys: int
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """`vectors` with rows padded to `rows` and keys to `keys`: no one sees the new keys, the new
    rows see nothing."""
    code, hi, lo = vectors(mask)
    return (
        pad(code, 1, keys, NEVER_SEEN),
        pad(hi, 2, rows, SEES_NOTHING),
        None if lo is None else pad(lo, 1, rows),
    )


def active_tiles(
    code: jax.Array, hi: jax.Array, lo: jax.Array | None, bq: int, bk: int
) -> jax.Array:
    """Returns (B, nq, nk) bool: False only where no row of the tile sees a key of it.

    Args:
      code: (B, Lk), hi: (B, S, L), lo: (B, L) or None, of lengths that are multiples of the blocks.
      bq: query rows of a tile (of every stream). bk: keys of a tile.
    """
    blocks = code.reshape(code.shape[0], -1, bk)
    rows = jnp.max(hi, axis=1).reshape(hi.shape[0], -1, bq)
    first = jnp.min(blocks, axis=2)
    active = first[:, None, :] <= jnp.max(rows, axis=2)[:, :, None]
    if lo is not None:
        last = jnp.max(jnp.where(blocks == NEVER_SEEN, SEES_NOTHING, blocks), axis=2)
        # A dead row has no say in where its block starts.
        alive = jnp.where(rows == SEES_NOTHING, NEVER_SEEN, lo.reshape(rows.shape))
        active &= last[:, None, :] >= jnp.min(alive, axis=2)[:, :, None]
    return active


def hull(active: jax.Array) -> jax.Array:
    """Returns (B, n, 2) int32: first and one past the last True of the last axis of (B, n, m).

    Both are 0 where there is none.
    """
    count = active.shape[-1]
    start = jnp.argmax(active, axis=-1)
    stop = count - jnp.argmax(active[..., ::-1], axis=-1)
    found = jnp.any(active, axis=-1)
    return jnp.where(found[..., None], jnp.stack([start, stop], axis=-1), 0).astype(jnp.int32)


def full_tiles(code: jax.Array, hi: jax.Array, lo: jax.Array | None, bq: int, bk: int) -> jax.Array:
    """Returns (B, nq, nk) bool: True only where every row that is not dead sees every key.

    Args: as of `active_tiles`.
    """
    blocks = code.reshape(code.shape[0], -1, bk)
    rows = hi.reshape(*hi.shape[:2], -1, bq)
    # A dead row has no say: what is added to it is thrown away.
    lowest = jnp.min(jnp.where(rows == SEES_NOTHING, NEVER_SEEN - 1, rows), axis=(1, 3))
    full = jnp.max(blocks, axis=2)[:, None, :] <= lowest[:, :, None]
    if lo is not None:
        alive = jnp.max(hi, axis=1) > SEES_NOTHING
        start = jnp.max(jnp.where(alive, lo, SEES_NOTHING).reshape(lo.shape[0], -1, bq), axis=2)
        full &= jnp.min(blocks, axis=2)[:, None, :] >= start[:, :, None]
    return full


def tile_lists(
    code: jax.Array,
    hi: jax.Array,
    lo: jax.Array | None,
    bq: int,
    bk: int,
    windows: int = 1,
) -> list[jax.Array]:
    """Lists the active key blocks of every query block, those first that need the mask.

    Args: as of `active_tiles`.
      windows: equal parts of the keys, each with a list of its own.

    Returns:
      How many need the mask and how many there are (B * nq * windows * 2,), and which of the
      window's blocks (B * nq * nk,), filled up with zeros. If there are several windows, also which
      window has to be in memory (B * nq * windows,): an inactive one keeps that before it, or has
      the first active one. All int32, flat as scalar memory wants it.
    """
    active = active_tiles(code, hi, lo, bq, bk)
    full = active & full_tiles(code, hi, lo, bq, bk)
    active, full = (x.reshape(*x.shape[:2], windows, -1) for x in (active, full))
    masked = active & ~full
    counts = jnp.stack([jnp.sum(masked, axis=-1), jnp.sum(active, axis=-1)], axis=-1)
    after = lambda tiles, count: jnp.where(tiles, jnp.cumsum(tiles, axis=-1) - 1 + count, -1)
    place = jnp.maximum(after(masked, 0), after(full, counts[..., :1]))
    count = active.shape[-1]
    index = lambda axis: jax.lax.broadcasted_iota(jnp.int32, (1, 1, 1, count, count), axis)
    which = jnp.sum(jnp.where(place[..., None, :] == index(3), index(4), 0), axis=-1)
    tables = [counts, which]
    if windows > 1:
        used = jnp.any(active, axis=-1)
        window = jax.lax.broadcasted_iota(jnp.int32, used.shape, 2)
        last = jax.lax.cummax(jnp.where(used, window, -1), axis=2)
        tables.append(jnp.where(last < 0, jnp.argmax(used, axis=-1)[..., None], last))
    return [x.astype(jnp.int32).reshape(-1) for x in tables]

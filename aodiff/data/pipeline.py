"""From rows to batches: the position in the data is the training step.

Global batch k is rows k B .. (k+1) B - 1 of the shuffled stream, whatever the mesh and the number
of processes. There is no iterator state; starting at step k costs the same for every k.
"""

import hashlib
from collections.abc import Iterator

import grain
import jax
import numpy as np

from aodiff.data.info import DataError
from aodiff.data.sources import Source

ROUNDS = 8
MAX_STEPS = 2**40


def _mix(x: np.ndarray) -> np.ndarray:
    """Finaliser of splitmix64: a bijection of uint64 that spreads every bit over all others."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(index: np.ndarray, n: int, seed: int, epoch: int = 0) -> np.ndarray:
    """Returns the images, int64, of `index` (any shape, in [0, n)) under a keyed permutation of n.

    A Feistel network over the next power of two, with cycle walking back into [0, n): any index on
    its own, no memory. Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (2002).
    """
    bits = max(1, (n - 1).bit_length())
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * ROUNDS).digest()
    keys = np.frombuffer(digest, "<u8")

    def network(x: np.ndarray) -> np.ndarray:
        right = bits // 2
        for key in keys:
            left = bits - right
            high, low = x >> np.uint64(right), x & np.uint64((1 << right) - 1)
            high = (high ^ _mix(low ^ key)) & np.uint64((1 << left) - 1)
            # The halves swap, and so do their widths.
            x, right = (low << np.uint64(left)) | high, left
        return x

    out = network(np.asarray(index).astype(np.uint64).ravel())
    while (outside := np.flatnonzero(out >= np.uint64(n))).size:
        out[outside] = network(out[outside])
    return out.astype(np.int64).reshape(np.shape(index))


def stream_rows(stream: np.ndarray, n: int, seed: int) -> np.ndarray:
    """Rows of a source of `n` rows at positions `stream` (int64) of the endless shuffled stream."""
    epochs, within = np.divmod(stream, n)
    rows = np.empty_like(within)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        rows[here] = permute(within[here], n, seed, int(epoch))
    return rows


def as_batch(fields: dict[str, np.ndarray], rows: np.ndarray) -> dict[str, np.ndarray]:
    """Fields of a source as a batch; see `aodiff.methods.base.token_rows`.

    tokens (B, L) int32; loss_mask and given (B, L) bool; length, example_id (B,) int32.
    """
    tokens = fields["tokens"].astype(np.int32)
    position = np.arange(tokens.shape[1])
    length = fields.get("length", np.full(len(rows), tokens.shape[1])).astype(np.int32)
    mask = position < length[:, None]
    if "present" in fields:
        mask &= fields["present"].astype(bool)
    given = np.zeros(tokens.shape, bool)
    if "prompt_len" in fields:
        given |= position < fields["prompt_len"].astype(np.int64)[:, None]
    if "given" in fields:
        given |= fields["given"].astype(bool)
    given &= mask
    return {
        "tokens": tokens,
        "loss_mask": mask & ~given,
        "given": given,
        "length": length,
        "example_id": rows.astype(np.int32),
    }


def host_batch(
    source: Source, global_batch: int, seed: int, step: int, rows: np.ndarray
) -> dict[str, np.ndarray]:
    """Returns rows `rows` (int64, in [0, global_batch)) of global training batch `step`."""
    picked = stream_rows(step * global_batch + rows, len(source), seed)
    return as_batch(source.read(picked), picked)


def local_rows(sharding: jax.sharding.Sharding, global_batch: int) -> np.ndarray:
    """Rows of the global batch that the devices of this process hold, ascending, int64."""
    index_map = sharding.addressable_devices_indices_map((global_batch,))
    spans = sorted({index[0].indices(global_batch)[:2] for index in index_map.values()})
    return np.concatenate([np.arange(first, last) for first, last in spans])


def to_device(
    local: dict[str, np.ndarray], sharding: jax.sharding.Sharding, global_batch: int
) -> dict[str, jax.Array]:
    """Global arrays from the rows of `local_rows`."""
    return {
        name: jax.make_array_from_process_local_data(sharding, x, (global_batch, *x.shape[1:]))
        for name, x in local.items()
    }


class _Steps:
    """Random access over training steps: element k is the global batch of step k, on the devices.

    Read-ahead threads call it, so that neither reading nor placing a batch delays a step.
    """

    def __init__(self, source: Source, global_batch: int, seed: int, sharding):
        self._args = source, global_batch, seed
        self._sharding = sharding
        self._rows = local_rows(sharding, global_batch)

    def __len__(self) -> int:
        return MAX_STEPS

    def __getitem__(self, step: int) -> dict[str, jax.Array]:
        source, global_batch, seed = self._args
        local = host_batch(source, global_batch, seed, int(step), self._rows)
        return to_device(local, self._sharding, global_batch)


class TrainBatches(Iterator):
    """Endless iterator over global batches; `close` stops the thread that reads ahead."""

    def __init__(self, steps: _Steps, start_step: int, prefetch: int):
        dataset = grain.MapDataset.source(steps)[start_step:].to_iter_dataset(
            grain.ReadOptions(num_threads=min(1, prefetch), prefetch_buffer_size=prefetch)
        )
        self._batches = iter(dataset)

    def __next__(self) -> dict[str, jax.Array]:
        return next(self._batches)

    def close(self) -> None:
        self._batches.close()


def train_batches(
    source: Source,
    global_batch: int,
    sharding: jax.sharding.Sharding,
    seed: int,
    start_step: int = 0,
    prefetch: int = 4,
) -> TrainBatches:
    """Returns an iterator over the global batches of steps `start_step`, `start_step` + 1, ...

    Args:
      source: the training split.
      global_batch: B, rows per step over all devices.
      sharding: how dimension 0 of a batch is laid out over the mesh.
      seed: of the shuffle; each epoch has a permutation of its own.
      start_step: first step.
      prefetch: host batches read ahead by one thread; 0 reads in the caller.

    Raises:
      DataError: the split is smaller than one batch.
    """
    if len(source) < global_batch:
        raise DataError(
            f"the training split has {len(source)} rows, fewer than one global batch of "
            f"{global_batch}; lower train.global_batch or use more data."
        )
    return TrainBatches(_Steps(source, global_batch, seed, sharding), start_step, prefetch)


def eval_batches(
    source: Source, global_batch: int, sharding: jax.sharding.Sharding
) -> Iterator[dict[str, jax.Array]]:
    """Yields every row once, in file order; padding rows have no loss and `example_id` -1."""
    n = len(source)
    mine = local_rows(sharding, global_batch)
    for first in range(0, n, global_batch):
        rows = first + mine
        real = rows < n
        batch = as_batch(source.read(np.minimum(rows, n - 1)), rows)
        batch["loss_mask"] &= real[:, None]
        batch["example_id"][~real] = -1
        yield to_device(batch, sharding, global_batch)

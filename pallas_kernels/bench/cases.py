"""The programs whose static schedules are compared: own kernels, splash attention, dense XLA.

Names of cases, which is all that a fresh process is told:

  own/KIND/forward/L/D/DTYPE, own/KIND/backward/L/D/DTYPE     KIND one of `KINDS`
  splash/VARIANT/L/D/DTYPE/BLOCK_QxBLOCK_KVxCOMPUTE             forward and backward at once
  dense/KIND/forward/L/D/DTYPE, dense/KIND/backward/...         the backward includes the forward
  cached/L/D/DTYPE
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_masks

from pallas_kernels.bench.aot import Case
from pallas_kernels.blocks import active_tiles, padded_vectors, round_up
from pallas_kernels.config import default_config
from pallas_kernels.masks import (
    IntervalMask,
    causal_streams,
    length_mask,
    rank_streams,
    segment_mask,
    vectors,
)

HEADS = 8  # enough for the filling and draining of a kernel's pipeline not to matter
GRAIN = 128  # every block is a multiple: lengths in between cost as much as the next multiple


def _uniform_lengths(length: int) -> IntervalMask:
    """One example of every length that costs something else: their mean is that of all lengths."""
    return length_mask(jnp.arange(GRAIN, length + 1, GRAIN, dtype=jnp.int32), length)


def _ranks(length: int, group: int, shuffle: bool) -> IntervalMask:
    rank = np.arange(length, dtype=np.int32) // group
    if shuffle:
        rank = np.random.default_rng(0).permutation(rank)
    return rank_streams(jnp.asarray(rank)[None])


def _segments(length: int) -> IntervalMask:
    """Four rows packed into one, of 4, 3, 2 and 1 tenths."""
    ends = (np.cumsum([4, 3, 2, 1]) * length) // 10
    return segment_mask(jnp.asarray(np.searchsorted(ends, np.arange(length), side="right"))[None])


@dataclasses.dataclass(frozen=True)
class Kind:
    """A mask, and the variant of splash attention that does the same work, if there is one."""

    mask: Callable[[int], IntervalMask]
    splash: str | None = None


KINDS = {
    "two_stream": Kind(causal_streams, "two_stream"),
    "one_stream": Kind(lambda n: causal_streams(n, strict=(False,)), "causal"),
    "full_length": Kind(lambda n: length_mask(jnp.array([n], jnp.int32), n), "full"),
    "uniform_length": Kind(_uniform_lengths, "full"),
    "rank": Kind(lambda n: _ranks(n, 1, True)),
    "block_rank": Kind(lambda n: _ranks(n, 64, False)),
    "segment": Kind(_segments),
}


def _causal(rows: np.ndarray, keys: int) -> splash_masks.Mask:
    """A causal mask for queries in any order."""
    mask = splash_masks.CausalMask((len(rows), keys))
    mask.q_sequence = rows.astype(np.int32)
    return mask


def _interleaved(length: int, block: int) -> np.ndarray:
    """Positions of the rows of two streams when half of every query block is of each."""
    half = np.arange(length).reshape(-1, max(block // 2, 1))
    return np.concatenate([half, half], axis=1).ravel()


@dataclasses.dataclass(frozen=True)
class Splash:
    """A mask for splash attention, and the blocks to take the best of: query rows, keys, keys per
    step of the computation. Others tried at L = 2048 on v5p cost more."""

    mask: Callable[[int, int], splash_masks.Mask]  # from L and the query rows of a block
    blocks: tuple[tuple[int, int, int], ...]
    streams: int = 1  # whose rows one call takes


_PLAIN = ((512, 512, 512), (512, 1024, 512), (1024, 1024, 512), (1024, 1024, 1024))
_STACKED = ((1024, 512, 512), (1024, 1024, 512), (1024, 1024, 1024), (2048, 512, 512))
SPLASH = {
    "causal": Splash(lambda n, block: splash_masks.CausalMask((n, n)), _PLAIN),
    "interleaved": Splash(
        lambda n, block: _causal(_interleaved(n, block), n), (*_STACKED, (2048, 1024, 512)), 2
    ),
    "full": Splash(lambda n, block: splash_masks.FullMask((n, n)), _PLAIN),
}
# Two streams are two calls with one stream each, or one with the rows of both.
VARIANTS = {"two_stream": ("causal", "interleaved"), "causal": ("causal",), "full": ("full",)}


def splash_names(mask: str, length: int, dim: int, dtype: str) -> list[str]:
    """Names of the cases with this mask of `SPLASH` that are possible."""
    if dtype != "bfloat16":  # of float32, splash computes the products of one bfloat16 pass
        return []
    what = SPLASH[mask]
    return [
        f"splash/{mask}/{length}/{dim}/{dtype}/{bq}x{bk}x{compute}"
        for bq, bk, compute in what.blocks
        if length % (bq // what.streams) == 0 and length % bk == 0
    ]


def _shape(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _inputs(
    mask: IntervalMask, length: int, dim: int, dtype: str, batch: int = 1
) -> list[jax.ShapeDtypeStruct]:
    """q, k, v for a mask; the more examples the mask has, the fewer heads."""
    examples = 1 if mask.code is None else mask.code.shape[0]
    heads = max(1, HEADS // examples)
    batch = batch if mask.code is None else examples
    q = _shape(batch, heads, mask.streams, length, dim, dtype=dtype)
    k = _shape(batch, heads, length, dim, dtype=dtype)
    return [q, k, k]


def visible_pairs(mask: IntervalMask) -> float:
    """Pairs of a query and a key it sees, over all streams; the mean over examples."""
    code, hi, lo = (None if x is None else np.asarray(x) for x in vectors(mask))
    pairs = 0
    for b in range(code.shape[0]):
        ordered = np.sort(code[b])
        below = np.searchsorted(ordered, hi[b], side="right")
        start = 0 if lo is None else np.searchsorted(ordered, lo[b], side="left")[None]
        pairs += np.maximum(below - start, 0).sum()
    return float(pairs / code.shape[0])


def tile_pairs(mask: IntervalMask, length: int, bq: int, bk: int) -> float:
    """Pairs in the tiles that have to be computed, over all streams; the mean over examples."""
    padded = padded_vectors(mask, round_up(length, bq), round_up(length, bk))
    active = np.asarray(active_tiles(*padded, bq, bk))
    return float(active.sum() / active.shape[0]) * bq * bk * mask.streams


def _own(kind: str, way: str, length: int, dim: int, dtype: str) -> Case:
    from pallas_kernels import backward, forward

    mask = KINDS[kind].mask(length)
    q, k, v = _inputs(mask, length, dim, dtype)
    config = default_config(mask.streams, length, length)
    scale = dim**-0.5
    bq, bk = (config.bq, config.bk) if way == "forward" else (config.bwd_bq, config.bwd_bk)
    facts = {
        "heads": q.shape[0] * q.shape[1],
        "streams": mask.streams,
        "visible_pairs": visible_pairs(mask),
        "tile_pairs": tile_pairs(mask, length, bq, bk),
        "config": {n: x for n, x in dataclasses.asdict(config).items() if n != "interpret"},
    }
    if way == "forward":
        function = lambda q, k, v, mask: forward.forward(q, k, v, mask, scale=scale, config=config)
        return Case(function, [q, k, v, mask], facts)
    row = _shape(*q.shape[:-1], dtype=jnp.float32)
    function = lambda q, k, v, mask, lse2, delta, do: backward.backward(
        q, k, v, mask, lse2, delta, do, scale=scale, config=config
    )
    return Case(function, [q, k, v, mask, row, row, q], facts)


def _splash(mask: str, length: int, dim: int, dtype: str, sizes: str) -> Case:
    bq, bk, compute = map(int, sizes.split("x"))
    rows = SPLASH[mask].streams * length
    kernel = splash.make_splash_mha(
        mask=splash_masks.MultiHeadMask([SPLASH[mask].mask(length, bq)] * HEADS),
        block_sizes=splash.BlockSizes(
            block_q=bq,
            block_kv=bk,
            block_kv_compute=compute,
            block_q_dkv=bq,
            block_kv_dkv=bk,
            block_kv_dkv_compute=compute,
            use_fused_bwd_kernel=True,
        ),
        head_shards=1,
        q_seq_shards=1,
    )
    q, k = _shape(HEADS, rows, dim, dtype=dtype), _shape(HEADS, length, dim, dtype=dtype)

    def both(q, k, v, do):
        out, pull = jax.vjp(kernel, q, k, v)
        return out, pull(do)

    blocks = kernel.fwd_mask_info.block_mask
    active = rows // bq * length // bk if blocks is None else int((np.asarray(blocks[0]) > 0).sum())
    seen = length**2 if mask == "full" else length * (length + 1) // 2
    facts = {
        "heads": HEADS,
        "visible_pairs": float(seen * SPLASH[mask].streams),
        "tile_pairs": float(active * bq * bk),
    }
    return Case(both, [q, k, k, q], facts)


def _dense(kind: str, way: str, length: int, dim: int, dtype: str) -> Case:
    from pallas_kernels.dispatch import interval_attention

    mask = KINDS[kind].mask(length)
    q, k, v = _inputs(mask, length, dim, dtype, batch=4)  # 1 breaks v6e's compiler

    def attend(q, k, v, mask):
        return interval_attention(q, k, v, mask, impl="xla_dense")

    def both(q, k, v, mask, do):
        out, pull = jax.vjp(lambda *x: attend(*x, mask), q, k, v)
        return out, pull(do)

    facts = {"heads": q.shape[0] * q.shape[1]}
    if way == "forward":
        return Case(attend, [q, k, v, mask], facts)
    return Case(both, [q, k, v, mask, q], facts)


def _cached(length: int, dim: int, dtype: str) -> Case:
    from pallas_kernels.cached import cached_attention

    lengths = jnp.arange(length // HEADS, length + 1, length // HEADS, dtype=jnp.int32)
    cache = _shape(HEADS, HEADS, length, dim, dtype=dtype)
    q = _shape(HEADS, 1, HEADS, dim, dtype=dtype)
    facts = {"heads": HEADS * HEADS, "streams": 1}
    function = lambda q, k, v, n: cached_attention(q, k, v, n, impl="pallas")
    return Case(function, [q, cache, cache, lengths], facts)


def build(name: str) -> Case:
    """Makes a case from its name."""
    what, *rest = name.split("/")
    numbers = [int(x) if x.isdigit() else x for x in rest]
    return {"own": _own, "splash": _splash, "dense": _dense, "cached": _cached}[what](*numbers)


class _Named(Mapping):
    """Every case there could be, by name."""

    def __getitem__(self, name: str) -> Callable[[], Case]:
        return lambda: build(name)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


CASES = _Named()

"""Masks with a second, direct statement of who sees whom, inputs and backends of these tests."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk

BATCH = 2
KERNEL = {"interpret": True}
PIPED = {**KERNEL, "generation": "v6e"}

# Name -> impl and changes of its default configuration; None is no configuration at all.
BACKENDS = {
    "dense": ("xla_dense", None),
    "blocked": ("xla_blocked", {}),
    "kernel": ("pallas", KERNEL),
    "piped": ("pallas", PIPED),
    "splash": ("splash", KERNEL),
    "cudnn": ("cudnn", None),
}
CAUSAL_ONLY = ("splash", "cudnn")
HERE = [name for name in BACKENDS if name != "cudnn"]  # what runs on a CPU


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape of inputs with the blocks that a kernel cuts it into."""

    mask: str
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    dtype: str = "float32"
    rows: int = 200
    keys: int = 200
    bq: int = 128
    bk: int = 128

    def __str__(self) -> str:
        heads = f"{self.heads}over{self.kv_heads}"
        size = f"{self.rows}x{self.keys}"
        return f"{self.mask}-{heads}-{self.dim}-{self.dtype}-{size}-{self.bq}x{self.bk}"


def causal(*strict):
    def build(rng, rows, keys):
        i, j = np.arange(rows)[:, None], np.arange(keys)[None]
        seen = np.stack([j < i if s else j <= i for s in strict])
        return pk.causal_streams(rows, strict), np.broadcast_to(seen, (BATCH, *seen.shape))

    return build


def rank(group):
    """Ranks in natural order; `group` neighbours in rank are generated together."""

    def build(rng, rows, keys):
        r, of_key = (permutations(rng, n) // group for n in (rows, keys))
        if rows == keys:
            of_key = r
        mask = pk.rank_streams(r, key_rank=of_key)
        return mask, np.stack(
            [of_key[:, None, :] <= r[:, :, None], of_key[:, None, :] < r[:, :, None]], axis=1
        )

    return build


def prefix(rng, rows, keys):
    """A prompt that sees itself in both directions, then tokens in a random order."""
    prompt = np.arange(rows)[None] < np.array([[0], [137]])
    r = permutations(rng, rows)
    hi = np.stack([np.where(prompt, 0, 1 + r - s) for s in (0, 1)], axis=1)
    mask = pk.IntervalMask(np.where(prompt, 0, 1 + r).astype(np.int32), hi.astype(np.int32))
    given, generated = prompt[:, None, :], ~prompt[:, :, None]
    before = r[:, None, :] < r[:, :, None]
    own = np.eye(rows, dtype=bool)[None]
    streams = [given | (generated & (before | own)), given | (generated & before)]
    return mask, np.stack(streams, axis=1)


def lengths(*sizes, streams=1):
    def build(rng, rows, keys):
        inside = np.arange(rows)[None] < np.array(sizes)[:, None]
        seen = inside[:, :, None] & inside[:, None, :]
        mask = pk.length_mask(np.array(sizes, np.int32), rows, streams=streams)
        return mask, np.repeat(seen[:, None], streams, axis=1)

    return build


def segments(strict, ranked):
    """Packed rows with padding at their end; the first example has one segment of one position."""

    def build(rng, rows, keys):
        cuts = ((0, 1, 131, 170), (0, 64, 128, rows))
        ids = np.full((BATCH, rows), -1, np.int32)
        r = np.zeros((BATCH, rows), np.int32)
        for b, s in np.ndindex(BATCH, 3):
            span = slice(cuts[b][s], cuts[b][s + 1])
            ids[b, span] = s
            r[b, span] = rng.permutation(span.stop - span.start)
        together = (ids[:, :, None] == ids[:, None, :]) & (ids[:, None, :] >= 0)
        mask = pk.segment_mask(ids, rank=r if ranked else None, strict=strict)
        if not ranked:
            return mask, np.stack([together for _ in strict], axis=1)
        mine, its = r[:, :, None], r[:, None, :]
        return mask, np.stack([together & (its < mine if s else its <= mine) for s in strict], 1)

    return build


MASKS = {
    "streams": causal(False, True),
    "content_twice": causal(False, False),
    "content": causal(False),
    "query": causal(True),
    "rank": rank(1),
    "ties": rank(7),
    "prefix": prefix,
    "lengths_0_130": lengths(0, 130),
    "lengths_1_200": lengths(1, 200),
    "streams_lengths": lengths(130, 1, streams=2),
    "segments": segments((False,), ranked=False),
    "segments_rank": segments((False, True), ranked=True),
}


def permutations(rng, length):
    return np.stack([rng.permutation(length) for _ in range(BATCH)]).astype(np.int32)


@functools.cache
def mask_of(name, rows, keys):
    """Returns the mask and (B, S, L, Lk) bool, who sees whom."""
    return MASKS[name](np.random.default_rng(1), rows, keys)


@functools.cache
def inputs(case, seed=0):
    """q, k, v and cotangents of the output and of lse, all N(0, 1)."""
    rng = np.random.default_rng(seed)
    streams = mask_of(case.mask, case.rows, case.keys)[0].streams
    rows = (BATCH, case.heads, streams, case.rows)
    keys = (BATCH, case.kv_heads, case.keys, case.dim)
    rows_of_vectors = (*rows, case.dim)
    shapes = (rows_of_vectors, keys, keys, rows_of_vectors)
    q, k, v, do = (jnp.asarray(rng.normal(size=s), case.dtype) for s in shapes)
    return q, k, v, do, jnp.asarray(rng.normal(size=rows), jnp.float32)


def config_of(case, changes):
    """The configuration of a backend for a case, or None."""
    if changes is None:
        return None
    streams = mask_of(case.mask, case.rows, case.keys)[0].streams
    return tiled(streams, case.rows, case.keys, case.bq, case.bk, changes)


def tiled(streams, rows, keys, bq, bk, changes):
    """The default configuration with small tiles, of a causal mask too, and changes."""
    blocks = dict(bq=bq, step=bq, bk=bk, bwd_bq=bq, bwd_bk=bk, bwd_step=bk)
    return pk.default_config(streams, rows, keys, **{"generation": "v5p", **blocks, **changes})


@functools.partial(jax.jit, static_argnames=("impl", "config"))
def attend(q, k, v, do, dlse, mask, *, impl, config=None):
    """Returns o, lse, dq, dk, dv; impl "reference" is the oracle."""

    def forward(q, k, v):
        if impl == "reference":
            return pk.attention_reference(q, k, v, mask, return_lse=True)
        return pk.interval_attention(q, k, v, mask, return_lse=True, impl=impl, config=config)

    (out, lse), pullback = jax.vjp(forward, q, k, v)
    return out, lse, *pullback((do.astype(out.dtype), dlse))


def run(case, backend, **more):
    """What a backend makes of a case, float32 products exact; `more` is of its configuration."""
    impl, changes = BACKENDS[backend]
    changes = {**changes, **more} if more else changes
    with jax.default_matmul_precision("highest"):
        got = attend(
            *inputs(case),
            mask_of(case.mask, case.rows, case.keys)[0],
            impl=impl,
            config=config_of(case, changes),
        )
    return [np.asarray(x.astype(jnp.float32)) for x in got]


@functools.cache
def wanted(case):
    """What the oracle makes of it, from the same (rounded) inputs in float32."""
    exact = [x.astype(jnp.float32) for x in inputs(case)]
    mask = mask_of(case.mask, case.rows, case.keys)[0]
    return [np.asarray(x) for x in attend(*exact, mask, impl="reference")]

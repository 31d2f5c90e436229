"""What attention refuses, at trace time and in one sentence: what came and what is allowed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import pallas_kernels as pk

B, H, HKV, L, D = 2, 4, 2, 256, 64
RANK = jax.ShapeDtypeStruct((B, L), jnp.int32)
LENGTHS = jax.ShapeDtypeStruct((B,), jnp.int32)


def sentence(message, words):
    """Asserts that `message` is one sentence with those words."""
    assert "\n" not in message and message.endswith("."), message
    assert message[0].isupper() or message.startswith("merge_") or "_" in message.split()[0], (
        message
    )
    assert ". " not in message, message
    missing = [word for word in words if word not in message]
    assert not missing, (missing, message)


def refused(function, *arguments, words):
    """Tracing `function`, which does no device work, raises one sentence with those words."""
    with pytest.raises(ValueError) as caught:
        jax.eval_shape(function, *arguments)
    sentence(str(caught.value), words)


def shapes(heads=H, kv_heads=HKV, dim=D, dtype="float32", rows=L, keys=L, streams=2, batch=B):
    return (
        jax.ShapeDtypeStruct((batch, heads, streams, rows, dim), dtype),
        *[jax.ShapeDtypeStruct((batch, kv_heads, keys, dim), dtype)] * 2,
    )


def attention(mask=None, **options):
    mask = pk.causal_streams(L) if mask is None else mask
    return lambda q, k, v: pk.interval_attention(q, k, v, mask, **options)


IMPLS = [impl for impl in pk.IMPLS if impl != "auto"]


@pytest.mark.parametrize("impl", pk.IMPLS)
def test_head_counts_that_do_not_divide(impl):
    words = ("6 query heads", "4 key heads", "multiple")
    refused(attention(impl=impl), *shapes(heads=6, kv_heads=4), words=words)


@pytest.mark.parametrize("impl", pk.IMPLS)
def test_mixed_dtypes(impl):
    q, k, v = shapes()
    half = jax.ShapeDtypeStruct(k.shape, jnp.bfloat16)
    refused(attention(impl=impl), q, half, v, words=("float32, bfloat16 and float32", "cast"))
    refused(attention(impl=impl), q, k, half, words=("float32, float32 and bfloat16", "cast"))


def test_head_sizes_no_kernel_has():
    refused(
        attention(impl="pallas"), *shapes(dim=320), words=("'pallas'", "256", "320", "use one of")
    )
    # Others can.
    jax.eval_shape(attention(impl="xla_dense"), *shapes(dim=320))
    jax.eval_shape(attention(impl="auto"), *shapes(dim=320))


def test_unknown_impl():
    refused(attention(impl="flash"), *shapes(), words=("'flash'", *pk.IMPLS))


@pytest.mark.parametrize("impl", ["splash", "cudnn"])
def test_an_explicit_choice_that_cannot_is_refused_and_not_replaced(impl):
    mask = pk.rank_streams(np.tile(np.arange(L, dtype=np.int32), (B, 1)))
    half = shapes(dtype="bfloat16")
    words = (f"'{impl}'", "causal", "interval mask", "use one of", "xla_dense")
    refused(attention(mask, impl=impl), *half, words=words)
    refused(attention(impl=impl), *shapes(dim=44, dtype="float16"), words=(f"'{impl}'", "got"))


def test_shapes_that_do_not_fit():
    q, k, v = shapes()
    short = jax.ShapeDtypeStruct((B, HKV, L - 1, D), jnp.float32)
    refused(attention(), q, k, short, words=(str(k.shape), str(short.shape), "(B,Hkv,Lk,D)"))
    refused(attention(pk.causal_streams(L + 1)), q, k, v, words=("257", str(q.shape)))
    refused(attention(pk.causal_streams(L, (False,))), q, k, v, words=("1 streams", str(q.shape)))
    mask = pk.length_mask(np.array([3, 4, 5]), L, streams=2)
    refused(attention(mask), q, k, v, words=("code", str((B, L)), str((3, L))))


def test_ranks_that_are_not_permutations():
    build = lambda rank: pk.rank_streams(rank, debug=True).hi
    good = np.stack([np.random.default_rng(b).permutation(L) for b in range(B)]).astype(np.int32)
    twice, shifted = good.copy(), good + 1
    twice[1, 0] = twice[1, 1]
    build(good)
    for bad in (twice, shifted):
        with pytest.raises(ValueError) as caught:
            build(bad)
        sentence(str(caught.value), ("rank", "permutation", "0..L-1"))
        fails_when_checked(build, bad, good, ("permutation",))
    pk.rank_streams(twice)  # groups are ranks with ties


@pytest.mark.parametrize("bad", [-1, L + 1])
def test_lengths_outside_the_rows(bad):
    build = lambda lengths: pk.length_mask(lengths, L).hi
    good, wrong = np.array([0, L], np.int32), np.array([3, bad], np.int32)
    build(good)
    with pytest.raises(ValueError) as caught:
        build(wrong)
    sentence(str(caught.value), ("Lengths", f"[0, {L}]"))
    fails_when_checked(build, wrong, good, (f"[0, {L}]",))


def fails_when_checked(function, bad, good, words):
    """Inside jit the check is one of checkify's, and absent without it."""
    checked = jax.jit(checkify.checkify(function, errors=checkify.user_checks))
    message = checked(bad)[0].get()
    assert message and all(word in message for word in words), message
    assert checked(good)[0].get() is None
    jax.block_until_ready(jax.jit(function)(bad))


def test_a_strict_stream_of_segments_needs_ranks():
    ids = np.zeros((B, L), np.int32)
    with pytest.raises(ValueError) as caught:
        pk.segment_mask(ids, strict=(False, True))
    sentence(str(caught.value), ("rank", "strict"))


def mesh(**axes):
    devices = np.array(jax.devices()[: np.prod([*axes.values()])])
    return jax.sharding.Mesh(devices.reshape(*axes.values()), tuple(axes))


def test_a_missing_mesh_axis():
    with pytest.raises(ValueError) as caught:
        pk.shard_attention(attention(), mesh(data=2, model=2))
    sentence(str(caught.value), ("'fsdp'", "data, model"))
    with pytest.raises(ValueError) as caught:
        pk.shard_attention(attention(), mesh(data=2, fsdp=2), head_axis="tensor")
    sentence(str(caught.value), ("'tensor'", "data, fsdp"))


def test_batch_and_heads_that_do_not_divide_over_the_mesh():
    fn = lambda q, k, v, mask: pk.interval_attention(q, k, v, mask)
    q, k, v = shapes(batch=2)
    mask = pk.causal_streams(L)
    sharded = pk.shard_attention(fn, mesh(data=2, fsdp=2, model=1))
    refused(sharded, q, k, v, mask, words=("batch", "size 2", "data x fsdp", "size 4"))
    sharded = pk.shard_attention(fn, mesh(data=1, fsdp=1, model=4))
    refused(sharded, q, k, v, mask, words=("key head", "size 2", "model", "size 4"))


@pytest.mark.parametrize("generation", ["v4", "v5p", "tpu7x"])
def test_vmem_that_cannot_hold_the_shape(generation):
    """A step of as many rows as this fits no generation; the limit named is that generation's."""
    config = pk.default_config(2, 65536, 65536, generation=generation, bq=65536)
    function = attention(pk.causal_streams(65536), impl="pallas", config=config)
    limit = f"{config.vmem / 2**20:.1f} MiB"
    refused(function, *shapes(rows=65536, keys=65536), words=("VMEM", limit))


def test_what_fits_one_generation_and_not_another():
    config = pk.default_config(2, 2048, 2048, generation="v6e", bq=2048, bk=2048)
    function = lambda config: attention(pk.causal_streams(2048), impl="pallas", config=config)
    x = shapes(rows=2048, keys=2048, dim=256)
    small = dataclasses.replace(config, vmem=pk.default_config(2, 2048, 2048, generation="v4").vmem)
    jax.eval_shape(function(config), *x)
    refused(function(small), *x, words=("VMEM", "15.5 MiB"))


def test_unknown_generation():
    with pytest.raises(ValueError) as caught:
        pk.default_config(2, 256, 256, generation="v9")
    sentence(str(caught.value), ("'v9'", "v4", "v5e", "v5p", "v6e", "tpu7x"))


@pytest.mark.parametrize("changes", [{"bq": 100}, {"bk": 96}, {"bwd_bq": 0}, {"bwd_step": 200}])
def test_blocks_that_are_no_tiles(changes):
    (name, size), *_ = changes.items()
    with pytest.raises(ValueError) as caught:
        pk.default_config(2, 256, 256, generation="v5p", **changes)
    sentence(str(caught.value), (name, str(size), "128"))


@pytest.mark.parametrize(
    "changes", [{"unroll": 3}, {"row_sum": "vpu"}, {"bwd_dq": "tt"}, {"interpret": "gpu"}]
)
def test_choices_that_no_kernel_has(changes):
    ((name, choice),) = changes.items()
    with pytest.raises(ValueError) as caught:
        pk.default_config(2, 256, 256, generation="v5p", **changes)
    sentence(str(caught.value), (name, repr(choice), "one of"))


def test_mask_vectors_of_another_type():
    """Of unsigned ranks 0 - 1 is the greatest number: the strict stream would see all keys."""
    rank = np.tile(np.arange(L, dtype=np.uint16), (B, 1))
    refused(attention(pk.rank_streams(rank)), *shapes(), words=("code", "int32", "uint16"))


def test_parts_that_cannot_be_merged():
    o, lse = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((2, 5, 8), (2, 5)))
    other = jax.ShapeDtypeStruct((2, 4, 8), jnp.float32)
    refused(pk.merge_attention, (o, lse), (other, lse), words=("(2, 5, 8)", "(2, 4, 8)"))


CACHE = jax.ShapeDtypeStruct((B, HKV, L, D), jnp.float32)
QUERY = jax.ShapeDtypeStruct((B, 1, H, D), jnp.float32)


def change(x, **changes):
    return jax.ShapeDtypeStruct(changes.get("shape", x.shape), changes.get("dtype", x.dtype))


CACHED = {
    "heads": (change(QUERY, shape=(B, 1, 3, D)), CACHE, CACHE, LENGTHS, ("multiple of Hkv", "3")),
    "dtypes": (QUERY, change(CACHE, dtype=jnp.bfloat16), CACHE, LENGTHS, ("bfloat16", "cast")),
    "caches": (QUERY, CACHE, change(CACHE, shape=(B, HKV, 8, D)), LENGTHS, ("(2, 2, 8, 64)",)),
    "lengths": (QUERY, CACHE, CACHE, change(LENGTHS, shape=(3,)), ("lengths", "(2,)", "(3,)")),
}


@pytest.mark.parametrize("name", CACHED)
def test_cached_attention(name):
    *arguments, words = CACHED[name]
    refused(pk.cached_attention, *arguments, words=words)


def test_cached_attention_impl_head_size_and_lengths():
    unknown = lambda *x: pk.cached_attention(*x, impl="flash")
    refused(unknown, QUERY, CACHE, CACHE, LENGTHS, words=("'flash'", "pallas", "xla_dense"))
    pallas = lambda *x: pk.cached_attention(*x, impl="pallas")
    wide = change(CACHE, shape=(B, HKV, L, 320))
    query = change(QUERY, shape=(B, 1, H, 320))
    refused(pallas, query, wide, wide, LENGTHS, words=("'pallas'", "256", "320"))
    full, cache = (jnp.zeros(x.shape, x.dtype) for x in (QUERY, CACHE))
    attend = lambda lengths: pk.cached_attention(full, cache, cache, lengths)
    bad, good = np.array([0, L + 1], np.int32), np.array([0, L], np.int32)
    with pytest.raises(ValueError) as caught:
        attend(bad)
    sentence(str(caught.value), ("Lengths", f"[0, {L}]"))
    fails_when_checked(attend, bad, good, (f"[0, {L}]",))

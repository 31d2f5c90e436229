"""Fast-dLLM's dual cache: when rows are refreshed, what they see until then, and what it counts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aodiff.nn.mdm import MDM
from aodiff.nn.mdm_config import MDMConfig
from aodiff.sampling.cache import Cached
from aodiff.sampling.denoise import Decoder, decode
from tests.sampling.denoise_test import V, hashed

N, BLOCK = 12, 4
# Masks alone would all be the same to a transformer: no row begins without a prompt.
PROMPTS, LENGTHS = np.array([1, 3, 5, 2]), np.array([12, 12, 9, 7])
GIVEN = np.arange(N)[None] < PROMPTS[:, None]
GIVEN[0, 2] = GIVEN[1, 4] = GIVEN[1, 6] = True  # rows are done with their blocks in turn
TOKENS = np.random.default_rng(0).integers(0, V, (4, N))
LOGITS = jax.jit(hashed)
KEYS = jax.random.split(jax.random.key(0), 4)


def seen_at(tokens, length, at, cache):
    """Sees the whole row, the block too, as it was when the cache was filled."""
    return jnp.take_along_axis(hashed(cache[0], length), at[..., None], axis=1), cache


FROZEN = Cached(lambda tokens, length: tokens[None], seen_at)


@functools.cache
def frozen(decoder, temperature=0.0, cached=FROZEN):
    return jax.jit(
        lambda keys, tokens, given, length: decode(
            hashed,
            keys,
            tokens,
            given,
            decoder,
            length=length,
            cached=cached,
            mask_id=V,
            temperature=temperature,
        )
    )


def run(decoder, rows=(0, 1, 2, 3), **options):
    args = (jnp.asarray(x[np.array(rows)]) for x in (KEYS, TOKENS, GIVEN, LENGTHS))
    return jax.device_get(frozen(decoder, **options)(*args))


def by_hand(row, every):
    """Tokens, steps, calls, widths and squares of one row, one confident token a call."""
    n, first = int(LENGTHS[row]), int(PROMPTS[row])
    known = np.where(GIVEN[row], TOKENS[row], np.where(np.arange(N) < n, V, 0))
    when, widths = np.full(N, -1), []
    for start in range(first, n, BLOCK):
        block = range(start, min(start + BLOCK, n))
        for turn in range(sum(known[i] == V for i in block)):
            if turn % every == 0:
                logits = np.array(LOGITS(jnp.asarray(known[None]), jnp.array([n])))[0, :, :V]
                law = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
            best = max((i for i in block if known[i] == V), key=lambda i: law[i].max())
            known[best], when[best] = law[best].argmax(), len(widths)
            widths.append(n if turn % every == 0 else len(block))
    return known, when, len(widths), sum(widths), sum(w * n for w in widths)


@pytest.mark.parametrize("every", [1, 2, 3, 99])
def test_each_row_sees_its_last_refresh_until_its_next(every):
    out = run(Decoder("confidence", "one", BLOCK, BLOCK, refresh=every))
    for row in range(4):
        found = out.tokens[row], out.step[row], out.calls[row], out.widths[row], out.squares[row]
        for a, b in zip(found, by_hand(row, every), strict=True):
            np.testing.assert_array_equal(a, b)
    alone = run(Decoder("confidence", "one", BLOCK, BLOCK, refresh=every), rows=(2,))
    np.testing.assert_array_equal(alone.tokens[0], out.tokens[2])
    exact = [by_hand(row, 1)[0] for row in range(4)]
    assert np.array_equal(out.tokens, exact) == (every == 1)  # the cache is looked at


@pytest.mark.parametrize(
    "decoder",
    [
        dict(score="margin", schedule="threshold(0.5)", crop=(4,)),
        dict(score="random", schedule="dream", late=(2,), noise=0.5),
    ],
)
def test_a_refresh_in_every_step_is_no_cache(decoder):
    decoders = (Decoder(steps=3, block=BLOCK, refresh=k, **decoder) for k in (0, 1))
    plain, cached = (run(decoder, temperature=1.0) for decoder in decoders)
    for field in ("tokens", "step", "lengths", "calls", "widths", "squares"):
        np.testing.assert_array_equal(getattr(plain, field), getattr(cached, field))
    np.testing.assert_allclose(plain.logp, cached.logp, atol=1e-5)


def test_blocks_begin_with_a_refresh_where_steps_are_passed_over():
    out = run(Decoder("random", "ancestral", 9, BLOCK, refresh=2), temperature=1.0)
    for row in range(4):
        n, width = LENGTHS[row], 0
        for start in range(PROMPTS[row], n, BLOCK):
            stop = min(start + BLOCK, n)
            calls = len(set(out.step[row, start:stop].tolist()) - {-1})
            width += -(-calls // 2) * n + calls // 2 * (stop - start)
        assert out.widths[row] == width and out.squares[row] == width * n


# ---- a transformer -------------------------------------------------------------------------------


@functools.cache
def model_of(shift):
    """Without head columns of padding and with weights large enough for its layers to matter."""
    cfg = MDMConfig(
        vocab_size=V,
        seq_len=N,
        num_layers=2,
        width=16,
        num_heads=2,
        position="rope",
        shift=shift,
        table_size=V + 1,
    )
    model, rng = MDM(cfg), np.random.default_rng(1)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, N), jnp.int32))
    draw = lambda x: jnp.asarray(rng.normal(0, 0.5, x.shape), jnp.float32)
    apply = functools.partial(model.apply, jax.tree.map(draw, shapes))
    segments = lambda length: jnp.where(jnp.arange(N)[None] < length[:, None], 0, -1)
    full = jax.jit(lambda tokens, length: apply(tokens, segments(length)))
    cached = Cached(
        lambda tokens, length: apply(tokens, segments(length), method="keep"),
        lambda tokens, length, at, cache: apply(
            tokens, cache, at, segments(length), method="cached"
        ),
    )
    return full, cached


@functools.cache
def written_by(shift, every):
    full, cached = model_of(shift)
    decoder = Decoder("confidence", "one", BLOCK, BLOCK, refresh=every)
    fn = lambda *rows: decode(
        full, *rows[:3], decoder, length=rows[3], cached=cached, mask_id=V, temperature=0.0
    )
    return jax.device_get(jax.jit(fn)(KEYS, *map(jnp.asarray, (TOKENS, GIVEN, LENGTHS))))


@pytest.mark.parametrize("shift", [False, True])
def test_a_transformer_refreshed_in_every_step_is_no_cache(shift):
    plain, cached = (written_by(shift, every) for every in (0, 1))
    np.testing.assert_array_equal(plain.tokens, cached.tokens)
    np.testing.assert_array_equal(plain.step, cached.step)
    np.testing.assert_allclose(plain.logp, cached.logp, atol=1e-4)


@pytest.mark.parametrize("shift", [False, True])
def test_the_first_step_of_a_block_is_exact_and_later_ones_are_not(shift):
    """Of every written token, its probability in a full pass over what was known then."""
    full, _ = model_of(shift)
    out = written_by(shift, 99)
    off = np.full((4, N), np.nan)
    for step in range(out.step.max() + 1):
        masked = out.step >= step
        logits = full(jnp.asarray(np.where(masked, V, out.tokens)), jnp.asarray(LENGTHS))
        logp = np.array(jax.nn.log_softmax(logits))
        exact = np.take_along_axis(logp, out.tokens[..., None], axis=2)[..., 0]
        off = np.where(out.step == step, np.abs(out.logp - exact), off)
    when = np.where(out.step < 0, 99, out.step)
    first = [
        (row, start + np.argmin(when[row, start : min(start + BLOCK, LENGTHS[row])]))
        for row in range(4)
        for start in range(PROMPTS[row], LENGTHS[row], BLOCK)
    ]
    exact = np.zeros((4, N), bool)
    exact[tuple(np.array(first).T)] = True
    assert len(first) == 9 and off[exact].max() < 1e-4
    later = off[~exact & (out.step >= 0)]
    assert len(later) > 15 and np.median(later) > 1e-2


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, choices",
    [
        ("refresh=-1 .* or 0 for no cache", dict(refresh=-1, block=4)),
        ("refresh=2 with blocks of 0", dict()),
        ("any score but the policy", dict(score="policy", block=4)),
        ("leave out blocks", dict(remask="topk", block=4)),
        ("refresh=2 with blocks of 0", dict(remask="topk")),
    ],
)
def test_what_a_cache_cannot_be_combined_with_is_one_sentence(words, choices):
    with pytest.raises(ValueError, match=words):
        Decoder(**(dict(score="confidence", schedule="linear", steps=4, refresh=2) | choices))


def test_a_cache_refuses_growth_and_needs_a_denoiser_with_one():
    decoder = Decoder("confidence", "linear", BLOCK, BLOCK, refresh=2)
    row = jnp.zeros((4, N), jnp.int32)
    call = functools.partial(decode, hashed, KEYS, row, row > 0, decoder, mask_id=V)
    with pytest.raises(ValueError, match="rows cannot grow .* refresh=2; .* whose positions move"):
        call(cached=FROZEN, grow=lambda state, logits, keys: (state, logits))
    with pytest.raises(ValueError, match="refresh=2 needs a denoiser with a cache"):
        call()

"""Steps at the width that rows need: what is written is the same, and narrow steps are narrow."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aodiff.sampling.denoise import Decoder, decode
from aodiff.sampling.growth import make_plan

V, C, END = 8, 24, 1  # the mask id, positions, the end symbol
OPTIONS = {
    "carve": dict(growth=4, interval=3, window=4, tau=9.0),
    "daedal": dict(growth=4, window=4),
}
ROOM = {"none": (), "carve": (1, 21), "daedal": (1, 8)}  # beside three given positions
PLAIN = Decoder("confidence", "linear", C)


def hashed(tokens, length):
    """Logits that depend on all that is live of a row, and not on how much padding follows."""
    at = jnp.arange(tokens.shape[1])
    seen = jnp.where(at[None] < length[:, None], jnp.cos(tokens * 1.7 + at[None]), 0.0)
    place = jnp.sin(at[:, None] * 7.3 + jnp.arange(V + 1.0)[None] * 3.1)
    logits = jnp.sum(seen, axis=1)[:, None, None] * place[None] * 3
    return jnp.where(jnp.arange(V + 1) < V, logits, -1e9)


def width_of(tokens, length):
    """Names the bucket of the rows that it is shown: token 2 at a width of 8, 3 at 16, 4 at 24."""
    named = jax.nn.one_hot(jnp.full(tokens.shape, tokens.shape[1] // 8 + 1), V + 1) * 9
    return jnp.where(jnp.arange(V + 1) < V, named, -1e9)


@functools.cache
def program(decoder, denoise, grow):
    def run(keys, tokens, given, length):
        plan = make_plan(ROOM[grow], C, grow, OPTIONS, decoder, mask_id=V, end=END)
        order = jnp.broadcast_to(jnp.arange(C)[None, ::-1], tokens.shape)
        return decode(
            denoise,
            keys,
            tokens,
            given,
            decoder,
            **plan(denoise, given) | {"length": length},
            order=order if decoder.score == "order" else None,
            mask_id=V,
        )

    return jax.jit(run)


def written(decoder, denoise, length, grow="none"):
    """Samples of two rows of `length` positions at first, three of them given."""
    tokens = jnp.asarray(np.random.default_rng(0).integers(2, V, (2, C)))
    given = jnp.broadcast_to(jnp.arange(C)[None] < 3, tokens.shape)
    keys = jax.random.split(jax.random.key(0), 2)
    fill = program(decoder, denoise, grow)
    return jax.device_get(fill(keys, tokens, given, jnp.array(length)))


@pytest.mark.parametrize(
    ("choices", "grow"),
    [
        ({}, "none"),
        ({"score": "order"}, "none"),
        ({"block": 4, "steps": 4}, "none"),
        ({"remask": "topk"}, "none"),
        ({"crop": (END,)}, "carve"),
        ({"score": "random", "noise": 0.5}, "carve"),
        ({}, "daedal"),
    ],
)
def test_what_is_written_is_the_same(choices, grow):
    decoder = dataclasses.replace(PLAIN, **choices)
    one, other = (
        written(dataclasses.replace(decoder, buckets=b), hashed, [8, 6], grow) for b in ((12,), ())
    )
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_a_fixed_row_is_written_in_the_first_bucket_that_holds_it():
    decoder = dataclasses.replace(PLAIN, buckets=(8, 16))
    for length, token in ((8, 2), (9, 3), (16, 3), (17, 4)):
        out = written(decoder, width_of, [length, 5])
        assert set(out.tokens[0, 3:length]) == {token} and set(out.tokens[1, 3:5]) == {token}


def test_rows_that_grow_move_on_when_the_next_growth_may_not_fit():
    out = written(dataclasses.replace(PLAIN, buckets=(8, 16)), width_of, [4, 4], "carve")
    # They grow by 4 in steps 0, 3, ...; after step 6 they hold 16, and 20 would not fit.
    by_step = out.tokens[0][np.argsort(out.step[0], stable=True)][3:]
    assert out.lengths.tolist() == [24, 24]
    assert by_step.tolist() == [2] + [3] * 6 + [4] * 14


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"buckets": (16, 8)}, r"sample.buckets=\(16, 8\) are not ascending"),
        ({"buckets": (8.0,)}, r"sample.buckets=\(8.0,\) are not"),
        ({"buckets": (8, 24)}, "between 0 and the 24 positions"),
        ({"buckets": (8,), "block": 4, "steps": 4, "refresh": 2}, "a cache and a policy are of"),
        ({"buckets": (8,), "score": "policy"}, "a cache and a policy are of whole rows"),
    ],
)
def test_what_does_not_fit_is_one_sentence(choices, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(PLAIN, **choices).check(C)

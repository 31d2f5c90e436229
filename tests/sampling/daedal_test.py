"""DAEDAL on made-up logits: end confidence, growth before and while a row is written."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aodiff.sampling.daedal import Daedal, daedal, end_confidence
from aodiff.sampling.denoise import Decoder, decode
from aodiff.sampling.state import begin

END, MASK, V = 3, 4, 5
CAPACITY = 24
DECODER = Decoder("confidence", "threshold(0.9)", 8, 8)


def logits_of(chances):
    """Logits (1, n, V) with `chances` of the end symbol, the rest for id 0."""
    p = np.zeros((1, len(chances), V))
    p[0, :, END], p[0, :, 0] = chances, 1 - np.array(chances)
    return jnp.log(jnp.asarray(p, jnp.float32) + 1e-12).at[..., MASK].set(-1e9)


def ends_after(written):
    """Sure of the end symbol from position `written` on, of id 1 before."""

    def denoise(tokens, length):
        at = jnp.arange(tokens.shape[1])[None, :, None]
        ids = jnp.where(at < written, 1, END)
        row = 9.0 * (jnp.arange(V)[None, None] == ids)
        return jnp.broadcast_to(row, (*tokens.shape, V)).at[..., MASK].set(-1e9)

    return denoise


def run(options, denoise, length=4, most=CAPACITY, batch=1, decoder=DECODER):
    tokens = jnp.zeros((batch, CAPACITY), jnp.int32)
    given = jnp.broadcast_to(jnp.arange(CAPACITY)[None] < 2, tokens.shape)
    grow = daedal(denoise, options, MASK, END, jnp.full(batch, most))
    keys = jax.random.split(jax.random.key(0), batch)
    fn = jax.jit(
        lambda: decode(
            denoise,
            keys,
            tokens,
            given,
            decoder,
            mask_id=MASK,
            length=jnp.full(batch, length),
            grow=grow,
            temperature=0.0,
        )
    )
    return jax.device_get(fn())


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        (1, 0.6),
        (2, (0.6 + 0.9) / 2),  # the position between predicts something else and is passed over
        (3, (0.6 + 0.9 + 1.0) / 3),  # a decided end is sure, a given one does not count
        (4, (0.6 + 0.9 + 1.0) / 4),
    ],
)
def test_end_confidence(window, expected):
    tokens = jnp.array([[END, 0, END, MASK, MASK, MASK, 0, 0]])
    state = begin(
        tokens, jnp.arange(8)[None] < 2, block=DECODER.block, mask_id=MASK, length=jnp.array([6])
    ).replace(tokens=tokens)
    logits = logits_of([0.99, 0.99, 0.2, 0.9, 0.3, 0.6, 0.99, 0.99])
    found = end_confidence(state, logits, MASK, END, window)
    assert float(found[0]) == pytest.approx(expected, abs=1e-5)


def test_a_row_is_lengthened_until_its_end_is_seen():
    """From 4 by threes: 13 is the first length with 4 ends behind the 9 of the answer."""
    out = run(Daedal(growth=3, window=4, enough=0.9), ends_after(9))
    assert out.lengths.tolist() == [13 + 2]
    assert (out.tokens[0, 2:9] == 1).all() and (out.tokens[0, 9:15] == END).all()
    assert (out.step[0, 13:] == -1).all()  # the anchors are not written
    # A call for each of 4, 7, 10, 13, one with anchors in the first step, one for a second block.
    assert out.calls.tolist() == [5 + 1]


def test_a_row_that_sees_its_end_is_not_lengthened():
    out = run(Daedal(growth=3, window=4, enough=0.9), ends_after(3), length=8)
    assert out.lengths.tolist() == [8 + 2]


def test_one_mask_for_one_is_a_fixed_row():
    out = run(Daedal(growth=1), ends_after(20))
    assert out.lengths.tolist() == [4] and out.calls.tolist() == [1]


def test_growth_stops_at_the_greatest_length():
    out = run(Daedal(growth=5, window=4), ends_after(100), most=11)
    assert out.lengths.tolist() == [11] and (out.tokens[0, 2:11] == 1).all()


@pytest.mark.parametrize("most", [CAPACITY, 12])
def test_the_mask_it_knows_least_about_becomes_several(most):
    """Nothing decided is lost, not even where there is no room for all of them."""
    options = Daedal(growth=4, window=4, enough=0.0, sure=1.0, unsure=0.5)
    grow = daedal(ends_after(9), options, MASK, END, jnp.array([most]))
    at = jnp.arange(CAPACITY)[None]
    tokens = jnp.where(at < 2, 0, jnp.where(at == 9, 2, MASK))
    state = begin(tokens, at < 2, block=DECODER.block, mask_id=MASK, length=jnp.array([10]))
    state = state.replace(
        tokens=jnp.where(at < 10, tokens, 0), step=jnp.array([3]), when=jnp.where(at == 9, 2, -1)
    )
    sure = jnp.where(at == 5, 0.02, jnp.where(at == 7, 0.03, 2.0))[..., None]
    logits = sure * jnp.array([1.0, 0, 0, 0, -1e9])[None, None]
    grown, moved = grow(state, logits, None)
    added = min(3, most - 10)
    assert int(grown.length[0]) == 10 + added
    shown = np.asarray(grown.tokens)[0, : 10 + added]
    assert shown.tolist() == [0, 0] + [MASK] * (7 + added) + [2]
    assert int(grown.when[0, 9 + added]) == 2
    expected = np.insert(np.asarray(logits)[0, :10, 0], 6, [0.02] * added)
    np.testing.assert_allclose(np.asarray(moved)[0, : 10 + added, 0], expected)


def test_rows_grow_on_their_own():
    """A row that needs room next to one that does not."""

    def denoise(tokens, length):
        short, long_ = (ends_after(n)(tokens, length) for n in (3, 9))
        return jnp.where(tokens[:, :1, None] == 1, short, long_)

    options = Daedal(growth=3, window=4, enough=0.9)
    grow = lambda n: daedal(denoise, options, MASK, END, jnp.full(n, CAPACITY))
    tokens = jnp.zeros((2, CAPACITY), jnp.int32).at[0].set(1)
    given = jnp.arange(CAPACITY)[None] < jnp.full((2, 1), 2)
    keys, length = jax.random.split(jax.random.key(0), 2), jnp.array([8, 4])

    def one(*rows):
        pick = [x[jnp.array(rows)] for x in (keys, tokens, given)]
        fixed = dict(mask_id=MASK, length=length[jnp.array(rows)], temperature=0.0)
        return decode(denoise, *pick, DECODER, grow=grow(len(rows)), **fixed)

    both = one(0, 1)
    assert both.lengths.tolist() == [10, 15]
    for row in (0, 1):
        alone = one(row)
        np.testing.assert_array_equal(alone.tokens[0], both.tokens[row])
        assert alone.calls[0] == both.calls[row]


def test_choices_that_make_no_sense():
    with pytest.raises(ValueError, match=r"sample.daedal.growth=0 is too small"):
        Daedal(growth=0)
    with pytest.raises(ValueError, match=r"sample.daedal.sure=1.5 is no probability"):
        Daedal(sure=1.5)


def test_its_own_end_symbols_crop_no_row():
    """Rows have end symbols that nothing wrote, put there when their length was found."""
    options, denoise = Daedal(growth=2, window=4), ends_after(9)
    whole = run(options, denoise)
    cropped = run(options, denoise, decoder=dataclasses.replace(DECODER, crop=(END,)))
    assert whole.lengths[0] > 10 and cropped.lengths[0] == 10
    np.testing.assert_array_equal(cropped.tokens[0, :10], whole.tokens[0, :10])
    one = dataclasses.replace(DECODER, schedule="one", crop=(END,))
    assert run(options, denoise, decoder=one).calls[0] >= 7  # a call for each symbol it wrote

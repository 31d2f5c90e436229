"""CARVE with denoisers that are made up: what grows, what is used, what it costs."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aodiff.sampling.carve import Carve, carve
from aodiff.sampling.denoise import Decoder, begin, decode

DECODER = Decoder("confidence", "linear", 24)
V = 8  # the mask id; ids below may be emitted


def flat(tokens, length):
    """The same law at every position, whatever is there: longer rows change nothing."""
    law = jnp.where(jnp.arange(V + 1) < V, jnp.cos(jnp.arange(V + 1.0)), -1e9)
    return jnp.broadcast_to(law[None, None], (*tokens.shape, V + 1))


def hashed(tokens, length):
    """Logits that depend on all that is live of a row and on its length."""
    n = tokens.shape[1]
    seen = jnp.where(jnp.arange(n)[None] < length[:, None], jnp.cos(tokens * 1.7 + 1), 0.0)
    weight = jnp.sin(jnp.arange(n * n * (V + 1.0)).reshape(n, n, V + 1) * 7.3)
    return jnp.einsum("bm,mnv->bnv", seen, weight).at[..., V].set(-1e9)


@functools.cache
def program(denoise, decoder, options, temperature=0.0):
    def run(keys, tokens, given, length, most):
        grow = options and carve(denoise, options, V, most, blocks=bool(decoder.block))
        fixed = {"mask_id": V, "temperature": temperature}
        return decode(denoise, keys, tokens, given, decoder, length=length, grow=grow, **fixed)

    return jax.jit(run)


def run(options, *, denoise=hashed, most=24, length=12, prompt=3, batch=2, block=0, steps=24, **kw):
    decoder = dataclasses.replace(DECODER, steps=steps, block=block)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, V, (batch, most)))
    given = jnp.broadcast_to(jnp.arange(most)[None] < prompt, (batch, most))
    keys = jax.random.split(jax.random.key(0), batch)
    args = keys, tokens, given, *(jnp.full(batch, x) for x in (length, most))
    return jax.device_get(program(denoise, decoder, options, **kw)(*args))


@pytest.mark.parametrize("block", [0, 4])
@pytest.mark.parametrize(
    "options",
    [Carve(tau=0.0, interval=3), Carve(growth=0, tau=9.0)],
    ids=["threshold 0", "no growth"],
)
def test_rows_that_may_not_grow_are_a_fixed_canvas(options, block):
    grown, fixed = (run(o, block=block, steps=block or 24) for o in (options, None))
    for name in ("tokens", "lengths", "step", "logp"):
        np.testing.assert_array_equal(getattr(grown, name), getattr(fixed, name))
    assert grown.lengths.tolist() == [12, 12]


def test_rows_that_start_at_their_greatest_length_never_grow():
    grown, fixed = (run(o, length=24) for o in (Carve(tau=9.0), None))
    np.testing.assert_array_equal(grown.tokens, fixed.tokens)
    assert grown.calls.tolist() == fixed.calls.tolist()


@pytest.mark.parametrize("tau", [0.7, math.inf])
def test_above_log_two_every_trial_is_kept(tau):
    out = run(Carve(growth=5, interval=2, tau=tau))
    assert out.lengths.tolist() == [24, 24]
    assert not (out.tokens == V).any()
    assert out.calls.tolist() == [21 + 3] * 2  # 5 + 5 + 2 more positions


def test_with_an_interval_beyond_the_steps_there_is_one_trial():
    out = run(Carve(growth=5, interval=100, tau=9.0))
    assert out.lengths.tolist() == [17, 17] and out.calls.tolist() == [14 + 1] * 2


def test_a_law_that_does_not_look_at_the_row_always_grows():
    assert run(Carve(tau=1e-6), denoise=flat).lengths.tolist() == [24, 24]
    # One that does look is kept from it: all else of this case is the same.
    assert run(Carve(tau=1e-6)).lengths.tolist() == [12, 12]


@pytest.mark.parametrize(
    ("most", "interval", "tau", "calls"),
    [
        (128, 16, 1.0, 132),
        (128, 1, 1.0, 132),
        (128, 16, 0.0, 68),
        (128, 1, 0.0, 128),
    ],
)
def test_network_calls(most, interval, tau, calls):
    """decoding.md 9.5: half of the greatest length at first, 16 masks at a time."""
    options = Carve(growth=16, interval=interval, tau=tau)
    out = run(options, denoise=flat, most=most, length=most // 2, prompt=0, batch=1, steps=most)
    assert out.calls.tolist() == [calls]
    one_at_a_time = np.bincount(out.step[0][out.step[0] >= 0])
    assert (one_at_a_time == 1).all() or interval == 1


def test_trials_are_paid_for_at_their_length():
    out = run(Carve(growth=5, interval=100, tau=0.0), batch=1)
    assert out.widths.tolist() == [9 * 12 + 17]
    assert out.squares.tolist() == [9 * 12**2 + 17**2]


@pytest.mark.parametrize(("tau", "written"), [(9.0, 7), (0.0, 4)])
def test_tokens_come_from_the_branch_that_is_kept(tau, written):
    """The denoiser names the length of the row it is shown."""

    def length_of(tokens, length):
        named = jax.nn.one_hot(length, V + 1) * 9
        return jnp.broadcast_to(named[:, None], (*tokens.shape, V + 1)).at[..., V].set(-1e9)

    options = Carve(growth=3, interval=1, tau=tau)
    out = run(options, denoise=length_of, most=7, length=4, prompt=1, steps=7)
    assert (out.tokens[:, 1:written] == written).all()


@pytest.mark.parametrize(("decided", "first"), [(True, 7), (False, 10)])
def test_masks_go_where_the_model_knows_least(decided, first):
    """It is sure of all but positions 5 to 8; only the last position, 11, is masked as yet."""
    at = jnp.arange(16)
    sure = jnp.where((at >= 5) & (at <= 8), 0.1, 9.0)
    logits = (jax.nn.one_hot(at % V, V + 1) * sure[:, None])[None]
    state = begin(at[None], at[None] < 2, block=0, mask_id=V, length=jnp.array([12]))
    state = state.replace(tokens=jnp.where(at < 11, 1, state.tokens))
    grow = carve(
        lambda t, n: logits, Carve(4, 1, 4, 9.0, decided), V, jnp.array([16]), blocks=False
    )
    grown, _ = grow(state, logits, None)
    assert np.flatnonzero(grown.tokens[0] == V).tolist() == [*range(first, first + 4), 15]


@pytest.mark.parametrize(("block", "temperature"), [(0, 1.0), (4, 0.0)])
def test_a_row_that_grows_does_not_depend_on_its_batch(block, temperature):
    decoder = dataclasses.replace(DECODER, steps=block or 24, block=block)
    fn = program(hashed, decoder, Carve(growth=4, interval=2, window=4, tau=0.25), temperature)
    rng = np.random.default_rng(1)
    tokens = jnp.asarray(rng.integers(0, V, (4, 24)))
    prompt, length = jnp.array([2, 5, 3, 0]), jnp.array([10, 12, 7, 20])
    most = jnp.array([24, 20, 24, 22])
    keys = jax.random.split(jax.random.key(3), 4)
    args = keys, tokens, jnp.arange(24)[None] < prompt[:, None], length, most
    whole = fn(*args)
    assert len(set((whole.lengths - length).tolist())) > 1  # some grew more than others
    for rows in ([2], [3, 0, 2, 1]):
        part = fn(*(x[jnp.array(rows)] for x in args))
        for name in ("tokens", "lengths", "calls", "step", "widths"):
            expected = np.asarray(getattr(whole, name))[rows]
            np.testing.assert_array_equal(getattr(part, name), expected)


def test_a_policy_is_shown_the_given_positions_where_they_are_now():
    """It goes right to left, and back as soon as it is shown a position given and masked."""

    def policy(logits, masked, given, length):
        at = jnp.arange(masked.shape[1])[None]
        return jnp.where(jnp.any(given & masked, axis=1, keepdims=True), -at, at)

    given = jnp.isin(jnp.arange(24), jnp.array([0, 11]))[None]
    args = jax.random.split(jax.random.key(0), 1), jnp.ones((1, 24), jnp.int32), given

    @functools.partial(jax.jit, static_argnums=0)
    def orders(score):
        guide = policy if score == "policy" else None
        grow = carve(flat, Carve(growth=3, interval=2, tau=9.0), V, jnp.array([24]), blocks=False)
        decoder = dataclasses.replace(DECODER, score=score)
        length = jnp.array([12])
        return decode(flat, *args, decoder, length=length, policy=guide, grow=grow, mask_id=V).step

    np.testing.assert_array_equal(orders("policy"), orders("r2l"))


def test_a_block_grows_and_gets_as_many_calls_more():
    """All masks of a block of 4 that grew by 3 are written one a call before the next block."""
    out = run(
        Carve(growth=3, interval=100, window=2, tau=9.0),
        denoise=flat,
        most=15,
        length=12,
        prompt=0,
        block=4,
        steps=4,
        batch=1,
    )
    first = np.sort(out.step[0])
    np.testing.assert_array_equal(first, np.arange(15))
    assert set(out.step[0][:7]) == set(range(7))


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"window": 5}, "window=5 is odd"),
        ({"interval": 0}, "interval=0 is too small"),
        ({"growth": -1}, "growth=-1 is too small"),
        ({"tau": -0.1}, "tau=-0.1 is no divergence"),
    ],
)
def test_choices_that_make_no_sense(choice, words):
    with pytest.raises(ValueError, match=f"sample.carve.{words}"):
        Carve(**choice)

"""Decoders that mask tokens again, against sorting in numpy and hand-made steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aodiff.sampling import remask
from aodiff.sampling.denoise import Decoder
from aodiff.sampling.state import begin, masked_positions
from tests.sampling.denoise_test import V, hashed, run


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("kind", remask.KINDS)
def test_the_least_confident_are_masked_again_exactly_as_many_as_the_schedule_says(kind, schedule):
    steps, n = 4, 10
    decoder = Decoder("confidence", schedule, steps, remask=kind)
    given = jnp.asarray([[False] * n, [True, True, True] + [False] * (n - 3)])
    state = begin(jnp.ones((2, n), jnp.int32), given, block=0, mask_id=V)
    rng = np.random.default_rng(0)
    for i in range(steps):
        logp = np.log(rng.choice([0.2, 0.5, 0.9], (2, n)))  # ties
        proposal = rng.integers(0, V, (2, n))
        before = np.asarray(state.tokens)
        state = remask.step(
            decoder,
            state,
            V,
            ~state.fixed & ~state.done[:, None],
            jnp.asarray(proposal),
            jnp.asarray(logp),
            jnp.zeros((2, n)),
        )
        x = (i + 1) / steps
        for row, first in enumerate((0, 3)):
            num = n - first
            share = {"linear": 1 - x, "cosine": np.cos(np.pi / 2 * x)}[schedule]
            hidden = int(num * share + 1e-9)
            order = sorted(range(first, n), key=lambda j: (-logp[row, j], j))
            expected = before[row].copy()
            for j in order[: num - hidden]:
                if kind == "topk" or before[row, j] == V:
                    expected[j] = proposal[row, j]
            expected[order[num - hidden :]] = V
            np.testing.assert_array_equal(state.tokens[row], expected)
            when = np.asarray(state.when[row])
            np.testing.assert_array_equal((when == -1)[first:], (expected == V)[first:])
    assert np.all(state.done) and not np.any(masked_positions(state, V))


@pytest.mark.parametrize("kind", remask.KINDS)
def test_it_makes_all_its_calls_and_keeps_what_is_given(kind):
    given = np.array([[True] * 8, [True] * 6 + [False] * 2, [False] * 8])
    tokens = np.full((3, 8), 3)
    out = run(Decoder("confidence", "linear", 5, remask=kind), given, tokens)
    assert out.calls.tolist() == [0, 5, 5] and np.all(out.tokens[given] == 3)
    assert np.all(out.tokens < V) and np.array_equal(out.step == -1, given)
    if kind == "topk":  # every position has the last prediction
        assert np.all(out.step[~given] == 4)


def test_one_call_is_everything_at_once():
    plain = run(Decoder("confidence", "linear", 1))
    for kind in remask.KINDS:
        out = run(Decoder("confidence", "linear", 1, remask=kind))
        np.testing.assert_array_equal(out.tokens, plain.tokens)


def test_the_last_prediction_of_topk_is_greedy_given_the_row_before_it():
    """Tokens of positions that were shown are predicted anew, from a row that showed them."""
    two = run(Decoder("confidence", "linear", 2, remask="topk"), temperature=0.0)
    first = jax.device_get(jnp.argmax(hashed(jnp.full((2, 8), V), jnp.full(2, 8))[..., :V], -1))
    chance = jax.nn.softmax(hashed(jnp.full((2, 8), V), jnp.full(2, 8))[..., :V]).max(-1)
    hidden = np.argsort(np.argsort(-np.asarray(chance), axis=1, kind="stable"), axis=1) >= 4
    shown = jnp.where(jnp.asarray(hidden), V, first)
    again = jnp.argmax(hashed(shown, jnp.full(2, 8))[..., :V], axis=-1)
    np.testing.assert_array_equal(two.tokens, again)

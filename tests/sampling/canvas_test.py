"""Growth on hand-made rows: places, alignment, divergences (decoding.md 9.3, 17.3)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aodiff.core.categorical import jensen_shannon
from aodiff.sampling import canvas
from aodiff.sampling.denoise import begin

MASK = 9


@pytest.mark.parametrize(
    ("p", "q", "expected"),
    [
        ((0.5, 0.5), (0.9, 0.1), 0.101749),
        ((0.7, 0.2, 0.1), (0.6, 0.3, 0.1), 0.006959),
        ((1, 0), (0, 1), np.log(2)),
        ((0.3, 0.7), (0.3, 0.7), 0),
    ],
)
def test_divergences(p, q, expected):
    logs = [jnp.log(jnp.array(x, jnp.float32)) for x in (p, q)]
    assert float(jensen_shannon(*logs)) == pytest.approx(expected, abs=1e-6)
    finite = [jnp.maximum(x, -1e9) for x in logs]  # ids that may not be emitted
    assert float(jensen_shannon(*finite)) == pytest.approx(expected, abs=1e-6)


def test_divergence_is_averaged_over_the_masked_positions():
    p = jnp.log(jnp.array([[0.5, 0.5], [0.9, 0.1], [0.5, 0.5]], jnp.float32))[None]
    q = jnp.log(jnp.full((1, 3, 2), 0.5, jnp.float32))
    mean = lambda *at: float(canvas.shift(p, q, jnp.array([at]))[0])
    assert mean(True, True, False) == pytest.approx(0.101749 / 2, abs=1e-6)
    assert mean(False, True, False) == pytest.approx(0.101749, abs=1e-6)
    assert mean(False, False, False) == 0


@pytest.mark.parametrize(("window", "middle"), [(2, 1), (4, 2), (6, 2), (8, 5)])
def test_the_densest_window(window, middle):
    """Sums of two: 1.0, 1.7, 1.0, 0.5, 1.0; none of eight fits, so the end."""
    values = jnp.array([[0.1, 0.9, 0.8, 0.2, 0.3, 0.7, 5.0]])
    found = canvas.densest(values, jnp.array([0]), jnp.array([6]), window)
    assert found.tolist() == [middle]


def test_windows_lie_inside_their_region_and_ties_go_to_the_left():
    values = jnp.array([[9.0, 1, 1, 1, 1, 1, 9.0], [0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]])
    found = canvas.densest(values, jnp.array([1, 2]), jnp.array([6, 7]), 4)
    assert found.tolist() == [2, 3]


def state_of(length, capacity=8):
    tokens = jnp.arange(1, capacity + 1)[None]
    given = jnp.arange(capacity)[None] < 2
    state = begin(tokens, given, block=0, mask_id=MASK, length=jnp.array([length]))
    at = jnp.arange(capacity)[None]
    return state.replace(
        tokens=jnp.where(at < length, tokens, 0), when=at + 20, logp=-at.astype(jnp.float32)
    )


@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize("after", range(5))
def test_taking_the_new_masks_out_gives_the_old_row(after, number):
    state = state_of(5)
    longer = canvas.insert(state, jnp.array([after]), jnp.array([number]), MASK)
    new = list(range(after + 1, after + 1 + number))
    assert int(longer.length[0]) == 5 + number
    assert (np.asarray(longer.tokens)[0, new] == MASK).all()
    assert (np.asarray(longer.when)[0, new] == -1).all()
    assert not np.asarray(longer.fixed)[0, new].any()
    assert not np.asarray(longer.tokens)[0, 5 + number :].any()
    for name in ("tokens", "when", "logp", "fixed"):
        old, grown = (np.asarray(getattr(s, name))[0] for s in (state, longer))
        np.testing.assert_array_equal(np.delete(grown[: 5 + number], new), old[:5])
    back = canvas.aligned(longer.tokens, jnp.array([after]), jnp.array([number]))
    np.testing.assert_array_equal(back[0, :5], state.tokens[0, :5])


def test_room():
    given = jnp.array([[1, 1, 0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 1, 0, 0, 0]], bool)
    assert [x.tolist() for x in canvas.room(given, 2, 4)] == [[4, 5], [6, 6]]
    assert [x.tolist() for x in canvas.room(given, 0, 0)] == [[8, 8], [8, 8]]
    assert canvas.room(given, 7, 7)[0].tolist() == [8, 8]


def test_growth_keeps_rows_apart():
    """Inserting in one row leaves the others alone."""
    two = jax.tree.map(lambda x: jnp.concatenate([x, x]), state_of(5))
    longer = canvas.insert(two, jnp.array([3, 1]), jnp.array([0, 2]), MASK)
    np.testing.assert_array_equal(longer.tokens[0], two.tokens[0])
    assert longer.length.tolist() == [5, 7]

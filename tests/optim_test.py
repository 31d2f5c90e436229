"""Learning rate, weight-decay mask and AdamW against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aodiff import config as config_lib
from aodiff import optim, state
from tests import toy

OPTIM = config_lib.base().optim
OPTIM.update(dict(lr=1.0, lr_floor=0.1, warmup_steps=10))


def test_learning_rate():
    rate = optim.learning_rate(OPTIM, 110)
    assert rate(jnp.int32(0)) == pytest.approx(0.1)  # never zero
    assert rate(jnp.int32(9)) == pytest.approx(1.0)
    assert rate(jnp.int32(60)) == pytest.approx(0.1 + 0.9 / 2)  # half of the decay
    assert rate(jnp.int32(110)) == rate(jnp.int32(1000)) == pytest.approx(0.1)


def test_decay_steps_of_its_own():
    longer = config_lib.ml_collections.ConfigDict(OPTIM)
    longer.decay_steps = 210
    assert optim.learning_rate(longer, 110)(jnp.int32(110)) == pytest.approx(0.1 + 0.9 / 2)


def test_weight_decay_only_on_matrices():
    """Invariant 23: rank >= 2, where the axis that stacks layers does not count."""
    boxed = state.abstract_params(toy.Toy(vocab=8, seq_len=6))
    assert optim.decay_mask(boxed) == {
        "embed": True,
        "mix": True,
        "bias": False,  # (layers, width)
        "head": True,
        "gain": False,
    }


def test_adamw_against_numpy():
    """Two updates of clipped AdamW written out; the vector is not decayed."""
    params = {"w": jnp.array([[1.0, -2.0], [0.5, 3.0]]), "b": jnp.array([0.3, -0.7])}
    grads = {"w": jnp.array([[3.0, 1.0], [-2.0, 0.2]]), "b": jnp.array([0.1, -4.0])}
    tx = optim.make_optimizer(OPTIM, 110, {"w": True, "b": False})
    opt_state = tx.init(params)
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in grads.values()))
    expected = {k: np.asarray(p, np.float64) for k, p in params.items()}
    mean = {k: np.zeros_like(p) for k, p in expected.items()}
    square = {k: np.zeros_like(p) for k, p in expected.items()}
    for count in (1, 2):
        updates, opt_state = tx.update(grads, opt_state, params)
        params = jax.tree.map(jnp.add, params, updates)
        rate = count / 10
        for k, g in grads.items():
            g = np.asarray(g, np.float64) / norm
            mean[k] = 0.9 * mean[k] + 0.1 * g
            square[k] = 0.95 * square[k] + 0.05 * g**2
            adam = (mean[k] / (1 - 0.9**count)) / (np.sqrt(square[k] / (1 - 0.95**count)) + 1e-8)
            decay = 0.05 * expected[k] if k == "w" else 0
            expected[k] = expected[k] - rate * (adam + decay)
    for k in params:
        np.testing.assert_allclose(params[k], expected[k], rtol=1e-5, atol=1e-6)

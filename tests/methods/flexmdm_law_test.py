"""What a network of rates writes, by the forward equation over the thirteen states of the toy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aodiff.core.schedules import make_rise
from tests.methods.flexmdm_test import LENGTHS, SHARES, STRINGS, exact_terms
from tests.toy_insertion import ANCHOR, CODE, LAW, MASK, STATES, ToyInsertion, V

STEPS, LAST = 2400, 15.0  # of -log(1 - t), in which hazards are constant
ROUTES = {
    "each": lambda masks: {i: 1.0 for i in masks},
    "leftmost": lambda masks: {masks[0]: len(masks)},
    "rightmost": lambda masks: {masks[-1]: len(masks)},
    "middle": lambda masks: {masks[len(masks) // 2]: len(masks)},
}


@functools.cache
def answers(rise, wrong):
    """Letters (T, 13, 3, V) and mean counts (T, 13, 3) of all states at all times, float64."""
    body = np.array([[ANCHOR, *s, *[0] * (2 - len(s))] for s in STATES])
    length = np.array([len(s) + 1 for s in STATES])
    times = 1 - np.exp(-np.linspace(0, LAST, 2 * STEPS + 1))
    alpha = make_rise(rise).value(jnp.asarray(times, jnp.float32))
    net = ToyInsertion(wrong)
    out = jax.jit(
        jax.vmap(lambda a: net.apply({}, jnp.asarray(body), jnp.asarray(length), jnp.full(13, a)))
    )(alpha)
    law = jax.nn.softmax(out.logits, axis=-1)[..., :V]
    return np.asarray(law, np.float64), np.exp(np.asarray(out.gap, np.float64))


def written(pair, wrong=(0.0, 0.0), route="each"):
    """Probabilities of `STRINGS` at the end, for rates hazard x mean count and hazard x letter."""
    law, mean = answers(pair[0], wrong)
    powers = [1.0 if s == "linear" else float(s[6:-1]) for s in pair]
    rates = np.zeros((len(law), 13, 13))
    for state, code in CODE.items():
        masks = [i for i, s in enumerate(state) if s == MASK]
        for i, weight in (ROUTES[route](masks) if masks else {}).items():
            for v in range(V):
                new = CODE[(*state[:i], v, *state[i + 1 :])]
                rates[:, code, new] += powers[1] * weight * law[:, code, i + 1, v]
        for i in range(len(state) + 1) if len(state) < 2 else ():
            new = CODE[(*state[:i], MASK, *state[i:])]
            rates[:, code, new] += powers[0] * mean[:, code, i]
    rates[:, range(13), range(13)] -= rates.sum(2)
    mass, h = np.eye(13)[CODE[()]], LAST / STEPS
    for k in range(STEPS):  # classical Runge-Kutta
        at, middle, end = rates[2 * k : 2 * k + 3]
        a = mass @ at
        b = (mass + h / 2 * a) @ middle
        c = (mass + h / 2 * b) @ middle
        d = (mass + h * c) @ end
        mass = mass + h / 6 * (a + 2 * b + 2 * c + d)
    return np.array([mass[CODE[s]] for s in STRINGS])


@pytest.mark.parametrize(
    "pair", [("linear", "linear"), ("power(1.7)", "power(2.89)"), ("power(2)", "linear")]
)
def test_the_right_rates_write_the_law(pair):
    np.testing.assert_allclose(written(pair), SHARES, atol=1e-5)


@pytest.mark.parametrize("route", ["leftmost", "rightmost", "middle"])
def test_so_they_do_whichever_mask_comes_first_and_however_fast(route):
    """flexmdm.md 7.4: the order of revealing is free, that of inserting is not."""
    np.testing.assert_allclose(written(("power(1.7)", "power(4)"), route=route), SHARES, atol=1e-5)


@pytest.mark.parametrize("wrong", [(0.3, 0.2), (-0.5, 0.1), (0.4, -0.3)])
def test_the_bound_is_above_the_likelihood_of_a_wrong_model(wrong):
    pair = ("linear", "linear")
    law = written(pair, wrong)
    assert abs(law.sum() - 1) < 1e-4 and np.abs(law - SHARES).sum() > 0.02
    bound = exact_terms(pair, wrong).sum(1) - LENGTHS
    assert np.all(bound > -np.log(law) - 1e-4)
    assert SHARES @ (bound + np.log(law)) > 1e-4
    assert len(LAW) == len(law)

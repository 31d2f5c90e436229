"""What a network of rates writes, by the forward equation over the thirteen states of the toy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aodiff.core import insertion
from aodiff.core.schedules import make_rise
from tests.methods.flexmdm_bound_test import LENGTHS, SHARES, STRINGS, exact_terms
from tests.toy_insertion import (
    ANCHOR,
    CODE,
    LAW,
    MASK,
    ToyInsertion,
    V,
    mistakes,
    posterior,
    rows_of_states,
)

STEPS, LAST = 2400, 15.0  # of -log(1 - t), in which hazards are constant
ROUTES = {
    "each": lambda masks: {i: 1.0 for i in masks},
    "leftmost": lambda masks: {masks[0]: len(masks)},
    "rightmost": lambda masks: {masks[-1]: len(masks)},
    "middle": lambda masks: {masks[len(masks) // 2]: len(masks)},
}


@functools.cache
def answers(rise, seed):
    """Letters (T, 13, 3, V) and mean counts (T, 13, 3) of all states at all times, float64."""
    rows = rows_of_states()
    times = 1 - np.exp(-np.linspace(0, LAST, 2 * STEPS + 1))
    alpha = make_rise(rise).value(jnp.asarray(times, jnp.float32))
    params = {} if seed is None else mistakes(seed)
    net = lambda a: ToyInsertion().apply(params, *rows, jnp.full(13, a))
    out = jax.jit(jax.vmap(net))(alpha)
    law = jax.nn.softmax(out.logits, axis=-1)[..., :V]
    return np.asarray(law, np.float64), np.exp(np.asarray(out.gap, np.float64))


def written(pair, seed=None, route="each"):
    """Probabilities of `STRINGS` at the end, for rates hazard x mean count and hazard x letter."""
    law, mean = answers(pair[0], seed)
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


@pytest.mark.parametrize("seed", range(3))
def test_the_bound_is_above_the_likelihood_of_a_wrong_model(seed):
    pair = ("linear", "linear")
    law = written(pair, seed)
    assert abs(law.sum() - 1) < 1e-4 and np.abs(law - SHARES).sum() > 0.02
    bound = exact_terms(pair, seed=seed).sum(1) - LENGTHS
    assert np.all(bound > -np.log(law) - 1e-4)
    assert SHARES @ (bound + np.log(law)) > 1e-4
    assert len(LAW) == len(law)


@functools.partial(jax.jit, static_argnums=0)
def corrupted(pair, tokens, length, time):
    keys = jax.random.split(jax.random.key(5), len(tokens))
    come, revealed = insertion.event_times(keys, 3, *map(make_rise, pair))
    fixed = jnp.arange(3)[None] == jnp.zeros_like(tokens)
    return insertion.corrupt(tokens, length, fixed, come, revealed, time, MASK)


@pytest.mark.parametrize("unmasking", ["linear", "power(5)"])
def test_what_is_hidden_follows_the_posterior_whatever_the_unmasking(unmasking):
    """flexmdm.md 15.7: frequencies of letters under masks and means of gaps, by what is seen."""
    number = (40_000 * SHARES).round().astype(int)
    rows = np.repeat([[ANCHOR, *s, *[0] * (2 - len(s))] for s in STRINGS], number, axis=0)
    length, time = np.repeat(LENGTHS + 1, number), np.full(len(rows), 0.4, np.float32)
    state = corrupted(("power(1.7)", unmasking), *map(jnp.asarray, (rows, length, time)))
    state = jax.tree.map(np.asarray, state)
    f, gap = (np.asarray(x) for x in posterior(make_rise("power(1.7)").value(0.4)))
    seen = [tuple(row[1:n]) for row, n in zip(state.tokens, state.length, strict=True)]
    codes, checked = np.array([CODE[s] for s in seen]), 0
    for s, code in CODE.items():
        here = np.flatnonzero(codes == code)
        if len(here) < 200:
            continue
        checked += 1
        off = lambda x, expected: abs(x.mean() - expected) / (4 * x.std() / len(x) ** 0.5 + 1e-6)
        for i in range(len(s) + 1):
            assert off(state.gap[here, i], gap[code, i]) < 1
        for i in (i for i, x in enumerate(s) if x == MASK):
            assert off(state.target[here, i + 1] == 0, f[code, i, 0]) < 1
    assert checked >= 10

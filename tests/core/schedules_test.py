import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aodiff.core.schedules import check_ends, make_rise, make_schedule, rising_geometric

SPECS = ("linear", "cosine", "poly(2)", "poly(0.5)")


@pytest.mark.parametrize("spec", SPECS)
def test_ends_inverse_and_weight(spec):
    s = make_schedule(spec)
    assert abs(float(s.alpha(jnp.float32(0.0))) - 1) < 1e-6
    assert abs(float(s.alpha(jnp.float32(1.0)))) < 1e-6
    t = jnp.linspace(0.02, 0.98, 25)
    np.testing.assert_allclose(s.inverse(s.alpha(t)), t, atol=2e-5)
    slope = jax.vmap(jax.grad(s.alpha))(t)
    np.testing.assert_allclose(s.weight(t), -slope / (1 - s.alpha(t)), rtol=2e-5)


@pytest.mark.parametrize("spec", SPECS)
def test_every_position_is_weighed_once(spec):
    """E[weight x masked] integrates to alpha(0) - alpha(1) = 1."""
    s = make_schedule(spec)
    t = (np.arange(200_000) + 0.5) / 200_000
    mass = np.asarray(s.weight(jnp.asarray(t)) * (1 - s.alpha(jnp.asarray(t)))).mean()
    assert abs(mass - 1) < 2e-3


@pytest.mark.parametrize("spec", ("quadratic", "poly", "linear(2)", "poly(x)", ""))
def test_unknown_schedules_are_refused(spec):
    with pytest.raises(ValueError, match="linear, cosine, poly"):
        make_schedule(spec)


# Insertion and unmasking: E[alpha], E[alpha^2] over uniform times (flexmdm.md 2.3).
RISES = {
    "linear": (0.5, 0.333),
    "power(1.7)": (0.630, 0.487),
    "power(2.89)": (0.743, 0.633),
    "power(2.9)": (0.744, 0.634),
    "quadratic": (0.667, 0.533),
    "sin": (0.637, 0.500),
    "cosine": (0.363, 0.227),
    "polynomial(2)": (0.333, 0.200),
    "polynomial(0.5)": (0.667, 0.500),
    "log_linear(1, 75)": (0.782, 0.652),
    "log_linear(0.5, 75)": None,
    "logit_power(1.5, 2)": (0.546, 0.427),
    "geometric(10, 0.01)": None,  # the table is of the raw curve
}
# The formulas as the table writes them.
VALUES = {
    "power(1.7)": lambda t: 1 - (1 - t) ** 1.7,
    "sin": lambda t: np.sin(np.pi * t / 2),
    "cosine": lambda t: 1 - np.cos(np.pi * t / 2),
    "polynomial(0.5)": lambda t: t**0.5,
    "log_linear(1, 75)": lambda t: np.log(1 + 75 * t) / np.log(76),
    "log_linear(0.5, 75)": lambda t: t / 2 + np.log(1 + 75 * t) / np.log(76) / 2,
    "logit_power(1.5, 2)": lambda t: t**1.5 / (t**1.5 + (1 - t) ** 2),
    "geometric(10, 0.01)": lambda t: (
        (np.exp(-(10 ** (1 - t)) * 0.01**t) - np.exp(-10)) / (np.exp(-0.01) - np.exp(-10))
    ),
}
MIDDLES = (np.arange(20_000) + 0.5) / 20_000


@pytest.mark.parametrize("spec", RISES)
def test_rises_and_their_moments(spec):
    rise = make_rise(spec)
    found = np.asarray(rise.value(jnp.asarray(MIDDLES, jnp.float32)), np.float64)
    if spec in VALUES:
        np.testing.assert_allclose(found, VALUES[spec](MIDDLES), atol=1e-6)
    if RISES[spec]:
        np.testing.assert_allclose([found.mean(), (found**2).mean()], RISES[spec], atol=6e-4)


def test_the_raw_geometric_rise_keeps_its_ends_and_is_refused():
    for numbers, moments in (((10, 0.01), (0.585, 0.486)), ((5, 0.01), (0.650, 0.540))):
        raw = rising_geometric(*numbers, normalised=False)
        found = np.asarray(raw.value(jnp.asarray(MIDDLES, jnp.float32)), np.float64)
        np.testing.assert_allclose(
            found, np.exp(-(numbers[0] ** (1 - MIDDLES)) * 0.01**MIDDLES), atol=1e-6
        )
        np.testing.assert_allclose([found.mean(), (found**2).mean()], moments, atol=6e-4)
        np.testing.assert_allclose(raw.inverse(raw.value(0.3)), 0.3, atol=1e-5)
        with pytest.raises(ValueError, match="normalised"):
            check_ends(raw, "raw")


@pytest.mark.parametrize("spec", RISES)
def test_inverse_hazard_and_steps_of_rises(spec):
    rise, t = make_rise(spec), jnp.linspace(0.02, 0.98, 25)
    np.testing.assert_allclose(rise.inverse(rise.value(t)), t, atol=3e-5)
    np.testing.assert_allclose(rise.time_of(rise.left(t)), t, atol=3e-5)
    assert rise.time_of(jnp.float32(0)) == 1 and abs(rise.time_of(jnp.float32(1))) < 3e-5
    slope = jax.vmap(jax.grad(lambda t: -jnp.log(rise.left(t))))(t)
    np.testing.assert_allclose(rise.hazard(t), slope, rtol=2e-5)
    np.testing.assert_allclose(rise.deriv(t), slope * rise.left(t), rtol=2e-5)
    first, last = rise.step_prob(0.2, t), rise.step_prob(t, 1.0)
    np.testing.assert_allclose(
        (1 - rise.step_prob(0.1, 0.3)) * (1 - rise.step_prob(0.3, 0.8)),
        1 - rise.step_prob(0.1, 0.8),
        rtol=1e-5,
    )
    assert np.all(last == 1) and np.all(first <= 1) and np.all(np.diff(first) > 0)


@pytest.mark.parametrize("spec", ["power(1.7)", "sin", "linear", "power(2.9)"])
def test_rises_are_exact_to_the_very_end(spec):
    """Half of what is left comes before a time much nearer to 1 than what is left of the value."""
    rise = make_rise(spec)
    t = jnp.float32(1 - 2**-16)
    exact = {"power(1.7)": 1.7, "sin": 2.0, "linear": 1.0, "power(2.9)": 2.9}[spec]
    np.testing.assert_allclose(rise.hazard(t), exact * 2**16, rtol=1e-4)
    np.testing.assert_allclose(
        1 - rise.time_of(rise.left(t) / 2), 2**-16 * 0.5 ** (1 / exact), rtol=5e-3
    )


@pytest.mark.parametrize("spec", ("poly(2)", "power", "linear(2)", "power(x)", "geometric(10)", ""))
def test_unknown_rises_are_refused(spec):
    with pytest.raises(ValueError, match=r"power\(1.7\); quadratic"):
        make_rise(spec)


def test_rises_that_do_not_reach_their_ends_are_refused():
    with pytest.raises(ValueError, match="from 0 to 1"):
        make_rise("power(0)")

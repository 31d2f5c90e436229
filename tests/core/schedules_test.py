import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aodiff.core.schedules import make_schedule

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

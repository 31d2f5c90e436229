import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from aodiff.core import graph, spectral
from aodiff.core.orders import kendall_tau
from aodiff.nn.order_policy import OrderMLP, order_loss, z_score

N = 12


def evidence(seed):
    """Noisy dependencies of a path whose units were renamed by one fixed permutation."""
    place = np.random.default_rng(7).permutation(N)
    clean = np.exp(-np.abs(place[:, None] - place[None, :]))
    noise = 1 + 0.2 * np.random.default_rng(seed).normal(size=(N, N))
    depends = np.where(np.eye(N, dtype=bool), 0, clean * noise)
    w = graph.reciprocal_graph(depends)
    inputs = [jnp.asarray(graph.standardise(x), jnp.float32) for x in (depends, w)]
    return inputs, spectral.seriate(w).priority


@pytest.mark.parametrize(
    "kind, width, count", [("row", 32, 32 * 3 * N + 32 + 33), ("flat", 8, None)]
)
def test_the_student_generalises_to_a_later_refresh(kind, width, count):
    model = OrderMLP(kind, width)
    params = model.init(jax.random.key(0), *evidence(0)[0])
    if count is not None:  # linear in n
        assert sum(x.size for x in jax.tree.leaves(params)) == count
    tx = optax.adamw(3e-3 if kind == "row" else 2e-4, b2=0.99, weight_decay=0.01)
    opt = tx.init(params)

    @jax.jit
    def update(params, opt, inputs, priority):
        grad = jax.grad(lambda p: order_loss(model.apply(p, *inputs), priority))(params)
        updates, opt = tx.update(grad, opt, params)
        return optax.apply_updates(params, updates), opt

    teacher = evidence(0)[1]
    for i in range(200):
        inputs, priority = evidence(i % 20)
        priority = priority if priority @ (teacher - 0.5) > 0 else 1 - priority
        params, opt = update(params, opt, inputs, jnp.asarray(priority, jnp.float32))
    logits = np.asarray(model.apply(params, *evidence(99)[0]))
    assert kendall_tau(np.argsort(-logits), np.argsort(-teacher)) >= 0.97


def test_loss_ignores_scale_and_offset_and_stops_at_the_teacher():
    priority = jnp.linspace(0, 1, N)
    np.testing.assert_allclose(order_loss(5 * priority - 3, priority), 0, atol=1e-6)
    np.testing.assert_allclose(order_loss(-priority, priority), 4, rtol=1e-5)
    logits = jnp.sin(jnp.arange(N) * 1.0)
    assert not np.any(jax.grad(order_loss, argnums=1)(logits, priority))
    assert np.any(jax.grad(order_loss)(logits, priority))
    assert np.std(z_score(logits)) == pytest.approx(1, abs=1e-5)

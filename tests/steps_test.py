"""The training step: exact accumulation, the same on every mesh, EMA, clipping, skipped updates."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from aodiff import config as config_lib
from aodiff import optim, partitioning, state, steps
from aodiff.metrics import Mean
from tests import toy

METHOD = toy.Toy(vocab=8, seq_len=6)
SEED = np.uint32(7)


def a_batch(rows: int = 16) -> dict:
    """Random tokens; later rows have more scored positions: no two microbatches are alike."""
    host = np.random.default_rng(0)
    mask = np.arange(6)[None] < np.minimum(np.arange(rows) // 2 + 1, 6)[:, None]
    return {
        "tokens": host.integers(0, 8, (rows, 6)).astype(np.int32),
        "loss_mask": mask,
        "given": np.zeros_like(mask),
        "length": np.full(len(mask), mask.shape[1], np.int32),
        "example_id": np.arange(rows, dtype=np.int32),
    }


def a_state(tx, ema: bool = True) -> state.TrainState:
    mesh = partitioning.make_mesh(1, 1, 1, devices=jax.devices()[:1])
    return state.init_state(METHOD, tx, ema, state.abstract_state(METHOD, tx, ema, mesh), 0)


@pytest.fixture(scope="module")
def drawn():
    """Parameters and a drawn batch."""
    params = a_state(optax.sgd(1.0), ema=False).params
    batch = METHOD.draw(jax.random.key(1), a_batch(), 0, params, METHOD.init_extra())[0]
    return params, batch


@pytest.mark.parametrize("microbatches", [2, 4, 16])
def test_split_gradient_equals_the_whole(drawn, microbatches):
    """Unequal counts per microbatch; a mean of means would differ in the second digit."""
    params, batch = drawn
    run = jax.jit(steps.accumulate, static_argnums=(0, 3))
    whole, out = run(METHOD, params, batch, 1)
    split, split_out = run(METHOD, params, batch, microbatches)
    assert out.loss.count == split_out.loss.count == out.metrics["scored"].total
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(split), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)  # sums of 60 float32 terms


def test_gradient_is_that_of_the_global_mean(drawn):
    params, batch = drawn
    tx = optax.sgd(1.0)
    s = a_state(tx, ema=False)
    step = jax.jit(steps.make_train_step(METHOD, tx, 2, 0.0))
    new, metrics = step(s, a_batch(), SEED)
    key = jax.random.fold_in(
        jax.random.fold_in(jax.random.key(SEED, impl="threefry2x32"), 2), 0
    )  # purpose TRAIN, step 0
    batch = METHOD.draw(key, a_batch(), 0, s.params, METHOD.init_extra())[0]

    def mean(params):
        nll = METHOD.nll(params, batch["tokens"], batch["keep"])
        return jnp.sum(jnp.where((batch["loss_mask"] & batch["keep"])[:, 1:], nll, 0)) / jnp.sum(
            (batch["loss_mask"] & batch["keep"])[:, 1:]
        )

    loss, grads = jax.jit(jax.value_and_grad(mean))(params)
    np.testing.assert_allclose(metrics["loss"].value(), loss, rtol=1e-6)
    np.testing.assert_allclose(
        metrics["grad_norm"].value(),
        np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(grads))),
        rtol=1e-5,
    )
    jax.tree.map(
        lambda p, g, q: np.testing.assert_allclose(p - g, q, atol=1e-6), params, grads, new.params
    )


def adamw() -> optax.GradientTransformation:
    config = config_lib.finalize(toy.get_config())
    return optim.make_optimizer(config.optim, 12, optim.decay_mask(state.abstract_params(METHOD)))


def three_steps(mesh):
    """Initial parameters on the host, then state and metrics after three updates."""
    tx = adamw()
    abstract = state.abstract_state(METHOD, tx, True, mesh)
    s = state.init_state(METHOD, tx, True, abstract, 0)
    first = jax.device_get(s.params)
    step = steps.make_train_step(METHOD, tx, 2, 0.9)
    step = steps.compile_train_step(step, abstract, METHOD.batch_spec(16), mesh)
    seed = jax.device_put(SEED, NamedSharding(mesh, PartitionSpec()))
    batch = jax.device_put(a_batch(), partitioning.batch_sharding(mesh))
    for _ in range(3):
        s, metrics = step(s, batch, seed)
    return first, s, metrics


@pytest.fixture(scope="module")
def on_one_device():
    return three_steps(partitioning.make_mesh(1, 1, 1, devices=jax.devices()[:1]))


@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2)])
def test_every_mesh_takes_the_same_steps(on_one_device, sizes):
    """Noise and initial parameters are bit-equal; three updates agree to float32 rounding."""
    first, one, metrics = on_one_device
    other_first, other, other_metrics = three_steps(partitioning.make_mesh(*sizes))
    jax.tree.map(np.testing.assert_array_equal, first, other_first)
    assert int(metrics["scored"].total) == int(other_metrics["scored"].total)
    # Adam divides by the root of a square, so rounding of a gradient carries over to its update.
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    if sizes == (2, 2, 2):
        spec = PartitionSpec(None, "fsdp", "model")
        adam = other.opt_state.inner_state.inner_state[1]
        assert other.params["mix"].sharding.spec == adam.mu["mix"].sharding.spec == spec


def test_ema_closed_form():
    """Invariant 21: weight 1 - 2/11 on the first update, and constant parameters stay put."""
    ema, params = {"w": jnp.zeros(3)}, {"w": jnp.arange(3.0)}
    once = steps.update_ema(ema, params, 0.999, jnp.int32(1), False)
    np.testing.assert_allclose(once["w"], (1 - 2 / 11) * np.arange(3), rtol=1e-6)
    still = steps.update_ema(params, params, 0.999, jnp.int32(1), False)
    np.testing.assert_array_equal(still["w"], params["w"])
    late = steps.update_ema(ema, params, 0.9, jnp.int32(10**6), False)
    np.testing.assert_allclose(late["w"], 0.1 * np.arange(3), rtol=1e-6)


def test_ema_follows_the_parameters_of_each_step():
    tx = optax.sgd(0.1)
    s = a_state(tx)
    step = jax.jit(steps.make_train_step(METHOD, tx, 1, 0.5))
    expected = jax.device_get(s.params)
    for count in (1, 2, 3):
        s, _ = step(s, a_batch(), SEED)
        d = min(0.5, (1 + count) / (10 + count))
        params = jax.device_get(s.params)
        expected = jax.tree.map(lambda e, p, d=d: d * e + (1 - d) * p, expected, params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), expected, s.ema_params)


@pytest.mark.parametrize("gain", [np.nan, 1e30])  # 1e30: only the norm of the gradient overflows
def test_nonfinite_gradient_changes_nothing_but_the_step(gain):
    tx = adamw()
    s = a_state(tx)
    bad = s.replace(params=s.params | {"gain": jnp.full(toy.WIDTH, gain)})
    new, metrics = jax.jit(steps.make_train_step(METHOD, tx, 2, 0.9))(bad, a_batch(), SEED)
    assert metrics["nonfinite"].total == 1 and new.step == 1
    jax.tree.map(np.testing.assert_array_equal, new.params, bad.params)
    jax.tree.map(np.testing.assert_array_equal, new.ema_params, bad.ema_params)
    old, kept = s.opt_state.inner_state, new.opt_state.inner_state
    jax.tree.map(np.testing.assert_array_equal, kept, old)
    assert new.opt_state.total_notfinite == 1


def test_metrics_keep_total_and_count_apart():
    whole = Mean.of(jnp.arange(6.0), jnp.array([True] * 5 + [False]))
    parts = Mean.of(jnp.arange(2.0), jnp.array([True] * 2)) + Mean.of(
        jnp.array([2.0, 3, 4]), jnp.array([True] * 3)
    )
    assert whole.value() == parts.value() == 2.0

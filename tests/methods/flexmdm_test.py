import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from aodiff import partitioning, rng
from aodiff.config import ConfigError, base
from aodiff.core import insertion
from aodiff.core.schedules import make_rise
from aodiff.data import DataInfo, describe, open_splits
from aodiff.data.pipeline import as_batch, host_batch
from aodiff.methods import build
from aodiff.methods.flexmdm import FlexMDMMethod
from tests.methods.flexmdm_bound_test import batch_of, method
from tests.toy_insertion import MASK, STATES, A, B, ToyInsertion, rows_of_states


def test_prompts_are_there_from_the_start_and_not_scored():
    m = method()
    batch = batch_of([(A,), (A, A), (A, B)] * 300, prompt_len=np.ones(900))
    scores = jax.jit(m.bound(2).fn)({}, batch, rng.stream(0, rng.EVAL), {})
    np.testing.assert_array_equal(scores.count, [0, 1, 1] * 300)
    drawn, _ = m.draw(rng.stream(0, rng.TRAIN), batch, 0, {}, {})
    state = insertion.corrupt(
        jnp.pad(drawn["tokens"], ((0, 0), (1, 0))),
        drawn["length"] + 1,
        jnp.pad(~drawn["loss_mask"], ((0, 0), (1, 0)), constant_values=True),
        *(jnp.pad(drawn[k], ((0, 0), (1, 0))) for k in ("come", "revealed")),
        drawn["time"],
        MASK,
    )
    assert np.all(state.length >= 2) and not np.any(state.masked[:, :2])
    assert not np.any(state.open[:, 0]) and np.all(state.open[:, 1])


@functools.cache
def tiny(**changes):
    config = base("flexmdm")
    config.model.update(dict(num_layers=1, width=16, num_heads=4, cond_dim=8))
    config.eval.orders = ("own",)
    config.update_from_flattened_dict(changes)
    m = build(config, DataInfo("text", 12, 5, "byte"))
    params = partitioning.unbox(jax.jit(m.init)(jax.random.key(0)))
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    return m, tree.unflatten(
        [x + 0.2 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    )


def rows_of_text(batch=16, **fields):
    r = np.random.default_rng(0)
    fields = {"tokens": r.integers(0, 5, (batch, 12)), "length": r.integers(0, 13, batch), **fields}
    return jax.tree.map(jnp.asarray, as_batch(fields, np.arange(batch)))


def test_noise_loss_and_slopes_are_those_of_the_global_batch_on_a_mesh():
    m, params = tiny()
    batch = rows_of_text()

    def step(params, batch):
        drawn, _ = m.draw(rng.stream(0, rng.TRAIN), batch, 0, params, {})
        loss = lambda params: m.loss_fn(params, drawn).loss.value()
        return drawn, *jax.value_and_grad(loss)(params)

    noise, total, slope = jax.jit(step)(params, batch)
    assert np.all(np.diff(np.sort(np.floor(np.asarray(noise["time"]) / 0.999 * 16))) == 1)
    boxed = jax.eval_shape(m.init, jax.random.key(0))
    mesh = partitioning.make_mesh(1, -1, 4, devices=jax.devices())
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, partitioning.param_shardings(boxed, mesh))
        rows = jax.device_put(batch, partitioning.batch_sharding(mesh))
        found = jax.jit(step)(placed, rows)
    jax.tree.map(np.testing.assert_array_equal, found[0], noise)
    np.testing.assert_allclose(found[1], total, rtol=1e-5)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5)
    jax.tree.map(close, found[2], slope)


def test_masks_without_room_are_left_out_and_counted():
    m, params = tiny()
    drawn, _ = m.draw(rng.stream(0, rng.TRAIN), rows_of_text(), 0, params, {})
    full, few = (dataclasses.replace(m, most=k).terms(params, drawn) for k in (12, 2))
    np.testing.assert_allclose(full.insertion, few.insertion, rtol=1e-5)
    masks = np.round(np.asarray(few.overflow + 0.0))
    assert full.overflow.sum() == 0 and masks.sum() > 0
    assert np.all((few.unmasking < full.unmasking) == (masks > 0))


@pytest.mark.parametrize("classes", [0, 6])
def test_padding_is_invisible_and_both_heads_have_a_bound(classes):
    m, params = tiny(**{"model.classes": classes})
    batch, other = rows_of_text(), rows_of_text()
    live = np.arange(12) < np.asarray(batch["length"])[:, None]
    other["tokens"] = jnp.where(live, batch["tokens"], 4 - batch["tokens"])
    score = jax.jit(m.bound(2).fn)
    found = [score(params, b, rng.stream(0, rng.EVAL), {}).nll for b in (batch, other)]
    np.testing.assert_array_equal(*found)
    drawn, _ = m.draw(rng.stream(0, rng.TRAIN), batch, 0, params, {})
    a, b = (m.terms(params, drawn, train=t).insertion for t in (True, False))
    assert np.allclose(a, b) == (classes == 0)


def test_a_model_of_the_time_sees_the_time_of_its_own_schedule():
    """flexmdm.md 15.15: under another schedule, the time at which its own is as far."""
    m, params = tiny(**{"method.condition": "time"})
    alpha_model, _ = tiny()
    tokens, length = jnp.full((3, 5), m.model.cfg.mask), jnp.array([1, 3, 5])
    t = jnp.array([0.1, 0.5, 0.9])
    tau = 1 - (1 - t) ** (2.9 / 1.7)
    out = m.predict(params, tokens, length, make_rise("power(2.9)").value(t))
    direct = m.model.apply(params, tokens, length, tau, None)
    np.testing.assert_allclose(out.gap, direct.gap, atol=2e-3)
    other = alpha_model.predict(params, tokens, length, make_rise("power(2.9)").value(t))
    assert np.abs(np.asarray(out.gap - other.gap)).max() > 1e-2


def test_so_the_right_model_of_the_time_is_right_under_every_schedule():
    train, toy = make_rise("power(1.7)"), ToyInsertion()
    timed = types.SimpleNamespace(
        apply=lambda p, tokens, length, t, slots: toy.apply(
            p, tokens, length, train.value(t), slots
        )
    )
    tokens, length = rows_of_states()
    for t in (0.1, 0.5, 0.9):
        alpha = jnp.full(len(STATES), make_rise("power(2.9)").value(t))
        found, right = (
            FlexMDMMethod(net, 2, train, train, condition=condition).predict(
                {}, tokens, length, alpha
            )
            for net, condition in ((timed, "time"), (toy, "alpha"))
        )
        np.testing.assert_allclose(jnp.exp(found.gap), jnp.exp(right.gap), atol=1e-5)
        np.testing.assert_allclose(*(jax.nn.softmax(x.logits) for x in (found, right)), atol=1e-5)


def test_templates_come_out_as_they_went_in():
    """A prefix and a suffix with a hole between them, and rows that are full from the start."""
    m, params = tiny()
    config = base("flexmdm")
    config.sample.update(dict(steps=6, buckets=(5, 9)))
    tokens = np.arange(48).reshape(4, 12) % 5
    given = np.array([[1] * 3 + [0] * 6 + [1] * 3, [0] * 12, [1] * 12, [0, 1] * 6], bool)
    keys = jax.random.split(jax.random.key(0), 4)
    bounds = np.where(given[..., None], 0, np.array([[1, 2], [9, 12], [0, 0], [0, 12]])[:, None])
    args = map(jnp.asarray, (tokens, given, bounds))
    out = jax.jit(m.sampler(config, 12))(params, {}, keys, *args)
    n = np.asarray(out.lengths)
    assert 7 <= n[0] <= 8 and n[1] >= 9
    assert n[2] == 12
    for row, length, template, kept, born in zip(
        out.tokens, n, tokens, given, out.born, strict=True
    ):
        fixed = np.asarray(born[:length]) < 0
        assert np.array_equal(np.asarray(row[:length])[fixed], template[kept])
        assert np.all(row[:length] < 5) and not np.any(row[length:])
    first = np.asarray(out.born[0, : n[0]])
    assert np.all(first[:3] < 0) and np.all(first[-3:] < 0) and np.all(first[3:-3] >= 0)
    assert np.asarray(out.born[3, : n[3]])[-1] < 0  # nothing comes after a token given last


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("method.insertion", "poly(2)", "log_linear"),
        ("method.unmasking", "power(0)", "from 0 to 1"),
        ("method.last_time", 1.0, "last_time"),
        ("method.condition", "beta", "alpha, time"),
        ("model.num_heads", 3, "heads"),
        ("eval.orders", ("l2r",), "one likelihood"),
        ("sample.crop", True, "fixed length"),
        ("sample.block", -2, "no blocks"),
        ("sample.count", "thin", "model.classes"),
        ("sample.count", "gauss", "floor_bernoulli"),
        ("sample.order", "sideways", "max_prob"),
        ("sample.insertion", "none", "log_linear"),
        ("sample.rate", "fast", "exponential"),
        ("sample.window", (0.5, 3), "window"),
        ("sample.drain", 0, "at least 1"),
    ],
)
def test_bad_values_are_one_sentence(key, value, words):
    config = base("flexmdm")
    config.eval.orders = ("own",)
    config.update_from_flattened_dict({key: value})
    with pytest.raises(ConfigError, match=words):
        build(config, DataInfo("text", 8, 5, "byte"))


def test_data_without_a_line_of_tokens_are_refused():
    for info in (
        DataInfo("table", 3, 4, "column", unit_sizes=(2, 3, 4)),
        DataInfo("chain", 3, 4, "symbol", permutation=(2, 0, 1)),
    ):
        with pytest.raises(ConfigError, match="row that grows"):
            build(base("flexmdm"), info)


def test_a_tiny_model_learns_brackets():
    """flexmdm.md 17.4; nats a string, whose entropy is 3.25. The bound never goes below it."""
    config = base("flexmdm")
    config.model.update(dict(num_layers=1, width=32, cond_dim=16, kernel_std=0.1))
    config.method.update(dict(insertion="sin", unmasking="linear"))
    config.eval.orders = ("own",)
    config.data.update(dict(name="brackets", seq_len=16, lengths=(2, 4, 8, 16), eval_rows=64))
    m, source = build(config, describe(config.data)), open_splits(config.data)["train"]
    params = partitioning.unbox(jax.jit(m.init)(jax.random.key(0)))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(5e-3))

    @jax.jit
    def step(params, state, batch, i):
        batch, _ = m.draw(rng.stream(0, rng.TRAIN, i), batch, i, params, {})
        loss = lambda p: (lambda out: (out.loss.total / out.loss.count, out.metrics))(
            m.loss_fn(p, batch)
        )
        slope, metrics = jax.grad(loss, has_aux=True)(params)
        updates, state = tx.update(slope, state, params)
        return optax.apply_updates(params, updates), state, metrics

    state, bounds, calibration = tx.init(params), [], []
    for i in range(100):
        batch = host_batch(source, 64, 0, i, np.arange(64))
        params, state, metrics = step(params, state, batch, i)
        bounds.append(float(metrics["bound"].total) / 64)
        calibration.append(float(metrics["gap_calibration"].value()))
    assert bounds[0] > 14 and 3.25 < np.mean(bounds[-20:]) < 0.5 * bounds[0]
    assert abs(np.mean(calibration[-20:]) - 1) < 0.15

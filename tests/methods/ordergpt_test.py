"""OrderGPT on a hidden chain of 8 units: the mechanism end to end, and what must never change."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aodiff import data, rng
from aodiff.config import ConfigError, base
from aodiff.methods import ordergpt
from aodiff.methods.ordergpt import OrderGPTMethod
from aodiff.nn.order_policy import order_loss
from aodiff.partitioning import unbox

N, B = 8, 16


def small_config(**flat):
    config = base("ordergpt")
    config.data.update(name="chain", seq_len=N, vocab=4, noise=0.1, permute_seed=3)
    config.model.update(num_layers=2, width=16, num_heads=2, cond_dim=8, injection="input")
    config.train.update(global_batch=B, num_steps=200)
    config.method.update(refresh_every=10, student_width=16)
    config.update_from_flattened_dict(flat)
    return config


@pytest.fixture(scope="module")
def config():
    return small_config()


@pytest.fixture(scope="module")
def method(config):
    return OrderGPTMethod.from_config(config, data.describe(config.data))


@pytest.fixture(scope="module")
def params(method):
    return jax.jit(lambda k: unbox(method.init(k)))(rng.stream(0, rng.INIT))


@pytest.fixture(scope="module")
def batch(config):
    rows = data.open_splits(config.data)["train"].read(np.arange(B))["tokens"]
    return {
        "tokens": jnp.asarray(rows, jnp.int32),
        "loss_mask": jnp.ones((B, N), bool),
        "example_id": jnp.arange(B),
    }


@pytest.fixture(scope="module")
def probe(method, params, batch):
    return jax.device_get(method._probe(params, batch, rng.stream(0, rng.PROBE, 0)))


def chain_evidence(parts=((0, N),), strength=0.3):
    """Excess sums of a decoder that attends to chain neighbours, in a hidden numbering of units."""
    place = np.random.default_rng(0).permutation(N)
    distance = np.abs(place[:, None] - place[None, :])
    part = np.array([[a <= p < b for a, b in parts].index(True) for p in place])
    linked = part[:, None] == part[None, :]
    mean = np.where(linked & (distance > 0), strength * np.exp(-distance), -0.05)
    count = np.full((2, N, N), 40.0, np.float32)
    return (mean[None] * count).astype(np.float32), count, place


def refresh_with(method, monkeypatch, params, batch, state, step, evidence, gap=(-0.5, 0.01)):
    """A refresh whose probe saw `evidence` and whose direction test found `gap`."""
    excess, count, _ = evidence
    found = {
        "excess": excess,
        "count": count,
        "nll": np.float32([1.0, 1.0]),
        "scored": np.float32([2.0, 2.0]),
        "values": np.ones((N, method.model.cfg.vocab_size), np.float32),
    }
    monkeypatch.setattr(OrderGPTMethod, "_probe", lambda *a: found)
    monkeypatch.setattr(OrderGPTMethod, "_direction", lambda *a: gap)
    return method.refresh(params, batch, None, step, state)


def equal(a, b):
    return jax.tree.all(jax.tree.map(lambda x, y: np.array_equal(x, y), a, b))


# ---- the probe ----------------------------------------------------------------------------------


def test_probe_counts_exposures_and_values_of_both_halves(probe, batch):
    pairs = (N - 1) * (N - 2) // 2  # without the last revealed source
    np.testing.assert_array_equal(probe["count"].sum((1, 2)), [pairs * B / 2] * 2)
    values = probe["values"]
    assert values.sum() == B * N
    for unit in (0, N - 1):
        counts = np.bincount(batch["tokens"][:, unit], minlength=4)
        np.testing.assert_array_equal(values[unit], counts)


def test_halves_are_even_and_odd_rows(method, params, batch, probe):
    key = rng.stream(0, rng.PROBE, 0)
    order = method.order_of("uniform")(rng.example_keys(key, jnp.arange(B)), jnp.int32(0))
    apply = jax.jit(lambda tokens, order: method.model.apply(params, tokens, order, capture=True))
    for half in range(2):
        _, evidence = apply(batch["tokens"][half::2], order[half::2])
        np.testing.assert_allclose(probe["excess"][half], evidence.mean(0), atol=1e-5)


def test_more_orders_per_example_count_more(method, params, batch, probe):
    more = dataclasses.replace(method, probe_orders=3)
    again = jax.device_get(more._probe(params, batch, rng.stream(0, rng.PROBE, 0)))
    np.testing.assert_array_equal(again["count"].sum((1, 2)), 3 * probe["count"].sum((1, 2)))
    np.testing.assert_array_equal(again["values"], probe["values"])
    assert (again["count"] != 3 * probe["count"]).any()  # the orders are new ones
    assert again["nll"] == pytest.approx(3 * probe["nll"], rel=0.1)


def test_many_groups_give_the_same_sums(method, params, batch, probe, monkeypatch):
    monkeypatch.setattr(ordergpt, "PROBE_BYTES", 2 * N * N * 4 * 2)
    assert ordergpt._num_groups(B, 2 * N * N * 4) == 8
    other = dataclasses.replace(method, seed=1)  # not the method of the compiled probe
    again = other._probe(params, batch, rng.stream(0, rng.PROBE, 0))
    for name, value in probe.items():
        np.testing.assert_allclose(again[name], value, rtol=1e-4, atol=1e-4)


def test_decoder_without_query_weights_has_no_graph(method, params, batch):
    def flatten(path, x):
        return jnp.zeros_like(x) if "qkv" in jax.tree_util.keystr(path) else x

    blind = jax.tree_util.tree_map_with_path(flatten, params)
    probe = jax.device_get(method._probe(blind, batch, rng.stream(0, rng.PROBE, 0)))
    np.testing.assert_allclose(probe["excess"], np.zeros((2, N, N)), atol=1e-5)


# ---- from evidence to an order -------------------------------------------------------------------


def test_no_graph_leaves_training_uniform(method, params, batch, monkeypatch):
    none = (np.full((2, N, N), -1.0, np.float32), np.full((2, N, N), 40.0, np.float32), None)
    state, ends = method.init_extra(), []
    for step in (120, 130, 140):  # the time limit is 128
        state, scalars = refresh_with(method, monkeypatch, params, batch, state, step, none)
        ends.append((int(state.freeze_step), scalars.get("order/num_parts")))
    assert ends == [(-1, 0), (130, 0), (130, None)]  # no probe after it: arms are not given more
    assert state.order_step == -1 and method.share(jnp.int32(199), state) == 0


def test_an_order_whose_graph_is_lost_is_kept_and_frozen(method, params, batch, monkeypatch):
    evidence = chain_evidence()
    found, _ = refresh_with(method, monkeypatch, params, batch, method.init_extra(), 60, evidence)
    none = (np.full((2, N, N), -1e6, np.float32), np.full((2, N, N), 40.0, np.float32), None)
    state, _ = refresh_with(method, monkeypatch, params, batch, found, 130, none)
    np.testing.assert_array_equal(state.order, found.order)
    assert state.num_parts == 0 and state.freeze_step == 130
    assert method.share(jnp.int32(199), state) == 1


def test_a_chain_is_found_followed_and_frozen_early(method, params, batch, monkeypatch):
    evidence = chain_evidence()
    state, tau = method.init_extra(), []
    for step in range(10, 201, 10):
        before = state
        state, scalars = refresh_with(method, monkeypatch, params, batch, state, step, evidence)
        tau.append(scalars.get("order/tau_student_teacher"))
        if before.freeze_step >= 0:
            assert state is before and scalars == {}
    places = evidence[2][np.asarray(state.order)]
    assert abs(np.diff(places).sum()) == N - 1  # the whole chain, in a straight line
    assert state.start_step == 10 and state.order_step == 10
    assert state.freeze_step == 100 and state.num_parts == 1 and tau[9] >= 0.97


def test_two_parts_block_the_freeze_until_the_time_limit(method, params, batch, monkeypatch):
    evidence = chain_evidence(parts=((0, 4), (4, N)))
    state = method.init_extra()
    for step in range(60, 201, 10):
        state, _ = refresh_with(method, monkeypatch, params, batch, state, step, evidence)
    assert state.num_parts == 2 and state.freeze_step == 130  # 0.64 of 200 steps, next refresh


def test_halves_that_disagree_block_the_freeze(method, params, batch, monkeypatch):
    excess, count, _ = chain_evidence()
    p = np.random.default_rng(5).permutation(N)
    excess = np.stack([excess[0], 0.1 * excess[0][p][:, p]])
    state = method.init_extra()
    for step in range(60, 201, 10):
        state, scalars = refresh_with(
            method, monkeypatch, params, batch, state, step, (excess, count, None)
        )
        if scalars:
            assert scalars["order/tau_split_half"] < 0.9
    assert state.freeze_step == 130


def test_direction_is_the_cheaper_one_and_then_stays(method, params, batch, monkeypatch):
    evidence, orders = chain_evidence(), []
    for first in (-0.5, 0.5):
        state = method.init_extra()
        for step, gap in ((60, first), (70, 0.0), (80, 0.0)):
            state, _ = refresh_with(
                method, monkeypatch, params, batch, state, step, evidence, (gap, 0.01)
            )
            orders.append(np.asarray(state.order))
    np.testing.assert_array_equal(orders[0], orders[3][::-1])
    np.testing.assert_array_equal(orders[0], orders[2])
    np.testing.assert_array_equal(orders[3], orders[5])


def test_an_unfaithful_student_is_overruled_by_the_teacher(method, params, batch, monkeypatch):
    evidence = chain_evidence()
    lazy = dataclasses.replace(method, student_steps=1, student_lr=0.0)
    state, scalars = refresh_with(lazy, monkeypatch, params, batch, lazy.init_extra(), 60, evidence)
    assert scalars["order/tau_student_teacher"] < 0.97
    np.testing.assert_array_equal(state.order, np.argsort(-state.teacher, kind="stable"))


def test_evidence_and_counts_decay_together(method, params, batch, monkeypatch):
    excess, count, _ = evidence = chain_evidence()
    state = method.init_extra()
    for step in (60, 70, 80):
        state, _ = refresh_with(method, monkeypatch, params, batch, state, step, evidence)
    np.testing.assert_allclose(state.excess, excess * 2.71, rtol=1e-5)
    np.testing.assert_allclose(state.count, count * 2.71, rtol=1e-5)
    np.testing.assert_array_equal(state.history_step[:4], [60, 70, 80, -1])
    np.testing.assert_array_equal(state.history[2], state.order)


# ---- training orders -----------------------------------------------------------------------------


def learned(method, freeze_step=-1):
    order = jnp.asarray(np.random.default_rng(1).permutation(N), jnp.int32)
    return method.init_extra().replace(
        order=order,
        priority=1.0 - jnp.argsort(order) / (N - 1.0),
        order_step=jnp.int32(40),
        freeze_step=jnp.int32(freeze_step),
    )


@pytest.mark.parametrize("sampler", ["map", "gumbel"])
def test_one_compile_serves_every_phase(method, sampler):
    method = dataclasses.replace(method, sampler_kind=sampler)
    traces = []

    @jax.jit
    def draw(step, state):
        traces.append(step)
        many = {"tokens": jnp.zeros((512, N), jnp.int32)}
        return method.draw(rng.stream(0, rng.TRAIN, step), many, step, {}, state)[0]["order"]

    def agree(step, state):
        """Share of the examples that are drawn in the learned order."""
        order = draw(jnp.int32(step), jax.tree.map(jnp.asarray, state))
        np.testing.assert_array_equal(jnp.sort(order, axis=1)[:3], [np.arange(N)] * 3)
        return float(jnp.mean(jnp.all(order == state.order[None], axis=1)))

    unfrozen, frozen = learned(method), learned(method, 120)
    assert agree(199, unfrozen.replace(order_step=jnp.int32(-1))) < 0.01  # no order yet
    assert agree(72, unfrozen) < 0.01  # P1: not used
    assert 0.05 < agree(110, unfrozen) < 0.8  # P2
    assert 0.7 < agree(199, unfrozen) < 1  # still waiting for the freeze
    assert agree(132, frozen) == 1 and agree(199, frozen) == 1  # P4
    assert len(traces) == 1


def test_an_examples_order_depends_on_its_row_alone(method, batch):
    key, state = rng.stream(0, rng.TRAIN, 5), learned(method)
    whole = method.draw(key, batch, jnp.int32(100), {}, state)[0]["order"]
    half = {k: v[:4] for k, v in batch.items()}
    part = method.draw(key, half, jnp.int32(100), {}, state)[0]["order"]
    np.testing.assert_array_equal(part, whole[:4])


# ---- who trains what -----------------------------------------------------------------------------


def test_neither_loss_reaches_the_others_parameters(method, params, batch):
    state = learned(method)

    def decoder_loss(student, params):
        key, other = rng.stream(0, rng.TRAIN), state.replace(student=student)
        drawn, _ = method.draw(key, batch, jnp.int32(100), params, other)
        return method.loss_fn(params, drawn).loss.value()

    student, decoder = jax.jit(jax.grad(decoder_loss, argnums=(0, 1)))(state.student, params)
    assert not any(np.any(x) for x in jax.tree.leaves(student))
    assert any(np.any(x) for x in jax.tree.leaves(decoder))

    def student_loss(params, student):
        order = jax.vmap(lambda i: jnp.roll(state.order, i))(jnp.arange(B))
        _, evidence = method.model.apply(params, batch["tokens"], order, capture=True)
        depends = evidence.mean(0)
        return order_loss(method.policy.apply(student, depends, depends), depends.sum(0))

    decoder, student = jax.jit(jax.grad(student_loss, argnums=(0, 1)))(params, state.student)
    assert not any(np.any(x) for x in jax.tree.leaves(decoder))
    assert any(np.any(x) for x in jax.tree.leaves(student))


def test_a_resumed_refresh_repeats_every_bit(method, params, batch):
    def run(state, steps):
        for step in steps:
            key = rng.stream(0, rng.PROBE, step)
            state, _ = method.refresh(params, batch, key, step, state)
        return state

    whole = run(method.init_extra(), range(60, 120, 10))
    saved = jax.device_get(run(method.init_extra(), range(60, 90, 10)))
    resumed = run(jax.tree.map(jnp.asarray, saved), range(90, 120, 10))
    assert whole.order_step >= 0 and equal(whole, resumed)


# ---- evaluation and refusals ---------------------------------------------------------------------


def test_own_order_scores_the_learned_order_exactly(method, params, batch):
    evaluation, state = method.evaluation("own", 4), learned(method)
    assert evaluation.estimator == "exact, the learned order"
    scores = jax.jit(evaluation.fn)(params, batch, rng.stream(0, rng.EVAL), state)
    order = jnp.broadcast_to(state.order[None], (B, N))
    log_p = jax.nn.log_softmax(jax.jit(method.model.apply)(params, batch["tokens"], order))
    want = [-sum(log_p[b, s, batch["tokens"][b, order[b, s]]] for s in range(N)) for b in range(2)]
    np.testing.assert_allclose(scores.nll[:2], want, rtol=1e-5)
    np.testing.assert_array_equal(scores.count, [N] * B)


def test_the_frozen_likelihood_of_all_rows_sums_to_one():
    config = small_config(**{"data.seq_len": 3, "data.vocab": 3})
    method = OrderGPTMethod.from_config(config, data.describe(config.data))
    params = unbox(method.init(rng.stream(0, rng.INIT)))
    params = jax.tree.map(lambda x: x + 0.3 * jnp.sin(jnp.arange(x.size)).reshape(x.shape), params)
    rows = jnp.asarray(list(itertools.product(range(3), repeat=3)))
    every = {
        "tokens": rows,
        "loss_mask": jnp.ones(rows.shape, bool),
        "example_id": jnp.arange(len(rows)),
    }
    score = jax.jit(method.evaluation("own", 1).fn)
    laws = []
    for order in ([0, 1, 2], [2, 0, 1]):
        state = method.init_extra().replace(
            order=jnp.asarray(order), order_step=jnp.int32(1), freeze_step=jnp.int32(2)
        )
        laws.append(np.exp(-score(params, every, rng.stream(0, rng.EVAL), state).nll))
    np.testing.assert_allclose(np.sum(laws, axis=1), 1, rtol=1e-5)
    assert np.abs(laws[0] - laws[1]).max() > 1e-3 and np.std(laws[0]) > 1e-3


@pytest.mark.parametrize(
    "flat, message",
    [
        ({"method.sampler": "soft"}, "method.sampler='soft' is unknown; use one of map, gumbel"),
        ({"method.reciprocal": "sum"}, "use one of product, max"),
        ({"method.student": "big"}, "use one of row, flat, teacher"),
        ({"method.shift": (0.7, 0.64)}, "must not decrease"),
        ({"method.refresh_every": 0}, "method.refresh_every=0 is too small"),
        ({"model.injection": "two_stream", "model.num_sinks": 2}, "model.num_sinks=2 leaves"),
        ({"train.global_batch": 15}, "train.global_batch=15 must be even"),
    ],
)
def test_bad_values_are_refused_in_one_sentence(flat, message):
    config = small_config(**flat)
    with pytest.raises(ConfigError, match=message) as e:
        OrderGPTMethod.from_config(config, data.describe(config.data))
    assert "\n" not in str(e.value)

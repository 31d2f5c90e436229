import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from aodiff import partitioning, rng
from aodiff.config import ConfigError, base
from aodiff.core.schedules import discrete, make_schedule
from aodiff.data import DataInfo
from aodiff.data.pipeline import as_batch
from aodiff.methods import build
from aodiff.methods.mdm import MDMMethod
from aodiff.methods.mdm_model import board_groups
from tests.toy_denoiser import (
    BOUND,
    ENTROPY,
    IN_ORDER,
    KL,
    ROWS,
    TOTAL_CORRELATION,
    N,
    ToyDenoiser,
    joint,
)


def method(strength, noise="count", schedule="linear", **changes):
    denoiser, schedule = ToyDenoiser(strength), make_schedule(schedule)
    m = MDMMethod(denoiser, noise, schedule, min_time=1e-3, native=tuple(range(N)))
    return dataclasses.replace(m, **changes)


@functools.cache
def tiny(seq_len=12, **changes):
    """A real model of one layer on text of 5 ids, and its parameters."""
    config = base("mdm")
    config.model.update(dict(num_layers=1, width=16, num_heads=2, position="rope"))
    config.update_from_flattened_dict(changes)
    m = build(config, DataInfo("text", seq_len, 5, "byte"))
    params = jax.tree.map(lambda x: 20 * x, partitioning.unbox(jax.jit(m.init)(jax.random.key(0))))
    return m, params


def batch_of(rows, **fields):
    rows = np.asarray(rows)
    return jax.tree.map(jnp.asarray, as_batch({"tokens": rows, **fields}, np.arange(len(rows))))


def subsets():
    """(7, 3) bool, every non-empty set of hidden positions."""
    return np.array([s for s in itertools.product((False, True), repeat=N) if any(s)])


@pytest.mark.parametrize("strength", BOUND)
def test_loss_is_the_bound_by_enumeration(strength):
    """Sum over rows, counts and subsets of that size: mdm.md 2.2a."""
    rows = np.repeat(ROWS, 7, axis=0)
    hidden = np.tile(subsets(), (27, 1))
    size = hidden.sum(1)
    chance = np.repeat(joint(), 7) / N / np.array([math.comb(N, k) for k in size])
    batch = batch_of(rows) | {"hidden": jnp.asarray(hidden), "weight": (chance * N / size)[:, None]}
    out = method(strength).loss_fn({}, batch)
    assert abs(float(out.loss.total) - BOUND[strength]) < 1e-5
    assert float(out.loss.count) == rows.size


@pytest.mark.parametrize(
    "noise, schedule", [("count", "linear"), ("time", "linear"), ("time", "cosine")]
)
def test_drawn_losses_have_the_bound_as_their_mean(noise, schedule):
    m = method(1.0, noise, schedule)
    rows = np.random.default_rng(0).choice(27, 4096, p=joint())
    batch, losses = batch_of(ROWS[rows]), []
    loss = jax.jit(lambda key: m.loss_fn({}, m.draw(key, batch, jnp.int32(0), {}, {})[0]).loss)
    for i in range(40):
        out = loss(rng.stream(i, rng.TRAIN))
        losses.append(float(out.total / out.count) * N)
    exact = method(1.0).bound(3).fn({}, batch, rng.stream(0, rng.EVAL), {})
    error = np.std(losses) / np.sqrt(40) + float(jnp.std(exact.nll)) / 64
    # Times below min_time are never drawn: at most a thousandth of the bound is lost.
    assert abs(np.mean(losses) - float(exact.nll.mean())) < 4 * error + 4e-3


@pytest.mark.parametrize("strength", BOUND)
def test_evaluated_bound_is_unbiased(strength):
    batch = batch_of(np.repeat(ROWS, 300, axis=0))
    scores = method(strength).bound(3).fn({}, batch, rng.stream(0, rng.EVAL), {})
    nll = np.asarray(scores.nll).reshape(27, 300)
    found, error = joint() @ nll.mean(1), np.sqrt((joint() ** 2 @ nll.var(1)) / 300)
    assert abs(found - BOUND[strength]) < 4 * error + 1e-5
    curve = scores.curves["by_step"]
    assert np.all(curve.count > 0) and curve.total.shape == (N,)


@pytest.mark.parametrize("spec", IN_ORDER)
def test_orders_have_their_exact_likelihood(spec):
    batch = batch_of(ROWS)
    for strength, expected in ((0.0, ENTROPY), (1.0, IN_ORDER[spec])):
        scores = method(strength).in_order(spec, 1).fn({}, batch, rng.stream(0, rng.EVAL), {})
        assert abs(float(joint() @ np.asarray(scores.nll)) - expected) < 1e-5


@pytest.mark.parametrize("strength", BOUND)
def test_the_bound_is_the_mean_over_orders_and_above_the_likelihood_of_their_mixture(strength):
    """mdm.md 2.2b and c; the mixture's divergence is that of decoding.md 10.4."""
    nll = []
    for order in itertools.permutations(range(N)):
        m = method(strength, native=order)
        nll.append(m.in_order("native", 1).fn({}, batch_of(ROWS), rng.stream(0, rng.EVAL), {}).nll)
    nll = np.asarray(nll, np.float64)
    bound, exact = nll.mean(0), -np.log(np.exp(-nll).mean(0))
    assert abs(joint() @ bound - BOUND[strength]) < 1e-5
    assert abs(joint() @ exact - ENTROPY - KL[strength]) < 1e-5
    if strength:
        assert np.all(bound > exact + 1e-4)
    else:  # consistent conditionals
        np.testing.assert_allclose(bound, exact, atol=1e-5)


@functools.cache
def masked_nll(strength):
    """(N + 1,) expected cross entropy of k hidden positions, summed over them, by enumeration."""
    rows, hidden = np.repeat(ROWS, 7, axis=0), np.tile(subsets(), (27, 1))
    nll = method(strength)._hidden_nll({}, batch_of(rows), jnp.asarray(hidden)).sum(1)
    size, chance = hidden.sum(1), np.repeat(joint(), 7)
    number = np.array([math.comb(N, k) for k in range(N + 1)])
    return np.bincount(size, chance * np.asarray(nll), minlength=N + 1) / number


def by_quadrature(strength, schedule, time):
    """The loss of "time" noise, averaged over the times (T,)."""
    alpha = np.asarray(schedule.alpha(jnp.asarray(time)), np.float64)
    weight = np.asarray(schedule.weight(jnp.asarray(time)), np.float64)
    chance = scipy.stats.binom.pmf(np.arange(N + 1), N, 1 - alpha[:, None])
    return np.mean(weight * (chance @ masked_nll(strength)))


MIDDLES = (np.arange(20_000) + 0.5) / 20_000


@pytest.mark.parametrize("spec", ["linear", "cosine", "poly(2)"])
@pytest.mark.parametrize("strength", BOUND)
def test_the_bound_is_the_same_for_every_schedule(strength, spec):
    assert abs(by_quadrature(strength, make_schedule(spec), MIDDLES) - BOUND[strength]) < 1e-3


@pytest.mark.parametrize("spec", ["linear", "cosine", "poly(2)"])
def test_discrete_times_lie_between_all_at_once_and_one_by_one(spec):
    """mdm.md 13.11; with exact conditionals one step costs the total correlation."""

    def loss(strength, steps):
        schedule = discrete(make_schedule(spec), steps)
        return by_quadrature(strength, schedule, (np.arange(steps) + 0.5) / steps)

    assert abs(loss(0.0, 1) - ENTROPY - TOTAL_CORRELATION) < 1e-5
    assert loss(0.0, 1) > loss(0.0, 2) > loss(0.0, 8) > loss(0.0, 64) > ENTROPY
    assert all(abs(loss(strength, 1000) - BOUND[strength]) < 1e-3 for strength in BOUND)
    times = np.linspace(1e-4, 1, 9)  # anywhere in a step is the same time
    assert abs(by_quadrature(1.0, discrete(make_schedule(spec), 1), times) - loss(1.0, 1)) < 1e-6


def test_the_bound_and_orders_are_conditional_on_what_is_given():
    law, first = joint(), np.bincount(ROWS[:, 0], joint())[ROWS[:, 0]]
    expected = -law @ np.log(law / first)
    key, batch = rng.stream(0, rng.EVAL), batch_of(ROWS, prompt_len=np.ones(27))
    scores = method(0.0).in_order("l2r", 1).fn({}, batch, key, {})
    assert abs(law @ np.asarray(scores.nll) - expected) < 1e-5 and np.all(scores.count == 2)
    batch = batch_of(np.repeat(ROWS, 200, axis=0), prompt_len=np.ones(27 * 200))
    scores = method(0.0).bound(2).fn({}, batch, key, {})
    nll = np.asarray(scores.nll).reshape(27, 200)
    error = np.sqrt((law**2 @ nll.var(1)) / 200)
    assert abs(law @ nll.mean(1) - expected) < 4 * error
    np.testing.assert_array_equal(scores.curves["by_step"].count > 0, [True, True, False])


def test_an_evaluated_row_does_not_depend_on_the_others():
    """mdm.md 13.19: masks belong to the example, wherever and with whatever model it is scored."""
    key, order = rng.stream(0, rng.EVAL), np.random.default_rng(0).permutation(27)
    batch = batch_of(ROWS)
    moved = jax.tree.map(lambda x: x[order], batch)
    for evaluation in (method(1.0).bound(2), method(1.0).in_order("uniform", 1)):
        first, then = (np.asarray(evaluation.fn({}, b, key, {}).nll) for b in (batch, moved))
        np.testing.assert_array_equal(first[order], then)
    same = batch_of(np.zeros((27, N), int))
    assert len(np.unique(method(1.0).bound(1).fn({}, same, key, {}).nll)) > 3


def test_weights_by_context_and_equal_ones():
    m = method(1.0, weight="context")
    batch = batch_of(ROWS, present=np.arange(81).reshape(27, 3) % 4 != 1)
    drawn, _ = m.draw(rng.stream(0, rng.TRAIN), batch, jnp.int32(0), {}, {})
    known = np.asarray(batch["loss_mask"] & ~drawn["hidden"])
    share = np.array([[0, 0.15, 0.105], [0.15, 0, 0.15], [0.105, 0.15, 0]])
    np.testing.assert_allclose(drawn["weight"], known @ share, atol=1e-6)
    drawn, _ = dataclasses.replace(m, weight="one").draw(rng.stream(0, 1), batch, 0, {}, {})
    assert np.all(drawn["weight"] == 1)


def test_missing_cells_stay_masked_and_unscored():
    m, known = method(1.0), np.arange(81).reshape(27, 3) % 3 != 1
    results = []
    for tokens in (ROWS, np.where(known, ROWS, 2 - ROWS)):
        b = batch_of(tokens, present=known)
        drawn = m.draw(rng.stream(0, rng.TRAIN), b, jnp.int32(0), {}, {})[0]
        assert not np.any(drawn["hidden"] & ~known)
        scores = m.bound(2).fn({}, b, rng.stream(0, rng.EVAL), {})
        results.append((float(m.loss_fn({}, drawn).loss.total), np.asarray(scores.nll)))
    assert results[0][0] == results[1][0] and np.array_equal(results[0][1], results[1][1])


def test_padding_is_invisible():
    """mdm.md 13.4, 13.5: neither its ids nor its amount matter."""
    length = np.array([5, 3])
    rows = np.random.default_rng(0).integers(0, 5, (2, 12))
    hidden = (np.arange(12) % 2 == 0) & (np.arange(12) < length[:, None])
    found = []
    for n, filler in ((5, 0), (12, 1), (12, 2)):
        m, params = tiny(n)
        tokens = np.where(np.arange(n) < length[:, None], rows[:, :n], filler)
        batch = batch_of(tokens, length=length)
        batch |= {"hidden": jnp.asarray(hidden[:, :n]), "weight": jnp.array([[1.0], [2.0]])}
        found.append(float(jax.jit(m.loss_fn)(params, batch).loss.total))
    np.testing.assert_allclose(found, found[0], rtol=1e-5)
    assert found[0] > 1


def test_padding_and_prompts_are_never_scored():
    m, params = tiny()
    rows = np.random.default_rng(0).integers(0, 5, (6, 12))
    fields = dict(length=np.array([12, 5, 3, 8, 9, 2]), prompt_len=np.array([4, 0, 3, 1, 2, 1]))
    batch, other = batch_of(rows, **fields), batch_of(rows, **fields)
    padding = ~(batch["loss_mask"] | batch["given"])
    other["tokens"] = jnp.where(padding, 4 - rows, rows)
    drawn, _ = m.draw(rng.stream(0, rng.TRAIN), batch, jnp.int32(0), params, {})
    assert not np.any(drawn["hidden"] & ~batch["loss_mask"])
    assert [bool(h) for h in drawn["hidden"].any(1)] == [True, True, False, True, True, True]
    for evaluation in (m.bound(2), m.in_order("uniform", 1)):
        scores = jax.jit(evaluation.fn)
        a, b = (scores(params, x, rng.stream(0, rng.EVAL), {}) for x in (batch, other))
        np.testing.assert_array_equal(a.nll, b.nll)
        np.testing.assert_array_equal(a.count, [8, 5, 0, 7, 7, 1])
        assert a.nll[2] == 0 and np.all(a.nll[np.array([0, 1, 3, 4, 5])] > 0)


def test_some_rows_are_trained_cut_short():
    m, params = tiny(**{"method.canvas": (0.5, 4)})
    drawn, _ = m.draw(rng.stream(0, rng.TRAIN), batch_of(np.zeros((36, 12))), 0, {}, {})
    length = np.asarray(drawn["length"])
    np.testing.assert_array_equal(np.bincount(length), [0] * 4 + [2] * 8 + [20])
    live = np.arange(12) < length[:, None]
    np.testing.assert_array_equal(drawn["loss_mask"], live)
    assert not np.any(drawn["hidden"] & ~live)


def test_noise_and_loss_are_those_of_the_global_batch_on_every_mesh():
    """mdm.md 13.9 and 13.17."""
    m, params = tiny(**{"model.num_heads": 4})
    batch = batch_of(np.random.default_rng(0).integers(0, 5, (16, 12)))

    def step(params, batch):
        drawn, timed = (
            dataclasses.replace(m, noise=n).draw(rng.stream(0, rng.TRAIN), batch, 0, params, {})[0]
            for n in ("count", "time")
        )
        return (drawn, timed), m.loss_fn(params, drawn).loss.total

    noise, total = jax.jit(step)(params, batch)
    counts = np.sort(noise[0]["hidden"].sum(1))  # of twelve, in sixteen strata
    assert np.all(np.abs(counts - 0.75 * np.arange(16) - 0.875) < 1)
    times = np.sort(1 / noise[1]["weight"][:, 0])
    assert np.all(np.diff(np.ceil(16 * (times - 1e-3) / (1 - 1e-3) - 1e-3)) == 1)
    boxed = jax.eval_shape(m.init, jax.random.key(0))
    for model in (1, 2, 4):
        mesh = partitioning.make_mesh(1, -1, model, devices=jax.devices())
        with jax.set_mesh(mesh):
            placed = jax.device_put(params, partitioning.param_shardings(boxed, mesh))
            rows = jax.device_put(batch, partitioning.batch_sharding(mesh))
            found = jax.jit(step)(placed, rows)
        jax.tree.map(np.testing.assert_array_equal, found[0], noise)
        np.testing.assert_allclose(found[1], total, rtol=1e-5)


def test_board_groups_follow_the_hidden_permutation():
    info = DataInfo("board", 16, 4, "cell", grid=(4, 4))
    rows, columns, boxes = board_groups(info)
    assert rows[:5] == (0, 0, 0, 0, 1) and columns[:5] == (0, 1, 2, 3, 0)
    assert boxes == (0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3, 2, 2, 3, 3)
    hidden = DataInfo("board", 16, 4, "cell", grid=(4, 4), permutation=tuple(range(15, -1, -1)))
    assert board_groups(hidden)[0] == rows[::-1]
    with pytest.raises(ConfigError, match="grid"):
        board_groups(DataInfo("text", 16, 4, "byte"))


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("method.noise", "gauss", "count, time"),
        ("method.schedule", "quadratic", "linear, cosine"),
        ("method.weight", "cosine", "bound, context, one"),
        ("method.times", -1, "continuous"),
        ("method.min_time", 0.0, "min_time"),
        ("method.canvas", (0.5, 9), "shortest length"),
        ("sample.block", 3, "divisor"),
        ("sample.steps", 99, "multiple"),
        ("sample.schedule", "fast", "threshold"),
        ("model.position", "sine", "rope"),
        ("eval.orders", ("sideways",), "sideways"),
    ],
)
def test_bad_values_are_one_sentence(key, value, words):
    config = base("mdm")
    config.data.seq_len = 8
    config.update_from_flattened_dict({key: value})
    with pytest.raises(ConfigError, match=words):
        build(config, DataInfo("text", 8, 5, "byte"))

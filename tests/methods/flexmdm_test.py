import dataclasses
import functools
import itertools
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
from tests.toy_insertion import (
    CODE,
    ENTROPY,
    LAW,
    LOSS,
    MASK,
    SPLIT,
    STATES,
    A,
    B,
    ToyInsertion,
    mistakes,
    posterior,
    rows_of_states,
)

STRINGS, SHARES = list(LAW), np.array(list(LAW.values()))
ABSENT, MASKED, CLEAN = range(3)


def method(pair=("linear", "linear"), wrong=(0.0, 0.0), **changes):
    rises = map(make_rise, pair)
    return FlexMDMMethod(ToyInsertion(wrong), 2, *rises, **changes)


def batch_of(strings, **fields):
    rows = np.array([list(s) + [0] * (2 - len(s)) for s in strings])
    fields |= {"tokens": rows, "length": np.array([len(s) for s in strings])}
    return jax.tree.map(jnp.asarray, as_batch(fields, np.arange(len(rows))))


def mask_share(pair, t):
    """P(mask) in closed form (flexmdm.md 2.2), float64."""
    a, ab = (1.0 if s == "linear" else float(s[6:-1]) for s in pair)
    if a == ab:
        return -a * (1 - t) ** a * np.log(1 - t)
    return ((1 - t) ** a - (1 - t) ** ab) / (ab / a - 1)


@functools.cache
def quadrature(pair):
    """Everything that may have happened by some times: a batch, the hazards (R, 2), the weight of
    each row, and the string it is of."""
    node, weight = np.polynomial.legendre.leggauss(40)
    s = (node + 1) / 2
    times, weight = np.float32(1 - (1 - s) ** 2).astype(float), weight * (1 - s)
    rows, events, chances, where, when = [], [], [], [], []
    left = {"linear": lambda t: 1 - t}.get(pair[0], lambda t: (1 - t) ** float(pair[0][6:-1]))
    for (k, string), (t, w) in itertools.product(
        enumerate(STRINGS), zip(times, weight, strict=True)
    ):
        shares = left(t), mask_share(pair, t), 1 - left(t) - mask_share(pair, t)
        for happened in itertools.product((ABSENT, MASKED, CLEAN), repeat=len(string)):
            rows.append(string)
            padded = [*happened, ABSENT, ABSENT][:2]
            events.append(
                [[2.0 * (h == ABSENT) for h in padded], [2.0 * (h != CLEAN) for h in padded]]
            )
            chances.append(w * np.prod([shares[h] for h in happened]))
            where.append(k)
            when.append(t)
    events, time = np.array(events, np.float32), jnp.array(when, jnp.float32)
    batch = batch_of(rows) | {"time": time, "come": events[:, 0], "revealed": events[:, 1]}
    hazards = [np.asarray(make_rise(spec).hazard(time), np.float64) for spec in reversed(pair)]
    return batch, np.stack(hazards, axis=1), np.array(chances), np.array(where)


@functools.cache
def exact_terms(pair, wrong=(0.0, 0.0), seed=None):
    """Expected unmasking and insertion nats by string, (6, 2): a quadrature over times of a sum
    over everything that may have happened by then; of a model with `mistakes`, if there is a seed.
    """
    batch, hazards, chances, where = quadrature(pair)
    terms = jax.jit(functools.partial(method(pair, wrong).terms, train=False))
    found = terms({} if seed is None else mistakes(seed), batch)
    nats = np.stack([found.unmasking, found.insertion], axis=1).astype(np.float64)
    total = np.zeros((6, 2))
    np.add.at(total, where, chances[:, None] * hazards * nats)
    return total


LENGTHS = np.array([len(s) for s in STRINGS])
EXTRA = np.array([insertion.path_constant(n) for n in LENGTHS])


@pytest.mark.parametrize("pair", SPLIT)
def test_the_bound_is_the_likelihood_where_the_model_is_right(pair):
    """Of every string, for any schedules: flexmdm.md 3.6 and 15.8."""
    nats = exact_terms(pair).sum(1) - LENGTHS
    np.testing.assert_allclose(nats, -np.log(SHARES), atol=3e-5)
    assert abs(SHARES @ nats - ENTROPY) < 1e-5


@pytest.mark.parametrize("pair", SPLIT)
def test_the_loss_of_the_paper_has_its_optimum_and_its_split(pair):
    """It is the bound and a constant of each string; g log g - g is what the rate loss leaves."""
    unmasking, inserting = SHARES @ exact_terms(pair)
    # E of the sum of log g at the times of insertion is c(N); the mean number of these is N.
    divergence = inserting - SHARES @ LENGTHS + SHARES @ EXTRA
    np.testing.assert_allclose([unmasking, divergence], SPLIT[pair], atol=2e-5)
    assert abs(unmasking + divergence - LOSS) < 2e-5


def test_any_wrong_answer_raises_the_bound():
    """Of one state alone, wherever there is something to tell: flexmdm.md 15.9."""
    pair = ("power(1.7)", "power(2.89)")
    batch, hazards, chances, where = quadrature(pair)
    weight = jnp.asarray((SHARES[where] * chances)[:, None] * hazards, jnp.float32)

    @jax.jit
    def bound(offsets):
        terms = method(pair).terms(offsets, batch, train=False)
        return jnp.sum(weight * jnp.stack([terms.unmasking, terms.insertion], axis=1))

    right = {"letters": jnp.zeros((13, 2, 2)), "gaps": jnp.zeros((13, 3))}
    best, slope = jax.value_and_grad(bound)(right)
    assert all(np.abs(x).max() < 2e-5 for x in jax.tree.leaves(slope))
    f, gaps = (np.asarray(x) for x in posterior(make_rise(pair[0]).value(0.5)))
    for state, code in CODE.items():
        if state == (B, B):  # never was
            continue
        for i, s in enumerate(state):
            off = right | {"letters": right["letters"].at[code, i, 0].set(0.5)}
            assert (bound(off) > best + 2e-5) == (s == MASK and 0 < f[code, i, 0] < 1)
        for i in range(len(state) + 1):
            off = right | {"gaps": right["gaps"].at[code, i].set(-0.5)}
            assert (bound(off) > best + 2e-5) == (gaps[code, i] > 0)


def test_the_posterior_of_the_toy():
    """flexmdm.md 15.7: insertion power 1.7, time 0.4."""
    f, gap = posterior(make_rise("power(1.7)").value(0.4))
    np.testing.assert_allclose(f[CODE[(MASK,)], 0], (0.588335, 0.411665), atol=2e-6)
    np.testing.assert_allclose(gap[CODE[(MASK,)], :2], (0.313327, 0.313327), atol=2e-6)
    np.testing.assert_allclose(gap[CODE[(A,)], :2], (0.221903, 0.355044), atol=2e-6)
    np.testing.assert_allclose(f[CODE[(MASK, B)], 0], (1, 0), atol=2e-6)


def test_drawn_losses_and_the_evaluated_bound_have_the_exact_mean():
    pair, number = ("power(1.7)", "power(2.89)"), (20_000 * SHARES).round().astype(int)
    m = method(pair, (0.3, 0.2), last_time=1 - 1e-5, floor=0.0)
    exact = exact_terms(pair, (0.3, 0.2)).sum(1) - LENGTHS
    which = np.repeat(np.arange(6), number)
    batch = batch_of([STRINGS[k] for k in which])
    draw = lambda key: m.loss_fn({}, m.draw(key, batch, 0, {}, {})[0]).metrics["bound"].total
    bounds = np.asarray(jax.jit(jax.vmap(draw))(jax.random.split(rng.stream(0, 2), 30))) / 20_000
    assert abs(bounds.mean() - SHARES @ exact) < 4 * bounds.std() / 30**0.5 + 5e-4
    scores = jax.jit(m.bound(4).fn)({}, batch, rng.stream(0, rng.EVAL), {})
    for k, nll in enumerate(np.split(np.asarray(scores.nll), np.cumsum(number)[:-1])):
        assert abs(nll.mean() - exact[k]) < 4 * nll.std() / len(nll) ** 0.5 + 5e-4
    np.testing.assert_array_equal(scores.count, LENGTHS[which])
    curve = scores.curves["gap_calibration"]
    np.testing.assert_allclose(curve.total[:7] / curve.count[:7], np.exp(0.2), rtol=0.06)


def test_with_nothing_to_insert_it_is_masked_diffusion():
    """Tokens that have all come leave the loss of masked diffusion, with its weight."""
    m = method(("power(1000)", "power(2)"))
    batch = batch_of([(A, B)] * 400)
    drawn, _ = m.draw(rng.stream(0, rng.TRAIN), batch, 0, {}, {})
    drawn |= {"come": jnp.zeros((400, 2)), "time": jnp.full(400, 0.5)}
    masked = drawn["time"][:, None] < drawn["revealed"]
    out = m.loss_fn({}, drawn)
    terms = m.terms({}, drawn)
    assert np.all(terms.count == 0) and np.all(terms.mean_count < 1e-6)
    both = 0.6  # strings of two letters; aa 0.05, ab 0.35, ba 0.2
    expected = {
        (True, True): -np.log(0.4 / both) - np.log(0.35 / both),
        (True, False): 0.0,
        (False, True): -np.log(0.35 / 0.4),
        (False, False): 0.0,
    }
    by_hand = [expected[tuple(row)] for row in np.asarray(masked).tolist()]
    np.testing.assert_allclose(terms.unmasking, by_hand, atol=1e-4)
    weight = 2 * 0.5 / (0.5**2 + 1e-3)  # at time 0.5, with the floor of training
    np.testing.assert_allclose(out.loss.total, weight * np.sum(by_hand), rtol=1e-4)


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


def test_noise_loss_and_slopes_are_those_of_the_global_batch_on_every_mesh():
    m, params = tiny()
    batch = rows_of_text()

    def step(params, batch):
        drawn, _ = m.draw(rng.stream(0, rng.TRAIN), batch, 0, params, {})
        loss = lambda params: m.loss_fn(params, drawn).loss.value()
        return drawn, *jax.value_and_grad(loss)(params)

    noise, total, slope = jax.jit(step)(params, batch)
    assert np.all(np.diff(np.sort(np.floor(np.asarray(noise["time"]) / 0.999 * 16))) == 1)
    boxed = jax.eval_shape(m.init, jax.random.key(0))
    for model in (1, 4):
        mesh = partitioning.make_mesh(1, -1, model, devices=jax.devices())
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

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from aodiff import optim, partitioning, rng, state, steps
from aodiff.config import ConfigError, base, flatten
from aodiff.core.schedules import make_schedule
from aodiff.data import DataInfo
from aodiff.data.pipeline import as_batch
from aodiff.methods import build
from aodiff.methods.guided import Guided
from aodiff.methods.mdm import MDMMethod
from aodiff.methods.sas import SASMethod
from aodiff.methods.sas_denoiser import SASDenoiserMethod
from aodiff.nn.reveal_policy import log_policy
from tests.toy_denoiser import BOUND, ROWS, N, ToyDenoiser, joint
from tests.toy_policy import GOLDEN, STATES, Tabular, l_sas

BOARD = DataInfo("sudoku4", 16, 4, "cell", grid=(4, 4))
TINY = {
    "data.name": "sudoku4",
    "data.seq_len": 16,
    "data.clues": (10, 12),
    "model.num_layers": 1,
    "model.width": 16,
    "model.num_heads": 2,
    "model.position": "grid",
    "method.policy_width": 8,
    "method.group": 4,
    "method.inner_epochs": 2,
    "train.global_batch": 8,
    "optim.ema_decay": 0.0,
    "eval.params": "raw",
    "sample.params": "raw",
    "eval.orders": ("own", "greedy", "any", "confidence", "random", "l2r"),
}


def a_config(name="sas", **changes):
    """Keys of "method" that another method lacks are left out."""
    config = base(name)
    fits = {k: v for k, v in TINY.items() if k in flatten(config)}
    config.update_from_flattened_dict(fits | changes)
    return config


def toy(strength=1.0, **changes):
    parts = (ToyDenoiser(strength), "count", make_schedule("linear"), 1e-3, tuple(range(N)))
    guided = Guided(MDMMethod(*parts), Tabular(strength), N)
    fixed = dict(rows=32, group=16, inner_epochs=4, clip=0.2, advantage="batch_rms", kl=0.0)
    return SASMethod(guided=guided, **fixed | changes)


def batch_of(rows, given=None):
    fields = {"tokens": np.asarray(rows)} | ({} if given is None else {"given": given})
    return jax.tree.map(jnp.asarray, as_batch(fields, np.arange(len(rows))))


def boards(number=8):
    draws = np.random.default_rng(0)
    tokens = draws.integers(0, 4, (number, 16))
    given = draws.random((number, 16)).argsort(1) < draws.integers(10, 13, (number, 1))
    return batch_of(tokens, given)


@functools.cache
def a_method(name="sas", **changes):
    """A method on boards with parameters of some size, and its extra state."""
    m = build(a_config(name, **changes), BOARD)
    made = lambda key: partitioning.unbox((m.init(key), m.init_extra()))
    params, extra = jax.jit(made)(jax.random.key(0))
    keys = iter(jax.random.split(jax.random.key(1), 99))
    noise = lambda x: x + 0.3 * jax.random.normal(next(keys), x.shape, x.dtype)
    grow = lambda tree: jax.tree.map(noise, tree)
    extra = extra | {k: grow(extra[k]) for k in ("denoiser", "policy") if k in extra}
    return m, grow(params), extra


def random_table(seed=0):
    return {"table": jnp.asarray(np.random.default_rng(seed).normal(size=(len(STATES), N)))}


# ---- the toy: exact numbers ---------------------------------------------------------------------


def test_a_tabular_policy_reaches_the_optimum():
    """decoding.md 17.4.5: within .02 nat of dynamic programming in 100 iterations of 4 epochs."""
    m, tx = toy(), optax.adam(0.05)
    law = jnp.log(jnp.asarray(joint()))

    @jax.jit
    def iteration(carry, key):
        params, opt = carry
        at = jax.random.categorical(jax.random.fold_in(key, 0), law, shape=(32,))
        batch = batch_of(ROWS[:1]) | {
            "tokens": jnp.asarray(ROWS, jnp.int32)[at],
            "loss_mask": jnp.ones((32, N), bool),
            "given": jnp.zeros((32, N), bool),
            "length": jnp.full(32, N),
        }
        stored = m.roll_out(jax.random.fold_in(key, 1), batch, params, {})

        def epoch(carry, _):
            params, opt = carry

            def loss(params):
                out = m.loss_fn(params, stored).loss
                return out.total / out.count

            updates, opt = tx.update(jax.grad(loss)(params), opt)
            return (optax.apply_updates(params, updates), opt), None

        return jax.lax.scan(epoch, (params, opt), None, m.inner_epochs)[0], None

    params = m.guided.policy.init(jax.random.key(0), N)
    keys = jax.random.split(jax.random.key(2), 100)
    (params, _), _ = jax.jit(lambda c, k: jax.lax.scan(iteration, c, k))(
        (params, tx.init(params)), keys
    )
    found = l_sas(m.guided.policy.read(params), 1.0)
    assert GOLDEN["optimal"][1] - 1e-6 < found < GOLDEN["optimal"][1] + 0.02


@pytest.mark.parametrize("name, loss", [("own", None), ("any", BOUND[1.0]), ("random", BOUND[1.0])])
def test_evaluations_are_the_bounds_of_their_orders(name, loss):
    m, params = toy(), random_table()
    loss = l_sas(m.guided.policy.read(params), 1.0) if loss is None else loss
    config = a_config(**{"eval.orders": (name,), "eval.num_orders": 3})
    batch = batch_of(np.repeat(ROWS, 300, axis=0))
    fn = jax.jit(m.evaluations(config)[name].fn)
    scores = fn(params, batch, rng.stream(0, rng.EVAL), {"denoiser": {}})
    nll = np.asarray(scores.nll).reshape(27, 300)
    error = np.sqrt(joint() ** 2 @ nll.var(1) / 300)
    assert abs(joint() @ nll.mean(1) - loss) < 4 * error
    assert np.all(scores.count == N)
    if name != "any":  # counts the draws
        curve = scores.curves["by_step"]
        assert curve.count.tolist() == [3 * len(batch["tokens"])] * N
        assert abs(float(curve.total.sum() / curve.count[0]) - nll.mean()) < 1e-3


@pytest.mark.parametrize("name", ["l2r", "confidence", "margin", "entropy"])
def test_adaptive_orders_have_their_exact_likelihood(name):
    config = a_config(**{"eval.orders": (name,)})
    found = toy().evaluations(config)[name]
    scores = found.fn({}, batch_of(ROWS), rng.stream(0, rng.EVAL), {"denoiser": {}})
    known = GOLDEN["l2r" if name == "l2r" else "confidence"][1]
    assert abs(joint() @ np.asarray(scores.nll) - known) < 1e-5
    assert found.estimator.startswith("exact")


def test_the_second_stage_loss_is_the_bound_of_the_policy():
    """decoding.md 17.4.10: its mean over trajectories and steps, for any policy."""
    params = random_table(1)
    m = SASDenoiserMethod(guided=toy().guided, random=0.0, scope="all")
    batch = batch_of(np.repeat(ROWS, 200, axis=0))

    @jax.jit
    def losses(key):
        drawn, _ = m.draw(key, batch, jnp.int32(0), {}, {"policy": params})
        one = lambda b: m.loss_fn({}, jax.tree.map(lambda x: x[None], b)).loss.total
        return jax.vmap(one)(drawn)  # of each row

    loss = np.asarray(losses(rng.stream(0, rng.TRAIN))).reshape(27, 200)
    error = np.sqrt(joint() ** 2 @ loss.var(1) / 200)
    assert abs(joint() @ loss.mean(1) - l_sas(m.guided.policy.read(params), 1.0)) < 4 * error


def test_an_exact_denoiser_leaves_the_policy_alone():
    m, params = toy(0.0), random_table()
    roll = jax.jit(lambda batch: m.roll_out(rng.stream(0, rng.TRAIN), batch, params, {}))
    stored = roll(batch_of(ROWS))
    assert not np.any(stored["advantage"])
    assert np.ptp(np.asarray(stored["total"]), axis=1).max() < 1e-5
    grads = jax.jit(jax.grad(lambda p: m.loss_fn(p, stored).loss.total))(params)
    assert not np.any(grads["table"])


# ---- boards -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rolled():
    m, params, extra = a_method()
    roll = jax.jit(lambda key, b: m.roll_out(key, b, params, extra["denoiser"]))
    return m, params, roll, roll(rng.stream(0, rng.TRAIN), boards())


def test_trajectories_reveal_what_is_hidden_and_nothing_else(rolled):
    m, _, _, stored = rolled
    hidden, batch = np.asarray(stored["hidden"]), boards()
    scored = np.asarray(batch["loss_mask"])
    assert m.guided.steps == 6 and scored.sum(1).min() < 6
    assert np.array_equal(hidden[:, :, 0], np.repeat(scored[:, None], 4, axis=1))
    left = np.maximum(scored.sum(1)[:, None, None] - np.arange(6)[None, None], 0)
    assert np.array_equal(hidden.sum(3), np.broadcast_to(left, hidden.shape[:3]))
    taken = np.take_along_axis(hidden, np.asarray(stored["action"])[..., None], axis=3)[..., 0]
    assert np.array_equal(taken, hidden.any(3))
    assert len({x.tobytes() for x in np.asarray(stored["action"])[0]}) > 1  # copies differ


def test_the_policy_never_sees_a_token_before_it_is_revealed(rolled):
    """Other tokens in a cell change features only after the step that reveals it."""
    m, params, roll, stored = rolled
    batch = boards()
    last = np.asarray(stored["action"])[:, 0, :]
    number = np.asarray(batch["loss_mask"]).sum(1)
    for b in range(3):
        cell = last[b, number[b] - 1]  # the last that the first copy reveals
        other = np.asarray(batch["tokens"]).copy()
        other[b, cell] = (other[b, cell] + 1) % 4
        again = roll(rng.stream(0, rng.TRAIN), batch | {"tokens": jnp.asarray(other)})
        for name in ("features", "action", "logv"):
            steps = slice(0, number[b])
            same = np.asarray(again[name])[b, 0, steps] == np.asarray(stored[name])[b, 0, steps]
            assert same.all(), name
        assert again["total"][b, 0] != stored["total"][b, 0]


def test_replay_with_unchanged_parameters_has_ratio_one(rolled):
    """decoding.md 17.4.9; loss and clip of stored arrays, by numpy."""
    m, params, _, stored = rolled
    out = jax.jit(m.loss_fn)(params, stored)
    active = np.asarray(stored["hidden"]).any(3)
    assert float(out.loss.count) == active.sum()
    expected = -np.asarray(stored["advantage"])[active].sum()
    assert abs(float(out.loss.total) - expected) < 1e-4 and float(out.metrics["clipped"].total) == 0
    assert 0 < float(out.metrics["spread"].value()) and float(out.metrics["spread"].count) == 8
    away = dataclasses.replace(m, kl=0.5).loss_fn(params, stored)
    chances = np.asarray(stored["hidden"]).sum(3)[active]
    entropy = float(out.metrics["policy_entropy"].total)
    drift = 0.5 * (np.log(chances).sum() - entropy)  # the start is uniform
    assert 0 < drift and abs(float(away.loss.total) - expected - drift) < 1e-3
    scores = m.guided.policy.scores(params, stored["features"])
    logv = log_policy(scores, stored["hidden"])
    taken = jnp.take_along_axis(logv, stored["action"][..., None], axis=3)[..., 0]
    ratio = np.exp(np.asarray(taken - stored["logv"]))[active]
    assert np.all(ratio == 1.0)


def test_trajectories_are_kept_for_the_inner_epochs():
    m, params, extra = a_method()
    draw = jax.jit(m.draw)
    first, kept = draw(rng.stream(0, rng.TRAIN, 0), boards(), 0, params, extra)
    other = boards() | {"tokens": 3 - boards()["tokens"]}
    second, same = draw(rng.stream(0, rng.TRAIN, 1), other, 1, params, kept)
    third, _ = draw(rng.stream(0, rng.TRAIN, 2), other, 2, params, same)
    equal = lambda a, b: all(map(np.array_equal, jax.tree.leaves(a), jax.tree.leaves(b)))
    assert equal(first, second) and equal(kept, same) and not equal(first, third)
    assert np.any(np.asarray(first["advantage"]))


def test_microbatches_and_meshes_change_nothing():
    """One step from the same state: whole on one device, and in parts on 2 x 2 x 2."""
    config = a_config()
    m, params, extra = a_method()
    batch, found = boards(), []
    mask = optim.decay_mask(state.abstract_params(m))
    tx = optim.make_optimizer(config.optim, 10, mask)
    for sizes, microbatches in (((1, 1, 1), 1), ((2, 2, 2), 2)):
        devices = jax.devices()[: np.prod(sizes)]
        mesh = partitioning.make_mesh(*sizes, devices=devices)
        abstract = state.abstract_state(m, tx, False, mesh)
        start = state.TrainState(jnp.int32(0), params, None, jax.jit(tx.init)(params), extra)
        place = lambda x, like: jax.device_put(np.asarray(x), like.sharding)
        start = jax.tree.map(place, start, abstract)
        step = steps.compile_train_step(
            steps.make_train_step(m, tx, microbatches, 0.0), abstract, m.batch_spec(8), mesh
        )
        rows = jax.device_put(batch, partitioning.batch_sharding(mesh))
        seed = jax.device_put(np.uint32(0), jax.NamedSharding(mesh, jax.P()))
        after, metrics = step(start, rows, seed)
        found.append(jax.device_get((after.params, {k: v.value() for k, v in metrics.items()})))
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def test_decoding_follows_the_policy():
    """Greedy: each step fills the cell of the highest score; blocks restrict it."""
    m, params, extra = a_method()
    batch = boards()
    keys = rng.example_keys(rng.stream(0, rng.SAMPLE), jnp.arange(8))
    found = {}
    for name, block in (("own", 0), ("sampled", 0), ("own", 4)):
        how = {"sample.order": name, "sample.block": block, "sample.temperature": 0.0}
        config = a_config(**how)
        fn = jax.jit(m.sampler(config, 12))
        found[name, block] = fn(params, extra, keys, batch["tokens"], batch["given"])
    own = found["own", 0]
    step = np.asarray(own.step)
    given = np.asarray(batch["given"])
    assert np.array_equal(own.calls, 16 - given.sum(1))

    @jax.jit
    def best(masked):
        shown = jnp.where(masked, m.guided.denoiser.model.cfg.mask, own.tokens)
        logits = m.guided.denoiser.denoise(extra["denoiser"], shown, batch["length"])
        features = m.guided.policy.features(logits, masked, batch["given"], masked | True)
        scores = m.guided.policy.scores(params, features)
        return jnp.argmax(jnp.where(masked, scores, -jnp.inf), axis=1)

    for t in range(step.max() + 1):
        rows = (step == t).any(1)
        assert np.array_equal(best(step >= t)[rows], (step == t).argmax(1)[rows])
    assert not np.array_equal(found["sampled", 0].step, step)
    blocks = np.asarray(found["own", 4].step)
    for row, known in zip(blocks, given, strict=True):
        order = np.argsort(np.where(known, 99, row))[: (~known).sum()]
        first = np.flatnonzero(~known)[0]
        assert np.all(np.diff((order - first) // 4) >= 0)


def test_misleading_touches_its_cells_early_and_no_other():
    m = build(a_config(**{"method.mislead": (2, 9)}), BOARD).guided.denoiser
    plain = MDMMethod(m.model, "count", m.schedule, 1e-3, m.native)
    params = partitioning.unbox(jax.jit(m.init)(jax.random.key(0)))
    tokens = jnp.zeros((2, 16), jnp.int32).at[0, :5].set(4).at[1, :4].set(4)  # 31 %, 25 % masked
    wrong, right = jax.jit(lambda p: [x.denoise(p, tokens, jnp.full(2, 16)) for x in (m, plain)])(
        params
    )
    changed = np.any(np.asarray(wrong != right), axis=2)
    assert np.flatnonzero(changed[0]).tolist() == [2, 9] and not changed[1].any()
    np.testing.assert_allclose(wrong[0, 2, :4], 3 * np.roll(right[0, 2, :4], 1), rtol=1e-6)
    assert np.all(wrong[..., 4:] < -1e8)
    at, length = jnp.array([[1, 2, 3], [8, 9, 10]]), jnp.full(2, 16)
    fill, look = m.cached(params)
    for some in (
        m.denoise_at(params, tokens, length, at),
        look(tokens, length, at, fill(tokens, length))[0],
    ):
        picked = np.take_along_axis(np.asarray(wrong), np.asarray(at)[..., None], axis=1)
        np.testing.assert_allclose(some, picked, atol=1e-4)


# ---- the second stage ---------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["head", "last_block"])
def test_a_scope_learns_and_nothing_else(scope):
    m, params, extra = a_method("sas_denoiser", **{"model.num_layers": 2})
    m = dataclasses.replace(m, scope=scope)
    drawn, _ = m.draw(rng.stream(0, rng.TRAIN), boards(), jnp.int32(0), params, extra)
    grads = jax.jit(jax.grad(lambda p: m.loss_fn(p, drawn).loss.total))(params)["params"]
    moved = {k for k, g in grads.items() if any(np.any(x) for x in jax.tree.leaves(g))}
    assert moved == {"head_kernel", "norm"} | ({"blocks"} if scope == "last_block" else set())
    if scope == "last_block":
        assert all(not np.any(g[0]) and np.any(g[1]) for g in jax.tree.leaves(grads["blocks"]))


def test_the_control_is_ordinary_masked_training():
    m, params, extra = a_method("sas_denoiser")
    control = dataclasses.replace(m, random=1.0)
    batch, key = boards(), lambda: rng.stream(0, rng.TRAIN)
    drawn, _ = control.draw(key(), batch, jnp.int32(0), params, extra)
    plain, _ = m.guided.denoiser.draw(key(), batch, jnp.int32(0), params, {})
    a, b = control.loss_fn(params, drawn).loss, m.guided.denoiser.loss_fn(params, plain).loss
    assert np.array_equal(drawn["hidden"], plain["hidden"])
    np.testing.assert_allclose([a.total, a.count], [b.total, b.count], rtol=1e-6)
    mixed = dataclasses.replace(m, random=0.5).draw(key(), batch, jnp.int32(0), params, extra)[0]
    ours = m.draw(key(), batch, jnp.int32(0), params, extra)[0]  # random 0.1
    assert not np.array_equal(ours["hidden"], drawn["hidden"])
    either = [(mixed["hidden"][i] == x["hidden"][i]).all() for i in range(8) for x in (drawn, ours)]
    assert np.reshape(either, (8, 2)).any(1).all()


@pytest.mark.parametrize(
    "name, key, value, words",
    [
        ("sas", "method.advantage", "gae", "batch_rms, group_std"),
        ("sas", "method.group", 1, "2 trajectories"),
        ("sas", "method.policy", "tree", "mlp, transformer"),
        ("sas", "method.mislead", (16,), "0 .. 15"),
        ("sas", "eval.orders", ("sideways",), "sideways"),
        ("sas", "sample.block", 3, "divisor"),
        ("sas_denoiser", "method.scope", "tail", "last_block"),
        ("sas_denoiser", "method.scope", "head", "weight_decay=0"),
    ],
)
def test_bad_values_are_one_sentence(name, key, value, words):
    with pytest.raises(ConfigError, match=words):
        build(a_config(name, **{key: value}), BOARD)

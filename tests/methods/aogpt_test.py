"""The AO-GPT method: where orders come from, what its evaluations report, what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aodiff import config as config_lib
from aodiff import data, methods, partitioning, rng
from aodiff.config import ConfigError
from aodiff.core import likelihood

N, ROWS = 6, 4


def tiny(order="mix(0.1)", **changes):
    c = config_lib.base("aogpt")
    c.data.name, c.data.seq_len, c.data.vocab = "markov", N, 4
    c.model.num_layers, c.model.width, c.model.num_heads, c.model.cond_dim = 1, 8, 2, 4
    c.method.order = order
    c.eval.orders = ("l2r", "any", "own")
    c.eval.ensemble, c.eval.ensemble_steps, c.eval.marginal = 1, N, 2
    c.update_from_flattened_dict(changes)
    return c


def build(config):
    return methods.build(config, data.describe(config.data))


@pytest.fixture(scope="module")
def trained():
    """A method, parameters with a working context (not the near-zero initial gates), a batch."""
    config = tiny()
    method = build(config)
    params = partitioning.unbox(jax.jit(lambda: method.init(rng.stream(0, rng.INIT)))())
    leaves, tree = jax.tree.flatten(params)
    host = np.random.default_rng(1)
    noisy = [np.asarray(x) + 0.3 * host.normal(size=x.shape) for x in leaves]
    params = jax.tree.unflatten(tree, [jnp.asarray(x, jnp.float32) for x in noisy])
    source = data.open_splits(config.data)["train"]
    tokens = jnp.asarray(source.read(np.arange(ROWS))["tokens"], jnp.int32)
    mask = jnp.ones(tokens.shape, bool).at[-1].set(False)  # the last row is padding
    batch = {"tokens": tokens, "loss_mask": mask, "example_id": jnp.array([7, 8, 9, -1])}
    return config, method, params, batch


def test_orders_from_files_share_one_program(tmp_path):
    """Runs that differ in the file alone compile once: the order is an argument, in `extra`."""
    programs = set()
    for order in ([5, 4, 3, 2, 1, 0], [0, 2, 4, 1, 3, 5]):
        path = tmp_path / f"{order[0]}.json"
        path.write_text(str(order))
        method = build(tiny(f"file({path})"))
        extra, batch = method.init_extra(), {"tokens": jnp.zeros((3, N), jnp.int32)}
        args = rng.stream(0, rng.TRAIN, 1), batch, jnp.int32(1), {}, extra
        programs.add(jax.jit(method.draw).lower(*args).as_text())
        assert np.asarray(method.draw(*args)[0]["order"]).tolist() == [order] * 3
    assert len(programs) == 1
    assert build(tiny("fixed(1)")).init_extra() == {}


def test_orders_depend_on_seed_step_and_row_only():
    method = build(tiny("uniform"))
    batch = {"tokens": jnp.zeros((16, N), jnp.int32)}

    def draw(step, rows):
        key, part = rng.stream(0, rng.TRAIN, step), jax.tree.map(lambda x: x[:rows], batch)
        return np.asarray(method.draw(key, part, step, {}, {})[0]["order"])

    np.testing.assert_array_equal(draw(3, 16)[:8], draw(3, 8))
    assert (draw(3, 16) != draw(4, 16)).any()
    assert len(np.unique(draw(3, 16), axis=0)) > 8


def test_loss_is_the_mean_nll_in_the_drawn_order_and_ignores_padding(trained):
    _, method, params, batch = trained
    order = jnp.stack([jnp.roll(jnp.arange(N), i) for i in range(ROWS)])
    out = jax.jit(method.loss_fn)(params, batch | {"order": order})
    logp = jax.nn.log_softmax(jax.jit(method.model.apply)(params, batch["tokens"], order))
    logp = np.asarray(logp)
    expected = 0.0
    for row in range(ROWS - 1):
        for slot in range(N):
            expected -= logp[row, slot, batch["tokens"][row, order[row, slot]]]
    np.testing.assert_allclose(out.loss.total, expected, rtol=1e-5)
    assert out.loss.count == (ROWS - 1) * N


def test_evaluations_agree_with_the_estimators_they_name(trained):
    config, method, params, batch = trained
    key = rng.stream(0, rng.EVAL)
    found = method.evaluations(config)
    assert set(found) == {"l2r", "any", "own", "ensemble_1", "marginal_2"}
    scores = {name: jax.jit(e.fn)(params, batch, key, {}) for name, e in found.items()}
    l2r = jnp.broadcast_to(jnp.arange(N)[None], (ROWS, N))
    nll = jax.jit(likelihood.sequence_nll, static_argnums=0)
    exact = nll(method.apply(params), batch["tokens"], l2r, batch["loss_mask"])
    np.testing.assert_allclose(scores["l2r"].nll, exact, rtol=1e-5)
    assert found["l2r"].estimator.startswith("exact")
    one = method.evaluation("any", 1)
    for e in (one, *(found[n] for n in ("any", "own", "ensemble_1", "marginal_2"))):
        assert e.estimator.startswith("upper bound"), e.estimator
    for name, score in scores.items():
        assert score.nll[-1] == 0 and score.count[-1] == 0, name  # padding
        assert (score.count[:-1] == N).all(), name
        for curve in score.curves.values():
            total = jnp.sum(curve.total) / jnp.sum(curve.count)
            np.testing.assert_allclose(total, jnp.sum(score.nll) / jnp.sum(score.count), rtol=1e-5)


def test_evaluation_noise_follows_the_example_not_its_place_in_the_batch(trained):
    config, method, params, batch = trained
    fn = jax.jit(method.evaluations(config)["any"].fn)
    there = fn(params, batch, rng.stream(0, rng.EVAL), {}).nll
    turned = jax.tree.map(lambda x: x[::-1], batch)
    back = fn(params, turned, rng.stream(0, rng.EVAL), {}).nll
    np.testing.assert_allclose(there, back[::-1], rtol=1e-6)


def test_native_order_undoes_the_hidden_permutation():
    config = tiny("native", **{"data.permute_seed": 3})
    method = build(config)
    batch = {"tokens": jnp.zeros((1, N), jnp.int32)}
    order = method.draw(jax.random.key(0), batch, 0, {}, {})[0]["order"]
    hidden = data.open_splits(config.data)["train"].read(np.arange(2))["tokens"]
    config.data.permute_seed = None
    natural = data.open_splits(config.data)["train"].read(np.arange(2))["tokens"]
    np.testing.assert_array_equal(hidden[:, np.asarray(order[0])], natural)


def test_distance_to_revealed_positions_is_natural(trained):
    """Left to right, every position but the first is next to the one before it."""
    _, _, params, batch = trained
    method = build(tiny("native", **{"data.permute_seed": 3}))
    found = jax.jit(method.evaluation("own", 1).fn)(params, batch, rng.stream(0, rng.EVAL), {})
    np.testing.assert_array_equal(found.curves["by_gap"].count, [0, 15, 0, 0, 0, 0, 3])


def test_sampler_keeps_what_is_given_and_follows_the_own_order(trained):
    _, _, params, _ = trained
    config = tiny("reverse", **{"sample.order": "own"})
    method = build(config)
    given = np.zeros((2, N), bool)
    given[:, 2] = True
    tokens = np.full((2, N), 3, np.int32)
    keys = jax.random.split(jax.random.key(0), 2)
    out = jax.jit(method.sampler(config, 1))(params, {}, keys, tokens, given)
    assert (out.tokens[:, 2] == 3).all() and (out.step[:, 2] == -1).all()
    np.testing.assert_array_equal(out.step[0], [4, 3, -1, 2, 1, 0])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method.order": "sideways"}, "sideways"),
        ({"model.width": 9}, "9"),
        ({"model.injection": "psychic"}, "psychic"),
        ({"model.remat": "some"}, "some"),
        ({"model.attention": "warp"}, "warp"),
        ({"method.name": "wavegpt"}, "wavegpt"),
        ({"eval.orders": ("l2r", "upwards")}, "upwards"),
        ({"sample.order": "upwards"}, "upwards"),
        ({"sample.steps": 7}, "7"),
    ],
)
def test_a_bad_value_is_one_sentence_before_any_device_work(changes, words):
    with pytest.raises(ConfigError, match=words) as error:
        build(tiny(**changes))
    assert "\n" not in str(error.value)

"""The config: validation in sentences, derived values, round trip, differences, comparison arms."""

import importlib.util
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import ml_collections
import pytest

from aodiff import accounting, arms, data, methods, state
from aodiff import config as config_lib
from aodiff.config import ConfigError


def test_finalize_derives_and_freezes():
    config = config_lib.base()
    config.train.num_steps = 70
    final = config_lib.finalize(config)
    assert final.optim.decay_steps == 70 and config.optim.decay_steps is None
    assert config_lib.finalize(final) == final
    with pytest.raises(AttributeError):
        final.train.num_steps = 5


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("method.name", "nosuch", "'nosuch' is not a method; choose one of aogpt, ordergpt"),
        ("train.num_steps", 0, "train.num_steps=0 must be positive"),
        ("optim.lr", float("nan"), "optim.lr=nan must be positive"),
        ("optim.weight_decay", -0.1, "optim.weight_decay=-0.1 must not be negative"),
        ("eval.params", "best", "eval.params='best' is unknown; use one of ema, raw"),
        ("model.dtype", "float31", "'float31' is unknown; use one of float32, bfloat16"),
        ("optim.ema_decay", 1.0, r"optim.ema_decay=1.0 is not in \[0, 1\)"),
        ("optim.ema_decay", 0.0, "optim.ema_decay=0 keeps no EMA parameters"),
        ("sample.top_p", 0.0, "sample.top_p=0.0"),
        ("seed", -1, "seed=-1 is not in 0 .. 4294967295"),
        ("eval.orders", (), r"eval.orders=\(\) without eval.ensemble .* leaves nothing"),
        ("eval.num_orders", 0, "eval.num_orders=0 must be positive"),
        ("checkpoint.keep_every", 0, "checkpoint.keep_every=0 must be positive"),
        ("eval.report_split", "test", "report_split='test' needs own in eval.orders and another"),
        ("study.seeds", (0, 0), r"study.seeds=\(0, 0\) must be distinct whole numbers"),
        ("study.permute_seeds", (1, -2), r"study.permute_seeds=\(1, -2\) must be distinct"),
        ("criteria.order/tau", (0.9, 1.0), r"criteria\['order/tau'\]=\(0.9, 1.0\) is not \(lowest"),
        ("criteria.order/tau", (1.0, 0.9, 1.0), "give three numbers, lowest first"),
        ("train.microbatches", 5, "global_batch=32 does not split into train.microbatches=5"),
    ],
)
def test_bad_values(key, value, sentence):
    config = config_lib.base()
    config.update_from_flattened_dict({key: value})
    with pytest.raises(ConfigError, match=sentence):
        config_lib.finalize(config)


def test_unknown_and_missing_keys():
    config = config_lib.base()
    with config.unlocked():
        config.train.num_step = 5
    with pytest.raises(ConfigError, match="train.num_step is unknown; did you mean train.num_step"):
        config_lib.finalize(config)
    with pytest.raises(ConfigError, match="missing; start from aodiff.config.base"):
        config_lib.finalize(
            ml_collections.ConfigDict({"method": {"name": "aogpt", "order": "l2r"}})
        )


def test_batches_must_divide_over_the_mesh():
    config = config_lib.finalize(config_lib.base())
    config_lib.check_batches(config, 8)
    with pytest.raises(ConfigError, match="= 32 does not divide over the 3 batch shards"):
        config_lib.check_batches(config, 3)
    with pytest.raises(ConfigError, match="sample.batch = 8 .* multiple of 16"):
        config_lib.check_batches(config, 16)


def test_json_round_trip():
    config = config_lib.base("ordergpt")
    config.compare = {"l2r": "l2r", "any": "uniform"}
    with pytest.raises(ConfigError, match="lacks own"):
        config_lib.finalize(config)
    config.eval.orders = ("own", "any")
    config = config_lib.finalize(config)
    assert not config_lib.diff(json.loads(config_lib.to_json(config)), config)


def test_only_ordergpt_has_an_order_to_start_over_with():
    for method in ("aogpt", "ordergpt"):
        config = config_lib.base(method)
        config.compare, config.eval.orders = {"scratch": "learned"}, ("own",)
        if method == "aogpt":
            with pytest.raises(ConfigError, match="aogpt learned, which learns none"):
                config_lib.finalize(config)
    config_lib.finalize(config)


def test_diff_names_old_and_new():
    a, b = config_lib.base(), config_lib.base()
    b.optim.lr = 2e-3
    b.compare = {"x": "l2r"}
    assert config_lib.diff(a, b) == {"optim.lr": (1e-3, 2e-3), "compare.x": (None, "l2r")}
    assert not config_lib.diff(a, json.loads(json.dumps(a.to_dict())))  # tuples became lists


def test_arm_has_equal_compute():
    """500 steps with a refresh every 20 until 0.64 are 16 of them."""
    config = config_lib.base("ordergpt")
    config.train.num_steps, config.method.probe_orders = 500, 3
    config.compare, config.eval.orders = {"l2r": "l2r"}, ("own",)
    extra = math.ceil(16 * arms.refresh_cost(config))
    arm = arms.arm(config_lib.finalize(config), "l2r")
    assert arm.method.to_dict() == {"name": "aogpt", "order": "l2r"}
    assert arm.train.num_steps == 500 + extra and arm.optim.decay_steps == 500 + extra
    assert not arm.compare and config_lib.finalize(arm).seed == config.seed
    plain = config_lib.base("aogpt")
    assert arms.arm(plain, "uniform").train.num_steps == plain.train.num_steps
    arms.arm(config, "uniform")
    assert config.method.name == "ordergpt" and config.train.num_steps == 500  # a copy


def test_arms_of_rows_that_grow_write_on_a_canvas():
    """The same data, ended by an end symbol; what only growing rows have is left out."""
    config = config_lib.base("flexmdm")
    config.data.update(dict(name="brackets", seq_len=16, lengths=(2, 4, 8, 16)))
    config.model.cond_dim, config.eval.orders = 24, ("own",)
    for order, name in {"mdm": "mdm", "l2r": "aogpt"}.items():
        arm = config_lib.finalize(arms.arm(config, order))
        assert (arm.method.name, arm.data.name) == (name, "brackets_canvas")
        assert methods.build(arm, data.describe(arm.data)).batch_spec(4)
        assert arm.model.get("cond_dim", 24) == 24
    assert config.data.name == "brackets"


@pytest.mark.parametrize("student", ["row", "flat", "teacher"])
def test_a_refresh_is_never_charged_too_little(student):
    """Against the weights of the modules: a step is 6 FLOPs per weight and token, a forward 2."""
    config = config_lib.base("ordergpt")
    changes = {"data.name": "digits", "data.seq_len": 64, "model.injection": "input"}
    changes |= {"method.student": student, "method.probe_orders": 4, "model.width": 32}
    config.update_from_flattened_dict(changes)
    method = methods.build(config_lib.finalize(config), data.describe(config.data))
    rows, inputs = 64 if student == "row" else 1, jnp.zeros((64, 64))
    weights = 0
    if student != "teacher":
        shapes = jax.eval_shape(lambda: method.policy.init(jax.random.key(0), inputs, inputs))
        weights = sum(math.prod(x.shape) for x in jax.tree.leaves(shapes) if x.ndim == 2)
    student_flops = 6 * rows * weights * config.method.student_steps
    decoder = accounting.count_params(state.abstract_params(method)) * 64
    step_flops = 6 * decoder * config.train.global_batch
    spent = (4 + 2) / 3 + student_flops / step_flops
    charged = arms.refresh_cost(config)
    assert spent <= charged < 1.6 * spent


def test_default_workdir_names_the_preset():
    name = config_lib.default_workdir
    assert str(name("configs/aogpt.py:smoke")) == "runs/aogpt-smoke"
    assert str(name("configs/aogpt.py")) == "runs/aogpt"
    with pytest.raises(ConfigError, match="no file configs/nosuch.py"):
        name("configs/nosuch.py:smoke")


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        ("owt_small", 170_605_952),
        ("owt_medium", 425_804_928),
        ("sigmagpt_small", 125_263_872),
        ("sigmagpt_medium", 355_921_920),
    ],
)
def test_paper_presets_have_the_published_size(preset, parameters):
    """Invariant 25, from the config file down: no value of another preset leaks in."""
    path = pathlib.Path(__file__).parents[1] / "configs" / "aogpt.py"
    spec = importlib.util.spec_from_file_location("aogpt", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config(preset)
    method = methods.build(config, data.describe(config.data))
    assert accounting.count_params(state.abstract_params(method)) == parameters


def test_data_seeds_of_minus_one_follow_the_run():
    config = config_lib.base()
    config.seed = 7
    config.data.update(law_seed=-1, permute_seed=-1)
    final = config_lib.finalize(config)
    assert final.data.law_seed == final.data.permute_seed == 7
    assert config.data.law_seed == -1

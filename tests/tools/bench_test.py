"""The PyTorch yardstick computes the same loss, and turns are timed fairly."""

import dataclasses
import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aodiff import partitioning
from aodiff.config import ConfigError
from aodiff.core.schedules import make_rise
from aodiff.data.pipeline import as_batch
from aodiff.methods.flexmdm import FlexMDMMethod
from aodiff.nn.flexmdm import FlexMDM, FlexMDMConfig
from aodiff.tools import bench, bench_flexmdm

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None,
    reason="torch is not installed; pip install -e '.[bench]' to compare with it",
)


@needs_torch
def test_both_sides_compute_the_same_loss():
    result = bench.bench_train_step("tiny", rounds=1)
    assert result["loss"]["torch"] == pytest.approx(result["loss"]["aodiff"], abs=2e-5)
    assert result["ratio"] == result["torch"]["seconds"] / result["aodiff"]["seconds"]


@needs_torch
def test_both_sides_decode_the_same_tokens():
    found = bench.bench_decode("tiny", (2,), block=8, steps=6, rounds=1)
    greedy, sampled = found["runs"]
    assert greedy["same_tokens"] == 1 > sampled["same_tokens"]
    for run in found["runs"]:
        assert run["ratio"] == run["torch"]["seconds"] / run["aodiff"]["seconds"] > 0
        assert run["compile_seconds"] > 0
    assert greedy["cache"]["cached"]["seconds"] > 0 and 0.5 < greedy["cache"]["same_tokens"] <= 1


def test_turns_alternate_and_leave_out_the_first():
    calls = []
    sides = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    found = bench.take_turns(sides, rounds=2)
    assert calls == ["a", "b"] * 3
    assert set(found) == {"a", "b"} and all(wall >= 0 for wall, _ in found.values())


CONFIGS = pathlib.Path(__file__).parents[2] / "configs"


def test_the_overhead_of_learning_an_order_is_made_of_its_parts():
    found = bench.bench_order(f"{CONFIGS}/ordergpt.py:smoke", rounds=1)
    plain, learning, refresh = (
        found[name]["seconds"] for name in ("aogpt_step", "ordergpt_step", "refresh")
    )
    assert found["refresh_every"] == 20 and found["refresh_until"] == pytest.approx(0.64, abs=0.01)
    wall = (learning + refresh / 20) / plain - 1
    assert found["wall"]["overhead"] == pytest.approx(wall)
    assert found["wall"]["overhead_of_run"] == pytest.approx(wall * found["refresh_until"])
    for part in ("probe", "direction", "teacher", "student"):
        assert found[part]["seconds"] > 0


def test_only_a_method_that_learns_an_order_has_this_overhead():
    with pytest.raises(ConfigError, match="aogpt, which learns no order"):
        bench.bench_order(f"{CONFIGS}/aogpt.py:smoke", rounds=1)


def test_masks_alone_are_the_same_training_step():
    cfg = FlexMDMConfig(capacity=32, num_layers=1, width=16, num_heads=2, vocab_size=32)
    rises = [make_rise(spec) for spec in bench_flexmdm.RISES]
    assert abs(bench_flexmdm.expected_attention(rises[0]) - 0.487) < 1e-3  # flexmdm.md 2.3
    tokens = np.random.default_rng(0).integers(0, 32, (4, 31))
    rows = jax.tree.map(jnp.asarray, as_batch({"tokens": tokens}, np.arange(4)))
    whole = FlexMDMMethod(FlexMDM(cfg), 31, *rises)
    params = partitioning.unbox(jax.jit(whole.init)(jax.random.key(0)))
    few = dataclasses.replace(whole, most=24)
    sides = [bench_flexmdm.training(m, params, rows)() for m in (whole, few)]
    np.testing.assert_allclose(*sides, rtol=1e-5)

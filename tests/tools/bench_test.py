"""The PyTorch yardstick computes the same loss, and turns are timed fairly."""

import importlib.util

import pytest

from aodiff.tools import bench


@pytest.mark.skipif(
    importlib.util.find_spec("torch") is None,
    reason="torch is not installed; pip install -e '.[bench]' to compare with it",
)
def test_both_sides_compute_the_same_loss():
    result = bench.bench_train_step("tiny", rounds=1)
    assert result["loss"]["torch"] == pytest.approx(result["loss"]["aodiff"], abs=2e-5)
    assert result["ratio"] == result["torch"]["seconds"] / result["aodiff"]["seconds"]


def test_turns_alternate_and_leave_out_the_first():
    calls = []
    sides = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    found = bench.take_turns(sides, rounds=2)
    assert calls == ["a", "b"] * 3
    assert set(found) == {"a", "b"} and all(wall >= 0 for wall, _ in found.values())

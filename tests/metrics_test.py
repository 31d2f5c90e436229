"""Accumulators and accounting."""

import json

import jax.numpy as jnp
import pytest

from aodiff import accounting
from aodiff.metrics import Mean, Sum, Window, merge


def mean(total: float, count: float) -> Mean:
    return Mean(jnp.float32(total), jnp.float32(count))


def test_merge_divides_once():
    """(1 + 5) / (1 + 3), not the mean of 1/1 and 5/3."""
    merged = merge({"a": mean(1, 1), "b": Sum(jnp.float32(2))}, {"a": mean(5, 3), "b": Sum(3.0)})
    assert merged["a"].value() == 1.5 and merged["b"].value() == 5


def test_empty_mean_is_zero():
    assert Mean.of(jnp.array([jnp.nan]), jnp.array([False])).value() == 0


def test_window_survives_a_restart_bit_for_bit():
    steps = [{"loss": mean(0.1 * i, 3), "n": Sum(jnp.float32(i))} for i in range(1, 5)]
    whole, first = Window(), Window()
    for s in steps:
        whole.add(s)
    for s in steps[:2]:
        first.add(s)
    second = Window(json.loads(json.dumps(first.state)))
    for s in steps[2:]:
        second.add(s)
    a, b = whole.pop(), second.pop()
    assert a == b and a["n"] == 10 and a["loss"] == pytest.approx(1 / 12)
    assert whole.pop() == {}


def test_peak_flops_takes_the_longest_name():
    assert accounting.peak_flops("TPU v5 lite") == 197e12
    assert accounting.peak_flops("TPU v5p") == 459e12
    assert accounting.peak_flops("NVIDIA H200 SXM") == 989e12
    assert accounting.peak_flops("cpu") is None
    assert accounting.mfu(1e9, 1e3) is None  # no utilisation is printed on a CPU


def test_mfu(monkeypatch):
    """3 x forward FLOPs x tokens/s over the peak of all (8) devices."""
    monkeypatch.setattr(accounting, "peak_flops", lambda kind: 1e12)
    assert accounting.mfu(1e9, 1e3) == pytest.approx(3e12 / 8e12)


def test_goodput_counts_redone_steps_as_lost(tmp_path):
    path = tmp_path / "goodput.json"
    first = accounting.Goodput(path)
    first.seconds["step"] = 10.0
    first.advance(100)
    first.write()
    second = accounting.Goodput(path)
    second.resume(80)  # steps 81 to 100 are done again
    assert second.seconds["lost"] == pytest.approx(2.0)
    assert second.seconds["step"] == pytest.approx(8.0)
    second.advance(100)
    second.write()
    stored = json.loads(path.read_text())
    assert stored["starts"] == 2 and stored["step"] == 100 and stored["goodput"] == 0.8


def test_step_timer_reads_rates(tmp_path):
    goodput = accounting.Goodput(tmp_path / "goodput.json")
    timer = accounting.StepTimer(goodput, tokens_per_step=64, flops_per_token=1.0)
    goodput.seconds["step"] += 3.0
    goodput.seconds["data_wait"] += 1.0
    perf = timer.read(8)
    assert perf == {
        "perf/step_seconds": 0.5,
        "perf/tokens_per_second": 128.0,
        "perf/data_wait_fraction": 0.25,
    }


@pytest.mark.parametrize(
    ("seconds", "text"), [(42, "42 s"), (200, "3 min 20 s"), (18720, "5 h 12 min")]
)
def test_duration(seconds, text):
    assert accounting.duration(seconds) == text


def test_counts():
    tree = {"a": jnp.zeros((2, 3)), "b": jnp.zeros(4, jnp.bfloat16)}
    assert accounting.count_params(tree) == 10 and accounting.num_bytes(tree) == 32

"""Resume is exact: killed, preempted, or moved to other devices and processes, a run ends as if
nothing had happened."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

from aodiff import distributed, partitioning, train
from aodiff.config import ConfigError
from aodiff.state import TrainState
from tests import toy

WORKER = pathlib.Path(__file__).parent / "multiprocess" / "worker.py"
TIMES = ("perf/",)


def start_worker(workdir, devices: int, stop: str, *args: str) -> subprocess.Popen:
    """Starts the real entry point on `devices` CPU devices; `stop` is "<signal>@<step>"."""
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_COMPILATION_CACHE_DIR": str(workdir / "cache"),
        "TOY_STOP": stop,
    }
    command = [sys.executable, str(WORKER), f"--config={toy.__file__}", f"--workdir={workdir}"]
    return subprocess.Popen(
        [*command, *args], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen) -> tuple[int, str]:
    out, _ = process.communicate(timeout=240)
    return process.returncode, out


def entries(workdir) -> list[dict]:
    """metrics.jsonl without the wall-clock numbers."""
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(x).items() if not k.startswith(TIMES)} for x in lines]


def same_numbers(a: list[dict], b: list[dict]) -> None:
    """The same entries, to float32 rounding through twelve updates."""
    assert [list(x) for x in a] == [list(x) for x in b]
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(list(x.values()), list(y.values()), rtol=2e-4, atol=1e-5)


@pytest.fixture(scope="module", autouse=True)
def registered():
    toy.register()


def train_on_one_device(config, workdir, **options) -> TrainState:
    """Without collectives, whose order of summation differs with and without a coordinator."""
    make_mesh = partitioning.make_mesh
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            partitioning, "make_mesh", lambda **sizes: make_mesh(**sizes, devices=jax.devices()[:1])
        )
        return train.train(config, workdir, **options)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """(workdir, final state) of an uninterrupted run on one device."""
    workdir = tmp_path_factory.mktemp("reference")
    return workdir, train_on_one_device(toy.get_config(), workdir, profile=(2, 4))


def test_an_uninterrupted_run_leaves_everything(reference):
    workdir, final = reference
    assert int(final.step) == 12 and float(np.abs(final.extra["trace"]).max()) > 0
    found = entries(workdir)
    assert [e["step"] for e in found if "train/loss" in e] == [5, 10, 12]
    assert [e["step"] for e in found if "toy/drop" in e] == [3, 6, 9, 12]
    assert [e["step"] for e in found if "eval/validation/own/nats_per_token" in e] == [8, 12]
    assert found[-1]["eval/validation/own/nats_per_token"] < 2.2
    assert (workdir / "loss.png").exists() and (workdir / "eval" / "validation-12.json").exists()
    assert json.loads((workdir / "config.json").read_text())["optim"]["decay_steps"] == 12
    assert list((workdir / "profile").rglob("*.xplane.pb"))
    seconds = json.loads((workdir / "goodput.json").read_text())["seconds"]
    assert seconds["compile"] > 0 and seconds["lost"] == 0


def test_kill_9_and_rerun_is_bit_equal(reference, tmp_path):
    """Killed at step 9: the run falls back to step 8, inside a logging window (6 to 10)."""
    workdir, final = reference
    code, out = finish(start_worker(tmp_path, 1, "KILL@9"))
    assert code == -9, out
    with (tmp_path / "metrics.jsonl").open("a") as f:
        f.write('{"step": 9, "train/lo')  # torn by the kill
    (tmp_path / "checkpoints" / "10.orbax-checkpoint-tmp").mkdir()  # half written
    resumed = train_on_one_device(toy.get_config(), tmp_path)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(final), jax.device_get(resumed))
    assert entries(tmp_path) == entries(workdir)
    a, b = (
        json.loads((w / "eval" / "validation-12.json").read_text()) for w in (workdir, tmp_path)
    )
    assert a == b


def test_sigterm_saves_and_another_topology_continues(reference, tmp_path):
    """One process on one device is preempted; eight devices go on from the step it saved."""
    workdir, _ = reference
    code, out = finish(start_worker(tmp_path, 1, "TERM@6"))
    assert code == 0, out
    assert "preempted at step" in out and "Traceback" not in out
    saved = max(int(p.name) for p in (tmp_path / "checkpoints").iterdir())
    assert saved in (6, 7)
    train.train(toy.get_config(), tmp_path)
    same_numbers(entries(tmp_path), entries(workdir))


def test_two_processes_stop_together_and_one_continues(reference, tmp_path):
    workdir, _ = reference
    connect = [f"--coordinator=127.0.0.1:{distributed.free_port()}", "--num_processes=2"]
    pair = [start_worker(tmp_path, 1, "TERM@6", *connect, f"--process_id={i}") for i in range(2)]
    results = [finish(p) for p in pair]
    assert [code for code, _ in results] == [0, 0], results
    saved = max(int(p.name) for p in (tmp_path / "checkpoints").iterdir())
    assert saved in (6, 7)
    assert f"preempted at step {saved}" in results[0][1]
    train.train(toy.get_config(), tmp_path)
    same_numbers(entries(tmp_path), entries(workdir))


def test_a_finished_run_is_left_alone(reference):
    workdir, final = reference
    before = (workdir / "metrics.jsonl").read_text()
    again = train_on_one_device(toy.get_config(), workdir)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(final), jax.device_get(again))
    assert (workdir / "metrics.jsonl").read_text() == before


def test_data_without_a_training_split_say_so(tmp_path, monkeypatch):
    both = train.data.open_splits(toy.get_config().data)
    monkeypatch.setattr(train.data, "open_splits", lambda c: {"validation": both["validation"]})
    with pytest.raises(ConfigError, match="markov has no training split, only validation; use"):
        train_on_one_device(toy.get_config(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_beyond_its_last_step_says_so(reference):
    workdir, _ = reference
    shorter = toy.get_config()
    shorter.train.num_steps = 4
    before = (workdir / "config.json").read_text()
    with pytest.raises(ConfigError, match="stands at step 12, beyond train.num_steps=4; raise"):
        train_on_one_device(shorter, workdir)
    assert (workdir / "config.json").read_text() == before


def test_killed_before_the_last_evaluation(reference, tmp_path):
    """The last checkpoint is there, its evaluation is not: it is made up for."""
    workdir, _ = reference
    shutil.copytree(workdir, tmp_path, dirs_exist_ok=True)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert "eval/" in lines[-1]
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:-1]))
    (tmp_path / "eval" / "validation-12.json").unlink()
    train_on_one_device(toy.get_config(), tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(lines)
    shutil.rmtree(tmp_path / "eval")
    train_on_one_device(toy.get_config(), tmp_path)
    assert (tmp_path / "eval" / "validation-12.json").exists()


def test_another_config_does_not_overwrite(reference):
    workdir, _ = reference
    other = toy.get_config()
    other.seed = 1
    other.data.vocab = 4
    before = (workdir / "config.json").read_text()
    with pytest.raises(ConfigError, match="holds a run with data.vocab=8, seed=0, but .* seed=1"):
        train.train(other, workdir)
    assert (workdir / "config.json").read_text() == before


def test_nan_loss_names_step_loss_and_checkpoint(tmp_path):
    config = toy.get_config()
    config.optim.max_nonfinite = 2
    config.eval.every = 0
    method = Diverging(vocab=8, seq_len=6)
    with pytest.raises(train.TrainingError, match=r"at step 7 \(loss nan, 2 steps .* step 4 in"):
        train.train(config, tmp_path, method)
    train_entries = [e for e in entries(tmp_path) if "train/loss" in e]
    assert [e["step"] for e in train_entries] == [5]


class Diverging(toy.Toy):
    """The loss is NaN from the sixth step on."""

    def draw(self, key, batch, step, params, extra):
        batch, extra = super().draw(key, batch, step, params, extra)
        poison = jax.numpy.where(step >= 5, np.nan, 0.0) * jax.numpy.ones(len(batch["tokens"]))
        return batch | {"poison": poison}, extra

    def loss_fn(self, params, batch):
        out = super().loss_fn(params, batch)
        total = out.loss.total + jax.numpy.sum(batch["poison"]) * jax.numpy.sum(params["gain"])
        return out.replace(loss=out.loss.replace(total=total))

"""The command line answers bad input with one sentence and exit code 1; nothing is lost."""

import os
import pathlib
import subprocess
import sys

import pytest

from aodiff import checkpoint, config
from tests import toy

ROOT = pathlib.Path(__file__).parents[1]
SMOKE = f"--config={ROOT}/configs/aogpt.py:smoke"
PAPER = f"--config={ROOT}/configs/aogpt.py:owt_small"


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ([], "--config is missing"),
        ([SMOKE + "x"], 'preset "smokex" is unknown; choose one of'),
        (["--config=configs/nosuch.py"], "no file configs/nosuch.py; name a file of configs/"),
        ([SMOKE, "--config.train.num_stepz=1"], 'Did you mean "num_steps"'),
        ([SMOKE, "--config.train.foo=1"], "no such key in base() of aodiff/config.py: foo"),
        ([SMOKE, "--config.train.num_steps=1.5"], "num_steps=1.5"),
        ([SMOKE, "--config.method.name=nosuch"], "choose one of aogpt, ordergpt"),
        ([SMOKE, "--config.method.order=zigzag"], "Unknown order 'zigzag'; use one of"),
        ([SMOKE, "--mode=serve"], "<train|eval|sample>"),
        ([SMOKE, "--config.mesh.data=3"], "does not fit 8 devices"),
        ([SMOKE, "--config.train.global_batch=12"], "does not divide over the 8 batch shards"),
        ([SMOKE, "--config.eval.split=nosuch"], "use one of train, validation, test"),
        ([PAPER, "--config.data.dir=nosuch"], "no data at nosuch/openwebtext; run: python -m "),
        ([SMOKE, "--config.model.dtype=float31"], "use one of float32, bfloat16"),
        ([SMOKE, "--config.data.seq_len=-1"], "data.seq_len=-1 must be positive"),
        ([SMOKE, "--mode=eval"], "holds no checkpoint; name the workdir"),
        ([SMOKE, "--workdir=gs://bucket/run"], "gs://bucket/run is a URL, not a path; mount the"),
        ([SMOKE, "--workdir=/proc/nosuch/run"], "cannot write to workdir /proc/nosuch/run"),
        ([SMOKE, "--profile=9"], "--profile=9 is not a window of steps"),
        ([SMOKE, "--config.checkpoint.init_from=nosuch"], "init_from='nosuch' holds no checkpoint"),
    ],
)
def test_one_sentence(command, args, sentence):
    assert sentence in command(*args)


def test_order_file_that_is_no_permutation(command, tmp_path):
    (tmp_path / "order.json").write_text("[0, 0, 1]")
    assert "permutation" in command(SMOKE, f"--config.method.order=file({tmp_path}/order.json)")


def test_disk_full(command, monkeypatch, tmp_path):
    """The save fails the way a full disk makes it fail; earlier checkpoints stay."""
    save = checkpoint._Manager.save

    def full(self, step, **kwargs):
        if step == 8:
            raise OSError(28, "No space left on device")
        return save(self, step, **kwargs)

    monkeypatch.setattr(checkpoint._Manager, "save", full)
    message = command(f"--config={toy.__file__}", "--workdir=run", "--config.eval.every=0")
    assert "No space left on device" in message and "rerun the same command" in message
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["4"]

    monkeypatch.setattr(checkpoint._Manager, "save", save)
    other = [f"--config={toy.__file__}", "--workdir=run", "--config.seed=3"]
    before = (tmp_path / "run" / "config.json").read_text()
    assert "holds a run with seed=0, but this command asks for seed=3" in command(*other)
    assert (tmp_path / "run" / "config.json").read_text() == before
    assert "model" in command(SMOKE, "--workdir=run", "--mode=sample")


def test_the_process_exits_with_1_and_no_traceback(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "aodiff.main", SMOKE, "--config.train.num_steps=0"],
        cwd=tmp_path,
        env=os.environ
        | {
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("train.num_steps=0 must be positive; ")
    assert not (tmp_path / "runs").exists()


def test_every_default_is_valid():
    for name in ("aogpt", "ordergpt"):
        config.finalize(config.base(name))

"""metrics.jsonl survives restarts and bad endings; optional writers ask for their package."""

import json
import logging
import sys

import pytest

from aodiff import config as config_lib
from aodiff import writers
from aodiff.config import ConfigError


def write(path, entries, tail=""):
    path.write_text("".join(json.dumps(e) + "\n" for e in entries) + tail)


def test_reopening_drops_what_the_checkpoint_does_not_know(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [{"step": s, "train/loss": 0.1 * s} for s in (5, 10, 15)], tail='{"step": 20, "tr')
    again = writers.Jsonl(path, 10)
    again.write(15, {"train/loss": 7.0})
    again.close()
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [e["step"] for e in found] == [5, 10, 15] and found[-1]["train/loss"] == 7.0


def test_an_intact_file_is_not_rewritten(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [{"step": 5, "train/loss": 0.1}])
    inode = path.stat().st_ino
    writers.Jsonl(path, 5).close()
    assert path.stat().st_ino == inode


def test_entries_are_on_disk_at_once_and_valid_json(tmp_path):
    path = tmp_path / "metrics.jsonl"
    jsonl = writers.Jsonl(path, 0)
    jsonl.write(1, {"train/loss": float("nan"), "exact": 0.1 + 0.2})
    assert json.loads(path.read_text()) == {"step": 1, "train/loss": None, "exact": 0.1 + 0.2}
    jsonl.close()


@pytest.mark.parametrize(("key", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_missing_package_is_one_sentence(tmp_path, monkeypatch, key, package):
    config = config_lib.base()
    config.log[key] = True
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"log.{key}=True needs {package}; pip install"):
        writers.Writers(tmp_path, config, 0)


def test_tensorboard_writes_scalars(tmp_path):
    pytest.importorskip("tensorboardX")
    config = config_lib.base()
    config.log.tensorboard = True
    found = writers.Writers(tmp_path, config, 0)
    found.write(3, {"train/loss": 1.5})
    found.close()
    assert b"train/loss" in next((tmp_path / "tensorboard").iterdir()).read_bytes()


def test_other_libraries_get_a_line_for_a_warning_and_no_traceback():
    def record(path, level):
        error = OSError(28, "No space left on device")
        return logging.LogRecord("absl", level, path, 1, "text", (), (OSError, error, None))

    own, other = writers.__file__, "/site-packages/orbax/checkpoint.py"
    assert writers.keep(record(own, logging.INFO))
    assert not writers.keep(record(other, logging.INFO))
    failed = record(other, logging.ERROR)
    assert writers.keep(failed) and failed.exc_info is None


def test_full_disk(tmp_path):
    """/dev/full fails every write the way a full disk does."""
    jsonl = writers.Jsonl(tmp_path / "metrics.jsonl", 0)
    jsonl._file = open("/dev/full", "a", buffering=1)
    with pytest.raises(OSError, match="No space left"):
        jsonl.write(1, {"train/loss": 1.0})

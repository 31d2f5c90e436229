"""doctor and show_config say what is there."""

import pathlib
import subprocess
import sys

import pytest

from aodiff.config import base
from aodiff.tools import doctor, show_config
from aodiff.train import set_up

ROOT = pathlib.Path(__file__).parents[2]


def small():
    c = base("aogpt")
    c.update_from_flattened_dict({"data.name": "markov", "data.seq_len": 16, "mesh.model": 2})
    return c


def test_parameter_table_counts_and_shards():
    c = small()
    setup = set_up(c, mesh=show_config.describe_mesh(c.mesh, 8))
    rows = {name: rest for name, *rest in show_config.parameter_rows(setup.abstract.params)}
    assert rows["params/blocks/fc/kernel"] == ["4x128x512", 4 * 128 * 512, "- fsdp model"]
    assert rows["params/tpos"][2] == "replicated"
    text = show_config.report(setup)
    assert f"{sum(count for _, count, _ in rows.values()):,}" in text
    assert "data=1 fsdp=4 model=2" in text
    assert "* data.seq_len" in text and "  model.width " in text  # what differs is marked
    assert "tokens       32x16" in text


def test_show_config_rejects_a_mesh_that_does_not_divide():
    process = subprocess.run(
        [sys.executable, "-m", "aodiff.tools.show_config", "--config=configs/aogpt.py:smoke"]
        + ["--devices=6", "--config.mesh.model=4"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 1 and "does not fit 6 devices" in process.stderr
    assert len(process.stderr.strip().splitlines()) == 1


def test_doctor_lists_devices_packages_and_prepared_data(tmp_path):
    (tmp_path / "my_corpus").mkdir()
    text = doctor.report(tmp_path)
    assert "8 cpu" in text and "my_corpus" in text and "digits" in text
    assert "MISSING" not in text


@pytest.mark.parametrize(
    ("backend", "seen", "libtpu", "expected"),
    [
        ("cpu", ["4 TPU chips"], False, "'.[tpu]'"),
        ("cpu", ["4 TPU chips"], True, "JAX_PLATFORMS"),
        ("cpu", ["1 NVIDIA GPUs"], False, "jax[cuda"),
        ("cpu", [], True, "compile_check works"),
    ],
)
def test_hints_for_hardware_that_is_not_used(backend, seen, libtpu, expected):
    (hint,) = doctor.hints(backend, seen, libtpu)
    assert expected in hint


def test_no_hint_when_the_accelerator_is_used():
    assert doctor.hints("tpu", ["4 TPU chips"], True) == []

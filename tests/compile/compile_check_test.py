"""The real training step of every injection, compiled for a TPU slice; skipped without libtpu."""

import json
import pathlib

import pytest

from aodiff.nn.aogpt import INJECTIONS
from aodiff.tools.environment import WITHOUT_TPU
from tests.compile.fresh import ROOT, needs_libtpu, run

HERE = pathlib.Path(__file__).parent


@pytest.fixture(scope="module")
def programs() -> dict:
    """All programs in one process, because start-up would cost more than compiling."""
    process = run(str(HERE / "programs.py"), **WITHOUT_TPU)
    assert process.returncode == 0, process.stderr[-2000:]
    return json.loads(process.stdout)


@needs_libtpu
def test_every_training_step_compiles_for_a_tpu_without_involuntary_copies(programs):
    others = {"ordergpt", "mdm", "sas", "flexmdm", "flexmdm samples"}
    assert set(programs["reports"]) == {*INJECTIONS, *others}
    for name, report in programs["reports"].items():
        assert report["fits"] and not report["reason"], (name, report["reason"])
        assert report["rematerializations"] == []
        assert report["mesh"] == {"data": 1, "fsdp": 2, "model": 2}


@needs_libtpu
def test_decoding_by_a_cache_compiles_for_a_tpu_without_involuntary_copies(programs):
    assert programs["decoding"] == 0


@needs_libtpu
def test_the_check_sees_an_involuntary_copy_when_there_is_one(programs):
    assert programs["warnings_caught"] == 1


@needs_libtpu
def test_bytes_and_collectives_are_of_the_sharded_step(programs):
    report = programs["reports"]["adaln"]
    assert report["optimizer_bytes"] == pytest.approx(2 * report["parameter_bytes"], rel=0.01)
    assert report["ema_bytes"] == report["parameter_bytes"]
    # Four devices hold each parameter sharded two or four ways, or whole where it cannot be.
    assert report["parameters"] < report["parameter_bytes"] < 4 * report["parameters"]
    assert report["argument_bytes"] >= report["parameter_bytes"] + report["optimizer_bytes"]
    # Gradients are summed over the batch shards, in the loop over microbatches.
    reduces = report["collectives"]["all-reduce"]
    assert reduces["in_loops"] and reduces["runs"] > reduces["ops"]


@needs_libtpu
def test_a_sampler_holds_the_parameters_alone(programs):
    step, sampler = (programs["reports"][name] for name in ("flexmdm", "flexmdm samples"))
    assert step["ema_bytes"] and sampler["parameter_bytes"] == step["parameter_bytes"]
    assert sampler["ema_bytes"] == sampler["optimizer_bytes"] == 0
    assert sampler["argument_bytes"] < step["argument_bytes"] / 2


@needs_libtpu
def test_logits_of_masks_alone_save_flops_and_bytes_of_the_compiled_step(programs):
    found = programs["bench"]
    few, slots = (found["logits of slots"][name] for name in ("few", "all"))
    saved = found["saved by masks alone"]
    assert 0 < saved["flops"] < 1 - few / slots and saved["bytes"] > 0


@needs_libtpu
def test_an_impossible_batch_exits_1_with_one_sentence_and_three_remedies():
    process = run(
        *("-m", "aodiff.tools.compile_check", "--config=configs/aogpt.py:smoke"),
        *("--topology=v5e-4", "--json", "--config.data.seq_len=4096"),
        *("--config.train.global_batch=65536", "--config.train.microbatches=1"),
    )
    assert process.returncode == 1, process.stderr[-2000:]
    report = json.loads(process.stdout)
    assert not report["fits"] and report["topology"] == "v5e:2x2" and report["peak_bytes"] is None
    reason = report["reason"]
    assert reason.count("\n") == 0 and "15.75G" in reason
    places = [reason.index(x) for x in ("train.microbatches=", "model.remat=", "mesh.model=")]
    assert places == sorted(places)


@pytest.mark.parametrize("argument", ["--topology=v9:2x2", "--config.model.wdith=3"])
def test_bad_input_is_one_line(argument):
    process = run(
        *("-m", "aodiff.tools.compile_check", "--config=configs/aogpt.py:smoke"),
        *("--topology=v5e:2x2", argument),
    )
    assert process.returncode == 1 and process.stdout == ""
    assert len(process.stderr.strip().splitlines()) == 1, process.stderr


def test_without_libtpu_the_sentence_names_the_extra(tmp_path):
    (tmp_path / "libtpu").mkdir()
    (tmp_path / "libtpu/__init__.py").write_text("raise ImportError('hidden by the test')")
    process = run(
        *("-m", "aodiff.tools.compile_check", "--config=configs/aogpt.py:smoke"),
        "--topology=v5e:2x2",
        path=f"{tmp_path}:{ROOT}",
    )
    assert process.returncode == 1
    assert "libtpu, which is not installed" in process.stderr, process.stderr[-500:]
    assert len(process.stderr.strip().splitlines()) == 1

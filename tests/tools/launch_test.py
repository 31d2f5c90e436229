"""The launch scripts, run against a stand-in for gcloud that records what it is asked."""

import os
import pathlib
import subprocess

import pytest

LAUNCH = pathlib.Path(__file__).parents[2] / "launch"
TARGET = {"PROJECT": "p", "ZONE": "z", "NAME": "n", "TYPE": "v5litepod-8"}
GCLOUD = """#!/usr/bin/env bash
echo "$*" >>"$RECORD"
case "$*" in
  *describe*) echo 3 ;;
  *--worker=1*) exit "$WORKER_1" ;;
esac
"""


@pytest.fixture
def launch(tmp_path):
    """Runs a script in a scratch folder; returns the process and the recorded gcloud calls."""
    (tmp_path / "gcloud").write_text(GCLOUD)
    (tmp_path / "gcloud").chmod(0o755)
    record = tmp_path / "record"

    def run(script, *arguments, worker_1=0, env=TARGET):
        environment = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "RECORD": str(record),
            "WORKER_1": str(worker_1),
        }
        process = subprocess.run(
            ["bash", LAUNCH / script, *arguments],
            env=environment | env,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return process, record.read_text().splitlines() if record.exists() else []

    return run


@pytest.mark.parametrize("script", ["tpu_vm.sh", "pod_run.sh"])
def test_dry_run_prints_commands_and_the_deletion_but_runs_nothing(launch, script):
    command = ["--", "python", "-m", "aodiff.main"] if script == "pod_run.sh" else []
    process, calls = launch(script, "--dry_run", *command)
    assert process.returncode == 0 and calls == []
    assert "+ gcloud compute tpus tpu-vm" in process.stdout
    last = process.stdout.strip().splitlines()[-1]
    assert "gcloud compute tpus tpu-vm delete n --project p --zone z" in last


@pytest.mark.parametrize("script", ["tpu_vm.sh", "pod_run.sh"])
def test_missing_target_and_unknown_flag_are_one_sentence(launch, script):
    process, _ = launch(script, "--dry_run", env=TARGET | {"ZONE": ""})
    assert process.returncode == 1 and "ZONE is not set" in process.stderr
    process, _ = launch(script, "--frobnicate")
    assert process.returncode == 1 and len(process.stderr.splitlines()) == 1


def test_pod_run_starts_every_worker_and_keeps_a_log_each(launch, tmp_path):
    process, calls = launch("pod_run.sh", "--", "echo", "a b")
    assert process.returncode == 0, process.stderr
    assert sum("ssh n" in call for call in calls) == 3
    assert all("echo a\\ b" in call for call in calls if "ssh n" in call)
    assert len(list((tmp_path / "runs/pod-n").glob("worker-*.log"))) == 3


def test_pod_run_returns_the_failure_of_a_worker_and_stops_the_others(launch):
    process, calls = launch("pod_run.sh", "--", "true", worker_1=7)
    assert process.returncode == 7
    assert sum("--worker=all" in call and "kill" in call for call in calls) == 1

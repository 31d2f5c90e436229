"""Static schedules against the recorded ones: a kernel whose loop grew by 5 % fails."""

import importlib.metadata
import json
import pathlib

import pytest

from aodiff.tools.environment import WITHOUT_TPU
from pallas_kernels.chips import CHIPS
from tests.compile.fresh import ROOT, needs_libtpu, run

RECORD = ROOT / "pallas_kernels/bench/static_schedules.json"
RECORDED = json.loads(RECORD.read_text())


def bench(tmp_path: pathlib.Path, record: pathlib.Path, *more: str):
    return run(
        *("-m", "pallas_kernels.bench", "--static", "--topology=v5e:2x2x1", "--kinds=two_stream"),
        *("--lengths=1024", f"--against={record}", f"--out={tmp_path / 'rows.json'}", *more),
        **WITHOUT_TPU,
    )


@needs_libtpu
def test_no_loop_has_grown(tmp_path):
    if importlib.metadata.version("libtpu") != RECORDED[0]["libtpu"]:
        pytest.skip(f"{RECORD.name} was recorded with libtpu {RECORDED[0]['libtpu']}")
    # The forward as it is, and a record in which the backward was faster by a tenth.
    rows = [dict(r) for r in RECORDED]
    for row in rows:
        if row["kernel"].endswith("backward"):
            row["loop_cycles"] = int(row["loop_cycles"] * 0.9)
    faster = tmp_path / "faster.json"
    faster.write_text(json.dumps(rows))
    process = bench(tmp_path, faster)
    assert process.returncode == 1
    grown = [line for line in process.stderr.splitlines() if "has grown" in line]
    assert len(grown) == 1 and "two_stream backward at L = 1024 on v5e" in grown[0]
    measured = {r["kernel"]: r for r in json.loads((tmp_path / "rows.json").read_text())}
    for row in RECORDED:
        if (row["generation"], row["length"]) == ("v5e", 1024) and row["kernel"] in measured:
            assert measured[row["kernel"]]["cycles"] == pytest.approx(row["cycles"], rel=0.05)


@pytest.mark.parametrize("generation", CHIPS)
@pytest.mark.parametrize("length", [1024, 2048])
def test_the_record_has_every_generation_and_beats_two_calls_of_splash(generation, length):
    rows = {
        r["kernel"]: r for r in RECORDED if (r["generation"], r["length"]) == (generation, length)
    }
    for way, most in (("forward", 0.83), ("backward", 0.81)):
        row = rows[f"two_stream {way}"]
        two_calls = row["splash"]["causal"]
        assert two_calls["calls"] == 2 and row["cycles"] <= most * two_calls["cycles"]

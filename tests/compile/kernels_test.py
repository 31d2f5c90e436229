"""Every attention kernel, compiled by the TPU compiler of every generation; skipped without libtpu.

Nothing here runs on a TPU: what is shown is that the compiler takes the kernels, and what programs
it makes of them.
"""

import collections
import concurrent.futures
import json
import math
import pathlib

import pytest

from aodiff.tools.environment import WITHOUT_TPU
from tests.compile.fresh import needs_libtpu, run
from tests.compile.kernel_programs import MESH_PROGRAMS, PROGRAMS
from tests.compile.shapes import quadratic, shapes_of

PROGRAM = str(pathlib.Path(__file__).with_name("kernel_programs.py"))
HBM_GB = {"v4": 16, "v5e": 16, "v5p": 95, "v6e": 32, "tpu7x": 96}  # of one device
LONG = {
    "long_streams": 8192,
    "long_lengths": 8192,
    "longer_streams": 32768,
    "longer_lengths": 32768,
}
WHOLE = "v5e"  # this generation compiles all programs in every run, the others these
FEW = ("streams", "lengths", "cached", "mesh_streams")
XLA = ("dense", "mesh_sum")  # programs that have what the others must not
KERNELS = [name for name in (*PROGRAMS, *MESH_PROGRAMS) if name not in XLA]


def compiled(generation, names):
    process = run(PROGRAM, generation, *names, timeout=1500, **WITHOUT_TPU)
    assert process.returncode == 0, process.stderr[-2000:]
    return json.loads(process.stdout)


@pytest.fixture(scope="module")
def processes(request):
    """One process for each generation, of the programs that selected tests ask for, two at once."""
    selected = [item for item in request.session.items if "report" in item.fixturenames]
    chosen = collections.defaultdict(dict)
    for item in selected:
        chosen[item.callspec.params["generation"]][item.callspec.params["name"]] = None
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        yield {
            generation: pool.submit(compiled, generation, chosen[generation])
            for generation in chosen
        }


@pytest.fixture
def report(processes, generation, name):
    """What the compiler made of one program for one generation."""
    return processes[generation].result()[name]


def each(names):
    """For every generation and each of these programs, where there is a compiler.

    Most programs are slow tests on all generations but one.
    """

    def case(generation, name):
        slow = generation != WHOLE and name not in FEW
        return pytest.param(generation, name, marks=[pytest.mark.slow] * slow)

    cases = [case(generation, name) for generation in HBM_GB for name in names]
    return lambda test: needs_libtpu(pytest.mark.parametrize(("generation", "name"), cases)(test))


@each(KERNELS)
def test_compiles_to_mosaic_kernels(report, generation, name):
    assert "error" not in report, report["error"]
    if name.startswith("cached"):
        assert report["kernels"] == 1
    else:  # forward and backward, either of which may take several for what VMEM cannot hold
        assert report["kernels"] >= 2
        assert report["generations"] == [generation]


@each([name for name in MESH_PROGRAMS if name not in XLA])
def test_over_a_mesh_no_device_waits_for_another(report, generation, name):
    assert report["kernels"] == 2
    assert report["collectives"] == []
    assert report["scratch_bytes"] <= 16 * 2**20


@each(["mesh_sum"])
def test_a_collective_would_be_seen(report, generation, name):
    assert set(report["collectives"]) == {"all-reduce"}


@each(LONG)
def test_long_sequences_fit_and_no_array_is_quadratic(report, generation, name):
    parts = ("argument_bytes", "result_bytes", "scratch_bytes")
    assert sum(report[part] for part in parts) < HBM_GB[generation] * 10**9
    assert quadratic(report["shapes"], LONG[name]) == []
    # Arrays are no larger than the arguments, which the compiler may also copy as bytes; one over
    # pairs would have 16 to 64 times their bytes.
    assert max(map(math.prod, report["shapes"])) <= report["argument_bytes"]
    assert report["scratch_bytes"] <= 8 * report["argument_bytes"]


@each(["dense"])
def test_a_quadratic_array_would_be_seen(report, generation, name):
    assert report["kernels"] == 0
    assert quadratic(report["shapes"], 2048)


def test_shapes_are_read_from_the_text_of_a_program():
    text = (
        "f32[2,3]{1,0} custom-call(bf16[1,4,2,1024,128]{4,3,2,1,0:T(8,128)}, "
        "s32[7], pred[4,5], u8[])"
    )
    assert shapes_of(text) == [(1, 4, 2, 1024, 128), (2, 3), (4, 5), (7,)]
    assert quadratic([(8, 3), (2, 8, 9), (4, 4, 4), (63,)], 8) == [(2, 8, 9), (4, 4, 4)]


def test_programs_have_every_value_of_every_column():
    made = [PROGRAMS[name]()[1] for name in KERNELS if name in PROGRAMS and name not in LONG]
    queries = [arguments[0] for arguments in made if arguments[0].ndim == 5]
    caches = [arguments[1] for arguments in made if arguments[0].ndim == 4]
    streams = {(q.shape[2], q.dtype.name, q.shape[4]) for q in queries}
    assert {s for s, *_ in streams} == {1, 2}
    assert {d for *_, d in streams} == {d.shape[-1] for d in caches} == {64, 128, 256}
    assert len({(dtype, dim) for _, dtype, dim in streams}) == 6
    assert len({(s, dim) for s, _, dim in streams}) == 6

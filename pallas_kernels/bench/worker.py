"""The fresh process of `aot.compile_cases`: compiles cases, reads and runs their schedules."""

import argparse
import dataclasses
import glob
import importlib
import importlib.util
import json
import pathlib
import re
import sys
import time
from typing import Any

import jax
import libtpu
import numpy as np
from jax.experimental import topologies

from pallas_kernels.bench import execute, prefetch, schedule
from pallas_kernels.bench.aot import Case, Compiled, Report, StaticError, check_topology
from pallas_kernels.chips import CHIPS, Chip

_MOSAIC = re.compile(r"%?(\S+) = .*custom_call_target=\"tpu_custom_call\"")


def _load(source: str) -> dict[str, Any]:
    """Returns CASES of a file or module."""
    if source.endswith(".py"):
        spec = importlib.util.spec_from_file_location("cases_file", source)
        module = importlib.util.module_from_spec(spec)
        sys.modules["cases_file"] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(source)
    return module.CASES


def main(source: str, topology: str, out: str, dumps: str, names: list[str]) -> None:
    """Compiles one case after the other, forgets each one's dumps, and writes the report."""
    chip = CHIPS[check_topology(topology)]
    described = topologies.get_topology_desc(platform="tpu", topology_name=chip.topology)
    mesh = jax.sharding.Mesh(np.array(described.devices[:1]), ("x",))
    table = _load(source)
    cases, errors = {}, {}
    for case in names or table:
        try:
            cases[case] = _compile(table[case], mesh, pathlib.Path(dumps), chip)
        except Exception as error:  # one refused case must not cost the others
            errors[case] = f"{type(error).__name__}: {error}"[:2000]
    report = Report(topology, libtpu.__version__, cases, errors)
    pathlib.Path(out).write_text(json.dumps(dataclasses.asdict(report)))


def _compile(case: Any, mesh: Any, dumps: pathlib.Path, chip: Chip) -> Compiled:
    placed = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    _empty(dumps)
    # Lowerings inside a kernel ask for the device kind of the current mesh.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        case = case() if callable(case) else case
        case = case if isinstance(case, Case) else Case(*case)
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), case.arguments
        )
        begin = time.perf_counter()
        traced = jax.jit(case.function).trace(*shapes)
        compiled = traced.lower(lowering_platforms=("tpu",)).compile()
        seconds = time.perf_counter() - begin
    tables = prefetch.tables(traced.jaxpr, jax.tree.leaves(case.arguments))
    kernels = []
    for name in _MOSAIC.findall(compiled.as_text()):
        base = name.split(".")[0]
        first = next((i for i, (n, _) in enumerate(tables) if n == base), None)
        kernels.append(_read(dumps, name, tables.pop(first)[1] if first is not None else [], chip))
    _empty(dumps)
    memory = compiled.memory_analysis()
    return Compiled(
        kernels=kernels,
        facts=case.facts,
        compile_seconds=round(seconds, 2),
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        scratch_bytes=memory.temp_size_in_bytes,
        optimal_seconds=(compiled.cost_analysis() or {}).get("optimal_seconds", 0.0),
    )


def _read(folder: pathlib.Path, name: str, tables: list[Any], chip: Chip) -> schedule.Schedule:
    """Reads one kernel's dumps and runs its scalar code, once for every core of the device."""
    bundles = schedule.parse_bundles(_dump(folder, name, "packed-bundles-post-ra"))
    use = schedule.parse_utilization(
        _dump(folder, name, "pre-delay_hlo-static-per-bundle-utilization")
    )
    allocations = _dump(folder, name, "pre-finalize-registers-and-allocations")
    cut = schedule.segments(bundles, use, chip.delay_slots)
    runs, why = [], ""
    try:
        for core in range(chip.cores_per_device):
            memory = execute.scalar_memory(allocations, tables, core)
            counts = execute.count(bundles, memory, chip.delay_slots)
            runs.append(execute.segment_runs(counts, cut))
    except execute.UnknownBranch as error:
        runs, why = [], f"{error}"
    return schedule.Schedule(
        name, cut, use.capacity, schedule.parse_vmem(allocations), runs=runs, why_unknown=why
    )


def _empty(folder: pathlib.Path) -> None:
    for file in folder.iterdir():
        file.unlink()


def _dump(folder: pathlib.Path, kernel: str, kind: str) -> str:
    """The text of one dump of one kernel."""
    pattern = f"{folder}/*-{glob.escape(kernel)}-*-{kind}.txt"
    found = [f for f in glob.glob(pattern) if re.fullmatch(rf".*-\d+-{kind}\.txt", f)]
    if len(found) != 1:
        raise StaticError(
            f"Kernel {kernel!r} has {len(found)} dumps of {kind}; give its pallas_call a unique, "
            "purely alphabetic name."
        )
    return pathlib.Path(found[0]).read_text()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for argument in ("source", "topology", "out", "dumps"):
        parser.add_argument(argument)
    parser.add_argument("names", nargs="*")
    a = parser.parse_args()
    main(a.source, a.topology, a.out, a.dumps, a.names)

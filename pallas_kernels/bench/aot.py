"""Compiles functions for a TPU that is not attached and reads the schedules of their kernels.

libtpu reads the flags that make it write dumps when it is loaded, so every topology gets a fresh
process: `compile_cases` starts this module as one.
"""

import argparse
import dataclasses
import glob
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from pallas_kernels.bench import execute, prefetch, schedule
from pallas_kernels.chips import CHIPS

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # no metadata server here
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_LOG_DIR": "disabled",
}
MISSING = (
    "Static schedules come from libtpu's compiler, which is not installed; run: "
    "pip install -e '.[tpu]'."
)
_MOSAIC = re.compile(r"%?(\S+) = .*custom_call_target=\"tpu_custom_call\"")


class StaticError(ValueError):
    """What cannot be compiled or read, in one sentence."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A function to compile; `facts` is what the report should say about it besides (JSON)."""

    function: Callable
    arguments: list[Any]  # pytrees of jax.ShapeDtypeStruct, or of arrays whose values matter
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler says of one case."""

    kernels: list[schedule.Schedule]  # in program order
    facts: dict[str, Any]
    compile_seconds: float
    argument_bytes: int
    output_bytes: int
    scratch_bytes: int
    optimal_seconds: float  # XLA's own cost model; says nothing about a Mosaic kernel


@dataclasses.dataclass(frozen=True)
class Report:
    """All cases of one topology; a case the compiler refused is in `errors` instead."""

    topology: str
    libtpu: str
    cases: dict[str, Compiled]
    errors: dict[str, str]


def compile_cases(source: str, topology: str, names: list[str] | None = None) -> Report:
    """Compiles cases in a fresh process.

    Args:
      source: a Python file or an importable module with `CASES`, a mapping from a name to a
        `Case`, to a pair of its function and arguments, or to a function returning either. Every
        pallas_call needs a short, purely alphabetic name.
      topology: one of the table in `pallas_kernels.chips`.
      names: which cases; None means all.

    Raises:
      StaticError: libtpu is absent, or the process failed.
    """
    check_topology(topology)
    if importlib.util.find_spec("libtpu") is None:
        raise StaticError(MISSING)
    with tempfile.TemporaryDirectory(prefix="schedules-") as folder:
        dumps, out = pathlib.Path(folder, "dumps"), pathlib.Path(folder, "report.json")
        dumps.mkdir()
        flags = f"--xla_jf_dump_to={dumps} --xla_jf_dump_llo_text=true"
        command = [sys.executable, "-m", "pallas_kernels.bench.aot", source, topology, out, dumps]
        done = subprocess.run(
            [*map(str, command), *(names or [])],
            env={**os.environ, **ENVIRONMENT, "LIBTPU_INIT_ARGS": flags},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        if done.returncode:
            raise StaticError(
                f"The process that compiles for {topology} ended with code {done.returncode}; its "
                f"last words: {done.stderr[-3000:]}"
            )
        return _from_json(json.loads(out.read_text()))


def check_topology(topology: str) -> str:
    """Returns the generation of a topology's name; raises StaticError for an unknown one."""
    for chip in CHIPS.values():
        if topology in (chip.topology, chip.name):
            return chip.name
    allowed = ", ".join(c.topology for c in CHIPS.values())
    raise StaticError(f"Unknown topology {topology!r}; use one of: {allowed}.")


def _from_json(report: dict[str, Any]) -> Report:
    cases = {name: _compiled(**case) for name, case in report.pop("cases").items()}
    return Report(cases=cases, **report)


def _compiled(kernels: list[dict[str, Any]], **rest: Any) -> Compiled:
    made = [
        schedule.Schedule(segments=[schedule.Segment(**s) for s in k.pop("segments")], **k)
        for k in kernels
    ]
    return Compiled(kernels=made, **rest)


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


def _child(source: str, topology: str, out: str, dumps: str, names: list[str]) -> None:
    """The fresh process: compiles one case after the other, and forgets each one's dumps."""
    import jax
    import libtpu
    import numpy as np
    from jax.experimental import topologies

    chip = CHIPS[check_topology(topology)]
    described = topologies.get_topology_desc(platform="tpu", topology_name=chip.topology)
    mesh = jax.sharding.Mesh(np.array(described.devices[:1]), ("x",))
    table = _load(source)
    cases, errors = {}, {}
    for case in names or table:
        try:
            cases[case] = _compile(
                table[case], mesh, pathlib.Path(dumps), chip.cores_per_device, jax
            )
        except Exception as error:  # one refused case must not cost the others
            errors[case] = f"{type(error).__name__}: {error}"[:2000]
    report = Report(topology, libtpu.__version__, cases, errors)
    pathlib.Path(out).write_text(json.dumps(dataclasses.asdict(report)))


def _compile(case: Any, mesh: Any, dumps: pathlib.Path, cores: int, jax: Any) -> Compiled:
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
        kernels.append(_read(dumps, name, tables.pop(first)[1] if first is not None else [], cores))
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


def _read(folder: pathlib.Path, name: str, tables: list[Any], cores: int) -> schedule.Schedule:
    """Reads one kernel's dumps and runs its scalar code, once for every core of the device."""
    bundles = schedule.parse_bundles(_dump(folder, name, "packed-bundles-post-ra"))
    use = schedule.parse_utilization(
        _dump(folder, name, "pre-delay_hlo-static-per-bundle-utilization")
    )
    allocations = _dump(folder, name, "pre-finalize-registers-and-allocations")
    cut = schedule.segments(bundles, use)
    runs, why = [], ""
    try:
        for core in range(cores):
            memory = execute.scalar_memory(allocations, tables, core)
            runs.append(execute.segment_runs(execute.count(bundles, memory), cut))
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
    _child(a.source, a.topology, a.out, a.dumps, a.names)

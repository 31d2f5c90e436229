"""Compiles functions for a TPU that is not attached and reads the schedules of their kernels.

libtpu reads the flags that make it write dumps when it is loaded, so every topology gets a fresh
process: `compile_cases` starts the module `worker` as one.
"""

import dataclasses
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from pallas_kernels.bench import schedule
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

    @property
    def generation(self) -> str:
        return check_topology(self.topology)


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
        flags = (
            f"--xla_jf_dump_to={dumps} --xla_jf_dump_llo_text=true "
            "--xla_jf_dump_llo_pass_label_regex=packed-bundles-post-ra|pre-delay.*|pre-finalize.*"
        )  # of every pass: 100 MB a kernel
        command = [sys.executable, "-m", "pallas_kernels.bench.worker"]
        done = subprocess.run(
            [*command, source, topology, str(out), str(dumps), *(names or [])],
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

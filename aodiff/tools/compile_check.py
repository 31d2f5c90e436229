"""Does the training step fit? Compiles it for a TPU slice that is not attached, on a CPU.

  python -m aodiff.tools.compile_check --config=configs/aogpt.py:owt_small --topology=v5e:4x4

Exit code 0: it compiles, fits, and no tensor had to be replicated involuntarily. Needs the extra
`tpu`.
"""

import os

from aodiff.tools.environment import WITHOUT_TPU

os.environ.update({k: os.environ.get(k, v) for k, v in WITHOUT_TPU.items()})  # before JAX

import contextlib
import dataclasses
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax
from absl import app, flags

from aodiff import accounting, steps
from aodiff.main import SENTENCES, parse
from aodiff.tools import hlo, topologies
from aodiff.train import Setup, set_up

_TOPOLOGY = flags.DEFINE_string("topology", None, "a slice, such as v5e:4x4 or v6e-16")
_NUM_SLICES = flags.DEFINE_integer("num_slices", 1, "equal slices, joined over mesh.data")
_MFU = flags.DEFINE_float("mfu", 0.4, "assumed share of the peak rate, for the roofline time")
_JSON = flags.DEFINE_bool("json", False, "print one JSON object instead of the table")

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Report:
    """What one compilation says. Bytes are per device unless the name says otherwise."""

    topology: str
    devices: int
    mesh: dict[str, int]
    fits: bool
    reason: str  # why it does not pass; empty if it does
    hbm_bytes: int
    parameters: int
    parameter_bytes: int
    ema_bytes: int
    optimizer_bytes: int
    total_state_bytes: int  # over all devices, each element once
    compile_seconds: float
    flops_per_device: float  # analytic, per step: three times the forward
    assumed_mfu: float
    roofline_seconds: float
    argument_bytes: int | None = None
    output_bytes: int | None = None  # beyond what it shares with the arguments
    temporary_bytes: int | None = None
    code_bytes: int | None = None
    peak_bytes: int | None = None
    collectives: dict[str, hlo.Collectives] = dataclasses.field(default_factory=dict)
    rematerializations: list[str] = dataclasses.field(default_factory=list)


def check(config, topology: str, num_slices: int = 1, mfu: float = 0.4) -> Report:
    """Compiles the training step of `config` for `num_slices` slices of `topology`.

    Raises:
      ConfigError: a bad config or topology, or libtpu is absent.
    """
    slice_ = topologies.parse(topology)
    with captured_stderr():  # libtpu complains that this machine is no TPU VM
        described = topologies.devices(slice_, num_slices)
    sizes = (config.mesh.data, config.mesh.fsdp, config.mesh.model)
    setup = set_up(config, mesh=topologies.make_mesh(described, sizes, num_slices))
    c, state = setup.config, setup.abstract
    train_step = steps.make_train_step(
        setup.method, setup.tx, c.train.microbatches, c.optim.ema_decay
    )
    spec = setup.method.batch_spec(c.train.global_batch)
    tokens = c.train.global_batch * setup.info.seq_len
    flops = 3.0 * setup.method.flops_per_token() * tokens / len(described)
    hbm = int(slice_.spec.hbm_gib * GIB)

    begin = time.perf_counter()
    memory, collectives, failure = None, {}, None
    with captured_stderr() as messages:
        try:
            compiled = steps.compile_train_step(train_step, state, spec, setup.mesh)
        except jax.errors.JaxRuntimeError as error:
            failure = hlo.out_of_memory(str(error))
            if failure is None:
                raise
    seconds = time.perf_counter() - begin
    rematerialized = hlo.involuntary_rematerializations(messages())
    if failure is None:
        memory = _memory(compiled)
        collectives = hlo.collectives(compiled.as_text())
        if sum(v for k, v in memory.items() if k != "peak_bytes") > hbm:
            needed = sum(v for k, v in memory.items() if k != "peak_bytes") / GIB
            failure = hlo.OutOfMemory(f"{needed:.2f}G", f"{slice_.spec.hbm_gib}G")
    reason = ""
    if failure is not None:
        reason = _does_not_fit(setup, slice_.name, failure)
    elif rematerialized:
        reason = (
            f"It fits, but XLA replicates {len(rematerialized)} tensors whole to reshard them "
            f"(first: {rematerialized[0]}); constrain them with aodiff.partitioning.shard."
        )
    return Report(
        topology=slice_.name if num_slices == 1 else f"{num_slices} x {slice_.name}",
        devices=len(described),
        mesh=dict(setup.mesh.shape),
        fits=failure is None,
        reason=reason,
        hbm_bytes=hbm,
        parameters=accounting.count_params(state.params),
        parameter_bytes=device_bytes(state.params),
        ema_bytes=device_bytes(state.ema_params),
        optimizer_bytes=device_bytes(state.opt_state),
        total_state_bytes=accounting.num_bytes(state),
        compile_seconds=round(seconds, 2),
        flops_per_device=flops,
        assumed_mfu=mfu,
        roofline_seconds=flops / (slice_.spec.peak_tflops * 1e12 * mfu),
        collectives=collectives,
        rematerializations=rematerialized,
        **(memory or {}),
    )


def device_bytes(tree: Any) -> int:
    """Bytes of one device's shards of a tree of sharded shapes."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def _memory(compiled: jax.stages.Compiled) -> dict[str, int]:
    m = compiled.memory_analysis()
    return {
        "argument_bytes": m.argument_size_in_bytes,
        "output_bytes": m.output_size_in_bytes - m.alias_size_in_bytes,
        "temporary_bytes": m.temp_size_in_bytes,
        "code_bytes": m.generated_code_size_in_bytes,
        "peak_bytes": m.peak_memory_in_bytes,
    }


def _does_not_fit(setup: Setup, name: str, failure: hlo.OutOfMemory) -> str:
    """One sentence with three remedies in order: microbatch, remat, mesh."""
    c, mesh = setup.config, setup.mesh.shape
    rows = c.train.global_batch // c.train.microbatches // (mesh["data"] * mesh["fsdp"])
    if rows > 1:
        enough = max(2.0, failure.ratio)
        split = next((k for k in range(2, rows) if rows % k == 0 and k >= enough), rows)
        microbatch = f"--config.train.microbatches={c.train.microbatches * split}"
    else:
        microbatch = "a smaller --config.data.seq_len (a device holds one row already)"
    remat = {"none": "dots, then full", "dots": "full"}.get(c.model.remat)
    remat = f"--config.model.remat={remat}" if remat else "a smaller model (remat is full already)"
    wider = f"a larger slice, or --config.mesh.model={2 * mesh['model']}"
    return (
        f"The training step needs {failure.needed} of memory but one {name} device has "
        f"{failure.available}; try (1) {microbatch}, (2) {remat}, (3) {wider}."
    )


@contextlib.contextmanager
def captured_stderr() -> Iterator[Any]:
    """Diverts file descriptor 2, which the compiler writes to; yields a reader of the text."""
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile() as file:
        text = []
        os.dup2(file.fileno(), 2)
        try:
            yield lambda: text[0]
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)
            file.seek(0)
            text.append(file.read().decode(errors="replace"))


def table(r: Report) -> str:
    """The report as people read it."""

    def mib(count: int) -> str:
        return f"{count / 2**20:10,.1f} MiB"

    lines = [
        f"{r.topology}: {r.devices} devices of {r.hbm_bytes / GIB:.2f} GiB, mesh "
        + " ".join(f"{k}={v}" for k, v in r.mesh.items()),
        f"{r.parameters:,} parameters, state {r.total_state_bytes / GIB:.2f} GiB over all devices",
        "per device:",
        f"  parameters   {mib(r.parameter_bytes)}",
        f"  EMA          {mib(r.ema_bytes)}",
        f"  optimizer    {mib(r.optimizer_bytes)}",
    ]
    if r.peak_bytes is not None:
        lines += [
            f"  arguments    {mib(r.argument_bytes)}   (state and batch)",
            f"  outputs      {mib(r.output_bytes)}   (beyond the donated state)",
            f"  temporaries  {mib(r.temporary_bytes)}",
            f"  code         {mib(r.code_bytes)}",
            f"  peak         {mib(r.peak_bytes)}   ({r.peak_bytes / r.hbm_bytes:.0%} of memory)",
        ]
        lines.append("collectives" + ("" if r.collectives else ": none"))
        for kind, count in r.collectives.items():
            lines.append(
                f"  {kind:18} {count.ops:4} in the program, {count.in_loops} of them in loops; "
                f"{count.runs} runs per step"
            )
        lines.append(f"involuntary rematerializations: {len(r.rematerializations)}")
        lines += [f"  {op}" for op in r.rematerializations]
    lines += [
        f"compiled in {r.compile_seconds:.1f} s",
        f"{r.flops_per_device / 1e12:.2f} TFLOP per device and step (analytic, forward x 3); "
        f"{r.roofline_seconds:.3f} s at an ASSUMED MFU of {r.assumed_mfu:.0%}",
        r.reason or "It fits.",
    ]
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    del argv
    try:
        report = check(flags.FLAGS.config, _TOPOLOGY.value, _NUM_SLICES.value, _MFU.value)
    except SENTENCES as error:
        sys.exit(f"{error}")
    print(json.dumps(dataclasses.asdict(report), indent=1) if _JSON.value else table(report))
    sys.exit(1 if report.reason else 0)


if __name__ == "__main__":
    flags.mark_flags_as_required(["config", "topology"])
    app.run(main, flags_parser=parse)

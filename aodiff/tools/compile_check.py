"""Does the training step or the sampler fit? Compiles it for a TPU slice that is not attached.

  python -m aodiff.tools.compile_check --config=configs/aogpt.py:owt_small --topology=v5e:4x4
  python -m aodiff.tools.compile_check --config=... --topology=v5e:2x4 --program=sample

Exit code 0: it compiles, fits, and no tensor had to be replicated involuntarily. Weights and
tokenizers of published models need not be there. Runs on a CPU and needs the extra `tpu`.
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
import jax.numpy as jnp
from absl import app, flags

from aodiff import accounting, data, partitioning, steps
from aodiff import config as config_lib
from aodiff.generate import make_draw
from aodiff.main import SENTENCES, parse
from aodiff.tools import hlo, topologies
from aodiff.train import Setup, set_up

_TOPOLOGY = flags.DEFINE_string("topology", None, "a slice, such as v5e:4x4 or v6e-16")
_NUM_SLICES = flags.DEFINE_integer("num_slices", 1, "equal slices, joined over mesh.data")
_PROGRAM = flags.DEFINE_enum("program", "train", ("train", "sample"), "what to compile")
_MFU = flags.DEFINE_float("mfu", 0.4, "assumed share of the peak rate, for the roofline time")
_JSON = flags.DEFINE_bool("json", False, "print one JSON object instead of the table")

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Report:
    """What one compilation says. Bytes are per device unless the name says otherwise."""

    program: str
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
    flops_per_device: float  # analytic: three forwards of a step, or one of a sampler's whole rows
    assumed_mfu: float
    roofline_seconds: float
    argument_bytes: int | None = None
    output_bytes: int | None = None  # beyond what it shares with the arguments
    temporary_bytes: int | None = None
    code_bytes: int | None = None
    peak_bytes: int | None = None
    # None: the program does not fit, or its text cannot be read back.
    collectives: dict[str, hlo.Collectives] | None = None
    rematerializations: list[str] = dataclasses.field(default_factory=list)


def check(
    config, topology: str, num_slices: int = 1, mfu: float = 0.4, program: str = "train"
) -> Report:
    """Compiles the training step or the sampler of `config` for `num_slices` of `topology`.

    Raises:
      ConfigError: a bad config or topology, or libtpu is absent.
    """
    slice_ = topologies.parse(topology)
    with captured_stderr():  # libtpu complains that this machine is no TPU VM
        described = topologies.devices(slice_, num_slices)
    sizes = (config.mesh.data, config.mesh.fsdp, config.mesh.model)
    mesh = topologies.make_mesh(described, sizes, num_slices)
    config, info = without_files(config)
    setup = set_up(config, mesh=mesh, info=info)
    c, state = setup.config, setup.abstract
    if program == "sample":
        state = state.replace(ema_params=None, opt_state=())
    rows = c.train.global_batch if program == "train" else c.sample.batch
    forwards = {"train": 3.0, "sample": 1.0}[program] * rows * setup.info.seq_len
    flops = forwards * setup.method.flops_per_token() / len(described)
    hbm = int(slice_.spec.hbm_gib * GIB)

    begin = time.perf_counter()
    memory, collectives, failure = None, None, None
    with captured_stderr() as messages:
        try:
            compiled = _LOWER[program](setup).compile()
        except jax.errors.JaxRuntimeError as error:
            failure = hlo.out_of_memory(str(error))
            if failure is None:
                raise
    seconds = time.perf_counter() - begin
    rematerialized = hlo.involuntary_rematerializations(messages())
    if failure is None:
        memory = _memory(compiled)
        with captured_stderr(), contextlib.suppress(jax.errors.JaxRuntimeError):
            # Of some asynchronous operations of a newer libtpu, jaxlib cannot make text.
            collectives = hlo.collectives(compiled.as_text())
        if sum(v for k, v in memory.items() if k != "peak_bytes") > hbm:
            needed = sum(v for k, v in memory.items() if k != "peak_bytes") / GIB
            failure = hlo.OutOfMemory(f"{needed:.2f}G", f"{slice_.spec.hbm_gib}G")
    reason = ""
    if failure is not None:
        reason = _does_not_fit(setup, program, slice_.name, failure)
    elif rematerialized:
        reason = (
            f"It fits, but XLA replicates {len(rematerialized)} tensors whole to reshard them "
            f"(first: {rematerialized[0]}); constrain them with aodiff.partitioning.shard."
        )
    return Report(
        program=program,
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


def without_files(config) -> tuple[Any, data.DataInfo | None]:
    """A config that begins with published weights as one that begins with none, and its data.

    Their tokenizer stays closed: of the data, shapes matter, and that texts end. Any other config
    as it is, and None.
    """
    if not config.checkpoint.needs or config.checkpoint.init_from is not None:
        return config, None
    c = config_lib.editable(config)
    c.checkpoint.needs, c.data.tokenizer = "", "byte"
    return c, dataclasses.replace(data.describe(c.data), vocab_size=c.model.mask_id)


def _lower_train(setup: Setup) -> jax.stages.Lowered:
    c = setup.config
    step = steps.make_train_step(setup.method, setup.tx, c.train.microbatches, c.optim.ema_decay)
    spec = setup.method.batch_spec(c.train.global_batch)
    return steps.lower_train_step(step, setup.abstract, spec, setup.mesh)


def _lower_sample(setup: Setup) -> jax.stages.Lowered:
    """A call that writes `sample.batch` rows from nothing."""
    rows, place = setup.config.sample.batch, partitioning.batch_sharding(setup.mesh)
    array = lambda dtype, *size: jax.ShapeDtypeStruct((rows, *size), dtype, sharding=place)
    n = setup.info.seq_len
    draw = make_draw(setup.method, setup.config, setup.mesh, 0)
    with jax.set_mesh(setup.mesh):
        return draw.lower(
            setup.abstract.params,
            setup.abstract.extra,
            array(jnp.int32),
            array(jnp.int32, n),
            array(bool, n),
        )


_LOWER = {"train": _lower_train, "sample": _lower_sample}


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


def _does_not_fit(setup: Setup, program: str, name: str, failure: hlo.OutOfMemory) -> str:
    """One sentence with remedies in order: microbatch, remat, mesh."""
    c, mesh = setup.config, setup.mesh.shape
    wider = f"a larger slice, or --config.mesh.model={2 * mesh['model']}"
    if program == "sample":
        return (
            f"The sampler needs {failure.needed} of memory but one {name} device has "
            f"{failure.available}; try (1) a --config.sample.batch below {c.sample.batch}, "
            f"(2) {wider}."
        )
    rows = c.train.global_batch // c.train.microbatches // (mesh["data"] * mesh["fsdp"])
    if rows > 1:
        enough = max(2.0, failure.ratio)
        split = next((k for k in range(2, rows) if rows % k == 0 and k >= enough), rows)
        microbatch = f"--config.train.microbatches={c.train.microbatches * split}"
    else:
        microbatch = "a smaller --config.data.seq_len (a device holds one row already)"
    remat = {"none": "dots, then full", "dots": "full"}.get(c.model.remat)
    remat = f"--config.model.remat={remat}" if remat else "a smaller model (remat is full already)"
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


_PER = {"train": "step (analytic, forward x 3)", "sample": "call on whole rows (analytic)"}


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
        unread = ": unknown, the program cannot be read" if r.collectives is None else ": none"
        lines.append("collectives" + ("" if r.collectives else unread))
        for kind, count in (r.collectives or {}).items():
            lines.append(
                f"  {kind:18} {count.ops:4} in the program, {count.in_loops} of them in loops; "
                f"{count.runs} runs per step"
            )
        lines.append(f"involuntary rematerializations: {len(r.rematerializations)}")
        lines += [f"  {op}" for op in r.rematerializations]
    lines += [
        f"compiled in {r.compile_seconds:.1f} s",
        f"{r.flops_per_device / 1e12:.2f} TFLOP per device and {_PER[r.program]}; "
        f"{r.roofline_seconds:.3f} s at an ASSUMED MFU of {r.assumed_mfu:.0%}",
        r.reason or "It fits.",
    ]
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    del argv
    try:
        slices, mfu, program = _NUM_SLICES.value, _MFU.value, _PROGRAM.value
        report = check(flags.FLAGS.config, _TOPOLOGY.value, slices, mfu, program)
    except SENTENCES as error:
        sys.exit(f"{error}")
    print(json.dumps(dataclasses.asdict(report), indent=1) if _JSON.value else table(report))
    sys.exit(1 if report.reason else 0)


if __name__ == "__main__":
    flags.mark_flags_as_required(["config", "topology"])
    app.run(main, flags_parser=parse)

"""The one training loop."""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import pathlib
import time
from typing import Any

import jax
import numpy as np
import optax
from absl import logging
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from aodiff import (
    accounting,
    arms,
    checkpoint,
    data,
    distributed,
    evals,
    figures,
    methods,
    optim,
    partitioning,
    rng,
    state,
    steps,
)
from aodiff import config as config_lib
from aodiff.config import ConfigError
from aodiff.data.pipeline import train_batches
from aodiff.evaluate import Scorers, evaluate, make_scorers, open_splits, record_path, reported_step
from aodiff.figures_ordergpt import write_order
from aodiff.methods.base import Method
from aodiff.profiling import Profiler
from aodiff.recorder import Recorder, TrainingError
from aodiff.state import TrainState
from aodiff.writers import Writers, replace_text
from pallas_kernels import PLATFORMS


@dataclasses.dataclass(frozen=True)
class Setup:
    """What training, evaluation and sampling build before they touch a device array."""

    config: Any  # finalized
    mesh: Mesh
    info: data.DataInfo
    method: Method
    tx: optax.GradientTransformation
    abstract: TrainState

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())


def set_up(
    config,
    method: Method | None = None,
    mesh: Mesh | None = None,
    info: data.DataInfo | None = None,
) -> Setup:
    """Finalizes the config and builds mesh, method, optimizer and abstract state.

    Args:
      config: the config.
      method: replaces the one the config names.
      mesh: replaces `config.mesh` over the attached devices (the compile check describes its own).
      info: replaces what `config.data` says, which may need files.
    """
    config = config_lib.finalize(config)
    mesh = partitioning.make_mesh(**config.mesh) if mesh is None else mesh
    if isinstance(mesh, Mesh):  # an abstract one has no devices
        check_platform(config.model.attention, mesh.devices.flat[0].platform)
    config_lib.check_batches(config, mesh.shape["data"] * mesh.shape["fsdp"])
    info = data.describe(config.data) if info is None else info
    evals.check(config, info)
    method = method or methods.build(config, info)
    evals.check_decoders(config, method)
    for order in set(config.compare.values()) - set(config_lib.FOUND):
        arm = arms.arm(config, order)
        methods.build(arm, data.describe(arm.data))
    mask = optim.decay_mask(state.abstract_params(method))
    tx = optim.make_optimizer(config.optim, config.train.num_steps, mask)
    abstract = state.abstract_state(method, tx, config.optim.ema_decay > 0, mesh)
    return Setup(config, mesh, info, method, tx, abstract)


def check_platform(impl: str, platform: str) -> None:
    """Raises ConfigError if attention `impl` cannot run on devices of `platform`."""
    if PLATFORMS.get(impl, platform) != platform:
        raise ConfigError(
            f"model.attention={impl!r} runs on {PLATFORMS[impl]} only and the devices are of "
            f'platform {platform}; use "auto" or "xla_blocked".'
        )


def restore(setup: Setup, workdir: pathlib.Path, params: str) -> tuple[int, str, Any, Any]:
    """Reads the newest checkpoint in `workdir`, or that of the step the run is judged by.

    Returns (step, name of the data it was trained on, parameters "ema" or "raw", extra).
    """
    found, step = checkpoint.existing(workdir, "--workdir")
    if setup.config.eval.report_split is not None:
        step = reported_step(workdir, setup.config)
    stored = found.meta(step)
    checkpoint.check_same_run(
        stored, setup.config, stored["fingerprint"], workdir, checkpoint.MODEL_IDENTITY
    )
    place = "ema_params" if params == "ema" else "params"
    wanted, extra = {place: setup.abstract.params}, setup.abstract.extra
    if scratch := getattr(setup.method, "scratch", ()):
        extra = {name: like for name, like in extra.items() if name not in scratch}
    if jax.tree.leaves(extra):
        wanted["extra"] = extra
    now = found.parts(step, wanted)
    return step, stored["config"]["data"]["name"], now[place], now.get("extra", extra)


def train(
    config,
    workdir: str | pathlib.Path,
    method: Method | None = None,
    profile: tuple[int, int] = (0, 0),
) -> TrainState:
    """Trains the run of `config` in `workdir`, from wherever it stands to its last step.

    Args:
      config: the config; it is finalized here.
      workdir: holds config.json, checkpoints/, metrics.jsonl, eval/ and goodput.json.
      method: replaces the one the config names.
      profile: (first, last + 1) of the steps to trace.

    Raises:
      ConfigError, DataError, CheckpointError, TrainingError: one sentence each.
      Preempted: SIGTERM arrived; everything is saved.
    """
    begin = time.perf_counter()

    # --- Config, mesh, method, abstract state, data.
    setup = set_up(config, method)
    config, method, workdir = setup.config, setup.method, pathlib.Path(workdir)
    num_steps, every = config.train.num_steps, config.checkpoint.every
    splits = open_splits(config)
    if "train" not in splits:
        raise ConfigError(
            f"{config.data.name} has no training split, only {', '.join(splits)}; use other data, "
            "or --mode=eval"
        )
    meta = checkpoint.make_meta(config, splits["train"].fingerprint, _versions())
    _claim(workdir, config, meta)
    goodput = accounting.Goodput(workdir / "goodput.json")
    goodput.seconds["start_up"] += time.perf_counter() - begin
    changed = config_lib.diff(config_lib.base(config.method.name), config)
    logging.info("config: base() with %s", " ".join(f"{k}={v!r}" for k, (_, v) in changed.items()))
    logging.info(
        "%s on %s: %s parameters, %.1f MiB of state, mesh %s",
        config.method.name,
        config.data.name,
        f"{accounting.count_params(setup.abstract.params):,}",
        accounting.num_bytes(setup.abstract) / 2**20,
        dict(setup.mesh.shape),
    )

    # --- Restore or init.
    choose = config.eval.report_split is not None  # of all evaluated steps, so all are kept
    keep = config.checkpoint.keep_last, config.checkpoint.keep_every
    keep = (keep[0], config.eval.every) if choose and config.eval.every else keep
    checkpoints = checkpoint.Checkpoints(workdir, *keep)
    with goodput.measure("restore"):
        now, stored = checkpoint.start_up(
            checkpoints, config, setup.abstract, meta, lambda: _fresh(setup)
        )
        start = int(now.step)
    if start > num_steps:
        raise ConfigError(
            f"{workdir} stands at step {start}, beyond train.num_steps={num_steps}; raise "
            "train.num_steps or use another --workdir"
        )
    goodput.resume(start)
    writers = Writers(workdir, config, start)
    recorder = Recorder(setup, writers, goodput, checkpoints, stored.get("window"))
    if jax.process_index() == 0:
        replace_text(workdir / "config.json", config_lib.to_json(config))

    scorers = make_scorers(method, config, setup.mesh)

    scored = [config_lib.on_split(config, split) for split in config_lib.scored_splits(config)]

    def record(c: Any, step: int) -> pathlib.Path:
        return record_path(workdir, c, step, config.data.name)

    def evaluate_at(step: int) -> None:
        with goodput.measure("eval"):
            for c in scored:
                source = splits[c.eval.split]
                _evaluate(setup, c, scorers, now, source, step, record(c, step), writers)

    def eval_due(step: int) -> bool:
        return step == num_steps or bool(config.eval.every) and step % config.eval.every == 0

    done = all(writers.evaluated(start, record(c, start)) for c in scored)
    if start and eval_due(start) and not done:
        evaluate_at(start)

    # --- Compile.
    if start < num_steps:
        with goodput.measure("compile"):
            train_step = _compile(setup)

    # --- Loop.
    batches = train_batches(
        splits["train"],
        config.train.global_batch,
        partitioning.batch_sharding(setup.mesh),
        config.seed,
        start,
    )
    seed = jax.device_put(np.uint32(config.seed), setup.replicated)
    profiler = Profiler(profile, workdir / "profile")
    with contextlib.closing(batches), contextlib.closing(checkpoints), contextlib.closing(writers):
        for step in range(start + 1, num_steps + 1):
            with profiler.step(step):
                with goodput.measure("data_wait"):
                    batch = next(batches)
                with goodput.measure("step"):
                    with jax.transfer_guard("disallow"):
                        now, metrics = train_step(now, batch, seed)
                        recorder.push(step, metrics)
                    if method.refresh_every and step % method.refresh_every == 0:
                        now = _refresh(setup, now, batch, step, writers)
            stop = distributed.preempted()
            if stop or step % every == 0 or step == num_steps or (choose and eval_due(step)):
                recorder.drain()
                with goodput.measure("save"):
                    checkpoints.save(step, now, meta | {"window": recorder.window.state})
            if stop:
                checkpoints.wait()
                raise distributed.Preempted(step)
            if eval_due(step):
                recorder.drain()
                evaluate_at(step)

        # --- Measure.
        distributed.barrier(f"evaluations of {workdir}")  # process 0 writes the records
        judged = reported_step(workdir, config)
        if config.eval.measures and not evals.measured(config, workdir, judged):
            checkpoints.wait()
            with goodput.measure("eval"):
                at = dataclasses.replace(setup, config=scored[-1])
                chosen = now if judged == num_steps else checkpoints.state(judged, setup.abstract)
                model, path = (
                    (_eval_params(config, chosen), chosen.extra),
                    record(at.config, judged),
                )
                writers.write(num_steps, evals.measure(at, *model, splits, judged, workdir, path))

        # --- Close.
        with goodput.measure("save"):
            checkpoints.wait()
        if jax.process_index() == 0:
            goodput.write()
            figures.loss_curve(workdir)
            if config.method.name == "ordergpt":
                row = splits[config.eval.split].read(np.zeros(1, np.int64))["tokens"][0]
                extra = jax.device_get(now.extra)
                write_order(workdir, extra, config.method.reciprocal, setup.info, row)
    return now


def _claim(workdir: pathlib.Path, config, meta: dict) -> None:
    """Makes the workdir, or refuses it if another config's run lives there; all processes agree."""
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        (workdir / "config.json").touch()
    except OSError as e:
        raise ConfigError(
            f"cannot write to workdir {workdir} ({e.strerror}); choose another with --workdir"
        ) from e
    text = (workdir / "config.json").read_text()
    if text:
        stored = meta | {"config": json.loads(text)}
        checkpoint.check_same_run(stored, config, meta["fingerprint"], workdir)
    digest = hashlib.blake2b(config_lib.to_json(config).encode(), digest_size=6).hexdigest()
    distributed.barrier(f"config {digest} workdir {workdir}")


def _fresh(setup: Setup) -> TrainState:
    ema = setup.config.optim.ema_decay > 0
    return state.init_state(setup.method, setup.tx, ema, setup.abstract, setup.config.seed)


def _compile(setup: Setup) -> jax.stages.Compiled:
    c = setup.config
    train_step = steps.make_train_step(
        setup.method, setup.tx, c.train.microbatches, c.optim.ema_decay
    )
    batch_spec = setup.method.batch_spec(c.train.global_batch)
    begin = time.perf_counter()
    try:
        compiled = steps.compile_train_step(train_step, setup.abstract, batch_spec, setup.mesh)
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        raise TrainingError(
            "the training step does not fit the memory of the device; raise train.microbatches, "
            "set model.remat=full, or use a larger mesh"
        ) from e
    logging.info("compiled the training step in %.1f s", time.perf_counter() - begin)
    return compiled


def _refresh(setup: Setup, now: TrainState, batch: dict, step: int, writers: Writers) -> TrainState:
    """Lets the method update `extra` on the host, and replicates what is new over the mesh."""
    stream = jax.jit(rng.stream, static_argnums=1, out_shardings=setup.replicated)
    with jax.set_mesh(setup.mesh):
        key = stream(np.uint32(setup.config.seed), rng.PROBE, np.int32(step))
        extra, scalars = setup.method.refresh(now.params, batch, key, step, now.extra)

    def place(x: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
        x = np.asarray(x, like.dtype)
        return jax.make_array_from_process_local_data(setup.replicated, x, like.shape)

    if scalars:
        writers.write(step, scalars)
    if extra is now.extra:
        return now
    return now.replace(extra=jax.tree.map(place, extra, setup.abstract.extra))


def _evaluate(
    setup: Setup,
    c: Any,
    scorers: Scorers,
    now: TrainState,
    source: data.Source,
    step: int,
    path: pathlib.Path,
    writers: Writers,
) -> None:
    model = _eval_params(c, now), now.extra
    at = dict(step=step, path=path, figure=step == c.train.num_steps)
    results = evaluate(scorers, *model, source, setup.info, c, setup.mesh, **at)
    scalars = {}
    for name, result in results.items():
        numbers = {k: v for k, v in result.items() if isinstance(v, int | float)}
        scalars |= {f"eval/{c.eval.split}/{name}/{k}": float(v) for k, v in numbers.items()}
    writers.write(step, scalars)


def _eval_params(config, now: TrainState) -> Any:
    return now.ema_params if config.eval.params == "ema" else now.params


def _versions() -> dict[str, str]:
    packages = ("jax", "flax", "optax", "orbax-checkpoint", "numpy")
    return {name: importlib.metadata.version(name) for name in packages}

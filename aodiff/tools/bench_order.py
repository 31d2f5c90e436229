"""What learning an order costs, beside the same AO-GPT without it."""

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aodiff import partitioning, rng, state, steps
from aodiff.arms import arm
from aodiff.config import ConfigError, base
from aodiff.core import spectral
from aodiff.data.pipeline import as_batch
from aodiff.tools.turns import take_turns
from aodiff.train import Setup, set_up


def bench_order(preset: str, rounds: int) -> dict[str, Any]:
    """Times OrderGPT's training step and refresh against AO-GPT's step, in turns.

    Args:
      preset: "base" for the defaults of the method, or a file of configs/ with :preset.
      rounds: timed calls of each side after one warm-up; medians are reported.

    Returns:
      Seconds and CPU seconds of both steps, of a refresh and of its parts (the rest of it are
      transfers and bookkeeping). "wall" and "cpu" (which other users of the machine disturb less):
      step_ratio = OrderGPT's step / AO-GPT's; refresh_share = refresh / (`refresh_every` AO-GPT
      steps); overhead = step_ratio - 1 + refresh_share, while the order is learned; and
      overhead_of_run, the same over the whole run as if refreshes were full from step 0 to the
      latest freeze, which is an upper bound.
    """
    config = base("ordergpt") if preset == "base" else _load(preset)
    if config.method.name != "ordergpt":
        raise ConfigError(f"{preset} trains {config.method.name}, which learns no order")
    learning, plain = set_up(config), set_up(arm(config, "uniform"))
    batch = config.train.global_batch
    rows = _rows(learning, batch)
    sides = {
        "aogpt_step": _step(plain, rows),
        "ordergpt_step": _step(learning, rows),
    } | _refresh(learning, rows)
    seconds = take_turns(sides, rounds)
    method, num_steps = learning.method, config.train.num_steps
    result = {
        "config": preset,
        "units": learning.info.seq_len,
        "batch": batch,
        "refresh_every": method.refresh_every,
        "probe_orders": method.probe_orders,
        "refresh_until": method.phases.shift_end / num_steps,
        "load_average": os.getloadavg()[0],
    }
    for name, (wall, cpu) in seconds.items():
        result[name] = {"seconds": wall, "cpu_seconds": cpu}
    for i, clock in enumerate(("wall", "cpu")):
        plain_step, step, refresh = (
            seconds[name][i] for name in ("aogpt_step", "ordergpt_step", "refresh")
        )
        ratio, share = step / plain_step, refresh / (method.refresh_every * plain_step)
        result[clock] = {
            "step_ratio": ratio,
            "refresh_share": share,
            "overhead": ratio - 1 + share,
            "overhead_of_run": (ratio - 1 + share) * result["refresh_until"],
        }
    return result


def _load(preset: str):
    """The config of `configs/file.py[:preset]`."""
    path, _, name = preset.partition(":")
    spec = importlib.util.spec_from_file_location("config_file", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(name)


def _rows(setup: Setup, num: int) -> dict[str, jax.Array]:
    """A batch of random ids; what they are does not matter for speed."""
    n = setup.info.seq_len
    sizes = setup.info.unit_sizes or setup.info.vocab_size
    tokens = np.random.default_rng(0).integers(0, sizes, (num, n)).astype(np.int32)
    rows = as_batch({"tokens": tokens}, np.arange(num))
    return jax.device_put(rows, partitioning.batch_sharding(setup.mesh))


def _step(setup: Setup, rows: dict[str, jax.Array]) -> Callable[[], float]:
    """A function that makes one training step of `setup` and waits for its loss."""
    c, method = setup.config, setup.method
    now = state.init_state(method, setup.tx, c.optim.ema_decay > 0, setup.abstract, c.seed)
    step = steps.make_train_step(method, setup.tx, c.train.microbatches, c.optim.ema_decay)
    spec = method.batch_spec(c.train.global_batch)
    compiled = steps.compile_train_step(step, setup.abstract, spec, setup.mesh)
    seed = jnp.uint32(0)

    def run() -> float:
        nonlocal now
        now, metrics = compiled(now, rows, seed)
        return float(metrics["loss"].value())

    return run


def _refresh(setup: Setup, rows: dict[str, jax.Array]) -> dict[str, Callable[[], Any]]:
    """A whole refresh in the middle of learning, and each of its parts alone."""
    c, method = setup.config, setup.method
    params = state.init_state(
        method, setup.tx, c.optim.ema_decay > 0, setup.abstract, c.seed
    ).params
    n, step = setup.info.seq_len, method.phases.shift
    apart = abs(np.arange(n)[:, None] - np.arange(n)[None, :])
    # Evidence of a chain, so strong that the probes of an untrained model leave it as it is.
    count = np.full((2, n, n), 1e6, np.float32)
    excess = (0.3 * np.exp(-apart) - 0.01).astype(np.float32) * count
    order = np.arange(n, dtype=np.int32)
    extra = method.init_extra().replace(
        excess=excess, count=count, start_step=np.int32(0), order_step=np.int32(0), order=order
    )
    extra = jax.device_put(extra, setup.replicated)
    host = jax.device_get(extra)
    key = jax.device_put(rng.stream(0, rng.PROBE, 0), setup.replicated)
    line = jax.device_put(order, setup.replicated)

    def teach() -> None:
        for e, k in ((excess.sum(0), count.sum(0)), *zip(excess, count, strict=True)):
            spectral.teach(e, k, method.reciprocal)

    def on_mesh(run: Callable[[], Any]) -> Callable[[], Any]:
        def waited():
            with jax.set_mesh(setup.mesh):
                return jax.block_until_ready(run())

        return waited

    probe = jax.device_get(on_mesh(lambda: method._probe(params, rows, key))())
    priority = np.linspace(1, 0, n, dtype=np.float32)
    sides = {
        "refresh": lambda: jax.device_put(
            method.refresh(params, rows, key, step, extra)[0], setup.replicated
        ),
        "probe": lambda: method._probe(params, rows, key),
        "direction": lambda: method._direction(params, rows, line),
        "teacher": teach,
        "student": lambda: method._fit_student(host, probe, priority, setup.replicated),
    }
    return {name: on_mesh(run) for name, run in sides.items()}

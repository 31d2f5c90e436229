"""Process start-up, barriers with time-outs, and agreement on where to stop when preempted."""

import glob
import importlib.util
import itertools
import os
import socket

import jax
from absl import logging
from jax.experimental import multihost_utils

from aodiff.config import ConfigError

_calls = itertools.count(1)


class Preempted(Exception):
    """The processes have agreed to stop; everything is saved. `step` is the step of the save."""

    def __init__(self, step: int):
        super().__init__(f"preempted at step {step}; rerun the same command")
        self.step = step


def start(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    preemptible: bool = True,
) -> None:
    """Connects the processes of a run; the first call of a program. Compiled programs are cached.

    On Cloud TPU everything is found by itself; elsewhere all three arguments connect several
    processes; with none, a loop-back coordinator serves this one process, because the coordination
    service is what turns SIGTERM into a save.

    Args:
      coordinator: "host:port" of process 0.
      num_processes: number of processes.
      process_id: this process, from 0.
      preemptible: whether the program asks `preempted`; without, SIGTERM ends one process at once.

    Raises:
      ConfigError: some but not all arguments are given, or they do not fit together.
    """
    if jax.distributed.is_initialized():
        return
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", os.path.expanduser("~/.cache/aodiff/xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    given = (coordinator, num_processes, process_id)
    if all(g is None for g in given):
        if not (_on_tpu() and _connect_tpu()) and preemptible:
            jax.distributed.initialize(f"127.0.0.1:{free_port()}", 1, 0)
    elif any(g is None for g in given):
        raise ConfigError(
            f"--coordinator={coordinator} --num_processes={num_processes} "
            f"--process_id={process_id} go together; give all three or none"
        )
    elif not 0 <= process_id < num_processes:
        raise ConfigError(
            f"--process_id={process_id} is not below --num_processes={num_processes}; number the "
            "processes from 0"
        )
    else:
        jax.distributed.initialize(coordinator, num_processes, process_id)
    kinds = sorted({d.device_kind for d in jax.local_devices()})
    logging.info(
        "process %d of %d, %d local of %d devices, %s, coordinator %s",
        jax.process_index(),
        jax.process_count(),
        jax.local_device_count(),
        jax.device_count(),
        ", ".join(kinds),
        coordinator or "automatic",
    )


def free_port() -> int:
    """A port the system has just handed out, so that parallel runs do not clash."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _on_tpu() -> bool:
    if "tpu" not in os.environ.get("JAX_PLATFORMS", "tpu"):
        return False
    chips = glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*")
    return bool(chips) and importlib.util.find_spec("libtpu") is not None


def _connect_tpu() -> bool:
    try:
        jax.distributed.initialize()
    except (RuntimeError, ValueError) as e:  # a TPU without the metadata of a TPU VM, such as Colab
        logging.info("no TPU cluster found (%s); using a loop-back coordinator", e)
        return False
    return True


def barrier(name: str, timeout_seconds: float = 300.0) -> None:
    """Waits until every process is here, through the coordination service.

    Raises:
      TimeoutError: names the processes that did not arrive.
    """
    if jax.process_count() == 1:
        return
    # The public collectives would hang where this one times out.
    from jax._src.distributed import global_state

    try:
        global_state.client.wait_at_barrier(name, int(timeout_seconds * 1000))
    except jax.errors.JaxRuntimeError as e:
        raise TimeoutError(f"barrier {name!r} was not reached by every process: {e}") from e


def preempted() -> bool:
    """True, in every process at the same step, once any of them has received SIGTERM.

    Every process calls it once a step. The processes agree on a call, not on a step, because
    several runs may follow each other in one program.
    """
    call = next(_calls)
    return jax.distributed.is_initialized() and multihost_utils.reached_preemption_sync_point(call)

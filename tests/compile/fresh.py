"""Programs that compile for a TPU run in processes of their own, with a user's environment."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed; pip install -e '.[tpu]' to compile for a TPU",
)


def run(
    *arguments: str, path: str = str(ROOT), timeout: int = 300, **variables: str
) -> subprocess.CompletedProcess:
    """Runs Python with these arguments and nothing but `variables` set for TPU, JAX and XLA."""
    # JAX in this process has left variables for its children; a user's shell has none of them.
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TPU_", "JAX_", "XLA_"))}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=clean | {"PYTHONPATH": path} | variables,
        capture_output=True,
        text=True,
        timeout=timeout,
    )

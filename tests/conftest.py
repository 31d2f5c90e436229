"""Eight CPU devices and strict JAX settings, set before the first JAX operation."""

import os
import sys

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

from aodiff import host_memory

# Most of the suite's time is compilation of programs that then run for milliseconds.
QUICK_COMPILES = " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def pytest_configure(config: pytest.Config) -> None:
    host_memory.keep_freed_memory()
    if "not slow" in config.option.markexpr:  # the studies train for minutes
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + QUICK_COMPILES


jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_key_reuse", True)


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Runs the entry point in this process; returns the message it exits with, or None."""
    from absl import flags  # imported by the few tests that need them

    from aodiff import distributed, main, writers
    from tests import toy

    toy.register()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(distributed, "start", lambda *args, preemptible: None)
    monkeypatch.setattr(writers, "set_up_logging", lambda: None)

    def run(*args: str) -> str | None:
        monkeypatch.setattr(sys, "argv", ["aodiff", *args])
        flags.FLAGS.unparse_flags()
        try:
            main.main(main.parse(sys.argv))
        except SystemExit as e:
            assert "\n" not in e.code
            return e.code
        finally:
            for name in [f for f in flags.FLAGS if f.startswith("config.")]:
                delattr(flags.FLAGS, name)
        return None

    return run

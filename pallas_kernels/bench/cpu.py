"""Times attention on a CPU: blocked against dense XLA, causal, two streams.

The two are timed in turns and the shortest time counts, so that other users of the machine disturb
both alike; CPU seconds of all threads stand beside the wall-clock ones.

A third of the CPU time of dense attention is page faults, as its scratch memory is mapped anew at
every call. These variables of glibc make a process keep what it freed, as training here does:
MALLOC_MMAP_MAX_=0 MALLOC_ARENA_MAX=1 MALLOC_TRIM_THRESHOLD_=2147483647 MALLOC_TOP_PAD_=268435456
"""

import argparse
import functools
import json
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels import causal_streams, interval_attention

IMPLS = ("xla_dense", "xla_blocked")
BATCH, HEADS = 2, 4
ROUNDS = 9


def main(args: argparse.Namespace) -> None:
    """Prints a line per length of `args.lengths` and writes all figures to `args.out`."""
    print(
        f"Causal, two streams, batch {BATCH}, {HEADS} heads of {args.dim}, {args.dtype}; "
        f"{_cores()} cores, load {os.getloadavg()[0]:.1f}; best of {ROUNDS}, in turns.\n"
        f"{'':6}{'forward ms':>22}{'forward+backward ms':>29}{'CPU ms':>23}{'scratch MB':>20}"
        f"{'compile s':>14}"
    )
    head = f"{'dense':>9}{'blocked':>8}"
    print(f"{'L':>6}{head}{'ratio':>6}{head:>23}{'ratio':>6}{head}{'ratio':>6}{head:>20}{head:>14}")
    rows = []
    for length in map(int, args.lengths.split(",")):
        found = measure(length, args.dim, args.dtype)
        rows += found
        print(_line(length, {(r["impl"], r["way"]): r for r in found}), flush=True)
    document = {
        "jax": jax.__version__,
        "cores": _cores(),
        "load_average": os.getloadavg()[0],
        "batch": BATCH,
        "heads": HEADS,
        "dim": args.dim,
        "dtype": args.dtype,
        "rows": rows,
    }
    pathlib.Path(args.out).write_text(json.dumps(document, indent=1) + "\n")


def measure(length: int, dim: int, dtype: str, rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """Returns a row for every implementation and way at one length.

    A row has seconds and cpu_seconds (the shortest of `rounds` runs), compile_seconds and
    scratch_bytes beside length, impl and way.
    """
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(BATCH, HEADS, 2, length, dim)] * 2 + [(BATCH, HEADS, length, dim)] * 2
    q, do, k, v = (jax.random.normal(r, s, dtype) for r, s in zip(keys, shapes, strict=True))
    rows, runs = [], []
    for impl in IMPLS:
        attend = functools.partial(interval_attention, mask=causal_streams(length), impl=impl)
        ways = {"forward": (attend, q, k, v), "both": (_with_gradients(attend), do, q, k, v)}
        for way, (function, *operands) in ways.items():
            begin = time.perf_counter()
            compiled = jax.jit(function).lower(*operands).compile()
            row = {"length": length, "impl": impl, "way": way}
            row["compile_seconds"] = time.perf_counter() - begin
            row["scratch_bytes"] = compiled.memory_analysis().temp_size_in_bytes
            rows.append(row | {"seconds": float("inf"), "cpu_seconds": float("inf")})
            runs.append(functools.partial(compiled, *operands))
    for turn in range(rounds + 1):
        for row, run in zip(rows, runs, strict=True):
            wall, cpu = time.perf_counter(), time.process_time()
            jax.block_until_ready(run())
            if turn:  # the first is a warm-up
                row["seconds"] = min(row["seconds"], time.perf_counter() - wall)
                row["cpu_seconds"] = min(row["cpu_seconds"], time.process_time() - cpu)
    return rows


def _with_gradients(attend: Callable) -> Callable:
    def run(do, q, k, v):
        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(do)

    return run


def _line(length: int, found: dict[tuple[str, str], dict[str, Any]]) -> str:
    def pair(way, name, unit):
        return [found[impl, way][name] / unit for impl in IMPLS]

    text = f"{length:6}"
    for way, name in (("forward", "seconds"), ("both", "seconds"), ("both", "cpu_seconds")):
        dense, blocked = pair(way, name, 1e-3)
        text += f"{dense:9.1f}{blocked:8.1f}{dense / blocked:5.1f}x"
    dense, blocked = pair("both", "scratch_bytes", 1e6)
    return (
        text
        + f"{dense:12.1f}{blocked:8.1f}"
        + "{:6.1f}{:8.1f}".format(*pair("both", "compile_seconds", 1))
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0))

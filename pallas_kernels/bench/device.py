"""Times attention on the TPU at hand: own kernels, splash attention and dense XLA.

Written without a TPU and never run on one. The host's call overhead is in the times; compare with
cycles / clock of the static table at lengths where a call takes milliseconds.
"""

import argparse
import time
from collections.abc import Callable

import jax

from pallas_kernels import interval_attention
from pallas_kernels.bench.cases import HEADS, KINDS, visible_pairs
from pallas_kernels.bench.cost import PRODUCTS
from pallas_kernels.chips import CHIPS, generation_of

IMPLS = ("pallas", "splash", "xla_dense")
BATCH = 4
REPEATS = 20


def best_seconds(function: Callable, *arguments: jax.Array) -> float:
    """The shortest of several runs of a compiled function."""
    compiled = jax.jit(function).lower(*arguments).compile()
    jax.block_until_ready(compiled(*arguments))
    seconds = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def main(args: argparse.Namespace) -> None:
    """Prints one line per kind of mask, length and direction."""
    kind = jax.devices()[0].device_kind
    chip = CHIPS.get(generation_of(kind) or "")
    print(f"{kind}: milliseconds of a call, best of {REPEATS}; batch {BATCH}, {HEADS} heads")
    heads = "".join(f"{i:>11}" for i in IMPLS)
    print(f"{'kernel':28}{'L':>6}{heads}{'TFLOP/s':>9}{'peak':>6}")
    for name in args.kinds.split(","):
        for length in map(int, args.lengths.split(",")):
            for way in PRODUCTS:
                if name in KINDS:
                    print(_line(name, way, length, args.dim, args.dtype, chip), flush=True)


def _line(name: str, way: str, length: int, dim: int, dtype: str, chip) -> str:
    mask = KINDS[name].mask(length)
    batch = BATCH if mask.code is None else mask.code.shape[0]
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(batch, HEADS, mask.streams, length, dim)] * 2 + [(batch, HEADS, length, dim)] * 2
    q, do, k, v = (jax.random.normal(r, s, dtype) for r, s in zip(keys, shapes, strict=True))
    seconds = {}
    for impl in IMPLS:
        attend = lambda q, k, v, impl=impl: interval_attention(q, k, v, mask, impl=impl)
        both = lambda q, k, v, do, attend=attend: jax.vjp(attend, q, k, v)[1](do)
        try:
            run = (attend, q, k, v) if way == "forward" else (both, q, k, v, do)
            seconds[impl] = best_seconds(*run)
        except (ValueError, jax.errors.JaxRuntimeError):  # a mask it cannot do, or no memory
            seconds[impl] = float("nan")
    products = sum(n for w, n in PRODUCTS.items() if w == way or way == "backward")
    tflops = 2e-12 * products * dim * visible_pairs(mask) * batch * HEADS / seconds["pallas"]
    device_peak = chip and chip.peak_tflops * chip.cores_per_device / chip.cores
    label = f"{name} {'forward' if way == 'forward' else 'forward+backward'}"
    times = "".join(f"{1e3 * s:11.3f}" for s in seconds.values())
    return f"{label:28}{length:6}{times}{tflops:9.0f}" + (
        f"{tflops / device_peak:6.0%}" if device_peak else ""
    )

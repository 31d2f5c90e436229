"""Speed, as one JSON object with ratios measured in one run.

  python -m aodiff.tools.bench train_step [--shape=small] [--rounds=5]
  python -m aodiff.tools.bench attention [--rounds=5]
  python -m aodiff.tools.bench generate [--size=cpu] [--seq_len=1024]
  python -m aodiff.tools.bench decode [--size=wide] [--block=32]
  python -m aodiff.tools.bench order [--config=configs/ordergpt.py:digits] [--rounds=9]
  python -m aodiff.tools.bench flexmdm [--size=cpu] [--rounds=5]
  python -m aodiff.tools.bench flexmdm --size=owt --static --topology=v5e:2x2
  python -m aodiff.tools.bench pipeline

Other users of the machine disturb wall-clock times; CPU seconds and the load average stand beside
them, and the two sides of a ratio are timed in turns.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aodiff import accounting, optim, partitioning, state, steps
from aodiff.config import base, finalize
from aodiff.core import likelihood
from aodiff.data import bench as data_bench
from aodiff.data.pipeline import as_batch
from aodiff.methods.aogpt import AOGPTMethod
from aodiff.nn.aogpt import AOGPT, AOGPTConfig
from aodiff.tools.bench_decode import SIZES as DECODE_SIZES
from aodiff.tools.bench_decode import bench_decode
from aodiff.tools.bench_flexmdm import SIZES as FLEXMDM_SIZES
from aodiff.tools.bench_flexmdm import bench_flexmdm, bench_static
from aodiff.tools.bench_generate import SIZES, bench_generate
from aodiff.tools.bench_order import bench_order
from aodiff.tools.turns import take_turns

SHAPES = {
    "tiny": (AOGPTConfig(128, 16, num_layers=2, width=32, num_heads=2, cond_dim=16), 4),
    "bytes": (AOGPTConfig(256, 256, num_layers=6, width=384, num_heads=6), 8),
    "small": (AOGPTConfig(50304, 1024, num_layers=12, width=768, num_heads=12), 1),
}


def bench_train_step(shape: str, rounds: int) -> dict[str, Any]:
    """Times the real training step of an AO-GPT against the plain PyTorch one, float32, no EMA.

    Args:
      shape: a key of `SHAPES`.
      rounds: timed steps of each side, taken in turns after one warm-up; medians are reported.

    Returns:
      For "aodiff" and, where torch is installed, "torch": seconds, cpu_seconds, tokens_per_second;
      `ratio` = torch seconds / aodiff seconds (above 1: aodiff is faster) and the loss of both
      on the same weights, tokens and orders, which shows that they compute the same thing.
    """
    cfg, batch = SHAPES[shape]
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, cfg.vocab_size, (batch, cfg.seq_len)).astype(np.int32)
    order = np.stack([rng.permutation(cfg.seq_len) for _ in range(batch)]).astype(np.int32)
    result = {
        "shape": f"L{cfg.num_layers} d{cfg.width} n{cfg.seq_len} V{cfg.vocab_size} batch {batch}",
        "device": jax.devices()[0].device_kind,
        "cores": len(os.sched_getaffinity(0)),
        "load_average_before": os.getloadavg()[0],
    }
    run, params, compile_seconds = _our_step(cfg, batch, tokens)
    sides = {"aodiff": run}
    result["parameters"] = accounting.count_params(params)
    if importlib.util.find_spec("torch") is not None:
        result["loss"] = {"aodiff": _our_loss(cfg, params, tokens, order)}
        sides["torch"], result["loss"]["torch"] = _torch_step(cfg, params, tokens, order)
    del params
    seconds = take_turns(sides, rounds)
    for name, (wall, cpu) in seconds.items():
        result[name] = {
            "seconds": wall,
            "cpu_seconds": cpu,
            "tokens_per_second": batch * cfg.seq_len / wall,
        }
    result["aodiff"]["compile_seconds"] = compile_seconds
    if "torch" in sides:
        result["ratio"] = seconds["torch"][0] / seconds["aodiff"][0]
        result["cpu_ratio"] = seconds["torch"][1] / seconds["aodiff"][1]
    return result | {"load_average_after": os.getloadavg()[0]}


def bench_attention(rounds: int) -> dict[str, Any]:
    """Times the training step of small models of 1024 tokens with blocked and dense attention.

    Returns:
      For every injection and attention seconds, cpu_seconds and the loss of the first step, and per
      injection `ratio` = dense seconds / blocked seconds (above 1: blocked is faster), `cpu_ratio`.
    """
    cfg, batch = AOGPTConfig(256, 1024, num_layers=3, width=256, num_heads=4), 2
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, cfg.vocab_size, (batch, cfg.seq_len)).astype(np.int32)
    result: dict[str, Any] = {"load_average_before": os.getloadavg()[0]}
    for injection in ("adaln", "two_stream"):
        sides = {
            attention: _our_step(
                dataclasses.replace(cfg, injection=injection, attention=attention), batch, tokens
            )[0]
            for attention in ("xla_dense", "xla_blocked")
        }
        losses = {attention: run() for attention, run in sides.items()}
        seconds = take_turns(sides, rounds)
        result[injection] = {
            attention: {"seconds": wall, "cpu_seconds": cpu, "loss": losses[attention]}
            for attention, (wall, cpu) in seconds.items()
        }
        dense, blocked = seconds["xla_dense"], seconds["xla_blocked"]
        result[injection]["ratio"] = dense[0] / blocked[0]
        result[injection]["cpu_ratio"] = dense[1] / blocked[1]
    return result | {"load_average_after": os.getloadavg()[0]}


def _our_step(
    cfg: AOGPTConfig, batch: int, tokens: np.ndarray
) -> tuple[Callable[[], float], Any, float]:
    """A function that makes one step and returns its loss, initial parameters, compile seconds."""
    method = AOGPTMethod(AOGPT(cfg), "uniform", 1000, native=tuple(range(cfg.seq_len)))
    c = base("aogpt")
    c.optim.ema_decay, c.eval.params, c.sample.params = 0.0, "raw", "raw"
    c = finalize(c)
    mesh = partitioning.make_mesh(devices=jax.devices()[:1])
    mask = optim.decay_mask(state.abstract_params(method))
    tx = optim.make_optimizer(c.optim, 1000, mask)
    abstract = state.abstract_state(method, tx, False, mesh)
    now = state.init_state(method, tx, False, abstract, seed=0)
    params = jax.tree.map(np.asarray, now.params)  # a copy: the step donates its state
    step = steps.make_train_step(method, tx, 1, 0.0)
    begin = time.perf_counter()
    compiled = steps.compile_train_step(step, abstract, method.batch_spec(batch), mesh)
    seconds = time.perf_counter() - begin
    rows = as_batch({"tokens": tokens}, np.arange(batch))
    rows = jax.device_put(rows, partitioning.batch_sharding(mesh))
    seed = jnp.uint32(0)

    def run() -> float:
        nonlocal now
        now, metrics = compiled(now, rows, seed)
        return float(metrics["loss"].value())

    return run, params, seconds


def _our_loss(cfg: AOGPTConfig, params: Any, tokens: np.ndarray, order: np.ndarray) -> float:
    def loss(params, tokens, order):
        return jnp.mean(likelihood.slot_nll(AOGPT(cfg).apply(params, tokens, order), tokens, order))

    return float(jax.jit(loss)(params, tokens, order))


def _torch_step(
    cfg: AOGPTConfig, params: Any, tokens: np.ndarray, order: np.ndarray
) -> tuple[Callable[[], float], float]:
    """The same for PyTorch with the same initial weights, and its loss before the first step."""
    import torch  # heavy, and absent from the base install

    from aodiff.tools import aogpt_weights, bench_torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    shape = bench_torch.Shape(
        cfg.num_layers, cfg.width, cfg.num_heads, cfg.seq_len, cfg.padded_vocab, cfg.cond_dim
    )
    model = bench_torch.AOGPTTorch(shape)
    bench_torch.load(model, aogpt_weights.to_reference(params, cfg))
    o = base("aogpt").optim
    step = bench_torch.TorchStep(model, o.lr, o.weight_decay, o.clip_global_norm)
    with torch.no_grad():
        loss = float(step.loss(tokens, order))
    return lambda: step.run(tokens, order), loss


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m aodiff.tools.bench", description=__doc__)
    what = parser.add_subparsers(dest="what", required=True)
    train = what.add_parser("train_step")
    train.add_argument("--shape", choices=SHAPES, default="bytes")
    train.add_argument("--rounds", type=int, default=5)
    attention = what.add_parser("attention")
    attention.add_argument("--rounds", type=int, default=5)
    generation = what.add_parser("generate")
    generation.add_argument("--size", choices=SIZES, default="cpu")
    generation.add_argument("--seq_len", type=int, default=1024)
    generation.add_argument("--steps", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    generation.add_argument("--repeats", type=int, default=5)
    decoding = what.add_parser("decode")
    decoding.add_argument("--size", choices=DECODE_SIZES, default="wide")
    decoding.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    decoding.add_argument("--block", type=int, default=32)
    decoding.add_argument("--steps", type=int, default=32)
    decoding.add_argument("--rounds", type=int, default=5)
    order = what.add_parser("order")
    order.add_argument("--config", default="base", help="base, or a file of configs/ with :preset")
    order.add_argument("--rounds", type=int, default=9)
    flexmdm = what.add_parser("flexmdm")
    flexmdm.add_argument("--size", choices=FLEXMDM_SIZES, default="cpu")
    flexmdm.add_argument("--rounds", type=int, default=5)
    flexmdm.add_argument("--static", action="store_true", help="compile for a TPU, run nothing")
    flexmdm.add_argument("--topology", default="v5e:2x2")
    what.add_parser("pipeline")
    args = parser.parse_args()
    if args.what == "train_step":
        result = bench_train_step(args.shape, args.rounds)
    elif args.what == "attention":
        result = bench_attention(args.rounds)
    elif args.what == "decode":
        result = bench_decode(args.size, tuple(args.batches), args.block, args.steps, args.rounds)
    elif args.what == "flexmdm" and args.static:
        result = bench_static(args.size, args.topology)
    elif args.what == "flexmdm":
        result = bench_flexmdm(args.size, args.rounds)
    elif args.what == "order":
        result = bench_order(args.config, args.rounds)
    elif args.what == "generate":
        load = os.getloadavg()[0]
        result = bench_generate(args.size, args.seq_len, tuple(args.steps), repeats=args.repeats)
        result |= {"load_average_before": load, "load_average_after": os.getloadavg()[0]}
    else:
        result = data_bench.run(rows=8192, seconds=1.0)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

"""Decoding of masked diffusion: the jitted loop against the loop that PyTorch code is published as.

Both sides have the same weights, cores and rules (LLaDA's: blocks, confidence, as many tokens a
step), and greedy decoding writes the same tokens. With Fast-dLLM's dual cache, an approximation, it
does not, and is timed against the loop without. Source: decoding.md 6.1 and 7.2.
"""

import functools
import os
import time
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from aodiff.nn.attention import KVCache
from aodiff.nn.mdm import MDM
from aodiff.nn.mdm_config import MDMConfig
from aodiff.sampling.cache import Cached
from aodiff.sampling.denoise import Decoder, decode
from aodiff.tools.turns import take_turns

SIZES = {
    "tiny": dict(num_layers=2, width=32, num_heads=2, vocab_size=16, seq_len=16),
    "small": dict(num_layers=4, width=128, num_heads=4, vocab_size=256, seq_len=256),
    "wide": dict(num_layers=4, width=256, num_heads=4, vocab_size=256, seq_len=256),
    "subwords": dict(num_layers=4, width=256, num_heads=4, vocab_size=8192, seq_len=256),
}


def bench_decode(
    size: str, batches: tuple[int, ...], block: int, steps: int, rounds: int
) -> dict[str, Any]:
    """Times whole decodes from nothing, greedy and sampled, both sides in turns.

    Args:
      size: a key of `SIZES`.
      batches: numbers of rows.
      block: positions of a block; the whole row is no blocks.
      steps: network calls of a row.
      rounds: timed decodes of each side after one warm-up; medians are reported.

    Returns:
      The shape, and for every batch and temperature what `_race` finds; where tokens are greedy,
      "cache" is the race of decoding with a cache that blocks renew once against it without.
    """
    import torch  # heavy, and absent from the base install

    from aodiff.tools import bench_torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    # A larger deviation than the initial one, so that the predictions of the positions differ.
    cfg = MDMConfig(kernel_std=0.1, qk_norm=True, attention="xla_dense", **SIZES[size])
    blank = jnp.zeros((1, cfg.seq_len), jnp.int32)
    params = nn.unbox(jax.jit(MDM(cfg).init)(jax.random.key(0), blank))
    theirs = bench_torch.MDMTorch(cfg, jax.tree.map(np.array, params["params"]))

    def torch_tokens(batch: int, temperature: float) -> np.ndarray:
        masked = torch.full((batch, cfg.seq_len), cfg.mask)
        return bench_torch.decode(theirs, masked, cfg.mask, block, steps, temperature).numpy()

    result: dict[str, Any] = {
        "shape": f"L{cfg.num_layers} d{cfg.width} n{cfg.seq_len} V{cfg.vocab_size}",
        "block": block,
        "steps": steps,
        "device": jax.devices()[0].device_kind,
        "cores": len(os.sched_getaffinity(0)),
        "load_average_before": os.getloadavg()[0],
        "runs": [],
    }
    for batch in batches:
        for temperature in (0.0, 1.0):
            compiled, seconds = _compile(cfg, params, batch, block, steps, temperature)
            run = {"batch": batch, "temperature": temperature, "compile_seconds": seconds}
            sides = {
                "aodiff": compiled,
                "torch": functools.partial(torch_tokens, batch, temperature),
            }
            run |= _race(sides, batch * cfg.seq_len, rounds)
            if temperature == 0:
                cached, _ = _compile(cfg, params, batch, block, steps, temperature, refresh=steps)
                sides = {"cached": cached, "aodiff": compiled}
                run["cache"] = _race(sides, batch * cfg.seq_len, rounds)
            result["runs"].append(run)
    return result | {"load_average_after": os.getloadavg()[0]}


def _compile(
    cfg: MDMConfig,
    params: Any,
    batch: int,
    block: int,
    steps: int,
    temperature: float,
    refresh: int = 0,
) -> tuple[Callable[[], np.ndarray], float]:
    """A function that decodes and returns the tokens, and the seconds that compiling took."""
    model, blocks = MDM(cfg), cfg.seq_len // block
    decoder = Decoder("confidence", "linear", steps // blocks, block, refresh=refresh)
    decoder.check(cfg.seq_len)
    blank = jnp.zeros((batch, cfg.seq_len), jnp.int32)
    keys = jax.random.split(jax.random.key(1), batch)

    def predict(*args: Any) -> jax.Array:
        return model.apply(*args)[..., : cfg.vocab_size]  # the head has columns of padding

    def look(shown: jax.Array, length: jax.Array, at: jax.Array, cache: KVCache):
        logits, cache = model.apply(params, shown, cache, at, method="cached")
        return logits[..., : cfg.vocab_size], cache

    def run(params: Any, keys: jax.Array, tokens: jax.Array) -> jax.Array:
        return decode(
            lambda shown, length: predict(params, shown),
            keys,
            tokens,
            jnp.zeros_like(tokens, bool),
            decoder,
            denoise_at=lambda shown, length, at: predict(params, shown, None, at),
            cached=Cached(lambda shown, length: model.apply(params, shown, method="keep"), look),
            mask_id=cfg.mask,
            temperature=temperature,
        ).tokens

    begin = time.perf_counter()
    compiled = jax.jit(run).lower(params, keys, blank).compile()
    seconds = time.perf_counter() - begin
    return lambda: np.asarray(compiled(params, keys, blank)), seconds


def _race(sides: dict[str, Callable[[], np.ndarray]], tokens: int, rounds: int) -> dict[str, Any]:
    """Two sides in turns.

    Returns:
      For each side seconds, cpu_seconds and tokens_per_second; ratio = seconds of the second /
      seconds of the first (above 1: the first is faster) and cpu_ratio; same_tokens, the share of
      equal tokens (1 where both are exact and greedy, up to ties).
    """
    times = take_turns(sides, rounds)
    first, second = sides
    result: dict[str, Any] = {
        name: {"seconds": wall, "cpu_seconds": cpu, "tokens_per_second": tokens / wall}
        for name, (wall, cpu) in times.items()
    }
    for i, name in enumerate(("ratio", "cpu_ratio")):
        result[name] = times[second][i] / times[first][i]
    return result | {"same_tokens": float(np.mean(sides[first]() == sides[second]()))}

"""Generation speed: cached any-order decoding against a bidirectional model of the same blocks.

A masked-diffusion sampler runs its whole encoder at each of S steps, S * n rows per sample. The
cached decoder feeds every token once as content and asks for it once by a probe, about 2 n rows
whatever S is. Source: aogpt.md 8.7.
"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from aodiff import rng
from aodiff.core import categorical
from aodiff.nn.aogpt import AOGPT, AOGPTConfig
from aodiff.nn.attention import Rows
from aodiff.nn.layers import Norm, along_last, normal_init, param
from aodiff.nn.transformer import layers
from aodiff.sampling.anyorder import generate
from aodiff.sampling.schedule import reveal_schedule
from pallas_kernels import length_mask

SIZES = {
    "tiny": dict(num_layers=1, width=16, num_heads=2, vocab_size=32),
    "cpu": dict(num_layers=4, width=128, num_heads=4, vocab_size=256),
    "small": dict(num_layers=12, width=768, num_heads=12, vocab_size=50257, dtype="bfloat16"),
    "medium": dict(num_layers=24, width=1024, num_heads=16, vocab_size=50257, dtype="bfloat16"),
}


class Bidirectional(nn.Module):
    """The decoder's blocks without causal mask and target condition: a masked-diffusion encoder.

    What it lacks, AdaLN and logits at positions that a step does not reveal, is in its favour.
    """

    cfg: AOGPTConfig

    @nn.compact
    def __call__(self, tokens: jax.Array, reveal: jax.Array) -> jax.Array:
        """tokens (B, n) int32, `vocab_size` where masked; reveal (B, r) -> logits (B, r, V) f32."""
        cfg, dtype = self.cfg, jnp.dtype(self.cfg.dtype)
        init = normal_init(0.02)
        shape = (cfg.vocab_size + 1, cfg.width)
        table = param(self, "tok", init, shape, (None, "embed")).astype(dtype)
        position = param(self, "pos", init, (cfg.seq_len, cfg.width), (None, "embed"))
        x = table[tokens] + position.astype(dtype)[None]
        lengths = jnp.full(tokens.shape[0], cfg.seq_len)
        rows = Rows(length_mask(lengths, cfg.seq_len), target=reveal, keys=cfg.seq_len)
        x, _ = layers(cfg, name="blocks")(x, rows, None)
        x = jnp.take_along_axis(x, reveal[..., None], axis=1)
        z = Norm(cfg.norm, name="norm")(x).astype(dtype)
        head = param(self, "head", init, (cfg.width, cfg.vocab_size), ("embed", None))
        bias = param(self, "bias", nn.initializers.zeros, (cfg.vocab_size,), (None,))
        out = jnp.dot(z, head.astype(dtype), preferred_element_type=jnp.float32)
        return out + along_last(bias, 3)


def bench_generate(
    size: str = "cpu",
    seq_len: int = 1024,
    steps: tuple[int, ...] = (64, 128, 256, 512, 1024),
    batch: int = 1,
    repeats: int = 5,
    full_calls: int = 16,
) -> dict[str, Any]:
    """Times unconditional generation, linear schedule, uniform order, untrained weights.

    Args:
      size: a key of `SIZES`.
      seq_len: n.
      steps: network calls of each run; the schedule reveals n / S tokens per call.
      batch: rows generated together.
      repeats: timed runs after one warm-up; medians are reported.
      full_calls: the bidirectional model repeats one call of constant cost, so at most this many
        of its S calls are run and the time is scaled to S.

    Returns:
      device, shape, and per S: seconds (median, s) and compile_seconds of both models, rows each
      feeds to its blocks per sample, tokens per second, calls timed, and the ratio of seconds.

    Raises:
      ValueError: unknown size or steps outside 1..seq_len.
    """
    if size not in SIZES:
        raise ValueError(f"Unknown size {size!r}; use one of: {', '.join(SIZES)}.")
    cfg = AOGPTConfig(seq_len=seq_len, **SIZES[size])
    order = np.stack([np.random.default_rng(i).permutation(seq_len) for i in range(batch)])
    order = jnp.asarray(order, jnp.int32)
    cached = AOGPT(cfg)
    blank = jnp.zeros((1, seq_len), jnp.int32)
    cached_params = jax.jit(cached.init)(jax.random.key(0), blank, order[:1])
    full = Bidirectional(cfg)
    full_params = jax.jit(full.init)(jax.random.key(0), blank, order[:1, :1])
    runs = []
    for s in steps:
        revealed = reveal_schedule(seq_len, s, "linear")
        calls = min(s, full_calls)
        ours = _time(functools.partial(_cached, cached, order, s), cached_params, batch, repeats)
        theirs = _time(
            functools.partial(_full, full, order, revealed[:calls]), full_params, batch, repeats
        )
        theirs["seconds"] *= s / calls
        width = int(np.diff(revealed, prepend=0).max())
        rows = {"cached": s * 2 * width, "bidirectional": s * seq_len}
        run = {"steps": s, "bidirectional_calls_timed": calls}
        for name, timed in (("cached", ours), ("bidirectional", theirs)):
            speed = batch * seq_len / timed["seconds"]
            run[name] = timed | {"rows": rows[name], "tokens_per_second": speed}
        runs.append(run | {"ratio": theirs["seconds"] / ours["seconds"]})
    shape = {"size": size, "seq_len": seq_len, "batch": batch, **SIZES[size]}
    return {
        "device": jax.devices()[0].device_kind,
        "shape": shape,
        "repeats": repeats,
        "runs": runs,
    }


def _time(fn: Callable, params: Any, batch: int, repeats: int) -> dict[str, float]:
    """Compile time and median run time of fn(params, keys (batch,)), in seconds."""

    def keys(i):
        return jax.random.split(jax.random.fold_in(jax.random.key(1), i), batch)

    start = time.perf_counter()
    compiled = jax.jit(fn).lower(params, keys(0)).compile()
    compile_seconds = time.perf_counter() - start
    times = []
    for i in range(repeats + 1):
        row_keys = jax.block_until_ready(keys(i))
        start = time.perf_counter()
        jax.block_until_ready(compiled(params, row_keys))
        times.append(time.perf_counter() - start)
    return {"seconds": statistics.median(times[1:]), "compile_seconds": compile_seconds}


def _cached(model, order, steps, params, keys):
    blank = jnp.zeros_like(order)
    return generate(
        model, params, keys, blank, blank.astype(bool), order, steps=steps, max_given=0
    ).tokens


def _full(model, order, revealed, params, keys):
    """The first len(revealed) steps of masked diffusion: a full forward, then some positions."""
    n = order.shape[1]
    width = int(np.diff(revealed, prepend=0).max())
    row = jnp.arange(len(order))[:, None]

    def step(tokens, bounds):
        at = bounds[0] + jnp.arange(width)
        position = jnp.take(order, jnp.minimum(at, n - 1), axis=1)
        drawn_keys = rng.cell_keys(keys, position)
        drawn = categorical.sample(drawn_keys, model.apply(params, tokens, position), 1.0, 1.0)
        target = jnp.where((at < bounds[1])[None], position, n)  # n is dropped
        return tokens.at[row, target].set(drawn, mode="drop"), None

    bounds = np.stack([np.append(0, revealed[:-1]), revealed], axis=1)
    masked = jnp.full_like(order, model.cfg.vocab_size)
    return jax.lax.scan(step, masked, jnp.asarray(bounds))[0]

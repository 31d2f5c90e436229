"""Decoding of masked diffusion: the jitted loop against the loop that PyTorch code is published as.

Both sides have the same weights, cores and rules (LLaDA's: confidence, as many tokens a step), and
greedy decoding writes the same tokens. Source: decoding.md 6.1.
"""

import os
import time
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from aodiff.nn.mdm import MDM, MDMConfig
from aodiff.sampling.denoise import Decoder, decode
from aodiff.tools.turns import take_turns

SIZES = {
    "tiny": dict(num_layers=2, width=32, num_heads=2, vocab_size=16, seq_len=16),
    "small": dict(num_layers=4, width=128, num_heads=4, vocab_size=256, seq_len=256),
    "wide": dict(num_layers=4, width=256, num_heads=4, vocab_size=256, seq_len=256),
}


def bench_decode(size: str, batch: int, steps: int, temperature: float, rounds: int) -> dict:
    """Times whole decodes of `batch` rows from nothing, one after the other.

    Args:
      size: a key of `SIZES`.
      steps: network calls.
      temperature: of the tokens; 0 is greedy.
      rounds: timed decodes of each side, taken in turns after one warm-up; medians are reported.

    Returns:
      For "aodiff" and "torch": seconds, cpu_seconds and tokens_per_second; compile_seconds, which
      are not in these; ratio = torch seconds / aodiff seconds (above 1: aodiff is faster) and
      cpu_ratio; same_tokens, the share of equal tokens (greedy: 1 up to ties).
    """
    import torch  # heavy, and absent from the base install

    from aodiff.tools import bench_torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    # More than the initial deviation, so that the predictions of the positions differ.
    cfg = MDMConfig(kernel_std=0.1, qk_norm=True, **SIZES[size])
    model, n = MDM(cfg), cfg.seq_len
    params = nn.unbox(jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, n), jnp.int32)))
    decoder = Decoder("confidence", "linear", steps)

    def ours(params, keys):
        blank = jnp.zeros((batch, n), jnp.int32)
        denoise = lambda tokens, length: model.apply(params, tokens)
        given = blank.astype(bool)
        return decode(
            denoise, keys, blank, given, decoder, mask_id=cfg.mask, temperature=temperature
        ).tokens

    keys = jax.random.split(jax.random.key(1), batch)
    begin = time.perf_counter()
    compiled = jax.jit(ours).lower(params, keys).compile()
    seconds = time.perf_counter() - begin
    theirs = bench_torch.MDMTorch(cfg, jax.tree.map(np.array, params["params"]))
    found = {}

    def run_ours() -> None:
        found["aodiff"] = np.asarray(compiled(params, keys))

    def run_theirs() -> None:
        masked = torch.full((batch, n), cfg.mask)
        found["torch"] = bench_torch.decode(theirs, masked, cfg.mask, steps, temperature).numpy()

    times = take_turns({"aodiff": run_ours, "torch": run_theirs}, rounds)
    result: dict[str, Any] = {"batch": batch, "steps": steps, "temperature": temperature}
    for name, (wall, cpu) in times.items():
        speed = batch * n / wall
        result[name] = {"seconds": wall, "cpu_seconds": cpu, "tokens_per_second": speed}
    result["compile_seconds"] = seconds
    result["ratio"] = times["torch"][0] / times["aodiff"][0]
    result["cpu_ratio"] = times["torch"][1] / times["aodiff"][1]
    result["same_tokens"] = float(np.mean(found["aodiff"] == found["torch"]))
    return result

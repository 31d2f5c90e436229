"""Does cached decoding equal the full forward? A check for a new model, device or dtype."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aodiff.sampling.anyorder import feed
from aodiff.sampling.schedule import reveal_schedule


def verify_cache(
    model: Any, params: Any, tokens: jax.Array, order: jax.Array, steps: int
) -> dict[str, float]:
    """Feeds known tokens through every cached path and compares with one full forward.

    Args:
      model: an `AOGPT`.
      params: variables for `model.apply`.
      tokens: (B, n) int32 in natural order.
      order: (B, n) int32 permutations.
      steps: calls of the parallel run, linear schedule.

    Returns:
      Largest absolute differences. Expect about 1e-5 in float32 and 1e-1 in bfloat16.
      sequential_logits: one slot per call, every slot against the full forward.
      prefill_logits: all slots in one cached call, the last slot against the full forward.
      parallel_logits: a parallel run, the first target of every call against the full forward.
      sequential_cache, parallel_cache: keys and values left by those runs against the prefill's.

    Source: aogpt.md 8.1 and 14.8.
    """
    n = order.shape[1]
    full = jax.jit(model.apply)(params, tokens, order)
    one_call = np.array([0, n])
    prefill, whole = _forced_run(model, params, tokens, order, one_call)
    each_slot = np.arange(n + 1)
    sequential, sequential_cache = _forced_run(model, params, tokens, order, each_slot)
    groups = np.concatenate([[0, 1], 1 + reveal_schedule(n, steps, "linear")[:-1]])
    parallel, parallel_cache = _forced_run(model, params, tokens, order, groups)
    # The tokens of the last call are nobody's context and never fed.
    first_slots = jax.tree.map(lambda c: c[:, :, :, : groups[-1]], whole)
    return {
        "sequential_logits": _difference(sequential, full),
        "prefill_logits": _difference(prefill, full[:, -1:]),
        "parallel_logits": _difference(parallel, full[:, groups[1:] - 1]),
        "sequential_cache": _difference(sequential_cache, whole),
        "parallel_cache": _difference(parallel_cache, first_slots),
    }


def _forced_run(model, params, tokens, order, bounds):
    """Feeds slots bounds[i] .. bounds[i + 1] - 1 in call i.

    Returns:
      logits (B, calls, V) of the target after the last slot of each call, and the cache cut to the
      slots that were fed. As in sampling, every call also carries probes for later targets.
    """
    width = int(np.diff(bounds).max())
    return _run(model, params, tokens, order, jnp.asarray(bounds), width, int(bounds[-1]))


@functools.partial(jax.jit, static_argnums=(0, 5, 6))
def _run(model, params, tokens, order, bounds, width, length):
    batch = tokens.shape[0]

    def call(cache, bound):
        first, count = (jnp.full(batch, x) for x in (bound[0], bound[1] - bound[0]))
        logits, cache = feed(model, params, tokens, order, cache, first, count, width, width)
        return cache, logits[:, 0]

    cache = model.init_cache(batch, length + width)
    cache, logits = jax.lax.scan(call, cache, jnp.stack([bounds[:-1], bounds[1:]], axis=1))
    cache = jax.tree.map(lambda c: c[:, :, :, :length], cache)
    return jnp.swapaxes(logits, 0, 1), cache


def _difference(a, b) -> float:
    """Largest absolute difference over all leaves."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(jnp.max(jnp.abs(x.astype(jnp.float32) - y))) for x, y in pairs)

"""What knowing lengths and predicting masks alone save a model that inserts, against padding.

The three sides of a training step compute the same loss of the same rows (the padded one lets rows
see what comes after them, as a model without lengths would): all slots in attention and in the
head; only live slots in attention; and only masked slots in the head as well (flexmdm.md 3.7, 5.3).
Sampling has the last two sides, with and without widths that grow with the rows.
"""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from aodiff import accounting, partitioning, rng
from aodiff.core.insertion import most_masked
from aodiff.core.schedules import make_rise
from aodiff.data.pipeline import as_batch
from aodiff.methods.base import Params
from aodiff.methods.flexmdm import FlexMDMMethod
from aodiff.nn.flexmdm import FlexMDM, FlexMDMConfig, Prediction
from aodiff.sampling import flexible
from aodiff.tools import topologies
from aodiff.tools.environment import WITHOUT_TPU
from aodiff.tools.turns import take_turns

# Shape of the model, slots, rows of a training batch and of a sampling batch, calls of a sample.
SIZES = {
    "tiny": (dict(num_layers=1, width=16, num_heads=2, vocab_size=32), 32, 4, 4, 8),
    "cpu": (dict(num_layers=4, width=128, num_heads=4, vocab_size=257), 512, 8, 8, 64),
    "words": (dict(num_layers=2, width=256, num_heads=4, vocab_size=50257), 1024, 1, 1, 64),
    "owt": (dict(num_layers=12, width=768, num_heads=12, vocab_size=50257), 1024, 16, 16, 1024),
}
RISES = "power(1.7)", "power(2.89)"


class Padded(FlexMDMMethod):
    """A model whose rows see all slots."""

    def predict(
        self, params: Params, tokens: jax.Array, length: jax.Array, *rest: jax.Array | None
    ) -> Prediction:
        return super().predict(params, tokens, jnp.full_like(length, tokens.shape[1]), *rest)


def bench_flexmdm(size: str, rounds: int) -> dict[str, Any]:
    """Times training steps (loss and gradient) and samples of whole rows, float32.

    Args:
      size: a key of `SIZES`.
      rounds: timed runs of each side, taken in turns after one warm-up; medians are reported.

    Returns:
      By "train" and "sample" and side: seconds, cpu_seconds, and ratio and cpu_ratio, those of the
      first side over those of this one (above 1: this one is faster); and the expected work.
    """
    shape, slots, batch, rows, calls = SIZES[size]
    cfg = FlexMDMConfig(capacity=slots, kernel_std=0.05, **shape)
    sides, few = make_sides(cfg)
    params = partitioning.unbox(jax.jit(sides["padded"].init)(jax.random.key(0)))
    result = {
        "shape": f"L{cfg.num_layers} d{cfg.width} slots {slots} V{cfg.vocab_size}",
        "device": jax.devices()[0].device_kind,
        "cores": len(os.sched_getaffinity(0)),
        "parameters": accounting.count_params(params),
        "load_average_before": os.getloadavg()[0],
        "logits of slots": {"all": slots, "masks alone": few},
        "expected attention": expected_attention(make_rise(RISES[0])),
    }
    tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, (batch, slots - 1))
    data = jax.tree.map(jnp.asarray, as_batch({"tokens": tokens}, np.arange(batch)))
    steps = {name: training(method, params, data) for name, method in sides.items()}
    result["train"] = {"rows": batch} | _race(steps, rounds)
    widths = tuple(slots * k // 4 for k in (1, 2, 3))
    ways = {"lengths": (None, ()), "masks alone": (few, ()), "and widths": (few, widths)}
    samplers = {
        name: sampling(sides["lengths"], params, rows, calls, *way) for name, way in ways.items()
    }
    result["sample"] = {"rows": rows, "calls": calls} | _race(samplers, rounds)
    return result | {"load_average_after": os.getloadavg()[0]}


def make_sides(cfg: FlexMDMConfig) -> tuple[dict[str, FlexMDMMethod], int]:
    """The sides of a training step by name, and most masks of a row."""
    rises, n = [make_rise(spec) for spec in RISES], cfg.capacity - 1
    few = most_masked(*rises, n)
    method = FlexMDMMethod(FlexMDM(cfg), n, *rises)
    return {
        "padded": Padded(FlexMDM(cfg), n, *rises),
        "lengths": method,
        "lengths, masks alone": dataclasses.replace(method, most=few),
    }, few


def bench_static(size: str, topology: str) -> dict[str, Any]:
    """What the compiler says of a training step on one device of a TPU that is not attached.

    Blocks stand in a loop that the compiler's cost counts once, so the step is of one block, to
    which attention adds nothing but its operands: of kernels the compiler knows no cost. What
    lengths save there: `python -m pallas_kernels.bench --static --kinds=full_length,uniform_length`
    for a linear insertion schedule.

    Args:
      size: a key of `SIZES`; of bfloat16.
      topology: such as "v5e:2x2".

    Raises:
      ConfigError: libtpu is absent, or does not know the topology.
    """
    os.environ.update({k: os.environ.get(k, v) for k, v in WITHOUT_TPU.items()})
    slice_ = topologies.parse(topology)
    mesh = partitioning.make_mesh(devices=topologies.devices(slice_)[:1])
    shape, slots, batch, *_ = SIZES[size]
    cfg = FlexMDMConfig(capacity=slots, **shape | {"num_layers": 1, "dtype": "bfloat16"})
    sides, few = make_sides(cfg)
    whole = NamedSharding(mesh, PartitionSpec())
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole)
    params = partitioning.unbox(jax.eval_shape(sides["padded"].init, jax.random.key(0)))
    result = {"device": slice_.name, "rows": batch, "logits of slots": dict(all=slots, few=few)}
    for name in ("lengths", "lengths, masks alone"):
        arguments = jax.tree.map(place, (params, sides[name].batch_spec(batch)))
        with jax.set_mesh(mesh):
            compiled = jax.jit(training_step(sides[name])).lower(*arguments).compile()
        cost = compiled.cost_analysis()
        parts = {"flops": "flops", "bytes": "bytes accessed"}
        result[name] = {key: cost[found] for key, found in parts.items()}
        result[name]["temporary_bytes"] = compiled.memory_analysis().temp_size_in_bytes
    a, b = (result[name] for name in ("lengths", "lengths, masks alone"))
    result["saved by masks alone"] = {key: 1 - b[key] / a[key] for key in a}
    return result


def expected_attention(insertion: Any) -> float:
    """Share of pairs of slots that are both there, for data as long as a row: E[alpha ** 2]."""
    alpha = np.asarray(insertion.value(jnp.linspace(0, 1, 10_001)))
    return float(np.mean(alpha**2))


def training(method: FlexMDMMethod, params: Params, batch: dict) -> Callable[[], jax.Array]:
    """A function that makes one loss and gradient, with times spread over the batch."""
    step = jax.jit(training_step(method))
    return lambda: jax.block_until_ready(step(params, batch))


def training_step(method: FlexMDMMethod) -> Callable[[Params, dict], jax.Array]:
    """Loss and gradient, summed up, of parameters and a batch."""

    def step(params: Params, batch: dict) -> jax.Array:
        drawn, _ = method.draw(rng.stream(0, rng.TRAIN), batch, jnp.int32(0), params, {})
        loss, slope = jax.value_and_grad(lambda p: method.loss_fn(p, drawn).loss.total)(params)
        return loss + sum(jnp.sum(x) for x in jax.tree.leaves(slope))

    return step


def sampling(
    method: FlexMDMMethod,
    params: Params,
    rows: int,
    calls: int,
    few: int | None,
    widths: tuple[int, ...],
) -> Callable[[], jax.Array]:
    """A function that writes rows about half as long as they may be."""
    cfg, rises = method.model.cfg, [make_rise(spec) for spec in RISES]
    inserter = flexible.Inserter(*rises, calls, stop=0.0, drain=1)

    def predict(*args: jax.Array) -> Prediction:
        """The network's tokens; counts that fill half a row, which new weights do not say."""
        out, (_, length, alpha, _) = method.predict(params, *args), args
        missing = jnp.log((1 - alpha + 1e-6) * cfg.capacity / 2) - jnp.log(length)
        return dataclasses.replace(out, gap=0 * out.gap + missing[:, None])

    @jax.jit
    def run() -> jax.Array:
        nothing = jnp.zeros((rows, cfg.capacity - 1), jnp.int32)
        keys = jax.random.split(jax.random.key(1), rows)
        fn = flexible.in_buckets(predict, widths)
        ids = dict(mask_id=cfg.mask, anchor=cfg.anchor, few=few)
        return flexible.sample(fn, keys, nothing, nothing > 0, inserter, **ids).tokens

    return lambda: jax.block_until_ready(run())


def _race(sides: dict[str, Callable[[], Any]], rounds: int) -> dict[str, dict[str, float]]:
    times = take_turns(sides, rounds)
    first = next(iter(times.values()))
    return {
        name: {
            "seconds": wall,
            "cpu_seconds": cpu,
            "ratio": first[0] / wall,
            "cpu_ratio": first[1] / cpu,
        }
        for name, (wall, cpu) in times.items()
    }

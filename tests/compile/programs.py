"""Compiles tiny training steps, and decoding by a cache, for a TPU slice; prints one JSON object.

Run by compile_check_test.py with the variables of aodiff.tools.environment, which must be set
before JAX starts: a program of its own and not part of the test process.
"""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from aodiff import methods, partitioning, rng
from aodiff.config import base
from aodiff.data import DataInfo
from aodiff.nn.aogpt import INJECTIONS
from aodiff.tools import compile_check, hlo, topologies
from aodiff.tools.bench_flexmdm import bench_static


def tiny(method: str = "aogpt", **changes):
    """The smallest config that has every part: two layers, two microbatches, a sharded model."""
    c = base(method)
    small = {
        "data.name": "markov",
        "data.seq_len": 16,
        "model.num_layers": 2,
        "model.width": 32,
        "model.num_heads": 2,
        "train.global_batch": 16,
        "train.microbatches": 2,
        "mesh.model": 2,
    }
    c.update_from_flattened_dict(small | changes)
    return c


def rematerialization_is_seen() -> int:
    """Warnings caught for a resharding that XLA can only do by replicating the whole array."""
    devices = topologies.devices(topologies.parse("v5e:2x4"))
    mesh = Mesh(np.array(devices).reshape(4, 2), ("a", "b"))
    rows, columns = (NamedSharding(mesh, PartitionSpec(*s)) for s in (("a", None), (None, "b")))
    x = jax.ShapeDtypeStruct((64, 128), jnp.float32, sharding=rows)

    def f(x):
        x = jax.lax.with_sharding_constraint(x * 2, rows)
        return jax.lax.with_sharding_constraint(jnp.sin(x), columns)

    with compile_check.captured_stderr() as messages:
        jax.jit(f).lower(x).compile()
    return len(hlo.involuntary_rematerializations(messages()))


def decoding_by_a_cache() -> int:
    """Warnings of decoding with sharded parameters, rows and heads."""
    config = tiny("mdm", **{"model.position": "rope", "sample.block": 4, "sample.refresh": 2})
    method = methods.build(config, DataInfo("markov", 16, 8, "symbol"))
    devices = topologies.devices(topologies.parse("v5e:2x2"))
    mesh = topologies.make_mesh(devices, (1, 2, 2))
    boxed, rows = jax.eval_shape(method.init, jax.random.key(0)), partitioning.batch_sharding(mesh)
    params = jax.tree.map(
        lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at),
        partitioning.unbox(boxed),
        partitioning.param_shardings(boxed, mesh),
    )
    sampler = method.sampler(config, 0)

    def draw(params, ids, tokens, given):
        return sampler(params, {}, rng.example_keys(jax.random.key(0), ids), tokens, given)

    parts = ((8,), jnp.int32), ((8, 16), jnp.int32), ((8, 16), bool)
    with jax.set_mesh(mesh), compile_check.captured_stderr() as messages:
        jax.jit(draw).lower(
            params, *(jax.ShapeDtypeStruct(*part, sharding=rows) for part in parts)
        ).compile()
    return len(hlo.involuntary_rematerializations(messages()))


def main() -> None:
    cases = {name: {"model.injection": name, "model.cond_dim": 8} for name in INJECTIONS}
    cases["two_stream"] |= {"model.remat": "dots", "model.dtype": "bfloat16"}
    cases["input"] |= {"model.norm": "layer", "model.qk_norm": False, "model.tied_head": True}
    cases["every_layer_own"] |= {"model.remat": "full"}
    reports = {name: compile_check.check(tiny(**case), "v5e:2x2") for name, case in cases.items()}
    table = {"data.name": "digits", "data.seq_len": 64, "model.cond_dim": 8}
    board = {"data.name": "sudoku4", "data.clues": (12, 12), "model.position": "grid"}
    words = {"eval.orders": ("own",), "sample.steps": 4, "model.remat": "full"}
    others = {"ordergpt": table, "mdm": {"model.position": "rope"}, "sas": board, "flexmdm": words}
    for name, changes in others.items():
        reports[name] = compile_check.check(tiny(name, **changes), "v5e:2x2")
    inserting = tiny("flexmdm", **words | {"sample.buckets": (8,), "sample.batch": 4})
    reports["flexmdm samples"] = compile_check.check(inserting, "v5e:2x2", program="sample")
    out = {name: dataclasses.asdict(report) for name, report in reports.items()}
    found = {"reports": out, "warnings_caught": rematerialization_is_seen()}
    found |= {"bench": bench_static("tiny", "v5e:2x2"), "decoding": decoding_by_a_cache()}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()

"""Compiles attention for one TPU generation, alone and over a mesh; prints one JSON object.

Run by kernels_test.py with the variables of aodiff.tools.environment, which must be set before JAX
starts: a program of its own and not part of the test process. Arguments: a generation, and names
of programs, default all.
"""

import contextlib
import functools
import json
import re
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pallas_kernels as pk
from pallas_kernels.chips import CHIPS
from pallas_kernels.config import current_generation
from tests.compile.shapes import shapes_of

COLLECTIVE = re.compile(
    r"\b(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast)"
)
GENERATIONS = set()  # that attention believed to be compiled for, while the last one was traced
MESHES = {"fsdp": (1, 2, 2), "data": (2, 1, 2)}

MASKS = {  # name -> streams, integer arrays by row, mask from them
    "streams": (2, (), lambda rows: pk.causal_streams(rows)),
    "content": (1, (), lambda rows: pk.causal_streams(rows, (False,))),
    "query": (1, (), lambda rows: pk.causal_streams(rows, (True,))),
    "rank": (2, ("row",), lambda rows, rank: pk.rank_streams(rank)),
    "lengths": (1, ("example",), lambda rows, n: pk.length_mask(n, rows)),
    "two_lengths": (2, ("example",), lambda rows, n: pk.length_mask(n, rows, streams=2)),
    "segments": (1, ("row",), lambda rows, ids: pk.segment_mask(ids)),
    "segments_rank": (
        2,
        ("row", "row"),
        lambda rows, ids, rank: pk.segment_mask(ids, rank=rank, strict=(False, True)),
    ),
}


def attention(
    mask, dtype, dim, rows, *, heads=4, kv_heads=2, batch=1, mesh=None, value=False, **options
):
    """Gradients of attention by q, k and v, its outputs, and the shapes they are taken at.

    With a mesh, attention is called by each device; `value` also returns a sum over all devices.
    """
    streams, kinds, build = MASKS[mask]
    q = jax.ShapeDtypeStruct((batch, heads, streams, rows, dim), dtype)
    k = v = jax.ShapeDtypeStruct((batch, kv_heads, rows, dim), dtype)
    per = {"row": (batch, rows), "example": (batch,)}
    integers = [jax.ShapeDtypeStruct(per[kind], jnp.int32) for kind in kinds]

    def attend(*arguments):
        GENERATIONS.add(current_generation())
        return pk.interval_attention(*arguments, **options)

    def gradients(q, k, v, *integers):
        mask = build(rows, *integers)

        def loss(q, k, v):
            if mesh is not None:
                out = pk.shard_attention(attend, mesh)(q, k, v, mask)
            elif streams == 2:
                GENERATIONS.add(current_generation())
                pair = pk.two_stream_attention(q[:, :, 0], q[:, :, 1], k, v, mask, **options)
                out = jnp.stack(pair, axis=2)
            else:
                out = attend(q, k, v, mask)
            total = jnp.sum(out.astype(jnp.float32) ** 2)
            return total, (out, total if value else None)

        return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)

    return gradients, (q, k, v, *integers)


def cached(dtype, dim, queries, *, heads=4, kv_heads=2, slots=4096):
    shape = jax.ShapeDtypeStruct
    cache = shape((2, kv_heads, slots, dim), dtype)
    arguments = (shape((2, queries, heads, dim), dtype), cache, cache, shape((2,), jnp.int32))
    return functools.partial(pk.cached_attention, impl="pallas"), arguments


PALLAS = dict(impl="pallas")
LONG = dict(heads=2, kv_heads=1, **PALLAS)
# Every mask, stream count, type and head size at least twice, in different company.
PROGRAMS = {
    "streams": lambda: attention("streams", "bfloat16", 128, 1024, **PALLAS),
    "streams_wide": lambda: attention("streams", "float32", 256, 1024, kv_heads=1, **PALLAS),
    "content": lambda: attention("content", "bfloat16", 64, 1024, kv_heads=4, **PALLAS),
    "content_wide": lambda: attention("content", "bfloat16", 256, 1024, **PALLAS),
    "query": lambda: attention("query", "float32", 128, 1024, kv_heads=4, **PALLAS),
    "rank": lambda: attention("rank", "bfloat16", 256, 1024, **PALLAS),
    "lengths": lambda: attention("lengths", "float32", 64, 1000, **PALLAS),
    "two_lengths": lambda: attention("two_lengths", "bfloat16", 128, 1024, kv_heads=1, **PALLAS),
    "segments": lambda: attention("segments", "bfloat16", 128, 1024, kv_heads=4, **PALLAS),
    "segments_rank": lambda: attention("segments_rank", "float32", 64, 1024, **PALLAS),
    "segments_wide": lambda: attention("segments_rank", "bfloat16", 256, 1024, **PALLAS),
    "cached": lambda: cached("bfloat16", 128, 1, heads=8),
    "cached_drafts": lambda: cached("float32", 64, 3),
    "cached_wide": lambda: cached("bfloat16", 256, 2, kv_heads=4),
    "splash": lambda: attention("streams", "bfloat16", 128, 1024, impl="splash"),
    "auto": lambda: attention("streams", "bfloat16", 128, 1024),
    "auto_lengths": lambda: attention("lengths", "bfloat16", 64, 1024),
    "long_streams": lambda: attention("streams", "bfloat16", 128, 8192, **LONG),
    "long_lengths": lambda: attention("lengths", "bfloat16", 128, 8192, **LONG),
    "dense": lambda: attention("streams", "bfloat16", 128, 2048, impl="xla_dense"),
    "longer_streams": lambda: attention("streams", "bfloat16", 128, 32768, **LONG),
    "longer_lengths": lambda: attention("lengths", "bfloat16", 128, 32768, **LONG),
}
MESH_PROGRAMS = {
    "mesh_streams": ("fsdp", dict(mask="streams", dtype="bfloat16", dim=128, rows=1024)),
    "mesh_lengths": ("data", dict(mask="lengths", dtype="bfloat16", dim=64, rows=1024)),
    "mesh_auto": (
        "fsdp",
        dict(mask="segments_rank", dtype="bfloat16", dim=128, rows=1024, impl="auto"),
    ),
    "mesh_sum": (
        "data",
        dict(mask="content", dtype="bfloat16", dim=64, rows=256, impl="xla_blocked", value=True),
    ),
}


def report(function, arguments, place, scope) -> dict:
    """What the compiler makes of a function; `place` gives the sharding of each argument."""
    begin = time.process_time()
    arguments = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place(x)) for x in arguments]
    GENERATIONS.clear()
    with scope:
        lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("tpu",))
        compiled = lowered.compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    return {
        "kernels": text.count('custom_call_target="tpu_custom_call"'),
        "generations": sorted(GENERATIONS),
        "collectives": COLLECTIVE.findall(text),
        "scratch_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "result_bytes": memory.output_size_in_bytes,
        "shapes": shapes_of(text),
        "cpu_seconds": round(time.process_time() - begin, 1),
    }


def alone(name, devices):
    mesh = Mesh(np.array(devices[:1]), ("x",))
    whole = NamedSharding(mesh, PartitionSpec())
    # Lowerings inside a kernel ask for the device kind of the current mesh.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        function, arguments = PROGRAMS[name]()
    return report(
        function, arguments, lambda x: whole, jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
    )


def over_a_mesh(name, devices):
    shape, options = MESH_PROGRAMS[name]
    mesh = Mesh(np.array(devices[:4]).reshape(MESHES[shape]), ("data", "fsdp", "model"))
    function, arguments = attention(**PALLAS | options, batch=4, mesh=mesh)

    def place(x):
        return NamedSharding(mesh, PartitionSpec(("data", "fsdp"), *["model"][: x.ndim > 2]))

    return report(function, arguments, place, contextlib.nullcontext())


def main(generation: str, *names: str) -> None:
    described = topologies.get_topology_desc(
        platform="tpu", topology_name=CHIPS[generation].topology
    )
    reports = {}
    for name in names or (*PROGRAMS, *MESH_PROGRAMS):
        compile_one = alone if name in PROGRAMS else over_a_mesh
        try:
            reports[name] = compile_one(name, described.devices)
        except Exception as error:  # one refused program must not cost the others
            reports[name] = {"error": f"{type(error).__name__}: {error}"[:4000]}
    json.dump(reports, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])

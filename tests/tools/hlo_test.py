"""Counting collectives and reading compiler messages, on text written by hand and by XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from aodiff.tools import hlo

PROGRAM = """\
HloModule m
%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %s = f32[] add(%x, %y)
}
%inner_cond (p: (s32[])) -> pred[] {
  %c.1 = s32[]{:T(128)} constant(6)
  ROOT %lt = pred[] compare(%i, %c.1), direction=LT
}
%fused (p: f32[8]) -> f32[8] {
  %ag.1 = f32[8]{0} all-gather(%p), channel_id=7, dimensions={0}
}
%inner (p: (s32[])) -> (s32[]) {
  %f = f32[8] fusion(%p), kind=kCustom, calls=%fused
  %ag.2 = f32[8]{0} all-gather(%p), channel_id=7, dimensions={0}
  %rs = f32[8]{0} reduce-scatter(%p), channel_id=8, to_apply=%add
}
%outer_cond (p: (s32[])) -> pred[] {
  %c.2 = s32[] constant(3)
  ROOT %lt = pred[] compare(%i, %c.2), direction=LT
}
%outer (p: (s32[])) -> (s32[]) {
  %w.1 = (s32[]) while(%p), condition=%inner_cond, body=%inner
}
ENTRY %main (p: f32[8]) -> f32[8] {
  %w.2 = (s32[]) while(%p), condition=%outer_cond, body=%outer
  %ar = f32[8]{0} all-reduce-start(%p), channel_id=1, to_apply=%add
  %ard = f32[8]{0} all-reduce-done(%ar)
  %ar.2 = f32[8]{0} all-reduce(%p), channel_id=2, to_apply=%add
}
"""


def test_collectives_of_a_program_written_by_hand():
    assert hlo.collectives(PROGRAM) == {
        "all-gather": hlo.Collectives(ops=1, in_loops=1, runs=18),  # one channel, 3 x 6 runs
        "all-reduce": hlo.Collectives(ops=2, in_loops=0, runs=2),  # start and done are one
        "reduce-scatter": hlo.Collectives(ops=1, in_loops=1, runs=18),
    }


def test_collectives_of_a_scanned_matmul_compiled_by_xla():
    """A weight sharded over its contraction costs one all-reduce per iteration."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    w = jax.ShapeDtypeStruct((5, 8, 8), jnp.float32)
    x = jax.ShapeDtypeStruct((2, 8), jnp.float32)
    over = lambda *axes: NamedSharding(mesh, PartitionSpec(*axes))

    def f(w, x):
        def body(x, w):
            return jax.lax.with_sharding_constraint(jnp.tanh(x) @ w, over(None, "x")), None

        return jax.lax.scan(body, x, w)[0]

    text = (
        jax.jit(f, in_shardings=(over(None, "x", None), over(None, "x")), out_shardings=over())
        .lower(w, x)
        .compile()
        .as_text()
    )
    counts = hlo.collectives(text)
    assert sum(c.runs for c in counts.values() if c.in_loops) == 5, counts


def test_out_of_memory_message():
    message = (
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory "
        "required for HLO temporaries (271.86G) exceeds available HBM (15.75G). HLO module: jit_f."
    )
    found = hlo.out_of_memory(message)
    assert (found.needed, found.available) == ("271.86G", "15.75G")
    assert found.ratio == pytest.approx(271.86 / 15.75)
    assert hlo.out_of_memory("INVALID_ARGUMENT: (271.86G) exceeds available HBM (15.75G)") is None
    assert hlo.OutOfMemory("2.00T", "16.00G").ratio == 128


def test_rematerialization_warnings_are_named_once():
    line = (
        "W0000 spmd_partitioner.cc:797] [SPMD] Involuntary full rematerialization. The compiler "
        "cannot go from sharding {a} to {b} efficiently for HLO operation %gather = "
        "f32[64,128]{1,0} gather(%x), sharding={a}, "
        'metadata={op_name="jit(step)/embed" stack_frame_id=4}. As the last resort, SPMD will'
    )
    found = hlo.involuntary_rematerializations(f"other\n{line}\n{line}\n")
    assert found == ["%gather = f32[64,128]{1,0} in jit(step)/embed"]
    assert hlo.involuntary_rematerializations("a fine compilation") == []

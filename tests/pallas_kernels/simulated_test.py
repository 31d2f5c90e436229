"""The kernels on simulated TPU memories: two cores, race detection, bounds, NaN where unwritten."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import pallas_kernels as pk
from pallas_kernels.lowering import interpret
from pallas_kernels.reference import DEAD
from tests.pallas_kernels.cases import BACKENDS, Case, attend, config_of, inputs, mask_of, wanted

RACE = "RACE DETECTED"  # what the simulation prints


@pytest.fixture(autouse=True)
def memories():
    """The simulation keeps global state after an exception."""
    yield
    pltpu.reset_tpu_interpret_mode_state()


def call(kernel, semantics, **options):
    """A kernel of two steps over one block of ones, simulated as those of attention are."""
    config = pk.default_config(1, 128, 128, generation="v5p", interpret="tpu")
    block = pl.BlockSpec((8, 128), lambda i: (0, 0))
    return pl.pallas_call(
        kernel,
        grid=(2,),
        in_specs=[block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=(semantics,)),
        interpret=interpret(config),
        **options,
    )(jnp.ones((8, 128)))


def add(x_ref, o_ref):
    o_ref[...] += x_ref[...]


def copy(x_ref, o_ref):
    o_ref[...] = x_ref[...]


def read_scratch(x_ref, o_ref, scratch):
    o_ref[...] = x_ref[...] + scratch[...]


def read_past_the_end(x_ref, o_ref):
    o_ref[...] = x_ref[pl.ds(pl.program_id(0) * 8, 8)]


def test_the_simulation_sees_two_cores_write_one_block(capsys):
    jax.block_until_ready(call(copy, "arbitrary"))
    assert RACE not in capsys.readouterr().out
    jax.block_until_ready(call(copy, "parallel"))
    assert RACE in capsys.readouterr().out


def test_the_simulation_sees_what_was_never_written():
    assert np.isnan(call(add, "arbitrary")).all()
    scratch = dict(scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32)])
    assert np.isnan(call(read_scratch, "arbitrary", **scratch)).all()


def test_the_simulation_sees_a_read_out_of_bounds():
    with pytest.raises(Exception, match="[Oo]ut-of-bounds"):
        jax.block_until_ready(call(read_past_the_end, "arbitrary"))


SHORT = dict(heads=2, kv_heads=1, rows=256, keys=256)
LONG = dict(heads=2, kv_heads=1, rows=384, keys=384)
QUICK = [
    ("kernel", Case("streams", dtype="bfloat16", **SHORT)),
    ("piped", Case("lengths_1_200", **SHORT)),
]
SLOW = [
    ("piped", Case("streams", dtype="bfloat16", **LONG)),
    ("kernel", Case("streams_lengths", dtype="bfloat16", **LONG)),
    ("kernel", Case("segments_rank", **LONG)),
    ("kernel", Case("query", **{**LONG, "kv_heads": 2}, bq=256)),
]


@pytest.mark.parametrize(
    "backend, case", [*QUICK, *(pytest.param(*s, marks=pytest.mark.slow) for s in SLOW)], ids=str
)
def test_kernels_do_not_race_nor_read_what_was_not_written(backend, case, capsys):
    impl, changes = BACKENDS[backend]
    config = config_of(case, {**changes, "interpret": "tpu"})
    mask = mask_of(case.mask, case.rows, case.keys)[0]
    with jax.default_matmul_precision("highest"):
        got = attend(*inputs(case), mask, impl=impl, config=config)
    got = [np.asarray(x.astype(jnp.float32)) for x in got]
    assert RACE not in capsys.readouterr().out
    # As in the matrix: NaN from unwritten memory fails here.
    for g, w in zip(got, wanted(case), strict=True):
        if case.dtype == "float32":
            np.testing.assert_allclose(g, w, rtol=1e-6, atol=4e-5)
        else:
            alive = w > DEAD / 2  # of lse
            error = np.linalg.norm(g[alive] - w[alive])
            assert error < 3e-3 * np.linalg.norm(w[alive])
            assert (g[~alive] == w[~alive]).all()


@pytest.mark.parametrize("queries", [1, 3])
def test_cached_attention_does_not_race_nor_read_what_was_not_written(queries, capsys):
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(4, queries, 4, 64)), jnp.float32)
    k, v = (jnp.asarray(rng.normal(size=(4, 2, 384, 64)), jnp.float32) for _ in range(2))
    lengths = np.array([0, 1, 200, 384], np.int32)
    config = pk.default_config(1, 16, 384, bk=128, interpret="tpu")
    with jax.default_matmul_precision("highest"):
        got = pk.cached_attention(q, k, v, lengths, impl="pallas", config=config)
    got = np.asarray(got)
    assert RACE not in capsys.readouterr().out
    hi = np.broadcast_to(lengths[:, None, None] - 1, (4, 1, queries))
    mask = pk.IntervalMask(np.tile(np.arange(384, dtype=np.int32), (4, 1)), hi)
    want = pk.attention_reference(jnp.moveaxis(q, 1, 2)[:, :, None], k, v, mask)[:, :, 0]
    np.testing.assert_allclose(got, np.moveaxis(want, 1, 2), atol=3e-5)
    assert (got[0] == 0).all()

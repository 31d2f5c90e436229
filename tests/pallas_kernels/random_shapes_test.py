"""Random shapes, heads, blocks and masks: every shape is a program of its own, so they are few."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import pallas_kernels as pk
from tests.pallas_kernels.cases import BACKENDS, BATCH, attend, tiled

LIMIT = {"o": 3e-5, "lse": 3e-5, "dq": 4e-5, "dk": 4e-5, "dv": 4e-5}


@st.composite
def problems(draw):
    """(mask, arrays) of any shape up to three tiles long."""
    rows = draw(st.integers(1, 300))
    kind = draw(st.sampled_from(["causal", "rank", "length", "interval"]))
    keys = draw(st.integers(1, 300)) if kind == "interval" else rows
    streams, kv_heads, group = (draw(st.integers(1, most)) for most in (3, 2, 3))
    dim = draw(st.sampled_from([8, 64, 72, 128]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ranks = rng.permuted(np.tile(np.arange(rows, dtype=np.int32), (BATCH, 1)), axis=1)
    strict = tuple(draw(st.booleans()) for _ in range(streams))
    mask = {
        "causal": lambda: pk.causal_streams(rows, strict),
        "rank": lambda: pk.rank_streams(jnp.asarray(ranks), strict=strict),
        "length": lambda: pk.length_mask(
            jnp.asarray(rng.integers(0, rows + 1, BATCH)), rows, streams=streams
        ),
        "interval": lambda: pk.IntervalMask(
            *(
                jnp.asarray(rng.integers(0, 9, size), jnp.int32)
                for size in ((BATCH, keys), (BATCH, streams, rows), (BATCH, rows))
            )
        ),
    }[kind]()
    shapes = [(BATCH, kv_heads * group, streams, rows, dim)] + [(BATCH, kv_heads, keys, dim)] * 2
    shapes += [shapes[0], shapes[0][:-1]]
    arrays = [jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes]
    return mask, arrays


@settings(max_examples=8, deadline=None, derandomize=True, database=None)
@given(problems(), st.sampled_from([128, 256]), st.sampled_from([128, 256]), st.booleans())
def test_random_shapes(problem, bq, bk, piped):
    mask, arrays = problem
    (_, _, streams, rows, _), keys = arrays[0].shape, arrays[1].shape[2]
    changes = BACKENDS["piped" if piped else "kernel"][1]
    configs = {"pallas": tiled(streams, rows, keys, bq, bk, changes), "xla_blocked": None}
    with jax.default_matmul_precision("highest"):
        want = attend(*arrays, mask, impl="reference")
        for impl, config in configs.items():
            got = attend(*arrays, mask, impl=impl, config=config)
            for (what, atol), g, w in zip(LIMIT.items(), got, want, strict=True):
                np.testing.assert_allclose(g, w, rtol=1e-6, atol=atol, err_msg=f"{impl}, {what}")

"""The generation benchmark runs at the smallest size and counts rows as stated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aodiff.nn.aogpt import AOGPTConfig
from aodiff.tools import bench_generate as bench


def test_report():
    found = bench.bench_generate("tiny", seq_len=8, steps=(2,), batch=2, repeats=1, full_calls=1)
    (run,) = found["runs"]
    assert run["steps"] == 2 and run["bidirectional_calls_timed"] == 1
    assert run["cached"]["rows"] == 2 * (4 + 4)  # 4 content slots and 4 probes a call
    assert run["bidirectional"]["rows"] == 2 * 8
    assert run["ratio"] == run["bidirectional"]["seconds"] / run["cached"]["seconds"] > 0


def test_comparator_sees_both_sides_and_fills_every_position():
    model = bench.Bidirectional(AOGPTConfig(seq_len=6, **bench.SIZES["tiny"]))
    order = jnp.array([[3, 1, 5, 0, 2, 4]])
    params = jax.jit(model.init)(jax.random.key(0), order, order[:, :1])
    apply = jax.jit(model.apply)
    base = apply(params, order, jnp.array([[2]]))
    for other in (0, 5):
        assert np.any(base != apply(params, order.at[0, other].set(7), jnp.array([[2]])))
    keys = jax.random.split(jax.random.key(1), 1)
    filled = jax.jit(lambda p, k: bench._full(model, order, np.array([2, 4]), p, k))(params, keys)
    masked = np.asarray(filled[0] == model.cfg.vocab_size)
    assert set(np.flatnonzero(masked)) == {2, 4}


def test_unknown_size():
    with pytest.raises(ValueError, match="'huge'; use one of: tiny, cpu"):
        bench.bench_generate("huge")

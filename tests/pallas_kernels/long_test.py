"""Long sequences: no array over pairs of positions, and the values at the blocks of production."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from tests.compile.shapes import quadratic, shapes_of

BLOCKED = dict(impl="xla_blocked")
HEADS, DIM = 2, 64


def builders(rows):
    """Masks of two streams, of integer arrays with an example's length and its ranks."""
    return {
        "streams": lambda length, rank: pk.causal_streams(rows),
        "lengths": lambda length, rank: pk.length_mask(length, rows, streams=2),
        "segments": lambda length, rank: pk.segment_mask(
            rank // 512, rank=rank % 512, strict=(False, True)
        ),
    }


def program(mask, rows, **options):
    """A function of q, k, v, cotangents, lengths and ranks that returns outputs and gradients."""
    build = builders(rows)[mask]

    def outputs(q, k, v, do, length, rank):
        attend = functools.partial(pk.interval_attention, mask=build(length, rank), **options)
        out, pullback = jax.vjp(attend, q, k, v)
        return out, *pullback(do)

    return outputs


def compiled(mask, rows, **options):
    shape = jax.ShapeDtypeStruct
    q = shape((1, HEADS, 2, rows, DIM), jnp.bfloat16)
    k = shape((1, 1, rows, DIM), jnp.bfloat16)
    integers = shape((1,), jnp.int32), shape((1, rows), jnp.int32)
    return jax.jit(program(mask, rows, **options)).lower(q, k, k, q, *integers).compile()


@pytest.mark.parametrize("rows", [8192, 32768])
@pytest.mark.parametrize("mask", ["streams", "segments"])
def test_blocked_attention_has_no_array_over_pairs(mask, rows):
    made = compiled(mask, rows, **BLOCKED)
    assert quadratic(shapes_of(made.as_text()), rows) == []
    # A hundred bytes a number of the queries is far from 4 * rows bytes.
    assert made.memory_analysis().temp_size_in_bytes < 100 * HEADS * 2 * rows * DIM


def test_an_array_over_pairs_would_be_seen():
    text = compiled("lengths", 2048, impl="xla_dense").as_text()
    assert quadratic(shapes_of(text), 2048)


FORMS = {
    "blocked": (4096, BLOCKED),
    "v5p": (2048, dict(impl="pallas", generation="v5p")),
    "v6e": (2048, dict(impl="pallas", generation="v6e")),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mask", ["streams", "lengths"])
def test_a_few_rows_of_a_long_sequence(form, mask):
    """The blocks are those of production; cotangents but for the rows compared are zero."""
    rows, options = FORMS[form]
    if "generation" in options:
        generation = options["generation"]
        config = pk.default_config(2, rows, rows, generation=generation, interpret=True)
        options = dict(impl="pallas", config=config)
    length, few = rows - 700, np.array([0, 1, 511, 512, 1100, rows - 701, rows - 1])
    rng = np.random.default_rng(0)
    q, do = jnp.asarray(rng.normal(size=(2, 1, HEADS, 2, rows, DIM)), jnp.float32)
    k, v = jnp.asarray(rng.normal(size=(2, 1, 1, rows, DIM)), jnp.float32)
    do = jnp.zeros_like(do).at[:, :, :, few].set(do[:, :, :, few])
    integers = np.array([length], np.int32), np.arange(rows, dtype=np.int32)[None]
    with jax.default_matmul_precision("highest"):
        got = jax.jit(program(mask, rows, **options))(q, k, v, do, *integers)
    position = np.arange(rows)
    if mask == "streams":
        code, hi = position, np.stack([few, few - 1])
    else:
        code, hi = position >= length, np.stack([-(few >= length).astype(int)] * 2)
    small = pk.IntervalMask(*(x[None].astype(np.int32) for x in (code, hi)))
    reference = functools.partial(pk.attention_reference, mask=small)
    out, pullback = jax.vjp(reference, q[:, :, :, few], k, v)
    want = out, *pullback(do[:, :, :, few])
    for name, g, w in zip(("o", "dq", "dk", "dv"), got, want, strict=True):
        if name == "dq":
            others = np.delete(np.asarray(g), few, axis=3)
            assert not others.any()
        g = g[:, :, :, few] if name in ("o", "dq") else g
        atol = 3e-5 if name == "o" else 4e-5
        np.testing.assert_allclose(g, w, rtol=0, atol=atol, err_msg=name)

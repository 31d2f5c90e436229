"""Keys: every purpose, step and row has its own, and a row's does not depend on its batch."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from aodiff import rng


def data(key) -> bytes:
    return np.asarray(jax.random.key_data(key)).tobytes()


def test_streams_are_distinct():
    purposes = (rng.INIT, rng.TRAIN, rng.EVAL, rng.SAMPLE, rng.PROBE)
    keys = {data(rng.stream(*a)) for a in itertools.product((0, 1), purposes, (0, 1, 2))}
    assert len(keys) == 2 * len(purposes) * 3


def test_stream_is_the_same_inside_jit():
    inside = jax.jit(lambda seed, step: rng.stream(seed, rng.TRAIN, step))
    assert data(inside(jnp.uint32(3), jnp.int32(5))) == data(rng.stream(3, rng.TRAIN, 5))


def test_row_key_ignores_its_batch():
    key = rng.stream(0, rng.EVAL)
    whole = rng.example_keys(key, jnp.arange(6))
    part = rng.example_keys(key, jnp.array([4, 1]))
    assert data(part[0]) == data(whole[4]) and data(part[1]) == data(whole[1])
    assert len({data(k) for k in whole}) == 6

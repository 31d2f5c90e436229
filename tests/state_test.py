"""The state: what is abstract becomes concrete with the same shapes, types and shardings."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from aodiff import partitioning, state
from tests import toy

METHOD, TX = toy.Toy(vocab=8, seq_len=6), optax.adam(0.1)


def test_abstract_and_concrete_agree():
    mesh = partitioning.make_mesh(1, 4, 2)
    abstract = state.abstract_state(METHOD, TX, True, mesh)
    concrete = state.init_state(METHOD, TX, True, abstract, 0)

    def same(a, b):
        assert (a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding)

    jax.tree.map(same, abstract, concrete)
    # An eighth of the matrix lies on each device; the moments lie with their parameter.
    assert concrete.params["head"].addressable_shards[0].data.shape == (2, 4)
    assert concrete.opt_state[0].nu["head"].sharding == concrete.params["head"].sharding
    assert concrete.extra["trace"].sharding.spec == PartitionSpec(None)
    assert concrete.step == 0 and concrete.step.dtype == jnp.int32
    assert (concrete.ema_params["head"] == concrete.params["head"]).all()


def test_without_ema_and_with_another_seed():
    mesh = partitioning.make_mesh(1, 1, 1, devices=jax.devices()[:1])
    abstract = state.abstract_state(METHOD, TX, False, mesh)
    assert abstract.ema_params is None
    one, other = (state.init_state(METHOD, TX, False, abstract, seed) for seed in (0, 1))
    assert (one.params["head"] != other.params["head"]).all()

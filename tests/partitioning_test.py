"""Mesh, logical names, divisibility, and the sharding traps the design works around."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from aodiff import partitioning as part
from aodiff.config import ConfigError
from aodiff.nn.aogpt import AOGPT, AOGPTConfig

IDS = jnp.zeros((8, 4), jnp.int32)


def boxed(**changes):
    cfg = AOGPTConfig(
        **{
            **dict(vocab_size=8, seq_len=4, num_layers=2, width=8, num_heads=2, cond_dim=4),
            **changes,
        }
    )
    module = AOGPT(cfg)
    return module, jax.eval_shape(module.init, jax.random.key(0), IDS, IDS)


def test_mesh_fills_one_size_and_has_auto_axes():
    mesh = part.make_mesh(data=2, fsdp=-1, model=2)
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "model": 2}
    # Explicit axes, the default of jax.make_mesh, make constraints of Linen modules fail.
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert part.make_mesh(1, -1, 1, devices=jax.devices()[:3]).shape["fsdp"] == 3
    for sizes in ((-1, -1, 1), (3, -1, 1), (1, 4, 1), (0, -1, 1)):
        with pytest.raises(ConfigError, match="Mesh"):
            part.make_mesh(*sizes)


def test_shard_constrains_under_a_mesh_only_and_refuses_unknown_names():
    x = jnp.ones((8, 4, 2))
    assert part.shard(x, "batch", "seq", "act_embed") is x
    mesh = part.make_mesh(2, 2, 2)
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x: part.shard(x, "batch", "seq", "act_mlp"))(x)
        assert y.sharding.spec == PartitionSpec(("data", "fsdp"), None, "model")
        with pytest.raises(ConfigError, match="act_embd"):
            jax.jit(lambda x: part.shard(x, "batch", "seq", "act_embd"))(x)
    with pytest.raises(ConfigError, match="act_embd"):  # also where it would do nothing
        part.shard(x, "batch", "seq", "act_embd")
    with pytest.raises(ValueError, match="shape"):
        part.shard(x, "batch", "seq")


def test_linen_alone_ignores_a_wrong_name():
    """Why `shard` checks names itself: Linen is silent without a mesh, and about misspelt names."""
    x = jnp.ones((8, 4))
    assert nn.with_logical_constraint(x, ("no_such_axis", None)) is x


def test_indivisible_dimensions_are_named_with_sizes_that_work():
    mesh = part.make_mesh(1, 2, 4)
    with pytest.raises(ConfigError) as error:
        part.param_shardings(boxed(num_heads=2)[1], mesh)
    for word in ("kernel", "dimension", "heads", "size 2", "model", "size 4", "work: 4"):
        assert word in str(error.value)
    with pytest.raises(ConfigError, match="batch.*12 does not divide.*data x fsdp.*8 or 16"):
        part.check_divisible("Array batch", (12, 4), ("batch", "seq"), part.make_mesh(2, 4, 1))


def test_every_parameter_has_its_sharding():
    mesh = part.make_mesh(2, 2, 2)
    shardings = part.param_shardings(boxed()[1], mesh)["params"]
    spec = lambda *path: jax.tree.reduce(lambda _, s: s.spec, shardings_at(shardings, path), None)
    assert spec("blocks", "qkv_kernel") == PartitionSpec(None, "fsdp", None, "model", None)
    assert spec("blocks", "out_kernel") == PartitionSpec(None, "model", None, "fsdp")
    assert spec("blocks", "fc", "kernel") == PartitionSpec(None, "fsdp", "model")
    assert spec("blocks", "proj", "kernel") == PartitionSpec(None, "model", "fsdp")
    assert spec("head_kernel") == PartitionSpec("fsdp", "model")
    assert spec("tok") == PartitionSpec("model", "fsdp")
    names = part.param_names(boxed()[1])["params"]["blocks"]
    assert names["ln1"]["scale"] == ("layers", "embed")


def shardings_at(tree, path):
    for name in path:
        tree = tree[name]
    return tree


@pytest.mark.parametrize("injection", ["adaln", "two_stream"])
def test_sharded_init_and_forward_equal_one_device(injection, capfd):
    """On a (2, 2, 2) mesh: same parameters, same logits, no array copied whole by surprise."""
    module, abstract = boxed(injection=injection)
    mesh = part.make_mesh(2, 2, 2)
    # Unboxing abstract values inside the mesh context would apply constraints and fail.
    shardings = part.param_shardings(abstract, mesh)
    init = lambda key: part.unbox(module.init(key, IDS, IDS))
    key = lambda: jax.random.key(3)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 8, IDS.shape), jnp.int32)
    order = jnp.asarray(np.random.default_rng(1).permuted(np.tile(np.arange(4), (8, 1)), axis=1))
    order = order.astype(jnp.int32)
    alone = jax.jit(init)(key())
    want = jax.jit(module.apply)(alone, tokens, order)
    with jax.set_mesh(mesh):
        params = jax.jit(init, out_shardings=shardings)(key())
        rows = part.batch_sharding(mesh)
        args = jax.device_put((tokens, order), rows)
        logits = jax.jit(module.apply)(params, *args)
    assert logits.sharding.spec == PartitionSpec(("data", "fsdp"), None, "model")
    assert params["params"]["tok"].addressable_shards[0].data.size * 4 == 128 * 8
    for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-7)
    np.testing.assert_allclose(logits, want, atol=1e-5)
    assert "Involuntary full rematerialization" not in capfd.readouterr().err


def test_strided_microbatches_need_no_communication():
    """Why gradients are accumulated over strided microbatches and not over contiguous blocks."""
    mesh = part.make_mesh(1, 8, 1)
    rows = jax.ShapeDtypeStruct((32, 4), jnp.float32, sharding=part.batch_sharding(mesh))

    def collectives(cut):
        def total(x):
            out = jax.lax.map(lambda y: jnp.tanh(part.shard(y, "batch", "seq")), cut(x))
            return part.shard(out, None, "batch", "seq")

        with jax.set_mesh(mesh):
            text = jax.jit(total).lower(rows).compile().as_text()
        return sum(text.count(c) for c in ("all-gather(", "all-to-all(", "collective-permute("))

    assert collectives(lambda x: x.reshape(8, 4, 4).swapaxes(0, 1)) == 0
    assert collectives(lambda x: x.reshape(4, 8, 4)) > 0

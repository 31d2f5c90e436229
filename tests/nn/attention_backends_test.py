"""Every attention backend gives the same loss and gradients of a whole model, alone and sharded."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aodiff import partitioning
from aodiff.config import ConfigError
from aodiff.nn.aogpt import AOGPT, AOGPTConfig
from aodiff.train import check_platform
from pallas_kernels import default_config, dispatch

N, B, V = 140, 4, 11  # N is no multiple of a block
SHAPE = dict(vocab_size=V, seq_len=N, num_layers=2, width=128, num_heads=2, cond_dim=8)
VARIANTS = {"adaln": {}, "two_stream": {"num_sinks": 2, "remat": "dots"}}


def with_config(f, config):
    return lambda *arrays, scale, **_: f(*arrays, scale=scale, config=config)


@pytest.fixture(autouse=True)
def kernels_on_cpu(monkeypatch):
    """Kernels in interpret mode, which the product never uses."""
    config = default_config(2, N, N, interpret=True)
    for name in ("pallas", "splash"):
        backend = dispatch.BACKENDS[name]
        interpreted = types.SimpleNamespace(
            refusal=backend.refusal,
            forward=with_config(backend.forward, config),
            backward=with_config(backend.backward, config),
        )
        monkeypatch.setitem(dispatch.BACKENDS, name, interpreted)


@functools.cache
def problem(variant: str):
    cfg = AOGPTConfig(injection=variant, **SHAPE | VARIANTS[variant])
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, V, (B, N)), jnp.int32)
    order = jnp.asarray(np.stack([rng.permutation(N) for _ in range(B)]), jnp.int32)
    params = partitioning.unbox(AOGPT(cfg).init(jax.random.key(0), tokens[:1], order[:1]))
    # Far from uniform attention.
    params = jax.tree.map(lambda x: 3 * x + 0.02 * rng.normal(size=x.shape), params)
    return cfg, jax.tree.map(lambda x: x.astype(jnp.float32), params), tokens, order


@functools.cache
def loss_and_gradients(variant: str, impl: str, mesh: tuple[int, int, int] = (1, 1, 1)):
    cfg, params, tokens, order = problem(variant)
    model = AOGPT(dataclasses.replace(cfg, attention=impl))

    def loss(params):
        logits = jax.nn.log_softmax(model.apply(params, tokens, order))
        wanted = jnp.take_along_axis(tokens, order, axis=1)
        return -jnp.mean(jnp.take_along_axis(logits, wanted[..., None], axis=2))

    mesh = partitioning.make_mesh(*mesh, devices=jax.devices()[: np.prod(mesh)])
    with jax.set_mesh(mesh):
        return jax.device_get(jax.jit(jax.value_and_grad(loss))(params))


def assert_same(got, want):
    np.testing.assert_allclose(got[0], want[0], rtol=2e-6)
    leaves = jax.tree_util.tree_leaves_with_path(want[1])
    for (path, w), g in zip(leaves, jax.tree.leaves(got[1]), strict=True):
        top = np.abs(w).max()
        np.testing.assert_allclose(g, w, atol=2e-5 * top + 1e-8, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("impl", ["xla_blocked", "pallas", "splash"])
def test_loss_and_gradients_are_those_of_dense_attention(variant, impl):
    assert_same(loss_and_gradients(variant, impl), loss_and_gradients(variant, "xla_dense"))


def test_backends_compute_with_the_attention_they_name(monkeypatch):
    """Or the comparison above would compare dense attention with itself."""
    cfg, params, tokens, order = problem("adaln")
    texts = {
        impl: jax.jit(AOGPT(dataclasses.replace(cfg, attention=impl)).apply)
        .lower(params, tokens, order)
        .as_text()
        for impl in ("xla_dense", "xla_blocked")
    }
    assert f"x{N}x{N}xf32" in texts["xla_dense"] and f"x{N}x{N}xf32" not in texts["xla_blocked"]
    monkeypatch.undo()
    with pytest.raises(ValueError, match="Only interpret mode"):  # and not another attention
        loss_and_gradients.__wrapped__("adaln", "pallas")


@pytest.mark.parametrize("impl", ["xla_blocked", "pallas"])
def test_a_mesh_changes_nothing(impl):
    """Each device attends to its own rows and heads; the kernel itself cannot be partitioned."""
    assert_same(
        loss_and_gradients("two_stream", impl, (2, 1, 2)), loss_and_gradients("two_stream", impl)
    )


@pytest.mark.parametrize("impl", ["pallas", "splash", "cudnn"])
def test_an_attention_of_another_platform_is_one_sentence(impl):
    with pytest.raises(ConfigError, match=f"model.attention='{impl}' runs on") as e:
        check_platform(impl, "cpu")
    assert "\n" not in str(e.value) and '"auto"' in str(e.value)
    for portable in ("auto", "xla_dense", "xla_blocked"):
        check_platform(portable, "cpu")


def test_a_head_too_large_for_the_kernels_is_refused_before_any_device_work():
    with pytest.raises(ValueError, match="heads of at most 256, got 512"):
        AOGPTConfig(**SHAPE | {"width": 1024}, attention="pallas")

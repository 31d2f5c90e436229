import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from aodiff import partitioning
from aodiff.nn.flexmdm_retrofit import Retrofit, RetrofitConfig, modulation
from aodiff.nn.mdm import MASKED, MDM
from aodiff.nn.mdm_config import MDMConfig

SHAPE = dict(vocab_size=6, seq_len=9, num_layers=4, width=16, num_heads=4, mlp_dim=24)
DREAM = MDMConfig(
    position="rope", norm_epsilon=1e-6, num_kv_heads=2, qkv_bias=True, shift=True, **SHAPE
)
LLADA = MDMConfig(position="rope", rope_base=5e5, mask_id=7, table_size=128, **SHAPE)
CONFIGS = {"dream": RetrofitConfig(DREAM, anchor=8), "llada": RetrofitConfig(LLADA, 5, 2)}
TOKENS = jnp.array([[8, 0, 7, 4, 7, 2, 7, 1, 3], [8, 7, 2, 0, 0, 0, 0, 0, 0]])
LENGTH, TIME = jnp.array([9, 3]), jnp.array([0.7, 0.2])


@functools.cache
def fresh(cfg):
    """Initial parameters, with random numbers in those of the base."""
    init = jax.jit(Retrofit(cfg).init)
    params = partitioning.unbox(init(jax.random.key(0), TOKENS, LENGTH, TIME))["params"]
    return {"params": params | {"base": random(params["base"])}}


def random(tree):
    leaves, tree = jax.tree.flatten(tree)
    r = np.random.default_rng(0)
    return tree.unflatten([jnp.asarray(r.normal(0, 0.3, x.shape), jnp.float32) for x in leaves])


@functools.cache
def program(cfg):
    return jax.jit(Retrofit(cfg).apply)


@pytest.mark.parametrize("name", CONFIGS)
def test_at_first_it_predicts_as_its_base_at_all_times(name):
    cfg = CONFIGS[name]
    params = fresh(cfg)
    padding = jnp.where(jnp.arange(9)[None] < LENGTH[:, None], 0, -1)
    base = MDM(cfg.base).apply({"params": params["params"]["base"]}, TOKENS, padding)
    for time in (TIME, 1 - TIME):
        out = program(cfg)(params, TOKENS, LENGTH, time)
        emitted = np.arange(128) != cfg.anchor
        assert np.any(base[..., :4]) and np.all(out.logits[..., cfg.anchor] == MASKED)
        for row, n in enumerate(LENGTH):
            ours, theirs = out.logits[row, :n, emitted], base[row, :n, emitted]
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(np.exp(out.gap), 0.37, atol=0.02)


@pytest.mark.parametrize("name", CONFIGS)
def test_one_modulation_is_of_both_norms_of_the_blocks_it_is_for(name):
    """A scale that is the same for all channels and times is a gain of the norms."""
    cfg = CONFIGS[name]
    params = fresh(cfg)["params"]
    scale = 0.1 + 0.05 * jnp.arange(cfg.parts)
    bias = jnp.pad(jnp.repeat(scale[:, None], 16, axis=1), ((0, 0), (0, 16)))
    out = program(cfg)({"params": params | {"ada_bias": bias}}, TOKENS, LENGTH, TIME)
    blocks, per_block = params["base"]["blocks"], jnp.repeat(scale, 4 // cfg.parts)[:, None]
    gains = {
        norm: {"scale": blocks[norm]["scale"] * (1 + per_block)}
        for norm in ("attn_norm", "mlp_norm")
    }
    scaled = params | {"base": params["base"] | {"blocks": blocks | gains}}
    other = program(cfg)({"params": scaled}, TOKENS, LENGTH, TIME)
    np.testing.assert_allclose(out.logits, other.logits, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(out.gap, other.gap, rtol=1e-4, atol=1e-4)
    assert np.abs(out.logits - program(cfg)(fresh(cfg), TOKENS, LENGTH, TIME).logits).max() > 0.01


def test_a_modulator_is_a_linear_map_for_as_many_blocks_as_the_others():
    r = np.random.default_rng(0)
    kernel, bias, h = (
        r.normal(size=shape).astype(np.float32) for shape in ((2, 3, 6), (2, 6), (5, 3))
    )
    shift, scale = modulation(*map(jnp.asarray, (kernel, bias, h)), num_layers=4)
    for layer in range(4):
        both = h @ kernel[layer // 2] + bias[layer // 2]
        np.testing.assert_allclose(scale[layer, :, 0], both[:, :3], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(shift[layer, :, 0], both[:, 3:], rtol=1e-5, atol=1e-6)


def test_the_time_goes_through_waves_as_wide_as_the_model_and_two_layers():
    cfg = CONFIGS["dream"]
    params = random(fresh(cfg)["params"])
    keep = dict(capture_intermediates=lambda module, _: module.name == "time_out", mutable=True)
    _, kept = Retrofit(cfg).apply({"params": params}, TOKENS, LENGTH, TIME, **keep)
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    angle = 1000 * np.asarray(TIME, np.float64)[:, None] * 10_000.0 ** (-np.arange(8) / 8)
    h = np.concatenate([np.cos(angle), np.sin(angle)], axis=1)
    h = h @ p["time_in"]["kernel"] + p["time_in"]["bias"]
    h = (h * scipy.special.expit(h)) @ p["time_out"]["kernel"] + p["time_out"]["bias"]
    found = kept["intermediates"]["time_out"]["__call__"][0]
    np.testing.assert_allclose(found, h, rtol=1e-3, atol=1e-3)


def test_shifted_logits_of_a_slot_are_those_of_the_token_before_it():
    """flexmdm.md 15.21: what is read at slot i itself plays no part in its logits."""
    cfg = CONFIGS["dream"]
    params = fresh(cfg)
    own = dataclasses.replace(cfg, base=dataclasses.replace(cfg.base, shift=False))
    shifted = program(cfg)(params, TOKENS, LENGTH, TIME)
    plain = program(own)(params, TOKENS, LENGTH, TIME)
    np.testing.assert_allclose(shifted.logits[:, 1:], plain.logits[:, :-1], atol=1e-5)
    np.testing.assert_array_equal(shifted.gap, plain.gap)  # gaps are read where they are
    assert np.abs(shifted.logits[0, 1:] - plain.logits[0, 1:]).max() > 0.1
    slots = jnp.array([[2, 6, 4], [1, 0, 0]])
    chosen = program(cfg)(params, TOKENS, LENGTH, TIME, slots)
    every = jnp.take_along_axis(shifted.logits, slots[..., None], axis=1)
    np.testing.assert_allclose(chosen.logits, every, atol=1e-5)


# flexmdm.md 4.2 and 4.3: modulators, time, gaps.
PUBLISHED = {
    "dream": (dict(num_layers=28, width=3584, num_heads=28), None, (719.5, 102.8, 12.9)),
    "llada": (dict(num_layers=32, width=4096, num_heads=32), 4, (134.3, 134.2, 16.8)),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_added_has_the_published_number_of_parameters(name):
    shape, modulators, wanted = PUBLISHED[name]
    base = dataclasses.replace(CONFIGS[name].base, num_kv_heads=4, mlp_dim=64, **shape)
    cfg = dataclasses.replace(CONFIGS[name], base=base, modulators=modulators)
    shapes = jax.eval_shape(Retrofit(cfg).init, jax.random.key(0), TOKENS, LENGTH, TIME)["params"]
    count = lambda *keys: sum(
        math.prod(x.shape) for key in keys for x in jax.tree.leaves(shapes[key])
    )
    parts = ("ada_kernel", "ada_bias"), ("time_in", "time_out"), ("gap_norm", "gap_in", "gap_out")
    assert set(shapes) == {"base", *sum(parts, ())}
    np.testing.assert_allclose([count(*part) / 1e6 for part in parts], wanted, atol=0.05)


def test_flops_are_those_of_the_base_and_of_the_second_head():
    cfg = CONFIGS["llada"]
    kernels = 4 * (4 * 16**2 + 3 * 16 * 24) + 16 * 128 + 16 * 16 + 16
    assert cfg.forward_flops(1, 0) == 2 * kernels
    assert cfg.forward_flops(0, 1) == 4 * 2 * 2 * 16


@pytest.mark.parametrize(
    "changes",
    [
        dict(modulators=3),
        dict(anchor=7),
        dict(anchor=128),
        dict(base=dataclasses.replace(LLADA, position="learned")),
    ],
)
def test_shapes_that_do_not_fit_are_refused(changes):
    with pytest.raises(ValueError, match=r"anchor_id|modulators|position"):
        dataclasses.replace(CONFIGS["llada"], **changes)

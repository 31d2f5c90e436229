"""Any-order decoders: likelihoods by enumeration, causality, decoding, structure."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aodiff.core import likelihood
from aodiff.nn.aogpt import AOGPT, INJECTIONS, AOGPTConfig
from aodiff.partitioning import unbox
from pallas_kernels import causal_streams

N, V = 4, 3
BASE = AOGPTConfig(vocab_size=V, seq_len=N, num_layers=2, width=8, num_heads=2, cond_dim=4)
CONFIGS = {name: dataclasses.replace(BASE, injection=name) for name in INJECTIONS} | {
    "sigma_gpt": dataclasses.replace(
        BASE, injection="input", norm="layer", qk_norm=False, tied_head=True
    ),
    "decoupled_rope_2": dataclasses.replace(BASE, injection="decoupled_rope", num_sinks=2),
    "two_stream_2": dataclasses.replace(BASE, injection="two_stream", num_sinks=2),
    "units": dataclasses.replace(BASE, unit_sizes=(2, 3, 1, 3)),
}
ORDERS = np.array([[0, 1, 2, 3], [2, 0, 3, 1], [3, 1, 0, 2]], np.int32)
ROWS = len(ORDERS) * V**N  # one compiled batch shape serves all tests of a model


@functools.cache
def model(name, layers=2):
    """(module, params far from their initial scale, jitted forward) of one configuration."""
    module = AOGPT(dataclasses.replace(CONFIGS[name], num_layers=layers))
    ids = jnp.zeros((1, N), jnp.int32)
    shapes = unbox(jax.eval_shape(module.init, jax.random.key(0), ids, ids))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), shapes)
    params = jax.tree.map(lambda x: 0.6 * x, params)
    return module, params, jax.jit(module.apply)


def forward(name, tokens, orders, layers=2):
    """Log-probabilities (rows, N, V) in slot order."""
    _, params, apply = model(name, layers)
    tokens, orders = np.broadcast_arrays(np.asarray(tokens), np.asarray(orders))
    pad = ((0, ROWS - len(tokens)), (0, 0))
    tokens, orders = np.pad(tokens, pad), np.pad(orders, pad, mode="edge")
    logits = apply(params, jnp.asarray(tokens, jnp.int32), jnp.asarray(orders, jnp.int32))
    return np.asarray(jax.nn.log_softmax(logits))[:, :, :V]


def slot_logp(logp, tokens, orders):
    permuted = np.take_along_axis(tokens, orders, 1)
    return np.take_along_axis(logp[: len(tokens)], permuted[..., None], 2)[..., 0]


@pytest.mark.parametrize("name", CONFIGS)
def test_probabilities_of_all_sequences_sum_to_one_under_every_order(name):
    sizes = CONFIGS[name].unit_sizes or (V,) * N
    every = np.array(list(itertools.product(*(range(s) for s in sizes))))
    tokens = np.tile(every, (len(ORDERS), 1))
    orders = np.repeat(ORDERS, len(every), 0)
    logp = slot_logp(forward(name, tokens, orders), tokens, orders).sum(1)
    totals = np.exp(logp.astype(np.float64)).reshape(len(ORDERS), -1).sum(1)
    np.testing.assert_allclose(totals, 1, atol=1e-5)
    assert logp.std() > 0.1  # not the uniform distribution


@pytest.mark.parametrize("name", CONFIGS)
def test_slots_see_only_what_was_revealed(name):
    order, tokens = ORDERS[1:2], np.array([[1, 0, 0, 1]])
    base = forward(name, tokens, order)[0]
    for i in range(N - 1):
        changed = tokens.copy()
        changed[0, order[0, i:]] = 0 if CONFIGS[name].unit_sizes else 2
        other = forward(name, changed, order)[0]
        np.testing.assert_array_equal(other[: i + 1], base[: i + 1])
        if (changed != tokens)[0, order[0, i]]:
            assert np.abs(other[i + 1 :] - base[i + 1 :]).max() > 1e-4


@pytest.mark.parametrize("name", CONFIGS)
def test_slots_depend_on_the_order_up_to_their_own_target(name):
    tokens, order = np.array([[1, 0, 0, 1]]), np.array([[2, 0, 3, 1]])
    base = forward(name, tokens, order)[0]
    swapped = forward(name, tokens, order[:, [0, 1, 3, 2]])[0]  # differs from slot 2 on
    np.testing.assert_array_equal(swapped[:2], base[:2])
    assert np.abs(swapped[2] - base[2]).max() > 1e-4


@pytest.mark.parametrize("name", CONFIGS)
def test_orders_that_begin_alike_predict_alike_until_they_part(name):
    """The same tokens, revealed in the same sequence: the same law of the same next unit."""
    tokens = np.array([[1, 0, 0, 2], [1, 2, 0, 1]])  # units 0 and 2 agree
    logp = forward(name, tokens, np.array([[2, 0, 3, 1], [2, 0, 3, 1]]))
    other = forward(name, tokens, np.array([[2, 0, 3, 1], [2, 0, 1, 3]]))
    np.testing.assert_allclose(logp[0, :3], logp[1, :3], atol=1e-5)
    np.testing.assert_allclose(logp[1, :2], other[1, :2], atol=1e-5)
    assert np.abs(logp[1, 2] - other[1, 2]).max() > 1e-3


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_of_a_batch_do_not_mix(name):
    tokens = np.array([[1, 0, 0, 1], [0, 2, 0, 2]]) % 2
    both = forward(name, tokens, ORDERS[:2])
    for i in range(2):
        one = forward(name, tokens[i : i + 1], ORDERS[i : i + 1])
        np.testing.assert_allclose(one[0], both[i], atol=1e-6)


def test_padded_ids_and_codes_a_unit_lacks_have_no_mass():
    for name in ("adaln", "sigma_gpt", "units"):
        _, params, apply = model(name)
        orders = jnp.asarray(np.tile(ORDERS[1:2], (ROWS, 1)))
        logits = np.asarray(apply(params, jnp.zeros_like(orders), orders))[:1]
        p = np.exp(logits[0] - np.max(logits[0], -1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        sizes = np.array(CONFIGS[name].unit_sizes or (V,) * N)[ORDERS[1]]
        for s, size in enumerate(sizes):
            assert p[s, size:].sum() < 1e-30 and p[s, :size].sum() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("name", CONFIGS)
def test_decoding_with_a_cache_equals_the_full_forward_pass(name):
    """Chunks of 2, 1 and 1 valid rows, padded in front; a second probe asks for another target."""
    module, params, _ = model(name)
    decode = jax.jit(functools.partial(module.apply, method="decode"))
    order, tokens = ORDERS[[1, 2]], np.array([[1, 0, 0, 1], [0, 1, 0, 2]])
    slot_token = np.concatenate([np.zeros((2, 1), int), np.take_along_axis(tokens, order, 1)], 1)
    slot_own = np.concatenate([np.full((2, 1), -1), order], 1)
    cache, filled = module.init_cache(2, N), np.zeros((2, N), bool)
    for chunk in ((0, 2), (2, 3), (3, 4)):
        start, stop = chunk
        slots = np.clip(np.arange(stop - 3, stop), 0, None)  # the last row is always the newest
        valid = np.arange(stop - 3, stop) >= start
        target = order[:, slots]
        last = order[:, stop - 1 : stop]
        elsewhere = order[:, -1:]  # another element that is still open (or the same)
        probe = np.concatenate([elsewhere, last], 1)
        args = (slot_token[:, slots], slot_own[:, slots], target, np.tile(valid, (2, 1)), probe)
        args = jax.tree.map(jnp.asarray, args)
        logits, new = decode(params, *args, cache, jnp.asarray(filled))
        logp = np.asarray(jax.nn.log_softmax(logits))[..., :V]
        np.testing.assert_allclose(
            logp[:, 1], forward(name, tokens, order)[:2, stop - 1], atol=2e-5, rtol=1e-5
        )
        swapped = order.copy()
        swapped[:, [stop - 1, N - 1]] = swapped[:, [N - 1, stop - 1]]
        np.testing.assert_allclose(
            logp[:, 0], forward(name, tokens, swapped)[:2, stop - 1], atol=2e-5, rtol=1e-5
        )
        # A probe does not notice what the other probes ask.
        alone, _ = decode(params, *args[:4], args[4][:, ::-1], cache, jnp.asarray(filled))
        np.testing.assert_allclose(alone[:, 0], logits[:, 1], atol=1e-5)
        count = stop - start
        rows = jax.tree.map(lambda x, c=count: x[:, :, :, -c:], new)
        put = lambda old, x, at=start: jax.lax.dynamic_update_slice(old, x, (0, 0, 0, at, 0))
        cache = jax.tree.map(put, cache, rows)
        filled[:, start:stop] = True


def test_extra_slot_changes_nothing():
    """The published network runs one slot more; its last slot has a zero condition."""
    module, params, _ = model("adaln")
    order, tokens = jnp.asarray(ORDERS), jnp.asarray([[1, 0, 2, 1]] * 3)

    def longer(m):
        start = jnp.full((3, 1), -1)
        token = jnp.concatenate([start, jnp.take_along_axis(tokens, order, 1)], 1)
        own = jnp.concatenate([start, order], 1)
        target = jnp.concatenate([order, start + 1], 1)
        rows = m.rows(own, target, causal_streams(N + 1, strict=(False,))).replace(keys=N + 1)
        rows = rows.replace(cond=rows.cond.at[:, -1].set(0))
        x, _ = m.blocks(m.embed(token, own, target), rows, None)
        return m.logits(x[:, :N], order)

    got = jax.jit(functools.partial(module.apply, method=longer))(params)
    want = jax.jit(module.apply)(params, tokens, order)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_one_layer_separates_the_architectures():
    """Which permutations of the context leave the last prediction unchanged (aogpt.md 10.3)."""
    orders = np.array([[1, 2, 0, 3], [2, 1, 0, 3], [1, 0, 2, 3]])
    tokens = np.array([[0, 1, 2, 0]])

    def change(name):
        logp = forward(name, np.repeat(tokens, 3, 0), orders, layers=1)[:, 3]
        return np.abs(logp[1:3] - logp[0]).max(1)

    same_last, other_last = change("decoupled_rope")
    assert same_last < 1e-5 < 1e-3 < other_last
    assert change("two_stream").max() < 1e-5
    assert change("adaln").min() > 1e-3 and change("input").min() > 1e-3


@pytest.mark.parametrize("name", ["decoupled_rope", "two_stream"])
def test_first_slot_sees_its_target_only_with_two_sinks(name):
    first = lambda n: forward(n, np.zeros((3, N), int), ORDERS)[:3, 0]
    assert np.ptp(first(name), axis=0).max() < 1e-5
    assert np.ptp(first(name + "_2"), axis=0).max() > 1e-3


@pytest.mark.parametrize("name", INJECTIONS)
def test_no_gradient_from_a_token_to_its_own_prediction(name):
    """Distinct tokens, so a row of the token table belongs to one position."""
    module, params, _ = model(name)
    order, tokens = jnp.asarray(ORDERS[1:2]), jnp.arange(N)[None]
    params = jax.tree.map(lambda x: x / 2, params)  # attention far from saturated

    def slot_outputs(table):
        tree = {"params": {**params["params"], "tok": table}}
        return jnp.sum(jnp.sin(module.apply(tree, tokens, order)[0, :, :V]), axis=-1)

    jacobian = jax.jit(jax.jacrev(slot_outputs))(params["params"]["tok"])  # (slot, V, D)
    size = np.abs(np.asarray(jacobian)).max(-1)[:, ORDERS[1]]  # (slot, step of token)
    assert (size[np.triu_indices(N)] == 0).all()
    assert (size[np.tril_indices(N, -1)] > 0).all()


def test_parameter_counts():
    def count(**options):
        cfg = AOGPTConfig(vocab_size=50257, seq_len=1024, **options)
        ids = jnp.zeros((1, 1024), jnp.int32)
        params = unbox(jax.eval_shape(AOGPT(cfg).init, jax.random.key(0), ids, ids))["params"]
        return tuple(sum(x.size for x in jax.tree.leaves(t)) for t in (params, params["blocks"]))

    small = dict(num_layers=12, width=768, num_heads=12)
    medium = dict(num_layers=24, width=1024, num_heads=16)
    sigma = dict(injection="input", norm="layer", qk_norm=False, tied_head=True)
    assert count(**small) == (170_605_952, 92_170_752)
    assert count(**medium) == (425_804_928, 321_285_120)
    assert count(**small, **sigma) == (125_263_872, 85_054_464)
    assert count(**medium, **sigma) == (355_921_920, 302_309_376)


def test_initialisation():
    cfg = AOGPTConfig(vocab_size=128, seq_len=16, num_layers=2, width=128, num_heads=4)
    module = AOGPT(cfg)
    keys = jax.random.split(jax.random.key(0), 3)
    tokens = jax.random.randint(keys[0], (8, 16), 0, 128)
    order = jnp.tile(jnp.arange(16)[None], (8, 1))
    params = unbox(jax.jit(module.init)(keys[1], tokens, order))
    loss = (
        jax.jit(likelihood.sequence_nll, static_argnums=0)(
            functools.partial(module.apply, params), tokens, order, jnp.ones_like(tokens, bool)
        ).mean()
        / 16
    )
    params = jax.device_get(params)
    assert loss == pytest.approx(np.log(128) + 2e-4 * 128, abs=0.05)
    blocks = params["params"]["blocks"]
    truncated = 0.02 * 0.98658  # s.d. of a normal cut at 3
    for kernel, sd in (
        (blocks["qkv_kernel"], truncated),
        (blocks["fc"]["kernel"], truncated),
        (blocks["out_kernel"], truncated / 2),
        (blocks["proj"]["kernel"], truncated / 2),
    ):
        assert kernel.std() == pytest.approx(sd, rel=0.01)
        assert np.abs(kernel).max() <= 3 * sd / 0.98658 * 1.0001
        assert (kernel[0] != kernel[1]).any()
    assert blocks["qkv_bias"].max() == 0 and blocks["ln1"]["scale"].min() == 1
    tpos = params["params"]["tpos"]
    cond = tpos / (1 + np.exp(-tpos))
    assert (cond @ blocks["ada"]["kernel"][0]).std() == pytest.approx(0.0022, rel=0.15)
    sigma = AOGPT(dataclasses.replace(cfg, injection="input", norm="layer", tied_head=True))
    table = np.asarray(unbox(jax.jit(sigma.init)(keys[2], tokens, order))["params"]["tok"])
    assert np.abs(table).max() > 0.061 and table.std() == pytest.approx(0.02, rel=0.01)


def test_kernel_std_scales_projections_and_nothing_else():
    cfg = AOGPTConfig(vocab_size=8, seq_len=4, num_layers=2, width=16, num_heads=2, cond_dim=4)
    wide = dataclasses.replace(cfg, kernel_std=0.08)
    tokens, order = jnp.zeros((1, 4), jnp.int32), jnp.arange(4)[None]
    a, b = (unbox(jax.jit(AOGPT(c).init)(jax.random.key(0), tokens, order)) for c in (cfg, wide))

    def check(path, x, y):
        scale = 4 if "kernel" in jax.tree_util.keystr(path) else 1
        np.testing.assert_allclose(y, scale * x, rtol=1e-5)

    jax.tree_util.tree_map_with_path(check, a, b)


@functools.cache
def loss_and_gradient(remat, dtype):
    module, params, _ = model("adaln")
    module = AOGPT(dataclasses.replace(module.cfg, remat=remat, dtype=dtype))
    tokens, order = jnp.asarray([[1, 0, 2, 1]]), jnp.asarray(ORDERS[1:2])
    loss = lambda p: jnp.square(module.apply(p, tokens, order)[..., :V]).mean()
    return jax.jit(jax.value_and_grad(loss))(params)


@pytest.mark.parametrize(("remat", "dtype"), [("full", "float32"), ("dots", "bfloat16")])
def test_remat_and_bfloat16_keep_the_function(remat, dtype):
    a, grad_a = loss_and_gradient("none", "float32")
    b, grad_b = loss_and_gradient(remat, dtype)
    tolerance = 1e-4 if dtype == "float32" else 0.05
    assert a == pytest.approx(float(b), rel=tolerance)
    for x, y in zip(jax.tree.leaves(grad_a), jax.tree.leaves(grad_b), strict=True):
        assert jnp.linalg.norm(x - y) <= 2 * tolerance * jnp.linalg.norm(x) + tolerance


@pytest.mark.parametrize("name", ["adaln", "two_stream", "decoupled_rope"])
def test_captured_evidence(name):
    """Capturing changes no logit; without query-key products attention is uniform: no evidence."""
    module, params, _ = model(name)
    tokens, order = jnp.asarray([[1, 0, 2, 1]] * 3), jnp.asarray(ORDERS)
    capture = jax.jit(functools.partial(module.apply, capture=True))
    logits, evidence = capture(params, tokens, order)
    np.testing.assert_allclose(logits, jax.jit(module.apply)(params, tokens, order), atol=1e-5)
    assert evidence.shape == (2, N, N) and jnp.abs(evidence).max() > 1e-2
    blocks = params["params"]["blocks"]
    flat = {**blocks, "q_norm": {"scale": jnp.zeros_like(blocks["q_norm"]["scale"])}}
    flat = {"params": {**params["params"], "blocks": flat}}
    _, evidence = capture(flat, tokens, order)
    np.testing.assert_allclose(evidence, 0, atol=1e-6)


def test_refusals():
    for change, words in (
        (dict(injection="ada"), "two_stream"),
        (dict(norm="batch"), "rms, layer"),
        (dict(num_heads=3), "head sizes"),
        (dict(num_sinks=2), "use 1"),
        (dict(unit_sizes=(2, 2)), "one size for each"),
    ):
        with pytest.raises(ValueError, match=words):
            dataclasses.replace(BASE, **change)
    module, params, _ = model("adaln")
    with pytest.raises(ValueError, match="shape"):
        module.apply(params, jnp.zeros((1, 3), jnp.int32), jnp.zeros((1, 3), jnp.int32))

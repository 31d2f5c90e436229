import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aodiff import partitioning
from aodiff.nn.layers import rotary, rotate
from aodiff.nn.mdm import MASKED, MDM
from aodiff.nn.mdm_config import MDMConfig, forward_flops_per_token

TINY = dict(vocab_size=50, seq_len=7, num_layers=2, width=32, num_heads=4, mlp_dim=48)
FAMILIES = {
    "llada": dict(position="rope", rope_base=500_000.0, mask_id=49, table_size=50),
    "dream": dict(
        position="rope", rope_base=1e6, norm_epsilon=1e-6, num_kv_heads=2, qkv_bias=True, shift=True
    ),
    "qwen3": dict(position="rope", num_kv_heads=2, qk_norm=True, tied_head=True),
    "small": dict(position="learned", mlp="gelu"),
    "mdlm": dict(position="rope", norm="layer", mlp="gelu_tanh", head_bias=True),
    "board": dict(position="grid", groups=((0, 0, 0, 1, 1, 1, 1), (0, 1, 2, 0, 1, 2, 3))),
    "units": dict(unit_sizes=(3, 50, 2, 4, 9, 7, 5)),
}


def init(cfg):
    tokens = jnp.zeros((1, cfg.seq_len), jnp.int32)
    params = partitioning.unbox(jax.eval_shape(MDM(cfg).init, jax.random.key(0), tokens))
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(0)
    return tree.unflatten([jnp.asarray(rng.normal(0, 0.3, x.shape), jnp.float32) for x in leaves])


def numpy_forward(cfg, params, tokens):
    """An independent statement of the model in float64, one row, loops over heads."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params["params"])
    rms = lambda x, g: x / np.sqrt(np.mean(x**2, -1, keepdims=True) + cfg.norm_epsilon) * g

    def norm(x, p):
        if cfg.norm == "rms":
            return rms(x, p["scale"])
        return rms(x - x.mean(-1, keepdims=True), p["scale"]) + p["bias"]

    n, k = len(tokens), cfg.head_dim
    if cfg.unit_sizes:
        starts = np.cumsum([0] + [s + 1 for s in cfg.unit_sizes[:-1]])
        tokens = starts + np.minimum(tokens, cfg.unit_sizes)
    x = p["embedding"][tokens]
    if cfg.position == "learned":
        x = x + p["positions"]
    for i, labels in enumerate(cfg.groups):
        x = x + p[f"group{i}"][list(labels)]

    def turn(y):
        if cfg.position != "rope":
            return y
        angle = np.arange(n)[:, None] * cfg.rope_base ** (-np.arange(0, k, 2) / k)
        a, b = y[:, : k // 2], y[:, k // 2 :]
        return np.hstack(
            [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)]
        )

    for layer in range(cfg.num_layers):
        w = jax.tree.map(lambda a, i=layer: a[i], p["blocks"])
        h, mixed = norm(x, w["attn_norm"]), 0

        def project(name, head, h=h, w=w):
            y = h @ w[f"{name}_kernel"][:, head]
            if cfg.qkv_bias:
                y = y + w[f"{name}_bias"].reshape(-1, k)[head]
            if cfg.qk_norm and name != "v":
                y = rms(y, w[f"{name}_norm"]["scale"])
            return y if name == "v" else turn(y)

        for head in range(cfg.num_heads):
            group = head // (cfg.num_heads // cfg.kv_heads)
            s = project("q", head) @ project("k", group).T / np.sqrt(k)
            s = np.exp(s - s.max(1, keepdims=True))
            out = s / s.sum(1, keepdims=True) @ project("v", group)
            mixed = mixed + out @ w["out_kernel"][head]
        x = x + mixed
        h = norm(x, w["mlp_norm"])
        if cfg.mlp == "swiglu":
            gate = h @ w["gate_kernel"]
            h = gate / (1 + np.exp(-gate)) * (h @ w["up_kernel"])
        elif cfg.mlp == "gelu":
            h = np.asarray(jax.nn.gelu(h @ w["up_kernel"], approximate=False))
        else:
            h = h @ w["up_kernel"] + w["up_bias"]
            h = h / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
        x = x + h @ w["down_kernel"] + w.get("down_bias", 0)
    x = norm(x, p["norm"])
    if cfg.shift:
        x = np.vstack([x[:1], x[:-1]])
    if cfg.unit_sizes:
        return np.einsum("nd,ndv->nv", x, p["head_kernel"])
    head = p["embedding"].T if cfg.tied_head else p["head_kernel"]
    return x @ head + p.get("head_bias", 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_agree_with_numpy(family):
    cfg = MDMConfig(**TINY | FAMILIES[family])
    params, rng = init(cfg), np.random.default_rng(1)
    sizes = np.array(cfg.unit_sizes or [50] * 7)
    tokens = rng.integers(0, sizes, (2, 7))
    tokens[:, 2] = cfg.mask
    logits = np.asarray(MDM(cfg).apply(params, jnp.asarray(tokens, jnp.int32)))
    for row, out in zip(tokens, logits, strict=True):
        expected = numpy_forward(cfg, params, row)
        exists = out > MASKED
        np.testing.assert_allclose(out[exists], expected[exists], rtol=2e-4, atol=2e-4)
    chance = np.asarray(jax.nn.softmax(logits), np.float64)
    np.testing.assert_allclose(chance.sum(-1), 1, atol=1e-6)
    assert np.all(chance[logits <= MASKED] == 0)
    emitted = exists.sum(1)
    if cfg.unit_sizes:
        np.testing.assert_array_equal(emitted, cfg.unit_sizes)
    else:
        assert np.all(emitted == 50 - (cfg.mask < 50)) and not exists[:, cfg.mask].any()


@pytest.mark.parametrize(
    "sizes, count",
    [
        # LLaDA-8B, Dream-7B, Open-dCoder-0.5B, SMDM-1028M (mdm.md 13.13); the last has 32000
        # outputs and 32001 embeddings, here one row of each per id.
        (
            dict(vocab_size=126464, num_layers=32, width=4096, num_heads=32, mlp_dim=12288)
            | dict(mask_id=126336, table_size=126464),
            8_015_581_184,
        ),
        (
            dict(vocab_size=152064, num_layers=28, width=3584, num_heads=28, num_kv_heads=4)
            | dict(mlp_dim=18944, qkv_bias=True, mask_id=151666, table_size=152064),
            7_615_616_512,
        ),
        (
            dict(vocab_size=151936, num_layers=24, width=896, num_heads=14, num_kv_heads=2)
            | dict(mlp_dim=4864, qkv_bias=True, tied_head=True, mask_id=151665, table_size=151936),
            494_032_768,
        ),
        (
            dict(vocab_size=32000, num_layers=20, width=1792, num_heads=14, mlp_dim=7168)
            | dict(table_size=32001),
            1_142_367_744 + 1792,
        ),
    ],
)
def test_parameter_counts_of_the_published_models(sizes, count):
    model = MDM(MDMConfig(seq_len=16, position="rope", **sizes))
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 16), jnp.int32))
    assert sum(x.size for x in jax.tree.leaves(nn.meta.unbox(shapes))) == count


def test_every_position_sees_both_sides_and_no_padding():
    cfg = MDMConfig(**TINY | FAMILIES["llada"])
    params = init(cfg)
    segments = jnp.array([[0, 0, 0, 0, 0, -1, -1]])

    def logits(table):
        p = {"params": params["params"] | {"embedding": table}}
        ids = jnp.arange(7)[None]  # a row of its own for every position
        return MDM(cfg).apply(p, ids, segments)[0, :, 0]

    table = params["params"]["embedding"]
    reach = np.asarray(jnp.abs(jax.jacobian(logits)(table)).sum(-1))[:, :7] > 0
    assert reach[:5, :5].all() and not reach[:5, 5:].any()


def test_the_amount_of_padding_does_not_matter():
    cfg = MDMConfig(**TINY | FAMILIES["llada"] | dict(seq_len=14))
    params, rows = init(cfg), np.random.default_rng(1).integers(0, 50, (2, 14))
    found = [
        MDM(cfg).apply(params, jnp.asarray(rows[:, :n]), jnp.where(jnp.arange(n) < 7, 0, -1)[None])
        for n in (7, 14)
    ]
    np.testing.assert_allclose(found[0], found[1][:, :7], atol=1e-5)
    assert np.all(np.isfinite(found[1]))


def test_shifted_logits_are_read_one_position_before():
    """mdm.md 13.7: without attention a position knows itself alone, so a causal model it is."""
    cfg = MDMConfig(**TINY | FAMILIES["dream"])
    params = init(cfg)
    blocks = params["params"]["blocks"]
    blocks["out_kernel"] = jnp.zeros_like(blocks["out_kernel"])

    def logits(table, cfg):
        p = {"params": params["params"] | {"embedding": table}}
        return MDM(cfg).apply(p, jnp.arange(7)[None])[0, :, :50]

    table = params["params"]["embedding"]
    plain = logits(table, dataclasses.replace(cfg, shift=False))
    np.testing.assert_array_equal(logits(table, cfg), plain[np.array([0, 0, 1, 2, 3, 4, 5])])
    reach = np.asarray(jnp.abs(jax.jacobian(lambda t: logits(t, cfg)[:, 0])(table)).sum(-1))[:, :7]
    np.testing.assert_array_equal(reach > 0, np.eye(7, k=-1) + np.outer(np.eye(7)[0], np.eye(7)[0]))


@pytest.mark.parametrize("family", ["llada", "dream", "small", "board"])
def test_some_positions_have_the_logits_they_have_among_all(family):
    cfg = MDMConfig(**(TINY | FAMILIES[family]))
    params, rng = init(cfg), np.random.default_rng(1)
    tokens = jnp.asarray(rng.integers(0, 50, (2, 7)), jnp.int32)
    segments = jnp.where(jnp.arange(7)[None] < jnp.array([[7], [5]]), 0, -1)
    at = jnp.asarray([[0, 1, 2], [4, 2, 3]])
    whole = MDM(cfg).apply(params, tokens, segments)
    some = jax.jit(MDM(cfg).apply)(params, tokens, segments, at)
    np.testing.assert_allclose(some, jnp.take_along_axis(whole, at[..., None], axis=1), atol=1e-4)


@functools.cache
def windowed(family, layers):
    """A model's cache of whole rows, a window of another row by it, and a whole pass over that."""
    model = MDM(MDMConfig(**(TINY | FAMILIES[family] | dict(num_layers=layers))))
    params = init(model.cfg)
    segments = jnp.where(jnp.arange(7)[None] < jnp.array([[7], [6]]), 0, -1)

    @jax.jit
    def fn(before, now, at):
        old, fresh = (model.apply(params, x, segments, method="keep") for x in (before, now))
        logits, cache = model.apply(params, now, old, at, segments, method="cached")
        exact = jnp.take_along_axis(model.apply(params, now, segments), at[..., None], axis=1)
        off = lambda a, b: jnp.max(jnp.abs(a - b), axis=(-1, -2))
        return off(logits, exact), jnp.max(off(cache.k, fresh.k)), jnp.max(off(cache.v, fresh.v))

    return fn


@pytest.mark.parametrize("family", ["dream", "small", "board"])
def test_a_fresh_cache_gives_the_logits_of_a_whole_pass_and_an_old_one_does_not(family):
    """In the first layer keys and values are those of a token alone, which the window renews.

    Windows may repeat a position: with a shift 0 is read for itself, and rows end in a block.
    """
    at = jnp.asarray([[0, 1, 2], [4, 5, 5]])
    tokens = jnp.asarray(np.random.default_rng(1).integers(8, 49, (2, 7)), jnp.int32)
    inside = tokens.at[0, 0].set(7).at[1, 4].set(7)  # which shifted windows read too
    outside = tokens.at[0, 5].set(7).at[1, 0].set(7)
    one, two = (windowed(family, layers) for layers in (1, 2))
    for exact in (one(tokens, tokens, at), two(tokens, tokens, at), one(tokens, inside, at)):
        assert max(np.max(x) for x in exact) < 1e-4
    for old in (one(tokens, outside, at), two(tokens, inside, at)):
        assert min(np.min(x) for x in old) > 1e-3


def test_positions_with_their_own_vocabularies_are_predicted_together():
    cfg = MDMConfig(**(TINY | FAMILIES["units"]))
    rows = jnp.zeros((1, 7), jnp.int32)
    with pytest.raises(ValueError, match="predicted together"):
        MDM(cfg).apply(init(cfg), rows, None, rows[:, :2])
    with pytest.raises(ValueError, match="predicted together"):
        MDM(cfg).apply(init(cfg), rows, None, rows[:, :2], method="cached")


def test_rotary_angles_are_relative_and_pair_the_halves():
    """mdm.md 13.15."""
    q, k = np.random.default_rng(0).normal(size=(2, 1, 1, 1, 8)).astype(np.float32)

    def product(at, to, turn=rotate):
        turned = [turn(x, rotary(jnp.array([[i]]), 8)) for x, i in ((q, at), (k, to))]
        return float(jnp.sum(turned[0] * turned[1]))

    def interleaved(x, cos_sin):
        pairs = np.arange(8).reshape(4, 2).T.reshape(-1)  # 0 2 4 6 1 3 5 7
        return rotate(x[..., pairs], cos_sin)[..., np.argsort(pairs)]

    assert abs(product(9, 4) - product(1009, 1004)) < 1e-3
    assert abs(product(9, 4) - product(4, 9)) > 0.1
    assert abs(product(9, 4) - product(9, 4, interleaved)) > 0.1
    at = np.array([2049, 131_071])  # float32 angles are exact to a few thousandths there
    cos, sin = rotary(jnp.asarray(at)[None], 8)
    angle = at[:, None] * 10_000.0 ** (-np.arange(0, 8, 2) / 8)
    np.testing.assert_allclose(cos[0, 0], np.cos(angle), atol=2e-2)
    np.testing.assert_allclose(sin[0, 0], np.sin(angle), atol=2e-2)


def test_sharded_logits_are_the_same():
    cfg = MDMConfig(**TINY | dict(vocab_size=128, table_size=128, mask_id=127, position="rope"))
    params, tokens = init(cfg), jnp.arange(28).reshape(4, 7)
    alone = MDM(cfg).apply(params, tokens)
    for model in (2, 4):
        mesh = partitioning.make_mesh(1, -1, model, devices=jax.devices()[:4])
        boxed = jax.eval_shape(MDM(cfg).init, jax.random.key(0), tokens[:1])
        shardings = partitioning.param_shardings(boxed, mesh)
        with jax.set_mesh(mesh):
            placed = jax.device_put(params, shardings)
            out = jax.jit(MDM(cfg).apply)(placed, tokens)
        np.testing.assert_allclose(out, alone, atol=2e-5)


def test_remat_changes_nothing():
    cfg = MDMConfig(**TINY)
    params, tokens = init(cfg), jnp.arange(7)[None]

    def loss(cfg):
        return jax.value_and_grad(lambda p: MDM(cfg).apply(p, tokens)[..., :50].sum())(params)

    plain, kept = loss(cfg), loss(dataclasses.replace(cfg, remat="full"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), plain, kept)


def test_flops_are_those_of_the_compiled_program():
    cfg = MDMConfig(**TINY | dict(num_layers=1))  # XLA counts the body of a loop once
    tokens = jnp.zeros((1, 7), jnp.int32)
    lowered = jax.jit(MDM(cfg).apply).lower(init(cfg), tokens)
    measured = lowered.compile().cost_analysis()["flops"] / 7
    assert 0.8 < forward_flops_per_token(cfg) / measured < 1.05


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(num_heads=5), "heads"),
        (dict(num_kv_heads=3), "num_kv_heads"),
        (dict(mask_id=1000), "outside the embedding"),
        (dict(mlp="relu"), "swiglu, gelu"),
        (dict(position="grid"), "labellings"),
        (dict(norm="batch"), "rms, layer"),
        (dict(head_bias=True, tied_head=True), "head of its own"),
        (dict(unit_sizes=(3, 3)), "one size for each"),
        (dict(attention="splash"), "causal masks only"),
    ],
)
def test_bad_shapes_are_one_sentence(change, words):
    with pytest.raises(ValueError, match=words):
        MDMConfig(**TINY | change)

"""What config.sample asks of a masked diffusion model, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aodiff.config import ConfigError, base
from aodiff.data import DataInfo
from aodiff.data.tokenizers import Char27Tokenizer
from aodiff.methods import build
from aodiff.nn.mdm_config import forward_flops, forward_flops_per_token

TEXT = DataInfo("text", 8, 27, "character", tokenizer=Char27Tokenizer())
BARE = DataInfo("text", 8, 5, "byte")


def method_of(info, **sample):
    config = base("mdm")
    config.data.seq_len, config.model.num_layers, config.model.width = 8, 1, 16
    config.sample.update(sample)
    return build(config, info), config


@pytest.mark.parametrize(
    "sample, words",
    [
        (dict(crop=True), "ends a text"),
        (dict(eos="last"), "ends a text"),
        (dict(remask="all", order="confidence"), "topk, p2"),
        (dict(remask="p2", order="margin"), "needs confidence"),
        (dict(remask="p2", order="confidence", block=4), "blocks, crop"),
        (dict(position_noise=float("nan")), "position noise"),
        (dict(block=4, steps=3), "multiple of 2"),
        (dict(refresh=2), "refresh=2 with blocks of 0"),
        (dict(refresh=2, block=4, grow="carve", canvas=(4, 8)), "no cache, whose positions move"),
    ],
)
def test_choices_that_do_not_fit_are_one_sentence(sample, words):
    with pytest.raises(ConfigError, match=words):
        method_of(BARE, **sample)


def test_positions_of_their_own_vocabularies_have_no_cache_and_one_width():
    info = DataInfo("table", 8, 5, "row", unit_sizes=(5,) * 8)
    for choice in ({"block": 4, "refresh": 2}, {"buckets": (4,)}):
        with pytest.raises(ConfigError, match="with positions of their own vocabularies"):
            method_of(info, **choice)
    with pytest.raises(ConfigError, match="sample.buckets=.* with model.position='learned'"):
        method_of(DataInfo("text", 8, 5, "char"), buckets=(4,))


def test_ends_have_no_place_where_a_permutation_hides_the_order():
    info = DataInfo(
        "text", 8, 27, "character", tokenizer=Char27Tokenizer(), permutation=tuple(range(8))
    )
    with pytest.raises(ConfigError, match="ends a text"):
        method_of(info, crop=True)


def test_other_methods_refuse_what_is_of_masked_diffusion():
    config = base("aogpt")
    config.data.seq_len, config.sample.position_noise = 8, 0.5
    with pytest.raises(ConfigError, match="position_noise=0.5 is for masked diffusion"):
        build(config, BARE)


def test_ends_are_kept_out_or_end_the_row():
    found = {}
    for name, sample in {
        "never": dict(eos="never", top_k=3),
        "crop": dict(crop=True, order="l2r", temperature=3.0),
    }.items():
        method, config = method_of(TEXT, **sample)
        params = jax.jit(method.init)(jax.random.key(0))
        keys, blank = jax.random.split(jax.random.key(1), 64), jnp.zeros((64, 8), jnp.int32)
        fn = jax.jit(method.sampler(config, 0))
        found[name] = jax.device_get(fn(params, {}, keys, blank, blank.astype(bool)))
    assert not np.any(found["never"].tokens == 0) and np.all(found["never"].lengths == 8)
    out = found["crop"]
    ends = np.array([row[n - 1] == 0 for row, n in zip(out.tokens, out.lengths, strict=True)])
    assert np.all(ends | (out.lengths == 8)) and np.any(ends)
    np.testing.assert_array_equal(out.calls, out.lengths)


def test_flops_of_a_row_are_those_of_its_calls():
    method, _ = method_of(TEXT)
    cfg = method.model.cfg
    assert method.flops(8.0, 64.0) == 8 * forward_flops_per_token(cfg)
    calls = [3, 8, 5]
    total = sum(forward_flops(cfg, n, n * n) for n in calls)
    assert method.flops(sum(calls), sum(n * n for n in calls)) == pytest.approx(total)
    params = jax.jit(method.init)(jax.random.key(0))
    compiled = jax.jit(method.model.apply).lower(params, jnp.zeros((1, 8), jnp.int32)).compile()
    counted = compiled.cost_analysis()["flops"]  # products, and some work on elements
    assert method.flops(8.0, 64.0) == pytest.approx(counted, rel=0.25)

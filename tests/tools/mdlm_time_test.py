"""MDLM's time: what it is at sigma = 0, what folding it leaves, and the size of the real model."""

import jax
import jax.numpy as jnp
import numpy as np

from aodiff.nn.mdm import MDM, MDMConfig
from aodiff.partitioning import unbox
from aodiff.tools import mdlm_time
from aodiff.tools.import_torch import expected_shapes, flat
from tests.tools import published


def config(**sizes):
    return MDMConfig(position="rope", norm="layer", mlp="gelu_tanh", head_bias=True, **sizes)


def test_sigma_zero_is_ones_then_zeros():
    np.testing.assert_array_equal(mdlm_time.time_features(0.0), [1.0] * 128 + [0.0] * 128)
    angles = mdlm_time.time_features(0.5)
    np.testing.assert_allclose(angles[[0, 128]], [np.cos(0.5), np.sin(0.5)])
    np.testing.assert_allclose(angles[64], np.cos(0.5 * 1e-2))


def test_the_folded_tensors_have_the_published_logits_without_time():
    """mdm.md 13.14, in float64 numpy alone: time that adds nothing, and norms that have a bias."""
    cfg = config(vocab_size=50, seq_len=7, num_layers=2, width=32, num_heads=4, mlp_dim=48)
    arrays = published.weights(published.SHAPES["mdlm"])
    folded = mdlm_time.fold(arrays, cfg)
    assert set(arrays) - set(folded) == set(mdlm_time.time_shapes(cfg))
    assert set(folded) - set(arrays) == mdlm_time.made(cfg)
    unfolded = dict(mdlm_time.unfold(folded.items(), cfg, np.float32))
    assert not unfolded["backbone.sigma_map.mlp.0.weight"].any()
    tokens = np.array([3, 50, 7, 50, 2, 9, 41])
    want, now = (published.forward("mdlm", w, tokens) for w in (arrays, unfolded))
    np.testing.assert_allclose(now, want, atol=2e-5)
    arrays["backbone.blocks.1.adaLN_modulation.bias"] += 0.1  # and time does matter
    assert np.abs(published.forward("mdlm", arrays, tokens) - want).max() > 0.01


def test_the_published_model_has_169_627_218_parameters():
    """mdm.md 13.13; ours has constants where it has functions of time."""
    cfg = config(
        vocab_size=50257, seq_len=1024, num_layers=12, width=768, num_heads=12, table_size=50304
    )
    shapes = jax.eval_shape(MDM(cfg).init, jax.random.key(0), jnp.zeros((1, 1024), jnp.int32))
    leaves = {leaf: x.shape for leaf, x in flat(unbox(shapes)["params"]).items()}
    wanted = expected_shapes("mdlm", cfg, leaves)
    assert wanted == published.mdlm(d=768, f=3072, rows=50258, layers=12)
    assert sum(int(np.prod(shape)) for shape in wanted.values()) == 169_627_218

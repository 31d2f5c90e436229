"""Merging two parts against attention over the keys of both at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.masks import IntervalMask
from pallas_kernels.merge import merge_attention
from pallas_kernels.reference import DEAD, attention_reference

B, H, HKV, S, L, KEYS, D = 2, 4, 2, 2, 5, 12, 8
CUTS = (0, 3, 7, KEYS)


def inputs():
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(B, H, S, L, D)), jnp.float32)
    k, v = jnp.asarray(rng.normal(size=(2, B, HKV, KEYS, D)), jnp.float32)
    # Row 0 sees nothing, row 1 keys of the first part only, the others a random number of keys.
    hi = rng.integers(0, KEYS, size=(B, S, L))
    hi[..., 0], hi[..., 1] = -1, 1
    code = np.arange(KEYS, dtype=np.int32)[None].repeat(B, 0)
    return q, k, v, jnp.asarray(code), jnp.asarray(hi, jnp.int32)


def parts(q, k, v, code, hi):
    return [
        attention_reference(
            q, k[:, :, a:b], v[:, :, a:b], IntervalMask(code[:, a:b], hi), return_lse=True
        )
        for a, b in zip(CUTS, CUTS[1:], strict=False)
    ]


def merged(q, k, v, code, hi):
    one, two, three = parts(q, k, v, code, hi)
    return merge_attention(merge_attention(one, two), three)


def test_merged_is_attention_over_all_keys_and_order_does_not_matter():
    args = inputs()
    o, lse = merged(*args)
    want_o, want_lse = attention_reference(*args[:3], IntervalMask(*args[3:]), return_lse=True)
    np.testing.assert_allclose(o, want_o, atol=1e-6)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6)
    assert np.all(np.asarray(o)[..., 0, :] == 0) and np.all(np.asarray(lse)[..., 0] == DEAD)
    one, two, three = parts(*args)
    other_o, other_lse = merge_attention(one, merge_attention(two, three))
    np.testing.assert_allclose(o, other_o, atol=1e-6)
    np.testing.assert_allclose(lse, other_lse, rtol=1e-6)


def test_a_row_dead_in_one_part_is_the_other_exactly():
    args = inputs()
    one, _, three = parts(*args)
    assert np.all(np.asarray(three[1])[..., 1] == DEAD)
    for o, lse in (merge_attention(one, three), merge_attention(three, one)):
        np.testing.assert_array_equal(o[..., 1, :], one[0][..., 1, :])
        np.testing.assert_array_equal(lse[..., 1], one[1][..., 1])


def test_gradients_flow_through_outputs_and_lse():
    q, k, v, code, hi = inputs()
    rng = np.random.default_rng(1)
    do = jnp.asarray(rng.normal(size=q.shape), jnp.float32)
    # The lse of a dead row is a constant of no meaning.
    dlse = jnp.asarray(rng.normal(size=q.shape[:-1]), jnp.float32).at[..., 0].set(0)

    def loss(fn):
        def value(q, k, v):
            o, lse = fn(q, k, v)
            return jnp.sum(o * do) + jnp.sum(jnp.where(lse == DEAD, 0, lse) * dlse)

        return jax.jit(jax.grad(value, argnums=(0, 1, 2)))(q, k, v)

    got = loss(lambda q, k, v: merged(q, k, v, code, hi))
    want = loss(
        lambda q, k, v: attention_reference(q, k, v, IntervalMask(code, hi), return_lse=True)
    )
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, atol=3e-6)
    assert np.all(np.asarray(got[0])[..., 0, :] == 0)


def test_output_has_the_dtype_of_the_first_and_shapes_are_checked():
    one, two, _ = parts(*inputs())
    o, lse = merge_attention((one[0].astype(jnp.bfloat16), one[1]), two)
    assert o.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    with pytest.raises(ValueError, match="two pairs"):
        merge_attention(one, (two[0][..., 1:, :], two[1]))

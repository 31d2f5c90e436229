"""The cuDNN backend without a GPU: its mathematics on XLA's attention, and the HLO it asks for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.cudnn import fused_attention_stablehlo

from pallas_kernels import cudnn
from pallas_kernels.masks import causal_streams, length_mask
from pallas_kernels.reference import attention_reference

B, H, HKV, S, L, D = 2, 4, 2, 2, 9, 16
MASK = causal_streams(L)
ATTENTION = functools.partial(cudnn.attention, mask=MASK, scale=0.3)


def inputs(dtype):
    rng = np.random.default_rng(0)
    q, do = rng.normal(size=(2, B, H, S, L, D))
    k, v = rng.normal(size=(2, B, HKV, L, D))
    return tuple(jnp.asarray(x, dtype) for x in (q, k, v, do))


def test_the_roll_gives_both_streams_and_their_gradients(monkeypatch):
    xla = jax.nn.dot_product_attention
    monkeypatch.setattr(
        jax.nn,
        "dot_product_attention",
        lambda *args, implementation, **options: xla(*args, implementation="xla", **options),
    )
    q, k, v, do = inputs(jnp.float32)
    reference = functools.partial(attention_reference, mask=MASK, scale=0.3)

    def outputs(fn):
        def program(q, k, v, do):
            o, pull = jax.vjp(fn, q, k, v)
            return o, *pull(do)

        return jax.jit(program)(q, k, v, do)

    got = outputs(ATTENTION)
    for g, w in zip(got, outputs(reference), strict=True):
        np.testing.assert_allclose(g, w, atol=5e-6)
    assert all(np.all(np.asarray(x)[:, :, 1, 0] == 0) for x in got[:2])  # o and dq


def test_lowers_to_flash_attention_forward_and_backward(monkeypatch):
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    q, k, v, do = inputs(jnp.bfloat16)
    program = lambda q, k, v, do: jax.vjp(ATTENTION, q, k, v)[1](do)
    text = jax.jit(program).trace(q, k, v, do).lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmhaSoftmax(" in text and "__cudnn$fmhaSoftmaxBackward(" in text
    assert text.count("CAUSAL") == 2 and f"{L + 1}x{S * H}x{D}xbf16" in text


def test_what_it_cannot_do_is_refused():
    q, k, *_ = inputs(jnp.bfloat16)
    assert cudnn.refusal(q, k, MASK) is None
    assert "causal" in cudnn.refusal(q, k, length_mask(jnp.array([3, 4]), L))
    assert "float32" in cudnn.refusal(q.astype(jnp.float32), k, MASK)
    assert "multiple of 8 up to 256, got 12" in cudnn.refusal(q[..., :12], k, MASK)

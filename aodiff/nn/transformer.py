"""The pre-norm decoder block and the scan over its layers."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from aodiff.nn.attention import KVCache, Rows, attend
from aodiff.nn.layers import Linear, Norm, along_last, lookup, normal_init, param, rotate
from aodiff.partitioning import shard
from pallas_kernels import RESIDUALS

REMAT = {  # what the backward pass may keep
    "none": None,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(*RESIDUALS),  # or the kernel runs again
    ),
    "full": jax.checkpoint_policies.nothing_saveable,
}


class Block(nn.Module):
    """Attention and MLP with residuals; AdaLN modulation where `rows.cond` is given.

    Source: arXiv 2506.19935, section 5 and appendix A; modulation in the order shift, scale, gate
    of attention, then of the MLP, gates multiplying the branch directly.
    """

    cfg: Any  # AOGPTConfig

    @nn.compact
    def __call__(
        self, x: jax.Array, rows: Rows, cache: KVCache | None
    ) -> tuple[jax.Array, KVCache | jax.Array | None]:
        cfg, width = self.cfg, self.cfg.width
        dtype = jnp.dtype(cfg.dtype)
        init = normal_init(cfg.kernel_std, cfg.truncated_init)
        out_init = normal_init(cfg.kernel_std / (2 * cfg.num_layers) ** 0.5, cfg.truncated_init)
        if cfg.injection == "every_layer_own":
            table_init = normal_init(0.02, cfg.truncated_init)
            table = param(self, "tpos", table_init, (cfg.seq_len, width), (None, "embed"))
            x = x + lookup(table, rows.target, dtype)
        if rows.added is not None:
            x = x + rows.added
        modulation = [None] * 6
        if rows.cond is not None:
            ada = Linear(6 * width, (None, "embed"), init, dtype, name="ada")(rows.cond)
            modulation = jnp.split(ada, 6, axis=-1)
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = modulation

        h = modulate(Norm(cfg.norm, name="ln1")(x), shift_a, scale_a).astype(dtype)
        q, k, v = self.project(h, rows, init, dtype)
        out, extra = attend(q, k, v, rows, cache, cfg.attention)
        shape, axes = (cfg.num_heads, cfg.head_dim, width), ("heads", "head_dim", "embed")
        kernel = param(self, "out_kernel", out_init, shape, axes).astype(dtype)
        bias = param(self, "out_bias", nn.initializers.zeros, (width,), ("embed",)).astype(dtype)
        h = jnp.einsum("bhlk,hkd->bld", out, kernel) + along_last(bias, 3)
        x = shard(x + gated(h, gate_a), "batch", "seq", "act_embed")

        h = modulate(Norm(cfg.norm, name="ln2")(x), shift_m, scale_m).astype(dtype)
        h = Linear(4 * width, ("embed", "mlp"), init, dtype, name="fc")(h)
        h = jax.nn.gelu(h, approximate=False)
        h = Linear(width, ("mlp", "embed"), out_init, dtype, name="proj")(h)
        return shard(x + gated(h, gate_m), "batch", "seq", "act_embed"), extra

    def project(self, h, rows, init, dtype):
        """Queries of all rows (B, H, R, K), keys and values of the first `rows.keys` ones."""
        cfg = self.cfg
        shape = (cfg.width, 3, cfg.num_heads, cfg.head_dim)
        kernel = param(self, "qkv_kernel", init, shape, ("embed", None, "heads", "head_dim"))
        # Flat, so that its rank says what it is: a bias, without weight decay.
        bias = param(self, "qkv_bias", nn.initializers.zeros, (3 * cfg.width,), (None,))
        kernel = kernel.astype(dtype)
        bias = bias.astype(dtype).reshape(3, 1, cfg.num_heads, 1, cfg.head_dim)
        if rows.keys == h.shape[1]:
            q, k, v = jnp.einsum("bld,dthk->tbhlk", h, kernel) + bias
        else:
            q = jnp.einsum("bld,dhk->bhlk", h, kernel[:, 0]) + bias[0]
            k, v = jnp.einsum("bld,dthk->tbhlk", h[:, : rows.keys], kernel[:, 1:]) + bias[1:]
        if cfg.qk_norm:
            q = Norm("rms", "head_dim", name="q_norm")(q)
            k = Norm("rms", "head_dim", name="k_norm")(k)
        if rows.rope_q is not None:
            q, k = rotate(q, rows.rope_q), rotate(k, rows.rope_k)
        return q.astype(dtype), k.astype(dtype), v


def modulate(h: jax.Array, shift: jax.Array | None, scale: jax.Array | None) -> jax.Array:
    """h * (1 + scale) + shift, or h itself without modulation."""
    return h if shift is None else h * (1 + scale) + shift


def gated(h: jax.Array, gate: jax.Array | None) -> jax.Array:
    return h if gate is None else gate * h


def layers(cfg, name: str | None = None) -> nn.Module:
    """The scanned stack: (x, rows, cache over layers | None) -> (x, extras stacked over layers)."""
    block = Block
    if cfg.remat != "none":
        block = nn.remat(Block, policy=REMAT[cfg.remat], prevent_cse=False)
    scanned = nn.scan(
        block,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=(nn.broadcast, 0),
        length=cfg.num_layers,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )
    return scanned(cfg, name=name)

"""The bidirectional transformer of masked diffusion: LLaDA's and Qwen's blocks, and small ones.

A row holds tokens and mask ids in natural order; the logits at a masked position are the law of its
token given everything that is not masked. No time enters: it adds nothing (mdm.md 2.2d).
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from aodiff.nn.attention import KVCache, on_each_device
from aodiff.nn.layers import (
    Norm,
    along_last,
    lookup,
    matmul,
    normal_init,
    param,
    rotary,
    rotate,
)
from aodiff.nn.mdm_config import MDMConfig
from aodiff.nn.transformer import REMAT, modulate
from aodiff.partitioning import shard
from pallas_kernels import IntervalMask, interval_attention, segment_mask

MASKED = -1e9  # logit of an id that may not be emitted


class Block(nn.Module):
    """Pre-norm bidirectional attention and MLP with residuals (Llama's and Qwen's block).

    With `keep` it also returns the keys and values (B, Hkv, ., K) of x.
    """

    cfg: MDMConfig
    keep: bool = False

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        mask: IntervalMask,
        rope,
        modulation: tuple[jax.Array, jax.Array] | None = None,
        at: jax.Array | None = None,
        cache: KVCache | None = None,
    ) -> tuple[jax.Array, KVCache | None]:
        """x (B, n, D) -> (B, n, D), or (B, w, D) of positions at (B, w), which all may see.

        A modulation (shift, scale), (B, 1, D) each, is of both norms.
        With the keys and values (B, Hkv, n, K) of all positions, x, mask and rope are those of
        positions at (B, w) alone, whose own ones take the place of the cache's.
        """
        cfg, d, k = self.cfg, self.cfg.width, self.cfg.head_dim
        dtype = jnp.dtype(cfg.dtype)
        init = normal_init(cfg.kernel_std)
        out_init = normal_init(cfg.kernel_std / (2 * cfg.num_layers) ** 0.5)
        norm = lambda name: Norm(cfg.norm, epsilon=cfg.norm_epsilon, name=name)
        bias = lambda name, size: param(self, name, nn.initializers.zeros, (size,), (None,))
        shift, scale = modulation or (None, None)

        def heads(name, h, number, rope):
            axes = ("embed", "heads", "head_dim")
            kernel = param(self, f"{name}_kernel", init, (d, number, k), axes).astype(dtype)
            y = jnp.einsum("bld,dhk->bhlk", h, kernel)
            if cfg.qkv_bias:
                own = bias(f"{name}_bias", number * k).astype(dtype)
                y = y + own.reshape(1, number, 1, k)
            if name == "v":
                return y
            if cfg.qk_norm:
                y = Norm("rms", "head_dim", cfg.norm_epsilon, name=f"{name}_norm")(y)
            return (y if rope is None else rotate(y, rope)).astype(dtype)

        h = modulate(norm("attn_norm")(x), shift, scale).astype(dtype)
        asking, turn = h, rope
        if at is not None and cache is None:
            x, asking, mask = _pick(x, at), _pick(h, at), _asked_at(mask, at)
            turn = rope and tuple(_pick(angle[:, 0], at)[:, None] for angle in rope)
        q = heads("q", asking, cfg.num_heads, turn)[:, :, None]
        own = KVCache(*(heads(name, h, cfg.kv_heads, rope) for name in "kv"))
        keys, values = own if cache is None else _put(cache, own, at)
        attend = lambda *args: interval_attention(*args, impl=cfg.attention)
        out = on_each_device(attend, q, keys, values, mask)[:, :, 0]
        shape, axes = (cfg.num_heads, k, d), ("heads", "head_dim", "embed")
        kernel = param(self, "out_kernel", out_init, shape, axes).astype(dtype)
        x = shard(x + jnp.einsum("bhlk,hkd->bld", out, kernel), "batch", "seq", "act_embed")

        h = modulate(norm("mlp_norm")(x), shift, scale).astype(dtype)
        up = lambda name: matmul(
            h, param(self, name, init, (d, cfg.hidden), ("embed", "mlp")).astype(dtype)
        )
        if cfg.mlp == "swiglu":
            h = nn.silu(up("gate_kernel")) * up("up_kernel")
        elif cfg.mlp == "gelu":
            h = nn.gelu(up("up_kernel"), approximate=False)
        else:
            added = bias("up_bias", cfg.hidden).astype(dtype)
            h = nn.gelu(up("up_kernel") + along_last(added, h.ndim), approximate=True)
        down = param(self, "down_kernel", out_init, (cfg.hidden, d), ("mlp", "embed"))
        x = x + matmul(h, down.astype(dtype))
        if cfg.mlp == "gelu_tanh":
            x = x + along_last(bias("down_bias", d).astype(dtype), x.ndim)
        return shard(x, "batch", "seq", "act_embed"), own if self.keep else None


class MDM(nn.Module):
    """Logits of every position of a partly masked row."""

    cfg: MDMConfig

    def setup(self):
        cfg, d, n = self.cfg, self.cfg.width, self.cfg.seq_len
        init, units = normal_init(0.02), self.cfg.unit_sizes
        # With units of their own vocabularies, every position has its rows and its mask.
        rows = cfg.rows if units is None else sum(units) + n
        axis = "vocab" if units is None else None
        self.tok = param(self, "embedding", init, (rows, d), (axis, "embed"))
        if cfg.position == "learned":
            self.pos = param(self, "positions", init, (n, d), (None, "embed"))
        for i, labels in enumerate(cfg.groups):
            shape = (max(labels) + 1, d)
            setattr(self, f"group{i}", param(self, f"group{i}", init, shape, (None, "embed")))
        block = Block
        if cfg.remat != "none":
            block = nn.remat(Block, policy=REMAT[cfg.remat], prevent_cse=False)
        self.blocks = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(nn.broadcast, nn.broadcast, 0),
            length=cfg.num_layers,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )(cfg)
        self.norm = Norm(cfg.norm, epsilon=cfg.norm_epsilon)
        kernel_init = normal_init(cfg.kernel_std)
        if units is not None:
            shape, axes = (n, d, max(units)), (None, "embed", None)
            self.head = param(self, "head_kernel", kernel_init, shape, axes)
        elif not cfg.tied_head:
            shape, axes = (d, cfg.rows), ("embed", "vocab")
            self.head = param(self, "head_kernel", kernel_init, shape, axes)
        if cfg.head_bias:
            shape, axes = (cfg.rows,), ("vocab",)
            self.head_bias = param(self, "head_bias", nn.initializers.zeros, shape, axes)

    def __call__(
        self,
        tokens: jax.Array,
        segments: jax.Array | None = None,
        at: jax.Array | None = None,
    ) -> jax.Array:
        """One forward pass.

        Args:
          tokens: (B, n) int32, `cfg.mask` where masked.
          segments: (B, n) int32 that rows of the same document share, negative for padding, which
            nothing sees; None: all of a row is one document.
          at: (B, w) int32 positions that are predicted, None: all. The others are left out of the
            head and of the last block but for its keys and values.

        Returns:
          (B, n or w, V) float32 logits; ids that may not be emitted have `MASKED`.
        """
        return self.logits(self.hidden(tokens, segments, at))

    def hidden(
        self,
        tokens: jax.Array,
        segments: jax.Array | None = None,
        at: jax.Array | None = None,
    ) -> jax.Array:
        """The final norm's output (B, n or w, D) in the compute dtype; as `__call__`."""
        if at is None:
            x = self.states(tokens, segments)
            return jnp.concatenate([x[:, :1], x[:, :-1]], axis=1) if self.cfg.shift else x
        x = self._blocks_at(*self._enter(tokens, segments), self.read(at))
        return self.norm(x).astype(self.cfg.dtype)

    def states(
        self,
        tokens: jax.Array,
        segments: jax.Array | None = None,
        modulation: tuple[jax.Array, jax.Array] | None = None,
    ) -> jax.Array:
        """As `hidden` of all positions, each where it is and not where its logits are read.

        Args:
          modulation: (shift, scale) of the norms of every block, (N, B, 1, D) each.
        """
        x, mask, rope = self._enter(tokens, segments)
        x, _ = self.blocks(x, mask, rope, modulation)
        return self.norm(x).astype(self.cfg.dtype)

    def keep(self, tokens: jax.Array, segments: jax.Array | None = None) -> KVCache:
        """Keys and values (N, B, Hkv, n, K) of all positions, turned; as `__call__`."""
        return self._blocks_kept(*self._enter(tokens, segments))[1]

    def cached(
        self,
        tokens: jax.Array,
        cache: KVCache,
        at: jax.Array,
        segments: jax.Array | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """The logits (B, w, V) of positions at (B, w), which see the others as `cache` has them.

        Only they are computed (with `shift` the positions before them, where they are read), and
        the cache is returned with their keys and values; else as `__call__`.
        """
        at = self.read(at)
        x, new = self._blocks_kept(*self._enter(tokens, segments, at), at, cache)
        cache = jax.vmap(_put, (0, 0, None))(cache, new, at)  # over layers
        return self.logits(self.norm(x).astype(self.cfg.dtype)), cache

    def read(self, at: jax.Array) -> jax.Array:
        """Where the logits of positions `at` are read."""
        if self.cfg.unit_sizes is not None:
            raise ValueError(
                "Positions with vocabularies of their own are predicted together; leave `at` out."
            )
        return jnp.maximum(at - 1, 0) if self.cfg.shift else at

    def _enter(
        self, tokens: jax.Array, segments: jax.Array | None, at: jax.Array | None = None
    ) -> tuple[jax.Array, IntervalMask, tuple[jax.Array, jax.Array] | None]:
        """What the blocks get, of all positions or of those at (B, w): x, mask and angles."""
        cfg, dtype = self.cfg, jnp.dtype(self.cfg.dtype)
        n = tokens.shape[1]
        if n > cfg.seq_len or (n < cfg.seq_len and cfg.position != "rope"):
            raise ValueError(f"MDM takes tokens (B, {cfg.seq_len}), got {tokens.shape}.")
        segments = jnp.zeros((1, n), jnp.int32) if segments is None else segments
        mask, axis, pick = segment_mask(segments), "act_vocab", lambda table: table[None]
        if cfg.unit_sizes is not None:
            sizes = np.array(cfg.unit_sizes)
            start = np.concatenate([[0], np.cumsum(sizes + 1)[:-1]]).astype(np.int32)
            hidden = jnp.minimum(tokens, jnp.asarray(sizes, jnp.int32)[None])
            tokens, axis = jnp.asarray(start)[None] + hidden, None
        if at is not None:
            tokens, mask, pick = _pick(tokens, at), _asked_at(mask, at), lambda table: table[at]
        x = lookup(self.tok, tokens, dtype, axis)
        if cfg.position == "learned":
            x = x + pick(self.pos.astype(dtype))
        for i, labels in enumerate(cfg.groups):
            x = x + pick(getattr(self, f"group{i}").astype(dtype)[jnp.array(labels)])
        rope = None
        if cfg.position == "rope":
            rope = rotary(pick(jnp.arange(n)), cfg.head_dim, cfg.rope_base)
        return shard(x, "batch", "seq", "act_embed"), mask, rope

    def _blocks_at(self, x: jax.Array, mask: IntervalMask, rope, at: jax.Array) -> jax.Array:
        """What all blocks make of positions at (B, w): the last one is asked for them alone."""
        block, weights = Block(self.cfg, parent=None), self.blocks.variables["params"]

        def layer(i: int | jax.Array, x: jax.Array, *at: jax.Array) -> jax.Array:
            one = jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, i, 0, False), weights)
            return block.apply({"params": one}, x, mask, rope, None, *at)[0]

        last = self.cfg.num_layers - 1
        return layer(last, jax.lax.fori_loop(0, last, layer, x), at)

    def _blocks_kept(
        self,
        x: jax.Array,
        mask: IntervalMask,
        rope,
        at: jax.Array | None = None,
        cache: KVCache | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """What all blocks make of x, and its keys and values (N, B, Hkv, ., K)."""
        block = Block(self.cfg, keep=True, parent=None)

        def layer(x: jax.Array, parts):
            weights, cache = parts
            return block.apply({"params": weights}, x, mask, rope, None, at, cache)

        return jax.lax.scan(layer, x, (self.blocks.variables["params"], cache))

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Logits (B, n, V) float32 of `hidden` (B, n, D)."""
        cfg = self.cfg
        if cfg.unit_sizes is not None:
            head, f32 = self.head.astype(cfg.dtype), jnp.float32
            out = jnp.einsum("bnd,ndv->bnv", hidden, head, preferred_element_type=f32)
            exists = np.arange(cfg.logits_size)[None] < np.array(cfg.unit_sizes)[:, None]
            return jnp.where(jnp.asarray(exists)[None], out, MASKED)
        head = self.tok.T if cfg.tied_head else self.head
        out = matmul(hidden, head.astype(cfg.dtype), jnp.float32)
        if cfg.head_bias:
            out = out + along_last(self.head_bias, out.ndim)
        ids = np.arange(cfg.rows)
        emitted = (ids < cfg.vocab_size) & (ids != cfg.mask)
        out = jnp.where(along_last(jnp.asarray(emitted), 3), out, MASKED)
        return shard(out, "batch", "seq", "act_vocab")


def _pick(x: jax.Array, at: jax.Array) -> jax.Array:
    """Rows at (B, w) of x (B or 1, n, ...)."""
    x = jnp.broadcast_to(x, (at.shape[0], *x.shape[1:]))
    return jax.vmap(lambda row, index: row[index])(x, at)


def _put(cache: KVCache, new: KVCache, at: jax.Array) -> KVCache:
    """A cache (B, Hkv, n, K) with new (B, Hkv, w, K) at positions (B, w)."""
    write = jax.vmap(lambda old, new, index: old.at[:, index].set(new))
    return KVCache(write(cache.k, new.k, at), write(cache.v, new.v, at))


def _asked_at(mask: IntervalMask, at: jax.Array) -> IntervalMask:
    """What positions at (B, w) may see."""
    hi, lo = _pick(mask.hi[:, 0], at)[:, None], _pick(mask.lo, at)
    return dataclasses.replace(mask, hi=hi, lo=lo)

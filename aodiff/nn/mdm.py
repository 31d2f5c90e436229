"""The bidirectional transformer of masked diffusion: LLaDA's and Qwen's blocks, and small ones.

A row holds tokens and mask ids in natural order; the logits at a masked position are the law of its
token given everything that is not masked. No time enters: it adds nothing (mdm.md 2.2d).
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from aodiff.nn.attention import on_each_device
from aodiff.nn.layers import (
    EPSILON,
    ROPE_BASE,
    Norm,
    along_last,
    lookup,
    matmul,
    normal_init,
    param,
    rotary,
    rotate,
)
from aodiff.nn.transformer import REMAT
from aodiff.partitioning import shard
from pallas_kernels import IMPLS, IntervalMask, interval_attention, refusal, segment_mask

MLPS = ("swiglu", "gelu", "gelu_tanh")
NORMS = ("rms", "layer")
POSITIONS = ("rope", "learned", "grid")
MASKED = -1e9  # logit of an id that may not be emitted


@dataclasses.dataclass(frozen=True)
class MDMConfig:
    """Shape of a masked diffusion model.

    Attributes:
      vocab_size: ids 0 .. vocab_size - 1 may be emitted; the others never are.
      mask_id: None is `vocab_size`, an id of its own.
      table_size: rows of the embedding; None is enough of them, rounded up to 128.
      mlp: "swiglu" (three matrices), "gelu" (two) or "gelu_tanh" (two with biases, as GPT-2 has),
        `mlp_dim` wide.
      position: "rope", "learned" (a table added to the tokens), or "grid" (one table for each of
        the labellings `groups`, such as the rows, columns and boxes of a Sudoku).
      norm: "rms", or "layer" with a bias.
      head_bias: the logits have a bias; not with a tied head or `unit_sizes`.
      shift: logits of position i are read at i - 1, as models that were autoregressive once do.
      unit_sizes: number of ids of each position, when positions differ; also one head each.
    """

    vocab_size: int
    seq_len: int
    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int | None = None
    mlp: str = "swiglu"
    mlp_dim: int | None = None
    position: str = "learned"
    groups: tuple[tuple[int, ...], ...] = ()
    rope_base: float = ROPE_BASE
    norm: str = "rms"
    norm_epsilon: float = EPSILON
    qkv_bias: bool = False
    qk_norm: bool = False
    tied_head: bool = False
    head_bias: bool = False
    shift: bool = False
    mask_id: int | None = None
    table_size: int | None = None
    unit_sizes: tuple[int, ...] | None = None
    dtype: str = "float32"
    remat: str = "none"
    attention: str = "auto"
    kernel_std: float = 0.02

    def __post_init__(self):
        for name, allowed in (
            ("mlp", MLPS),
            ("norm", NORMS),
            ("position", POSITIONS),
            ("remat", REMAT),
            ("attention", IMPLS),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"model.{name}={getattr(self, name)!r} is unknown; use one of: "
                    f"{', '.join(allowed)}."
                )
        if self.width % self.num_heads or (self.position == "rope" and self.head_dim % 2):
            raise ValueError(
                f"Width {self.width} with {self.num_heads} heads does not give whole even head "
                "sizes; change one of them."
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is no multiple of num_kv_heads={self.kv_heads}; "
                "change one of them."
            )
        if not 0 <= self.mask < self.rows:
            raise ValueError(
                f"mask id {self.mask} is outside the embedding table of {self.rows} rows; it must "
                "lie inside."
            )
        if self.unit_sizes is not None and (self.tied_head or len(self.unit_sizes) != self.seq_len):
            raise ValueError(
                f"unit_sizes needs one size for each of the {self.seq_len} positions and an untied "
                f"head, got {len(self.unit_sizes)} sizes and tied_head={self.tied_head}."
            )
        if self.head_bias and (self.tied_head or self.unit_sizes is not None):
            raise ValueError(
                "head_bias=True needs a head of its own for all positions; drop it, tied_head and "
                "unit_sizes."
            )
        if (self.position == "grid") != bool(self.groups):
            raise ValueError(
                f"model.position={self.position!r} with {len(self.groups)} labellings of the "
                'positions; position="grid" is for boards, use "learned" or "rope" elsewhere.'
            )
        k = jax.ShapeDtypeStruct((1, self.kv_heads, self.seq_len, self.head_dim), self.dtype)
        q = k.update(shape=(1, self.num_heads, 1, self.seq_len, self.head_dim))
        mask = segment_mask(np.zeros((1, self.seq_len), np.int32))
        if reason := refusal(self.attention, q, k, mask):
            raise ValueError(f"model.attention: {reason}")

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def hidden(self) -> int:
        return self.mlp_dim or 4 * self.width

    @property
    def mask(self) -> int:
        return self.vocab_size if self.mask_id is None else self.mask_id

    @property
    def rows(self) -> int:
        """Rows of the embedding table."""
        enough = max(self.vocab_size, self.mask + 1 if self.mask_id is None else 0)
        return self.table_size or -(-enough // 128) * 128

    @property
    def logits_size(self) -> int:
        return self.rows if self.unit_sizes is None else max(self.unit_sizes)


class Block(nn.Module):
    """Pre-norm bidirectional attention and MLP with residuals (Llama's and Qwen's block)."""

    cfg: MDMConfig

    @nn.compact
    def __call__(
        self, x: jax.Array, mask: IntervalMask, rope, at: jax.Array | None = None
    ) -> tuple[jax.Array, None]:
        """x (B, n, D) -> (B, n, D), or (B, w, D) of positions at (B, w), which all may see."""
        cfg, d, k = self.cfg, self.cfg.width, self.cfg.head_dim
        dtype = jnp.dtype(cfg.dtype)
        init = normal_init(cfg.kernel_std)
        out_init = normal_init(cfg.kernel_std / (2 * cfg.num_layers) ** 0.5)
        norm = lambda name: Norm(cfg.norm, epsilon=cfg.norm_epsilon, name=name)
        bias = lambda name, size: param(self, name, nn.initializers.zeros, (size,), (None,))

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

        h = norm("attn_norm")(x).astype(dtype)
        asking, turn = h, rope
        if at is not None:
            x, asking = _pick(x, at), _pick(h, at)
            turn = rope and tuple(_pick(angle[:, 0], at)[:, None] for angle in rope)
            hi, lo = _pick(mask.hi[:, 0], at)[:, None], _pick(mask.lo, at)
            mask = dataclasses.replace(mask, hi=hi, lo=lo)
        q = heads("q", asking, cfg.num_heads, turn)[:, :, None]
        keys, values = (heads(name, h, cfg.kv_heads, rope) for name in "kv")
        attend = lambda *args: interval_attention(*args, impl=cfg.attention)
        out = on_each_device(attend, q, keys, values, mask)[:, :, 0]
        shape, axes = (cfg.num_heads, k, d), ("heads", "head_dim", "embed")
        kernel = param(self, "out_kernel", out_init, shape, axes).astype(dtype)
        x = shard(x + jnp.einsum("bhlk,hkd->bld", out, kernel), "batch", "seq", "act_embed")

        h = norm("mlp_norm")(x).astype(dtype)
        up = lambda name: matmul(
            h, param(self, name, init, (d, cfg.hidden), ("embed", "mlp")).astype(dtype)
        )
        if cfg.mlp == "swiglu":
            h = nn.silu(up("gate_kernel")) * up("up_kernel")
        elif cfg.mlp == "gelu":
            h = nn.gelu(up("up_kernel"), approximate=False)
        else:
            shift = bias("up_bias", cfg.hidden).astype(dtype)
            h = nn.gelu(up("up_kernel") + along_last(shift, h.ndim), approximate=True)
        down = param(self, "down_kernel", out_init, (cfg.hidden, d), ("mlp", "embed"))
        x = x + matmul(h, down.astype(dtype))
        if cfg.mlp == "gelu_tanh":
            x = x + along_last(bias("down_bias", d).astype(dtype), x.ndim)
        return shard(x, "batch", "seq", "act_embed"), None


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
            in_axes=(nn.broadcast, nn.broadcast),
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
        cfg, dtype = self.cfg, jnp.dtype(self.cfg.dtype)
        n = tokens.shape[1]
        if n > cfg.seq_len or (n < cfg.seq_len and cfg.position != "rope"):
            raise ValueError(f"MDM takes tokens (B, {cfg.seq_len}), got {tokens.shape}.")
        if at is not None and cfg.unit_sizes is not None:
            raise ValueError(
                "Positions with vocabularies of their own are predicted together; leave `at` out."
            )
        segments = jnp.zeros((1, n), jnp.int32) if segments is None else segments
        axis = "act_vocab"
        if cfg.unit_sizes is not None:
            sizes = np.array(cfg.unit_sizes)
            start = np.concatenate([[0], np.cumsum(sizes + 1)[:-1]]).astype(np.int32)
            hidden = jnp.minimum(tokens, jnp.asarray(sizes, jnp.int32)[None])
            tokens, axis = jnp.asarray(start)[None] + hidden, None
        x = lookup(self.tok, tokens, dtype, axis)
        if cfg.position == "learned":
            x = x + self.pos.astype(dtype)[None]
        for i, labels in enumerate(cfg.groups):
            x = x + getattr(self, f"group{i}").astype(dtype)[jnp.array(labels)][None]
        rope = None
        if cfg.position == "rope":
            rope = rotary(jnp.arange(n)[None], cfg.head_dim, cfg.rope_base)
        x, mask = shard(x, "batch", "seq", "act_embed"), segment_mask(segments)
        if at is None:
            x, _ = self.blocks(x, mask, rope)
        else:
            x = self._blocks_at(x, mask, rope, jnp.maximum(at - 1, 0) if cfg.shift else at)
        x = self.norm(x).astype(dtype)
        if cfg.shift and at is None:
            x = jnp.concatenate([x[:, :1], x[:, :-1]], axis=1)
        return x

    def _blocks_at(self, x: jax.Array, mask: IntervalMask, rope, at: jax.Array) -> jax.Array:
        """What all blocks make of positions at (B, w): the last one is asked for them alone."""
        block, weights = Block(self.cfg, parent=None), self.blocks.variables["params"]

        def layer(i: int | jax.Array, x: jax.Array, *at: jax.Array) -> jax.Array:
            one = jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, i, 0, False), weights)
            return block.apply({"params": one}, x, mask, rope, *at)[0]

        last = self.cfg.num_layers - 1
        return layer(last, jax.lax.fori_loop(0, last, layer, x), at)

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


def forward_flops(cfg: MDMConfig, widths: float, squares: float) -> float:
    """2 FLOPs per multiply-add of forward passes, from the sums of their lengths and squares."""
    d, kv = cfg.width, cfg.kv_heads * cfg.head_dim
    mlp = (3 if cfg.mlp == "swiglu" else 2) * d * cfg.hidden
    kernels = cfg.num_layers * (2 * d * d + 2 * d * kv + mlp) + d * cfg.logits_size
    return 2.0 * (kernels * widths + cfg.num_layers * 2 * d * squares)


def forward_flops_per_token(cfg: MDMConfig) -> float:
    """FLOPs per position of one forward pass over a full row; attention reads all of it."""
    return forward_flops(cfg, 1, cfg.seq_len)

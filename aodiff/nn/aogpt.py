"""Any-order decoders: AO-GPT, sigma-GPT and its variants, Decoupled RoPE, two-stream attention.

A slot is a row of the transformer: slot 0 holds the start vector, slot s >= 1 holds the token at
`own = order[s - 1]`, and slot s predicts the token at `target = order[s]`. Injections differ only
in how a slot learns its target. Worked example, n = 4, order = (2, 0, 3, 1), token@own -> target:
slot 0 start@-1 -> 2, slot 1 x2@2 -> 0, slot 2 x0@0 -> 3, slot 3 x3@3 -> 1.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from aodiff.core.orders import inverse
from aodiff.nn.attention import KVCache, Rows, decode_mask, last_valid
from aodiff.nn.layers import Linear, Norm, along_last, lookup, matmul, normal_init, param, rotary
from aodiff.nn.transformer import REMAT, layers, modulate
from aodiff.partitioning import shard
from pallas_kernels import IMPLS, causal_streams, refusal

INJECTIONS = (
    "adaln",  # AO-GPT: modulation of every norm, arXiv 2506.19935
    "input",  # sigma-GPT: added to the token embedding, arXiv 2404.09562
    "every_layer_shared",  # one table, added again at the input of every block
    "every_layer_own",  # one table a block
    "decoupled_rope",  # queries rotated at the target, keys at the own position, arXiv 2602.16092
    "two_stream",  # a query stream beside the content stream, arXiv 1906.08237
)
ROTARY = ("decoupled_rope", "two_stream")
MASKED = -1e9  # logit of an id that does not exist


@dataclasses.dataclass(frozen=True)
class AOGPTConfig:
    """Shape of an any-order decoder; `norm="layer"` also means sigma-GPT's untruncated init."""

    vocab_size: int
    seq_len: int
    num_layers: int
    width: int
    num_heads: int
    cond_dim: int = 128
    injection: str = "adaln"
    norm: str = "rms"
    qk_norm: bool = True
    tied_head: bool = False
    num_sinks: int = 1
    unit_sizes: tuple[int, ...] | None = None
    dtype: str = "float32"
    remat: str = "none"
    attention: str = "auto"
    kernel_std: float = 0.02  # of projections at the start; embedding tables always have 0.02

    def __post_init__(self):
        if self.injection not in INJECTIONS:
            raise ValueError(
                f"Injection {self.injection!r} is unknown; use one of: {', '.join(INJECTIONS)}."
            )
        for name, allowed in (("norm", ("rms", "layer")), ("remat", REMAT), ("attention", IMPLS)):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"model.{name}={getattr(self, name)!r} is unknown; use one of: "
                    f"{', '.join(allowed)}."
                )
        if self.width % self.num_heads or (self.rotary and self.head_dim % 2):
            raise ValueError(
                f"Width {self.width} with {self.num_heads} heads does not give whole"
                f"{' even' if self.rotary else ''} head sizes; change one of them."
            )
        k = jax.ShapeDtypeStruct((1, self.num_heads, self.seq_len, self.head_dim), self.dtype)
        q = k.update(shape=(*k.shape[:2], 1, *k.shape[2:]))
        if reason := refusal(self.attention, q, k, causal_streams(self.seq_len, (False,))):
            raise ValueError(f"model.attention: {reason}")
        if self.num_sinks not in ((1, 2) if self.rotary else (1,)):
            raise ValueError(
                f"num_sinks={self.num_sinks} with {self.injection}; 2 sinks are for "
                f"{' and '.join(ROTARY)}, use 1."
            )
        if self.unit_sizes is not None and (len(self.unit_sizes) != self.seq_len or self.tied_head):
            raise ValueError(
                f"unit_sizes needs one size for each of the {self.seq_len} units and an untied "
                f"head, got {len(self.unit_sizes)} sizes and tied_head={self.tied_head}."
            )

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads

    @property
    def rotary(self) -> bool:
        return self.injection in ROTARY

    @property
    def truncated_init(self) -> bool:
        return self.norm == "rms"

    @property
    def padded_vocab(self) -> int:
        """Size of the logits: a multiple of 128, or the largest unit where units differ."""
        return -(-self.vocab_size // 128) * 128 if self.unit_sizes is None else max(self.unit_sizes)


class AOGPT(nn.Module):
    """Logits of every position given those before it in an order; see `__call__` and `decode`."""

    cfg: AOGPTConfig

    def setup(self):
        cfg = self.cfg
        init = normal_init(0.02, cfg.truncated_init)
        kernel_init = normal_init(cfg.kernel_std, cfg.truncated_init)
        zeros = nn.initializers.zeros
        d, n, units = cfg.width, cfg.seq_len, cfg.unit_sizes
        values = cfg.padded_vocab if units is None else sum(units)
        vocab_axis = "vocab" if units is None else None
        self.tok = param(self, "tok", init, (values, d), (vocab_axis, "embed"))
        self.none = param(self, "none", init, (1, d), (None, "embed"))
        if cfg.num_sinks == 2:
            self.sink = param(self, "sink", init, (1, d), (None, "embed"))
        if not cfg.rotary:
            self.pos = param(self, "pos", init, (n + 1, d), (None, "embed"))
        if cfg.injection == "adaln":
            self.tpos = param(self, "tpos", init, (n, cfg.cond_dim), (None, None))
            self.ada = Linear(2 * d, (None, "embed"), kernel_init, jnp.dtype(cfg.dtype))
        elif cfg.injection in ("input", "every_layer_shared"):
            self.tpos = param(self, "tpos", init, (n, d), (None, "embed"))
        elif cfg.injection == "two_stream":
            self.query = param(self, "query", init, (1, d), (None, "embed"))
        self.blocks = layers(cfg)
        self.norm = Norm(cfg.norm)
        if units is not None:
            shape = (n, d, max(units))
            self.head = param(self, "head_kernel", kernel_init, shape, (None, "embed", None))
            self.head_bias = param(self, "head_bias", zeros, (n * max(units),), (None,))
        elif not cfg.tied_head:
            self.head = param(self, "head_kernel", kernel_init, (d, values), ("embed", "vocab"))
            self.head_bias = param(self, "head_bias", zeros, (values,), ("vocab",))

    def __call__(
        self, tokens: jax.Array, order: jax.Array, capture: bool = False
    ) -> jax.Array | tuple[jax.Array, jax.Array]:
        """One causal forward pass over the slots of `order`.

        Args:
          tokens: (B, n) int32 in natural order.
          order: (B, n) int32, a permutation in every row.
          capture: also return the attention evidence, by dense attention (one sink only).

        Returns:
          Logits (B, n, V) float32: slot s scores the values of position order[:, s]. With `capture`
          also (num_layers, n, n) float32, `evidence.excess_sum` of every layer.
        """
        cfg = self.cfg
        if tokens.shape != order.shape or tokens.shape[1] != cfg.seq_len:
            raise ValueError(
                f"AOGPT takes tokens and order of shape (B, {cfg.seq_len}), got {tokens.shape} and "
                f"{order.shape}."
            )
        if capture and cfg.num_sinks != 1:
            raise ValueError(f"capture needs num_sinks=1, got {cfg.num_sinks}.")
        permuted = jnp.take_along_axis(tokens, order, axis=1)
        start = jnp.full_like(order[:, :1], -1)
        token, own, target = self.with_sink(
            jnp.concatenate([start, permuted[:, :-1]], axis=1),
            jnp.concatenate([start, order[:, :-1]], axis=1),
            order,
        )
        x, query_at, streams = self.embed(token, own, target), target, 1
        length = x.shape[1]
        if cfg.injection == "two_stream":
            x = jnp.concatenate([x, self.queries(target)], axis=1)
            query_at, streams = jnp.concatenate([own, target], axis=1), 2
        # Both streams use the same mask: query row s sees content slots 0..s.
        mask = causal_streams(length, strict=(False,) * streams)
        rows = self.rows(own, query_at, mask).replace(
            streams=streams, keys=length, order=order if capture else None
        )
        x, evidence = self.blocks(shard(x, "batch", "seq", "act_embed"), rows, None)
        logits = self.logits(x[:, -cfg.seq_len :], order, every_unit=True)
        return (logits, evidence) if capture else logits

    def decode(
        self,
        token: jax.Array,
        own: jax.Array,
        target: jax.Array,
        valid: jax.Array,
        probe_target: jax.Array,
        cache: KVCache,
        cache_valid: jax.Array,
    ) -> tuple[jax.Array, KVCache]:
        """Extends a cache by m content rows and scores r targets, each independently of the others.

        Every row sees the valid cache slots; content rows are causal among the valid ones. A probe
        sees what the last valid content row sees, with its own target in place of that row's.

        Args:
          token: (B, m) int32. own: (B, m) position held, -1 for the start slot (token ignored).
          target: (B, m) the element that follows in the order. valid: (B, m) bool.
          probe_target: (B, r) int32.
          cache: keys and values (N, B, H, T, K). cache_valid: (B, T) bool.

        Returns:
          Logits (B, r, V) float32 of the probe targets, and the keys and values of the m content
          rows, (N, B, H, m, K); the caller writes them to the cache.
        """
        cfg, probes = self.cfg, probe_target.shape[1]
        sinks = cfg.num_sinks - 1
        token, own, target = self.with_sink(token, own, target)
        valid = jnp.pad(valid, ((0, 0), (sinks, 0)), constant_values=True)
        m = token.shape[1]
        if cfg.injection == "two_stream":
            x = jnp.concatenate(
                [self.embed(token, own, target), self.queries(probe_target)], axis=1
            )
            keys, query_at = m, jnp.concatenate([own, probe_target], axis=1)
        else:
            copy = jnp.broadcast_to(last_valid(valid), probe_target.shape)
            token, own = (
                jnp.concatenate([a, jnp.take_along_axis(a, copy, axis=1)], axis=1)
                for a in (token, own)
            )
            query_at = jnp.concatenate([target, probe_target], axis=1)
            x, keys = self.embed(token, own, query_at), m + probes
        probe_keys = cfg.injection != "two_stream"
        mask = decode_mask(valid, probes, cache_valid, sinks=sinks, probe_keys=probe_keys)
        rows = self.rows(own, query_at, mask).replace(keys=keys, keep=(sinks, m))
        x, new = self.blocks(x, rows, cache)
        return self.logits(x[:, m:], probe_target), new

    def init_cache(self, batch: int, length: int) -> KVCache:
        """Returns an all-zero cache of `length` slots."""
        cfg = self.cfg
        shape = (cfg.num_layers, batch, cfg.num_heads, length, cfg.head_dim)
        return KVCache(jnp.zeros(shape, cfg.dtype), jnp.zeros(shape, cfg.dtype))

    def with_sink(self, token, own, target):
        """Puts the second sink, at position n, before the other slots; it sees only itself."""
        if self.cfg.num_sinks == 1:
            return token, own, target
        first = target[:, :1]
        return (
            jnp.concatenate([jnp.zeros_like(first), token], axis=1),
            jnp.concatenate([jnp.full_like(first, self.cfg.seq_len), own], axis=1),
            jnp.concatenate([first, target], axis=1),
        )

    def embed(self, token: jax.Array, own: jax.Array, target: jax.Array) -> jax.Array:
        """Embeds slots (B, R) of tokens at `own` (-1: start, n: second sink), (B, R, D)."""
        cfg = self.cfg
        dtype = jnp.dtype(cfg.dtype)
        if cfg.unit_sizes is not None:
            offsets = np.concatenate([[0], np.cumsum(cfg.unit_sizes)[:-1]]).astype(np.int32)
            token = token + jnp.asarray(offsets)[jnp.clip(own, 0, cfg.seq_len - 1)]
        axis = "act_vocab" if cfg.unit_sizes is None else None
        x = lookup(self.tok, jnp.maximum(token, 0), dtype, axis)
        x = jnp.where((own < 0)[..., None], self.none.astype(dtype)[None], x)
        if cfg.num_sinks == 2:
            x = jnp.where((own == cfg.seq_len)[..., None], self.sink.astype(dtype)[None], x)
        if not cfg.rotary:
            x = x + lookup(self.pos, own + 1, dtype)
        if cfg.injection == "input":
            x = x + lookup(self.tpos, target, dtype)
        return x

    def queries(self, target: jax.Array) -> jax.Array:
        """The query stream's input, one learned vector for every target, (B, R, D)."""
        query = self.query.astype(self.cfg.dtype)[None]
        return jnp.broadcast_to(query, (*target.shape, self.cfg.width))

    def rows(self, own: jax.Array, query_at: jax.Array, mask) -> Rows:
        """Rows that hold `own` (B, keys) and whose queries stand at `query_at` (B, R)."""
        cfg = self.cfg
        rows = Rows(mask=mask, target=query_at)
        if cfg.injection == "adaln":
            return rows.replace(cond=nn.silu(self.tpos[query_at]).astype(cfg.dtype))
        if cfg.injection == "every_layer_shared":
            return rows.replace(added=lookup(self.tpos, query_at, cfg.dtype))
        if cfg.rotary:
            return rows.replace(
                rope_q=rotary(query_at, cfg.head_dim), rope_k=rotary(own, cfg.head_dim)
            )
        return rows

    def logits(self, x: jax.Array, target: jax.Array, every_unit: bool = False) -> jax.Array:
        """Final norm and head of rows x (B, R, D) that predict `target` (B, R).

        `every_unit` states that `target` is a permutation of all units.
        """
        cfg = self.cfg
        z = self.norm(x)
        if cfg.injection == "adaln":
            z = modulate(z, *jnp.split(self.ada(nn.silu(self.tpos[target])), 2, axis=-1))
        z = z.astype(cfg.dtype)
        if cfg.unit_sizes is not None:
            return self.unit_logits(z, target, every_unit)
        head = self.tok.T if cfg.tied_head else self.head
        out = matmul(z, head.astype(cfg.dtype), jnp.float32)
        bias = jnp.zeros((cfg.padded_vocab,)) if cfg.tied_head else self.head_bias
        bias = jnp.where(jnp.arange(cfg.padded_vocab) < cfg.vocab_size, bias, MASKED)
        return shard(out + along_last(bias, 3), "batch", "seq", "act_vocab")

    def unit_logits(self, z: jax.Array, target: jax.Array, every_unit: bool) -> jax.Array:
        """One head a unit: codes that a unit does not have get probability zero."""
        cfg, f32 = self.cfg, jnp.float32
        sizes = jnp.asarray(cfg.unit_sizes, jnp.int32)
        head = self.head.astype(cfg.dtype)
        if every_unit:  # one matmul a unit, in position space
            by_unit = jnp.take_along_axis(z, inverse(target)[..., None], axis=1)
            out = jnp.einsum("bnd,ndv->bnv", by_unit, head, preferred_element_type=f32)
            out = jnp.take_along_axis(out, target[..., None], axis=1)
        else:
            out = jnp.einsum("brd,brdv->brv", z, head[target], preferred_element_type=f32)
        out = out + self.head_bias.reshape(cfg.seq_len, -1)[target]
        exists = jnp.arange(cfg.padded_vocab)[None, None, :] < sizes[target][..., None]
        return jnp.where(exists, out, MASKED)

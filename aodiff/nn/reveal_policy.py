"""Policies that choose the next position to reveal from what a frozen denoiser predicts.

They see statistics of the logits and which positions are masked, nothing else: a token that is not
revealed yet cannot reach them. Source: SAS, arXiv 2606.23567; decoding.md 11.2 and 11.3.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from aodiff.nn.layers import Linear, Norm, param, rotary
from aodiff.nn.mdm import Block
from aodiff.nn.mdm_config import MDMConfig
from pallas_kernels import segment_mask

POLICIES = ("mlp", "transformer")
EXCLUDED = -1e9  # finite, so that gradients of a softmax over it are
FLOOR = 1e-6  # of probabilities, before their logarithm
SCALE = 5.0  # divides log probabilities, to features of order one
NEAR = 8  # positions to either side that count as a neighbourhood of text
HEADS = 4


def board_peers(groups: tuple[tuple[int, ...], ...]) -> np.ndarray:
    """Which cells share a label in any of the labellings `groups`, (n, n) bool, False on itself."""
    same = np.any([np.equal.outer(x, x) for x in np.array(groups)], axis=0)
    return same & ~np.eye(len(same), dtype=bool)


def board_features(logits: jax.Array, masked: jax.Array, peers: np.ndarray) -> jax.Array:
    """Features of the cells of a board (B, n, 2 V + 7) float32.

    Log probabilities in descending order / `SCALE`, these probabilities, entropy, margin, masked
    fraction of the board, mean entropy of its masked cells, difference to that, and masked fraction
    and mean entropy of the masked peers.

    Args:
      logits: (B, n, V) float32. masked: (B, n) bool.
      peers: from `board_peers`.
    """
    logp, prob, entropy = _law(logits)
    top = jax.lax.top_k(logp, logits.shape[-1])[0]
    uncertain = jnp.where(masked, entropy, 0.0)
    number = jnp.sum(masked, axis=1, keepdims=True, dtype=jnp.float32)
    mean = jnp.sum(uncertain, axis=1, keepdims=True) / jnp.maximum(number, 1.0)
    near = jnp.asarray(peers, jnp.float32)
    masked_peers = masked.astype(jnp.float32) @ near
    columns = [
        entropy,
        jnp.exp(top[..., 0]) - jnp.exp(top[..., 1]),
        jnp.broadcast_to(number / masked.shape[1], entropy.shape),
        jnp.broadcast_to(mean, entropy.shape),
        entropy - mean,
        masked_peers / peers.sum(1)[None],
        uncertain @ near / jnp.maximum(masked_peers, 1.0),
    ]
    return jnp.concatenate([top / SCALE, jnp.exp(top), jnp.stack(columns, axis=-1)], axis=-1)


def text_features(
    logits: jax.Array, masked: jax.Array, given: jax.Array, live: jax.Array, eos: int | None
) -> jax.Array:
    """Features of the positions of a text (B, n, 16) float32, all 0 where it is padding.

    Log of the top probability / `SCALE`, the top 3 probabilities, margin, entropy / ln V,
    probability of the end of the sequence and whether it is the most likely token, masked, given,
    place among the positions to write, log distance to the nearest known position on the left and
    on the right, masked fraction and mean entropy within `NEAR`, masked fraction of all to write.

    Args:
      logits: (B, n, V) float32. masked, given, live: (B, n) bool; given is the prompt, and what is
        not live is padding.
      eos: id of the end of the sequence; None: there is none.
    """
    logp, prob, entropy = _law(logits)
    n, vocab = logits.shape[1:]
    top = jnp.exp(jax.lax.top_k(logp, 3)[0])
    ends = jnp.zeros_like(entropy) if eos is None else prob[..., eos]
    is_end = (jnp.argmax(logp, axis=-1) == (-1 if eos is None else eos)) & masked
    open_ = live & ~given
    write = jnp.maximum(jnp.sum(open_, axis=1, keepdims=True), 1).astype(jnp.float32)
    place = (jnp.cumsum(open_, axis=1) - 1) / write
    near = jnp.asarray(np.abs(np.subtract.outer(np.arange(n), np.arange(n))) <= NEAR, jnp.float32)
    hidden = masked.astype(jnp.float32)
    hidden_near = hidden @ near
    columns = [
        jnp.max(logp, axis=-1) / SCALE,
        *jnp.moveaxis(top, -1, 0),
        top[..., 0] - top[..., 1],
        entropy / np.log(vocab),
        ends,
        is_end,
        masked,
        given,
        place,
        _distance(masked),
        _distance(masked[:, ::-1])[:, ::-1],
        hidden_near / jnp.maximum(live.astype(jnp.float32) @ near, 1.0),
        jnp.where(masked, entropy, 0.0) @ near / jnp.maximum(hidden_near, 1.0) / np.log(vocab),
        jnp.broadcast_to(jnp.sum(hidden, axis=1, keepdims=True) / write, entropy.shape),
    ]
    found = jnp.stack([c.astype(jnp.float32) for c in columns], axis=-1)
    return jnp.where(live[..., None], found, 0.0)


def _law(logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log probabilities, at least that of `FLOOR`, probabilities, and entropy in nats."""
    logp = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    prob = jnp.exp(logp)
    logp = jnp.maximum(logp, np.log(FLOOR).astype(np.float32))
    return logp, prob, -jnp.sum(prob * logp, axis=-1)


def _distance(masked: jax.Array) -> jax.Array:
    """log(1 + distance) to the nearest known position on the left, the border if there is none."""
    position = jnp.arange(masked.shape[1])
    known = jnp.where(masked, -1, position[None])
    return jnp.log1p((position[None] - jax.lax.cummax(known, axis=1)).astype(jnp.float32))


class RevealMLP(nn.Module):
    """One MLP for all positions; with `cells` it also knows which of so many it looks at."""

    width: int
    cells: int = 0

    @nn.compact
    def __call__(self, features: jax.Array) -> jax.Array:
        """Scores (..., n) float32 of features (..., n, F); all zero with fresh parameters."""
        x = features.astype(jnp.float32)
        x = _dense(self.width, "first")(x)
        if self.cells:
            init = nn.initializers.lecun_normal()
            where = param(self, "cells", init, (self.cells, self.width), (None, None))
            x = x + where.reshape((1,) * (x.ndim - 2) + where.shape)
        x = nn.silu(_dense(self.width, "second")(nn.silu(x)))
        return _zero(x)


class RevealTransformer(nn.Module):
    """A linear layer, one pre-norm bidirectional block with rotary positions, a linear layer.

    A position whose features are all 0 is padding, which no other sees.
    """

    width: int

    @nn.compact
    def __call__(self, features: jax.Array) -> jax.Array:
        """Scores (..., n) float32 of features (..., n, F); all zero with fresh parameters."""
        *lead, n, _ = features.shape
        shape = dict(vocab_size=1, seq_len=n, num_layers=1, num_heads=HEADS, position="rope")
        cfg = MDMConfig(**shape, width=self.width, mlp="gelu", attention="auto", kernel_std=0.1)
        x = features.astype(jnp.float32).reshape(-1, n, features.shape[-1])
        segments = jnp.where(jnp.any(x != 0, axis=-1), 0, -1)
        x = _dense(self.width, "first")(x)
        rope = rotary(jnp.arange(n)[None], cfg.head_dim)
        x, _ = Block(cfg, name="block")(x, segment_mask(segments), rope)
        return _zero(Norm("rms", None, name="norm")(x)).reshape(*lead, n)


def _dense(width: int, name: str) -> Linear:
    return Linear(width, (None, None), nn.initializers.lecun_normal(), jnp.float32, name=name)


def _zero(x: jax.Array) -> jax.Array:
    kernel_init = nn.initializers.zeros
    return Linear(1, (None, None), kernel_init, jnp.float32, name="last")(x)[..., 0]


def log_policy(scores: jax.Array, masked: jax.Array) -> jax.Array:
    """Log probabilities (..., n) of choosing each position: a softmax over the masked ones."""
    logv = jax.nn.log_softmax(jnp.where(masked, scores, EXCLUDED), axis=-1)
    return jnp.where(masked, logv, EXCLUDED)


@dataclasses.dataclass(frozen=True)
class RevealPolicy:
    """Features, network and prior of a policy: everything between logits and scores.

    Attributes:
      net: scores features.
      vocab_size: V, the ids that may be emitted.
      groups: labellings of the cells of a board, whose features it then has; (): those of text.
      eos: id of the end of the sequence of a text, or None.
      prior: weight of the log of the top probability, added to the scores; 0 starts uniform.
    """

    net: nn.Module
    vocab_size: int
    groups: tuple[tuple[int, ...], ...] = ()
    eos: int | None = None
    prior: float = 0.0

    def init(self, key: jax.Array, length: int) -> dict:
        """Parameters boxed with logical axes, for rows of `length` positions."""
        blank = jnp.zeros((1, length), bool)
        logits = jnp.zeros((1, length, self.vocab_size))
        return self.net.init(key, self.features(logits, blank, blank, ~blank))

    def features(
        self, logits: jax.Array, masked: jax.Array, given: jax.Array, live: jax.Array
    ) -> jax.Array:
        """(B, n, F) bfloat16; they are kept for whole trajectories.

        Args:
          logits: (B, n, at least V) float32. masked, given, live: (B, n) bool.
        """
        logits = logits[..., : self.vocab_size]
        if self.groups:
            found = board_features(logits, masked, board_peers(self.groups))
        else:
            found = text_features(logits, masked, given, live, self.eos)
        return found.astype(jnp.bfloat16)

    def scores(self, params: dict, features: jax.Array) -> jax.Array:
        """Scores (..., n) float32 of `features` (..., n, F): higher is revealed earlier."""
        return self.net.apply(params, features) + self.start(features)

    def start(self, features: jax.Array) -> jax.Array:
        """What `scores` is with fresh parameters."""
        return self.prior * SCALE * features[..., 0].astype(jnp.float32)

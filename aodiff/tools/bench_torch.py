"""A plain eager PyTorch AO-GPT training step, the yardstick of `bench train_step`.

Written from the paper's description as one would write it in PyTorch: fused attention, fused AdamW,
float32, no compilation. It takes its initial weights from our parameters, so both sides start from
the same loss. Source: arXiv 2506.19935 sections 2.2 and 3; dimensions as in `aodiff.nn.aogpt`.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of the measured model: L, D, H, n, V (padded) and the width of the condition."""

    num_layers: int
    width: int
    num_heads: int
    seq_len: int
    vocab: int
    cond_dim: int


class Block(nn.Module):
    """AdaLN6 block: RMSNorm, QK-norm, causal attention over slots, GELU MLP, gated residuals."""

    def __init__(self, s: Shape):
        super().__init__()
        d, self.heads = s.width, s.num_heads
        self.ln1 = nn.RMSNorm(d, eps=1e-5)
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.qn = nn.RMSNorm(d // s.num_heads, eps=1e-5)
        self.kn = nn.RMSNorm(d // s.num_heads, eps=1e-5)
        self.ln2 = nn.RMSNorm(d, eps=1e-5)
        self.fc, self.proj = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.ada = nn.Linear(s.cond_dim, 6 * d)

    def forward(self, h: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        """h (B, n, D), c (B, n, C) -> (B, n, D)."""
        batch, n, d = h.shape
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.ada(c).chunk(6, dim=-1)
        x = self.ln1(h) * (1 + scale_a) + shift_a
        q, k, v = self.qkv(x).view(batch, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(self.qn(q), self.kn(k), v, is_causal=True)
        h = h + gate_a * self.o(y.transpose(1, 2).reshape(batch, n, d))
        x = self.ln2(h) * (1 + scale_m) + shift_m
        return h + gate_m * self.proj(F.gelu(self.fc(x)))


class AOGPTTorch(nn.Module):
    """tokens, order (B, n) int64 -> logits (B, n, V) in slot order."""

    def __init__(self, s: Shape):
        super().__init__()
        d = s.width
        self.tok = nn.Embedding(s.vocab, d)
        self.pos = nn.Embedding(s.seq_len + 1, d)
        self.tpos = nn.Embedding(s.seq_len, s.cond_dim)
        self.none = nn.Embedding(1, d)
        self.blocks = nn.ModuleList(Block(s) for _ in range(s.num_layers))
        self.lnf = nn.RMSNorm(d, eps=1e-5)
        self.adaf = nn.Linear(s.cond_dim, 2 * d)
        self.head = nn.Linear(d, s.vocab)

    def forward(self, tokens: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        permuted = tokens.gather(1, order)
        start = (self.none.weight + self.pos.weight[:1]).expand(len(tokens), 1, -1)
        rest = self.tok(permuted[:, :-1]) + self.pos(order[:, :-1] + 1)
        h = torch.cat([start, rest], dim=1)
        c = F.silu(self.tpos(order))
        for block in self.blocks:
            h = block(h, c)
        shift, scale = self.adaf(c).chunk(2, dim=-1)
        return self.head(self.lnf(h) * (1 + scale) + shift)


class TorchStep:
    """One AdamW step with global-norm clipping; `run` returns the loss in nats per token."""

    def __init__(self, model: AOGPTTorch, lr: float, weight_decay: float, clip: float):
        self.model, self.clip = model, clip
        decay = [p for p in model.parameters() if p.ndim >= 2]
        rest = [p for p in model.parameters() if p.ndim < 2]
        groups = [
            {"params": decay, "weight_decay": weight_decay},
            {"params": rest, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)

    def loss(self, tokens: np.ndarray, order: np.ndarray) -> torch.Tensor:
        """Mean nats per token of tokens, order (B, n) int32."""
        tokens, order = torch.from_numpy(tokens).long(), torch.from_numpy(order).long()
        logits = self.model(tokens, order)
        return F.cross_entropy(logits.flatten(0, 1), tokens.gather(1, order).flatten())

    def run(self, tokens: np.ndarray, order: np.ndarray) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(tokens, order)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        return loss.item()


def load(model: AOGPTTorch, arrays: Sequence[np.ndarray]) -> None:
    """Sets the parameters, in order of registration, from `import_torch.to_reference`."""
    with torch.no_grad():
        for parameter, array in zip(model.parameters(), arrays, strict=True):
            parameter.copy_(torch.tensor(np.array(array)))

"""Plain eager PyTorch, the yardsticks of `bench train_step` and `bench decode`.

Written from the papers' descriptions as one would write it in PyTorch: fused attention and AdamW,
float32, no compilation. Weights are taken from our parameters, so that both sides compute the same.
AO-GPT: arXiv 2506.19935 sections 2.2 and 3; dimensions as in `aodiff.nn.aogpt`. Masked diffusion:
the loop of the published samplers, decoding.md 4 and 6.1.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from aodiff.nn.mdm_config import MDMConfig


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
    """Sets the parameters, in order of registration, from `aogpt_weights.to_reference`."""
    with torch.no_grad():
        for parameter, array in zip(model.parameters(), arrays, strict=True):
            parameter.copy_(torch.tensor(np.array(array)))


class MDMBlock(nn.Module):
    """RMSNorm, attention with QK-norm, SwiGLU MLP."""

    def __init__(self, cfg: MDMConfig, weights: dict[str, np.ndarray]):
        super().__init__()
        d, self.heads = cfg.width, cfg.num_heads
        self.norms = nn.ParameterDict(
            {
                name: torch.tensor(weights[name]["scale"])
                for name in ("attn_norm", "q_norm", "k_norm", "mlp_norm")
            }
        )
        qkv = [weights[f"{name}_kernel"].reshape(d, d) for name in "qkv"]
        self.qkv = _linear(np.concatenate(qkv, axis=1))
        self.out = _linear(weights["out_kernel"].reshape(d, d))
        self.gate_up = _linear(
            np.concatenate([weights["gate_kernel"], weights["up_kernel"]], axis=1)
        )
        self.down = _linear(weights["down_kernel"])
        self.epsilon = cfg.norm_epsilon

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.norms[name], self.epsilon)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, n, D) -> (B, n, D)."""
        batch, n, d = x.shape
        qkv = self.qkv(self.norm("attn_norm", x)).view(batch, n, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(self.norm("q_norm", q), self.norm("k_norm", k), v)
        x = x + self.out(y.transpose(1, 2).reshape(batch, n, d))
        gate, up = self.gate_up(self.norm("mlp_norm", x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class MDMTorch(nn.Module):
    """tokens (B, n) int64 -> logits (B, n, V), with the weights of a `MDM` of its defaults."""

    def __init__(self, cfg: MDMConfig, weights: dict[str, Any]):
        super().__init__()
        self.cfg = cfg
        self.tokens = nn.Parameter(torch.tensor(weights["embedding"]))
        self.positions = nn.Parameter(torch.tensor(weights["positions"]))
        layer = lambda tree, i: {
            name: layer(x, i) if isinstance(x, dict) else x[i] for name, x in tree.items()
        }
        self.blocks = nn.ModuleList(
            MDMBlock(cfg, layer(weights["blocks"], i)) for i in range(cfg.num_layers)
        )
        self.scale = nn.Parameter(torch.tensor(weights["norm"]["scale"]))
        self.head = _linear(weights["head_kernel"][:, : cfg.vocab_size])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens[tokens] + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(F.rms_norm(x, x.shape[-1:], self.scale, self.cfg.norm_epsilon))


@torch.no_grad()
def decode(
    model: nn.Module,
    tokens: torch.Tensor,
    mask_id: int,
    block: int,
    steps: int,
    temperature: float,
) -> torch.Tensor:
    """Fills the masks of `tokens` (B, n) int64 block by block, the most confident ones first."""
    n = tokens.shape[1]
    steps = steps * block // n
    for end in range(block, n + 1, block):
        num_masked = (tokens[:, end - block : end] == mask_id).sum(dim=1, keepdim=True)
        counts = (num_masked // steps).expand(-1, steps).clone()
        for row, rest in enumerate((num_masked % steps).flatten().tolist()):
            counts[row, :rest] += 1
        for step in range(steps):
            masked = tokens == mask_id
            logits = model(tokens)
            proposal = _noisy(logits, temperature).argmax(dim=-1)
            chance = F.softmax(logits, dim=-1).gather(-1, proposal[..., None])[..., 0]
            chance[:, end:] = -torch.inf
            proposal = torch.where(masked, proposal, tokens)
            confidence = torch.where(masked, chance, -torch.inf)
            reveal = torch.zeros_like(masked)
            for row in range(len(tokens)):
                _, best = torch.topk(confidence[row], k=int(counts[row, step]))
                reveal[row, best] = True
            tokens = torch.where(reveal, proposal, tokens)
    return tokens


def _noisy(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    if temperature == 0:
        return logits
    logits = logits.double()
    return logits.exp() / (-torch.log(torch.rand_like(logits))) ** temperature


def _linear(weight: np.ndarray) -> nn.Linear:
    """A linear layer without bias from weight (in, out)."""
    layer = nn.Linear(*weight.shape, bias=False)
    layer.weight = nn.Parameter(torch.tensor(weight.T.copy()))
    return layer

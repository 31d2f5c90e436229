"""Names of published masked diffusion models and the parameters of `nn.mdm.MDM` they stand for.

Published linear maps are (outputs, inputs); kernels here are (inputs, outputs), heads apart. Blocks
are stacked here and numbered there ({i}). Source: the authors' checkpoints; mdm.md 7.2.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from aodiff.nn.mdm import MDMConfig

Names = dict[str, str | tuple[str, ...]]
Shapes = dict[str, tuple[int, ...]]
QKV = ("blocks/q_kernel", "blocks/k_kernel", "blocks/v_kernel")

LLADA: Names = {
    "model.transformer.wte.weight": "embedding",
    "model.transformer.blocks.{i}.attn_norm.weight": "blocks/attn_norm/scale",
    "model.transformer.blocks.{i}.q_proj.weight": "blocks/q_kernel",
    "model.transformer.blocks.{i}.k_proj.weight": "blocks/k_kernel",
    "model.transformer.blocks.{i}.v_proj.weight": "blocks/v_kernel",
    "model.transformer.blocks.{i}.attn_out.weight": "blocks/out_kernel",
    "model.transformer.blocks.{i}.ff_norm.weight": "blocks/mlp_norm/scale",
    "model.transformer.blocks.{i}.ff_proj.weight": "blocks/gate_kernel",
    "model.transformer.blocks.{i}.up_proj.weight": "blocks/up_kernel",
    "model.transformer.blocks.{i}.ff_out.weight": "blocks/down_kernel",
    "model.transformer.ln_f.weight": "norm/scale",
    "model.transformer.ff_out.weight": "head_kernel",
}
QWEN: Names = {  # Dream, Open-dCoder, and Qwen3; what a config has not is not asked for
    "model.embed_tokens.weight": "embedding",
    "model.layers.{i}.input_layernorm.weight": "blocks/attn_norm/scale",
    "model.layers.{i}.self_attn.q_proj.weight": "blocks/q_kernel",
    "model.layers.{i}.self_attn.k_proj.weight": "blocks/k_kernel",
    "model.layers.{i}.self_attn.v_proj.weight": "blocks/v_kernel",
    "model.layers.{i}.self_attn.q_proj.bias": "blocks/q_bias",
    "model.layers.{i}.self_attn.k_proj.bias": "blocks/k_bias",
    "model.layers.{i}.self_attn.v_proj.bias": "blocks/v_bias",
    "model.layers.{i}.self_attn.q_norm.weight": "blocks/q_norm/scale",
    "model.layers.{i}.self_attn.k_norm.weight": "blocks/k_norm/scale",
    "model.layers.{i}.self_attn.o_proj.weight": "blocks/out_kernel",
    "model.layers.{i}.post_attention_layernorm.weight": "blocks/mlp_norm/scale",
    "model.layers.{i}.mlp.gate_proj.weight": "blocks/gate_kernel",
    "model.layers.{i}.mlp.up_proj.weight": "blocks/up_kernel",
    "model.layers.{i}.mlp.down_proj.weight": "blocks/down_kernel",
    "model.norm.weight": "norm/scale",
    "lm_head.weight": "head_kernel",
}
SMDM: Names = {
    "transformer.wte.weight": "embedding",
    "transformer.h.{i}.norm_1.weight": "blocks/attn_norm/scale",
    "transformer.h.{i}.attn.attn.weight": ("grouped", *QKV),
    "transformer.h.{i}.attn.proj.weight": "blocks/out_kernel",
    "transformer.h.{i}.norm_2.weight": "blocks/mlp_norm/scale",
    "transformer.h.{i}.mlp.swiglu.w1.weight": "blocks/gate_kernel",
    "transformer.h.{i}.mlp.swiglu.w2.weight": "blocks/up_kernel",
    "transformer.h.{i}.mlp.swiglu.w3.weight": "blocks/down_kernel",
    "transformer.ln_f.weight": "norm/scale",
    "lm_head.weight": "head_kernel",
}
MDLM: Names = {  # with time folded away, see aodiff/tools/mdlm_time.py, which makes the norms' bias
    "backbone.vocab_embed.embedding": "embedding",
    "backbone.blocks.{i}.norm1.weight": "blocks/attn_norm/scale",
    "backbone.blocks.{i}.norm1.bias": "blocks/attn_norm/bias",
    "backbone.blocks.{i}.attn_qkv.weight": ("stacked", *QKV),
    "backbone.blocks.{i}.attn_out.weight": "blocks/out_kernel",
    "backbone.blocks.{i}.norm2.weight": "blocks/mlp_norm/scale",
    "backbone.blocks.{i}.norm2.bias": "blocks/mlp_norm/bias",
    "backbone.blocks.{i}.mlp.0.weight": "blocks/up_kernel",
    "backbone.blocks.{i}.mlp.0.bias": "blocks/up_bias",
    "backbone.blocks.{i}.mlp.2.weight": "blocks/down_kernel",
    "backbone.blocks.{i}.mlp.2.bias": "blocks/down_bias",
    "backbone.output_layer.norm_final.weight": "norm/scale",
    "backbone.output_layer.norm_final.bias": "norm/bias",
    "backbone.output_layer.linear.weight": "head_kernel",
    "backbone.output_layer.linear.bias": "head_bias",
}


@dataclasses.dataclass(frozen=True)
class Family:
    """Published models of the same names.

    rows, outputs: of the published embedding and head; ours may have more of both, all zero.
    """

    names: Names
    rows: Callable[[MDMConfig], int] = lambda cfg: cfg.rows
    outputs: Callable[[MDMConfig], int] = lambda cfg: cfg.rows


FAMILIES = {
    "llada": Family(LLADA),
    "qwen": Family(QWEN),
    "smdm": Family(SMDM, lambda cfg: cfg.mask + 1, lambda cfg: cfg.mask),
    "mdlm": Family(MDLM, lambda cfg: cfg.mask + 1, lambda cfg: cfg.mask + 1),
}
BUFFERS = ("rotary_emb.inv_freq",)  # how names of tables end that are computed here


def entries(family: Family, leaves: Mapping) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """(published name, how it is cut, its parameters) of those the model has."""
    for name, target in family.names.items():
        how, *targets = ("whole", target) if isinstance(target, str) else target
        if set(targets) <= set(leaves):
            yield name, how, tuple(targets)


def numbered(name: str, cfg: MDMConfig) -> list[str]:
    """The published names of all blocks, or the one name of what lies outside of them."""
    return [name.format(i=i) for i in range(cfg.num_layers)] if "{i}" in name else [name]


def published_shapes(family: Family, cfg: MDMConfig, leaves: Shapes) -> Shapes:
    """Shapes of the published tensors, by name; `leaves` are those of the parameters here."""
    shapes = {}
    for name, _, targets in entries(family, leaves):
        shape = [_published_shape(family, cfg, target, leaves[target]) for target in targets]
        merged = (sum(s[0] for s in shape), *shape[0][1:])
        shapes |= dict.fromkeys(numbered(name, cfg), merged)
    return shapes


def _published_shape(family: Family, cfg: MDMConfig, leaf: str, shape: tuple) -> tuple[int, ...]:
    shape = shape[1:] if leaf.startswith("blocks/") else shape
    if leaf == "embedding":
        return (family.rows(cfg), *shape[1:])
    if leaf.startswith("head"):
        return (family.outputs(cfg), *shape[:-1])
    if leaf.endswith("kernel"):
        n = _num_inputs(leaf)
        return math.prod(shape[n:]), math.prod(shape[:n])
    return shape


def _num_inputs(leaf: str) -> int:
    """How many dimensions of a kernel are inputs."""
    return 2 if leaf == "blocks/out_kernel" else 1


def to_parameter(array: np.ndarray, leaf: str, shape: tuple[int, ...]) -> np.ndarray:
    """A view of a published tensor as a parameter (of one block) of `shape`; vocabularies stay."""
    if not leaf.endswith("kernel"):
        return array
    n = _num_inputs(leaf)
    if leaf == "head_kernel":
        return array.T
    split = array.reshape(*shape[n:], *shape[:n])
    outputs = len(shape) - n
    return split.transpose(*range(outputs, len(shape)), *range(outputs))


def to_published(array: np.ndarray, leaf: str, shape: tuple[int, ...]) -> np.ndarray:
    """The inverse of `to_parameter`; rows beyond the published `shape` are left out."""
    if leaf.endswith("kernel"):
        n = _num_inputs(leaf)
        array = array.transpose(*range(n, array.ndim), *range(n))
        array = array.reshape(-1, math.prod(array.shape[array.ndim - n :]))
    return array[: shape[0]]


def cut(array: np.ndarray, how: str, cfg: MDMConfig) -> list[np.ndarray]:
    """Queries, keys and values (outputs, inputs) of a fused projection; or the array itself.

    "stacked": all queries, all keys, all values. "grouped": for each group of heads that share a
    key its queries, its key, its value.
    """
    if how == "whole":
        return [array]
    if how == "stacked":
        return np.split(array, 3)
    k, per_group = cfg.head_dim, cfg.num_heads // cfg.kv_heads
    groups = array.reshape(cfg.kv_heads, per_group + 2, k, -1)
    parts = groups[:, :per_group], groups[:, per_group], groups[:, per_group + 1]
    return [part.reshape(-1, array.shape[1]) for part in parts]


def fuse(parts: list[np.ndarray], how: str, cfg: MDMConfig) -> np.ndarray:
    """The inverse of `cut`."""
    if how in ("whole", "stacked"):
        return np.concatenate(parts)
    groups = [part.reshape(cfg.kv_heads, -1, cfg.head_dim, part.shape[1]) for part in parts]
    return np.concatenate(groups, axis=1).reshape(-1, parts[0].shape[1])

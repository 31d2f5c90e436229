"""The denoiser of a config, and what the data tell it about its positions."""

import numpy as np

from aodiff.config import ConfigError
from aodiff.data import DataInfo
from aodiff.nn.mdm import MDM, MDMConfig


def build_model(config, info: DataInfo) -> MDM:
    """The denoiser of `config.model` for the vocabulary and length of the data.

    Raises:
      ConfigError, ValueError: a model that cannot be built, or whose mask is a symbol of the data.
    """
    m = config.model
    if m.mask_id is not None and info.tokenizer is None and m.mask_id < info.vocab_size:
        raise ConfigError(
            f"model.mask_id={m.mask_id} is one of the {info.vocab_size} symbols of {info.name}; "
            "leave it at None, or use an id beyond them"
        )
    return MDM(
        MDMConfig(
            vocab_size=info.vocab_size,
            seq_len=info.seq_len,
            num_layers=m.num_layers,
            width=m.width,
            num_heads=m.num_heads,
            mlp=m.mlp,
            mlp_dim=m.mlp_dim,
            position=m.position,
            num_kv_heads=m.num_kv_heads,
            rope_base=m.rope_base,
            norm=m.norm,
            norm_epsilon=m.norm_epsilon,
            qkv_bias=m.qkv_bias,
            shift=m.shift,
            mask_id=m.mask_id,
            table_size=m.table_size,
            groups=board_groups(info) if m.position == "grid" else (),
            qk_norm=m.qk_norm,
            tied_head=m.tied_head,
            head_bias=m.head_bias,
            unit_sizes=info.unit_sizes,
            dtype=m.dtype,
            remat=m.remat,
            attention=m.attention,
            kernel_std=m.kernel_std,
        )
    )


def board_groups(info: DataInfo) -> tuple[tuple[int, ...], ...]:
    """Rows and columns of each position of a grid, and boxes where the side is a square."""
    if info.grid is None:
        raise ConfigError(
            f'model.position="grid" needs data on a grid, {info.name} is a line; use "learned"'
        )
    height, width = info.grid
    row, column = np.divmod(np.arange(height * width), width)
    labels = [row, column]
    side = round(height**0.5)
    if height == width == side**2:
        labels.append(row // side * side + column // side)
    where = np.arange(height * width) if info.permutation is None else np.array(info.permutation)
    return tuple(tuple(x[where].tolist()) for x in labels)

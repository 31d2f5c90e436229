"""The denoiser and the decoder of a config, and what the data tell them."""

import numpy as np

from aodiff.config import ConfigError
from aodiff.data import DataInfo
from aodiff.nn.mdm import MDM
from aodiff.nn.mdm_config import MDMConfig
from aodiff.sampling import denoise


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


def decoder_of(sample, score: str, n: int, eos: int | None) -> denoise.Decoder:
    """The decoder of `config.sample` with a score, for rows of n positions.

    Raises:
      ConfigError, ValueError: choices that do not fit each other, the rows or the data.
    """
    if eos is None and (sample.crop or sample.eos != "free"):
        raise ConfigError(
            f"sample.crop={sample.crop} and sample.eos={sample.eos!r} ask for the id that ends a "
            'text, and these data have none; use False and "free"'
        )
    blocks = denoise.num_blocks(sample.block, n)
    if sample.steps % blocks:
        raise ConfigError(
            f"sample.steps={sample.steps} with {blocks} blocks of {sample.block}; use a multiple "
            f"of {blocks}, or 0 for one call a token"
        )
    decoder = denoise.Decoder(
        score,
        sample.schedule,
        (sample.steps or n) // blocks,
        sample.block,
        noise=sample.position_noise,
        remask=sample.remask,
        suppress=(eos,) if sample.eos == "never" else (),
        late=(eos,) if sample.eos == "last" else (),
        crop=(eos,) if sample.crop else (),
        refresh=sample.refresh,
        buckets=tuple(sample.buckets),
    )
    decoder.check(n)
    return decoder


def end_of_text(info: DataInfo) -> int | None:
    """The id that ends a text, if rows are texts in their own order."""
    natural = info.tokenizer is not None and info.permutation is None
    return info.tokenizer.eos if natural else None

"""Released AO-GPT checkpoints: the bare list of EMA weights <-> the parameters of `nn.aogpt.AOGPT`.

The list follows registration order: tok, pos, tpos, none; per block ln1, qkv (w, b), o (w, b), qn,
kn, ln2, fc (w, b), proj (w, b), ada (w, b); then lnf, adaf (w, b), head (w, b). Weights of linear
layers are stored output-major. Load the file with the framework that wrote it, pass numpy arrays.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from aodiff.nn.aogpt import AOGPTConfig

TOP = (("tok",), ("pos",), ("tpos",), ("none",))
BLOCK = (
    ("ln1", "scale"),
    ("qkv_kernel",),
    ("qkv_bias",),
    ("out_kernel",),
    ("out_bias",),
    ("q_norm", "scale"),
    ("k_norm", "scale"),
    ("ln2", "scale"),
    ("fc", "kernel"),
    ("fc", "bias"),
    ("proj", "kernel"),
    ("proj", "bias"),
    ("ada", "kernel"),
    ("ada", "bias"),
)
END = (("norm", "scale"), ("ada", "kernel"), ("ada", "bias"), ("head_kernel",), ("head_bias",))


def _shapes(cfg: AOGPTConfig) -> dict[str, tuple[int, ...]]:
    d, heads = cfg.width, cfg.num_heads
    return {"qkv_kernel": (d, 3, heads, cfg.head_dim), "out_kernel": (heads, cfg.head_dim, d)}


def _put(tree: dict, path: tuple[str, ...], value: np.ndarray) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value


def _get(tree: dict, path: tuple[str, ...]) -> np.ndarray:
    for name in path:
        tree = tree[name]
    return np.asarray(tree)


def from_reference(arrays: Sequence[np.ndarray], cfg: AOGPTConfig) -> dict[str, Any]:
    """Returns {"params": ...} float32 from the bare list of a released checkpoint.

    Raises:
      ValueError: the number of arrays or a shape does not fit `cfg`.
    """
    expected = len(TOP) + cfg.num_layers * len(BLOCK) + len(END)
    if len(arrays) != expected:
        raise ValueError(
            f"Got {len(arrays)} arrays; {cfg.num_layers} layers need {expected}, set num_layers to "
            f"that of the checkpoint."
        )
    if tuple(arrays[0].shape) != (cfg.padded_vocab, cfg.width):
        raise ValueError(
            f"The token table has shape {tuple(arrays[0].shape)}, the model "
            f"{(cfg.padded_vocab, cfg.width)}; set vocab_size and width to those of the checkpoint."
        )
    shapes = _shapes(cfg)

    def convert(path, array):
        array = np.asarray(array, np.float32)
        array = array.T if "kernel" in path[-1] else array
        return array.reshape(shapes[path[-1]]) if path[-1] in shapes else array

    source, params = iter(arrays), {}
    for path in TOP:
        _put(params, path, convert(path, next(source)))
    blocks = [{path: convert(path, next(source)) for path in BLOCK} for _ in range(cfg.num_layers)]
    for path in BLOCK:
        _put(params, ("blocks", *path), np.stack([block[path] for block in blocks]))
    for path in END:
        _put(params, path, convert(path, next(source)))
    return {"params": params}


def to_reference(params: dict[str, Any], cfg: AOGPTConfig) -> list[np.ndarray]:
    """The inverse of `from_reference`."""
    tree = params["params"]

    def convert(path, array):
        if path[-1] == "qkv_kernel":
            array = array.reshape(cfg.width, -1)
        elif path[-1] == "out_kernel":
            array = array.reshape(-1, cfg.width)
        return array.T if "kernel" in path[-1] else array

    arrays = [convert(path, _get(tree, path)) for path in TOP]
    for layer in range(cfg.num_layers):
        arrays += [convert(path, _get(tree["blocks"], path)[layer]) for path in BLOCK]
    return arrays + [convert(path, _get(tree, path)) for path in END]

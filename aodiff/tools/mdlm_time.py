"""MDLM's time, which its published model never sees pass: sigma is 0, so all it does is constant.

Every norm is followed by (1 + scale) and shift, every branch ends in a gate; the three are linear
in features of sigma. Here scale and shift become the norm's, the gate that of the branch's last
map. Source: Sahoo et al., arXiv 2406.07524, `kuleshov-group/mdlm-owt`; mdm.md 6.1.
"""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from aodiff.nn.mdm import MDMConfig
from aodiff.tools.name_maps import Shapes

FEATURES, HIDDEN = 256, 128  # sinusoids of sigma, width of what the blocks are told of it
BLOCK = "backbone.blocks.{i}."
OUTPUT = "backbone.output_layer."
SIGMA = "backbone.sigma_map.mlp."
NORMS = (f"{BLOCK}norm1", f"{BLOCK}norm2", f"{OUTPUT}norm_final")
# (norm, the tensors its branch's gate multiplies) of each triple that a block's map gives.
BRANCHES = (("norm1", ("attn_out.weight",)), ("norm2", ("mlp.2.weight", "mlp.2.bias")))


def time_shapes(cfg: MDMConfig) -> Shapes:
    """The published tensors that tell the model of time."""
    shapes = {
        f"{SIGMA}0.weight": (HIDDEN, FEATURES),
        f"{SIGMA}0.bias": (HIDDEN,),
        f"{SIGMA}2.weight": (HIDDEN, HIDDEN),
        f"{SIGMA}2.bias": (HIDDEN,),
    }
    places = [(BLOCK.format(i=i), 6) for i in range(cfg.num_layers)] + [(OUTPUT, 2)]
    for place, number in places:
        shapes[f"{place}adaLN_modulation.weight"] = (number * cfg.width, HIDDEN)
        shapes[f"{place}adaLN_modulation.bias"] = (number * cfg.width,)
    return shapes


def made(cfg: MDMConfig) -> set[str]:
    """Names that only the folded model has: the bias of every norm."""
    return {f"{norm}.bias".format(i=i) for norm in NORMS for i in range(cfg.num_layers)}


def time_features(sigma: float) -> np.ndarray:
    """(256,) cosines, then sines, of `sigma` at 128 frequencies from 1 to 1e-4."""
    half = FEATURES // 2
    angle = sigma * 10_000.0 ** (-np.arange(half) / half)
    return np.concatenate([np.cos(angle), np.sin(angle)])


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def fold(tensors: Mapping[str, np.ndarray], cfg: MDMConfig) -> "Folded":
    """The same model without time: names of `time_shapes` go, those of `made` come; float32."""

    def linear(name: str, x: np.ndarray) -> np.ndarray:
        weight, bias = (tensors[f"{name}.{kind}"].astype(np.float64) for kind in ("weight", "bias"))
        return weight @ x + bias

    told = _silu(linear(f"{SIGMA}2", _silu(linear(f"{SIGMA}0", time_features(0.0)))))
    gains, shifts = {}, {}
    for i in range(cfg.num_layers):
        block = BLOCK.format(i=i)
        triples = linear(f"{block}adaLN_modulation", told).reshape(2, 3, cfg.width)
        for (norm, gated), (shift, scale, gate) in zip(BRANCHES, triples, strict=True):
            shifts[f"{block}{norm}.bias"], gains[f"{block}{norm}.weight"] = shift, 1 + scale
            gains |= {f"{block}{name}": gate for name in gated}
    shift, scale = linear(f"{OUTPUT}adaLN_modulation", told).reshape(2, cfg.width)
    shifts[f"{OUTPUT}norm_final.bias"], gains[f"{OUTPUT}norm_final.weight"] = shift, 1 + scale
    return Folded(tensors, gains, shifts, set(time_shapes(cfg)))


class Folded(Mapping[str, np.ndarray]):
    """`tensors` with outputs times `gains` and with `shifts`, computed when asked for."""

    def __init__(self, tensors, gains, shifts, gone):
        self.tensors, self.gains, self.shifts = tensors, gains, shifts
        self.names = [name for name in tensors if name not in gone] + list(shifts)

    def __getitem__(self, name: str) -> np.ndarray:
        if name in self.shifts:
            return self.shifts[name].astype(np.float32)
        array = self.tensors[name]
        if name not in self.gains:
            return array
        gain = self.gains[name].reshape(-1, *(1,) * (array.ndim - 1))
        return (array * gain).astype(np.float32)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def unfold(
    arrays: Iterable[tuple[str, np.ndarray]], cfg: MDMConfig, dtype: np.dtype
) -> Iterator[tuple[str, np.ndarray]]:
    """A published model of the same function: its time adds the norms' bias and nothing else.

    Args:
      dtype: of the tensors that tell of time.
    """
    shifts = {}
    for name, array in arrays:
        if name in made(cfg):
            shifts[name] = array.astype(dtype)
        else:
            yield name, array
    zero, one = np.zeros(cfg.width, dtype), np.ones(cfg.width, dtype)
    for name, shape in time_shapes(cfg).items():
        place, told, _ = name.partition("adaLN_modulation.bias")
        if not told:
            yield name, np.zeros(shape, dtype)
        elif place == OUTPUT:
            yield name, np.concatenate([shifts[f"{OUTPUT}norm_final.bias"], zero])
        else:
            triples = [(shifts[f"{place}{norm}.bias"], zero, one) for norm, _ in BRANCHES]
            yield name, np.concatenate([x for triple in triples for x in triple])

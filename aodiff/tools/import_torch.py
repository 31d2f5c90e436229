"""Published masked diffusion models (safetensors) to a checkpoint that runs begin with.

  python -m aodiff.tools.import_torch --config=configs/mdm.py:llada_8b_gsm8k --from=DIR --to=WORKDIR
  python -m aodiff.main --config=configs/mdm.py:llada_8b_gsm8k --mode=sample --workdir=WORKDIR
    --config.checkpoint.init_from=WORKDIR

DIR is a downloaded model: LLaDA, Dream, Qwen2 and Qwen3 trained for masked diffusion, SMDM or MDLM.
Slices go straight to the devices that hold them; numbers keep their type. Training starts from
--config.checkpoint.init_from. Weights of AO-GPT: aodiff/tools/aogpt_weights.py.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app, flags

from aodiff import checkpoint, config
from aodiff.accounting import count_params
from aodiff.checkpoint import CheckpointError
from aodiff.config import ConfigError
from aodiff.main import SENTENCES, local_path, parse
from aodiff.nn.mdm import MDMConfig
from aodiff.tools import hub_config, mdlm_time
from aodiff.tools.name_maps import (
    BUFFERS,
    FAMILIES,
    Shapes,
    cut,
    entries,
    numbered,
    published_shapes,
    to_parameter,
)
from aodiff.tools.safetensors import listed, open_tensors
from aodiff.train import Setup, set_up

_FROM = flags.DEFINE_string("from", None, "directory of the published model, or its file")
_TO = flags.DEFINE_string("to", None, "workdir of the checkpoint; must hold none yet")


def flat(tree: Mapping) -> dict[str, Any]:
    """The leaves of nested dicts by their paths, such as "blocks/q_kernel"."""
    found = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(str(key.key) for key in path): leaf for path, leaf in found}


def described_family(directory: Path, names: Mapping) -> str:
    """The family that config.json names, or else the one whose embedding has such a name.

    Raises:
      ConfigError: it is none of those known.
    """
    if (known := hub_config.named_family(directory)) is not None:
        return known
    for name, family in FAMILIES.items():
        if next(iter(family.names)) in names:
            return name
    raise ConfigError(
        f"{directory} holds {listed(names, 3)}, names of no known architecture; known are "
        f"{', '.join(FAMILIES)}"
    )


def expected_shapes(name: str, cfg: MDMConfig, leaves: Shapes) -> Shapes:
    """The tensors that a published model of these parameters has.

    Raises:
      CheckpointError: the family has no tensor for a parameter, or there is none for a tensor.
    """
    shapes = published_shapes(FAMILIES[name], cfg, leaves)
    filled = {t for _, _, targets in entries(FAMILIES[name], leaves) for t in targets}
    folded = mdlm_time.made(cfg) if name == "mdlm" else ()
    problems = {
        f"without a counterpart in {name}": [k for k in leaves if k not in filled],
        "without a parameter of the model": sorted(k for k in folded if k not in shapes),
    }
    _refuse(name, "the model is none", problems)
    if name == "mdlm":
        shapes = {k: v for k, v in shapes.items() if k not in mdlm_time.made(cfg)}
        shapes |= mdlm_time.time_shapes(cfg)
    return shapes


def check_names(name: str, cfg: MDMConfig, leaves: Shapes, found: Shapes) -> None:
    """Raises CheckpointError unless names and shapes are those of the model, one for one."""
    wanted = expected_shapes(name, cfg, leaves)
    problems = {
        "missing": [k for k in wanted if k not in found],
        "unknown": [k for k in found if k not in wanted and not k.endswith(BUFFERS)],
        "of another shape": [
            f"{k} {found[k]} instead of {wanted[k]}"
            for k in wanted
            if k in found and found[k] != wanted[k]
        ],
    }
    _refuse(name, "the weights are not those of this model", problems)


def _refuse(name: str, what: str, problems: Mapping[str, list[str]]) -> None:
    if any(problems.values()):
        said = "; ".join(f"{kind}: {listed(x)}" for kind, x in problems.items() if x)
        raise CheckpointError(f"{what} of {name} ({said}); use the config the weights belong to")


def make_leaf(
    tensors: Mapping[str, np.ndarray],
    cfg: MDMConfig,
    entry: tuple[str, str, tuple[str, ...]],
    leaf: str,
    like: jax.ShapeDtypeStruct,
) -> jax.Array:
    """One parameter with the sharding of `like`, in the type of its tensors.

    What a device holds is filled block by block, from the slices of the tensors that it needs.

    Args:
      tensors: the published ones, by name.
      cfg: the model.
      entry: of `name_maps.entries`.
      leaf: the parameter, one of those of `entry`.
      like: its shape and sharding.

    Raises:
      CheckpointError: the blocks have different types.
    """
    name, how, targets = entry
    sources, part = numbered(name, cfg), targets.index(leaf)
    dtypes = {tensors[source].dtype for source in sources}
    if len(dtypes) > 1:
        raise CheckpointError(
            f"{name} is of {' and '.join(sorted(map(str, dtypes)))}; convert the weights to one"
        )
    dtype, stacked = dtypes.pop(), leaf.startswith("blocks/")
    shape = like.shape[1:] if stacked else like.shape

    def read(source: str, index: tuple[slice, ...], out: np.ndarray) -> None:
        view = to_parameter(cut(tensors[source], how, cfg)[part], leaf, shape)[index]
        out[tuple(map(slice, view.shape))] = view  # the rest of a vocabulary is padding

    def fill(index: tuple[slice, ...]) -> np.ndarray:
        spans = [range(*s.indices(n)) for s, n in zip(index, like.shape, strict=True)]
        out = np.zeros(list(map(len, spans)), dtype)
        if not stacked:
            read(sources[0], index, out)
            return out
        for row, layer in enumerate(spans[0]):
            read(sources[layer], index[1:], out[row])
        return out

    return jax.make_array_from_callback(like.shape, like.sharding, fill)


def nested(leaves: Mapping[str, Any]) -> dict:
    """The inverse of `flat`."""
    tree = {}
    for path, leaf in leaves.items():
        *groups, last = path.split("/")
        at = tree
        for group in groups:
            at = at.setdefault(group, {})
        at[last] = leaf
    return tree


def read_params(setup: Setup, source: Path) -> tuple[str, dict]:
    """The family of a published model, and its weights: functions that make them, as `setup` has.

    Raises:
      CheckpointError, ConfigError: nothing to read, damaged files, or another model.
    """
    cfg, leaves = model_config(setup), flat(setup.abstract.params["params"])
    tensors = open_tensors(source)
    directory = source if source.is_dir() else source.parent
    name = described_family(directory, tensors)
    hub_config.check(directory, cfg, setup.config.model.mask_id is not None)
    shapes = {leaf: like.shape for leaf, like in leaves.items()}
    check_names(name, cfg, shapes, {k: stored.shape for k, stored in tensors.stored.items()})
    given = mdlm_time.fold(tensors, cfg) if name == "mdlm" else tensors
    made = {
        leaf: lambda entry=entry, leaf=leaf: make_leaf(given, cfg, entry, leaf, leaves[leaf])
        for entry in entries(FAMILIES[name], leaves)
        for leaf in entry[2]
    }
    return name, {"params": nested(made)}


def model_config(setup: Setup) -> MDMConfig:
    """The model's shape.

    Raises:
      ConfigError: the config is of another method.
    """
    if setup.config.method.name != "mdm":
        raise ConfigError(
            f"method.name={setup.config.method.name!r} has no published weights of this kind; use "
            "a config of masked diffusion, such as configs/mdm.py"
        )
    return setup.method.model.cfg


def base_of(settings) -> Any:
    """An editable copy of a config; of one that adds insertion to a model, that model's config."""
    own = config.editable(settings)
    if own.method.name != "flexmdm_retrofit":
        return own
    base = config.base("mdm")
    for group in ("model", "data", "optim", "mesh", "eval", "sample"):
        base[group].update({k: v for k, v in own[group].items() if k in base[group]})
    return base


def set_up_from(settings, workdir: Path) -> Setup:
    """The setup of a model; it counts as begun with `workdir`, as the runs after it do."""
    own = base_of(settings)
    own.checkpoint.init_from = str(workdir)
    return set_up(own)


def import_weights(settings, source: Path, workdir: Path) -> str:
    """Writes the checkpoint of a published model to `workdir`; says in a line what it wrote.

    Raises:
      CheckpointError, ConfigError, DataError: see `read_params`; or `workdir` holds a checkpoint.
    """
    checkpoints = checkpoint.Checkpoints(workdir)
    if checkpoints.latest() is not None:
        raise ConfigError(f"--to={workdir} holds a checkpoint already; choose another directory")
    setup = set_up_from(settings, workdir)
    name, params = read_params(setup, source)
    meta = checkpoint.make_meta(setup.config, f"weights of {name}", {})
    checkpoints.save_params(params, meta)
    checkpoints.close()
    total = count_params(setup.abstract.params)
    return f"{total:,} parameters of {name} from {source} are in {workdir}"


def main(argv: list[str]) -> None:
    del argv
    try:
        source, workdir = Path(_FROM.value), local_path(_TO.value)
        print(import_weights(flags.FLAGS.config, source, workdir))
    except SENTENCES as error:
        sys.exit(" ".join(str(error).split()))


if __name__ == "__main__":
    flags.mark_flags_as_required(["config", "from", "to"])
    app.run(main, flags_parser=parse)

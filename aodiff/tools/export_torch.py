"""A run's parameters as safetensors under the names of published models, the inverse of import.

  python -m aodiff.tools.export_torch --config=configs/mdm.py:llada_8b_gsm8k --from=WORKDIR --to=DIR
    --family=llada [--like=PUBLISHED] [--dtype=bfloat16] [--params=ema]

PUBLISHED is the model the run began with: its tokenizer, config and code are copied beside the
weights. Parameters are written as trained unless --params asks for their moving average. Numbers
keep the type of the checkpoint unless --dtype names one. MDLM's time stays folded: its maps come
back as float32 constants, the function is the same.
"""

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
from absl import app, flags

from aodiff import checkpoint
from aodiff.config import ConfigError
from aodiff.main import SENTENCES, local_path, parse
from aodiff.nn.mdm import MDMConfig
from aodiff.tools import mdlm_time
from aodiff.tools.import_torch import expected_shapes, flat, model_config, set_up_from
from aodiff.tools.name_maps import (
    FAMILIES,
    Shapes,
    entries,
    fuse,
    numbered,
    published_shapes,
    to_published,
)
from aodiff.tools.safetensors import write_tensors

TYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
SHARD_BYTES = 5_000_000_000
PLACES = {"raw": "params", "ema": "ema_params"}  # of parameters in the state of a run
COPIED = (".json", ".txt", ".model", ".py", ".jinja")

_FAMILY = flags.DEFINE_enum("family", None, list(FAMILIES), "whose names the weights get")
_LIKE = flags.DEFINE_string("like", None, "published model whose other files are copied")
_DTYPE = flags.DEFINE_enum("dtype", None, list(TYPES), "of the weights; default: as stored")
_PARAMS = flags.DEFINE_enum("params", "raw", list(PLACES), "as trained, or their moving average")


def published(
    name: str, cfg: MDMConfig, leaves: Shapes, load: Callable[[str], np.ndarray]
) -> Iterator[tuple[str, np.ndarray]]:
    """The published tensors, by name; a parameter is loaded when the first of its tensors is due.

    Args:
      name: of the family.
      cfg: the model.
      leaves: shapes of its parameters.
      load: gives a parameter by its path, all blocks of it.
    """
    family = FAMILIES[name]
    shapes = published_shapes(family, cfg, leaves)
    for entry, how, targets in entries(family, leaves):
        loaded = {leaf: load(leaf) for leaf in targets}
        for i, source in enumerate(numbered(entry, cfg)):
            parts = [
                to_published(array[i] if "{i}" in entry else array, leaf, shapes[source])
                for leaf, array in loaded.items()
            ]
            yield source, fuse(parts, how, cfg)


def export_weights(
    settings,
    workdir: Path,
    directory: Path,
    name: str,
    dtype: np.dtype | None = None,
    params: str = "raw",
) -> str:
    """Writes the newest parameters of `workdir` to `directory`; says in a line what it wrote.

    Args:
      settings: the config of the run.
      workdir: of the run.
      directory: must hold no weights.
      name: of the family.
      dtype: of the weights, None: as they are stored.
      params: "raw" or "ema".

    Raises:
      ConfigError, CheckpointError, DataError: no checkpoint, of another model, without an average,
        or `directory` holds weights.
    """
    if any(directory.glob("*.safetensors")):
        raise ConfigError(f"--to={directory} holds weights already; choose another directory")
    setup = set_up_from(settings, workdir)
    cfg = model_config(setup)
    found, step = checkpoint.existing(workdir, "--from")
    stored = found.meta(step)
    where = stored, setup.config, stored["fingerprint"], workdir, checkpoint.SHAPES
    checkpoint.check_same_run(*where)
    leaves = {leaf: like.shape for leaf, like in flat(setup.abstract.params["params"]).items()}
    place = f"{PLACES[params]}.params"
    try:
        types = flat(found.dtypes(step, place))
    except (KeyError, TypeError) as error:  # the state has None or nothing there
        raise ConfigError(f"{workdir} keeps no average of parameters; use --params=raw") from error
    types = {leaf: dtype or types[leaf] for leaf in leaves}
    shapes = expected_shapes(name, cfg, leaves)
    layout = {}
    for entry, _, targets in entries(FAMILIES[name], leaves):
        layout |= {k: (types[targets[0]], shapes[k]) for k in numbered(entry, cfg) if k in shapes}
    time_type = dtype or np.dtype(np.float32)
    layout |= {k: (time_type, shape) for k, shape in shapes.items() if k not in layout}

    def load(leaf: str) -> np.ndarray:
        path = f"{place}.{leaf.replace('/', '.')}"
        return found.array(step, path).astype(types[leaf], copy=False)

    arrays = published(name, cfg, leaves, load)
    arrays = mdlm_time.unfold(arrays, cfg, time_type) if name == "mdlm" else arrays
    files = write_tensors(directory, layout, arrays, SHARD_BYTES)
    found.close()
    return f"step {step} of {workdir} is in {', '.join(map(str, files))}"


def copy_others(published: Path, directory: Path) -> None:
    """Copies the files of a published model that are no weights."""
    for path in sorted(published.iterdir()):
        if path.suffix in COPIED and not path.name.endswith(".index.json"):
            shutil.copy(path, directory / path.name)


def main(argv: list[str]) -> None:
    del argv
    try:
        source, directory = local_path(flags.FLAGS["from"].value), Path(flags.FLAGS.to)
        dtype = _DTYPE.value and TYPES[_DTYPE.value]
        print(
            export_weights(
                flags.FLAGS.config, source, directory, _FAMILY.value, dtype, _PARAMS.value
            )
        )
        if _LIKE.value is not None:
            copy_others(Path(_LIKE.value), directory)
    except SENTENCES as error:
        sys.exit(" ".join(str(error).split()))


if __name__ == "__main__":
    flags.mark_flags_as_required(["config", "from", "to", "family"])
    app.run(main, flags_parser=parse)

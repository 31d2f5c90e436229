"""From a name in the config to rows of ids: `describe` says what they are, `open_splits` opens."""

import dataclasses
import types

import numpy as np
from ml_collections import ConfigDict

from aodiff.data import (
    brackets,
    corpora,
    functions,
    mazes,
    pose,
    pose_bvh,
    pose_coco,
    prepared,
    puzzles,
    synthetic,
    tables,
    unfold,
)
from aodiff.data.info import CANVAS, DataError, DataInfo, Stats
from aodiff.data.pipeline import permute
from aodiff.data.sources import PermutedSource, Source

__all__ = [
    "CANVAS",
    "DATA_SETS",
    "FROM_FILES",
    "DataError",
    "DataInfo",
    "Source",
    "Stats",
    "describe",
    "open_splits",
]

# Read from files of the user, as they are, at `data.dir`.
FROM_FILES: dict[str, types.ModuleType] = {
    **dict.fromkeys(("csv", *tables.FILES), tables),
    "coco_keypoints": pose_coco,
    "bvh": pose_bvh,
    puzzles.FILE: puzzles,
}
# Data sets that need no preparation; any other name is a prepared directory.
DATA_SETS: dict[str, types.ModuleType] = {
    **dict.fromkeys(corpora.CORPORA, corpora),
    **dict.fromkeys(("digits", *tables.TABLES), tables),
    **dict.fromkeys(synthetic.LAWS, synthetic),
    **dict.fromkeys(puzzles.SIDES, puzzles),
    "unfold": unfold,
    **dict.fromkeys((*brackets.NAMES, *brackets.INFILL), brackets),
    **dict.fromkeys(functions.NAMES, functions),
    **dict.fromkeys(mazes.NAMES, mazes),
    "chain_pose": pose,
    **FROM_FILES,
}


def hidden_permutation(config: ConfigDict) -> tuple[int, ...] | None:
    """Natural position of each unit, or None: hidden[u] = natural[permutation[u]]."""
    if config.permute_seed is None:
        return None
    positions = np.arange(config.seq_len)
    return tuple(permute(positions, config.seq_len, config.permute_seed).tolist())


def describe(config: ConfigDict) -> DataInfo:
    """Describes `config.data`; files are read where only they tell, as the columns of a table are.

    Raises:
      DataError: the data set or tokenizer does not fit the rest of the config.
    """
    info = DATA_SETS.get(config.name, prepared).describe(config)
    permutation = hidden_permutation(config)
    if permutation is None:
        return info
    sizes = info.unit_sizes and tuple(info.unit_sizes[p] for p in permutation)
    return dataclasses.replace(info, permutation=permutation, unit_sizes=sizes)


def open_splits(config: ConfigDict) -> dict[str, Source]:
    """Opens "train", "validation" and "test" of `config.data`.

    Raises:
      DataError: the data are absent, damaged, or prepared for another length or tokenizer; the
        sentence holds the command that prepares them.
    """
    splits = DATA_SETS.get(config.name, prepared).open_splits(config)
    permutation = hidden_permutation(config)
    if permutation is None:
        return splits
    return {split: PermutedSource(source, permutation) for split, source in splits.items()}

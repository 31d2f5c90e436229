"""Poses of BVH motion capture: one unit per joint, its place coded by k-means of its own.

Frames are taken at 30 Hz. A pose is relative to the root, turned about the vertical so that it
faces the same way, and scaled by its clip's sum of bone lengths to the mean body of the training
clips, in the files' own unit (in the usual BVH conversions of the CMU motions: 56.4 mm).
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from aodiff.data import bvh
from aodiff.data.codecs import number, parse_row
from aodiff.data.info import DataError, DataInfo, Stats
from aodiff.data.pose import check_length, check_levels, find_files
from aodiff.data.sources import ArraySource, Source, hash_arrays

RATE = 30  # frames per second that are kept
HELD_OUT = 0.125  # of the clips for validation and again for test, at least one each
EXPECTED = "BVH motion files (.bvh) of one skeleton"
SIDES = (("Left", "Right"), ("left", "right"), ("L", "R"), ("l", "r"))  # as names begin


@dataclasses.dataclass(frozen=True, eq=False)
class Centroids:
    """The places a joint was seen at in training, by k-means; ids are local to their joint.

    Attributes:
      names: of the joints, (L,).
      places: per joint (codes, 3), in the files' unit, from the root; y upwards.
      floor: mean distance of coded from measured validation joints, same unit.
    """

    names: tuple[str, ...]
    places: tuple[np.ndarray, ...]
    floor: float = float("nan")

    position_unit = "file units"

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(map(len, self.places))

    def encode(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Nearest code of each joint: positions (rows, L, 3) to ids uint16 and present bool."""
        distances = (
            ((values[:, i, None] - places) ** 2).sum(-1) for i, places in enumerate(self.places)
        )
        ids = np.stack([d.argmin(1) for d in distances], axis=1).astype(np.uint16)
        return ids, np.ones(ids.shape, bool)

    def decode(self, ids: np.ndarray) -> np.ndarray:
        """Positions (rows, L, 3)."""
        columns = np.asarray(ids).T
        return np.stack([p[c] for p, c in zip(self.places, columns, strict=True)], axis=1)

    positions = decode

    def values(self, ids: np.ndarray) -> dict[str, list[float]]:
        """Place [x, y, z] by joint of one row (L,)."""
        places = np.round(self.decode(np.asarray(ids)[None])[0], 4).tolist()
        return dict(zip(self.names, places, strict=True))

    def parse(self, row: Mapping[str, Any] | Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
        """Ids int32 and given bool, both (L,), of places [x, y, z], None where unknown."""
        return parse_row(row, self.names, self._parse)

    def _parse(self, unit: int, value: Any) -> int:
        place = [number(v) for v in value] if isinstance(value, list | tuple) else []
        if len(place) != 3 or None in place:
            raise DataError(f"{self.names[unit]} is {value!r}; give [x, y, z] numbers, or null.")
        return int(((self.places[unit] - np.array(place)) ** 2).sum(-1).argmin())

    def text(self, ids: np.ndarray) -> str:
        return ", ".join(f"{n} {i}" for n, i in zip(self.names, np.asarray(ids), strict=True))


def check_skeletons(clips: Sequence[bvh.Clip]) -> None:
    """Raises DataError unless all clips have the joints and parents of the first."""
    first, *others = clips
    for clip in others:
        ours, theirs = (zip(c.names, c.parents.tolist(), strict=True) for c in (first, clip))
        for wanted, found in itertools.zip_longest(ours, theirs, fillvalue=("no joint", None)):
            if found != wanted:
                raise DataError(
                    f"{clip.path} has another skeleton than {first.path}: {found[0]} (parent "
                    f"{found[1]}) where {wanted[0]} (parent {wanted[1]}) should be; keep files of "
                    "one skeleton in the folder."
                )


def side_pairs(names: Sequence[str]) -> np.ndarray:
    """Joints that are each other's mirror image by their names, (P, 2) int: left, right."""
    return np.array(
        [
            (i, names.index(right + name.removeprefix(left)))
            for i, name in enumerate(names)
            for left, right in SIDES
            if name.startswith(left) and right + name.removeprefix(left) in names
        ],
        int,
    ).reshape(-1, 2)


def rest_places(clip: bvh.Clip) -> np.ndarray:
    """Places of all joints when nothing is turned, (J, 3), from the root."""
    places = np.zeros(clip.offsets.shape)
    for joint, parent in enumerate(clip.parents):
        if parent >= 0:
            places[joint] = places[parent] + clip.offsets[joint]
    return places


def body_size(clip: bvh.Clip) -> float:
    """Sum of its bone lengths, in the file's unit."""
    return float(np.linalg.norm(clip.offsets[1:], axis=1).sum())


def body_poses(clip: bvh.Clip) -> np.ndarray:
    """Poses (frames at RATE, J, 3) from the root, turned about y, in sums of bone lengths.

    Facing is read from the root's rotation: the line from the right to the left side of the resting
    body comes to lie along x; for a skeleton whose names tell no sides, what rests along x does.
    """
    step = max(1, round(1 / (RATE * clip.frame_time)))
    clip = dataclasses.replace(clip, motion=clip.motion[::step])
    poses = clip.positions()
    poses = (poses - poses[:, :1]) / body_size(clip)
    rest, (left, right) = rest_places(clip), side_pairs(clip.names).T
    across = (rest[left] - rest[right]).sum(0) if len(left) else np.array([1.0, 0.0, 0.0])
    x, _, z = (clip.rotations(0) @ (across * [1, 0, 1])).T
    cos, sin = np.stack([x, z]) / np.maximum(np.hypot(x, z), 1e-12)
    zero, one = np.zeros_like(cos), np.ones_like(cos)
    turn = np.array([[cos, zero, sin], [zero, one, zero], [-sin, zero, cos]])
    return np.einsum("xyt,tjy->tjx", turn, poses)


def mirror(poses: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """The poses (T, J, 3) with left and right exchanged."""
    left, right = side_pairs(names).T
    order = np.arange(len(names))
    order[left], order[right] = right, left
    return poses[:, order] * [-1, 1, 1]


def unit_joints(clip: bvh.Clip) -> list[int]:
    """Joints that are units: not the root, no end site, not always at their parent's place."""
    moved = np.abs(clip.offsets).sum(1) > 0
    return [i for i in range(1, len(clip.names)) if clip.channels[i] and moved[i]]


def unit_edges(clip: bvh.Clip, units: list[int]) -> tuple[tuple[int, int], ...]:
    """Bones between units; the units around the root, which is none, are linked to each other."""
    around_root, edges = [], []
    for unit, joint in enumerate(units):
        parent = clip.parents[joint]
        while parent > 0 and parent not in units:
            parent = clip.parents[parent]
        if parent > 0:
            edges.append((units.index(parent), unit))
        else:
            around_root.append(unit)
    return (*itertools.combinations(around_root, 2), *edges)


def fit(names: Sequence[str], poses: np.ndarray, levels: int) -> Centroids:
    """Fits up to `levels` codes per joint to training poses (rows, L, 3)."""
    from sklearn.cluster import KMeans

    places = []
    for joint in range(poses.shape[1]):
        distinct = len(np.unique(poses[:, joint].round(6), axis=0))
        means = KMeans(min(levels, distinct), n_init=4, random_state=0).fit(poses[:, joint])
        places.append(means.cluster_centers_)
    return Centroids(tuple(names), tuple(places))


@functools.lru_cache(maxsize=4)
def _load(files: tuple[Path, ...], levels: int) -> tuple:
    """First clip, units, codec and encoded splits of `files`."""
    clips = [bvh.read(path) for path in files]
    if len(clips) < 3:
        raise DataError(
            f"{files[0].parent} holds {len(clips)} BVH clips; splits are by clip, give at least 3."
        )
    check_skeletons(clips)
    held_out = max(1, round(HELD_OUT * len(clips)))
    parts = {  # by name, so that what one person does tends to stay in one split
        "train": clips[: -2 * held_out],
        "validation": clips[-2 * held_out : -held_out],
        "test": clips[-held_out:],
    }
    units = unit_joints(clips[0])
    if not units:
        raise DataError(
            f"{files[0]} has no joint that moves against its root; use files of whole bodies."
        )
    names = [clips[0].names[i] for i in units]
    size = float(np.mean([body_size(clip) for clip in parts["train"]]))
    poses = {s: np.concatenate([body_poses(c) for c in part]) for s, part in parts.items()}
    poses["train"] = np.concatenate([poses["train"], mirror(poses["train"], clips[0].names)])
    poses = {split: p[:, units] * size for split, p in poses.items()}
    if levels > len(poses["train"]):
        raise DataError(
            f"data.levels is {levels}, more than the {len(poses['train'])} training poses "
            "(mirrored ones included); lower it or add clips."
        )
    codec = fit(names, poses["train"], levels)
    ids = {split: codec.encode(p)[0] for split, p in poses.items()}
    errors = np.linalg.norm(codec.positions(ids["validation"]) - poses["validation"], axis=-1)
    return clips[0], units, dataclasses.replace(codec, floor=float(errors.mean())), ids


def _open(config: ConfigDict) -> tuple:
    check_levels(config, 2, 1024)
    loaded = _load(tuple(find_files(config, ".bvh", EXPECTED)), config.levels)
    check_length(config, len(loaded[1]), "joint")
    return loaded


def describe(config: ConfigDict) -> DataInfo:
    """The joints of the files in data.dir."""
    clip, units, codec, _ = _open(config)
    return DataInfo(
        name=config.name,
        seq_len=config.seq_len,
        vocab_size=max(codec.sizes),
        unit="joint",
        unit_sizes=codec.sizes,
        codec=codec,
        names=codec.names,
        edges=unit_edges(clip, units),
        xy=tuple(map(tuple, rest_places(clip)[units, :2].tolist())),
    )


def open_splits(config: ConfigDict) -> dict[str, Source]:
    """Encoded poses by split, whole clips each; training poses come with their mirror images."""
    *_, codec, ids = _open(config)
    places = hash_arrays({str(i): p for i, p in enumerate(codec.places)})
    return {s: ArraySource({"tokens": x}, Stats(len(x), x.size), places) for s, x in ids.items()}

"""COCO person keypoints: 17 joints of people in photographs, one unit per coordinate."""

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging
from ml_collections import ConfigDict

from aodiff.data.codecs import number, parse_row
from aodiff.data.info import DataError, DataInfo, Stats
from aodiff.data.pipeline import permute
from aodiff.data.pose import check_length, check_levels, find_files
from aodiff.data.sources import ArraySource, Source

JOINTS: dict[str, tuple[float, float]] = {  # and where figures draw them, in torso lengths
    "nose": (0, 1.6),
    "left_eye": (0.1, 1.7),
    "right_eye": (-0.1, 1.7),
    "left_ear": (0.25, 1.65),
    "right_ear": (-0.25, 1.65),
    "left_shoulder": (0.35, 1.0),
    "right_shoulder": (-0.35, 1.0),
    "left_elbow": (0.6, 0.5),
    "right_elbow": (-0.6, 0.5),
    "left_wrist": (0.7, 0.0),
    "right_wrist": (-0.7, 0.0),
    "left_hip": (0.25, 0.0),
    "right_hip": (-0.25, 0.0),
    "left_knee": (0.3, -0.85),
    "right_knee": (-0.3, -0.85),
    "left_ankle": (0.3, -1.7),
    "right_ankle": (-0.3, -1.7),
}
NAMES = tuple(JOINTS)
BONES = (  # COCO's own skeleton, counted from 0
    *((15, 13), (13, 11), (16, 14), (14, 12), (11, 12), (5, 11), (6, 12), (5, 6), (5, 7), (6, 8)),
    *((7, 9), (8, 10), (1, 2), (0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 6)),
)
SHOULDERS, HIPS = [5, 6], [11, 12]
REACH = 4.0  # torso lengths from the root on every side; what lies outside is clipped
HELD_OUT = 0.125  # of the images for validation and again for test, without a file of its own
EXPECTED = "COCO person keypoint files (.json, such as person_keypoints_train2017.json)"


@dataclasses.dataclass(frozen=True)
class Coordinates:
    """x, y of each joint in torso lengths from the root, `levels` equal bins over +-REACH.

    A joint that was not seen has the id `levels` and is not present: the model reads that it is
    unknown and is never asked for it. Natural order is joint by joint, x before y (upwards).

    Attributes:
      floor: mean distance of coded from measured validation joints.
    """

    levels: int
    floor: float = float("nan")

    names = tuple(f"{joint} {axis}" for joint in NAMES for axis in "xy")
    position_unit = "torso lengths"

    def encode(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Coordinates (rows, 34), NaN where not seen, to ids uint16 and present bool."""
        present = ~np.isnan(values)
        bins = np.floor((np.where(present, values, 0) + REACH) * self.levels / (2 * REACH))
        ids = np.where(present, np.clip(bins, 0, self.levels - 1), self.levels)
        return ids.astype(np.uint16), present

    def decode(self, ids: np.ndarray) -> np.ndarray:
        """Middles of bins, NaN for a joint that is not seen."""
        middles = (np.arange(self.levels) + 0.5) * (2 * REACH / self.levels) - REACH
        return np.append(middles, np.nan)[np.asarray(ids)]

    def positions(self, ids: np.ndarray) -> np.ndarray:
        """(rows, 17, 2) torso lengths from the root, NaN where not seen."""
        return self.decode(ids).reshape(len(ids), len(NAMES), 2)

    def values(self, ids: np.ndarray) -> dict[str, float | None]:
        """Coordinates by name of one row (L,), None where not seen."""
        decoded = self.decode(ids).tolist()
        return {n: None if v != v else v for n, v in zip(self.names, decoded, strict=True)}

    def parse(self, row: Mapping[str, Any] | Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
        """Ids int32 and given bool, both (L,), of coordinates, None where unknown."""
        return parse_row(row, self.names, self._parse)

    def _parse(self, unit: int, value: Any) -> int:
        place = number(value)
        if place is None or abs(place) > REACH:
            raise DataError(
                f"{self.names[unit]} is {value!r}; give torso lengths from -{REACH:g} to "
                f"{REACH:g}, or null."
            )
        return int(self.encode(np.array(place))[0])

    def text(self, ids: np.ndarray) -> str:
        return ", ".join(
            f"{n} {'?' if v is None else format(v, '.2f')}" for n, v in self.values(ids).items()
        )


def normalise(keypoints: np.ndarray) -> np.ndarray:
    """Pixels to torso lengths from the root, y upwards, NaN where not seen.

    Args:
      keypoints: (people, 17, 3) x, y downwards, visibility (0: not labelled).

    Returns:
      (people, 34). The root is the middle of the hips, a torso length the distance from there to
      the middle of the shoulders; of a pair with one side seen, that side stands for the middle. A
      person without hips or shoulders has no scale: all NaN.
    """
    seen = keypoints[..., 2] > 0
    points = np.where(seen[..., None], keypoints[..., :2] * [1, -1], np.nan)
    pairs = []
    for pair in (HIPS, SHOULDERS):
        count = seen[:, pair].sum(1)[:, None]
        total = np.nansum(points[:, pair], axis=1)
        pairs.append(np.where(count > 0, total / np.maximum(count, 1), np.nan))
    torso = np.linalg.norm(pairs[1] - pairs[0], axis=1)
    torso = np.where(torso > 0, torso, np.nan)
    return ((points - pairs[0][:, None]) / torso[:, None, None]).reshape(len(points), -1)


def read_people(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates (people, 34) as `normalise` returns them, and image ids (people,).

    Crowds and people without any labelled joint are left out, as COCO's own evaluation does;
    people without hips or shoulders too, and their number is logged.

    Raises:
      DataError: no COCO file, no person, or other keypoints than COCO's 17.
    """
    try:
        content = json.loads(path.read_text())
        keypoints = [c["keypoints"] for c in content["categories"] if "keypoints" in c]
        people = [
            (np.array(a["keypoints"], float), a["image_id"])
            for a in content["annotations"]
            if any(a.get("keypoints", ())[2::3]) and not a.get("iscrowd")
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} is not a COCO keypoint file ({type(error).__name__}: {error}); it needs "
            "categories and annotations with keypoints."
        ) from error
    for names in keypoints:
        if tuple(names) != NAMES:
            raise DataError(
                f"{path} has the keypoints {names}; only COCO's 17 are supported, {list(NAMES)}."
            )
    if not keypoints or not people:
        raise DataError(
            f"{path} has no person keypoints; use {EXPECTED}, not the instance or caption files."
        )
    if wrong := [len(k) for k, _ in people if len(k) != 3 * len(NAMES)]:
        raise DataError(
            f"{path} has a person with {wrong[0]} keypoint numbers; COCO has {3 * len(NAMES)}, x, "
            "y and visibility of 17 joints."
        )
    values = normalise(np.stack([k for k, _ in people]).reshape(len(people), -1, 3))
    scaled = ~np.isnan(values).all(1)
    if not scaled.all():
        logging.info("%s: %d people without hips or shoulders left out", path, (~scaled).sum())
    return values[scaled], np.array([image for _, image in people])[scaled]


def split_images(images: np.ndarray, shares: Mapping[str, float]) -> dict[str, np.ndarray]:
    """Whole images to splits of about `shares`: split -> mask over people."""
    distinct = np.unique(images)
    order = permute(np.arange(len(distinct)), len(distinct), seed=0)
    cuts = np.rint(np.cumsum(list(shares.values()))[:-1] * len(distinct)).astype(int)
    parts = np.split(distinct[order], cuts)
    return {split: np.isin(images, part) for split, part in zip(shares, parts, strict=True)}


@functools.lru_cache(maxsize=4)
def _load(files: tuple[Path, ...]) -> dict[str, np.ndarray]:
    """Coordinates by split: COCO's val file, halved by image, is held out where there is one."""
    tables = {file: read_people(file) for file in files}
    held_out = [file for file in files if "val" in file.name]
    if held_out and len(held_out) < len(files):
        groups = [
            ([f for f in files if f not in held_out], {"train": 1.0}),
            (held_out, {"validation": 0.5, "test": 0.5}),
        ]
    else:
        shares = {"train": 1 - 2 * HELD_OUT, "validation": HELD_OUT, "test": HELD_OUT}
        groups = [(files, shares)]
    splits = {}
    for group, shares in groups:
        values, images = map(np.concatenate, zip(*map(tables.get, group), strict=True))
        splits |= {s: values[mask] for s, mask in split_images(images, shares).items()}
    if empty := [split for split, values in splits.items() if not len(values)]:
        raise DataError(
            f"{files[0].parent} has too few images for a {empty[0]} split; add files or images."
        )
    return splits


def _open(config: ConfigDict) -> tuple[Coordinates, dict[str, np.ndarray]]:
    check_length(config, len(Coordinates.names), "coordinate")
    check_levels(config, 2, 1024)
    splits = _load(tuple(find_files(config, ".json", EXPECTED)))
    codec = Coordinates(config.levels)
    measured = splits["validation"].reshape(-1, len(NAMES), 2)
    coded = codec.positions(codec.encode(splits["validation"])[0])
    floor = float(np.nanmean(np.linalg.norm(coded - measured, axis=-1)))
    return dataclasses.replace(codec, floor=floor), splits


def describe(config: ConfigDict) -> DataInfo:
    """The keypoints of the files in data.dir."""
    codec, _ = _open(config)
    same_axis = [(2 * i + axis, 2 * j + axis) for i, j in BONES for axis in (0, 1)]
    same_joint = [(2 * i, 2 * i + 1) for i in range(len(NAMES))]
    return DataInfo(
        name=config.name,
        seq_len=config.seq_len,
        vocab_size=config.levels + 1,
        unit="coordinate",
        codec=codec,
        names=codec.names,
        edges=tuple(same_axis + same_joint),
        xy=tuple((x + dx, float(y)) for x, y in JOINTS.values() for dx in (-0.03, 0.03)),
    )


def open_splits(config: ConfigDict) -> dict[str, Source]:
    """Encoded people by split; `present` marks the joints that were seen."""
    codec, splits = _open(config)
    sources = {}
    for split, values in splits.items():
        tokens, present = codec.encode(values)
        stats = Stats(len(tokens), int(present.sum()))
        arrays = {"tokens": tokens, "present": present}
        sources[split] = ArraySource(arrays, stats, f"coordinates {config.levels} {REACH}")
    return sources

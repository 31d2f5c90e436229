"""A planar stick figure that needs no files: a bone turns with the bone it hangs on, plus noise.

The law over bone angles is a tree, so that its entropy is exact; the codec turns angles into joint
positions by forward kinematics.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from aodiff.data import synthetic
from aodiff.data.codecs import number, parse_row
from aodiff.data.info import DataError, DataInfo
from aodiff.data.sources import Source

VERSION = 1
MAX_LEVELS = 256  # the law of a bone is a levels x levels matrix


@dataclasses.dataclass(frozen=True)
class Bone:
    """One bone of a figure.

    Attributes:
      turns_with: the bone its angle is measured against, or None: against the ground.
      starts_at: the bone at whose end it starts, or None: at the hips, the origin.
      length: in torso lengths.
      bends: ways to bend: (share, mean angle, standard deviation), degrees counter-clockwise.
    """

    turns_with: str | None
    starts_at: str | None
    length: float
    bends: tuple[tuple[float, float, float], ...]


def _side(name: str, sign: int) -> dict[str, Bone]:
    """Arm and leg of one side, seen from the front (left is at the right); `sign` mirrors them."""

    def limb(turns_with, starts_at, length, *bends):
        return Bone(turns_with, starts_at, length, tuple((p, sign * m, s) for p, m, s in bends))

    arm, forearm, hand = f"{name} upper arm", f"{name} forearm", f"{name} hand"
    thigh, shin, foot = f"{name} thigh", f"{name} shin", f"{name} foot"
    return {
        arm: limb("torso", "torso", 0.6, (0.6, 160, 12), (0.4, 60, 15)),  # down, or raised
        forearm: limb(arm, arm, 0.5, (0.6, -15, 10), (0.4, -90, 15)),  # stretched, or bent
        hand: limb(forearm, forearm, 0.2, (1.0, 0, 15)),
        thigh: limb("torso", None, 0.85, (0.7, 170, 8), (0.3, 110, 15)),  # standing, or a stride
        shin: limb(thigh, thigh, 0.8, (0.7, 5, 8), (0.3, 70, 15)),
        foot: limb(shin, shin, 0.25, (1.0, -60, 12)),
    }


FIGURE: dict[str, Bone] = {  # in natural order, every bone after those it depends on
    "torso": Bone(None, None, 1.0, ((0.7, 90, 10), (0.3, 60, 15))),
    "neck": Bone("torso", "torso", 0.25, ((1.0, 0, 10),)),
    "head": Bone("neck", "neck", 0.35, ((0.7, 0, 10), (0.3, -40, 10))),
    **_side("left", -1),
    **_side("right", 1),
}


def bone_law(bones: Mapping[str, Bone], levels: int) -> synthetic.TreeLaw:
    """Bins of absolute angle: P(b | parent's bin a) is the wrapped normal mixture over bin b - a.

    Bin k is centred at k 360 / levels degrees. Left and right are independent given the torso.
    """
    from scipy.stats import norm

    names, transitions = list(bones), []
    bins, turns = np.arange(levels), levels * np.arange(-3, 4)[:, None]
    for bone in bones.values():
        law = np.zeros(levels)
        for share, mean, spread in bone.bends:
            wrapped = norm(mean * levels / 360, spread * levels / 360)
            law += share * (wrapped.cdf(bins + turns + 0.5) - wrapped.cdf(bins + turns - 0.5)).sum(
                0
            )
        law /= law.sum()
        turned = law[(bins[None, :] - bins[:, None]) % levels]
        transitions.append(turned if bone.turns_with else np.tile(law, (levels, 1)))
    parents = [names.index(b.turns_with) if b.turns_with else -1 for b in bones.values()]
    return synthetic.TreeLaw(np.array(parents), np.stack(transitions))


def bone_ends(bones: Mapping[str, Bone], angles: np.ndarray) -> np.ndarray:
    """Where bones at `angles` (rows, bones), degrees, end: (rows, bones, 2), torso lengths."""
    ends = {None: np.zeros((len(angles), 2))}
    for (name, bone), angle in zip(bones.items(), np.deg2rad(angles).T, strict=True):
        along = np.stack([np.cos(angle), np.sin(angle)], axis=1)
        ends[name] = ends[bone.starts_at] + bone.length * along
    return np.stack([ends[name] for name in bones], axis=1)


def rest_places(bones: Mapping[str, Bone]) -> np.ndarray:
    """Middle of each bone in the most likely pose, (bones, 2): where figures draw it."""
    angles = {None: 0.0}
    for name, bone in bones.items():
        angles[name] = angles[bone.turns_with] + max(bone.bends)[1]
    ends = bone_ends(bones, np.array([[angles[name] for name in bones]]))[0]
    by_name = dict(zip(bones, ends, strict=True)) | {None: np.zeros(2)}
    return (np.stack([by_name[bone.starts_at] for bone in bones.values()]) + ends) / 2


@dataclasses.dataclass(frozen=True, eq=False)
class Angles:
    """Absolute bone angles, degrees counter-clockwise from rightwards, in `levels` equal bins.

    Attributes:
      bones: the figure, in natural order.
      levels: bins per turn; bin k is centred at k 360 / levels.
    """

    bones: Mapping[str, Bone]
    levels: int

    position_unit = "torso lengths"
    floor = 0.0  # the rows are bins from the start: coding loses nothing

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.bones)

    def encode(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ids = np.rint(np.asarray(values) * self.levels / 360).astype(np.int64) % self.levels
        return ids.astype(np.uint16), np.ones(ids.shape, bool)

    def decode(self, ids: np.ndarray) -> np.ndarray:
        return np.asarray(ids) * (360 / self.levels)

    def positions(self, ids: np.ndarray) -> np.ndarray:
        """Where each bone ends, (rows, L, 2), in torso lengths from the hips."""
        return bone_ends(self.bones, self.decode(ids))

    def values(self, ids: np.ndarray) -> dict[str, float]:
        """Degrees by bone of one row (L,)."""
        return dict(zip(self.names, self.decode(ids).tolist(), strict=True))

    def parse(self, row: Mapping[str, Any] | Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
        """Ids int32 and given bool, both (L,), of angles in degrees, None where unknown."""
        return parse_row(row, self.names, self._parse)

    def _parse(self, unit: int, value: Any) -> int:
        angle = number(value)
        if angle is None:
            raise DataError(f"{self.names[unit]} is {value!r}; give an angle in degrees, or null.")
        return int(self.encode(np.array(angle))[0])

    def text(self, ids: np.ndarray) -> str:
        angles = self.decode(ids)
        return ", ".join(f"{n} {a:.0f}" for n, a in zip(self.names, angles, strict=True))


def check_levels(config: ConfigDict, low: int, high: int) -> None:
    """Raises DataError unless low <= data.levels <= high."""
    if not low <= config.levels <= high:
        raise DataError(
            f"data.levels is {config.levels}; for {config.name} it must be between {low} and "
            f"{high}."
        )


def check_length(config: ConfigDict, width: int, unit: str) -> None:
    """Raises DataError unless data.seq_len is `width`."""
    if config.seq_len != width:
        raise DataError(
            f"{config.name} has {width} {unit}s per row, data.seq_len is {config.seq_len}; set "
            f"data.seq_len={width}."
        )


def find_files(config: ConfigDict, suffix: str, expected: str) -> list[Path]:
    """The file data.dir, or the files in it that end in `suffix`, by name; DataError if none."""
    path = Path(config.dir or "")
    found = sorted(path.glob(f"*{suffix}")) if path.is_dir() else [path] * path.is_file()
    if not config.dir or not found:
        raise DataError(
            f"{config.name} needs data.dir to hold {expected}, got {config.dir}; name such a "
            "folder, or use data.name=chain_pose, which needs no files."
        )
    return found


def _law(config: ConfigDict) -> synthetic.TreeLaw:
    check_length(config, len(FIGURE), "bone")
    check_levels(config, 4, MAX_LEVELS)
    return bone_law(FIGURE, config.levels)


def describe(config: ConfigDict) -> DataInfo:
    """The stick figure; nothing is read."""
    law, codec = _law(config), Angles(FIGURE, config.levels)
    return DataInfo(
        name=config.name,
        seq_len=config.seq_len,
        vocab_size=config.levels,
        unit="bone",
        codec=codec,
        names=codec.names,
        edges=tuple((int(p), i) for i, p in enumerate(law.parents) if p >= 0),
        xy=tuple(map(tuple, rest_places(FIGURE).tolist())),
        entropy=law.entropy,
    )


def open_splits(config: ConfigDict) -> dict[str, Source]:
    """Poses drawn from the law by split."""
    law = _law(config)
    for key in ("train_rows", "eval_rows"):
        if config[key] < 1:
            raise DataError(f"data.{key} is {config[key]}; it must be at least 1.")
    name = f"{config.name}/{VERSION} {(config.levels, config.law_seed, config.seq_len)}"
    return synthetic.generated_splits(law, config, name)

"""BVH motion files: hierarchy, channels in any order, forward kinematics.

Format: Biovision hierarchical data, as described by Meredith and Maddock, "Motion Capture File
Formats Explained" (2001). Y points up.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from aodiff.data.info import DataError


@dataclasses.dataclass(frozen=True, eq=False)
class Clip:
    """One file.

    Attributes:
      path: where it came from, for messages.
      names: (J,) joints in file order; an end site is its parent's name with "_end".
      parents: (J,) int, parents[i] < i, -1 for the root.
      offsets: (J, 3) float64, from the parent, in the file's unit.
      channels: (J,) names of each joint's channels, in file order; none for an end site.
      motion: (T, channels of all joints) float64, degrees and the file's unit.
      frame_time: seconds per frame.
    """

    path: Path
    names: tuple[str, ...]
    parents: np.ndarray
    offsets: np.ndarray
    channels: tuple[tuple[str, ...], ...]
    motion: np.ndarray
    frame_time: float

    def joint_motion(self, joint: int) -> np.ndarray:
        """Its columns of the motion, (T, channels)."""
        first = sum(map(len, self.channels[:joint]))
        return self.motion[:, first : first + len(self.channels[joint])]

    def rotations(self, joint: int) -> np.ndarray:
        """Rotation of `joint` against its parent, (T, 3, 3): the channels from left to right."""
        from scipy.spatial.transform import Rotation

        columns = [i for i, name in enumerate(self.channels[joint]) if name.endswith("rotation")]
        if not columns:
            return np.broadcast_to(np.eye(3), (len(self.motion), 3, 3))
        axes = "".join(self.channels[joint][i][0] for i in columns)
        angles = self.joint_motion(joint)[:, columns]
        return Rotation.from_euler(axes, angles, degrees=True).as_matrix()

    def translations(self, joint: int) -> np.ndarray:
        """Place of `joint` in its parent's frame, (T, 3): the offset, or what channels replace."""
        result = np.repeat(self.offsets[joint][None], len(self.motion), axis=0)
        for i, name in enumerate(self.channels[joint]):
            if name.endswith("position"):
                result[:, "XYZ".index(name[0])] = self.joint_motion(joint)[:, i]
        return result

    def positions(self) -> np.ndarray:
        """World positions of all joints, (T, J, 3) float64, by forward kinematics."""
        places, turns = [], []
        for joint, parent in enumerate(self.parents):
            place, turn = self.translations(joint), self.rotations(joint)
            if parent >= 0:
                place = places[parent] + np.einsum("tij,tj->ti", turns[parent], place)
                turn = turns[parent] @ turn
            places.append(place)
            turns.append(turn)
        return np.stack(places, axis=1)


def read(path: Path) -> Clip:
    """Reads one file.

    Raises:
      DataError: it is no BVH file, it is cut short, or it has no frame.
    """
    head, found, tail = path.read_text(errors="replace").partition("MOTION")
    try:
        if not found:
            raise ValueError("it has no MOTION part")
        names, parents, offsets, channels = _hierarchy(iter(head.split()))
        words = tail.split()
        if words[0] != "Frames:" or words[2:4] != ["Frame", "Time:"]:
            raise ValueError("MOTION must go on with Frames: and Frame Time:")
        frames, frame_time = int(words[1]), float(words[4])
        values = np.array(words[5:], float)
    except (ValueError, IndexError, StopIteration) as error:
        reason = str(error) or "it ends early"
        raise DataError(f"{path} is not a BVH file ({reason}); copy it again.") from error
    width = sum(map(len, channels))
    if frames < 1 or not frame_time > 0:
        raise DataError(
            f"{path} has {frames} frames of {frame_time:g} seconds; it needs at least one frame "
            "and a positive time, remove the file."
        )
    if len(values) != frames * width:
        raise DataError(
            f"{path} is truncated or altered: it announces {frames} frames of {width} numbers and "
            f"holds {len(values) / width:.1f} frames; copy it again."
        )
    if not (np.isfinite(values).all() and np.isfinite(offsets).all()):
        raise DataError(f"{path} holds numbers that are not finite; copy it again.")
    motion = values.reshape(frames, width)
    return Clip(path, names, parents, offsets, channels, motion, frame_time)


def _hierarchy(words: Iterator[str]) -> tuple:
    """Names, parents, offsets and channels from the words up to MOTION."""
    if next(words, None) != "HIERARCHY":
        raise ValueError("it does not start with HIERARCHY")
    names, parents, offsets, channels, open_joints = [], [], [], [], []
    for word in words:
        if word in ("ROOT", "JOINT", "End"):
            name = next(words)
            parents.append(open_joints[-1] if open_joints else -1)
            names.append(f"{names[parents[-1]]}_end" if word == "End" else name)
            offsets.append([0.0] * 3)
            channels.append(())
        elif word == "{":
            open_joints.append(len(names) - 1)
        elif word == "}":
            open_joints.pop()
        elif word == "OFFSET":
            offsets[open_joints[-1]] = [float(w) for w in itertools.islice(words, 3)]
        elif word == "CHANNELS":
            channels[open_joints[-1]] = tuple(itertools.islice(words, int(next(words))))
        else:
            raise ValueError(f"{word!r} in the hierarchy")
    known = {axis + kind for axis in "XYZ" for kind in ("position", "rotation")}
    if unknown := {name for group in channels for name in group} - known:
        raise ValueError(f"channel {sorted(unknown)[0]!r}")
    if open_joints or parents.count(-1) != 1:
        raise ValueError("its braces do not match")
    return tuple(names), np.array(parents), np.array(offsets), tuple(channels)

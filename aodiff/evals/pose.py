"""Poses: how far completed joints are from the true ones, and whether bones keep their length.

Everything is in the unit of `codec.positions` (`codec.position_unit`). Source: ordergpt.md section
17, human pose.
"""

import numpy as np

from aodiff.data import DataInfo
from aodiff.evals.trained import Trained

SHARES = {"quarter": 0.25, "half": 0.5}  # of the joints, given to complete the rest
TRAIN_ROWS = 10_000


def fits(info: DataInfo) -> bool:
    """Whether rows stand for joints in space."""
    return hasattr(info.codec, "positions")


def measure(trained: Trained) -> dict[str, float]:
    """Numbers of a pose, errors as distances averaged over joints and rows of `eval.split`.

    floor: of coding alone.
    completion_<share>: of the joints that were not given, written in the model's order.
    mean_pose_<share>: the same with the mean pose of training in their place.
    bone_length_error: see `bone_length_error`, of samples; "_data": of training rows.
    """
    codec, config = trained.info.codec, trained.config
    ids, present = trained.rows(config.eval.split, config.eval.samples)
    real = joints_of(codec, ids, present)
    train = joints_of(codec, *trained.rows("train", TRAIN_ROWS))
    there = ~np.isnan(real[..., 0])
    units = ids.shape[1] // there.shape[1]  # of a joint: one, or a unit a coordinate

    picks = np.concatenate([given_joints(there, share, config.seed) for share in SHARES.values()])
    given = np.repeat(picks, units, axis=1)
    written = trained.complete(np.tile(ids, (len(SHARES), 1)), given).tokens
    guesses = codec.positions(written).reshape(len(SHARES), *real.shape)
    found = {"nats_per_row": trained.nats_per_row, "floor": codec.floor}
    for name, guess, pick in zip(SHARES, guesses, np.split(picks, len(SHARES)), strict=True):
        found[f"completion_{name}"] = joint_error(guess, real, there & ~pick)
        mean = np.nanmean(train, axis=0)[None]
        found[f"mean_pose_{name}"] = joint_error(mean, real, there & ~pick)
    bones = bones_of(trained.info, units)
    if bones:
        for name, pose in {"": codec.positions(trained.samples.tokens), "_data": train}.items():
            found[f"bone_length_error{name}"] = bone_length_error(pose, real, bones)
    return found


def joints_of(codec, ids: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Positions (rows, J, dims) float64 of rows of ids, NaN for joints that are not present."""
    places = np.array(codec.positions(ids), np.float64)
    there = present.reshape(*places.shape[:2], -1).all(axis=2)
    return np.where(there[..., None], places, np.nan)


def given_joints(there: np.ndarray, share: float, seed: int) -> np.ndarray:
    """Picks a share of the joints that are `there` (rows, J) of each row, by row number."""
    picked = np.zeros_like(there)
    for row, known in enumerate(there):
        rng = np.random.default_rng([seed, row])
        joints = rng.permutation(len(known))
        joints = joints[known[joints]][: round(share * known.sum())]
        picked[row, joints] = True
    return picked


def joint_error(guess: np.ndarray, real: np.ndarray, asked: np.ndarray) -> float:
    """Mean distance of joints (rows, J, dims) over those `asked` (rows, J) for.

    Joints written as not seen, which some codecs can say, have no distance and are left out.
    """
    distance = np.linalg.norm(guess - real, axis=-1)
    return float(np.nanmean(distance[asked]))


def bones_of(info: DataInfo, units: int) -> list[tuple[int, int]]:
    """Links between joints, from links between units, `units` a joint."""
    pairs = {(i // units, j // units) for i, j in info.edges or ()}
    return sorted((i, j) for i, j in pairs if i != j)


def bone_length_error(pose: np.ndarray, real: np.ndarray, bones: list[tuple[int, int]]) -> float:
    """Earth mover's distance of bone lengths from those of `real`, mean over bones.

    For a bone of constant length that is the mean absolute error of its length.
    """
    from scipy.stats import wasserstein_distance

    def length(rows, bone):
        lengths = np.linalg.norm(rows[:, bone[0]] - rows[:, bone[1]], axis=1)
        return lengths[~np.isnan(lengths)]

    pairs = [(length(pose, bone), length(real, bone)) for bone in bones]
    return float(np.mean([wasserstein_distance(a, b) for a, b in pairs if len(a) and len(b)]))

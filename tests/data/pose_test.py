"""Poses: kinematics in closed form, laws by enumeration, files against measured positions."""

import itertools
import json

import numpy as np
import pytest
from scipy.stats import norm

from aodiff.config import base
from aodiff.data import DataError, bvh, describe, open_splits, pose, pose_bvh, pose_coco
from tests.data.fixtures_test import fixture

LENGTHS = {"chain_pose": 15, "coco_keypoints": 34, "bvh": 2}


def config(name: str, **values):
    c = base().data
    c.name, c.seq_len = name, LENGTHS[name]
    c.update(values)
    return c


# The stick figure.


def test_kinematics_of_an_upright_figure_in_closed_form():
    info = describe(config("chain_pose", levels=8))
    names = list(info.names)
    up, down = np.full((1, 15), 2), np.full((1, 15), 6)  # 90 and 270 degrees
    ends = info.codec.positions(np.concatenate([up, down]))
    assert ends.shape == (2, 15, 2)
    np.testing.assert_allclose(ends[0, names.index("head")], [0, 1 + 0.25 + 0.35], atol=1e-12)
    np.testing.assert_allclose(ends[0, names.index("left hand")], [0, 2.3], atol=1e-12)
    np.testing.assert_allclose(ends[1, names.index("right foot")], [0, -1.9], atol=1e-12)


def test_turning_every_bone_turns_the_figure():
    c = config("chain_pose", levels=12)
    codec, rows = describe(c).codec, open_splits(c)["test"].read(np.arange(20))["tokens"]
    ends, turned = codec.positions(rows), codec.positions((rows + 3) % 12)  # by 90 degrees
    np.testing.assert_allclose(turned, np.stack([-ends[..., 1], ends[..., 0]], -1), atol=1e-12)


def test_entropy_of_bones_by_enumeration():
    levels = 5
    bones = {
        "trunk": pose.Bone(None, None, 1.0, ((0.7, 90, 20), (0.3, 10, 40))),
        "arm": pose.Bone("trunk", "trunk", 0.5, ((1.0, -50, 30),)),
        "leg": pose.Bone("trunk", None, 0.5, ((0.4, 170, 25), (0.6, 350, 60))),
    }

    def chance(bend, bends):
        """Of a bin whose middle is `bend` degrees, by numerical integration over it and turns."""
        fine = (np.arange(2000) + 0.5) / 2000 * 72 - 36 + bend + 360 * np.arange(-4, 5)[:, None]
        return sum(p * norm.pdf(fine, m, s).sum() * 72 / 2000 for p, m, s in bends)

    p = [
        chance(72 * t, bones["trunk"].bends)
        * chance(72 * (a - t), bones["arm"].bends)
        * chance(72 * (g - t), bones["leg"].bends)
        for t, a, g in itertools.product(range(levels), repeat=3)
    ]
    assert sum(p) == pytest.approx(1, abs=1e-6)
    law = pose.bone_law(bones, levels)
    assert law.entropy == pytest.approx(-np.sum(p * np.log(p)) / 3, abs=1e-6)
    draws = law.sample(0, np.arange(20_000)).astype(int) @ [25, 5, 1]
    counts = np.bincount(draws, minlength=125) / 20_000
    assert np.abs(counts - p).max() < 5 * np.sqrt(max(p) / 20_000)


def test_poses_are_pure_functions_and_return_from_their_codec():
    c = config("chain_pose", levels=16, permute_seed=3)
    info, source = describe(c), open_splits(c)["train"]
    rows = source.read(np.array([5, 9]))["tokens"]
    np.testing.assert_array_equal(source.read(np.array([9, 5]))["tokens"], rows[::-1])
    natural = open_splits(config("chain_pose", levels=16))["train"].read(np.array([5, 9]))["tokens"]
    np.testing.assert_array_equal(info.natural(rows), natural)
    ids, present = info.codec.encode(info.codec.decode(natural))
    assert np.array_equal(ids, natural) and present.all()
    values = info.codec.values(natural[0])
    ids, given = info.codec.parse(values | {"left hand": None})
    hand = info.names.index("left hand")
    assert np.flatnonzero(~given).tolist() == [hand] and ids[hand] == 0
    assert np.array_equal(np.delete(ids, hand), np.delete(natural[0], hand))


# COCO.


def person(seen=range(17), image=1, scale=10.0):
    """Hips at (50, 80), shoulders one `scale` above, every other joint 2 scales to the right."""
    points = np.tile([50 + 2 * scale, 80.0, 2.0], (17, 1))
    points[[11, 12], 0] = 49, 51
    points[[5, 6]] = [[49, 80 - scale, 2], [51, 80 - scale, 1]]
    points[[i for i in range(17) if i not in seen]] = 0
    return {"keypoints": points.ravel().tolist(), "image_id": image, "iscrowd": 0}


def coco_file(path, people, names=pose_coco.NAMES):
    categories = [{"name": "person", "keypoints": list(names)}]
    path.write_text(json.dumps({"categories": categories, "annotations": people}))
    return str(path)


def test_people_are_centred_and_scaled_and_hidden_joints_are_not_present(tmp_path):
    people = [person(image=i, scale=5.0 + i) for i in range(8)]
    people[0] = person(seen=[5, 12, 0], image=0)
    people += [person(seen=[5], image=9), person(seen=[], image=10)]  # no scale; not labelled
    c = config("coco_keypoints", levels=80, dir=coco_file(tmp_path / "people.json", people))
    info, splits = describe(c), open_splits(c)
    fields = [s.read(np.arange(len(s))) for s in splits.values()]
    tokens, present = (np.concatenate([f[k] for f in fields]) for k in ("tokens", "present"))
    assert len(tokens) == 8 and info.vocab_size == 81
    assert np.array_equal(tokens == 80, ~present)
    places = info.codec.positions(tokens)
    full = present.all(1)
    assert full.sum() == 7
    # Bins are a tenth of a torso length wide.
    assert np.abs(places[full][:, 0] - [2, 0]).max() < 0.0501
    assert np.abs(places[full][:, 5:7].mean(1) - [0, 1]).max() < 0.0501
    assert np.isnan(places[~full]).any(-1).sum() == 14
    assert 0 < info.codec.floor < 0.0708
    values = info.codec.values(tokens[~full][0])
    ids, given = info.codec.parse(values)
    assert np.array_equal(given, present[~full][0])
    assert np.array_equal(ids[given], tokens[~full][0][given])


def test_coco_fixture():
    c = config("coco_keypoints", levels=64, dir=str(fixture("pose/coco_keypoints")))
    splits = open_splits(c)
    sizes = {split: len(source) for split, source in splits.items()}
    assert sizes["train"] <= 18 and sizes["validation"] + sizes["test"] <= 14
    info = describe(c)
    places = info.codec.positions(splits["train"].read(np.arange(sizes["train"]))["tokens"])
    heights = np.nanmean(places[..., 1], axis=0)
    ankle, shoulder = map(pose_coco.NAMES.index, ("left_ankle", "left_shoulder"))
    assert heights[ankle] < 0 < heights[shoulder]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{}", "not a COCO keypoint file"),
        ("[1", "not a COCO keypoint file"),
        ('{"categories": [{"name": "dog"}], "annotations": []}', "no person keypoints"),
        ('{"categories": [{"keypoints": ["head"]}], "annotations": []}', "keypoints \\['head'\\]"),
        (
            '{"categories": [], "annotations": [{"keypoints": ["a", 1, 2], "image_id": 1}]}',
            "not a COCO keypoint file .*could not convert",
        ),
    ],
)
def test_other_json_files_are_refused(tmp_path, content, words):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataError, match=words):
        describe(config("coco_keypoints", dir=str(tmp_path)))


# BVH.

TINY = """HIERARCHY
ROOT Hips
{
  OFFSET 0 0 0
  CHANNELS 6 Xposition Yposition Zposition Zrotation Yrotation Xrotation
  JOINT LeftLeg
  {
    OFFSET 1 0 0
    CHANNELS 3 Xrotation Zrotation Yrotation
    End Site
    {
      OFFSET 0 -2 0
    }
  }
  JOINT RightLeg
  {
    OFFSET -1 0 0
    CHANNELS 1 Xrotation
    End Site
    {
      OFFSET 0 -2 0
    }
  }
}
MOTION
"""


def clip_file(path, frames, text=TINY, announced=None):
    lines = [" ".join(map(str, frame)) for frame in frames]
    count = len(frames) if announced is None else announced
    path.write_text(f"{text}Frames: {count}\nFrame Time: 0.0333333\n" + "\n".join(lines))
    return path


def test_channels_turn_in_the_order_of_the_file(tmp_path):
    #          root x, y, z, Z, Y, X, left X, Z, Y, right X
    frames = [[5, 6, 7, 90, 0, 0, 0, 0, 0, 90], [0, 0, 0, 0, 90, 0, 90, 90, 0, 0]]
    places = bvh.read(clip_file(tmp_path / "a.bvh", frames)).positions()
    names = bvh.read(tmp_path / "a.bvh").names
    assert names == ("Hips", "LeftLeg", "LeftLeg_end", "RightLeg", "RightLeg_end")
    # Z by 90: x to y. Right foot: -y turns about x to -z, which Z leaves alone.
    np.testing.assert_allclose(
        places[0], [[5, 6, 7], [5, 7, 7], [7, 7, 7], [5, 5, 7], [5, 5, 5]], atol=1e-12
    )
    # Y by 90: x to -z. Left foot: (0, -2, 0), Z first inside X: to (2, 0, 0); X leaves it; Y: -z.
    np.testing.assert_allclose(places[1][1:3], [[0, 0, -1], [0, 0, -3]], atol=1e-12)


def test_positions_of_real_recordings():
    folder = fixture("pose/cmu_mocap")
    known = np.load(folder / "joint_positions_30hz.npz")
    for path in sorted(folder.glob("*.bvh")):
        clip = bvh.read(path)
        assert clip.names == tuple(known["joint_names"])
        assert np.abs(clip.positions()[::4] - known[f"m{path.stem}"]).max() < 1e-4


def moving(count, seed):
    draws = np.random.default_rng(seed).uniform(-40, 40, (count, 10))
    draws[:, 3:6] = 0
    return draws


def test_place_and_facing_of_the_body_do_not_matter_and_mirrors_are_exact(tmp_path):
    frames = moving(6, 0)
    plain = pose_bvh.body_poses(bvh.read(clip_file(tmp_path / "a.bvh", frames)))
    moved = frames.copy()
    moved[:, :3], moved[:, 4] = 9, np.arange(6) * 70  # Yrotation
    again = pose_bvh.body_poses(bvh.read(clip_file(tmp_path / "b.bvh", moved)))
    np.testing.assert_allclose(again, plain, atol=1e-9)
    names = ("Hips", "LeftLeg", "LeftLeg_end", "RightLeg", "RightLeg_end")
    other = pose_bvh.mirror(plain, names)
    np.testing.assert_allclose(other[:, 1], plain[:, 3] * [-1, 1, 1])
    np.testing.assert_allclose(pose_bvh.mirror(other, names), plain)
    assert pose_bvh.side_pairs(["lowerback", "lhand", "rhand", "LHip", "RHip"]).tolist() == [
        [1, 2],
        [3, 4],
    ]


def bvh_text(*extra):
    """TINY with knees, so that joints move against the root."""
    return TINY.replace("End Site", "JOINT Knee", 1).replace(
        "OFFSET 0 -2 0\n    }",
        "OFFSET 0 -2 0\n CHANNELS 1 Xrotation End Site { OFFSET 0 -1 0 } }",
        1,
    )


def test_splits_are_by_clip_and_codes_are_nearest_places(tmp_path):
    text = bvh_text()
    for i, count in enumerate((20, 7, 9)):
        frames = np.random.default_rng(i).uniform(-60, 60, (count, 11))
        clip_file(tmp_path / f"{i}.bvh", frames, text)
    c = config("bvh", dir=str(tmp_path), levels=6, seq_len=3)
    info, splits = describe(c), open_splits(c)
    assert {k: len(s) for k, s in splits.items()} == {"train": 40, "validation": 7, "test": 9}
    assert info.names == ("LeftLeg", "Knee", "RightLeg")
    assert info.edges == ((0, 2), (0, 1)) and info.xy == ((1, 0), (1, -2), (-1, 0))
    clip = bvh.read(tmp_path / "1.bvh")
    joints = [clip.names.index(name) for name in info.names]
    measured = (pose_bvh.body_poses(clip) * pose_bvh.body_size(clip))[:, joints]
    ids = splits["validation"].read(np.arange(7))["tokens"]
    coded = info.codec.positions(ids)
    error = np.linalg.norm(coded - measured, axis=-1)
    assert info.codec.floor == pytest.approx(error.mean())
    for unit, places in enumerate(info.codec.places):
        every = np.linalg.norm(measured[:, unit, None] - places, axis=-1)
        np.testing.assert_allclose(error[:, unit], every.min(1))
    ids, given = info.codec.parse([None, coded[0, 1].tolist(), None])
    assert (
        given.tolist() == [False, True, False]
        and ids[1] == splits["validation"].read([0])["tokens"][0, 1]
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda p: clip_file(p / "b.bvh", moving(3, 0), announced=5),
            "b.bvh is truncated.*5 frames",
        ),
        (lambda p: clip_file(p / "b.bvh", [], announced=0), "b.bvh has 0 frames"),
        (lambda p: (p / "b.bvh").write_text("HIERARCHY ROOT Hips {"), "b.bvh is not a BVH file"),
        (
            lambda p: clip_file(p / "b.bvh", moving(3, 0), TINY.replace("RightLeg", "Tail")),
            "b.bvh has another skeleton.*Tail .*RightLeg",
        ),
        (lambda p: (p / "b.bvh").unlink(), "2 BVH clips; splits are by clip"),
        (
            lambda p: clip_file(p / "b.bvh", [[0] * 9 + ["nan"]]),
            "b.bvh holds numbers that are not finite",
        ),
        (
            lambda p: [
                clip_file(p / f"{n}.bvh", moving(3, 0), TINY.replace("1 0 0", "0 0 0"))
                for n in "abc"
            ],
            "a.bvh has no joint that moves",
        ),
    ],
)
def test_bad_clips_are_named(tmp_path, change, words):
    for name in "abc":
        clip_file(tmp_path / f"{name}.bvh", moving(3, 0))
    change(tmp_path)
    with pytest.raises(DataError, match=words):
        describe(config("bvh", dir=str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("chain_pose", {"seq_len": 9}, "data.seq_len=15"),
        ("chain_pose", {"levels": 2}, "between 4 and 256"),
        ("coco_keypoints", {"levels": 1}, "between 2 and 1024"),
        ("bvh", {"levels": 5000}, "between 2 and 1024"),
        ("bvh", {"dir": "nowhere"}, "BVH motion files.*chain_pose, which needs no files"),
        ("coco_keypoints", {"dir": None}, "COCO person keypoint.*chain_pose"),
    ],
)
def test_bad_values_are_named(name, values, words):
    with pytest.raises(DataError, match=words):
        describe(config(name, **values))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"tail": 1}, "'tail' is not one of"),
        ([1], "give 15 values"),
        ({"head": "up"}, "head is 'up'"),
    ],
)
def test_bad_given_rows_are_named(row, words):
    with pytest.raises(DataError, match=words):
        describe(config("chain_pose")).codec.parse(row)

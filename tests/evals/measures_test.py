"""The measures on stand-ins whose numbers are known by hand."""

import types

import numpy as np
import pytest

from aodiff.config import ConfigError
from aodiff.data import DataInfo
from aodiff.data.codecs import Bins, Categories, Columns
from aodiff.data.tokenizers import make_tokenizer
from aodiff.evals import check, image, pose, table, text
from aodiff.sampling.samples import Samples


def stand_in(info, splits, written=None, step=None, results=None, workdir=None, complete=None):
    """What a measure asks of a `Trained`; splits and written rows are ids in natural order."""
    config = types.SimpleNamespace(
        eval=types.SimpleNamespace(split="validation", samples=64), seed=0
    )
    own = dict(nats_per_token=0.5, bits_per_token=0.7, tokens=40, rows=10) | (results or {})

    def rows(split, most=None):
        ids = splits[split]
        ids, present = ids if isinstance(ids, tuple) else (ids, np.ones(ids.shape, bool))
        return ids[:most], present[:most]

    samples = None
    if written is not None:
        step = np.zeros(written.shape, int) if step is None else step
        samples = Samples(written, np.full(len(written), written.shape[1]), step)
    return types.SimpleNamespace(
        info=info,
        config=config,
        own=own,
        nats_per_row=own["nats_per_token"] * own["tokens"] / own["rows"],
        rows=rows,
        samples=samples,
        workdir=workdir,
        complete=complete,
    )


# ---- tables

COLUMNS = Columns(
    ("size", "kind", "label"),
    (
        Bins(edges=(0.0, 1.0, 3.0, 10.0), medians=(0.5, 2.0, 5.0)),
        Categories((1.0, 7.0)),
        Categories((0.0, 1.0)),
    ),
)


def table_info(codec=COLUMNS):
    return DataInfo("t", len(codec.names), 3, "column", unit_sizes=codec.sizes, codec=codec)


def table_rows(num, seed):
    """The label is 1 where size is not in the first bin."""
    rng = np.random.default_rng(seed)
    size = rng.integers(0, 3, num)
    return np.stack([size, rng.integers(0, 2, num), (size > 0).astype(int)], axis=1)


def test_a_table_and_its_own_rows_agree():
    splits = {"train": table_rows(400, 0), "validation": table_rows(200, 1)}
    found = table.measure(stand_in(table_info(), splits, table_rows(300, 2)))
    assert found["nats_per_row"] == 2.0
    assert found["tstr"] == found["trtr"] == found["tstr_ratio"] == 1.0
    assert abs(found["auc_boosting"] - 0.5) < 0.1 and abs(found["auc_logistic"] - 0.5) < 0.1
    assert found["association_error"] < 0.12 and found["marginal_error"] < 0.1
    ids = splits["validation"][:, 0]
    log_widths = np.log([1.0, 2.0, 7.0])[ids].mean()
    assert found["density_nats_per_row"] == pytest.approx(2.0 + log_widths)


def test_a_table_with_wrong_rows_does_not():
    splits = {"train": table_rows(400, 0), "validation": table_rows(200, 1)}
    wrong = table_rows(300, 2)
    wrong[:, 2] = 1 - wrong[:, 2]
    found = table.measure(stand_in(table_info(), splits, wrong))
    assert found["tstr"] == 0.0 and found["auc_boosting"] > 0.95
    assert found["marginal_error"] > 0.08 > found["marginal_error_data"]  # a third, of one in three


def test_density_does_not_depend_on_the_bins():
    """A histogram of as many bins as it likes is the uniform density on [0, 10]: log 10 nats."""
    for bins in (2, 5, 50):
        edges = tuple(np.linspace(0, 10, bins + 1))
        codec = Columns(("x",), (Bins(edges, edges[1:]),))
        ids = np.random.default_rng(0).integers(0, bins, (100, 1))
        widths = table.log_widths(codec, ids, np.ones(ids.shape, bool))
        assert (np.log(bins) + widths).mean() == pytest.approx(np.log(10))


def test_missing_cells_have_no_value_and_no_width():
    ids, present = np.array([[2, 1, 0]]), np.array([[False, True, True]])
    np.testing.assert_array_equal(table.values_of(COLUMNS, ids, present), [[np.nan, 1, 0]])
    assert table.log_widths(COLUMNS, ids, present) == [0.0]
    np.testing.assert_array_equal(table.is_categorical(COLUMNS), [False, True, True])


def test_samples_miss_what_real_rows_miss():
    """Cells that are never known must not tell samples from rows."""
    present = np.tile([[True, False, True]], (200, 1))
    splits = {"train": (table_rows(200, 0), present), "validation": (table_rows(200, 1), present)}
    found = table.measure(stand_in(table_info(), splits, table_rows(200, 2)))
    assert abs(found["auc_boosting"] - 0.5) < 0.1


def test_the_label_is_the_one_named_so_or_the_last():
    assert table.label_column(COLUMNS) == 2
    assert table.label_column(Columns(("label", "b"), COLUMNS.columns[:2])) == 0
    assert table.label_column(Columns(("a", "b"), COLUMNS.columns[:2])) == 1


# ---- poses


class Stick:
    """Three joints in a plane; unit 2 j + d is coordinate d of joint j in tenths."""

    floor = 0.05
    position_unit = "steps"

    def positions(self, ids):
        return np.asarray(ids).reshape(len(ids), 3, 2) / 10


STICK = DataInfo(
    "stick", 6, 100, "coordinate", codec=Stick(), edges=((0, 2), (1, 3), (2, 4), (4, 5))
)


def stick_rows(num, seed):
    """Bones 0-1 of length 3 and 1-2 of length 4, in steps of a tenth."""
    start = np.random.default_rng(seed).integers(0, 20, (num, 2))
    return np.concatenate([start, start + [30, 0], start + [30, 40]], axis=1)


def pose_measure(present=None, off=(3, 4)):
    """Completions miss every joint that is not given by a vector of length 5 / 10."""
    asked = []

    def complete(tokens, given):
        asked.append(given)
        return Samples(np.where(given, tokens, tokens + np.tile(off, 3)), None, None)

    real = stick_rows(40, 1)
    splits = {
        "train": stick_rows(40, 0),
        "validation": real if present is None else (real, present),
    }
    longer = stick_rows(30, 2) + np.array([0, 0, 5, 0, 5, 0])  # bone 0-1 is half a unit too long
    found = pose.measure(stand_in(STICK, splits, longer, complete=complete))
    return found, asked[0].reshape(2, 40, 3, 2)


def test_completion_error_counts_the_joints_that_were_asked_for():
    found, given = pose_measure()
    assert found["completion_quarter"] == found["completion_half"] == pytest.approx(0.5)
    assert found["floor"] == 0.05 and found["mean_pose_half"] > 0.5
    np.testing.assert_array_equal(given[..., 0], given[..., 1])  # a joint is given whole
    assert (given[0].any(-1).sum(1) == 1).all()  # round(3 / 4)
    assert (given[1].any(-1).sum(1) == 2).all()  # round(3 / 2)
    assert len(np.unique(given[0, :, :, 0], axis=0)) == 3  # another joint in every row


def test_bone_length_error_is_the_error_of_a_constant_length():
    found, _ = pose_measure()
    assert found["bone_length_error"] == pytest.approx((0.5 + 0) / 2)
    assert found["bone_length_error_data"] == pytest.approx(0)


def test_joints_that_are_not_there_are_neither_given_nor_counted():
    present = np.ones((40, 6), bool)
    present[:, 4:] = False
    present[:20, 1] = False  # one coordinate of a joint is not enough
    found, given = pose_measure(present)
    assert not given[:, :, 2].any() and not given[:, :20, 0].any()
    assert found["completion_half"] == pytest.approx(0.5)
    assert np.isfinite(found["bone_length_error"])


def test_a_joint_written_as_not_seen_has_no_distance():
    real = np.zeros((1, 3, 2))
    guess = np.array([[[3.0, 4], [np.nan, np.nan], [100, 0]]])
    assert pose.joint_error(guess, real, np.array([[True, True, False]])) == 5


def test_given_joints_depend_on_the_row_alone():
    there = np.ones((7, 8), bool)
    many, few = pose.given_joints(there, 0.5, 3), pose.given_joints(there[:2], 0.5, 3)
    np.testing.assert_array_equal(many[:2], few)
    assert (many.sum(1) == 4).all() and not (many == pose.given_joints(there, 0.5, 4)).all()


# ---- images and text


def test_images(tmp_path):
    info = DataInfo("i", 4, 3, "pixel", codec=object(), grid=(2, 2))
    rng = np.random.default_rng(0)
    splits = {name: rng.integers(0, 3, (60, 4)) for name in ("train", "validation")}
    dark = np.zeros((60, 4), int)
    found = image.measure(stand_in(info, splits, dark, workdir=tmp_path))
    assert found["bits_per_dim"] == 0.7
    assert found["mean_image_error"] == pytest.approx(splits["validation"].mean() / 2)
    assert found["mean_image_error_data"] < 0.2 and found["auc_boosting"] > 0.9
    assert (tmp_path / "samples.png").stat().st_size > 1000


def test_tiles_keep_every_pixel():
    sheet = image.tiled(np.arange(12).reshape(3, 4), (2, 2))
    assert sheet.shape == (5, 5)
    np.testing.assert_array_equal(sheet[:2, :2], [[0, 1], [2, 3]])
    np.testing.assert_array_equal(sheet[:2, 3:], [[4, 5], [6, 7]])
    np.testing.assert_array_equal(sheet[3:, :2], [[8, 9], [10, 11]])
    assert np.isnan(sheet[2]).all() and np.isnan(sheet[3:, 3:]).all()


def test_text():
    info = DataInfo("x", 6, 257, "byte", tokenizer=make_tokenizer("byte"))
    rows = np.tile([1, 2, 1, 2, 1, 2], (64, 1))
    splits = {"train": rows, "validation": rows}
    ones = np.ones_like(rows)
    for steps, tau in (([0, 1, 2, 3, 4, 5], 1.0), ([5, 4, 3, 2, 1, 0], -1.0)):
        step = np.tile(steps, (64, 1))
        found = text.measure(stand_in(info, splits, ones, step, {"bits_per_byte": 2.5}))
        assert found["tau_l2r"] == tau and found["abs_tau_l2r"] == 1
    assert found["bits_per_byte"] == 2.5
    assert found["unigram_tv"] == 0.5 and found["bigram_tv"] == 1.0
    assert found["unigram_tv_data"] == found["bigram_tv_data"] == 0
    np.testing.assert_array_equal(text.bigrams(np.array([[0, 1, 2]]), 10), [1, 12])


# ---- what may be asked


@pytest.mark.parametrize(
    ("measures", "orders", "samples", "words"),
    [
        (("tables",), ("own",), 64, "'tables', which is unknown; use some of order, table"),
        (("pose",), ("own",), 64, "for poses, and t has none"),
        (("image",), ("own",), 64, "for images"),
        (("text",), ("own",), 64, "for text"),
        (("table",), ("any",), 64, "lacks own"),
        (("table",), ("own",), 5, "eval.samples=5 is too few"),
    ],
)
def test_measures_that_cannot_be_taken_are_one_sentence(measures, orders, samples, words):
    eval_ = types.SimpleNamespace(measures=measures, orders=orders, samples=samples)
    with pytest.raises(ConfigError, match=words):
        check(types.SimpleNamespace(eval=eval_), table_info())


def test_measures_that_can_be_taken_pass():
    eval_ = types.SimpleNamespace(measures=("table", "order"), orders=("own",), samples=20)
    check(types.SimpleNamespace(eval=eval_), table_info())

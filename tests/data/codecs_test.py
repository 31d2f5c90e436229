"""Columns of categories and quantile bins, levels of gray, and rows by value or by name."""

import numpy as np
import pytest

from aodiff.data.codecs import Bins, Categories, Columns, Levels, bin_edges, fit_column
from aodiff.data.info import DataError

NAN = np.nan


def test_levels_are_equal_steps():
    codec = Levels(4, 16, 17)
    ids, _ = codec.encode(np.arange(17.0))
    assert ids.tolist() == [0] * 5 + [1] * 4 + [2] * 4 + [3] * 4
    given_ids, given = codec.parse([*range(16), None])
    assert given_ids.tolist() == [*ids[:16], 0] and given.tolist() == [True] * 16 + [False]
    with pytest.raises(DataError, match="pixel 3 is 17; give a number from 0 to 16, or null"):
        codec.parse([0, 0, 0, 17, *[0] * 13])


def test_column_codec_round_trips():
    table = np.array([[0.0, 1.5], [2.0, 3.0], [2.0, 9.0], [0.0, 4.0], [0.0, 5.0], [2.0, 7.0]])
    columns = tuple(fit_column(column, 3) for column in table.T)
    codec = Columns(("label", "value"), columns)
    ids, present = codec.encode(table)
    assert present.all()
    np.testing.assert_array_equal(codec.decode(ids)[:, 0], table[:, 0])
    for i in range(3):
        inside = table[ids[:, 1] == i, 1]
        assert codec.decode(np.array([[0, i]]))[0, 1] == np.median(inside)
    unseen, _ = codec.encode(np.array([[1.0, 100.0]]))
    assert unseen.tolist() == [[2, 2]]  # "other", and the last bin
    assert codec.sizes == (3, 3)
    np.testing.assert_allclose(columns[1].log_widths, np.log(np.diff(columns[1].edges)))
    assert columns[0].log_widths.tolist() == [0, 0, 0]


def mixed(missing: str) -> tuple[np.ndarray, Columns]:
    """Four rows of a text, a number in bins and a number by value, with a gap in each."""
    rows = [["b", 1.0, 7.0], ["", 2.0, NAN], ["a", NAN, 8.0], ["b", 4.0, 7.0]]
    values = np.array(rows, object)
    kinds = ("categories", "bins", "categories")
    columns = (fit_column(v, 2, k, missing) for v, k in zip(values.T, kinds, strict=True))
    return values, Columns(("text", "real", "count"), tuple(columns))


def test_missing_cells_have_an_id_and_are_predicted():
    values, codec = mixed("category")
    ids, present = codec.encode(values)
    assert ids.tolist() == [[1, 0, 0], [2, 1, 2], [0, 2, 1], [1, 1, 0]] and present.all()
    assert codec.sizes == (4, 3, 4)  # values, missing, and other where there are categories
    assert codec.decode(ids)[:, 0].tolist() == ["b", "", "a", "b"]
    assert codec.decode(ids)[0, 1:].tolist() == [1.0, 7.0] and np.isnan(codec.decode(ids)[2, 1])
    assert codec.columns[1].log_widths[2] == 0


def test_unknown_cells_keep_their_id_as_context_and_are_not_scored():
    values, codec = mixed("unknown")
    ids, present = codec.encode(values)
    np.testing.assert_array_equal(ids, mixed("category")[1].encode(values)[0])
    assert present.tolist() == [
        [True, True, True],
        [False, True, False],
        [True, False, True],
        [True, True, True],
    ]


def test_a_row_reads_by_name_and_goes_back():
    values, codec = mixed("category")
    ids, _ = codec.encode(values)
    shown = [codec.values(row) for row in ids]
    assert shown[0] == {"text": "b", "real": 1, "count": 7}
    assert shown[1] == {"text": "", "real": 3, "count": ""}  # 3: the median of 2 and 4
    assert codec.values(np.array([3, 0, 3])) == {"text": "other", "real": 1, "count": "other"}
    for row, i in zip(shown, ids, strict=True):
        again, given = codec.parse(row)
        assert again.tolist() == i.tolist() and given.all()
        assert codec.parse(list(row.values()))[0].tolist() == i.tolist()
    assert codec.text(ids[0]) == "text b, real 1, count 7"


def test_given_values_leave_gaps():
    _, codec = mixed("category")
    ids, given = codec.parse({"count": 8, "text": None})
    assert ids.tolist() == [0, 0, 1] and given.tolist() == [False, False, True]
    ids, given = codec.parse(["a", "3.5", None])
    assert ids.tolist() == [0, 1, 0] and given.tolist() == [True, True, False]


def test_a_code_may_be_given_as_a_number():
    codec = Columns(("code",), (Categories(("20", "A1")),))
    assert [codec.parse([value])[0].tolist() for value in (20, "20", "A1")] == [[0], [0], [1]]


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"size": 3}, "'size' is not one of text, real, count; rename or drop it."),
        ({"text": "c"}, "column 'text' is 'c'; give one of a, b, or null where nothing is known."),
        ({"count": 9}, "column 'count' is 9; give one of 7, 8, or null where nothing is known."),
        ({"real": "x"}, "column 'real' is 'x'; give a number, or null where nothing is known."),
        ({"real": NAN}, "column 'real' is nan; give a number, or null where nothing is known."),
        ({"real": [1]}, "column 'real' is [1]; give a number, or null where nothing is known."),
        (["a", 1], "a row of 2 values was given; give 3 values, null where nothing is known."),
        ("a,b", "a row of a text was given; give 3 values, null where nothing is known."),
    ],
)
def test_given_values_that_do_not_fit(row, sentence):
    with pytest.raises(DataError) as error:
        mixed("category")[1].parse(row)
    assert str(error.value) == sentence


def test_an_empty_cell_is_refused_where_none_is_missing():
    column = Categories(("a", "b"))
    with pytest.raises(DataError, match="column 'text' is ''; give one of a, b"):
        Columns(("text",), (column,)).parse([""])


def test_equal_bins_of_distinct_values_are_quantiles():
    values = np.arange(100.0)
    np.testing.assert_allclose(bin_edges(values, 4), np.quantile(values, [0, 0.25, 0.5, 0.75, 1]))


@pytest.mark.parametrize("at", ["start", "middle", "end"])
@pytest.mark.parametrize("bins", [2, 3, 8])
def test_a_value_that_fills_a_bin_alone_leaves_the_others_to_the_rest(at, bins):
    """Nine of ten rows hold one value: quantiles alone would leave one bin."""
    rest = np.arange(1.0, 101)
    heavy = {"start": 0.0, "middle": 50.5, "end": 101.0}[at]
    values = np.concatenate([np.full(900, heavy), rest])
    column = fit_column(values, bins, "bins")
    assert isinstance(column, Bins) and 2 <= column.size <= bins
    counts = np.bincount(column.encode(values), minlength=column.size)
    assert counts.min() > 0 and column.decode(column.encode(np.array([heavy])))[0] == heavy
    assert (np.diff(column.edges) > 0).all() and np.isfinite(column.log_widths).all()
    if bins == 8 and at != "middle":
        others = np.delete(counts, counts.argmax())
        assert len(others) == 7 and others.min() >= 13 and others.max() <= 16


def test_no_bin_is_empty_whatever_the_ties():
    rng = np.random.default_rng(0)
    for trial in range(200):
        distinct, n = rng.integers(2, 30), rng.integers(2, 60)
        values = np.concatenate([[0.0, 1.0], rng.integers(0, distinct, n).astype(float)])
        column = fit_column(values, int(rng.integers(2, 12)), "bins")
        counts = np.bincount(column.encode(values), minlength=column.size)
        assert counts.min() > 0 and np.isfinite(column.log_widths).all(), trial
        assert not np.isnan(column.medians).any()


def test_kinds_override_what_a_column_looks_like():
    values = np.array([1.0, 2.0, 3.0, 4.0])
    assert isinstance(fit_column(values, 4), Categories)
    assert isinstance(fit_column(values, 2), Bins)
    assert fit_column(values, 2, "categories").known == (1, 2, 3, 4)
    assert fit_column(values, 4, "bins").size == 4

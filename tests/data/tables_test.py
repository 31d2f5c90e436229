"""CSV files by hand, every way they can be wrong, scikit-learn's tables, and the real files."""

import json
import runpy

import numpy as np
import pytest
from absl import logging as absl_logging

from aodiff.config import base
from aodiff.data import DataError, describe, open_splits, tables
from tests.data.fixtures_test import ROOT, fixture

ROWS = 32
SEXES = ("f", "m")


def write(path, text: str | bytes, kinds: dict | list | str | None = None):
    """A config that reads the file just written."""
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    if kinds is not None:
        kinds = kinds if isinstance(kinds, str) else json.dumps(kinds)
        path.with_suffix(".columns.json").write_text(kinds)
    c = base().data
    c.name, c.dir, c.seq_len = "csv", str(path), 3
    return c


def people(header: str = "age,sex,height", end: str = "\n", **cells: list[str]) -> str:
    """A table of three columns; `cells` replace a column's last ones."""
    columns = {
        "age": [str(20 + i) for i in range(ROWS)],
        "sex": [SEXES[i % 2] for i in range(ROWS)],
        "height": [f"{1.5 + (7 * i % ROWS) / 100:.2f}" for i in range(ROWS)],
    }
    for name, last in cells.items():
        columns[name][ROWS - len(last) :] = last
    return end.join([header, *map(",".join, zip(*columns.values(), strict=True))]) + end


def rows(sources) -> np.ndarray:
    return np.concatenate([s.read(np.arange(len(s)))["tokens"] for s in sources.values()])


def test_columns_of_numbers_and_texts(tmp_path):
    c = write(tmp_path / "people.csv", people())
    info, sources = describe(c), open_splits(c)
    assert info.names == ("age", "sex", "height") and info.unit == "column"
    assert info.unit_sizes == (8, 3, 8) and info.vocab_size == 8
    assert {s: len(source) for s, source in sources.items()} == {
        "train": 24,
        "validation": 4,
        "test": 4,
    }
    _, splits = tables.load(c)
    for split, source in sources.items():
        shown = info.codec.decode(source.read(np.arange(len(source)))["tokens"])
        np.testing.assert_array_equal(shown[:, 1], splits[split][:, 1])
    everyone = sorted(row[0] for part in splits.values() for row in part)
    assert everyone == list(range(20, 20 + ROWS))
    # Each bin of the training split holds a near equal share, and decodes to its median.
    train, ages = sources["train"], splits["train"][:, 0].astype(float)
    ids = train.read(np.arange(24))["tokens"][:, 0]
    assert np.bincount(ids, minlength=8).tolist() == [3] * 8
    for i in range(8):
        assert info.codec.columns[0].decode(np.array([i]))[0] == np.median(ages[ids == i])


@pytest.mark.parametrize(
    "change",
    [
        lambda text: b"\xef\xbb\xbf" + text.encode(),
        lambda text: text.replace("\n", "\r\n").encode(),
        lambda text: text.replace(",", ";").encode(),
        lambda text: text.replace(",", ", ").replace("sex", '"sex"').encode(),
        lambda text: (text + "\n\n").encode(),
        lambda text: text.rstrip("\n").encode(),
    ],
    ids=["bom", "crlf", "semicolons", "blanks", "blank lines", "no last newline"],
)
def test_ways_to_write_the_same_table(tmp_path, change):
    plain = write(tmp_path / "plain.csv", people())
    other = write(tmp_path / "other.csv", change(people()))
    assert describe(other).names == describe(plain).names
    for split, source in open_splits(plain).items():
        assert open_splits(other)[split].fingerprint == source.fingerprint


def test_quoted_cells_may_hold_commas_and_lines(tmp_path):
    c = write(tmp_path / "a.csv", people(sex=['"f, or\nm"'] * 16))
    assert describe(c).codec.columns[1].known == ("f", "f, or\nm", "m")


@pytest.mark.parametrize("missing", ["category", "unknown"])
def test_missing_cells(tmp_path, missing):
    kinds = {name: {"missing": missing} for name in ("sex", "height")}
    c = write(tmp_path / "a.csv", people(sex=[""] * 8, height=["", *["1.6"] * 15]), kinds)
    info, sources = describe(c), open_splits(c)
    assert info.unit_sizes[1] == 4  # f, m, missing, other
    assert info.codec.columns[0].missing is None
    _, splits = tables.load(c)
    total = 0
    for split, source in sources.items():
        got = source.read(np.arange(len(source)))
        gaps = np.array([[v == "" or v != v for v in row] for row in splits[split]], bool)
        np.testing.assert_array_equal(got["present"], ~gaps | (missing == "category"))
        for j in (1, 2):
            column = info.codec.columns[j]
            np.testing.assert_array_equal(got["tokens"][:, j] == column.gap, gaps[:, j])
        assert source.stats.tokens == got["present"].sum()
        total += gaps.sum()
    assert total == 9


def test_a_gap_that_training_never_saw_still_has_an_id(tmp_path):
    """Which cells are missing is read off all splits, values off the training split alone."""
    _, splits = tables.load(write(tmp_path / "a.csv", people()))
    held_out = int(splits["validation"][0, 0]) - 20
    lines = people().split("\n")
    lines[1 + held_out] = f"{20 + held_out},,1.6"
    c = write(tmp_path / "b.csv", "\n".join(lines))
    info, source = describe(c), open_splits(c)["validation"]
    assert source.read(np.arange(1))["tokens"][0, 1] == info.codec.columns[1].gap == 2


def test_values_that_training_never_saw_count_as_other(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(absl_logging.get_absl_logger(), "propagate", True)
    _, splits = tables.load(write(tmp_path / "a.csv", people()))
    lines = people().split("\n")
    for age in splits["test"][:3, 0]:
        lines[int(age) - 19] = f"{int(age)},x,9.0"
    c = write(tmp_path / "b.csv", "\n".join(lines))
    with caplog.at_level("WARNING"):
        test = open_splits(c)["test"].read(np.arange(4))
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "csv test: 3 cells of column 'sex' hold values not seen in training and count as other"
    ]
    assert test["tokens"][:3].tolist()[0][1] == 2 and test["present"].all()
    assert (test["tokens"][:3, 1] == 2).all() and test["tokens"][3, 1] < 2
    assert (test["tokens"][:3, 2] == 7).all()  # a number outside falls into the end bin


def test_stated_kinds(tmp_path):
    c = write(
        tmp_path / "a.csv",
        people(),
        {"age": "drop", "height": "categories", "sex": {"kind": "categories"}},
    )
    c.seq_len = 2
    info = describe(c)
    assert info.names == ("sex", "height") and info.codec.columns[1].size == 24 + 1
    c = write(tmp_path / "b.csv", people(age=[str(i % 3) for i in range(ROWS)]), {"age": "bins"})
    assert describe(c).codec.columns[0].medians == (0, 1, 2)


def test_a_column_of_codes_may_be_text_if_that_is_stated(tmp_path):
    text = people(age=["A1"] * 10)
    c = write(tmp_path / "a.csv", text, {"age": "categories"})
    assert (
        describe(c).codec.columns[0].known[0] == "20" and "A1" in describe(c).codec.columns[0].known
    )


def test_a_file_that_changes_is_read_again(tmp_path):
    c = write(tmp_path / "a.csv", people())
    before = open_splits(c)["train"].fingerprint
    c = write(tmp_path / "a.csv", people().replace("f,", "female,"))
    assert describe(c).codec.columns[1].known == ("female", "m")
    assert open_splits(c)["train"].fingerprint != before  # the same ids, other values
    c = write(tmp_path / "a.csv", people(), {"sex": "drop"})
    c.seq_len = 2
    assert describe(c).names == ("age", "height")


def test_hidden_order_moves_sizes_and_rows_and_the_codec_stays_natural(tmp_path):
    plain = write(tmp_path / "a.csv", people(sex=[""] * 4))
    plain.levels = 5
    hidden = plain.copy_and_resolve_references()
    hidden.permute_seed = next(
        s for s in range(9) if np.any(np.array(describe(_with(plain, s)).permutation) != range(3))
    )
    natural, info = describe(plain), describe(hidden)
    assert info.unit_sizes == tuple(natural.unit_sizes[p] for p in info.permutation)
    assert info.names == natural.names and info.codec == natural.codec
    for split, source in open_splits(plain).items():
        row = source.read(np.arange(2))["tokens"]
        shown = open_splits(hidden)[split].read(np.arange(2))["tokens"]
        assert (shown < np.array(info.unit_sizes)).all()
        np.testing.assert_array_equal(info.natural(shown), row)
        assert info.text(shown[0]) == natural.text(row[0])
        ids, given = info.codec.parse(info.codec.values(info.natural(shown[0])))
        np.testing.assert_array_equal(info.hidden(ids), shown[0])
        assert given.all()


def _with(config, permute_seed: int):
    c = config.copy_and_resolve_references()
    c.permute_seed = permute_seed
    return c


TOO_MANY = "id,sex,height\n" + "".join(f"k{i},{SEXES[i % 2]},{i % 9}\n" for i in range(1500))
BAD = {
    "empty": ("", None, "{f} holds no rows; the first line names the columns, every other is a"),
    "only names": ("a,b,c\n", None, "{f} holds no rows; the first line names the columns"),
    "few rows": ("a,b,c\n1,2,3\n2,3,4\n", None, "{f} has 2 rows; at least 16 are needed"),
    "latin-1": (
        people(sex=["\xe9"]).encode("latin-1"),
        None,
        "{f} is not UTF-8 (byte {byte} is 0xe9); save it as UTF-8",
    ),
    "utf-16": (people().encode("utf-16"), None, "{f} is not UTF-8 (byte 0 is 0xff); save it"),
    "short row": (
        people() + "1,f\n",
        None,
        "{f}, line 34 has 2 cells and the first line names 3 columns; repair the line",
    ),
    "long row": (people().replace("22,f", "22,f,9"), None, "{f}, line 4 has 4 cells and the first"),
    "open quote": (people() + '1,"f,1.5\n', None, "{f}, line 34: unexpected end of data; repair"),
    "twice": (people("age,sex,age"), None, "{f} names two columns 'age'; rename one of them"),
    "unnamed": (people("age,,height"), None, "{f}: column 2 has no name; name it in the first"),
    "no names": (people("1,2,3.5"), None, "{f} starts with numbers (1, 2, 3.5); name the columns"),
    "mixed": (
        people(height=["tall"]),
        None,
        "{f}, line 33: column 'height' is 'tall' and holds numbers too; repair the cell, leave it "
        "empty if missing, or state its kind in a.columns.json",
    ),
    "nan": (people(height=["nan"]), None, "line 33: column 'height' is 'nan' and holds numbers"),
    "infinite": (people(height=["inf"]), {"height": "bins"}, "is 'inf', not a number; repair"),
    "not a number": (
        people(),
        {"sex": "bins"},
        "{f}, line 2: column 'sex' is 'f', not a number; repair the cell, or leave it empty if",
    ),
    "one value": (
        people(sex=["f"] * ROWS),
        None,
        "column 'sex' of {f} is 'f' in every training row, which leaves nothing to learn; state "
        '{{"sex": "drop"}} in a.columns.json',
    ),
    "one number": (people(age=["7"] * ROWS), None, "column 'age' of {f} is 7.0 in every training"),
    "one value and gaps that do not count": (
        people(sex=["f"] * 16 + [""] * 16),
        {"sex": {"missing": "unknown"}},
        "column 'sex' of {f} is 'f' in every training row",
    ),
    "all missing": (
        people(sex=[""] * ROWS),
        None,
        "column 'sex' of {f} is empty in every training row; fill it in, or state",
    ),
    "all but held-out missing": (
        people(height=[""] * ROWS),
        {"height": "bins"},
        "column 'height' of {f} is empty in every training row",
    ),
    "many categories": (TOO_MANY, None, "'id' of {f} has 1124 categories, at most 1024 are"),
    "no such kind": (
        people(),
        {"sex": "ordinal"},
        "{j} states \"ordinal\" for column 'sex'; a kind is one of bins, categories, drop, missing "
        "is one of category, unknown",
    ),
    "no such policy": (people(), {"sex": {"missing": "mean"}}, '{j} states {{"missing": "mean"}}'),
    "no such key": (people(), {"sex": {"type": "bins"}}, '{j} states {{"type": "bins"}} for'),
    "no such column": (
        people(),
        {"weight": "bins"},
        "{j} names a column 'weight' that {f} does not have; its columns are age, sex, height",
    ),
    "not json": (people(), "{age: bins}", "{j} is not JSON (Expecting property name"),
    "a list": (people(), ["age"], '{j} is not an object; write {{"column": "bins", ...}}'),
    "nothing left": (people(), dict.fromkeys(("age", "sex", "height"), "drop"), "{j} drops every"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_one_sentence(tmp_path, case):
    text, kinds, sentence = BAD[case]
    c = write(tmp_path / "a.csv", text, kinds)
    with pytest.raises(DataError) as error:
        describe(c)
    message, path = str(error.value), tmp_path / "a.csv"
    byte = text.find(b"\xe9") if isinstance(text, bytes) else 0
    where = {"f": path, "j": path.with_suffix(".columns.json"), "byte": byte}
    assert sentence.format(**where) in message
    assert "\n" not in message and message.endswith(".")


def test_a_value_and_gaps_can_be_learned(tmp_path):
    c = write(tmp_path / "a.csv", people(sex=["f"] * 16 + [""] * 16))
    assert describe(c).unit_sizes[1] == 3


def test_more_columns_than_the_model_and_files_that_are_not_there(tmp_path):
    c = write(tmp_path / "a.csv", people())
    c.seq_len = 2
    with pytest.raises(DataError, match=r"csv has 3 units per row, .* set data.seq_len=3"):
        describe(c)
    c.dir = str(tmp_path / "b.csv")
    with pytest.raises(DataError, match="b.csv is no file; put the CSV file there"):
        describe(c)
    c.dir = None
    with pytest.raises(DataError, match="reads the file data.dir, which is not set; set it"):
        describe(c)
    c.name, c.dir = "adult", str(tmp_path)
    with pytest.raises(DataError, match="adult is adult_train.csv and adult_test.csv, and .* no"):
        describe(c)


def test_train_and_test_files_stay_apart_and_must_agree(tmp_path):
    c = write(tmp_path / "adult_train.csv", people())
    write(tmp_path / "adult_test.csv", people(sex=["f"] * ROWS))
    c.name, c.dir = "adult", str(tmp_path)
    sources = open_splits(c)
    assert [len(sources[s]) for s in ("train", "validation", "test")] == [28, 4, 32]
    assert (sources["test"].read(np.arange(ROWS))["tokens"][:, 1] == 0).all()
    write(tmp_path / "adult_test.csv", people("age,gender,height"))
    with pytest.raises(DataError, match="test.csv has the columns age, gender, height, and .*sex"):
        describe(c)
    write(tmp_path / "adult_test.csv", people(age=["old"]))
    with pytest.raises(DataError, match="adult_test.csv, line 33: column 'age' is 'old'"):
        describe(c)


def test_equal_rows_stay_in_one_split():
    values = np.random.default_rng(0).integers(0, 9, (400, 2)).astype(float)
    splits = tables.split_rows(values)
    seen = [set(map(tuple, part.tolist())) for part in splits.values()]
    assert not seen[0] & seen[1] and not seen[0] & seen[2] and not seen[1] & seen[2]
    joined = np.concatenate(list(splits.values()))
    assert sorted(map(tuple, joined.tolist())) == sorted(map(tuple, values.tolist()))
    assert all(abs(len(splits[s]) - 50) < 10 for s in ("validation", "test"))


def test_a_bad_file_stops_the_command_with_its_sentence(command, tmp_path):
    write(tmp_path / "a.csv", people() + "1,f\n")
    said = command(
        f"--config={ROOT}/configs/ordergpt.py:csv", f"--config.data.dir={tmp_path / 'a.csv'}"
    )
    assert "a.csv, line 34 has 2 cells" in said
    write(tmp_path / "a.csv", people())
    said = command(
        f"--config={ROOT}/configs/ordergpt.py:csv", f"--config.data.dir={tmp_path / 'a.csv'}"
    )
    assert said.endswith("set data.seq_len=3.")


SCIKIT = {
    "breast_cancer": (569, 31, "mean radius", "label"),
    "wine": (178, 14, "alcohol", "label"),
    "diabetes": (442, 11, "age", "progression"),
    "iris": (150, 5, "sepal length (cm)", "label"),
}


@pytest.mark.parametrize("name", SCIKIT)
def test_tables_of_scikit_learn(name):
    count, width, first, last = SCIKIT[name]
    c = base().data
    c.name, c.seq_len = name, width
    info, sources = describe(c), open_splits(c)
    assert (info.names[0], info.names[-1], len(info.names)) == (first, last, width)
    assert sum(map(len, sources.values())) == count
    _, splits = tables.load(c)
    seen = [set(map(tuple, part.tolist())) for part in splits.values()]
    assert not seen[0] & seen[1] and not seen[0] & seen[2] and not seen[1] & seen[2]
    ids = sources["train"].read(np.arange(len(splits["train"])))["tokens"]
    counts = np.bincount(ids[:, 0], minlength=8)
    assert counts.min() > 0.6 * len(ids) / 8


def test_codes_of_a_table_are_pinned():
    """Runs and checkpoints name their data by these."""
    c = base().data
    c.name, c.seq_len, c.levels = "wine", 14, 4
    row = open_splits(c)["train"].read(np.arange(1))["tokens"][0]
    assert row.tolist() == [1, 3, 1, 2, 0, 0, 0, 2, 0, 3, 0, 0, 1, 2]


# Rows by split, ids of columns at 16 levels, missing cells of all rows, and a text column.
REAL = {
    "adult": ((19943, 2849, 9769), 15, 4262, "income", ("<=50K", ">50K")),
    "california_housing": (
        (15480, 2580, 2580),
        10,
        207,
        "ocean_proximity",
        ("<1H OCEAN", "INLAND", "ISLAND", "NEAR BAY", "NEAR OCEAN"),
    ),
    "wine_quality": ((4874, 812, 811), 13, 0, "color", ("red", "white")),
    "abalone": ((3133, 522, 522), 9, 0, "Type", ("F", "I", "M")),
}


@pytest.mark.parametrize("name", REAL)
def test_real_tables(name):
    counts, width, missing, column, known = REAL[name]
    folder = fixture(f"tabular/{name}").parent
    preset = name.removesuffix("_housing")
    c = runpy.run_path(str(ROOT / "configs/ordergpt.py"))["get_config"](preset).data.unlock()
    assert (c.name, c.seq_len, c.levels) == (name, width, 16)
    c.dir, c.permute_seed = str(folder), None
    info, sources = describe(c), open_splits(c)
    assert tuple(len(sources[s]) for s in ("train", "validation", "test")) == counts
    ids = rows(sources)
    codec = info.codec
    gaps = sum((ids[:, i] == x.gap).sum() for i, x in enumerate(codec.columns) if x.missing)
    assert gaps == missing
    assert codec.columns[info.names.index(column)].known == known
    assert all(2 <= size for size in info.unit_sizes) and "\ufeff" not in "".join(info.names)
    # Every row reads by name and goes back, and so does every value that has a category.
    for row in ids[:: len(ids) // 50]:
        again, given = codec.parse(json.loads(json.dumps(codec.values(row))))
        np.testing.assert_array_equal(again, row)
        assert given.all()
    _, splits = tables.load(c)
    i = info.names.index(column)
    train = sources["train"].read(np.arange(counts[0]))["tokens"]
    np.testing.assert_array_equal(codec.decode(train)[:, i], splits["train"][:, i])

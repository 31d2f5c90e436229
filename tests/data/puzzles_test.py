import gzip

import numpy as np
import pytest

from aodiff.config import base
from aodiff.data import DataError, describe, open_splits, puzzles, sudoku
from aodiff.data.pipeline import as_batch
from tests.data.fixtures_test import fixture


def config(name, **data):
    c = base("mdm").data
    cells = puzzles.SIDES.get(name, 4) ** 2
    c.update({"name": name, "seq_len": cells, "train_rows": 5000, "eval_rows": 64, **data})
    return c


def test_splits_do_not_share_grids():
    small = open_splits(config("sudoku4"))
    rows = [tuple(r) for s in small.values() for r in s.read(np.arange(len(s)))["tokens"]]
    assert len(rows) == 288 == len(set(rows))
    assert {s: len(x) for s, x in small.items()} == {"train": 216, "validation": 36, "test": 36}


def test_grids_of_side_nine_are_valid_pure_and_varied():
    splits = open_splits(config("sudoku"))
    rows = splits["train"].read(np.arange(300))["tokens"]
    assert sudoku.valid(rows).all() and len(np.unique(rows, axis=0)) == 300
    again = splits["train"].read(np.array([299, 7]))["tokens"]
    np.testing.assert_array_equal(again, rows[[299, 7]])
    # Every symbol is equally likely in every cell: 300 / 9, six standard errors.
    counts = (rows[:, :, None] == np.arange(9)).sum(0)
    assert np.all(np.abs(counts - 300 / 9) < 6 * np.sqrt(300 * 8 / 81))


def test_real_puzzles_have_their_stated_solutions():
    found = puzzles.read_puzzles(fixture("logic/sudoku/generated_hard.csv"), 9, most=5)
    assert found.given.sum(1)[:2].tolist() == [22, 24] and found.guesses[0] == 62.75
    for tokens, given in zip(found.tokens, found.given, strict=True):
        solved = sudoku.solutions(np.where(given, tokens, -1))
        assert [f.tolist() for f in solved] == [tokens.tolist()]


def test_files_round_trip_and_may_be_compressed(tmp_path):
    grid = sudoku.all_small_grids()[5].astype(int)
    text = sudoku.Digits(4).text(grid)
    line = f"Puzzle,Solution\n{text[:8]}00.00000,{text}\n"
    (tmp_path / "a.csv").write_text(line)
    with gzip.open(tmp_path / "a.csv.gz", "wt") as f:
        f.write(line)
    for name in ("a.csv", "a.csv.gz"):
        found = puzzles.read_puzzles(tmp_path / name, 4)
        assert found.given.sum() == 8 and found.tokens[0].tolist() == grid.tolist()
        assert np.isnan(found.guesses).all()


@pytest.mark.parametrize(
    "puzzle, solution, words",
    [
        ("123", "1" * 16, "16 digits of 0 to 4"),
        ("5" + "0" * 15, "1" * 16, "16 digits of 0 to 4"),
        ("11" + "0" * 14, "1" * 16, "contradicts itself"),
        ("4" + "0" * 15, "1234341221434321", "does not complete"),
        ("1" + "0" * 15, "1234341200000000", "does not complete"),
    ],
)
def test_bad_puzzles_are_one_sentence(tmp_path, puzzle, solution, words):
    (tmp_path / "p.csv").write_text(f"puzzle,solution\n{puzzle},{solution}\n")
    with pytest.raises(DataError, match=words) as e:
        puzzles.read_puzzles(tmp_path / "p.csv", 4)
    assert "line 2" in str(e.value)


def test_bad_files_are_one_sentence(tmp_path):
    with pytest.raises(DataError, match="no puzzle file"):
        puzzles.read_puzzles(tmp_path / "none.csv", 4)
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match="needs a column puzzle"):
        puzzles.read_puzzles(tmp_path / "x.csv", 4)
    (tmp_path / "e.csv").write_text("puzzle,solution\n")
    with pytest.raises(DataError, match="holds no puzzle"):
        puzzles.read_puzzles(tmp_path / "e.csv", 4)
    with pytest.raises(DataError, match="data.seq_len=81"):
        c = config("sudoku")
        c.seq_len = 80
        describe(c)


@pytest.mark.parametrize("name", ["sudoku4", "sudoku"])
def test_clues_are_a_random_set_of_the_asked_size(name):
    splits = open_splits(config(name, clues=(4, 6)))
    assert {s: len(x) for s, x in splits.items()} == {"train": 5000, "validation": 64, "test": 64}
    rows = splits["train"].read(np.arange(3000))
    assert sudoku.valid(rows["tokens"]).all()
    counts = rows["given"].sum(axis=1)
    share = np.bincount(counts, minlength=7)[4:] / 3000
    assert counts.min() == 4 and counts.max() == 6
    np.testing.assert_allclose(share, 1 / 3, atol=5 * np.sqrt(2 / 9 / 3000))
    cells = rows["given"].shape[1]
    at = rows["given"].mean(axis=0)  # every cell is as likely
    np.testing.assert_allclose(at, 5 / cells, atol=5 * np.sqrt(5 / cells / 3000))
    again = splits["train"].read(np.array([17, 4]))
    np.testing.assert_array_equal(again["given"], rows["given"][[17, 4]])
    other = splits["validation"].read(np.arange(64))["given"]
    assert (other != rows["given"][:64]).any()
    batch = as_batch(rows, np.arange(3000))
    np.testing.assert_array_equal(batch["loss_mask"], ~batch["given"])


def test_unique_puzzles_have_one_solution_and_no_clue_to_spare():
    rows = open_splits(config("sudoku4", clues=(0, 0), unique=True))["test"].read(np.arange(20))
    for grid, given in zip(rows["tokens"].astype(int), rows["given"], strict=True):
        assert [s.tolist() for s in sudoku.solutions(np.where(given, grid, -1))] == [grid.tolist()]
        for cell in np.flatnonzero(given):
            fewer = given & (np.arange(16) != cell)
            assert len(sudoku.solutions(np.where(fewer, grid, -1))) > 1
    assert {4, 5} <= set(rows["given"].sum(axis=1).tolist())
    large = open_splits(config("sudoku", clues=(30, 30), unique=True))["test"].read(np.arange(2))
    assert large["given"].sum(axis=1).tolist() == [30, 30]


def test_a_file_of_puzzles_is_data(tmp_path):
    grids = sudoku.all_small_grids()[::9]
    texts = [sudoku.Digits(4).text(g) for g in grids]
    path = tmp_path / "p.csv"
    path.write_text("puzzle\n" + "".join(f"{t[:10]}000000\n" for t in texts))
    c = config("puzzles", dir=str(path))
    splits = open_splits(c)
    rows = {split: source.read(np.arange(len(source))) for split, source in splits.items()}
    assert {s: len(r["tokens"]) for s, r in rows.items()} == {
        "train": 24,
        "validation": 4,
        "test": 4,
    }
    for fields in rows.values():
        assert sudoku.valid(fields["tokens"]).all() and fields["given"].sum(axis=1).tolist() == [
            10
        ] * len(fields["given"])
    assert describe(c).grid == (4, 4)


@pytest.mark.parametrize(
    "name, data, words",
    [
        ("sudoku4", {"clues": (5,)}, "lowest and the highest"),
        ("sudoku4", {"clues": (6, 4)}, "lowest and the highest"),
        ("sudoku4", {"clues": (0, 16)}, "0 to 15"),
        ("puzzles", {}, "needs data.dir"),
        ("puzzles", {"dir": "x.csv", "clues": (4, 4)}, "leave data.clues empty"),
    ],
)
def test_bad_clues_are_one_sentence(name, data, words):
    with pytest.raises(DataError, match=words):
        describe(config(name, **data))


def test_an_unsolvable_puzzle_is_one_sentence(tmp_path):
    (tmp_path / "p.csv").write_text("puzzle\n1200003000400012\n")
    with pytest.raises(DataError, match="line 2: puzzle '1200003000400012' has no solution"):
        puzzles.read_puzzles(tmp_path / "p.csv", 4)


def test_files_that_are_no_csv_are_one_sentence(tmp_path):
    path = tmp_path / "p.csv"
    for content, words in {
        b"puzzle,solution\n1234341221434321\n": "line 2: puzzle '' is not 16 digits",
        b"puzzle,solution\n\xff\xfe,1\n": "cannot be read as CSV",
        b"puzzle,mean_guesses\n1234341221434321,many\n": "line 2: mean_guesses is 'many'",
    }.items():
        path.write_bytes(content)
        with pytest.raises(DataError, match=words):
            puzzles.read_puzzles(path, 4)
    (tmp_path / "p.csv.gz").write_bytes(b"no gzip")
    with pytest.raises(DataError, match="p.csv.gz cannot be read"):
        puzzles.read_puzzles(tmp_path / "p.csv.gz", 4)

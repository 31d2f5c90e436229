import gzip

import numpy as np
import pytest

from aodiff.config import base
from aodiff.data import DataError, sudoku
from tests.data.fixtures_test import fixture


def config(name, **data):
    c = base("mdm").data
    c.update(name=name, seq_len=sudoku.SIDES[name] ** 2, train_rows=5000, eval_rows=64, **data)
    return c


def test_there_are_288_small_grids():
    grids = sudoku.all_small_grids()
    assert len(np.unique(grids, axis=0)) == 288 and sudoku.valid(grids).all()
    assert sorted(map(tuple, sudoku.solutions(np.full(16, -1), 1000))) == [tuple(g) for g in grids]


def test_validity_sees_rows_columns_and_boxes():
    good = sudoku.all_small_grids()[0].astype(int)
    for unit in sudoku.units(4):
        bad = good.copy()
        bad[unit[0]] = bad[unit[1]]
        assert not sudoku.valid(bad)
    latin = np.array([[0, 1, 2, 3], [1, 2, 3, 0], [2, 3, 0, 1], [3, 0, 1, 2]]).reshape(-1)
    assert not sudoku.valid(latin)  # only its boxes are wrong


def test_splits_do_not_share_grids():
    small = sudoku.open_splits(config("sudoku4"))
    rows = [tuple(r) for s in small.values() for r in s.read(np.arange(len(s)))["tokens"]]
    assert len(rows) == 288 == len(set(rows))
    assert {s: len(x) for s, x in small.items()} == {"train": 216, "validation": 36, "test": 36}


def test_grids_of_side_nine_are_valid_pure_and_varied():
    splits = sudoku.open_splits(config("sudoku"))
    rows = splits["train"].read(np.arange(300))["tokens"]
    assert sudoku.valid(rows).all() and len(np.unique(rows, axis=0)) == 300
    again = splits["train"].read(np.array([299, 7]))["tokens"]
    np.testing.assert_array_equal(again, rows[[299, 7]])
    # Every symbol is equally likely in every cell: 300 / 9, six standard errors.
    counts = (rows[:, :, None] == np.arange(9)).sum(0)
    assert np.all(np.abs(counts - 300 / 9) < 6 * np.sqrt(300 * 8 / 81))


def test_the_solver_counts_solutions():
    grid = sudoku.base_grids(0, 1)[0].astype(int)
    unique = grid.copy()
    unique[:9] = -1  # one missing row is determined
    assert [s.tolist() for s in sudoku.solutions(unique)] == [grid.tolist()]
    swap = np.where(grid <= 1, -1, grid)  # two symbols may change places
    assert len(sudoku.solutions(swap, 5)) >= 2
    contradiction = np.full(81, -1)
    contradiction[[0, 1]] = 3
    assert sudoku.solutions(contradiction) == []


def test_real_puzzles_have_their_stated_solutions():
    puzzles = sudoku.read_puzzles(fixture("logic/sudoku/generated_hard.csv"), 9, most=5)
    assert puzzles.given.sum(1)[:2].tolist() == [22, 24] and puzzles.guesses[0] == 62.75
    for tokens, given in zip(puzzles.tokens, puzzles.given, strict=True):
        found = sudoku.solutions(np.where(given, tokens, -1))
        assert [f.tolist() for f in found] == [tokens.tolist()]


def test_files_round_trip_and_may_be_compressed(tmp_path):
    grid = sudoku.all_small_grids()[5].astype(int)
    text = sudoku.Digits(4).text(grid)
    line = f"Puzzle,Solution\n{text[:8]}00.00000,{text}\n"
    (tmp_path / "a.csv").write_text(line)
    with gzip.open(tmp_path / "a.csv.gz", "wt") as f:
        f.write(line)
    for name in ("a.csv", "a.csv.gz"):
        found = sudoku.read_puzzles(tmp_path / name, 4)
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
        sudoku.read_puzzles(tmp_path / "p.csv", 4)
    assert "line 2" in str(e.value)


def test_bad_files_are_one_sentence(tmp_path):
    with pytest.raises(DataError, match="no puzzle file"):
        sudoku.read_puzzles(tmp_path / "none.csv", 4)
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match="needs puzzle and solution"):
        sudoku.read_puzzles(tmp_path / "x.csv", 4)
    (tmp_path / "e.csv").write_text("puzzle,solution\n")
    with pytest.raises(DataError, match="holds no puzzle"):
        sudoku.read_puzzles(tmp_path / "e.csv", 4)
    with pytest.raises(DataError, match="data.seq_len=81"):
        c = config("sudoku")
        c.seq_len = 80
        sudoku.describe(c)

import numpy as np
import pytest

from aodiff.data import DataError, sudoku


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


def test_a_given_board_must_have_a_solution():
    digits = sudoku.Digits(4)
    ids, given = digits.parse([1, None, None, None] + [None] * 12)
    assert ids[0] == 0 and given.sum() == 1
    with pytest.raises(DataError, match="has no solution"):
        digits.parse([1, 2, None, None, None, None, 3, None, None, None, 4, None, None, None, 1, 2])
    with pytest.raises(DataError, match="contradicts itself"):
        digits.parse([1, 1] + [None] * 14)


def test_the_search_for_a_solution_has_an_end():
    board = np.full(81, -1)
    board[[0, 10, 20, 30, 40]] = [0, 1, 2, 3, 4]
    with pytest.raises(TimeoutError):
        sudoku.solutions(board, 10**6, limit=200)
    hopeless = ".....5.8....6.1.43..........1.5........1.6...3.......553.....61........4........."
    with pytest.raises(DataError, match="no solution that is found in"):
        sudoku.Digits(9).parse([None if c == "." else int(c) for c in hopeless])

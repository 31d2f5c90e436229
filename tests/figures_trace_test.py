import numpy as np

from aodiff.figures_trace import MASK, moments, shots, trace


def test_shots_show_what_has_come_and_what_is_revealed():
    step, born = np.array([2, -1, 3]), np.array([0, -1, 2])
    assert moments(step, born) == [0, 2, 3]
    assert shots(["a", "b", "c"], step, born) == [
        [(MASK, "new mask"), ("b", "text")],
        [("a", "new text"), ("b", "text"), (MASK, "new mask")],
        [("a", "text"), ("b", "text"), ("c", "new text")],
    ]


def test_few_moments_of_long_rows_the_last_among_them(tmp_path):
    step = np.arange(1, 200)
    assert moments(step, step - 1)[-1] == 199 and len(moments(step, step - 1)) == 16
    trace(tmp_path / "a.png", ["$", "\n", "x"], np.array([0, 1, 2]), None)
    assert (tmp_path / "a.png").stat().st_size > 1000

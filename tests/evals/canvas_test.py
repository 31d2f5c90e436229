"""The measure of canvases on answers whose right length is known."""

import types

import ml_collections
import numpy as np
import pytest

from aodiff.config import base
from aodiff.data import describe, open_splits
from aodiff.evals import canvas
from aodiff.sampling.samples import Samples

N, PROMPT, END = 18, 5, 11
CALLS = 3.0


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Every answer is written as far as its canvas goes; growth finds the right one; a crop leaves
    the end symbol out of nothing but the cost."""
    data = base().data
    data.update(name="unfold", seq_len=N, eval_rows=100)
    config = ml_collections.ConfigDict(
        dict(
            eval=dict(split="validation", samples=100, canvases=(5, 12)),
            sample=dict(canvas=(5, 12), carve=dict(tau=1.0, window=4)),
        )
    )

    def complete(tokens, given, **sample):
        first, most = sample["canvas"]
        grows = sample["grow"] != "none"
        length = np.full(len(tokens), PROMPT + (most if grows else first))
        written = np.where(np.arange(N) < length[:, None], tokens, 0)
        widths = length * CALLS / (2 if sample["crop"] else 1) / (4 if grows else 1)
        calls = np.full(len(tokens), CALLS)
        return Samples(written, length, None, None, calls, widths, widths**2)

    trained = types.SimpleNamespace(
        config=config,
        info=describe(data),
        splits=open_splits(data),
        workdir=tmp_path_factory.mktemp("canvas"),
        picked=lambda split, most: np.arange(most),
        complete=complete,
        method=types.SimpleNamespace(flops=lambda widths, squares: 1e9 * widths),
    )
    return canvas.measure(trained), trained


def test_an_answer_is_right_where_its_canvas_holds_it(found):
    numbers, trained = found
    rows = trained.splits["validation"].read(np.arange(100))["tokens"]
    size = (rows[:, PROMPT:] != END).sum(axis=1)
    assert numbers["fixed 5/accuracy"] == pytest.approx((size <= 5).mean())
    assert numbers["fixed 5/cut"] == pytest.approx((size >= 5).mean())
    assert numbers["fixed 12/accuracy"] == numbers["CARVE 0.02/accuracy"] == 1
    assert numbers["fixed 5/written"] == pytest.approx(np.minimum(size, 5).mean())
    wrong = size > 5
    assert numbers["fixed 5/difference"] == pytest.approx(-wrong.mean())
    assert numbers["fixed 5/difference_se"] == pytest.approx(wrong.std() / 10)


def test_costs_and_what_they_split_into(found):
    numbers, _ = found
    assert numbers["fixed 12/gflops"] == 17 * CALLS and numbers["fixed 12/canvas"] == 17
    assert numbers["fixed 12 + crop/gflops"] == 17 * CALLS / 2
    assert numbers["CARVE 0.02 + crop/gflops"] == 17 * CALLS / 8
    assert canvas.best_fixed(numbers) == "fixed 12"
    assert canvas.saving(numbers, "CARVE 0.02 + crop") == (
        "CARVE 0.02 + crop saves 87.5% of the FLOPs of fixed 12: crop alone 50.0%, growth the "
        "other 37.5%, which is 75.0% of fixed 12 + crop."
    )


def test_the_table_has_a_line_for_each_way_and_the_figure_is_drawn(found):
    numbers, trained = found
    lines = canvas.table(numbers).splitlines()
    assert len(lines) == 1 + len(canvas.arms(trained.config)) + 2
    assert any(line.startswith("CARVE 0.05 + crop") for line in lines)
    assert (trained.workdir / "canvas.png").stat().st_size > 1000
    lines = canvas.series(numbers)
    assert list(lines["fixed canvas"]) == ["5", "12"] and len(lines["DAEDAL + crop"]) == 1


def test_of_equally_good_canvases_the_cheapest_is_best():
    numbers = {}
    for name, accuracy, cost in (
        ("fixed 8", 0.9, 2),
        ("fixed 9", 0.9, 1),
        ("fixed 9 + crop", 1, 0),
    ):
        numbers |= {f"{name}/accuracy": accuracy, f"{name}/gflops": cost}
    assert canvas.best_fixed(numbers) == "fixed 9"


def test_answers_stop_at_the_end_symbol_or_the_canvas():
    tokens = np.array([[1, 2, 9, 3], [1, 2, 3, 9], [9, 9, 1, 1]])
    found = canvas.answers(tokens, np.array([1, 1, 2]), np.array([4, 3, 4]), 9)
    assert found == [[2], [2, 3], [1, 1]]

import json
import types

import matplotlib.pyplot as plt
import numpy as np
import pytest

from aodiff import data, figures_layout, figures_ordergpt
from aodiff.config import base
from aodiff.data import DataInfo
from aodiff.figures_layout import natural_steps


def state_of(order, **changes):
    n = len(order)
    state = dict(
        order=order,
        excess=np.ones((2, n, n)),
        count=np.ones((2, n, n)),
        history=np.stack([order] * 3),
        history_step=np.array([10, 20, -1]),
        order_step=10,
        freeze_step=-1,
    )
    return types.SimpleNamespace(**state | changes)


@pytest.fixture
def seen(monkeypatch):
    """Figures by file name, instead of files."""
    figures = {}
    keep = lambda figure, path: figures.update({path.name: figure})
    for module in (figures_ordergpt, figures_layout):
        monkeypatch.setattr(module, "save", keep)
    yield figures
    plt.close("all")


def test_steps_by_natural_position_by_hand():
    # Unit 0 is natural position 2, unit 1 is 0, unit 2 is 1; units are written 2, 0, 1. So natural
    # position 1 is written first, then 2, then 0.
    info = DataInfo("hand", 3, 2, "symbol", permutation=(2, 0, 1))
    assert natural_steps(np.array([2, 0, 1]), info).tolist() == [2, 0, 1]
    assert natural_steps(np.array([2, 0, 1]), DataInfo("", 3, 2, "symbol")).tolist() == [1, 2, 0]


def test_hidden_columns_get_their_own_names_back(tmp_path, seen):
    config = base("ordergpt")
    config.data.update(name="wine", seq_len=14, levels=3, permute_seed=5)
    info = data.describe(config.data)
    order = np.random.default_rng(0).permutation(14)
    figures_ordergpt.write_order(tmp_path, state_of(order), "product", info, np.zeros(14, int))
    names = ("dependency", "fiedler", "order", "order_history", "priority")
    assert sorted(seen) == [f"{name}.png" for name in names]
    assert json.loads((tmp_path / "order.json").read_text()) == order.tolist()

    # Unit u holds natural column permutation[u], so step s writes column permutation[order[s]].
    columns = [info.permutation[u] for u in order]
    wanted = [f"{s}  {info.names[c]}" for s, c in enumerate(columns)]
    # Tick marks and cells are as high as their step; read them in that order.
    cells = [t for t in seen["order.png"].axes[0].texts if t.get_position()[0] == 1][:-1]
    assert [t.get_text() for t in sorted(cells, key=lambda t: t.get_position()[1])] == wanted
    as_they_come = [t for t in seen["order.png"].axes[0].texts if t.get_position()[0] == 0][:-1]
    assert [t.get_text() for t in as_they_come] == list(info.names)

    right = seen["priority.png"].axes[0].child_axes[0]
    ticks = zip(right.get_yticks(), right.get_yticklabels(), strict=True)
    assert [t.get_text() for _, t in sorted(ticks, key=lambda t: -t[0])] == wanted
    matrix = seen["dependency.png"].axes[1]
    assert [t.get_text() for t in matrix.get_yticklabels()] == [info.names[c] for c in columns]

    raster = seen["order_history.png"].axes[0].images[0].get_array()
    assert raster.shape == (2, 14)
    np.testing.assert_array_equal(np.argsort(raster[0]), columns)


HIDDEN = dict(seq_len=4, vocab_size=5, permutation=(3, 1, 0, 2))
ORDER = np.array([2, 3, 0, 1])  # natural positions 0, 2, 3, 1
STEPS = [0, 3, 1, 2]


class Letters:
    def decode(self, ids):
        return "".join("abcde"[i] for i in ids)


def test_every_layout_shows_the_step_of_the_right_place(tmp_path, seen):
    row = np.array([3, 1, 0, 2])  # of units; naturally a, b, c, d
    places = ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (1.0, 1.0))
    kinds = dict(
        skeleton=DataInfo("", unit="joint", xy=places, edges=((0, 1), (1, 3)), **HIDDEN),
        pixels=DataInfo("", unit="pixel", grid=(2, 2), **HIDDEN),
        text=DataInfo("", unit="character", tokenizer=Letters(), **HIDDEN),
        line=DataInfo("", unit="symbol", **HIDDEN),
    )
    for name, info in kinds.items():
        figures_layout.learned_order(tmp_path / name, ORDER, info, row)
    axes = {name: figure.axes[0] for name, figure in seen.items()}
    assert axes["skeleton"].collections[0].get_array().tolist() == STEPS
    assert [t.get_text() for t in axes["skeleton"].texts] == list("0312")
    assert [line.get_xydata().tolist() for line in axes["skeleton"].lines] == [
        [[0, 0], [1, 0]],
        [[1, 0], [1, 1]],
    ]
    assert axes["pixels"].images[0].get_array().tolist() == [[0, 3], [1, 2]]
    assert axes["text"].images[0].get_array().tolist() == [STEPS]
    assert [t.get_text() for t in axes["text"].texts] == list("a0b3c1d2")
    assert axes["line"].collections[0].get_offsets().tolist() == [[0, 0], [1, 3], [2, 1], [3, 2]]


def test_the_fiedler_vector_is_straight_in_the_order_of_a_hidden_path(tmp_path, seen):
    natural = np.exp(-abs(np.arange(4)[:, None] - np.arange(4)[None, :])) * (1 - np.eye(4))
    p = np.array(HIDDEN["permutation"])
    info = DataInfo("", unit="symbol", **HIDDEN)
    order = np.argsort(p)  # from the first natural position to the last
    figures_ordergpt.fiedler(tmp_path / "f", natural[np.ix_(p, p)], order, info)
    for axes in seen["f"].axes[:2]:
        x, y = axes.collections[0].get_offsets().T
        assert x.tolist() == [0, 1, 2, 3] and len(set(np.sign(np.diff(y)))) == 1
    figures_ordergpt.fiedler(tmp_path / "none", np.zeros((4, 4)), order, info)
    assert "no graph" in seen["none"].get_suptitle()


def test_stability_turns_reversed_runs_and_sorts_by_mean_step(tmp_path, seen):
    info = DataInfo("", 4, 2, "symbol", names=tuple("wxyz"))
    runs = np.array([[3, 1, 0, 2], [2, 0, 1, 3], [3, 1, 2, 0]])
    figures_ordergpt.stability(tmp_path / "s", runs, info)
    axes = seen["s"].axes[0]
    assert [t.get_text() for t in axes.get_xticklabels()] == list("zxwy")
    heights = [points.get_offsets()[:, 1].tolist() for points in axes.collections[1:]]
    assert heights == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 3, 2]]
    # |tau| is 1 of the first pair and (5 - 1) / 6 of the two others.
    assert "1 read backwards" in axes.get_title() and "0.78" in axes.get_title()


def test_a_run_without_a_learned_order_still_draws(tmp_path):
    info = DataInfo("", unit="symbol", **HIDDEN)
    empty = state_of(
        np.arange(4), excess=np.zeros((2, 4, 4)), history_step=np.full(3, -1), order_step=-1
    )
    figures_ordergpt.write_order(tmp_path, empty, "product", info, np.zeros(4, int))
    assert len(list(tmp_path.glob("*.png"))) == 5

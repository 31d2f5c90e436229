"""A sample can be drawn on every layout of data; what was given is gray."""

import matplotlib
import numpy as np
import pytest

from aodiff import figures_samples
from aodiff.data import DataInfo
from aodiff.data.tokenizers import make_tokenizer


class Places:
    """Three joints, x and y each."""

    def positions(self, ids):
        return ids.reshape(-1, 3, 2).astype(float)


INFOS = {
    "grid": DataInfo("i", 6, 4, "pixel", grid=(2, 3)),
    "pose": DataInfo("p", 6, 9, "coordinate", codec=Places(), edges=((0, 2), (1, 3))),
    "table": DataInfo("t", 6, 9, "column"),
    "text": DataInfo("x", 6, 257, "byte", tokenizer=make_tokenizer("byte")),
    "ids": DataInfo("s", 6, 9, "symbol"),
}


@pytest.mark.parametrize("kind", INFOS)
def test_every_layout(kind, tmp_path):
    values = {f"$ {i}": v for i, v in enumerate([1, 0.5, "a", None, "$", 1e9])}
    for name, step in (("some", [-1, 0, 2, 1, -1, 3]), ("all", [-1] * 6)):
        path = tmp_path / f"{name}.png"
        tokens = np.array([3, 1, 0, 2, 1, 1])
        figures_samples.sample(
            path, tokens, np.array(step), values if kind == "table" else None, INFOS[kind]
        )
        assert matplotlib.image.imread(path)[..., :3].std() > 0.01


def test_given_positions_are_gray_and_others_are_not():
    given, first, last = figures_samples._colours(np.array([-1, 0, 5])).to_rgba([-1, 0, 5])
    np.testing.assert_allclose(given, matplotlib.colors.to_rgba("lightgray"), atol=1e-2)
    np.testing.assert_allclose(first, matplotlib.colormaps["viridis"](0), atol=1e-2)
    np.testing.assert_allclose(last, matplotlib.colormaps["viridis"](1.0), atol=1e-2)

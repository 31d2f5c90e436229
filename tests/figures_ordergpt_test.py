import json
import types

import numpy as np

from aodiff import data, figures_ordergpt
from aodiff.config import base


def test_hidden_columns_get_their_own_names_back(tmp_path, monkeypatch):
    config = base("ordergpt")
    config.data.update(name="wine", seq_len=14, levels=3, permute_seed=5)
    info = data.describe(config.data)
    order = np.random.default_rng(0).permutation(14)
    state = types.SimpleNamespace(
        order=order,
        excess=np.ones((2, 14, 14)),
        count=np.ones((2, 14, 14)),
        history=np.stack([order] * 3),
        history_step=np.array([10, 20, -1]),
        order_step=10,
        freeze_step=-1,
    )
    seen = {}
    monkeypatch.setattr(figures_ordergpt, "save", lambda f, path: seen.update({path.name: f}))
    figures_ordergpt.write_order(tmp_path, state, "product", info)
    assert sorted(seen) == ["dependency.png", "order.png", "order_history.png"]
    assert json.loads((tmp_path / "order.json").read_text()) == order.tolist()

    # Unit u holds natural column permutation[u], so step s writes column permutation[order[s]].
    columns = [info.permutation[u] for u in order]
    axes = seen["order.png"].axes[0]
    labels = [t.get_text().rsplit("  ")[0] for t in axes.get_yticklabels()]
    assert labels == [info.codec.names[c] for c in columns]
    x, y = axes.collections[0].get_offsets().T
    assert [x[list(y).index(s)] for s in range(14)] == columns

    raster = seen["order_history.png"].axes[0].images[0].get_array()
    assert raster.shape == (2, 14)
    np.testing.assert_array_equal(np.argsort(raster[0]), columns)

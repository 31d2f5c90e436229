"""What a run on brackets must find, and what it need not: flexmdm.md 17.1.

Insertion need not beat a canvas here, and does not.
"""

import pytest
from ml_collections import ConfigDict

from aodiff import study
from aodiff.summary import measures
from configs.flexmdm import get_config

STEPS = (16, 64, 256)


@pytest.mark.slow
def test_a_run_on_brackets_is_as_good_as_it_can_be(tmp_path):
    config = get_config("bracket")
    config.compare, config.eval.steps = ConfigDict(), STEPS
    study.train_runs(config, tmp_path)
    found = measures(tmp_path)["brackets"]
    assert -0.05 < found["excess"] < 0.35  # nats a string; below 0 but for noise is a mistake
    of = lambda way, key: [found[f"Poisson, {way}/{steps}/{key}"] for steps in STEPS]
    for way in ("linear", "sin", "power"):
        few, some, many = of(way, "length_tv")
        assert few > some > many
        assert abs(of(way, "mean_length")[1] / found["data/mean_length"] - 1) < 0.08
    for way in ("sin", "power"):
        assert of(way, "length_tv")[0] < of("linear", "length_tv")[0]
    assert of("sin", "length_w1")[2] <= 0.3
    assert of("sin", "balanced")[1] >= 0.8

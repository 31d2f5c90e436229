import dataclasses
import pathlib
import types

import numpy as np
import pytest

from aodiff import data
from aodiff.config import base
from aodiff.evals import functions
from aodiff.sampling.samples import Samples

N = 48
TEXTS = ["def f(x):\n    y = x\n    return y", "def g(x):\n    return x", "def h(:", ""]


def config():
    c = base("flexmdm")
    c.data.update(dict(name="python_functions", seq_len=N))
    c.eval.samples = len(TEXTS)
    return c


INFO = data.describe(config().data)


def rows(texts):
    found = [INFO.tokenizer.encode(t).astype(np.int32) for t in texts]
    lengths = np.array([len(r) for r in found])
    return np.stack([np.pad(r, (0, N - len(r))) for r in found]), lengths


@dataclasses.dataclass
class Writer:
    """Writes `TEXTS` from left to right, and any hole with what stood there."""

    hole: str
    workdir: pathlib.Path
    config = config()
    info = INFO
    method = types.SimpleNamespace(grows=True)

    def complete(self, tokens, given, **sample):
        assert "given" not in sample and sample["rate"] == "exact"
        texts = TEXTS
        if given.any():
            self.templates = [INFO.text(t[g]) for t, g in zip(tokens, given, strict=True)]
            texts = [t.replace("def f(x):\n", "def f(x):\n" + self.hole) for t in self.templates]
        tokens, lengths = rows(texts)
        live = np.arange(N) < lengths[:, None]
        step = np.where(live, np.arange(N), -1)
        return Samples(tokens, lengths, step, calls=np.full(len(texts), 7))

    def rows(self, split, most):
        tokens, lengths = rows(TEXTS[:2])
        return tokens, np.arange(N) < lengths[:, None]


@pytest.mark.parametrize(
    "hole, exact, valid", [("    y = x", 1, 1), ("    y = 1", 0, 1), ("y=", 0, 0)]
)
def test_numbers_of_samples_whose_order_and_holes_are_known(hole, exact, valid, tmp_path):
    writer = Writer(hole, tmp_path)
    found = functions.measure(writer)
    assert writer.templates == ["def f(x):\n\n    return y"]  # the only one of three lines
    assert (found["line_exact"], found["line_parses"]) == (exact, valid)
    assert found["parses"] == 0.5 and found["calls"] == 7
    lengths = [len(t) for t in TEXTS]
    assert found["mean_length"] == np.mean(lengths) and found["mean_length_data"] == np.mean(
        lengths[:2]
    )
    for name in ("cbc", "rub", "rub_plus", "obw"):
        assert found[name] == found[f"{name}_left_to_right"]
    assert found["rub"] == 0 < found["rub_random"]
    assert 3 < found["unigram_entropy_data"] < 5
    assert (tmp_path / "trace.png").exists()
    lines = functions.table(found).splitlines()
    assert lines[1].split() == ["parse", "0.500", "+-", "0.289", "1"]  # of 4: half / sqrt(3)
    assert f"{found['programs']} programs" in lines[5] and found["programs"] == 1
    assert lines[-1].split()[-1] == f"{valid:.3f}"


def test_characters_of_several_bytes_are_as_late_as_the_last_of_them():
    row = INFO.tokenizer.encode("a = 'é'\nb = 1")
    step = np.arange(len(row))
    assert functions.orders(INFO, [row], step[None])["obw"] == 0.5
    step[5] = 99  # one byte of two comes at the end
    assert functions.orders(INFO, [row], step[None])["obw"] == 1.0

import ast

import numpy as np
import pytest

from aodiff import data
from aodiff.config import base
from aodiff.data import functions

MODULE = (
    '''
import os
@cache
def short(x):
    return x

class C:
    async def method(self, value):
        """What it does."""
        return value + 1  # and more

    def long(self):
        return "'''
    + "x" * 200
    + """"
"""
)


@pytest.fixture(autouse=True)
def another_library():
    """What is kept of one library is not kept for another."""
    functions.texts_of.cache_clear()
    yield
    functions.texts_of.cache_clear()


def test_functions_of_a_module_are_dedented_programs_of_the_right_size():
    found = functions.functions(MODULE, 120)
    assert [text.split("(")[0] for text in found] == ["async def method"]
    assert found[0].splitlines()[1] == '    """What it does."""' and "# and more" in found[0]
    ast.parse(found[0])
    assert len(functions.functions(MODULE, 1000)) == 2
    assert functions.functions("def broken(:", 100) == []


def test_rows_hold_one_function_each_and_no_split_repeats_another(monkeypatch):
    body = "def f{0}(value, other):\n    return value * {0} + other - {0}\n"
    modules = {f"m{i}.py": body.format(i) * 2 + body.format(0) for i in range(60)}
    monkeypatch.setattr(functions, "python_stdlib", lambda: modules)
    c = base().data
    c.update(dict(name="python_functions", seq_len=64))
    splits, texts = data.open_splits(c), {}
    info = data.describe(c)
    for split, source in splits.items():
        rows = source.read(np.arange(len(source)))
        texts[split] = [
            info.text(t[:n]) for t, n in zip(rows["tokens"], rows["length"], strict=True)
        ]
        assert all(functions.parses(t) and t.startswith("def f") for t in texts[split])
        assert not rows["tokens"][np.arange(64) >= rows["length"][:, None]].any()
        assert source.stats.tokens == rows["length"].sum()
    everything = [t for s in texts.values() for t in s]
    assert len(everything) == len(set(everything)) == 60
    c.name += data.CANVAS
    for split, source in data.open_splits(c).items():
        rows = source.read(np.arange(len(source)))
        assert rows.keys() == {"tokens"}
        ended = [t[: list(t).index(info.tokenizer.eos)] for t in rows["tokens"]]
        assert [info.text(t) for t in ended] == texts[split]
    c.tokenizer = "symbols:ab"
    with pytest.raises(data.DataError, match="end symbol"):
        data.open_splits(c)


def test_rows_too_short_for_any_function_are_refused(monkeypatch):
    monkeypatch.setattr(functions, "python_stdlib", lambda: {"m.py": MODULE})
    c = base().data
    c.update(dict(name="python_functions", seq_len=8))
    with pytest.raises(data.DataError, match="data.seq_len=8"):
        data.open_splits(c)

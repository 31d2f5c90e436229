"""The Sudoku measure on boards whose outcomes are known by hand."""

import json
import types

import numpy as np
import pytest

from aodiff import train
from aodiff.config import ConfigError, base
from aodiff.data import DataInfo, sudoku
from aodiff.data.info import Stats
from aodiff.data.sources import ArraySource
from aodiff.evals.sudoku import difficulty, fits, measure, table
from aodiff.evals.trained import Trained
from aodiff.sampling.samples import Samples

GRIDS = sudoku.all_small_grids()[::36].astype(np.int32)  # 8 boards
INFO = DataInfo("sudoku4", 16, 4, "cell", codec=sudoku.Digits(4), grid=(4, 4))


def a_run(workdir, complete, decoders, monkeypatch):
    """Eight boards whose first 8 or 12 cells are given, in turn."""
    given = np.arange(16) < np.where(np.arange(8) % 2, 12, 8)[:, None]
    source = ArraySource({"tokens": GRIDS, "given": given}, Stats(8, 128))
    evaluated = types.SimpleNamespace(split="test", samples=8, decoders=decoders)
    config = types.SimpleNamespace(eval=evaluated)
    monkeypatch.setattr(Trained, "complete", lambda self, *args, **sample: complete(*args, sample))
    method = types.SimpleNamespace(flops_per_token=lambda: 1e6)
    return Trained(method, {}, {}, INFO, config, None, {"test": source}, 1, workdir)


def test_solved_exact_and_cells_are_three_things(tmp_path, monkeypatch):
    def complete(tokens, given, sample):
        assert sample["temperature"] == 0
        out = tokens.copy()
        if sample["order"] == "other":  # another solution of the first board
            out[0] = sudoku.solutions(np.where(given[0], tokens[0], -1), 2)[1]
            assert (out[0] != tokens[0]).any()
        if sample["order"] == "clues":  # boards that keep the rules and no clue
            out = (tokens + 1) % 4
        if sample["order"] == "wrong":  # one blank cell wrong in the boards with 12 clues
            out[1::2, 15] = (out[1::2, 15] + 1) % 4
        return Samples(out, np.full(8, 16), given * 0, calls=(~given).sum(axis=1))

    found = measure(a_run(tmp_path, complete, ("right", "other", "clues", "wrong"), monkeypatch))
    get = lambda name: [found[f"{name}/{key}"] for key in ("valid", "exact", "cells")]
    assert get("right") == [1, 1, 1] and get("clues") == [0, 0, 0]
    assert get("other")[:2] == [1, 7 / 8] and 0.8 < get("other")[2] < 1
    assert get("wrong") == [0.5, 0.5, 1 - 4 / (4 * 4 + 4 * 8)]
    assert found["right/calls"] == 6 and found["right/gflops"] == 6 * 16 * 1e6 / 1e9
    assert found["right/valid_se"] == 0 and found["wrong/valid_se"] == pytest.approx(0.5 / 8**0.5)
    assert found["wrong/valid[8]"] == 1 and found["wrong/valid[12]"] == 0
    assert json.loads((tmp_path / "sudoku.json").read_text())["valid"]["wrong"] == [1, 0] * 4
    assert (tmp_path / "sudoku.png").stat().st_size > 1000
    lines = table(found).splitlines()
    assert lines[0].split()[6:8] == ["8", "12"] and len(lines) == 5
    assert lines[4].split()[:5] == ["wrong", "0.500", "+-", "0.177", "0.500"]


def test_a_decoder_without_calls_still_has_its_line(tmp_path, monkeypatch):
    complete = lambda tokens, given, sample: Samples(tokens, np.full(8, 16), given * 0)
    numbers = measure(a_run(tmp_path, complete, ("own",), monkeypatch))
    known = {key: value for key, value in numbers.items() if np.isfinite(value)}
    assert "own/calls" not in known and "nan" in table(known)


def test_difficulty_is_guesses_or_else_clues():
    given = np.arange(16)[None] < np.array([4, 5, 9, 11])[:, None]
    assert difficulty(given) == ["4", "5", "9", "11"]
    more = np.arange(16)[None] < np.array([4, 5, 6, 9, 11])[:, None]
    assert difficulty(more) == ["4-5", "4-5", "6-7", "8-9", "10-11"]
    guesses = np.array([0.0, 0.5, 4.0, 60.0])
    words = ["no guesses", "few guesses", "many guesses", "many guesses"]
    assert difficulty(given, guesses) == words
    assert difficulty(given, np.full(4, np.nan)) == difficulty(given)


def test_it_is_for_boards_only():
    assert fits(INFO) and not fits(DataInfo("chain", 16, 4, "symbol"))


def test_an_unknown_decoder_is_one_sentence_before_any_training(tmp_path):
    config = base("mdm")
    board = {"data.name": "sudoku4", "data.seq_len": 16, "eval.orders": ("own",)}
    asked = {"eval.measures": ("sudoku",), "eval.decoders": ("confidence", "guess")}
    config.update_from_flattened_dict(board | asked)
    with pytest.raises(ConfigError, match="guess"):
        train.train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()

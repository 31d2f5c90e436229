"""Sampling command: prompts that fit, prompts that do not, rows independent of the batch."""

import json

import jax
import numpy as np
import pytest

from aodiff import config as config_lib
from aodiff import data, methods, partitioning, rng
from aodiff.config import ConfigError
from aodiff.generate import generate, place_prompt


def tiny():
    c = config_lib.base("aogpt")
    c.data.seq_len = 12
    c.model.num_layers, c.model.width, c.model.num_heads, c.model.cond_dim = 1, 8, 2, 4
    c.sample.num, c.sample.batch, c.sample.steps = 6, 4, 5
    return c


@pytest.fixture(scope="module")
def parts():
    config = tiny()
    info = data.describe(config.data)
    method = methods.build(config, info)
    params = partitioning.unbox(jax.jit(lambda: method.init(rng.stream(0, rng.INIT)))())
    return method, params, info


def run(parts, config, workdir, devices=1):
    method, params, info = parts
    mesh = partitioning.make_mesh(1, -1, 1, jax.devices()[:devices])
    path = generate(method, params, {}, info, config, mesh, step=3, workdir=workdir)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_do_not_depend_on_batch_or_mesh_and_the_prompt_stays(parts, tmp_path):
    config = tiny()
    config.sample.prompt, config.sample.positions = "ab", (2, 7)
    first = run(parts, config, tmp_path / "a")
    assert len(first) == 6 and (tmp_path / "a" / "samples" / "3.png").exists()
    for row in first:
        assert row["tokens"][2] == ord("a") and row["tokens"][7] == ord("b")
        assert [i for i, s in enumerate(row["step"]) if s == -1] == [2, 7]
        assert max(row["step"]) == 4 and max(row["tokens"]) < 257
    config.sample.batch = 2
    second = run(parts, config, tmp_path / "b", devices=2)
    assert [r["tokens"] for r in first] == [r["tokens"] for r in second]
    assert len({tuple(r["tokens"]) for r in first}) == 6


@pytest.mark.parametrize(
    ("prompt", "positions", "words"),
    [
        ("x" * 13, (), "out of range"),
        ("ab", (0, 12), "12 is out of range"),
        ("ab", (-1, 3), "-1 is out of range"),
        ("ab", (3, 3), "repeats"),
        ("ab", (3,), "one position per token"),
        ("", (3,), "both or neither"),
    ],
)
def test_a_prompt_that_does_not_fit_is_one_sentence(parts, prompt, positions, words):
    with pytest.raises(ConfigError, match=words):
        place_prompt(prompt, positions, parts[2])


def test_positions_are_natural_also_where_the_model_sees_others(parts, tmp_path):
    config = tiny()
    config.sample.prompt, config.sample.positions, config.sample.num = "ab", (2, 7), 2
    config.data.permute_seed = 1
    info = data.describe(config.data)
    assert sorted(info.permutation.index(p) for p in (2, 7)) != [2, 7]  # they do move
    rows = run((parts[0], parts[1], info), config, tmp_path)
    for row in rows:
        assert row["tokens"][2] == ord("a") and row["tokens"][7] == ord("b")
        assert [i for i, s in enumerate(row["step"]) if s == -1] == row["given"] == [2, 7]
        assert row["text"] == info.tokenizer.decode(np.array(row["tokens"]))


def test_prompts_need_text():
    config = tiny()
    config.data.name, config.data.seq_len = "markov", 8
    with pytest.raises(ConfigError, match="no text"):
        place_prompt("a", (), data.describe(config.data))
    tokens, given = place_prompt("", (), data.describe(config.data))
    assert not given.any() and tokens.shape == (8,)
    np.testing.assert_array_equal(tokens, 0)

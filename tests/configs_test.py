"""The commands of the README on the smallest presets, and every preset up to its first step.

That presets and header tables name each other is tested in hygiene_test.py.
"""

import importlib.util
import json
import pathlib

import jax
import jax.numpy as jnp
import pytest

from aodiff import arms, data, methods, partitioning
from aodiff import config as config_lib

ROOT = pathlib.Path(__file__).parents[1]


def presets():
    for path in sorted((ROOT / "configs").glob("*.py")):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for name in module.PRESETS:
            yield pytest.param(module.get_config, name, id=f"{path.stem}:{name}")


def lines(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(("get_config", "preset"), list(presets()))
def test_every_preset_builds_or_says_what_data_it_needs(get_config, preset, tmp_path):
    config = get_config(preset)
    config.data.dir = str(tmp_path)
    if config.checkpoint.needs:  # weights that nobody can train here: pretrained_presets_test.py
        with pytest.raises(config_lib.ConfigError, match="checkpoint.init_from"):
            config_lib.finalize(config)
        return
    config = config_lib.finalize(config)
    try:
        info = data.describe(config.data)
    except data.DataError as e:  # what the user's own files hold is known once they are there
        assert config.data.name in data.FROM_FILES and "\n" not in str(e)
        assert "data.dir" in str(e)
        return
    method = methods.build(config, info)
    spec = method.batch_spec(config.train.global_batch)
    assert spec["tokens"].shape == (config.train.global_batch, config.data.seq_len)
    shapes = jax.eval_shape(method.init, jax.random.key(0))
    assert all(jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(shapes))
    for order in config.compare.values():
        config_lib.finalize(arms.arm(config, order))
    try:
        splits = data.open_splits(config.data)
    except data.DataError as e:
        sentence = str(e)
        assert "\n" not in sentence and "run: python -m aodiff.data.prepare" in sentence
    else:
        assert len(splits["train"]) > 0 and config.eval.split in splits


@pytest.mark.parametrize("name", ["aogpt", "ordergpt"])
def test_smoke_trains_evaluates_and_samples(command, tmp_path, monkeypatch, name):
    make_mesh = partitioning.make_mesh  # one device, which a user's CPU is
    monkeypatch.setattr(
        partitioning, "make_mesh", lambda **sizes: make_mesh(**sizes, devices=jax.devices()[:1])
    )
    workdir = tmp_path / "runs" / f"{name}-smoke"
    smoke = f"--config={ROOT}/configs/{name}.py:smoke"

    assert command(smoke) is None
    config = json.loads((workdir / "config.json").read_text())
    orders, steps = config["eval"]["orders"], config["train"]["num_steps"]
    log = lines(workdir / "metrics.jsonl")
    assert log[-1]["step"] == steps and f"eval/validation/{orders[0]}" in str(log[-1])
    losses = [entry["train/loss"] for entry in log if "train/loss" in entry]
    assert losses[-1] < losses[0]
    assert (workdir / "loss.png").stat().st_size > 1000
    results = workdir / "eval" / f"validation-{steps}.json"
    after_training = json.loads(results.read_text())
    results.unlink()

    assert command(smoke, "--mode=eval") is None
    assert json.loads(results.read_text()) == after_training
    assert set(orders) <= set(after_training["results"])
    assert results.with_suffix(".png").stat().st_size > 1000

    assert command(smoke, "--mode=sample") is None
    samples = lines(workdir / "samples" / f"{steps}.jsonl")
    assert [sample["id"] for sample in samples] == list(range(config["sample"]["num"]))
    length = config["data"]["seq_len"]
    assert all(len(sample["tokens"]) == length for sample in samples)
    assert (workdir / "samples" / f"{steps}.png").stat().st_size > 1000
    if name == "ordergpt":
        order = json.loads((workdir / "order.json").read_text())
        assert sorted(order) == list(range(length))
        assert (workdir / "order.png").stat().st_size > 1000

"""The presets of published models: they ask for weights, and have the published sizes."""

import importlib.util
import math
import pathlib

import jax
import jax.numpy as jnp
import pytest

from aodiff import methods
from aodiff.config import ConfigError, finalize
from aodiff.data import DataInfo
from aodiff.methods.mdm_model import build_model

ROOT = pathlib.Path(__file__).parents[1]
# mdm.md 13.13; of MDLM what is left without time, with 46 rows of padding in table and head.
PARAMETERS = {"llada": 8_015_581_184, "dream": 7_615_616_512, "mdlm": 162_336_384}


def presets(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "configs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


WEIGHTS = (*PARAMETERS, "carve_release")
NAMES = [
    (file, name)
    for file in ("mdm", "carve", "flexmdm")
    for name in presets(file).PRESETS
    if name.startswith(WEIGHTS) and not name.endswith("smoke")
]


@pytest.mark.parametrize(("file", "name"), NAMES)
def test_it_asks_for_weights_in_one_sentence(file, name):
    config = presets(file).get_config(name)
    with pytest.raises(ConfigError, match="the weights of .* in checkpoint.init_from") as error:
        finalize(config)
    assert "\n" not in str(error.value)
    config.checkpoint.init_from = "imported"
    config = finalize(config)
    answer, block = config.data.seq_len, config.sample.block
    assert block == 0 or answer % block == 0
    assert all(n <= answer for n in config.sample.canvas)


def test_the_command_line_says_so_too(command):
    says = command(f"--config={ROOT}/configs/mdm.py:llada_8b_gsm8k", "--mode=sample")
    assert "GSAI-ML/LLaDA-8B-Instruct" in says


def count(shapes):
    return sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))


@pytest.mark.parametrize("name", ["llada_8b_gsm8k", "dream_7b_humaneval", "mdlm_owt"])
def test_it_has_the_published_number_of_parameters(name):
    config = presets("mdm").get_config(name)
    info = DataInfo("text", config.data.seq_len, config.model.mask_id, "token")
    model = build_model(config, info)
    tokens = jnp.zeros((1, config.data.seq_len), jnp.int32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)
    assert count(shapes) == PARAMETERS[name.split("_")[0]]
    out = jax.eval_shape(model.apply, shapes, tokens)
    assert out.shape == (1, config.data.seq_len, config.model.table_size)


@pytest.mark.parametrize(("name", "added"), [("dreamcoder_7b", 835.2), ("llada_8b", 285.3)])
def test_insertion_adds_the_published_number_of_parameters(name, added):
    """flexmdm.md 4.2 and 4.3, in millions: modulators, time MLP and length head."""
    config = presets("flexmdm").get_config(name)
    config.checkpoint.init_from = "imported"
    config = finalize(config)
    info = DataInfo("text", config.data.seq_len, config.model.mask_id, "token")
    params = jax.eval_shape(methods.build(config, info).init, jax.random.key(0))["params"]
    base = count(params.pop("base"))
    assert base == PARAMETERS["llada" if name == "llada_8b" else "dream"]
    assert abs(count(params) / 1e6 - added) < 0.1

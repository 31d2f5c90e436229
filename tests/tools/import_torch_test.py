"""Published weights in and out: parity with forward passes of their own, round trips, refusals."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from absl import flags

from aodiff import checkpoint
from aodiff.checkpoint import CheckpointError, Checkpoints
from aodiff.config import ConfigError, base
from aodiff.state import init_state
from aodiff.tools import export_torch, import_torch
from aodiff.tools.safetensors import open_tensors
from aodiff.train import restore, set_up
from tests.tools import published


def settings(name, **changes):
    """The config of a tiny model, cut in four by `fsdp` and in two by `model`."""
    config, model = base("mdm"), published.MODEL | published.MODELS[name] | changes
    config.data.update(name="chain", seq_len=published.LENGTH, vocab=model["mask_id"] or 50)
    config.model.update(model)
    config.optim.ema_decay = 0.0
    config.update_from_flattened_dict({"eval.params": "raw", "sample.params": "raw"})
    config.mesh.update(data=1, fsdp=4, model=2)
    return config


def written(path, arrays, config=None, tokenizer=None):
    path.mkdir()
    published.write_file(path / "model.safetensors", arrays)
    for name, said in (("config", config), ("tokenizer_config", tokenizer)):
        if said is not None:
            (path / f"{name}.json").write_text(json.dumps(said))
    return path


def imported(tmp_path, name, dtype=np.float32, **changes):
    """The published weights, the config, and the workdir they are imported to."""
    arrays = published.weights(published.SHAPES[name], dtype)
    config = settings(name, **changes)
    source = written(tmp_path / "source", arrays)
    import_torch.import_weights(config, source, tmp_path / "run")
    return arrays, config, tmp_path / "run"


@pytest.mark.parametrize("name", published.SHAPES)
def test_an_imported_model_has_the_published_logits(tmp_path, name):
    arrays, config, workdir = imported(tmp_path, name)
    config.checkpoint.init_from = str(workdir)
    setup = set_up(config)
    own = Checkpoints(tmp_path / "new")
    start = own, setup.config, setup.abstract, {}, lambda: setup.abstract
    state, _ = checkpoint.start_up(*start)
    same = jax.tree.map(lambda x, y: x.sharding == y.sharding, state.params, setup.abstract.params)
    assert all(jax.tree.leaves(same))
    params = jax.device_get(state.params)
    tokens = np.random.default_rng(0).integers(0, 49, published.LENGTH)
    tokens[[1, 4]] = published.MODELS[name]["mask_id"]
    want = published.forward(name, arrays, tokens)
    found = setup.method.model.apply(params, jnp.asarray(tokens, jnp.int32)[None])[0]
    mask = setup.method.model.cfg.mask
    assert np.all(np.asarray(found)[:, mask:] <= -1e9)
    assert np.abs(np.asarray(found)[:, :mask] - want[:, :mask]).max() < 2e-5
    assert want.std() > 0.3 and not np.allclose(want[0], want[2], atol=0.1)


@pytest.mark.parametrize("name", ["dream", "llada"])
def test_a_run_that_adds_insertion_begins_with_the_imported_model(tmp_path, name):
    arrays = published.weights(published.SHAPES[name])
    source = written(tmp_path / "source", arrays)
    config = inserting(name)
    import_torch.import_weights(config, source, tmp_path / "run")
    config.checkpoint.init_from = str(tmp_path / "run")
    setup = set_up(config)
    fresh = lambda: init_state(setup.method, setup.tx, False, setup.abstract, 0)
    own = Checkpoints(tmp_path / "new")
    state, _ = checkpoint.start_up(own, setup.config, setup.abstract, {}, fresh)
    params, tokens = jax.device_get(state.params), np.random.default_rng(0).integers(0, 48, 7)
    tokens[[0, 2, 4]] = 48, *[published.MODELS[name]["mask_id"]] * 2
    want = published.forward(name, arrays, tokens)
    apply = jax.jit(setup.method.model.apply)
    for time in (0.0, 0.6):
        ids = jnp.asarray(tokens, jnp.int32)[None]
        out = apply(params, ids, jnp.array([7]), jnp.array([time], jnp.float32))
        assert np.abs(np.asarray(out.logits)[0, :, :48] - want[:, :48]).max() < 2e-5
        np.testing.assert_allclose(np.exp(out.gap), 0.37, atol=0.02)
    config.model.width = 64
    with pytest.raises(ConfigError, match=r"model.width"):
        checkpoint.start_up(own, config, setup.abstract, {}, fresh)


def inserting(name):
    """`settings` of a model to which insertion is added, 48 ids, then the anchor and the mask."""
    config, model = base("flexmdm_retrofit"), published.MODEL | published.MODELS[name]
    config.data.update(name="chain", seq_len=published.LENGTH - 1, vocab=48)
    config.model.update(model, anchor_id=48)
    config.optim.ema_decay = 0.0
    changes = {"eval.params": "raw", "sample.params": "raw", "eval.orders": ("own",)}
    config.update_from_flattened_dict(changes)
    config.mesh.update(data=1, fsdp=4, model=2)
    return config


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", ["llada", "dream", "qwen3", "smdm"])
def test_an_exported_model_has_the_imported_bytes(tmp_path, name, dtype, monkeypatch):
    arrays, config, workdir = imported(tmp_path, name, dtype)
    monkeypatch.setattr(export_torch, "SHARD_BYTES", 20_000)
    family = name if name in ("llada", "smdm") else "qwen"
    export_torch.export_weights(config, workdir, tmp_path / "out", family)
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 1
    found = open_tensors(tmp_path / "out")
    assert set(found) == set(arrays)
    for key, array in arrays.items():
        assert found[key].dtype == dtype and found[key].tobytes() == array.tobytes(), key


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_an_exported_mdlm_has_no_time_and_the_same_logits(tmp_path, dtype):
    arrays, config, workdir = imported(tmp_path, "mdlm", dtype)
    export_torch.export_weights(config, workdir, tmp_path / "out", "mdlm")
    found = dict(open_tensors(tmp_path / "out"))
    assert {k: v.shape for k, v in found.items()} == published.SHAPES["mdlm"]
    tokens = np.array([3, 50, 7, 50, 2, 9, 41])
    want, now = (published.forward("mdlm", w, tokens) for w in (arrays, found))
    np.testing.assert_allclose(now, want, atol=2e-5)
    import_torch.import_weights(config, tmp_path / "out", tmp_path / "again")
    first, second = (Checkpoints(w, read_only=True) for w in (workdir, tmp_path / "again"))
    for leaf in ("norm.bias", "blocks.attn_norm.scale", "blocks.down_kernel", "head_bias"):
        path = f"params.params.{leaf}"
        np.testing.assert_array_equal(first.array(0, path), second.array(0, path))


def test_a_family_without_a_place_for_a_parameter_is_refused(tmp_path):
    _, config, workdir = imported(tmp_path, "dream")
    for family in ("llada", "smdm", "mdlm"):
        with pytest.raises(CheckpointError, match=f"counterpart in {family}: blocks/") as error:
            export_torch.export_weights(config, workdir, tmp_path / "out", family)
        assert "\n" not in str(error.value)


def test_a_float_run_is_exported_in_the_type_that_is_asked_for(tmp_path):
    arrays, config, workdir = imported(tmp_path, "llada")
    bf16 = np.dtype(ml_dtypes.bfloat16)
    export_torch.export_weights(config, workdir, tmp_path / "out", "llada", bf16)
    for key, array in open_tensors(tmp_path / "out").items():
        assert array.tobytes() == arrays[key].astype(bf16).tobytes()


def test_an_average_is_exported_when_it_is_asked_for(tmp_path):
    config = settings("llada")
    for decay in (0.9, 0.0):
        config.optim.ema_decay = decay
        setup, workdir = set_up(config), tmp_path / f"{decay}"
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), setup.abstract)
        ones = jax.tree.map(jnp.ones_like, zeros.params)
        run = Checkpoints(workdir)
        state = zeros.replace(ema_params=ones if decay else None)
        run.save(3, state, checkpoint.make_meta(setup.config, "none", {}))
        run.close()
    for place, value in (("raw", 0), ("ema", 1)):
        out = tmp_path / place
        export_torch.export_weights(config, tmp_path / "0.9", out, "llada", params=place)
        found = open_tensors(out)
        assert set(found) == set(published.SHAPES["llada"])
        assert all(np.all(array == value) for array in found.values())
    with pytest.raises(ConfigError, match="0.0 keeps no average of parameters; use --params=raw"):
        export_torch.export_weights(config, workdir, tmp_path / "out", "llada", params="ema")


def refusal(tmp_path, name="llada", change=lambda arrays: arrays, changes=None, **files):
    arrays = change(published.weights(published.SHAPES[name]))
    source = written(tmp_path / "source", arrays, **files)
    with pytest.raises((CheckpointError, ConfigError)) as error:
        import_torch.import_weights(settings(name, **changes or {}), source, tmp_path / "run")
    assert "\n" not in str(error.value)
    return str(error.value)


BLOCK = "model.transformer.blocks.1."


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w | {"extra.weight": w[BLOCK + "ff_norm.weight"]}, "unknown: extra.weight"),
        (lambda w: {k: v for k, v in w.items() if k != BLOCK + "q_proj.weight"}, "missing: {}q_pr"),
        (
            lambda w: w | {BLOCK + "up_proj.weight": w[BLOCK + "up_proj.weight"].T},
            "of another shape: {}up_proj.weight (32, 48) instead of (48, 32)",
        ),
    ],
)
def test_names_and_shapes_that_do_not_fit_are_listed(tmp_path, change, words):
    assert words.format(BLOCK) in refusal(tmp_path, change=change)


def test_rotary_buffers_may_be_there(tmp_path):
    arrays = published.weights(published.SHAPES["dream"])
    arrays["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    source = written(tmp_path / "source", arrays)
    said = import_torch.import_weights(settings("dream"), source, tmp_path / "run")
    assert f"{sum(v.size for v in arrays.values()) - 4:,} parameters of qwen" in said
    with pytest.raises(ConfigError, match="holds a checkpoint already"):
        import_torch.import_weights(settings("dream"), source, tmp_path / "run")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (dict(name="dream", changes=dict(qkv_bias=False)), "unknown: model.layers.0.self_attn.q"),
        (dict(name="qwen3", changes=dict(tied_head=False)), "missing: lm_head.weight"),
        (dict(changes=dict(position="learned")), "without a counterpart in llada: positions"),
        (dict(config={"model_type": "mamba"}), "'mamba', which is unknown; known are llada"),
        (dict(config={"model_type": "LLaDA", "n_heads": 8}), "n_heads=8 (here 4)"),
        (dict(config={"mask_token_id": 7}), "mask_token_id=7 (here 49)"),
        (
            dict(
                tokenizer=dict(
                    mask_token={"content": "<m>"}, added_tokens_decoder={"5": {"content": "<m>"}}
                )
            ),
            "mask id 5 and the config 49",
        ),
        (dict(name="smdm", changes=dict(mask_id=None)), "never guessed"),
        (
            dict(name="mdlm", changes=dict(norm="rms")),
            "without a parameter of the model: backbone.blocks.0.norm1.bias",
        ),
        (
            dict(name="dream", changes=dict(shift=False), config={"model_type": "Dream"}),
            "is of dream and the config has model.shift=False; its models have True",
        ),
        (dict(changes=dict(shift=True), config={"model_type": "llada"}), "its models have False"),
        (
            dict(name="mdlm", config={"model_type": "mdlm", "time_conditioning": True}),
            "has time_conditioning=True; only models that are told of no time",
        ),
        (
            dict(
                name="smdm",
                changes=dict(mask_id=None),
                tokenizer=dict(mask_token="<m>", added_tokens_decoder=None),
            ),
            "never guessed",
        ),
        (dict(tokenizer=dict(added_tokens_decoder=["<m>"])), "is no object of ids and their"),
        (dict(tokenizer=dict(added_tokens_decoder={"5": "<m>"})), "is no object of ids and their"),
        (dict(change=lambda w: {"a.b": w["model.transformer.wte.weight"]}), "no known arch"),
        (
            dict(
                change=lambda w: (
                    w | {BLOCK + "ff_out.weight": w[BLOCK + "ff_out.weight"].astype("bfloat16")}
                )
            ),
            "of bfloat16 and float32",
        ),
    ],
)
def test_another_model_is_refused_in_one_sentence(tmp_path, given, words):
    assert words in refusal(tmp_path, **given)


@pytest.fixture
def run(tmp_path):
    """Runs a module's command for the tiny LLaDA; returns the message it exits with, or None."""
    file = tmp_path / "tiny.py"
    file.write_text(
        "from tests.tools.import_torch_test import settings\n\n\n"
        "def get_config():\n    return settings('llada')\n"
    )

    def call(module, *args):
        flags.FLAGS.unparse_flags()
        try:
            module.main(module.parse(["aodiff", f"--config={file}", *args]))
        except SystemExit as error:
            return error.code
        finally:
            for name in [f for f in flags.FLAGS if f.startswith("config.")]:
                delattr(flags.FLAGS, name)
        return None

    return call


def test_the_commands_import_export_and_say_what_is_wrong(tmp_path, run, capsys):
    arrays = published.weights(published.SHAPES["llada"])
    source = written(tmp_path / "source", arrays, config={"model_type": "llada"})
    workdir, out = tmp_path / "run", tmp_path / "out"
    assert "holds no safetensors" in run(import_torch, f"--from={tmp_path}", f"--to={workdir}")
    assert "holds no checkpoint" in run(
        export_torch, f"--from={workdir}", f"--to={out}", "--family=llada"
    )
    assert run(import_torch, f"--from={source}", f"--to={workdir}") is None
    where = [f"--from={workdir}", f"--to={out}", "--family=llada"]
    assert run(export_torch, *where, f"--like={source}") is None
    assert json.loads((out / "config.json").read_text()) == {"model_type": "llada"}
    assert "holds weights already" in run(export_torch, *where)
    assert "parameters of llada" in capsys.readouterr().out
    for key, array in open_tensors(out).items():
        np.testing.assert_array_equal(array, arrays[key])


def test_sampling_reads_the_workdir_of_an_import(tmp_path):
    arrays, config, workdir = imported(tmp_path, "smdm")
    setup = import_torch.set_up_from(config, workdir)
    step, _, params, _ = restore(setup, workdir, "raw")
    table = np.asarray(params["params"]["embedding"])
    assert step == 0 and table.shape == (128, published.D)
    np.testing.assert_array_equal(table[:51], arrays["transformer.wte.weight"])
    assert not table[51:].any()

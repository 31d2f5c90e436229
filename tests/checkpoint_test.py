"""Checkpoints: any mesh reads them, half-written ones do not count."""

import json
import shutil

import jax
import numpy as np
import optax
import pytest

from aodiff import checkpoint, partitioning, state
from aodiff import config as config_lib
from aodiff.checkpoint import CheckpointError, Checkpoints
from aodiff.config import ConfigError
from tests import toy

METHOD, TX = toy.Toy(vocab=8, seq_len=6), optax.adam(0.1)
META = {"format": 1, "window": {"loss": [0.1, 3.0]}}


def abstract_on(*sizes) -> state.TrainState:
    count = int(np.prod(sizes))
    mesh = partitioning.make_mesh(*sizes, devices=jax.devices()[:count])
    return state.abstract_state(METHOD, TX, True, mesh)


def equal(a, b) -> None:
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(workdir with checkpoints 3, 6 and 9 of a state on a 2x2x2 mesh, that state)."""
    workdir = tmp_path_factory.mktemp("run")
    s = state.init_state(METHOD, TX, True, abstract_on(2, 2, 2), 0)
    found = Checkpoints(workdir, keep_last=2, keep_every=3)
    for step in (3, 6, 9):
        found.save(step, s.replace(step=s.step + step), META)
    found.wait()
    found.close()
    return workdir, s.replace(step=s.step + 9)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (8, 1, 1), (1, 4, 2)])
def test_restores_on_another_mesh(saved, sizes):
    workdir, s = saved
    found, step = checkpoint.existing(workdir, "--workdir")
    abstract = abstract_on(*sizes)
    back = found.state(step, abstract)
    equal(s, back)
    assert back.params["mix"].sharding == abstract.params["mix"].sharding
    assert found.meta(step) == META | {"step": 9}


def test_parameters_alone(saved):
    workdir, s = saved
    found, step = checkpoint.existing(workdir, "--workdir")
    abstract = abstract_on(1, 8, 1)
    params = found.part(step, "params", abstract.params)
    equal(s.params, params)
    assert params["head"].sharding == abstract.params["head"].sharding


def test_preservation(tmp_path):
    s = state.init_state(METHOD, TX, False, no_ema(), 0)
    found = Checkpoints(tmp_path, keep_last=1, keep_every=4)
    for step in range(2, 12, 2):
        found.save(step, s, META)
    found.wait()
    assert sorted(int(p.name) for p in found.path.iterdir()) == [4, 8, 10]


def no_ema() -> state.TrainState:
    mesh = partitioning.make_mesh(1, 1, 1, devices=jax.devices()[:1])
    return state.abstract_state(METHOD, TX, False, mesh)


def test_half_written_is_not_picked_up(saved, tmp_path):
    workdir, _ = saved
    shutil.copytree(workdir, tmp_path / "run")
    path = tmp_path / "run" / "checkpoints"
    (path / "9").rename(path / "12.orbax-checkpoint-tmp")
    assert Checkpoints(tmp_path / "run", keep_last=9).latest() == 6
    (path / "15").mkdir()  # an interrupted copy: it has the name of a complete one
    with pytest.raises(CheckpointError, match="cannot read checkpoint .*/15"):
        Checkpoints(tmp_path / "run", keep_last=9).meta(15)


def test_damaged_is_one_sentence(saved, tmp_path):
    workdir, _ = saved
    shutil.copytree(workdir, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "9" / "state")
    found, step = checkpoint.existing(tmp_path / "run", "--workdir")
    with pytest.raises(CheckpointError, match=r"cannot read checkpoint .*/9 .*; delete that dir"):
        found.state(step, abstract_on(1, 1, 1))


def test_a_good_checkpoint_of_another_state_is_not_called_damaged(saved):
    found, step = checkpoint.existing(saved[0], "--workdir")
    with pytest.raises(CheckpointError, match="another model or optimizer; use the config it was"):
        found.state(step, no_ema())


def test_write_failure_is_one_sentence(tmp_path, monkeypatch):
    found = Checkpoints(tmp_path)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(found._manager, "save", full)
    with pytest.raises(CheckpointError, match="No space left on device.*; free space"):
        found.save(1, state.init_state(METHOD, TX, False, no_ema(), 0), META)


def test_meta_is_that_of_the_moment_of_the_save(tmp_path):
    """orbax writes it in another thread, while the loop goes on adding to its window."""
    s = state.init_state(METHOD, TX, False, no_ema(), 0)
    found, meta = Checkpoints(tmp_path, keep_last=9), {"window": {}}
    for step in range(1, 7):
        meta["window"]["loss"] = [1.0, 1.0]
        found.save(step, s, meta)
        meta["window"]["loss"] = [float(step), 2.0]
    found.wait()
    assert [found.meta(step)["window"]["loss"] for step in range(1, 7)] == [[1.0, 1.0]] * 6


def a_run(**changes):
    config = toy.get_config()
    config.update_from_flattened_dict(changes)
    return config_lib.finalize(config)


def stored_meta(config) -> dict:
    return json.loads(json.dumps(checkpoint.make_meta(config, "f" * 8, {})))  # tuples become lists


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"train.global_batch": 32},
        {"data.vocab": 4},
        {"model.width": 64},
    ],
)
def test_another_run_is_refused(changes, tmp_path):
    old, new = a_run(), a_run(**changes)
    key = next(iter(changes))
    with pytest.raises(ConfigError, match=f"holds a run with {key}=.* asks for {key}=.*allow_conf"):
        checkpoint.check_same_run(stored_meta(old), new, "f" * 8, tmp_path)
    allowed = a_run(**changes, **{"checkpoint.allow_config_change": True})
    found = checkpoint.check_same_run(stored_meta(old), allowed, "f" * 8, tmp_path)
    assert list(found) == [key]


def test_other_data_are_refused_and_other_lengths_listed(tmp_path):
    with pytest.raises(ConfigError, match="data fingerprint='ffffffff'"):
        checkpoint.check_same_run(stored_meta(a_run()), a_run(), "other", tmp_path)
    longer = a_run(**{"train.num_steps": 20, "data.dir": "/elsewhere"})
    found = checkpoint.check_same_run(stored_meta(a_run()), longer, "f" * 8, tmp_path)
    assert found == {"train.num_steps": (12, 20), "optim.decay_steps": (12, 20)}


def test_remat_and_attention_do_not_make_another_run(tmp_path):
    other = a_run(**{"model.remat": "full", "model.attention": "xla_dense"})
    assert checkpoint.check_same_run(stored_meta(a_run()), other, "f" * 8, tmp_path) == {}


def test_a_key_younger_than_the_run_has_its_default(tmp_path):
    old = stored_meta(a_run())
    del old["config"]["model"]["kernel_std"]
    assert checkpoint.check_same_run(old, a_run(), "f" * 8, tmp_path) == {}
    with pytest.raises(ConfigError, match="model.kernel_std=0.02, .* asks for .*=0.5"):
        checkpoint.check_same_run(old, a_run(**{"model.kernel_std": 0.5}), "f" * 8, tmp_path)


def test_a_model_may_be_used_on_other_data_of_its_shape(tmp_path):
    def check(**changes):
        new = a_run(**{"data.name": "chain", **changes})
        checkpoint.check_same_run(
            stored_meta(a_run()), new, "f" * 8, tmp_path, checkpoint.MODEL_IDENTITY
        )

    check(**{"data.law_seed": 3, "seed": 1, "train.global_batch": 32})
    for key, value in {"data.vocab": 4, "data.seq_len": 8, "data.permute_seed": 1}.items():
        with pytest.raises(ConfigError, match=key):
            check(**{key: value})


def test_start_up_precedence(saved, tmp_path):
    """Own checkpoint, then resume_from, then init_from, then fresh."""
    workdir, s = saved
    config = a_run(**{"checkpoint.resume_from": str(workdir), "checkpoint.init_from": "/nosuch"})
    other = tmp_path / "other"
    shutil.copytree(workdir, other)
    meta = checkpoint.make_meta(config, "f", {})
    for path in (workdir, other):
        for step in (path / "checkpoints").iterdir():
            (step / "meta" / "metadata").write_text(json.dumps(meta | {"step": int(step.name)}))
    abstract = abstract_on(1, 1, 1)

    def fresh():
        return state.init_state(METHOD, TX, True, abstract, 5)

    def start(path, config):
        found = Checkpoints(path, keep_last=9)
        return checkpoint.start_up(found, config, abstract, meta, fresh)

    shutil.rmtree(other / "checkpoints" / "9")
    own, stored = start(other, config)
    assert own.step == 6 and stored["step"] == 6
    resumed, stored = start(tmp_path / "new", config)
    equal(s, resumed)
    begun, stored = start(tmp_path / "new2", a_run(**{"checkpoint.init_from": str(workdir)}))
    equal(begun.params, s.params)
    equal(begun.ema_params, s.params)
    assert begun.step == 0 and stored == {}
    plain, _ = start(tmp_path / "new3", a_run())
    equal(plain, fresh())
    wider = a_run(**{"checkpoint.init_from": str(workdir), "model.width": 64})
    with pytest.raises(ConfigError, match="holds a run with model.width=128, but .*=64"):
        start(tmp_path / "new4", wider)
    with pytest.raises(ConfigError, match="resume_from='/nosuch' holds no checkpoint"):
        start(tmp_path / "new5", a_run(**{"checkpoint.resume_from": "/nosuch"}))

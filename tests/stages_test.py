"""All stages of a SAS run from one config: who begins with whom, going on, refusals, the table."""

import json
import shutil

import jax
import numpy as np
import pytest

from aodiff import checkpoint, partitioning, stages, train
from aodiff.config import ConfigError, base


def tiny(**changes):
    config = base("sas")
    config.update_from_flattened_dict(
        {
            "data.name": "sudoku4",
            "data.seq_len": 16,
            "data.clues": (12, 12),
            "data.train_rows": 64,
            "data.eval_rows": 16,
            "model.num_layers": 1,
            "model.width": 8,
            "model.num_heads": 1,
            "model.position": "grid",
            "method.policy_width": 4,
            "method.group": 2,
            "method.inner_epochs": 2,
            "stages.denoiser.steps": 3,
            "stages.denoiser.batch": 8,
            "stages.second.steps": 2,
            "stages.second.batch": 8,
            "train.global_batch": 8,
            "train.num_steps": 5,
            "checkpoint.every": 3,
            "checkpoint.keep_last": 9,
            "optim.ema_decay": 0.0,
            "eval.params": "raw",
            "eval.orders": ("own",),
            "eval.batch": 16,
            "sample.params": "raw",
            "log.every": 1,
        }
        | changes
    )
    return config


@pytest.fixture(scope="module", autouse=True)
def one_device():
    patch, make_mesh = pytest.MonkeyPatch(), partitioning.make_mesh
    patch.setattr(
        partitioning, "make_mesh", lambda **sizes: make_mesh(**sizes, devices=jax.devices()[:1])
    )
    yield
    patch.undo()


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A workdir in which all stages of `tiny` have run."""
    workdir = tmp_path_factory.mktemp("sas")
    stages.run(tiny(), workdir)
    return workdir


def last_state(config, workdir):
    setup = train.set_up(config)
    found, step = checkpoint.existing(workdir, "--workdir")
    return step, found.state(step, setup.abstract)


def equal(a, b) -> bool:
    return all(map(np.array_equal, jax.tree.leaves(a), jax.tree.leaves(b)))


def test_each_stage_begins_with_what_the_last_has_learned(done):
    found = {p.name: last_state(c, p) for p, c in stages.configs(tiny(), done).items()}
    steps = {name: step for name, (step, _) in found.items()}
    assert steps == {"denoiser": 3, done.name: 5, "second_stage": 2, "control": 2}
    denoiser, policy, second, control = (s for _, s in found.values())
    assert equal(policy.extra["denoiser"], denoiser.params)
    for other in (second, control):
        assert equal(other.extra["policy"], policy.params)
        assert not equal(other.params, denoiser.params)
    assert not equal(second.params, control.params)
    table = stages.configs(tiny(), done)
    assert stages.member(tiny(), done / "control").method.random == 1.0
    assert table[done / "second_stage"].method.random == 0.1
    rows = [json.loads((done / p / "config.json").read_text()) for p in ("second_stage", "control")]
    assert all(rows[0][key] == rows[1][key] for key in ("data", "seed", "train", "optim"))


def test_what_is_finished_is_left_alone(done, monkeypatch):
    def never(setup):
        raise AssertionError("a finished stage was compiled")

    before = {path: path.stat().st_mtime_ns for path in done.rglob("eval/*.json")}
    monkeypatch.setattr(train, "_compile", never)
    stages.run(tiny(), done)
    assert before == {path: path.stat().st_mtime_ns for path in done.rglob("eval/*.json")}
    assert len(before) == 4


def test_a_policy_resumed_between_inner_epochs_repeats_bit_for_bit(done, tmp_path):
    """Step 3 is the second of its trajectories, which the checkpoint therefore has to hold."""
    again = tmp_path / "again"
    shutil.copytree(done, again)
    shutil.rmtree(again / "checkpoints" / "5")
    shutil.rmtree(again / "eval")
    config = stages.configs(tiny(), done)[done]
    resumed = train.train(config, again)
    whole = last_state(config, done)[1]
    assert equal(whole, resumed)
    assert np.any(np.asarray(resumed.extra["rollout"]["advantage"]))


def test_a_policy_for_another_denoiser_is_refused(done, tmp_path):
    other = tmp_path / "other"
    train.train(stages.denoiser(tiny(seed=1)), other)
    with pytest.raises(ConfigError, match="for another denoiser"):
        stages.run(tiny(**{"checkpoint.init_from": str(other)}), done)
    with pytest.raises(ConfigError, match="is a run of mdm, with which sas_denoiser cannot begin"):
        config = stages.second(tiny(), done, 0.1)
        config.checkpoint.init_from = str(other)
        train.train(config, tmp_path / "second")


def test_a_second_stage_of_an_older_policy_is_refused(done, tmp_path):
    again = tmp_path / "again"
    shutil.copytree(done, again)
    with pytest.raises(ConfigError, match="second_stage holds a run for another policy"):
        stages.run(tiny(**{"train.num_steps": 6}), again)
    with pytest.raises(ConfigError, match="is for single runs"):
        stages.run(tiny(**{"checkpoint.resume_from": str(done)}), tmp_path / "new")


def test_a_policy_is_judged_on_other_puzzles_than_it_learned_from(done):
    other = {"data.clues": (14, 14), "train.global_batch": 4}
    config = stages.configs(tiny(**other), done)[done]
    step, _, params, extra = train.restore(train.set_up(config), done, "raw")
    whole = last_state(stages.configs(tiny(), done)[done], done)[1]
    assert step == 5 and set(extra) == {"denoiser"}
    assert equal(params, whole.params) and equal(extra["denoiser"], whole.extra["denoiser"])


def test_a_policy_without_a_denoiser_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="begins with a trained model"):
        train.train(tiny(), tmp_path)
    with pytest.raises(ConfigError, match="denoiser.steps=0"):
        stages.run(tiny(**{"stages.denoiser.steps": 0}), tmp_path)
    with pytest.raises(ConfigError, match="last_block, head"):
        stages.run(tiny(**{"stages.second.scope": "tail"}), tmp_path)
    assert not (tmp_path / "denoiser").exists()


def test_the_table_pairs_puzzles(tmp_path):
    solved = {
        "": {"random": [0, 0, 0, 1], "margin": [1, 0, 0, 1], "own": [1, 1, 0, 1]},
        "second_stage": {"random": [0, 0, 1, 1], "margin": [1, 1, 1, 1], "own": [1, 1, 1, 1]},
        "control": {"random": [0, 0, 1, 1], "margin": [0, 1, 1, 1], "own": [1, 1, 0, 0]},
    }
    assert stages.table(tiny(), tmp_path) == ""
    for name, outcomes in solved.items():
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "sudoku.json").write_text(json.dumps({"valid": outcomes}))
    text = stages.table(tiny(), tmp_path)
    assert "share of 4 puzzles" in text
    own = next(line for line in text.splitlines() if line.startswith("own"))
    assert own.split() == "own 75.0 +- 25.0 100.0 +- 0.0 50.0 +- 28.9".split()
    assert "policy - margin, the best other decoder: +25.0 +- 25.0" in text
    assert "second_stage - control, decoder own: +50.0 +- 28.9" in text
    assert "second_stage - control, decoder random: +0.0 +- 0.0" in text

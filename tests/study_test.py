"""Studies: which runs they are, how they go on, and their tables against numbers made by hand."""

import json
import math

import jax
import numpy as np
import pytest

from aodiff import arms, study, study_summary, summary, train
from aodiff import config as config_lib
from aodiff.config import ConfigError

ARMS = {"l2r": "native", "line": "mi_fiedler", "greedy": "greedy_entropy", "sigma": "learned"}


def make_config(**changes):
    """A study of two seeds and two permutations of a small table."""
    config = config_lib.base("ordergpt")
    config.update_from_flattened_dict(
        {
            "data.name": "wine",
            "data.seq_len": 14,
            "data.levels": 3,
            "eval.orders": ("own", "any"),
            "study.seeds": (0, 5),
            "study.permute_seeds": (1, 2),
        }
        | changes
    )
    config.compare = ARMS
    return config


def test_members_are_seeds_times_permutations():
    found = study.members(make_config())
    assert list(found) == ["seed0-perm1", "seed0-perm2", "seed5-perm1", "seed5-perm2"]
    c = found["seed5-perm2"]
    assert c.seed == 5 and c.data.permute_seed == 2 and not study.is_study(c)
    assert c.compare.to_dict() == ARMS
    assert list(study.members(make_config(**{"study.permute_seeds": ()}))) == ["seed0", "seed5"]
    follows = {"study.permute_seeds": (), "data.permute_seed": -1}
    assert list(study.members(make_config(**follows))) == ["seed0-perm0", "seed5-perm5"]
    only = study.members(make_config(**{"study.seeds": (), "seed": 3}))
    assert list(only) == ["seed3-perm1", "seed3-perm2"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"study.seeds": (0, 0)}, "must be distinct"),  # would be one run
        ({"study.seeds": (0, "a")}, "whole numbers"),
        ({"eval.orders": ("any",)}, "lacks own, by which"),
    ],
)
def test_a_bad_study_is_refused_before_its_first_run(tmp_path, changes, words):
    with pytest.raises(ConfigError, match=words):
        study.run_study(make_config(**changes), tmp_path)
    assert not any(tmp_path.iterdir())


def test_evaluation_and_sampling_take_one_run(tmp_path):
    config = make_config()
    assert study.member(config, tmp_path / "seed5-perm1", "eval").seed == 5
    with pytest.raises(ConfigError, match=f"a study of 4; name its .*={tmp_path}/seed0-perm1"):
        study.member(config, tmp_path, "sample")


class Training:
    """Stands in for `train.train`: remembers its calls and can be killed at one of them."""

    def __init__(self, root, dies_at=None):
        self.root, self.dies_at, self.calls, self.steps = root, dies_at, [], {}

    def __call__(self, config, workdir, profile=(0, 0)):
        name = str(workdir.relative_to(self.root))
        self.calls.append(name)
        self.steps[name] = config.train.num_steps
        if len(self.calls) == self.dies_at:
            raise KeyboardInterrupt
        workdir.mkdir(parents=True, exist_ok=True)
        if config.method.name == "ordergpt":
            (workdir / "order.json").write_text(json.dumps(list(range(14))))
        elif config.method.order.startswith("file("):
            order = json.loads(open(config.method.order[5:-1]).read())
            assert sorted(order) == list(range(14))


RUNS = ["seed0-perm1", "seed0-perm2", "seed5-perm1", "seed5-perm2"]
ALL = [f"{run}{arm}" for run in RUNS for arm in ("", "/greedy", "/l2r", "/line", "/sigma")]


def test_a_killed_study_goes_on_and_a_finished_one_is_left_alone(tmp_path, monkeypatch):
    config = make_config()
    training = Training(tmp_path, dies_at=8)
    monkeypatch.setattr(train, "set_up", lambda config: None)
    monkeypatch.setattr(train, "train", training)
    with pytest.raises(KeyboardInterrupt):
        study.run_study(config, tmp_path)
    assert training.calls == ALL[:8]
    monkeypatch.setattr(train, "train", training := Training(tmp_path))
    study.run_study(config, tmp_path)
    assert training.calls == ALL[5:]  # the first run was finished, the second is gone through again
    assert training.steps["seed5-perm1"] == 500
    assert {training.steps[f"seed5-perm1/{arm}"] for arm in ARMS} == {
        arms.arm(config, "native").train.num_steps
    }
    monkeypatch.setattr(train, "train", training := Training(tmp_path))
    study.run_study(config, tmp_path)
    assert not training.calls
    config.train.num_steps = 600  # what is finished is not what is asked for
    study.run_study(config, tmp_path)
    assert training.calls == ALL


def test_orders_from_data_are_found_once_and_their_cost_is_kept(tmp_path):
    config = study.members(make_config())["seed0-perm1"]
    path = study.found_order(config, tmp_path, "line", "mi_fiedler")
    assert path == tmp_path / "mi_fiedler_order.json"
    assert sorted(json.loads(path.read_text())) == list(range(14))
    study.found_order(config, tmp_path, "greedy", "greedy_entropy")
    assert set(json.loads((tmp_path / "order_seconds.json").read_text())) == {"line", "greedy"}
    path.write_text("[]")
    study.found_order(config, tmp_path, "line", "mi_fiedler")
    assert path.read_text() == "[]"
    assert study.found_order(config, tmp_path, "x", "learned") == tmp_path / "order.json"


def test_orders_from_data_do_not_depend_on_the_hidden_permutation(tmp_path):
    """The same columns of the table, in natural positions, up to the direction of the line."""
    found = []
    for name, config in study.members(make_config()).items():
        (tmp_path / name).mkdir()
        units = json.loads(
            study.found_order(config, tmp_path / name, "line", "mi_fiedler").read_text()
        )
        found.append(np.array(study_summary.natural_order(config, units)))
    assert all(np.array_equal(x, found[0]) or np.array_equal(x, found[0][::-1]) for x in found)


def write_record(workdir, split, step, own, any_order=3.0):
    """An evaluation of rows (own NLL) of two tokens each."""
    own = np.array(own)
    results = {
        "own": {"nats_per_token": own.mean() / 2, "rows": len(own), "tokens": 2 * len(own)},
        "any": {"nats_per_token": any_order},
    }
    path = workdir / "eval" / f"{split}-{step}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"split": split, "step": step, "results": results}
    path.write_text(json.dumps(record | {"row_nll": {"own": own.tolist()}}))


def write_run(workdir, own, seconds, measures=None):
    write_record(workdir, "validation", 100, own)
    goodput = {"seconds": {"step": seconds}, "step": 100}
    (workdir / "goodput.json").write_text(json.dumps(goodput))
    if measures:
        record = {"step": 100, "measures": measures}
        (workdir / "measures.json").write_text(json.dumps(record))


@pytest.fixture
def finished(tmp_path):
    """Two runs of a main run and one arm, which is 0.5 and 1.5 nats per row worse."""
    config = make_config(**{"study.permute_seeds": (1,)})
    config.compare = {"l2r": "native"}
    for name, above, quality in (("seed0-perm1", 0.5, 0.9), ("seed5-perm1", 1.5, 0.5)):
        rows = np.array([2.0, 4.0])
        write_run(tmp_path / name, rows, 10.0, {"order": {"tau": quality}})
        write_run(tmp_path / name / "l2r", rows + above + np.array([0.0, 0.2]), 8.0)
        (tmp_path / name / "order_seconds.json").write_text(json.dumps({"l2r": 0.5}))
    return config, tmp_path


def test_differences_are_paired_by_run_and_by_row(finished):
    table = study_summary.read(*finished)
    d = study_summary.difference(table, "l2r", "ordergpt")
    # Per token: runs (0.5 + 0.1) / 2 and (1.5 + 0.1) / 2; rows, averaged over runs, 0.5 and 0.6.
    assert d["mean"] == pytest.approx(0.55)
    assert d["error"] == pytest.approx(0.5 / math.sqrt(2) / math.sqrt(2))
    assert d["row_error"] == pytest.approx(0.1 / math.sqrt(2) / math.sqrt(2))
    assert table["seed0-perm1"]["l2r"].seconds == 8.5


def test_mean_and_error():
    assert study_summary.mean_and_error([1.0, math.nan, 3.0]) == (2.0, 1.0)
    assert all(map(math.isnan, study_summary.mean_and_error([])))
    mean, error = study_summary.mean_and_error([4.0])
    assert mean == 4.0 and math.isnan(error)


def test_the_summary_says_who_wins_and_leaves_json_and_a_figure(finished):
    config, workdir = finished
    for run, order in (("seed0-perm1", [0, 1, 2]), ("seed5-perm1", [13, 12, 11])):
        rest = [u for u in range(14) if u not in order]
        (workdir / run / "order.json").write_text(json.dumps(order + rest))
    text = study_summary.study_summary(config, workdir, ["COMMAND --mode=eval"])
    line = next(x for x in text.splitlines() if x.startswith("l2r"))
    assert "+0.5500 +- 0.2500" in line and "wins by 2.2 SE" in line and "100/100" in line
    assert "order/tau" in text and "0.7000 +- 0.2000" in text
    assert f"COMMAND --mode=eval --workdir={workdir}/seed0-perm1" in text
    record = json.loads((workdir / "study.json").read_text())
    assert record["differences"]["l2r"]["mean"] == pytest.approx(0.55)
    assert record["stability"]["pairs"] == 1
    assert (workdir / "study.png").stat().st_size > 5000


def test_criteria_count_runs(finished):
    config, workdir = finished
    config.criteria = {
        "order/tau": (0.8, 1.0, 0.5),
        "gain/l2r": (0.1, 9.0, 1.0),
        "nll/own": (0.0, 1.0, 0.5),
        "nll/nosuch": (0.0, 9.0, 0.0),
    }
    judged = study_summary.judge(config, study_summary.read(config, workdir))
    assert [passed for passed, _ in judged.values()] == [True, True, False, True]
    assert "passed order/tau in [0.8, 1] in 1 of 2 runs, 50% wanted: 0.9 0.5" in str(judged)
    with pytest.raises(study_summary.CriteriaError, match=r"^FAILED nll/own in \[0, 1\] in 0 of"):
        study_summary.check(config, workdir)
    config.criteria = {"order/tau": (0.8, 1.0, 0.5)}
    study_summary.check(config, workdir)


def test_stability_is_seen_in_natural_positions(tmp_path):
    """Two runs that find the same columns behind different permutations agree entirely."""
    config = make_config()
    natural = np.random.default_rng(0).permutation(14)
    for name, c in study.members(config).items():
        place = study_summary.natural_order(c, range(14))  # unit -> natural position
        (tmp_path / name).mkdir()
        units = np.argsort(place)[natural].tolist()
        (tmp_path / name / "order.json").write_text(json.dumps(units))
    orders = study_summary.learned_orders(config, tmp_path)
    assert study_summary.stability(orders) == (1.0, 4)  # seeds 0 and 5, any permutation


def test_a_run_is_reported_at_its_best_step_on_the_other_split(tmp_path):
    config = make_config(**{"eval.report_split": "test"})
    for step, validation, test in ((10, 4.0, 2.0), (20, 2.0, 6.0), (30, 3.0, 1.0)):
        write_record(tmp_path, "validation", step, [validation] * 3)
        write_record(tmp_path, "test", step, [test] * 3)
    record = summary.chosen_record(tmp_path, config)
    assert (record["split"], record["step"]) == ("test", 20)  # not the best step of the test split
    assert record["results"]["own"]["nats_per_token"] == 3.0
    config.eval.report_split = None
    assert summary.chosen_record(tmp_path, config)["step"] == 30


CONFIG = """
import importlib.util
spec = importlib.util.spec_from_file_location("ordergpt", "{root}/configs/ordergpt.py")
ordergpt = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ordergpt)


def get_config(preset=""):
    config = ordergpt.get_config("smoke")
    config.update_from_flattened_dict({{
        "study.seeds": (4,), "train.num_steps": 12, "data.eval_rows": 64,
        "method.refresh_every": 2, "method.student_steps": 1,
        "eval.every": 6, "eval.orders": ("own",), "eval.report_split": "test",
        "eval.measures": ("order",),
        "criteria.gain/line": (-9.0, 9.0, 1.0), "criteria.nll/own": (0.0, 0.1, 1.0),
    }})
    config.compare = {{"line": "mi_fiedler"}}
    return config
"""


def test_the_command_runs_a_study_and_says_what_failed(command, tmp_path, request, monkeypatch):
    from aodiff import partitioning

    make_mesh = partitioning.make_mesh  # one device, which a user's CPU is
    monkeypatch.setattr(
        partitioning, "make_mesh", lambda **sizes: make_mesh(**sizes, devices=jax.devices()[:1])
    )
    (tmp_path / "config.py").write_text(CONFIG.format(root=request.config.rootpath))
    workdir = tmp_path / "study"
    ask = "--config=config.py", f"--workdir={workdir}"
    found = command(*ask)
    assert found.startswith("FAILED nll/own in [0, 0.1] in 0 of 1 runs")
    record = json.loads((workdir / "study.json").read_text())
    assert record["criteria"] == {"gain/line": True, "nll/own": False}
    assert record["split"] == "test" and set(record["runs"]) == {"seed4-perm10"}
    assert record["means"]["line"]["steps"][0] > record["means"]["ordergpt"]["steps"][0] == 12
    for step in (6, 12):
        for split in ("validation", "test"):
            assert (workdir / "seed4-perm10" / "line" / "eval" / f"{split}-{step}.json").exists()

    monkeypatch.setattr(train, "train", None)  # nothing is trained again
    assert command(*ask) == found
    assert "name its directory" in command(*ask, "--mode=eval")

    run = workdir / "seed4-perm10"
    path = run / "eval" / "validation-6.json"
    earlier = json.loads(path.read_text())
    earlier["results"]["own"]["nats_per_token"] = 0.0  # the best step is now the earlier one
    path.write_text(json.dumps(earlier))
    assert command(ask[0], f"--workdir={run}", "--mode=eval") is None
    measured = json.loads((run / "measures.json").read_text())
    assert measured["step"] == 6 and measured["split"] == "test"  # not where the step was chosen

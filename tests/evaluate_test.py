"""Evaluation: every row once, ratio of totals, standard errors, the comparison table."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aodiff import config as config_lib
from aodiff import partitioning
from aodiff.data import DataInfo, Stats
from aodiff.data.sources import ArraySource
from aodiff.evaluate import evaluate, make_scorers, record_path
from aodiff.methods.base import Evaluation, Scores
from aodiff.metrics import Mean
from aodiff.summary import comparison_table

ROWS, N = 21, 4  # 21 rows in batches of 8: the last batch is mostly padding
TOKENS = np.random.default_rng(0).integers(0, 9, (ROWS, N))
LENGTHS = np.random.default_rng(1).integers(1, N + 1, ROWS)
COST = np.where(np.arange(N) < LENGTHS[:, None], TOKENS + 0.5, 0.0)


class Table:
    """A 'model' whose NLL of a token is its id plus a half; noise only in the second evaluation."""

    def evaluations(self, config):
        def fn(params, batch, key, extra):
            cost = jnp.where(batch["loss_mask"], batch["tokens"] + 0.5, 0.0)
            curve = Mean(jnp.sum(cost, axis=0), jnp.sum(batch["loss_mask"], axis=0) + 0.0)
            return Scores(
                cost.sum(axis=1), batch["loss_mask"].sum(axis=1) + 0.0, {"by_step": curve}
            )

        def noisy(params, batch, key, extra):
            scores = fn(params, batch, key, extra)
            noise = jax.vmap(lambda i: jax.random.uniform(jax.random.fold_in(key, i)))
            return scores.replace(nll=scores.nll + noise(batch["example_id"]))

        return {"own": Evaluation(fn, "exact"), "noisy": Evaluation(noisy, "upper bound")}


@pytest.fixture(scope="module")
def source():
    stats = Stats(rows=ROWS, tokens=int(LENGTHS.sum()), bytes=100, documents=3)
    return ArraySource({"tokens": TOKENS, "length": LENGTHS}, stats)


def score(source, workdir, devices, batch, method=None, trained_on="table", **changes):
    config = config_lib.base()
    config.eval.batch, config.data.name = batch, "table"
    config.update_from_flattened_dict(changes)
    mesh = partitioning.make_mesh(1, -1, 1, jax.devices()[:devices])
    info = DataInfo("table", N, 9, "symbol")
    scorers = make_scorers(method or Table(), config, mesh)
    path = record_path(workdir, config, 5, trained_on)
    first = evaluate(scorers, {}, {}, source, info, config, mesh, step=5, path=path)
    again = evaluate(scorers, {}, {}, source, info, config, mesh, step=5, path=path)
    assert first == again
    return first


def test_every_row_counts_once_whatever_the_batch_and_the_mesh(source, tmp_path):
    one = score(source, tmp_path / "a", 1, 8)
    eight = score(source, tmp_path / "b", 8, 16)
    nll, count = COST.sum(axis=1), LENGTHS.astype(float)
    mean = nll.sum() / count.sum()
    own = one["own"]
    assert own["tokens"] == LENGTHS.sum() and own["rows"] == ROWS
    np.testing.assert_allclose(own["nats_per_token"], mean, rtol=1e-6)
    np.testing.assert_allclose(own["bits_per_byte"], nll.sum() / math.log(2) / 100, rtol=1e-6)
    jackknife = [(nll.sum() - nll[i]) / (count.sum() - count[i]) for i in range(ROWS)]
    se = math.sqrt((ROWS - 1) / ROWS * np.sum((jackknife - np.mean(jackknife)) ** 2))
    np.testing.assert_allclose(own["nats_per_token_se"], se, rtol=0.05)
    np.testing.assert_allclose(
        own["curves"]["by_step"], COST.sum(axis=0) / (COST > 0).sum(axis=0), rtol=1e-6
    )
    for name in one:
        np.testing.assert_allclose(
            one[name]["nats_per_token"], eight[name]["nats_per_token"], rtol=1e-6
        )


def test_an_estimator_may_score_a_part_of_the_tokens_and_none_of_a_row(source, tmp_path):
    """Bits per byte then stand for all tokens, and rows without a score still count as rows."""

    class FirstTokenOfEvenRows(Table):
        def evaluations(self, config):
            def fn(params, batch, key, extra):
                scored = (batch["example_id"] % 2 == 0) & batch["loss_mask"][:, 0]
                return Scores(jnp.where(scored, batch["tokens"][:, 0] + 0.5, 0.0), scored + 0.0, {})

            return {"own": Evaluation(fn, "upper bound")}

    own = score(source, tmp_path, 1, 8, FirstTokenOfEvenRows())["own"]
    mean = (TOKENS[::2, 0] + 0.5).mean()
    assert own["rows"] == ROWS and own["tokens"] == (ROWS + 1) // 2
    np.testing.assert_allclose(own["nats_per_token"], mean, rtol=1e-6)
    bits = mean * LENGTHS.sum() / math.log(2) / 100
    np.testing.assert_allclose(own["bits_per_byte"], bits, rtol=1e-6)


def test_the_record_names_its_data_and_keeps_every_row(source, tmp_path):
    score(source, tmp_path, 1, 8)
    record = json.loads((tmp_path / "eval" / "validation-5.json").read_text())
    assert record["fingerprint"] == source.fingerprint and record["step"] == 5
    np.testing.assert_allclose(record["row_nll"]["own"], COST.sum(axis=1))
    assert record["results"]["own"]["estimator"] == "exact"
    assert record["results"]["own"]["params"] == "ema"


class OnlyNoisy(Table):
    """Counts how often it is traced."""

    traces = 0

    def evaluations(self, config):
        noisy = super().evaluations(config)["noisy"]

        def counted(*args):
            self.traces += 1
            return noisy.fn(*args)

        return {"noisy": Evaluation(counted, "upper bound of another kind")}


def test_a_scorer_is_traced_once(source, tmp_path):
    method = OnlyNoisy()
    score(source, tmp_path, 1, 8, method)  # two evaluations of three batches
    assert method.traces == 1


def test_evaluating_again_adds_to_the_record(source, tmp_path):
    """The training's own results stay; another seed or other parameters make another record."""
    path = tmp_path / "eval" / "validation-5.json"
    whole = score(source, tmp_path, 1, 8)
    score(source, tmp_path, 1, 8, OnlyNoisy())
    record = json.loads(path.read_text())
    assert record["results"]["own"] == whole["own"] and set(record["row_nll"]) == {"own", "noisy"}
    assert record["results"]["noisy"]["estimator"] == "upper bound of another kind"
    for change in ({"seed": 1}, {"eval.params": "raw"}):
        score(source, tmp_path, 1, 8)
        score(source, tmp_path, 1, 8, OnlyNoisy(), **change)
        assert set(json.loads(path.read_text())["results"]) == {"noisy"}


def test_other_data_have_a_record_of_their_own(source, tmp_path):
    score(source, tmp_path, 1, 8, trained_on="markov")
    assert {p.name for p in (tmp_path / "eval").iterdir()} == {
        "table-validation-5.json",
        "table-validation-5.png",
    }


def test_comparison_pairs_the_rows_of_two_runs(tmp_path):
    rows = np.array([1.0, 2.0, 4.0, 9.0])
    for name, shift in {"first": 0.0, "second": 2.0}.items():
        own = {"nats_per_token": (rows + shift).mean() / 2, "nats_per_token_se": 0.5, "rows": 4}
        own |= {"tokens": 8, "estimator": "exact"}
        path = tmp_path / name / "eval" / "validation-10.json"
        path.parent.mkdir(parents=True)
        path.write_text(
            json.dumps({"results": {"own": own}, "row_nll": {"own": list(rows + shift)}})
        )
    table = comparison_table({n: tmp_path / n for n in ("first", "second")}, config_lib.base())
    assert "+1.0000 +- 0.0000" in table.splitlines()[2]  # a constant shift has no error
    assert "2.0000 +- 0.5000" in table.splitlines()[1]
    own["tokens"] = 16  # on a canvas: per row then
    path.write_text(json.dumps({"results": {"own": own}, "row_nll": {"own": list(rows + shift)}}))
    table = comparison_table({n: tmp_path / n for n in ("first", "second")}, config_lib.base())
    assert "nats/row" in table and "+2.0000 +- 0.0000" in table.splitlines()[2]
    assert "4.0000 +- 1.7795" in table.splitlines()[1]
    path.write_text(json.dumps({"results": {}, "row_nll": {}}))  # a run evaluated otherwise
    table = comparison_table({n: tmp_path / n for n in ("first", "second")}, config_lib.base())
    assert table.splitlines()[2].split() == ["second", "-", "-", "-"]

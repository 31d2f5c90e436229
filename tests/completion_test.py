"""Completions of given rows follow the model's own conditionals, and what is given stays."""

import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from aodiff import config as config_lib
from aodiff import data, given_rows, methods, partitioning, rng
from aodiff.data import DataError
from aodiff.generate import draw_rows

V, N, NUM = 3, 3, 3000
ALL = np.array(list(itertools.product(range(V), repeat=N)))
ORDER = (2, 0, 1)  # natural positions


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model with hidden positions that knows nothing but has strong opinions."""
    c = config_lib.base("aogpt")
    c.data.update(dict(name="markov", seq_len=N, vocab=V, permute_seed=3))
    c.model.update(dict(num_layers=2, width=16, num_heads=2, injection="input", kernel_std=0.5))
    c.sample.update(dict(batch=1000, order="own"))
    info = data.describe(c.data)
    assert info.permutation is not None and info.permutation != tuple(range(N))
    hidden = [info.permutation.index(p) for p in ORDER]
    path = tmp_path_factory.mktemp("order") / "order.json"
    path.write_text(json.dumps(hidden))
    c.method.order = f"file({path})"
    method = methods.build(c, info)
    params = partitioning.unbox(jax.jit(lambda: method.init(rng.stream(1, rng.INIT)))())
    return method, params, info, c


@functools.partial(jax.jit, static_argnums=0)
def apply(module, params, tokens, order):
    return module.apply(params, tokens, order)


def joint(model, order):
    """Probability of every row of `ALL` under natural `order`, by the full forward pass."""
    method, params, info, _ = model
    unit = np.array([info.permutation.index(p) for p in order], np.int32)
    tokens = info.hidden(ALL.astype(np.int32))
    logits = apply(method.model, params, tokens, jnp.tile(unit[None], (len(ALL), 1)))
    logp = np.asarray(jax.nn.log_softmax(logits), np.float64)
    picked = [logp[np.arange(len(ALL)), s, tokens[:, u]] for s, u in enumerate(unit)]
    return np.exp(np.sum(picked, axis=0))


def conditional(probabilities, place, value):
    """Of the rows of `ALL` with `value` at natural `place`, by Bayes."""
    kept = np.where(ALL[:, place] == value, probabilities, 0)
    return kept / kept.sum()


def pvalue(rows, probabilities):
    counts = np.bincount(rows @ V ** np.arange(N)[::-1], minlength=len(ALL))
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    return stats.chisquare(counts[possible], len(rows) * probabilities[possible]).pvalue


def completions(model, place, value, num=NUM):
    method, params, info, config = model
    tokens, given = np.full((num, N), 2), np.zeros((num, N), bool)
    tokens[:, place], given[:, place] = value, True
    mesh = partitioning.make_mesh(1, -1, 1, jax.devices()[:1])
    return draw_rows(method, params, {}, info, config, mesh, tokens, given)


def test_the_model_is_a_distribution_that_depends_on_the_order(model):
    for order in itertools.permutations(range(N)):
        assert joint(model, order).sum() == pytest.approx(1, abs=1e-5)
    assert np.abs(joint(model, ORDER) - joint(model, (0, 2, 1))).sum() > 0.05


def test_given_positions_that_come_first_are_completed_by_the_exact_conditional(model):
    out = completions(model, place=2, value=1)
    np.testing.assert_array_equal(np.unique(out.step, axis=0), [[0, 1, -1]])
    assert pvalue(out.tokens, conditional(joint(model, ORDER), 2, 1)) > 0.01


def test_other_given_positions_are_completed_as_the_order_with_them_in_front(model):
    """0 is given, so 2 and 1 follow: p(x2 | x0) p(x1 | x0, x2), not what Bayes makes of ORDER."""
    out = completions(model, place=0, value=2)
    np.testing.assert_array_equal(np.unique(out.step, axis=0), [[-1, 1, 0]])
    assert pvalue(out.tokens, conditional(joint(model, (0, 2, 1)), 0, 2)) > 0.01
    assert pvalue(out.tokens, conditional(joint(model, ORDER), 0, 2)) < 1e-6
    assert pvalue(out.tokens, conditional(joint(model, (0, 1, 2)), 0, 2)) < 1e-6


# ---- reading and repeating what is given


@pytest.fixture(scope="module")
def iris():
    c = config_lib.base("aogpt").data
    c.update(dict(name="iris", seq_len=5, levels=4, permute_seed=2))
    return data.describe(c)


def test_rows_are_read_by_name_and_by_position(iris, tmp_path):
    path = tmp_path / "rows.jsonl"
    names = list(iris.codec.names)
    path.write_text(f'{{"{names[1]}": 3.3, "label": 2}}\n\n[5.1, null, null, null, null]\n')
    rows = given_rows.read(path, iris)
    np.testing.assert_array_equal(rows.given, [[0, 1, 0, 0, 1], [1, 0, 0, 0, 0]])
    wanted, _ = iris.codec.encode(np.array([[5.1, 3.3, 0, 0, 2]]))
    assert rows.tokens[0, [1, 4]].tolist() == wanted[0, [1, 4]].tolist()
    assert rows.tokens[1, 0] == wanted[0, 0]
    for row in rows.values:  # given values come back as they came, the others from the codec
        values = given_rows.content(np.array([0, 1, 2, 3, 1]), 5, row, iris)["values"]
        cells = row if isinstance(row, dict) else dict(zip(names, row, strict=True))
        decoded = iris.codec.values(np.array([0, 1, 2, 3, 1]))
        assert values == decoded | {k: v for k, v in cells.items() if v is not None}


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("[1, null, null, null]\n", "line 1: .*give 5"),
        ('{"label": 1}\n{"height": 3}\n', "line 2: 'height' is"),
        ('{"label": 1}\n\n{"label": "rose"}\n', "line 3: .*'rose'"),
        ('{"label": 1}\nlabel 1\n', "line 2 is no JSON"),
        ("3\n", "line 1: 3 is no row; write a list"),
        ("\n", "is empty"),
        (None, "is no file"),
    ],
)
def test_bad_rows_are_one_sentence_with_the_line(iris, tmp_path, lines, words):
    path = tmp_path / "rows.jsonl"
    if lines is not None:
        path.write_text(lines)
    with pytest.raises(DataError, match=words) as e:
        given_rows.read(path, iris)
    assert "\n" not in str(e.value)


def test_rows_without_a_codec_are_ids(model):
    info = model[2]
    ids, given = given_rows.parse([None, 2, 0], info)
    assert ids.tolist() == [0, 2, 0] and given.tolist() == [False, True, True]
    for row, words in {
        (None, 3, 0): "3 at position 1 is no id; use 0 to 2",
        (None, 1.5, 0): "1.5 at position 1",
        (None, True, 0): "True at position 1",
        (0, 1): "2 entries; give 3",
    }.items():
        with pytest.raises(DataError, match=words):
            given_rows.parse(list(row), info)
    with pytest.raises(DataError, match="write a list with null"):
        given_rows.parse({"a": 1}, info)


# ---- the command


def test_measures_and_completions_by_command(command, tmp_path):
    """Trains a few steps on a table, measures it twice alike, and completes rows of it."""
    root = tmp_path / "configs"
    root.mkdir()
    (root / "tiny.py").write_text(
        "from aodiff import config\n"
        "def get_config():\n"
        "    c = config.base('aogpt')\n"
        "    c.data.update(dict(name='iris', seq_len=5, levels=4, permute_seed=1))\n"
        "    c.model.update(dict(num_layers=1, width=8, num_heads=2, injection='input'))\n"
        "    c.train.update(dict(num_steps=3, global_batch=16))\n"
        "    c.optim.ema_decay = 0.5\n"
        "    c.eval.update(dict(orders=('own',), measures=('table',), samples=20, num_orders=1))\n"
        "    c.sample.update(dict(num=3))\n"
        "    return c\n"
    )
    tiny, workdir = f"--config={root}/tiny.py", tmp_path / "run"
    assert command(tiny, f"--workdir={workdir}") is None
    path = workdir / "measures.json"
    record, when = json.loads(path.read_text()), path.stat().st_mtime_ns
    assert record["step"] == 3 and record["measures"]["table"]["nats_per_row"] > 0
    logged = (workdir / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(logged)["measure/table/tstr"] == record["measures"]["table"]["tstr"]

    assert command(tiny, f"--workdir={workdir}") is None  # finished: nothing is measured again
    assert path.stat().st_mtime_ns == when
    path.unlink()
    assert command(tiny, f"--workdir={workdir}", "--mode=eval") is None
    assert json.loads(path.read_text()) == record

    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"label": 1, "sepal length (cm)": 5.83}\n[null, null, null, null, null]\n')
    sample = (tiny, f"--workdir={workdir}", "--mode=sample", f"--config.sample.given={rows}")
    assert command(*sample) is None
    found = [json.loads(x) for x in (workdir / "samples" / "3.jsonl").read_text().splitlines()]
    assert [r["row"] for r in found] == [0, 0, 0, 1, 1, 1]
    for row in found[:3]:
        assert row["values"]["label"] == 1 and row["values"]["sepal length (cm)"] == 5.83
        assert row["given"] == [0, 4] == [i for i, s in enumerate(row["step"]) if s == -1]
    assert sorted(found[5]["step"]) == [0, 1, 2, 3, 4] and found[5]["given"] == []
    assert (workdir / "samples" / "3.png").exists()

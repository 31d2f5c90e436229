"""Tools that ask trained runs: answers to programming problems, and generative perplexity."""

import dataclasses
import itertools
import json
import math

import jax
import numpy as np
import pytest

from aodiff import checkpoint, train
from aodiff import config as config_lib
from aodiff.config import ConfigError, base
from aodiff.data import DataError
from aodiff.evals.problems import Problem
from aodiff.tools import code, code_samples, perplexity
from aodiff.tools.code_samples import Ask
from aodiff.tools.runs import open_run

LENGTH = 24


def started(folder, method: str, **changes):
    """The workdir of a run on bytes, as it begins."""
    config = base(method)
    config.data.seq_len, config.train.global_batch, config.sample.batch = LENGTH, 8, 8
    config.model.update(num_layers=1, width=16, num_heads=2)
    config.eval.update(batch=8, orders=("own",))
    config.update_from_flattened_dict(changes)
    setup = train.set_up(config)
    state = train._fresh(setup)
    saved = checkpoint.Checkpoints(folder / method)
    saved.save(1, state, checkpoint.make_meta(setup.config, "", {}))
    saved.wait()
    saved.close()
    (folder / method / "config.json").write_text(config_lib.to_json(setup.config))
    return folder / method


@pytest.fixture(scope="module")
def flex(tmp_path_factory):
    return started(tmp_path_factory.mktemp("runs"), "flexmdm", **{"sample.steps": 8})


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    return started(
        tmp_path_factory.mktemp("runs"), "aogpt", **{"method.order": "l2r", "sample.order": "own"}
    )


ROWS = [
    {
        "task_id": f"T/{i}",
        "prompt": f"def f{i}(x):\n",
        "entry_point": f"f{i}",
        "canonical_solution": f"    return x + {i}\n",
        "test": f"def check(f):\n    assert f(2) == {2 + i}\n",
    }
    for i in range(3)
]
GAPS = [row | {"suffix": "\n    return y\n"} for row in ROWS]


@pytest.fixture
def folder(tmp_path):
    """A folder of data with three problems, and three with gaps."""
    for task, rows in (("humaneval", ROWS), ("infilling_light", GAPS)):
        path = tmp_path / "code" / code.FILES[task].removesuffix(".gz")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.fixture(autouse=True)
def plain_files(monkeypatch):
    names = {task: name.removesuffix(".gz") for task, name in code.FILES.items()}
    monkeypatch.setattr(code, "FILES", names)


def command(workdir, folder, *more: str) -> list[str]:
    return [f"--run={workdir}", f"--data={folder}", *more]


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# Which of four samples of each problem are right, strictly and if read in another way.
RIGHT = {"T/0": ("1100", "1110"), "T/1": ("0000", "0001"), "T/2": ("1111", "1111")}


def fake(asks):
    """Answers that are right where RIGHT says so; a strict reading leaves out calls at the end."""
    texts = []
    for ask in asks:
        strict, lenient = (way[ask.sample] == "1" for way in RIGHT[ask.id])
        call = f"    return x + y\nexec('y = {ask.number}')\n"
        wrong = call if lenient else "    return None\n"
        texts.append(ROWS[ask.number]["canonical_solution"] if strict else wrong)
    return texts


def by_enumeration(which: int, k: int) -> tuple[float, float]:
    """Mean and standard error of the share of subsets of k samples with a right one."""
    values = []
    for ways in RIGHT.values():
        subsets = list(itertools.combinations(ways[which], k))
        values.append(sum("1" in subset for subset in subsets) / len(subsets))
    return float(np.mean(values)), float(np.std(values, ddof=1) / math.sqrt(len(values)))


def test_pass_at_k_of_known_answers(reader, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(code_samples, "drawing", lambda run, where: fake)
    options = ("--n=4", "--k=1,2,4", "--allow_code_execution", f"--run={reader}")
    code.main(command(reader, folder, *options))
    out = capsys.readouterr().out
    found = json.loads((reader / "code" / "humaneval-1-results.json").read_text())
    for which, name in enumerate(("strict", "any")):
        for k in (1, 2, 4):
            assert found[name][f"pass@{k}"] == pytest.approx(by_enumeration(which, k)), (name, k)
    assert (found["n"], found["problems"], found["prompts_cut"]) == (4, 3, 0)
    assert "accuracy 50.00 +- 28.87" in out and "pass@4 66.67 +- 33.33" in out
    assert "pass@4 100.00 +- 0.00 % (standard error) if any of 4 readings" in out
    (reader / "code" / "humaneval-1.jsonl").unlink()


def test_an_interrupted_generation_goes_on_with_the_same_samples(flex, folder, tmp_path):
    _, among = code.read("humaneval", folder)
    asks = code.asked(among, among, 6)

    run = open_run(flex, "--run")
    draw = code_samples.drawing(run, code_samples.places(run, among, 0))
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    texts = code_samples.generate(draw, asks, whole, {"a": (1,)}, 8)
    assert len(texts) == 18 and len(set(texts)) > 3
    calls = []

    def stops(some):
        calls.append(some)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return draw(some)

    with pytest.raises(KeyboardInterrupt):
        code_samples.generate(stops, asks, cut, {"a": (1,)}, 5)
    cut.write_text(cut.read_text() + '{"id": "T/2", "sam')
    drawn = []
    again = lambda some: drawn.extend(some) or draw(some)
    assert code_samples.generate(again, asks, cut, {"a": (1,)}, 7) == texts
    assert drawn == asks[5:] and cut.read_text() == whole.read_text()
    more = [*asks, Ask(0, "T/0", 6)]  # of more samples, only the new ones are drawn
    drawn.clear()
    assert code_samples.generate(again, more, cut, {"a": (1,)}, 8)[:18] == texts
    assert drawn == more[18:]
    with pytest.raises(DataError, match="cut.jsonl holds answers drawn with another a, b; move"):
        code_samples.generate(again, asks, cut, {"a": (2,), "b": 1}, 8)


@pytest.mark.parametrize("line", ["[]", "5", "answers", '{"settings": []}', '{"id": "T/0"}'])
def test_a_file_of_something_else_is_refused(tmp_path, line):
    (tmp_path / "other.jsonl").write_text(f"{line}\n")
    with pytest.raises(DataError, match="other.jsonl holds "):
        code_samples.generate(None, [], tmp_path / "other.jsonl", {"a": 1}, 8)


def test_further_tests_are_of_humaneval_alone(folder):
    (folder / "code" / "mbpp").mkdir()
    (folder / "code" / code.FILES["mbpp"]).write_text("")
    with pytest.raises(DataError, match="has tests of HumanEval, and --task=mbpp; drop it"):
        code.read("mbpp", folder, folder / "more.jsonl")


def test_a_run_that_grows_fills_gaps_and_is_judged(flex, folder, capsys):
    options = ("--task=infilling_light", "--n=2", "--ids=1-2")
    code.main(command(flex, folder, *options))
    assert "add --allow_code_execution" in capsys.readouterr().out
    path = flex / "code" / "infilling_light-1.jsonl"
    before = path.read_text()
    code.main(command(flex, folder, *options, "--allow_code_execution"))
    out = capsys.readouterr().out
    assert "2 of 2 problems, 4 answers" in out and "accuracy 0.00" in out
    assert path.read_text() == before
    assert [(r["id"], r["sample"]) for r in lines(path)[1:]] == [
        *(("T/1", 0), ("T/2", 0), ("T/1", 1), ("T/2", 1))
    ]
    assert "2 prompts cut" in out


def test_a_run_of_one_length_answers_prompts_and_fills_no_gap(reader, folder, capsys):
    code.main(command(reader, folder, "--sample=temperature=0.5", "--allow_code_execution"))
    assert "accuracy 0.00" in capsys.readouterr().out
    found = json.loads((reader / "code" / "humaneval-1-results.json").read_text())
    assert found["sample.temperature"] == 0.5 and found["step"] == 1
    with pytest.raises(SystemExit, match="fills no gap of unknown length, as infilling asks"):
        code.main(command(reader, folder, "--task=infilling_light"))


def test_prompts_lose_what_is_farthest_from_the_answer(reader):
    info = open_run(reader, "--run").setup.info

    def placed(plain, suffix, room):
        problem = Problem("", "", plain, "", "", suffix)
        p = code_samples.place(problem, info, room)
        text = lambda where: info.tokenizer.decode(p.tokens[where])
        assert p.given.sum() == p.before + p.after <= LENGTH - room
        return text(slice(0, p.before)), text(slice(LENGTH - p.after, LENGTH)), p.cut

    assert placed("abc", "", 12) == ("abc", "", False)
    assert placed("abcdefghijklmnop", "", 12) == ("efghijklmnop", "", True)
    assert placed("abcdefghijklmnop", "xyz", 12) == ("hijklmnop", "xyz", True)
    assert placed("abcdefghij", "qrstuvwxyz", 12) == ("efghij", "qrstuv", True)
    assert placed("abc", "qrstuvwxyz", 12) == ("abc", "qrstuvwxy", True)


def test_what_was_written_is_between_the_given_ends(reader):
    info = open_run(reader, "--run").setup.info
    rows = np.zeros((2, LENGTH), np.int32)
    for row, text in zip(rows, (b"ab12345yz", b"abc1"), strict=True):
        row[: len(text)] = list(text)
    rows[1, 4:] = info.tokenizer.eos
    out = code_samples.Samples(rows, np.array([9, LENGTH]), rows)
    where = [
        code_samples.Place(None, None, before, after, False) for before, after in ((2, 2), (3, 0))
    ]
    assert code_samples.answers(where, out, info) == ["12345", "1"]
    rows[0, 4] = info.tokenizer.eos  # an answer that ends before what is given after it
    assert code_samples.answers(where, out, info) == ["12", "1"]


BAD = [
    (["--n=2", "--k=3"], "--k=.3. and --n=2 do not fit"),
    (["--n=0"], "do not fit"),
    (["--room=24"], "--room=24 leaves no prompt in rows of 24"),
    (["--sample=heat=1"], "--sample=heat=1 is not key=value"),
    (["--sample=temperature=hot"], "=hot is a str, and temperature is a float, now 1.0; give one"),
    (["--sample=buckets=3"], "is a int, and buckets is a"),
    (["--task=mbpp"], "mbpp.jsonl is not there"),
    (["--run=nowhere"], "--run='nowhere' holds no checkpoint"),
]


@pytest.mark.parametrize(("options", "says"), BAD)
def test_bad_options_are_one_sentence(reader, folder, options, says):
    with pytest.raises(SystemExit, match=says) as ended:
        code.main(command(reader, folder, *options))
    assert "\n" not in ended.value.code


def test_the_references_of_all_sets(folder, monkeypatch, capsys):
    monkeypatch.setattr(
        code, "FILES", {task: code.FILES[task] for task in ("humaneval", "infilling_light")}
    )
    path = folder / "code" / code.FILES["infilling_light"]
    wrong = GAPS[1] | {"test": "def check(f):\n    assert f(2) == 4\n"}
    path.write_text("".join(json.dumps(row) + "\n" for row in (GAPS[0], wrong)))
    with pytest.raises(SystemExit, match="1 of 2 references .*Light.jsonl fail, first T/1"):
        code.main(["--references", f"--data={folder}"])
    assert capsys.readouterr().out == "humaneval/HumanEval.jsonl: 3/3\n"


# ---- generative perplexity -----------------------------------------------------------------------


def test_a_uniform_scorer_finds_the_size_of_the_vocabulary(reader):
    run = open_run(reader, "--scorer")
    uniform = dataclasses.replace(run, params=jax.tree.map(np.zeros_like, run.params))
    rows = [np.arange(1, 1 + n, dtype=np.int32) for n in (1, 4, 0, LENGTH, 2, 8)]
    found = perplexity.perplexity(uniform, rows)
    assert found.per_sample == pytest.approx((257, 0), rel=1e-4, abs=0.02)
    assert found.corpus == pytest.approx(257, rel=1e-4)
    assert found.entropy_bits[0] == pytest.approx(np.log2([1, 4, LENGTH, 2, 8]).mean())
    assert (found.samples, found.empty, found.tokens) == (6, 1, 1 + 4 + LENGTH + 2 + 8)
    with pytest.raises(DataError, match="all 1 samples are empty"):
        perplexity.perplexity(uniform, rows[2:3])


def test_means_over_samples_and_tokens_differ(reader, monkeypatch):
    monkeypatch.setattr(perplexity, "score", lambda run, rows: np.array([np.log(8), 3 * np.log(2)]))
    found = perplexity.perplexity(None, [np.array([1]), np.array([1, 1, 2])])
    assert found.per_sample == pytest.approx((5, 3)) and found.corpus == pytest.approx(
        64 ** (1 / 4)
    )
    assert found.entropy_bits[0] == pytest.approx((0 + np.log2(3) - 2 / 3) / 2)
    assert len(str(found).splitlines()) == 4


def test_nats_of_a_row_do_not_depend_on_the_others(reader):
    run = open_run(reader, "--scorer")
    rows = [np.random.default_rng(n).integers(0, 256, n) for n in (3, 9, LENGTH, 5, 7, 1)]
    together = perplexity.score(run, rows)
    np.testing.assert_allclose(together[::-1], perplexity.score(run, rows[::-1]), rtol=1e-5)
    longer = np.concatenate([rows[0], [1]])
    assert perplexity.score(run, [longer])[0] > together[0] > 0


def samples(workdir, rows) -> str:
    path = workdir / "samples" / "1.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"--samples={path}"


def test_samples_of_a_run_are_read_to_their_end(flex, reader, capsys):
    rows = [{"tokens": [1, 2, 3, 0], "length": 3}, {"tokens": [7, 256, 7]}, {"tokens": [256]}]
    perplexity.main([samples(flex, rows), f"--scorer={reader}"])
    assert "3 samples, 4 tokens, 1 samples empty" in capsys.readouterr().out


def test_scorers_that_do_not_fit_are_refused(flex, reader, tmp_path):
    good = samples(flex, [{"tokens": [1] * LENGTH}])

    def says(*options):
        with pytest.raises(SystemExit) as ended:
            perplexity.main(options)
        assert "\n" not in ended.value.code
        return ended.value.code

    assert "a run of flexmdm of order any; name one of aogpt" in says(good, f"--scorer={flex}")
    assert "has no 'tokens'" in says(samples(flex, [{"text": ""}]), f"--scorer={reader}")
    long = samples(flex, [{"tokens": [1] * (LENGTH + 1)}])
    assert "a sample has 25 tokens" in says(long, f"--scorer={reader}")
    (tmp_path / "run").mkdir()
    other = samples(tmp_path / "run", [{"tokens": [1]}])
    assert "lies in the folder of no run" in says(other, f"--scorer={reader}")
    config = json.loads((reader / "config.json").read_text())
    config["data"]["tokenizer"] = "char27"
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    assert "are of tokenizer char27 and the scorer is of byte" in says(other, f"--scorer={reader}")


def test_the_scorer_reads_from_left_to_right(reader):
    run = open_run(reader, "--scorer")
    config = base("aogpt")
    config.method.order = "uniform"
    setup = dataclasses.replace(run.setup, config=config)
    with pytest.raises(ConfigError, match="of aogpt of order uniform"):
        perplexity.score(dataclasses.replace(run, setup=setup), [np.array([1])])

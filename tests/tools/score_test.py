"""The score command: prompts, answers, resuming, comparing, and one line for bad input."""

import json

import pytest

from aodiff.evals import gsm8k
from aodiff.evals.problems import EvalSet
from aodiff.tools import score

WHOLE = "def f(x):\n    return 2 * x\n"


def write(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def sums(tmp_path):
    """Ten problems whose answers are 0 to 9."""
    rows = [{"question": f"{i} and 0?", "answer": f"It is {i}.\n#### {i}"} for i in range(10)]
    return "--data=" + write(tmp_path / "sums.jsonl", rows)


@pytest.fixture
def tasks(tmp_path):
    rows = [
        {"task_id": i, "text": "Double.", "code": WHOLE, "test_list": ["assert f(3) == 6"]}
        for i in range(1, 4)
    ]
    return "--data=" + write(tmp_path / "tasks.jsonl", rows)


def answers(tmp_path, texts, name="answers.jsonl") -> str:
    return write(tmp_path / name, [{"id": i, "text": t} for i, t in enumerate(texts)])


def test_accuracy_and_its_error(tmp_path, sums, capsys):
    path = answers(tmp_path, [f"#### {i % 8}" for i in range(10)])
    score.main(["gsm8k", path, sums])
    out = capsys.readouterr().out
    assert "gsm8k: 10 of 10 problems, 10 answers" in out
    assert "accuracy 80.00 +- 13.33 % (standard error)" in out  # sqrt(.8 * .2 / 9)
    assert "verdicts: #### 10" in out and "Cobbe" in out


def test_problems_without_an_answer_are_named(tmp_path, sums, capsys):
    score.main(["gsm8k", answers(tmp_path, ["0<|eot_id|>9", "7"]), sums, "--template=llada"])
    out = capsys.readouterr().out
    assert "2 of 10 problems, 2 answers; problems without an answer are left out" in out
    assert "accuracy 50.00" in out and "last number 2" in out


def test_several_samples_of_a_problem(tmp_path, sums, capsys):
    rows = [{"id": i, "text": str(i if s < i else 99)} for i in (0, 1) for s in range(2)]
    score.main(["gsm8k", write(tmp_path / "a.jsonl", rows), sums, "--k=1,2"])
    out = capsys.readouterr().out
    assert "2 of 10 problems, 4 answers" in out
    assert "accuracy 25.00" in out and "pass@2 50.00" in out


def test_two_files_are_compared_in_pairs(tmp_path, sums, capsys):
    ours = answers(tmp_path, [str(i) for i in range(10)])
    theirs = answers(tmp_path, [str(i % 4) for i in range(10)], "theirs.jsonl")
    score.main(["gsm8k", ours, sums, f"--baseline={theirs}"])
    assert (
        "minus theirs.jsonl: +60.00 +- 16.33 points on 10 problems, ahead on 6, behind on 0, "
        "p = 0.0312 (McNemar)"
    ) in capsys.readouterr().out


def test_an_interrupted_scoring_goes_on(tmp_path, sums, capsys, monkeypatch):
    path = answers(tmp_path, [str(i) for i in range(10)])
    scored = tmp_path / "answers.scored.jsonl"
    judge, asked = gsm8k.judge, []

    def stops(right, pairs):
        for pair in pairs:
            if len(asked) == 4:
                raise KeyboardInterrupt
            asked.append(pair[0])
            yield from judge(right, [pair])

    monkeypatch.setattr(gsm8k, "judge", stops)
    with pytest.raises(KeyboardInterrupt):
        score.main(["gsm8k", path, sums])
    scored.write_text(scored.read_text()[:-10])  # and the last line was cut
    monkeypatch.setattr(gsm8k, "judge", judge)
    seen = []
    count = lambda right, pairs: judge(right, (seen.append(p[0]) or p for p in pairs))
    monkeypatch.setattr(gsm8k, "judge", count)
    score.main(["gsm8k", path, sums])
    assert asked == list("0123") and seen == list("3456789")
    assert "accuracy 100.00" in capsys.readouterr().out
    score.main(["gsm8k", path, sums])
    assert len(seen) == 7  # nothing is left to judge
    answers(tmp_path, [str(i) for i in range(9)] + ["0"])
    score.main(["gsm8k", path, sums])
    assert seen[7:] == ["9"]  # only the changed answer
    assert "accuracy 90.00" in capsys.readouterr().out


def test_code_runs_only_with_leave(tmp_path, tasks, capsys):
    with pytest.raises(SystemExit, match="add --allow_code_execution"):
        score.main(["mbpp", "--references", tasks])
    score.main(["mbpp", "--references", tasks, "--allow_code_execution"])
    assert "accuracy 100.00" in capsys.readouterr().out
    rows = [{"id": 1, "text": WHOLE}, {"id": 2, "text": "import os; os.fork()"}]
    path = write(tmp_path / "a.jsonl", rows)
    score.main(["mbpp", path, tasks, "--allow_code_execution"])
    out = capsys.readouterr().out
    assert "accuracy 50.00" in out and "passed 1" in out


def test_references_that_fail_are_an_error(tmp_path):
    row = {"task_id": 7, "text": "", "code": WHOLE, "test_list": ["assert f(3) == 7"]}
    data = write(tmp_path / "tasks.jsonl", [row])
    options = [f"--data={data}", "--references", "--allow_code_execution"]
    with pytest.raises(SystemExit, match=r"1 of 1 references .* first 7 \(failed: AssertionError"):
        score.main(["mbpp", *options])


def test_prompts_are_written_with_examples_template_and_ids(tmp_path, tasks, capsys):
    path = tmp_path / "prompts.jsonl"
    options = ["--prompts", "--examples=2", "--ids=3-3"]
    score.main(["mbpp", str(path), tasks, *options])
    (row,) = map(json.loads, path.read_text().splitlines())
    assert row["id"] == "3" and row["prompt"].endswith("assert f(3) == 6\n[BEGIN]\n")
    assert row["prompt"].count("[DONE]") == 1
    more = ["--template=dream", "--begun=Here", "--tokenizer=byte"]
    score.main(["mbpp", str(path), tasks, *options, *more])
    (row,) = map(json.loads, path.read_text().splitlines())
    assert row["prompt"].endswith("<|im_start|>assistant\nHere")
    assert row["ids"].count(151645) == 4 and row["ids"][-4:] == list(b"Here")
    assert "wrote 1 prompts" in capsys.readouterr().out


BAD = [
    ([{"id": 77, "text": ""}], [], "answers 77, which is no id of these problems of gsm8k"),
    ([{"id": 0}], [], "line 1 has no 'text'"),
    ([{"id": 0, "text": 5}], [], "has a int as text of 0"),
    ([], [], "holds no rows"),
    ([{"id": 0, "text": "0"}], ["--ids=ten"], "--ids=ten is not first-last"),
    ([{"id": 0, "text": "0"}], ["--ids=50-60"], "leaves none of the 10 problems"),
    ([{"id": 0, "text": "0"}], ["--k=2"], "pass@2 needs 2 answers to each problem, got 1"),
    ([{"id": 0, "text": "0"}], ["--baseline=none.jsonl"], "none.jsonl is no file"),
    ([{"id": 0, "text": "0"}], ["--prompts", "--examples=77"], "--examples names 77"),
]


@pytest.mark.parametrize(("rows", "options", "says"), BAD)
def test_bad_input_is_one_line(tmp_path, sums, rows, options, says):
    with pytest.raises(SystemExit) as ended:
        score.main(["gsm8k", write(tmp_path / "a.jsonl", rows), sums, *options])
    assert says in ended.value.code and "\n" not in ended.value.code


def test_a_missing_file_of_answers_is_one_line(sums):
    with pytest.raises(SystemExit, match="no file of answers"):
        score.main(["gsm8k", sums])


@pytest.mark.parametrize("key", ["Light/HumanEval/{}/1", "Single/HumanEval/{}/L0", "HumanEval/{}"])
def test_problems_are_chosen_by_their_own_number(key):
    among = EvalSet("some", dict.fromkeys(map(key.format, range(9))), None, "")
    assert list(score.chosen(among, "2-3").problems) == [key.format(2), key.format(3)]

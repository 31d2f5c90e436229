"""Answers to programs, and the published references, which must pass."""

import json
import textwrap

import pytest

from aodiff.data import DataError
from aodiff.evals import code, problems
from tests.data.fixtures_test import fixture

PREFIX = 'from math import sqrt\n\ndef half(x):\n    return x / 2\n\ndef f(x):\n    """Twice."""\n'
WANTED = "y = 2 * x\n    for _ in range(0):\n        y += half(sqrt(y))\n    return y"
BODY = f"    {WANTED}\n"
WHOLE = "def f(x):\n" + BODY
HUMANEVAL = [  # answers to PREFIX that are right
    BODY,
    BODY.strip(),
    textwrap.dedent(BODY),
    "\n\n" + BODY + "\n\n",
    BODY.replace("\n", "\r\n"),
    BODY + "\ndef test():\n    assert f(1) == 3\n\ntest()\n",
    BODY + "\nprint(f('x')[5])\nassert False\nif __name__ == '__main__':\n    1 / 0\n",
    BODY + '\nThis doubles x: "unfinished',
    BODY.strip() + "\n```\nThis doubles x.",
    f"```python\n{WHOLE}```",
    f"Sure!\n\n```python\n{PREFIX}{BODY}```\n\nIt works as 2 > 1.\n```\nf(1)\n```",
    f"For example\n```\nf(1)\n```\nand in full\n```py\n{WHOLE}```",
    f"```python\n{WHOLE}",
    f"Here is the function:\n{WHOLE}",
    f"Here is the function:\nFACTOR = 2\n{WHOLE}\nThat is all, folks!",
    f"import os\n\nTWO = 2\n{WHOLE.replace('2 * x', 'TWO * x')}",
    "    # doubles\n" + BODY,
]
CHECK = "assert f(3) == 6"


def right(task: code.Task, answer: str) -> set[str]:
    """The readings of an answer that are right. Runs what this file itself wrote, here."""
    found = set()
    for mode, source in task.sources(answer).items():
        names = {"__name__": "test"}
        try:
            exec(compile(source, "<test>", "exec"), names)
            exec(task.tests, names)
        except Exception:
            continue
        found.add(mode)
    return found


@pytest.mark.parametrize("answer", HUMANEVAL, ids=range(len(HUMANEVAL)))
def test_right_answers_in_every_wrapping_become_right_programs(answer):
    assert code.STRICT in right(code.Task(PREFIX, None, CHECK, "f"), answer)


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "    return 3 * x",
        "I cannot do that.",
        "```python\n```",
        "    return x +",
        "\0",
        "(" * 5000,
        "x" * 10000,
        "```",
        "    return (2 *\n x",
    ],
)
def test_wrong_and_broken_answers_become_wrong_programs(answer):
    assert not right(code.Task(PREFIX, None, CHECK, "f"), answer)


MBPP = [  # answers without anything before them
    WHOLE + "\n[DONE]\n\nYou are an expert Python programmer",
    f"```python\n{WHOLE}```",
    f"```\n{WHOLE}\n```",
    f"[BEGIN]\n{WHOLE}[DONE]",
    f"The code is:\n\n{WHOLE}",
    f"{WHOLE}\nprint(f(3))\nassert f(3) == 7",
    f"    ```python\n{WHOLE}    ```",
    f"import math\nfrom typing import List\n\n{WHOLE}",
    "class A:\n    two = 2\n\ndef f(x):\n    return A.two * x",
    "f = lambda x: 2 * x",
]


@pytest.mark.parametrize("answer", MBPP, ids=range(len(MBPP)))
def test_modules_are_found_in_answers(answer):
    assert code.STRICT in right(code.Task("", None, CHECK, "f"), answer)


def test_text_around_blocks_and_the_block_that_counts():
    assert code.fenced("no block", "f") == ""
    assert code.fenced("```\na\n```\n```\ndef f(): b\n```", "f") == "def f(): b\n"
    assert code.fenced("```python\na\n```", "f") == "a\n"
    assert code.fenced("    return 1\n```\nthe end", "f") == "    return 1\n"


def test_a_gap_is_filled_to_the_letter():
    task = code.Task("def f(x):\n    return x", " * x\n", "assert f(3) == 27", "f")
    assert code.STRICT in right(task, " * x")
    assert not right(task, "")
    at_the_end = code.Task("def f(x):\n    ret", "", CHECK, "f")
    assert code.STRICT in right(at_the_end, "urn 2 * x\n")


WHOLE_GAP = "def f(x):\n    return 2 * x\n"
READINGS = [  # prefix, suffix, answer, the readings that are right
    (PREFIX, None, BODY, {"solution"}),  # all ways to read it are one, but by itself it is broken
    ("def f(x):\n", None, "    return 2 * x\nprint(f('x')[5])\n", {"solution"}),
    ("def f(x):\n", None, "  return 2 * x\n  # end\nfoo bar", {"solution"}),
    ("x = 1 / 0\n", None, WHOLE_GAP, {"alone"}),
    ("def f(x):\n    ", "\n    return y\n", "y = 2 * x\n    return y\n", {"solution", "cleaned"}),
    ("def f(x):\n    y = ", "\n    return (y)\n", "2 * x\n    return (y", {"cleaned"}),
    ("", "", f"```\n{WHOLE_GAP}```", {"solution"}),
]


@pytest.mark.parametrize(("prefix", "suffix", "answer", "modes"), READINGS)
def test_answers_can_be_read_in_four_ways(prefix, suffix, answer, modes):
    assert right(code.Task(prefix, suffix, CHECK, "f"), answer) == modes


def test_equal_readings_are_one():
    assert list(code.Task("", None, CHECK, "f").sources(WHOLE)) == ["solution"]
    assert set(code.Task("a = 1\n", "c", CHECK, "f").sources("```\nb\n```")) == set(code.MODES) - {
        "cleaned"
    }


def test_what_repeats_the_suffix_is_cut():
    assert code.without_overlap("a + b)", ")\n") == "a + b"
    assert code.without_overlap("a\n  return", "\n  return a") == "a"
    assert code.without_overlap("a", "b") == "a" and code.without_overlap("", "b") == ""


def test_only_what_shows_off_is_left_out():
    source = "import a\nX = 1\nprint(X)\nassert X\nfor i in []:\n    X += i\n"
    assert code.essential(source) == "import a\nX = 1\nfor i in []:\n    X += i"
    assert code.essential("t = []\nt.append(1)\nprint(t)") == "t = []\nt.append(1)"
    assert code.essential("X=1  # as it is") == "X=1  # as it is"


def test_the_tested_function_is_the_first_one_that_is_not_pythons():
    assert code.tested(["assert set(g(1)) == set(h(2))"]) == "g"
    assert code.tested(["assert 1 == 1"]) == ""


def read(name: str) -> problems.EvalSet:
    reader = code.read_mbpp if "mbpp" in name else code.read_humaneval
    return reader(fixture(f"code/{name}"))


def passing(found: problems.EvalSet, keys, text) -> int:
    return sum(v.ok for v in found.judge((k, text(found.problems[k])) for k in keys))


SAMPLED = [
    ("humaneval/HumanEval.jsonl.gz", 164, 20),
    ("mbpp/mbpp.jsonl", 974, 60),
    ("mbpp/sanitized-mbpp.json", 427, 60),
    ("humaneval_infilling/HumanEval-SingleLineInfilling.jsonl.gz", 1033, 150),
    ("humaneval_infilling/HumanEval-RandomSpanInfillingLight.jsonl.gz", 164, 20),
]


@pytest.mark.parametrize(("name", "count", "stride"), SAMPLED)
def test_some_references_pass_and_empty_answers_fail(name, count, stride):
    found = read(name)
    keys = list(found.problems)[::stride]
    assert len(found.problems) == count
    assert passing(found, keys, lambda p: p.reference) == len(keys)
    assert passing(found, keys[:3], lambda p: "") == 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count", "_"), SAMPLED)
def test_all_references_pass_in_every_form(name, count, _):
    found = read(name)
    assert passing(found, found.problems, lambda p: p.reference) == count
    if found.name != "infilling":
        chatty = "Here you are:\n\n{}\n\nDone."
        fence = "{}" if found.name == "humaneval" else "```python\n{}\n```"
        answers = lambda p: chatty.format(fence.format(p.solution.removesuffix("[DONE]")))
        assert passing(found, found.problems, answers) == count
    if found.name == "humaneval":
        assert passing(found, found.problems, lambda p: p.reference.strip()) == count
        assert passing(found, found.problems, lambda p: textwrap.dedent(p.reference)) == count


def test_published_programs_with_carriage_returns_lose_them():
    raw = [json.loads(line) for line in fixture("code/mbpp/mbpp.jsonl").open()]
    assert sum("\r\n" in row["code"] for row in raw) == 972
    assert not any("\r" in p.reference for p in read("mbpp/mbpp.jsonl").problems.values())


def test_verdicts_say_how_a_program_ended(tmp_path):
    path = tmp_path / "mini.jsonl"
    rows = [{"task_id": i, "text": "", "code": WHOLE, "test_list": [CHECK]} for i in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers = ["def f(x): return 2 * x", "def f(x): return x", "def f(x): exit()", ""]
    found = code.read_mbpp(path)
    hows = [v.how for v in found.judge(zip("0123", answers, strict=True))]
    assert hows[:2] == ["passed", "failed: AssertionError"]
    assert all(how.startswith("failed: NameError") for how in hows[2:])


def test_a_row_without_its_fields_is_one_sentence(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"task_id": "HumanEval/0", "prompt": ""}\n')
    with pytest.raises(DataError, match="line 1 has no 'entry_point', 'canonical_solution'"):
        code.read_humaneval(path)
    with pytest.raises(DataError, match="line 1 has no 'code', 'test_list'"):
        code.read_mbpp(path)


def test_further_tests_of_both_forms(tmp_path):
    rows = [
        {"task_id": f"T/{i}", "entry_point": "f", "prompt": "def f(x):\n", "test": "check = print"}
        | {"canonical_solution": "    return [x / 3]\n"}
        for i in range(3)
    ]
    base, more = tmp_path / "base.jsonl", tmp_path / "more.jsonl"
    write = lambda path, rows: path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    write(base, rows)
    stricter = rows[1] | {"test": "def check(f):\n    assert f(6) == [2]"}
    inputs = {k: v for k, v in rows[2].items() if k != "test"} | {"plus_input": [[3], [4]]}
    write(more, [rows[0], stricter, inputs | {"atol": 1e-3}])
    close = {k: "    return [round(x / 3, 5)]\n" for k in ("T/0", "T/1", "T/2")}
    wrong = dict.fromkeys(close, "    return [1.0]\n")
    ok = lambda answers, *paths: [
        v.ok for v in code.read_humaneval(base, *paths).judge(answers.items())
    ]
    assert ok(wrong) == [True] * 3
    assert ok(wrong, more) == [True, False, False] and ok(close, more) == [True] * 3
    write(more, [rows[0], stricter, inputs])
    assert ok(close, more) == [True, True, False]  # no tolerance
    write(more, rows[:2])
    with pytest.raises(DataError, match="more.jsonl has no tests of T/2"):
        code.read_humaneval(base, more)
    write(more, [rows[0], {"task_id": "T/1", "entry_point": "f"}])
    with pytest.raises(DataError, match="line 2 has neither 'test' nor 'plus_input'"):
        code.read_humaneval(base, more)

"""Numbers found in texts, the published file, and prompts."""

import json
from decimal import Decimal

import pytest

from aodiff.data import DataError
from aodiff.evals import gsm8k, problems
from tests.data.fixtures_test import fixture

ANSWERS = [  # text, number, how it was found
    ("She has 9 eggs.\nShe earns 9 * 2 = $18.\n#### 18", "18", "####"),
    ("#### 7\nNo wait, that forgets tax.\n#### 1,234,567", "1234567", "####"),
    ("#### -$3.50", "-3.5", "####"),
    ("#### $-4", "-4", "####"),
    ("####\nSo it is 12.", "12", "last number"),
    (r"Thus \boxed{1{,}000} and 5 more words", "1000", "boxed"),
    (r"First \boxed{3}, then \boxed{\text{about } 42}.", "42", "boxed"),
    ("<answer>\n20 apples\n</answer> of 30", "20", "tag"),
    ("<reasoning> 2 + 3 </reasoning> <answer> 5", "5", "tag"),
    ("There were 3, so the answer is 6. He then left at 7.", "6", "the answer is"),
    ("The final answer is: **64%**", "64", "the answer is"),
    ("He pays 12 dollars for 3 and gets 4.25 back.", "4.25", "last number"),
    ("It falls by 10-3, that is 7-2", "2", "last number"),
    ("The balance is \N{MINUS SIGN}15", "-15", "last number"),
    ("A third of it, .5 in all", "0.5", "last number"),
    ("items: 1,2,3", "3", "last number"),
    ("He has 5.\n\nQuestion: Ann has 9 eggs. How many?\nAnswer: 9", "5", "last number"),
    ("I do not know.", None, "no number"),
    ("", None, "no number"),
]


@pytest.mark.parametrize(("text", "number", "how"), ANSWERS)
def test_the_number_a_text_answers_with(text, number, how):
    value = None if number is None else Decimal(number)
    assert gsm8k.extract(text) == (value, how)


@pytest.mark.parametrize(
    ("name", "rows"), [("test", 1319), ("train", 7473), ("test_socratic", 1319)]
)
def test_references_are_right_and_empty_answers_wrong(name, rows):
    found = gsm8k.read(fixture(f"math/gsm8k/{name}.jsonl"))
    assert len(found.problems) == rows
    assert all(v.ok for v in found.judge((k, p.reference) for k, p in found.problems.items()))
    assert not any(v.ok for v in found.judge((k, "") for k in found.problems))


def test_sixteen_published_answers_are_not_plain_digits():
    lines = fixture("math/gsm8k/test.jsonl").read_text().splitlines()
    texts = [json.loads(line)["answer"].rpartition("#### ")[2] for line in lines]
    odd = [text for text in texts if not text.isdigit()]
    assert len(odd) == 16
    for text in odd:
        assert gsm8k.extract(f"#### {text}")[0] == Decimal(text.replace(",", ""))


def small(tmp_path, answer="2 + 2 = <<2+2=4>>4\n#### 4"):
    path = tmp_path / "few.jsonl"
    rows = [{"question": f"{i} and more?", "answer": answer} for i in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_equal_numbers_are_equal_however_written(tmp_path):
    found = gsm8k.read(small(tmp_path))
    texts = ["#### 4.00", "#### 40", "four"]
    assert [v.ok for v in found.judge(zip("012", texts, strict=True))] == [True, False, False]


def test_prompts_with_worked_examples(tmp_path):
    first, second, _ = gsm8k.read(small(tmp_path)).problems.values()
    assert problems.plain_prompt(second, [first]) == (
        "Question: 0 and more?\nAnswer: 2 + 2 = 4\n#### 4\n\nQuestion: 1 and more?\nAnswer:"
    )
    roles = [role for role, _ in problems.messages(second, [first])]
    assert roles == ["user", "assistant", "user"]
    assert problems.messages(second)[0][1].startswith("1 and more?\n\nThink step by step.")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "holds no rows"),
        ("[1]\n", "line 1 has no 'question', 'answer'"),
        ('{"question": "a"}\n', "line 1 has no 'answer'"),
        ('{"question": "a", "answer": "#### 1"}\n{"question"\n', "line 2 is not JSON"),
        ('{"question": "a", "answer": "one"}\n', "row 1 has no number after ####"),
    ],
)
def test_a_bad_file_is_one_sentence(tmp_path, content, says):
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=says) as error:
        gsm8k.read(path)
    assert "\n" not in str(error.value) and str(path) in str(error.value)


def test_a_missing_file_is_one_sentence(tmp_path):
    with pytest.raises(DataError, match="is no file"):
        gsm8k.read(tmp_path / "none.jsonl")

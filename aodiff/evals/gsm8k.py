"""Grade-school arithmetic in words: GSM8K, its prompts, and the number a text answers with.

Source: Cobbe et al. 2021, "Training Verifiers to Solve Math Word Problems"; mdm.md section 9.
"""

import functools
import re
from collections.abc import Iterable, Iterator
from decimal import Decimal
from pathlib import Path

from aodiff.data.info import DataError
from aodiff.evals.problems import EvalSet, Problem, Verdict, read_rows

CITATION = "GSM8K (Cobbe et al. 2021)"
REQUEST = 'Think step by step. End with a line "#### " and the number.'
NUMBER = re.compile(
    r"(?:(?<![\w)\]])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?:(?<![\w)])-)?(?<!\d)\.\d+"
)
# How an answer is marked, surest first; the last mark counts, and the first number after it.
MARKS = {
    "####": re.compile(r"####(.*)"),
    "boxed": re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}"),
    "tag": re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL),
    "the answer is": re.compile(r"\banswer is(.*)", re.IGNORECASE),
}
NEXT_PROBLEM = re.compile(r"\n\s*(?:Q|Question|Problem)\s*:")  # where a base model runs on
CALCULATOR = re.compile(r"<<[^<>]*>>")


def numbers(text: str) -> list[Decimal]:
    """Numbers of a text in order, "$1,234.50" and "-$3" included; "7-3" holds 7 and 3."""
    plain = text.replace("\N{MINUS SIGN}", "-").replace("{,}", ",")
    plain = plain.replace("\\$", "").replace("$", "")
    return [Decimal(found.replace(",", "")) for found in NUMBER.findall(plain)]


def extract(text: str) -> tuple[Decimal | None, str]:
    """The number a text answers with and how it was found: a key of `MARKS`, "last number", or
    "no number" (then None)."""
    text = NEXT_PROBLEM.split(text, maxsplit=1)[0]
    for name, mark in MARKS.items():
        for inside in reversed(mark.findall(text)):
            if found := numbers(inside):
                return found[0], name
    found = numbers(text)
    return (found[-1], "last number") if found else (None, "no number")


def read(path: Path) -> EvalSet:
    """The problems of a file with `question` and `answer`, numbered by row.

    Raises:
      DataError: the file or one of its rows is not of that form.
    """
    problems, right = {}, {}
    for i, row in enumerate(read_rows(path, ("question", "answer"))):
        answer = CALCULATOR.sub("", str(row["answer"])).strip()
        value, how = extract(answer)
        if how != "####":
            raise DataError(
                f"{path}, row {i + 1} has no number after ####; end its answer with one."
            )
        question, right[str(i)] = str(row["question"]).strip(), value
        plain = f"Question: {question}\nAnswer:"
        ask = f"{question}\n\n{REQUEST}"
        problems[str(i)] = Problem(str(i), ask, plain, f" {answer}", answer)
    return EvalSet("gsm8k", problems, functools.partial(judge, right), CITATION)


def judge(right: dict[str, Decimal], answers: Iterable[tuple[str, str]]) -> Iterator[Verdict]:
    """Compares numbers as numbers: 18.00 is 18."""
    for key, text in answers:
        value, how = extract(text)
        yield Verdict(value == right[key], how)

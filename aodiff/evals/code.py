"""Python problems with tests: HumanEval, its infilling sets and MBPP, and answers to programs.

Programs run in `aodiff.evals.sandbox` and nowhere else. Sources: Chen et al. 2021 (HumanEval);
Bavarian et al. 2022 (infilling); Austin et al. 2021 (MBPP); mdm.md section 9, decoding.md 14.3.
"""

import ast
import builtins
import dataclasses
import functools
import re
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from aodiff.evals import sandbox
from aodiff.evals.problems import EvalSet, Problem, Verdict, read_rows

HUMANEVAL = ("task_id", "prompt", "entry_point", "canonical_solution", "test")
MBPP = ("task_id", "code", "test_list")
FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[ \t]*$", re.MULTILINE)
STARTS = re.compile(r"^(?:import |from |def |class |async |@)", re.MULTILINE)
MOST_LINES = 1000  # of an answer


@dataclasses.dataclass(frozen=True)
class Task:
    """What turns an answer into a program: code before it, what comes after a gap that it fills (a
    gap may be at the end; None: there is no gap), tests, and the function they call."""

    prefix: str
    suffix: str | None
    tests: str
    entry_point: str

    def program(self, answer: str) -> str:
        """The program that decides: it runs to its end where the answer is right."""
        if self.suffix is not None:  # a gap is filled as it is, to the last blank
            source = self.prefix + (fenced(answer, "") or answer) + self.suffix
        else:
            source = solution(answer, self.prefix, self.entry_point)
        return f"{source}\n\n{self.tests}\n"


def fenced(text: str, entry_point: str) -> str:
    """The code block of a text that defines `entry_point`, else its first, else "".

    A text whose first fence closes began inside a block, which a prompt had opened.
    """
    fences = list(FENCE.finditer(text))
    if not fences:
        return ""
    if len(fences) % 2 and not fences[0][1]:
        return text[: fences[0].start()]
    ends = [*(f.start() for f in fences[1::2]), len(text)]
    blocks = [text[f.end() + 1 : e] for f, e in zip(fences[::2], ends, strict=False)]
    return next((b for b in blocks if _defines(b, entry_point)), blocks[0])


def _defines(code: str, name: str) -> bool:
    return bool(re.search(rf"^(?:async )?def {re.escape(name)}\b", code, re.MULTILINE))


def solution(text: str, prefix: str, entry_point: str) -> str:
    """A module of what a model wrote: the code of its answer, after `prefix` where it continues it.

    Words around the code, text after it, and statements at top level that only show it off
    (expressions, asserts, `if __name__ == ...`) are left out. An answer that defines
    `entry_point` itself follows the prefix, whose imports and helpers it may need.
    """
    code = (fenced(text, entry_point) or text).replace("\r\n", "\n").replace("\r", "\n")
    lines = code.split("[DONE]")[0].split("\n")[:MOST_LINES]
    code = "\n".join(lines)
    if prefix and not _defines(code, entry_point):
        head = prefix
        indent = re.match(r"\s*", prefix.rstrip().rpartition("\n")[2])[0]
        bodies = _indented(lines, indent)
    else:
        head = f"{prefix}\n" if prefix else ""
        start = STARTS.search(code)
        bodies = [code, code[start.start() if start else 0 :]]
    tries = [longest(head, body) for body in bodies]
    return essential(head + max(tries, key=lambda body: body.count("\n")))


def _indented(lines: list[str], indent: str) -> list[str]:
    """A body as it came; with what decoders strip, the blanks of its first line; or all of it
    indented."""
    while lines and not lines[0].strip():
        lines = lines[1:]
    bodies = [indent + "\n".join(lines).lstrip(), "\n".join(indent + line for line in lines)]
    as_it_is = lines and lines[0][:1].isspace()
    return ["\n".join(lines), *bodies] if as_it_is else bodies


def longest(prefix: str, body: str) -> str:
    """The longest beginning of `body`, in whole lines, that compiles after `prefix`; or ""."""
    lines = body.split("\n")
    before = prefix.count("\n")
    while lines:
        error = _compile_error(prefix + "\n".join(lines))
        if error is None:
            return "\n".join(lines)
        at = (error.lineno or 0) - before - 1 if isinstance(error, SyntaxError) else 0
        lines = lines[: at if 0 < at < len(lines) else len(lines) - 1]
    return ""


def _compile_error(source: str) -> Exception | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compile(source, "<answer>", "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
            return error
    return None


def essential(source: str) -> str:
    """Source without what at top level only shows off; as it is where there is no such thing."""
    if _compile_error(source) is not None:
        return source
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(source)
    kept = [node for node in tree.body if not _shows_off(node)]
    if len(kept) == len(tree.body):
        return source
    return ast.unparse(ast.Module(kept, []))


def _shows_off(node: ast.stmt) -> bool:
    if isinstance(node, ast.If):
        return "__name__" in ast.unparse(node.test)
    if isinstance(node, ast.Expr):  # a method may change what the answer rests on
        return not (isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute))
    return isinstance(node, ast.Assert)


def tested(tests: list[str]) -> str:
    """The function that asserts call first: the first name called that is not Python's own."""
    for node in ast.walk(ast.parse("\n".join(tests))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if not hasattr(builtins, node.func.id):
                return node.func.id
    return ""


def read_humaneval(path: Path) -> EvalSet:
    """HumanEval, or one of its infilling sets (its rows have a `suffix`).

    Raises:
      DataError: the file or one of its rows is not of that form.
    """
    problems, tasks = {}, {}
    for row in read_rows(path, HUMANEVAL):
        key, prefix, suffix = row["task_id"], row["prompt"], row.get("suffix")
        answer, name = row["canonical_solution"], row["entry_point"]
        block = f"```python\n{prefix}```"
        ask = f"Complete this function. Answer with all of it in one code block.\n{block}"
        if suffix is not None:
            ask = (
                "Write the code between these two parts, and nothing else, in one code block.\n"
                f"{block}\n...\n```python\n{suffix}```"
            )
        worked = f"```python\n{prefix + answer if suffix is None else answer}\n```"
        problems[key] = Problem(key, ask, prefix, worked, answer, suffix or "")
        tests = f"{row['test']}\ncheck({name})"
        tasks[key] = Task(prefix, suffix, tests, name)
    infilling = any(task.suffix is not None for task in tasks.values())
    name, by = (
        ("infilling", "Bavarian et al. 2022") if infilling else ("humaneval", "Chen et al. 2021")
    )
    return EvalSet(name, problems, functools.partial(judge, tasks), f"HumanEval ({by})")


def read_mbpp(path: Path) -> EvalSet:
    """MBPP, full (.jsonl) or sanitized (.json). Ids 11 to 510 are its test split.

    Raises:
      DataError: the file or one of its rows is not of that form.
    """
    problems, tasks = {}, {}
    for row in read_rows(path, MBPP):
        key, code = str(row["task_id"]), row["code"].replace("\r\n", "\n").replace("\r", "\n")
        text, asserts = row.get("text", row.get("prompt", "")), "\n".join(row["test_list"])
        plain = (
            f"You are an expert Python programmer, and here is your task: {text} "
            f"Your code should pass these tests:\n\n{asserts}\n"
        )
        problems[key] = Problem(key, plain, f"{plain}[BEGIN]\n", f"{code}\n[DONE]", code)
        needs = [row.get("test_setup_code", ""), *row.get("test_imports", ())]
        tests = "\n".join([*filter(None, needs), asserts]).replace("\r\n", "\n")
        tasks[key] = Task("", None, tests, tested(row["test_list"]))
    return EvalSet("mbpp", problems, functools.partial(judge, tasks), "MBPP (Austin et al. 2021)")


def judge(tasks: dict[str, Task], answers: Iterable[tuple[str, str]]) -> Iterator[Verdict]:
    """Runs the program of each answer, one a core at a time."""
    programs = (tasks[key].program(text) for key, text in answers)
    for result in sandbox.run_all(programs):
        how = f"{result.state}: {result.detail}" if result.detail else result.state
        yield Verdict(result.state == "passed", how)


if __name__ == "__main__":
    from aodiff.tools.score import code_references  # which prints, as tools alone do

    code_references()

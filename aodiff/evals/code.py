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

from aodiff.data.info import DataError
from aodiff.evals import sandbox
from aodiff.evals.problems import EvalSet, Problem, Verdict, read_rows

HUMANEVAL = ("task_id", "prompt", "entry_point", "canonical_solution", "test")
MBPP = ("task_id", "code", "test_list")
FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[ \t]*$", re.MULTILINE)
# Runs a reference and an answer on inputs of their own each, and compares what they return.
AGREE = """
def agree(candidate, reference, name, inputs, tolerance):
    import copy
    names = {}
    exec(reference, names)
    def same(a, b):
        if isinstance(b, (list, tuple)):
            return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
        if isinstance(b, float):
            return a == b or abs(a - b) <= max(tolerance, 1e-7 * abs(b))
        return a == b
    for args in inputs:
        found, wanted = candidate(*copy.deepcopy(args)), names[name](*copy.deepcopy(args))
        assert same(found, wanted), args
"""
STARTS = re.compile(r"^(?:import |from |def |class |async |@)", re.MULTILINE)
MOST_LINES = 1000  # of an answer
STRICT = "solution"
# How an answer may be read; the first alone counts in strict scoring.
MODES = {
    STRICT: "the code of the answer, after what comes before it where it continues that",
    "cleaned": "the code of the answer as it is, after what comes before it",
    "raw": "the answer as it is, after what comes before it",
    "alone": "the code of the answer by itself",
}


@dataclasses.dataclass(frozen=True)
class Task:
    """What turns an answer into a program: code before it, what comes after a gap that it fills (a
    gap may be at the end; None: there is no gap), tests, and the function they call."""

    prefix: str
    suffix: str | None
    tests: str
    entry_point: str

    def sources(self, answer: str) -> dict[str, str]:
        """The programs that an answer can be read as by `MODES`, without repetition.

        The tests decide on each: they run to their end where it is right.
        """
        code = (fenced(answer, self.entry_point) or answer).split("[DONE]")[0]
        if self.suffix is None:
            end, cleaned, strict = "", code, solution(answer, self.prefix, self.entry_point)
        else:  # a gap is filled as it is, to the last blank
            end, cleaned = self.suffix, without_overlap(code, self.suffix)
            strict = self.prefix + (fenced(answer, "") or answer) + self.suffix
        read = (strict, self.prefix + cleaned + end, self.prefix + answer + end, code)
        found: dict[str, str] = {}
        for mode, source in zip(MODES, read, strict=True):
            if source not in found.values():
                found[mode] = source
        return found


def without_overlap(text: str, suffix: str) -> str:
    """A text without what it repeats at its end of the beginning of what follows it."""
    most = min(len(text), len(suffix))
    shared = next((k for k in range(most, 0, -1) if text.endswith(suffix[:k])), 0)
    return text[: len(text) - shared]


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


def further_tests(path: Path) -> dict[str, str]:
    """More tests of HumanEval by task: rows with a `test` of their own, or with `plus_input`, on
    which an answer must agree with the reference, numbers up to `atol`.

    Source: Liu et al. 2023 (HumanEval+), in both of its forms.

    Raises:
      DataError: the file or one of its rows is of neither form.
    """
    found = {}
    for i, row in enumerate(read_rows(path, ("task_id", "entry_point")), 1):
        name = row["entry_point"]
        if "test" in row:
            found[row["task_id"]] = f"{row['test']}\ncheck({name})"
        elif {"plus_input", "prompt", "canonical_solution"} <= row.keys():
            reference, inputs = row["prompt"] + row["canonical_solution"], row["plus_input"]
            found[row["task_id"]] = AGREE + (
                f"agree({name}, {reference!r}, {name!r}, {inputs!r}, {row.get('atol', 0)!r})"
            )
        else:
            raise DataError(
                f"{path}, line {i} has neither 'test' nor 'plus_input' with 'prompt' and "
                "'canonical_solution'; give tests of one of these forms."
            )
    return found


def read_humaneval(path: Path, further: Path | None = None) -> EvalSet:
    """HumanEval, or one of its infilling sets (its rows have a `suffix`).

    Args:
      path: the file as published.
      further: more tests, see `further_tests`; each problem must have some.

    Raises:
      DataError: the file or one of its rows is not of that form.
    """
    problems, tasks = {}, {}
    more = further_tests(further) if further else None
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
        if more is not None:
            if key not in more:
                raise DataError(f"{further} has no tests of {key}, which {path} has; add them.")
            tests += f"\n{more[key]}"
        tasks[key] = Task(prefix, suffix, tests, name)
    infilling = any(task.suffix is not None for task in tasks.values())
    name, by = (
        ("infilling", "Bavarian et al. 2022") if infilling else ("humaneval", "Chen et al. 2021")
    )
    judged = functools.partial(judge, tasks)
    return EvalSet(name, problems, judged, f"HumanEval ({by})", tuple(MODES))


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
    judged = functools.partial(judge, tasks)
    return EvalSet("mbpp", problems, judged, "MBPP (Austin et al. 2021)", tuple(MODES))


def judge(tasks: dict[str, Task], answers: Iterable[tuple[str, str]]) -> Iterator[Verdict]:
    """Runs the programs of each answer, those of one answer a core at a time."""
    return sandbox.in_parallel(lambda answer: _verdict(tasks[answer[0]], answer[1]), answers)


def _verdict(task: Task, answer: str) -> Verdict:
    """How the strict reading ends, or the first other one that passes."""
    hows = []
    for mode, source in task.sources(answer).items():
        result = sandbox.run(source, tests=task.tests)
        hows.append(f"{result.state}: {result.detail}" if result.detail else result.state)
        if result.state == "passed":
            return Verdict(mode == STRICT, hows[0], mode)
    return Verdict(False, hows[0])


if __name__ == "__main__":
    from aodiff.tools import code  # which prints, as tools alone do

    code.main()

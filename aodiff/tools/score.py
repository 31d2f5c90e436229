"""Scores a file of answers to GSM8K, HumanEval, its infilling sets or MBPP; or writes the prompts.

  python -m aodiff.tools.score gsm8k prompts.jsonl --data=test.jsonl --prompts --template=llada
  python -m aodiff.tools.score gsm8k answers.jsonl --data=test.jsonl [--baseline=others.jsonl]
  python -m aodiff.tools.score humaneval answers.jsonl --data=HumanEval.jsonl.gz \\
      --allow_code_execution [--k=1,10]
  python -m aodiff.tools.score mbpp --data=mbpp.jsonl --ids=11-510 --references \\
      --allow_code_execution

A line of answers is {"id": ..., "text": ...}, ids as in the prompts; several lines of one id are
several samples. Verdicts go to answers.scored.jsonl as they come; the same command goes on from
there. Worked examples before a prompt are rows of --examples_from (default: the data).
"""

import argparse
import collections
import dataclasses
import hashlib
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from aodiff.data import DataError
from aodiff.data.tokenizers import make_tokenizer
from aodiff.evals import chat, code, gsm8k, problems, sandbox
from aodiff.evals.problems import EvalSet, Verdict

READERS = {
    "gsm8k": gsm8k.read,
    "humaneval": code.read_humaneval,
    "infilling": code.read_humaneval,
    "mbpp": code.read_mbpp,
}


@dataclasses.dataclass(frozen=True)
class Answer:
    """One line of a file of answers."""

    id: str
    text: str

    def key(self, salt: str) -> str:
        """Names the answer to these problems, for resuming."""
        return hashlib.sha256(f"{salt}\n{self.id}\n{self.text}".encode()).hexdigest()[:16]


def read_answers(path: Path, among: EvalSet, template: str | None) -> list[Answer]:
    """Answers cut at the end tokens of the template.

    Raises:
      DataError: not JSON lines of `id` and `text`, or an id that no problem has.
    """
    found = []
    for row in problems.read_rows(path, ("id", "text")):
        if str(row["id"]) not in among.problems:
            raise DataError(
                f"{path} answers {row['id']!r}, which is no id of these problems of {among.name}; "
                f"they are {', '.join(list(among.problems)[:3])} and so on."
            )
        if not isinstance(row["text"], str):
            raise DataError(
                f"{path} has a {type(row['text']).__name__} as text of {row['id']!r}; text is text."
            )
        text = chat.answer(template, row["text"]) if template else row["text"]
        found.append(Answer(str(row["id"]), text))
    return found


def chosen(among: EvalSet, ids: str) -> EvalSet:
    """The problems of whose ids the first number is in `ids`, "first-last"; "" is all of them.

    Raises:
      DataError: `ids` is not of that form, or leaves no problem.
    """
    if not ids:
        return among
    try:
        first, last = map(int, ids.split("-"))
    except ValueError as error:
        raise DataError(f"--ids={ids} is not first-last; write it like 11-510.") from error
    number = lambda key: int((re.findall(r"\d+", key) or [-1])[0])
    kept = {k: p for k, p in among.problems.items() if first <= number(k) <= last}
    if not kept:
        raise DataError(f"--ids={ids} leaves none of the {len(among.problems)} problems.")
    return dataclasses.replace(among, problems=kept)


def judged(among: EvalSet, answers: list[Answer], salt: str, path: Path) -> list[Verdict]:
    """The verdict on each answer; known ones are read from `path`, new ones appended to it."""
    known = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
            known[row["key"]] = Verdict(row["ok"], row["how"], row["mode"])
        except (ValueError, KeyError, TypeError):
            continue  # the line that an interruption cut
    keys = [answer.key(salt) for answer in answers]
    new = {k: a for k, a in zip(keys, answers, strict=True) if k not in known}
    with path.open("a") as file:
        file.write("\n" if path.stat().st_size else "")
        verdicts = among.judge((a.id, a.text) for a in new.values())
        for done, (key, verdict) in enumerate(zip(new, verdicts, strict=True), 1):
            known[key] = verdict
            row = {"key": key, "id": new[key].id} | dataclasses.asdict(verdict)
            file.write(json.dumps(row) + "\n")
            file.flush()
            if sys.stderr.isatty():
                print(f"\r{done} of {len(new)}", end="", file=sys.stderr)
    return [known[key] for key in keys]


def shares(
    answers: list[Answer], verdicts: list[Verdict], strict: bool = True
) -> dict[str, list[bool]]:
    """Whether each answer is right, by problem; if not strict, in any of the ways to read it."""
    by_id = collections.defaultdict(list)
    for answer, verdict in zip(answers, verdicts, strict=True):
        by_id[answer.id].append(verdict.ok or (bool(verdict.mode) and not strict))
    return by_id


def report(among: EvalSet, answers: list[Answer], verdicts: list[Verdict], ks: list[int]) -> str:
    """Accuracy over the problems answered, pass@k, and how the verdicts came about."""
    right = shares(answers, verdicts)
    lines = [
        f"{among.name}: {len(right)} of {len(among.problems)} problems, {len(answers)} answers"
    ]
    if len(right) < len(among.problems):
        lines[0] += "; problems without an answer are left out of the scores"
    ways = {"": right}
    if among.modes:
        end = f" if any of {len(among.modes)} readings of an answer may pass"
        ways[end] = shares(answers, verdicts, strict=False)
    for end, found in ways.items():
        for k in ks:
            mean, error = problems.pass_at(found, k)
            name = "accuracy" if k == 1 else f"pass@{k}"
            lines.append(f"{name} {100 * mean:.2f} +- {100 * error:.2f} % (standard error){end}")
    counts = collections.Counter(v.how.split(":")[0] for v in verdicts).most_common()
    lines.append("verdicts: " + ", ".join(f"{way} {count}" for way, count in counts))
    return "\n".join([*lines, among.citation])


def comparison(ours: dict[str, list[bool]], theirs: dict[str, list[bool]], name: str) -> str:
    """One line: the difference on the problems that both answered."""
    common = [key for key in ours if key in theirs]
    if not common:
        raise DataError(f"{name} answers none of the same problems; give answers to these.")
    mean = lambda ok: sum(ok) / len(ok)
    found = problems.paired([mean(ours[k]) for k in common], [mean(theirs[k]) for k in common])
    return (
        f"minus {name}: {100 * found.difference:+.2f} +- {100 * found.error:.2f} points on "
        f"{len(common)} problems, ahead on {found.ahead}, behind on {found.behind}, "
        f"p = {found.p_value:.3g} ({found.test})"
    )


def prompt_rows(args: argparse.Namespace, among: EvalSet) -> Iterator[dict]:
    """One record per problem: id, prompt, its suffix if it has one, and ids of a tokenizer."""
    tokenizer = args.tokenizer and make_tokenizer(args.tokenizer)
    source = READERS[args.set](args.examples_from or args.data)
    if unknown := [key for key in args.examples if key not in source.problems]:
        raise DataError(f"--examples names {unknown[0]}, which is no id of their file.")
    examples = [source.problems[key] for key in args.examples]
    for key, problem in among.problems.items():
        if args.template:
            turns = problems.messages(problem, examples)
            text = chat.render(args.template, turns, args.begun)
        else:
            text = problems.plain_prompt(problem, examples)
        row = {"id": key, "prompt": text}
        if problem.suffix:
            row["suffix"] = problem.suffix
        if tokenizer:
            row["ids"] = chat.encode(args.template, text, tokenizer).tolist()
        yield row


def references(among: EvalSet, path: Path) -> list[Verdict]:
    """The verdicts on the references of all problems; raises DataError unless they are right."""
    verdicts = list(among.judge((k, p.reference) for k, p in among.problems.items()))
    wrong = [(k, v.how) for k, v in zip(among.problems, verdicts, strict=True) if not v.ok]
    if wrong:
        raise DataError(
            f"{len(wrong)} of {len(verdicts)} references of {path} fail, first {wrong[0][0]} "
            f"({wrong[0][1]}); no score is right until they pass, so repair the file or the system."
        )
    return verdicts


def score(args: argparse.Namespace, among: EvalSet) -> str:
    """The report on the answers, or on the references."""
    if among.name != "gsm8k" and not args.allow_code_execution:
        raise DataError(
            f"scoring {among.name} runs code that models wrote, in a sandbox (isolation by "
            f"{sandbox.isolation()}, see aodiff/evals/sandbox.py); add --allow_code_execution."
        )
    if args.references:
        answers = [Answer(key, problem.reference) for key, problem in among.problems.items()]
        return report(among, answers, references(among, args.data), [1])
    salt = f"{args.set} {hashlib.sha256(args.data.read_bytes()).hexdigest()}"

    def scored(path: Path) -> tuple[list[Answer], list[Verdict]]:
        answers = read_answers(path, among, args.template)
        return answers, judged(among, answers, salt, path.with_suffix(".scored.jsonl"))

    found = scored(args.path)
    text = report(among, *found, args.k)
    if args.baseline:
        text += "\n" + comparison(
            shares(*found), shares(*scored(args.baseline)), args.baseline.name
        )
    return text


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m aodiff.tools.score",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = lambda text: text.split(",")
    parser.add_argument("set", choices=READERS)
    parser.add_argument("path", type=Path, nargs="?", help="answers to read, or prompts to write")
    parser.add_argument("--data", type=Path, required=True, help="the problems, as published")
    parser.add_argument("--ids", default="", help="first-last: those whose numbers are in between")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--references", action="store_true", help="score the reference answers")
    what.add_argument("--prompts", action="store_true", help="write the prompts")
    parser.add_argument("--allow_code_execution", action="store_true")
    parser.add_argument("--template", choices=chat.TEMPLATES, help="default: plain text")
    parser.add_argument("--k", type=lambda t: [int(k) for k in names(t)], default=[1])
    parser.add_argument("--baseline", type=Path, help="other answers to compare with, in pairs")
    parser.add_argument("--begun", default="", help="what a chat answer begins with")
    parser.add_argument("--examples", type=names, default=[], help="ids, such as 2,3,4 of MBPP")
    parser.add_argument("--examples_from", type=Path, help="their file; default: --data")
    parser.add_argument("--tokenizer", help="adds ids to the prompts, such as hf:FILE")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments().parse_args(argv)
    try:
        if args.path is None and not args.references:
            raise DataError("no file of answers (or of prompts to write) is named; name one.")
        among = chosen(READERS[args.set](args.data), args.ids)
        if args.prompts:
            rows = [json.dumps(row) + "\n" for row in prompt_rows(args, among)]
            args.path.write_text("".join(rows))
            print(f"wrote {len(rows)} prompts to {args.path}")
        else:
            print(score(args, among))
    except (DataError, sandbox.SandboxError, ValueError, OSError) as error:
        sys.exit(" ".join(str(error).split()))


if __name__ == "__main__":
    main()

"""The command `python -m aodiff.evals.code`: programs that models write, judged in the sandbox.

python -m aodiff.evals.code --references [--data=shared/data]   # of all sets; all must pass
python -m aodiff.evals.code --hostile                           # is what attacks it contained
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from aodiff.data import DataError
from aodiff.evals import code, hostile, problems, sandbox
from aodiff.evals.problems import EvalSet, Verdict
from aodiff.main import SENTENCES
from aodiff.tools import code_samples
from aodiff.tools.code_samples import Ask
from aodiff.tools.runs import open_run
from aodiff.tools.score import Answer, chosen, judged, references, report, shares
from aodiff.writers import replace_text

# Under `code/` of the data.
FILES = {
    "humaneval": "humaneval/HumanEval.jsonl.gz",
    "mbpp": "mbpp/mbpp.jsonl",
    "mbpp_sanitized": "mbpp/sanitized-mbpp.json",
    "infilling_single": "humaneval_infilling/HumanEval-SingleLineInfilling.jsonl.gz",
    "infilling_light": "humaneval_infilling/HumanEval-RandomSpanInfillingLight.jsonl.gz",
    "infilling_span": "humaneval_infilling/HumanEval-RandomSpanInfilling.jsonl.gz",
    "infilling_multi": "humaneval_infilling/HumanEval-MultiLineInfilling.jsonl.gz",
}


def read(task: str, data: Path, further: Path | None = None) -> tuple[Path, EvalSet]:
    """The file of a set of `FILES` in a folder of data, and its problems.

    Raises:
      DataError: it is not there, or not of its form.
    """
    path = data / "code" / FILES[task]
    if not path.exists():
        raise DataError(f"{path} is not there; name the folder of the data in --data.")
    if task.startswith("mbpp"):
        if further:
            raise DataError(
                f"--further={further} has tests of HumanEval, and --task={task}; drop it"
            )
        return path, code.read_mbpp(path)
    return path, code.read_humaneval(path, further)


def check_references(data: Path) -> None:
    """Prints for each set how many references pass; raises DataError unless all do."""
    for task, name in FILES.items():
        path, among = read(task, data)
        print(f"{name}: {len(references(among, path))}/{len(among.problems)}", flush=True)


def check_hostile() -> bool:
    """Prints how the sandbox contains each hostile program; returns whether it contains all."""
    print(f"isolation by {sandbox.isolation()}, see aodiff/evals/sandbox.py")
    outcomes = [hostile.check(program) for program in hostile.PROGRAMS]
    print(hostile.table(outcomes))
    return not any(outcome.problem for outcome in outcomes)


def asked(among: EvalSet, kept: EvalSet, n: int) -> list[Ask]:
    """`n` samples of each problem of `kept`, numbered as in `among`, sample by sample."""
    numbers = {key: i for i, key in enumerate(among.problems)}
    return [Ask(numbers[key], key, sample) for sample in range(n) for key in kept.problems]


def check_run(args: argparse.Namespace) -> str:
    """Draws and judges the answers of a run; returns a report, and writes it as JSON.

    Raises:
      DataError, ConfigError, CheckpointError, ValueError: what of the arguments does not fit.
    """
    if args.n < 1 or not all(1 <= k <= args.n for k in args.k or [1]):
        raise DataError(f"--k={args.k} and --n={args.n} do not fit; k is from 1 to n, the samples")
    file, among = read(args.task, args.data, args.further)
    kept = chosen(among, args.ids)
    run = open_run(args.run, "--run", args.sample)
    where = code_samples.places(run, among, args.room)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    path = args.run / "code" / f"{args.task}-{run.step}.jsonl"
    asks = asked(among, kept, args.n)
    settings = code_samples.settings(run, args.task, digest, args.room)
    texts = code_samples.generate(
        code_samples.drawing(run, where), asks, path, settings, run.setup.config.sample.batch
    )
    if not args.allow_code_execution:
        return (
            f"{len(texts)} answers are in {path}; add --allow_code_execution to have their "
            "programs run in the sandbox and judged."
        )
    answers = [Answer(ask.id, text) for ask, text in zip(asks, texts, strict=True)]
    more = hashlib.sha256(args.further.read_bytes()).hexdigest() if args.further else ""
    salt = f"{args.task} {digest} {more}"
    verdicts = judged(kept, answers, salt, path.with_suffix(".scored.jsonl"))
    ks = args.k or sorted({1, args.n})
    cut = sum(where[key].cut for key in kept.problems)
    found = {"problems": len(kept.problems), "prompts_cut": cut, "n": args.n} | settings
    found |= scores(answers, verdicts, ks)
    end = "-further" if args.further else ""
    replace_text(path.with_name(f"{path.stem}{end}-results.json"), json.dumps(found, indent=1))
    head = f"{args.run} at step {run.step}, {args.n} samples a problem, {cut} prompts cut\n"
    return head + report(kept, answers, verdicts, ks)


def scores(
    answers: list[Answer], verdicts: list[Verdict], ks: list[int]
) -> dict[str, dict[str, list[float]]]:
    """[pass@k, standard error] of the strict reading and of any of all."""
    kinds = {name: shares(answers, verdicts, name == "strict") for name in ("strict", "any")}
    return {
        name: {f"pass@{k}": list(problems.pass_at(right, k)) for k in ks}
        for name, right in kinds.items()
    }


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m aodiff.evals.code",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--references", action="store_true", help="run all reference answers")
    what.add_argument("--hostile", action="store_true", help="run programs that attack the sandbox")
    what.add_argument("--run", type=Path, help="the workdir of a trained run that is to answer")
    parser.add_argument("--task", choices=FILES, default="humaneval", help="what it is asked")
    parser.add_argument("--n", type=int, default=1, help="samples of each problem")
    parser.add_argument("--k", type=lambda text: [int(k) for k in text.split(",")], default=[])
    parser.add_argument("--ids", default="", help="first-last: those whose numbers are in between")
    parser.add_argument("--room", type=int, default=0, help="tokens for an answer; 0: half a row")
    parser.add_argument("--sample", action="append", default=[], help="key=value of its config")
    parser.add_argument("--further", type=Path, help="more tests of HumanEval, as of HumanEval+")
    parser.add_argument("--allow_code_execution", action="store_true")
    here, beside = Path("shared/data"), Path("../shared/data")
    found = beside if beside.is_dir() and not here.is_dir() else here
    parser.add_argument("--data", type=Path, default=found, help="their folder")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments().parse_args(argv)
    try:
        if args.hostile:
            sys.exit(0 if check_hostile() else 1)
        if args.run:
            print(check_run(args))
        else:
            check_references(args.data)
    except (*SENTENCES, sandbox.SandboxError, ValueError, OSError) as error:
        sys.exit(" ".join(str(error).split()))

"""The command `python -m aodiff.evals.code`: programs that models write, judged in the sandbox.

python -m aodiff.evals.code --references [--data=shared/data]   # of all sets; all must pass
python -m aodiff.evals.code --hostile                           # is what attacks it contained
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from aodiff.data import DataError
from aodiff.evals import code, hostile, sandbox
from aodiff.evals.problems import EvalSet
from aodiff.tools.score import references

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
    parser.add_argument("--data", type=Path, default=Path("shared/data"), help="their folder")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments().parse_args(argv)
    try:
        if args.hostile:
            sys.exit(0 if check_hostile() else 1)
        check_references(args.data)
    except (DataError, sandbox.SandboxError, ValueError, OSError) as error:
        sys.exit(" ".join(str(error).split()))

"""Answers of a run to programming problems, written to JSON lines as they are drawn.

An interrupted command goes on where it stopped. The randomness of an answer is keyed by the number
of its problem and of its sample, so neither the interruption nor the size of batches changes it.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np

from aodiff.data import DataError, DataInfo
from aodiff.evals.problems import EvalSet, Problem
from aodiff.evals.trained import before_end
from aodiff.generate import make_draw
from aodiff.sampling.samples import Samples
from aodiff.tools.runs import Run
from aodiff.writers import replace_text

MOST_PROBLEMS = 1 << 16
# Of `config.sample`, what does not change an answer.
ELSEWHERE = ("num", "batch", "given", "prompt", "positions")


@dataclasses.dataclass(frozen=True)
class Ask:
    """Sample `sample` of the problem `id`, which is number `number` of its file."""

    number: int
    id: str
    sample: int

    @property
    def key(self) -> int:
        return self.sample * MOST_PROBLEMS + self.number


Draw = Callable[[Sequence[Ask]], list[str]]


def generate(draw: Draw, asks: Sequence[Ask], path: Path, settings: dict, chunk: int) -> list[str]:
    """The text of each of `asks`; what `path` lacks is drawn, `chunk` at a time, and appended.

    Args:
      draw: gives the texts of some of them.
      settings: what the texts depend on, as JSON; the first line of the file.

    Raises:
      DataError: the file holds answers with other settings, or something else.
    """
    known = _known(path, settings)
    todo = [ask for ask in asks if (ask.id, ask.sample) not in known]
    with path.open("a") as file:
        for start in range(0, len(todo), chunk):
            some = todo[start : start + chunk]
            for ask, text in zip(some, draw(some), strict=True):
                known[ask.id, ask.sample] = text
                row = {"id": ask.id, "sample": ask.sample, "text": text}
                file.write(json.dumps(row) + "\n")
            file.flush()
    return [known[ask.id, ask.sample] for ask in asks]


def _known(path: Path, settings: dict) -> dict[tuple[str, int], str]:
    """The answers in a file by (id, sample); afterwards it holds no line that was cut."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    lines = [line for line in lines if line.endswith("\n")]
    try:
        rows = [json.loads(line) for line in lines]
        old = dict(rows[0]["settings"]) if rows else {}
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} holds no answers of this command; move it away") from error
    settings = json.loads(json.dumps(settings))
    if rows and old != settings:
        changed = [k for k in settings | old if settings.get(k) != old.get(k)]
        raise DataError(
            f"{path} holds answers drawn with another {', '.join(changed)}; move it away, or draw "
            "with the same"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, "".join(lines or [json.dumps({"settings": settings}) + "\n"]))
    return {(row["id"], row["sample"]): row["text"] for row in rows[1:]}


@dataclasses.dataclass(frozen=True)
class Place:
    """A problem in a row: tokens and given (L,), how many given tokens are before and after the
    answer, and whether the prompt lost some to make room."""

    tokens: np.ndarray
    given: np.ndarray
    before: int
    after: int
    cut: bool


def place(problem: Problem, info: DataInfo, room: int) -> Place:
    """Puts what comes before and after an answer at both ends of a row.

    Where less than `room` positions would be left, what is farthest from the answer is cut.
    """
    prefix, suffix = (info.tokenizer.encode(text) for text in (problem.plain, problem.suffix))
    space = info.seq_len - room
    before = min(len(prefix), max(space - len(suffix), space // 2))
    after = min(len(suffix), space - before)
    tokens, given = np.zeros(info.seq_len, np.int32), np.zeros(info.seq_len, bool)
    tokens[:before], given[:before] = prefix[len(prefix) - before :], True
    tokens[info.seq_len - after :], given[info.seq_len - after :] = suffix[:after], True
    return Place(tokens, given, before, after, before + after < len(prefix) + len(suffix))


def places(run: Run, among: EvalSet, room: int) -> dict[str, Place]:
    """Where each problem stands in a row of the run.

    Args:
      room: positions left for the answer at least; 0: half of a row.

    Raises:
      DataError: a run without text, problems with a suffix for a run whose rows do not grow, or no
        such room.
    """
    info = run.setup.info
    if info.tokenizer is None:
        raise DataError(f"--run={run.workdir} is of {info.name}, which has no text; name another")
    if not getattr(run.setup.method, "grows", False):
        if any(problem.suffix for problem in among.problems.values()):
            raise DataError(
                f"--run={run.workdir} is of {run.setup.config.method.name}, which fills no gap of "
                f"unknown length, as {among.name} asks; use humaneval or mbpp, or a run of flexmdm"
            )
    room = room or info.seq_len // 2
    if not 0 < room < info.seq_len:
        raise DataError(
            f"--room={room} leaves no prompt in rows of {info.seq_len} tokens; use less, or 0"
        )
    return {key: place(problem, info, room) for key, problem in among.problems.items()}


def drawing(run: Run, where: dict[str, Place]) -> Draw:
    """How the run answers: at most `sample.batch` of the problems that `where` places."""
    setup, batch = run.setup, run.setup.config.sample.batch
    info = setup.info
    # Of all problems: with another width some numbers would round otherwise.
    most = max(int(p.given.sum()) for p in where.values())
    fn = make_draw(setup.method, setup.config, setup.mesh, most)

    def draw(asks: Sequence[Ask]) -> list[str]:
        rows = [asks[min(i, len(asks) - 1)] for i in range(batch)]
        ids = np.array([ask.key for ask in rows], np.int32)
        tokens, given = (
            info.hidden(np.stack([getattr(where[ask.id], name) for ask in rows]))
            for name in ("tokens", "given")
        )
        with jax.set_mesh(setup.mesh):
            out = jax.device_get(fn(run.params, run.extra, ids, tokens, given))
        out = out.replace(tokens=info.natural(out.tokens))
        return answers([where[ask.id] for ask in asks], out, info)

    return draw


def answers(where: Sequence[Place], out: Samples, info: DataInfo) -> list[str]:
    """What was written between the given ends of the first rows, up to an end symbol."""
    texts = []
    for p, row, length in zip(where, out.tokens, out.lengths, strict=False):
        written = before_end(row[p.before : length - p.after], info.tokenizer.eos)
        texts.append(info.tokenizer.decode(written))
    return texts


def settings(run: Run, task: str, digest: str, room: int) -> dict:
    """What the answers of a run depend on."""
    config = run.setup.config
    sample = {k: v for k, v in config.sample.to_dict().items() if k not in ELSEWHERE}
    of_run = {"step": run.step, "seed": config.seed, "room": room}
    return of_run | {"task": task, "data": digest} | {f"sample.{k}": v for k, v in sample.items()}

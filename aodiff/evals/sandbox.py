"""The one place where programs written by models run. They are taken to be hostile.

A program is Python source. It runs in a process and session of its own, in a throw-away folder,
with nothing on stdin, an empty environment, the standard library alone, and limits on memory, CPU
time, wall time and the size of files, of which its output is one. It can start no process and no
thread, so none outlives it; when it ends, or its time does, all it wrote is gone.

What more is promised depends on the system; `isolation()` says which of two it offers:

- "namespaces" (Linux 5.12 and later, where the kernel lets this user have them, or as root): the
  kernel gives the program no network, no process to see but its own, no user's rights, and a file
  system of the interpreter and the system's libraries, read-only, beside its own small folder. It
  can neither read nor change a user's files, even with machine code of its own. What remains is a
  flaw of the kernel itself.
- "limits" (elsewhere, as in most containers): the limits hold, being the kernel's, and root's
  rights are dropped. Network, signals, and files outside the folder are refused by an audit hook
  inside the interpreter. That stops what models write by mistake; it does not stop a program made
  to break out, which then has the rights of the user, or of nobody where the user is root. The
  number of files in its folder is not limited. Run such programs in a virtual machine.

Tests run in the process of the program, from a source of their own that is out of its reach until
it has ended. Passing is a secret told after them, by what no frame and no object that Python lists
leads to. Leaving early, ending inside an open string or changing builtins is therefore not passing.
What stays possible in one process is an answer that suits every test, such as an object that equals
all others, or a function that looks at the test that called it.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import pathlib
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import IO, TypeVar

CHILD = pathlib.Path(__file__).with_name("sandbox_child.py")
ISOLATIONS = ("namespaces", "limits")  # strongest first
PROBE = "import collections, math, random, re, typing"
STATUS_BYTES, END_BYTES = 4096, 300
T, R = TypeVar("T"), TypeVar("R")


class SandboxError(Exception):
    """The sandbox itself cannot work here: one sentence with what came and what to do."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one program may use: seconds of wall and of CPU time, bytes of memory, of one file, of
    its folder (with namespaces), and how many bytes of what it printed are kept."""

    wall: float = 30.0
    cpu: int = 10
    memory: int = 2 << 30
    file: int = 8 << 20
    disk: int = 64 << 20
    output: int = 10_000


@dataclasses.dataclass(frozen=True)
class Result:
    """How a program ended.

    state: "passed" (it ran to its end), "failed" (an exception, or it left early), "refused" (it
      failed after something the sandbox refuses), "timed out" (wall or CPU time), or "killed" (a
      signal: it crashed, or ignored the end of its time).
    detail: why it did not pass: the last line it printed, the signal, or what was refused.
    output: the beginning of what it printed to stdout and stderr.
    """

    state: str
    detail: str
    output: str
    seconds: float


def run(
    program: str,
    limits: Limits | None = None,
    isolated: str = "",
    python: str = sys.executable,
    tests: str = "",
) -> Result:
    """Runs one program; never raises for anything the program does.

    Args:
      program: Python source.
      limits: what it may use; None is `Limits()`.
      isolated: one of `ISOLATIONS`; "" is the strongest there is here.
      python: the interpreter.
      tests: source that runs after the program, among its names, and decides.

    Raises:
      SandboxError: this system offers no such isolation.
    """
    limits, isolated = limits or Limits(), isolated or isolation(python)
    token = secrets.token_hex(16)
    with (
        _folder() as folder,
        tempfile.TemporaryFile() as source,
        tempfile.TemporaryFile() as output,
        _pipe() as (status, told_to),
    ):
        first, then = (text.encode(errors="replace") for text in (program, tests))
        source.write(f"{token}\n{len(first)}\n".encode() + first + then)
        source.seek(0)
        numbers = (limits.memory, limits.cpu, limits.file, limits.disk)
        arguments = map(str, (CHILD, isolated, told_to, folder, *numbers))
        started, late = time.monotonic(), threading.Event()
        process = subprocess.Popen(
            [python, "-P", "-s", "-S", "-B", "-u", "-X", "utf8", *arguments],
            stdin=source,
            stdout=output,
            stderr=output,
            pass_fds=[told_to],
            cwd=folder,
            # A fixed hash seed: the same program prints its sets in the same order.
            env={"PYTHONHASHSEED": "0", "PATH": "/usr/bin:/bin", "TMPDIR": "."},
            start_new_session=True,
        )
        timer = threading.Timer(limits.wall, lambda: (late.set(), process.kill()))
        timer.start()
        try:
            code = process.wait()
        finally:
            timer.cancel()
            process.kill()  # it still runs if this was interrupted
        seconds = time.monotonic() - started
        told = _told(status).splitlines()
        text, end = _read(output, 0, limits.output), _read(output, -END_BYTES, END_BYTES)
    if not told or told[0] != "ready":
        if late.is_set():
            return Result("timed out", "before it started", text, seconds)
        raise SandboxError(
            f"the sandbox does not start here: {' '.join([*told, *end.split()]) or code}; use a "
            f"system that grants namespaces, or a {python} that every user may read"
        )
    stopped = late.is_set() and code == -signal.SIGKILL
    state, detail = _verdict(code, stopped, token, told, end)
    return Result(state, detail, text, seconds)


def _verdict(code: int, stopped: bool, token: str, told: list[str], end: str) -> tuple[str, str]:
    """State and detail of a program that was started."""
    number = -code if code < 0 else code - 128
    if stopped or number == signal.SIGXCPU:
        return "timed out", "wall time" if stopped else "CPU time"
    if code == 0 and token in told:
        return "passed", ""
    refused = [line.removeprefix("refused ") for line in told if line.startswith("refused ")]
    if refused:
        return "refused", refused[0]
    if number in set(signal.Signals):
        return "killed", signal.Signals(number).name
    return "failed", end.rpartition("\n")[2] or f"left early with exit code {code}"


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """A new folder, gone afterwards however deep or closed what is in it."""
    folder = tempfile.mkdtemp(prefix="sandbox-")
    try:
        yield folder
    finally:
        try:
            os.rmdir(folder)
        except OSError:
            subprocess.run(["sh", "-c", 'chmod -R u+rwx "$0"; rm -rf "$0"', folder], check=False)


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    """The ends to read and to write; what is in a pipe can be neither read nor changed by a
    program that has the other end."""
    ends = os.pipe()
    os.set_blocking(ends[0], False)
    try:
        yield ends
    finally:
        for end in ends:
            os.close(end)


def _told(status: int) -> str:
    """At most `STATUS_BYTES` of what the child reported."""
    try:
        return os.read(status, STATUS_BYTES).decode(errors="replace")
    except BlockingIOError:
        return ""


def _read(file: IO[bytes], start: int, size: int) -> str:
    """At most `size` bytes as text from `start`, which counts from the end if negative."""
    length = file.seek(0, os.SEEK_END)
    file.seek(start if start >= 0 else max(length + start, 0))
    return file.read(size).decode(errors="replace").rstrip()


@functools.cache
def isolation(python: str = sys.executable) -> str:
    """The strongest of `ISOLATIONS` that works here.

    Raises:
      SandboxError: none does.
    """
    for name in ISOLATIONS:
        try:
            result = run(PROBE, isolated=name, python=python)
        except SandboxError as error:
            failure = error
            continue
        if result.state == "passed":
            return name
        failure = SandboxError(
            f"{python} {result.state} on its own standard library in the sandbox "
            f"({result.detail}); use one that every user may read"
        )
    raise failure


def run_all(
    programs: Iterable[str], limits: Limits | None = None, workers: int = 0
) -> Iterator[Result]:
    """The results of many programs in their order, `workers` at a time (0: one a core)."""
    return in_parallel(lambda program: run(program, limits), programs, workers)


def in_parallel(fn: Callable[[T], R], items: Iterable[T], workers: int = 0) -> Iterator[R]:
    """`fn` of each item in their order, `workers` at a time (0: one a core)."""
    with concurrent.futures.ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        yield from pool.map(fn, items)

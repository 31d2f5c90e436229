"""Programs that attack what runs and judges them, and whether the sandbox contains each.

Contained means: it did not pass, it ended in time, and neither a file, nor a process, nor a
connection is left of it; what it was not to see it did not print.
"""

import contextlib
import dataclasses
import os
import pathlib
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator

from aodiff.evals import sandbox

GRACE = 5.0  # seconds in which killed processes disappear
LIMITS = sandbox.Limits(wall=30, cpu=1, memory=256 << 20, file=200_000, disk=4 << 20)
ANSWERS = "the answers of the grader"
# As an argument of the programs that some start, by which they would be found.
SLEEP = "300.271828"
TESTS = "def check(f):\n    assert f(3) == 6\n    assert f(1000003) == 2000006\ncheck(f)\n"
WRONG = "def f(x): return 7\n"
SPAWN = f"subprocess.Popen(['sleep', '{SLEEP}'], start_new_session=True)"


@dataclasses.dataclass(frozen=True)
class Hostile:
    """A program that must not pass; `{outside}`, `{port}` and `{parent}` stand for a folder of the
    machine, a server that listens there, and the process that runs the program."""

    name: str
    program: str
    tests: str = ""


def _anyway(*attempts: str) -> str:
    """Tries all of them, whatever each raises, and then answers wrongly."""
    tried = "".join(f"try:\n    {one}\nexcept BaseException:\n    pass\n" for one in attempts)
    return "import os, signal, socket, subprocess, sys\n" + tried + WRONG


PROGRAMS = (
    Hostile("fork bomb", "import os\nwhile True:\n    os.fork()"),
    Hostile(
        "fork bomb that goes on",
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
    ),
    Hostile(
        "threads without end",
        "import threading, time\n"
        "while True: threading.Thread(target=time.sleep, args=(60,)).start()",
    ),
    Hostile("processes of others", _anyway(SPAWN, "os.system('sleep " + SLEEP + " &')"), TESTS),
    Hostile(
        "processes without audit",
        _anyway(
            "import _posixsubprocess as p, signal; r, w = os.pipe(); "
            f"p.fork_exec([b'sleep', b'{SLEEP}'], [b'/usr/bin/sleep'], True, (), None, None, -1, "
            "-1, -1, -1, -1, -1, r, w, False, True, 0, None, None, None, -1, None, False)",
        ),
        TESTS,
    ),
    Hostile(
        "escape by a session and two forks",
        "import os, time\nos.setsid()\nif os.fork() == 0:\n    os.setsid()\n"
        "    if os.fork() == 0:\n        time.sleep(300)\n    os._exit(0)\n" + WRONG,
        TESTS,
    ),
    Hostile("memory bomb", "x = [0]\nwhile True: x += x"),
    Hostile("memory at once", "x = bytearray(1 << 40)"),
    Hostile("endless loop", "while True: pass"),
    Hostile("endless number", "x = 9 ** 9 ** 9"),
    Hostile(
        "deaf to signals",
        "import signal\nfor n in range(1, 65):\n"
        "    try:\n        signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError):\n        pass\nwhile True: pass",
    ),
    Hostile(
        "alarm in place of an answer",
        "import signal, os\nsignal.signal(signal.SIGALRM, lambda *a: os._exit(0))\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.05)\nwhile True: pass",
    ),
    Hostile(
        "signals to the parent",
        _anyway(
            "os.kill({parent}, 9)",
            "os.kill(os.getppid(), 9)",
            "os.killpg(0, 9)",
            "signal.pidfd_send_signal(os.pidfd_open({parent}), 9)",
        ),
        TESTS,
    ),
    Hostile("crash", "import faulthandler; faulthandler._sigsegv()"),
    Hostile(
        "deep recursion", "import sys; sys.setrecursionlimit(10**9)\ndef f(x): return f(x)\nf(1)"
    ),
    Hostile(
        "files outside",
        _anyway(
            "open('{outside}/kept', 'w').write('changed')",
            "open('{outside}/new', 'w')",
            "os.remove('{outside}/kept')",
            "os.rename('{outside}/kept', '{outside}/moved')",
            "os.symlink('{outside}', 'link'); open('link/new', 'w')",
            "os.mkfifo('{outside}/new')",
            "import sqlite3; sqlite3.connect('{outside}/new.db').execute('create table t (x)')",
            "import dbm; dbm.open('{outside}/new', 'c')",
            "import shutil; shutil.rmtree('{outside}')",
        ),
        TESTS,
    ),
    Hostile(
        "files that resist their removal",
        "import os\nfor i in range(50):\n    os.mkdir('d'); os.chdir('d')\n"
        "open('f', 'w')\nos.chmod('f', 0); os.chmod('.', 0)\n1 / 0",
    ),
    Hostile(
        "many files", "i = 0\nwhile True:\n    i += 1; open(f'f{i}', 'w').write('x' * 100_000)"
    ),
    Hostile("a large file", "f = open('f', 'w')\nwhile True: f.write('x' * 100_000); f.flush()"),
    Hostile("endless output", "while True: print('x' * 10_000)"),
    Hostile("endless errors", "import os\nwhile True: os.write(2, b'x' * 10_000)"),
    Hostile(
        "connections",
        _anyway(
            "socket.create_connection(('127.0.0.1', {port}), 1)",
            "import _socket; _socket.socket(2, 1).connect(('127.0.0.1', {port}))",
            "import urllib.request as u; u.urlopen('http://127.0.0.1:{port}', timeout=1)",
        ),
        TESTS,
    ),
    Hostile(
        "the answers of the grader",
        _anyway(
            "print(open('{outside}/answers').read())",
            "print(open('/proc/{parent}/environ').read())",
            "print(os.listdir('{outside}'), os.environ)",
        ),
        TESTS,
    ),
    Hostile("exit", WRONG + "import sys; sys.exit(0)", TESTS),
    Hostile("exit at once", WRONG + "import os; os._exit(0)", TESTS),
    Hostile("exit in the tests", "import os\ndef f(x): os._exit(0)", TESTS),
    Hostile("quiet exit in the tests", "def f(x): raise SystemExit(0)", TESTS),
    Hostile("exit as it ends", WRONG + "import atexit, os; atexit.register(os._exit, 0)", TESTS),
    Hostile("an open string", WRONG + "x = '''", TESTS + "# '''"),
    Hostile("a fake word", WRONG + "print('passed', flush=True)\nprint('ready\\n' * 9)", TESTS),
    Hostile(
        "other builtins",
        WRONG + "import builtins, os, sys\nbuiltins.AssertionError = type('E', (Exception,), {})\n"
        "builtins.exec = builtins.compile = lambda *a, **k: None\n"
        "builtins.BaseException = KeyError\n"
        "sys.exit = os._exit = lambda *a: None\nsys.excepthook = lambda *a: print('passed')\n",
        TESTS,
    ),
    Hostile(
        "a trace that jumps over tests",
        WRONG + "import sys\n"
        "def jump(frame, event, arg):\n"
        "    if event == 'line' and frame.f_code.co_name == 'check': frame.f_lineno += 2\n"
        "    return jump\n"
        "sys.settrace(jump)",
        TESTS,
    ),
    Hostile(
        "a secret in frames",
        "import os, sys\n"
        "def texts(value, depth):\n"
        "    if isinstance(value, (bytes, str)):\n"
        "        yield value.encode() if isinstance(value, str) else value\n"
        "    parts = list(value) if isinstance(value, (list, tuple)) else []\n"
        "    parts += value.values() if isinstance(value, dict) else []\n"
        "    for name in ('args', '__closure__', '__defaults__', 'cell_contents', '__self__'):\n"
        "        part = getattr(value, name, None)\n"
        "        parts += [] if part is None else [part]\n"
        "    for part in parts if depth else ():\n"
        "        yield from texts(part, depth - 1)\n"
        "def tell():\n"
        "    frame = sys._getframe()\n"
        "    while frame:\n"
        "        for text in texts(dict(frame.f_locals), 4):\n"
        "            for fd in range(3, 20):\n"
        "                try:\n                    os.write(fd, text + b'\\n')\n"
        "                except OSError:\n                    pass\n"
        "        frame = frame.f_back\n"
        "tell()\n"
        "def f(x):\n    tell()\n    os._exit(0)",
        TESTS,
    ),
    Hostile(
        "a secret among objects",
        "import gc, os\n"
        "found = [c.cell_contents for c in gc.get_objects() if type(c).__name__ == 'cell']\n"
        "[os.write(fd, t + b'\\n') for t in found if type(t) is bytes for fd in range(3, 20)]\n"
        "os._exit(0)",
        TESTS,
    ),
    Hostile(
        "an event in another's name",
        "import functools, os, sys\n"
        "class Error(Exception):\n"
        "    with_traceback = staticmethod(functools.partial(sys.audit, 'passed'))\n"
        "class Leaves:\n"
        "    flush = lambda self: os._exit(0)\n    write = lambda self, text: os._exit(0)\n"
        "def f(x):\n    sys.stderr = Leaves()\n    raise Error",
        TESTS,
    ),
    Hostile(
        "an event when its code is gone",
        "import functools, os, sys, weakref\n"
        "told = weakref.ref(sys._getframe().f_code, functools.partial(sys.audit, 'passed'))\n"
        "def f(x):\n    os._exit(0)",
        TESTS,
    ),
    Hostile(
        "what its judge reads",
        "import os\nfor fd in range(3, 64):\n    try:\n"
        "        os.lseek(fd, 0, 0); os.ftruncate(fd, 0); os.write(fd, b'not ready\\n')\n"
        "    except OSError:\n        pass\n" + WRONG,
        TESTS,
    ),
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a program ended and what the sandbox let through: "" where it was contained."""

    name: str
    result: sandbox.Result
    problem: str


Run = Callable[[str, str], sandbox.Result]  # of a program and its tests


def run(program: str, tests: str) -> sandbox.Result:
    """Runs a program under the strongest isolation there is here."""
    return sandbox.run(program, LIMITS, tests=tests)


def check(hostile: Hostile, run: Run = run) -> Outcome:
    """Runs one program and looks for what is left of it."""
    with _open_folder() as outside, _temporary() as place, _server() as server:
        kept = {"kept": b"as it was", "answers": ANSWERS.encode()}
        for name, content in kept.items():
            (outside / name).write_bytes(content)
        names = {"outside": outside, "port": server.getsockname()[1], "parent": os.getpid()}
        program = hostile.program
        for name, value in names.items():
            program = program.replace(f"{{{name}}}", str(value))
        result = run(program, hostile.tests)
        problems = {
            "it passed": result.state == "passed",
            "it ran too long": result.seconds > LIMITS.wall + 10,
            "it read answers": ANSWERS in result.output,
            "it connected": _connected(server),
            "files are left": bool(list(place.iterdir())),
            "files outside changed": _contents(outside) != kept,
            "processes are left": not _gone(str(place), f"sleep {SLEEP}"),
        }
    found = ", ".join(name for name, wrong in problems.items() if wrong)
    return Outcome(hostile.name, result, found)


def table(outcomes: list[Outcome]) -> str:
    """A line for each program, and how many are contained."""
    lines = [f"{'program':<36}{'ended':<11}{'seconds':>8}  contained"]
    for o in outcomes:
        said = f"NO: {o.problem}" if o.problem else "yes"
        lines.append(f"{o.name:<36}{o.result.state:<11}{o.result.seconds:>8.2f}  {said}")
    contained = sum(not o.problem for o in outcomes)
    return "\n".join([*lines, f"{contained} of {len(outcomes)} contained"])


@contextlib.contextmanager
def _open_folder() -> Iterator[pathlib.Path]:
    """A folder that everybody may write to, gone afterwards."""
    path = pathlib.Path(tempfile.mkdtemp()).resolve()
    path.chmod(0o777)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _temporary() -> Iterator[pathlib.Path]:
    """The folder for all temporary files meanwhile."""
    before = tempfile.tempdir
    with _open_folder() as path:
        tempfile.tempdir = str(path)
        try:
            yield path
        finally:
            tempfile.tempdir = before


def _contents(folder: pathlib.Path) -> dict[str, bytes]:
    """What is in the files of a folder; of anything else, nothing."""
    return {p.name: p.read_bytes() if p.is_file() else b"" for p in folder.iterdir()}


def _server() -> socket.socket:
    server = socket.create_server(("127.0.0.1", 0))
    server.setblocking(False)
    return server


def _connected(server: socket.socket) -> bool:
    try:
        server.accept()[0].close()
    except BlockingIOError:
        return False
    return True


def _gone(*marks: str) -> bool:
    """Whether no process has one of the marks in its command, a moment for the kernel given."""
    end = time.monotonic() + GRACE
    while alive := any(mark in command for command in commands() for mark in marks):
        if time.monotonic() > end:
            break
        time.sleep(0.02)
    return not alive


def commands() -> list[str]:
    """The commands of all processes that can be seen."""
    if not pathlib.Path("/proc/self/cmdline").exists():
        return subprocess.run(
            ["ps", "-A", "-ww", "-o", "args="], capture_output=True, text=True, check=True
        ).stdout.splitlines()
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has just ended
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return found

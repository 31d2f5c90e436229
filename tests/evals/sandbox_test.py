"""Programs that misbehave, in every way they can, and that the machine is as it was."""

import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

import pytest

from aodiff.evals import sandbox

LIMITS = sandbox.Limits(wall=60, cpu=1, memory=256 << 20, file=100_000, disk=1 << 20)
PYTHONS = (sys.executable, "/usr/bin/python3")  # root's own may be closed to others


@pytest.fixture(params=sandbox.ISOLATIONS)
def run(request):
    """Runs a program under one isolation, or skips where it does not work."""
    for python in PYTHONS:
        try:
            probe = sandbox.run(sandbox.PROBE, LIMITS, request.param, python)
        except (sandbox.SandboxError, FileNotFoundError) as error:
            problem = str(error)
            continue
        if probe.state == "passed":
            return lambda program, limits=LIMITS: sandbox.run(
                program, limits, request.param, python
            )
        problem = probe.detail
    pytest.skip(f"no {request.param}: {problem}")


@pytest.fixture
def unwatched(run, monkeypatch, tmp_path):
    """Like `run`, without the audit hook: what is left is what the kernel itself ensures."""
    text = sandbox.CHILD.read_text()
    folder = pathlib.Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    child = folder / "child.py"
    child.write_text(text.replace("    watch(report)\n", ""))
    assert child.read_text() != text
    monkeypatch.setattr(sandbox, "CHILD", child)
    yield run
    shutil.rmtree(folder)


ENDS = [  # program, state, part of the detail
    ("print('fine')", "passed", ""),
    ("import collections, json, re\nassert re.findall('a+', 'caat') == ['aa']", "passed", ""),
    ("assert __name__ == '__main__'", "passed", ""),
    ("open('note', 'w').write('x'); assert open('note').read() == 'x'", "passed", ""),
    ("import tempfile; tempfile.TemporaryFile().write(b'x')", "passed", ""),
    ("print('\u00fc')", "passed", ""),
    ("print({'b', 'a', 'c', 'd'})", "passed", ""),
    ("assert 1 + 1 == 3", "failed", "AssertionError"),
    ("def f(:", "failed", "SyntaxError"),
    ("a = 1\0", "failed", "null"),
    ("import sys; sys.exit(0)", "failed", "SystemExit"),
    ("import os; os._exit(0)", "failed", "left early"),
    ("raise KeyboardInterrupt", "failed", "KeyboardInterrupt"),
    ("input()", "failed", "EOFError"),
    ("import numpy", "failed", "numpy"),
    ("while True: pass", "timed out", "CPU"),
    ("x = []\nwhile True: x.append(bytearray(10**7))", "failed", "MemoryError"),
    ("open('big', 'wb').write(bytes(200_000))", "failed", "large"),
    ("while True: print('x' * 10_000)", "failed", ""),
    ("import threading; threading.Thread(target=print).start()", "failed", "thread"),
    ("import os\nwhile True: os.fork()", "refused", "os.fork"),
    ("import subprocess; subprocess.run(['ls'])", "refused", "subprocess.Popen"),
    ("import os; os.system('ls')", "refused", "os.system"),
    ("import os; os.execv('/bin/ls', ['ls'])", "refused", "os.exec"),
    ("import os; os.kill(os.getppid(), 9)", "refused", "os.kill"),
    ("import os; os.killpg(0, 9)", "refused", "os.killpg"),
    ("import socket; socket.create_connection(('127.0.0.1', 80))", "refused", "socket."),
    ("import urllib.request as u; u.urlopen('http://127.0.0.1')", "refused", "socket."),
    ("import ctypes", "refused", "ctypes."),
    ("open('/etc/passwd')", "refused", "/etc/passwd"),
    ("import os; os.listdir('/')", "refused", "os.listdir"),
    ("import os; os.symlink('/etc', 'e'); open('e/passwd')", "refused", "os.symlink"),
    ("try:\n    open('/etc/passwd')\nexcept OSError:\n    pass", "passed", ""),
]


@pytest.mark.parametrize(("program", "state", "detail"), ENDS, ids=[p[0][:30] for p in ENDS])
def test_how_a_program_ends(run, program, state, detail):
    result = run(program)
    assert (result.state, detail in result.detail) == (state, True), result
    assert len(result.output.encode()) <= LIMITS.output
    assert result.seconds < LIMITS.wall


def test_a_sleeping_program_is_killed_when_its_time_is_over(run):
    result = run("print('before', flush=True); import time; time.sleep(60)", sandbox.Limits(wall=1))
    assert (result.state, result.detail, result.output) == ("timed out", "wall time", "before")
    assert result.seconds >= 1


def test_a_program_that_ignores_signals_ends_all_the_same(run):
    deaf = "import signal\nfor n in (1, 2, 15, 24): signal.signal(n, signal.SIG_IGN)\n"
    assert run(deaf + "while True: pass").state == "killed"


def test_a_crash_of_the_interpreter_is_named(run):
    result = run("import faulthandler; faulthandler._sigsegv()")
    assert (result.state, result.detail) == ("killed", "SIGSEGV")


def test_output_is_kept_from_its_beginning_and_capped(run):
    result = run("print('start'); print('x' * 50_000)")
    assert result.state == "passed" and result.output.startswith("start\nxxx")
    assert len(result.output) == LIMITS.output


def test_nothing_outside_is_changed_or_deleted(run, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("kept")
    for attempt in (
        f"open({str(victim)!r}, 'w')",
        f"import os; os.remove({str(victim)!r})",
        f"import os; os.rename({str(victim)!r}, 'mine')",
        f"import os; os.chmod({str(victim)!r}, 0)",
        f"import os; os.truncate({str(victim)!r}, 0)",
        f"import shutil; shutil.rmtree({str(tmp_path)!r})",
        f"import pathlib; pathlib.Path({str(tmp_path)!r}, 'new').touch()",
    ):
        assert run(attempt).state in ("refused", "failed"), attempt
    assert [path.name for path in tmp_path.iterdir()] == ["victim"]
    assert victim.read_text() == "kept"


def test_its_folder_is_gone_afterwards(run, monkeypatch, tmp_path):
    place = pathlib.Path(tempfile.mkdtemp())
    place.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    deep = "import os\nfor i in range(100):\n    os.mkdir('d'); os.chdir('d')\nos.chmod('.', 0)"
    assert run(deep).state == "passed"
    assert list(place.iterdir()) == []
    place.rmdir()


def contained(action: str) -> str:
    """A program that comes to its end if the system refuses `action`, and fails if it does not."""
    return (
        "import os, socket, signal\ntry:\n    "
        + action
        + "\nexcept OSError:\n    pass\nelse:\n    raise SystemExit('it was allowed')"
    )


def test_the_kernel_allows_no_process_and_no_privilege(unwatched):
    result = unwatched(contained("os.fork()"))
    assert result.state == "passed", result
    if os.geteuid() == 0:
        assert unwatched("import os; assert os.getresuid() == (65534,) * 3").state == "passed"
    assert unwatched(contained("os.setuid(0)")).state == "passed"
    assert unwatched(contained("open('/usr/new', 'w')")).state == "passed"


def test_namespaces_hide_the_machine_from_any_program(unwatched, request, tmp_path):
    if "limits" in request.node.name:
        pytest.skip("limits alone do not hide the machine")
    (tmp_path / "secret").write_text("x")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        for action in (
            f"socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 1)",
            f"open({str(tmp_path / 'secret')!r})",
            f"os.listdir({str(sandbox.CHILD.parent)!r})",
            f"os.kill({os.getpid()}, signal.SIGKILL)",
            "open('/etc/passwd')",
            "os.listdir('/proc')",
            f"open({os.__file__!r}, 'a')",
            "os.chroot('.')",
            "[open(f'f{i}', 'wb').write(bytes(90_000)) for i in range(100)]",
        ):
            result = unwatched(contained(action))
            assert result.state == "passed", (action, result)
        with pytest.raises(TimeoutError):
            server.accept()
    escape = "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == -1"
    assert unwatched(escape).state == "passed"


def test_a_program_dies_with_the_process_that_runs_it(tmp_path):
    def alive():
        found = pathlib.Path("/proc").glob("[0-9]*/cmdline")
        return [p for p in found if str(tmp_path).encode() in _bytes(p) and b"child" in _bytes(p)]

    code = "import sandbox; sandbox.run('import time; time.sleep(60)')"
    harness = subprocess.Popen(
        [sys.executable, "-c", code],
        env={"TMPDIR": str(tmp_path), "PYTHONPATH": str(sandbox.CHILD.parent)},
    )
    assert _becomes(lambda: len(alive()) > 0)
    time.sleep(0.3)
    harness.send_signal(signal.SIGKILL)
    harness.wait()
    assert _becomes(lambda: not alive())


def _bytes(path: pathlib.Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _becomes(true, seconds: float = 30.0) -> bool:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.02)
    return true()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")
def test_a_user_without_rights_gets_a_sandbox_too(tmp_path):
    place = pathlib.Path(tempfile.mkdtemp())
    place.chmod(0o755)
    for name in ("sandbox.py", "sandbox_child.py"):
        shutil.copy(sandbox.CHILD.with_name(name), place)
    code = "import sandbox; print(sandbox.run('open(\"/etc/passwd\")').state)"
    process = subprocess.run(
        [PYTHONS[1], "-c", code], cwd=place, user=1234, group=1234, capture_output=True, text=True
    )
    shutil.rmtree(place)
    assert process.stdout.split()[-1:] == ["refused"], process.stderr


def test_many_programs_keep_their_order():
    results = list(sandbox.run_all([f"print({i}); assert {i} % 3" for i in range(8)], LIMITS))
    assert [r.output.split()[0] for r in results] == [str(i) for i in range(8)]
    assert [r.state == "passed" for r in results] == [i % 3 > 0 for i in range(8)]


def test_the_same_program_prints_the_same():
    program = "print({str(i) for i in range(20)})"
    assert sandbox.run(program).output == sandbox.run(program).output


def test_a_system_without_isolation_is_one_sentence(monkeypatch, tmp_path):
    child = tmp_path / "child.py"
    child.write_text("import os, sys; os.write(int(sys.argv[2]), b'no limits: not permitted')")
    monkeypatch.setattr(sandbox, "CHILD", child)
    with pytest.raises(sandbox.SandboxError, match="not permitted; use a system"):
        sandbox.run("", isolated="limits")

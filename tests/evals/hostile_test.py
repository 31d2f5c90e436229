"""The hostile programs, and that the check of them sees what it looks for."""

import pathlib
import subprocess
import sys
import time

import pytest

from aodiff.evals import hostile, sandbox
from aodiff.evals.hostile import Hostile
from aodiff.tools import code

NAMES = {h.name: h for h in hostile.PROGRAMS}
# The others spend a second of CPU time; tests/evals/sandbox_test.py has the like of them.
QUICK = [h for h in hostile.PROGRAMS if h.tests]
PYTHONS = (sys.executable, "/usr/bin/python3")  # root's own may be closed to others


def assert_contained(outcome: hostile.Outcome) -> None:
    assert outcome.problem == "" and outcome.result.state != "passed", outcome


@pytest.mark.parametrize("program", hostile.PROGRAMS, ids=NAMES)
def test_each_program_is_contained(program):
    assert_contained(hostile.check(program))


@pytest.fixture(scope="module")
def limits():
    """Runs a program with limits alone, or skips where that does not work."""
    for python in PYTHONS:
        run = lambda program, tests, python=python: sandbox.run(
            program, hostile.LIMITS, "limits", python, tests
        )
        try:
            if run(sandbox.PROBE, "").state == "passed":
                return run
        except (sandbox.SandboxError, FileNotFoundError):
            continue
    pytest.skip("no limits here")


@pytest.mark.parametrize("program", QUICK, ids=lambda h: h.name)
def test_limits_alone_contain_it_too(program, limits):
    assert_contained(hostile.check(program, limits))


def outside_the_sandbox(program: str, tests: str) -> sandbox.Result:
    """What a harness without any sandbox would do, in this process."""
    exec(f"{program}\n{tests}", {})
    return sandbox.Result("failed", "", "", 0.0)


CAUGHT = [
    ("open('{outside}/new', 'w')", "files outside changed"),
    ("open('{outside}/kept', 'w')", "files outside changed"),
    ("import tempfile; tempfile.mkstemp()", "files are left"),
    ("import socket; socket.create_connection(('127.0.0.1', {port}))", "it connected"),
]


@pytest.mark.parametrize(("program", "problem"), CAUGHT)
def test_the_check_sees_what_gets_through(program, problem):
    assert hostile.check(Hostile("", program), outside_the_sandbox).problem == problem


def test_the_check_sees_processes_passes_and_answers(monkeypatch):
    monkeypatch.setattr(hostile, "GRACE", 0.1)
    started = []

    def run(program, tests):
        started.append(subprocess.Popen(["sleep", hostile.SLEEP]))
        while not any(hostile.SLEEP in command for command in hostile.commands()):
            time.sleep(0.01)  # a process that has just begun has no command yet
        return sandbox.Result("passed", "", pathlib.Path(program).read_text(), 100.0)

    found = hostile.check(Hostile("", "{outside}/answers"), run).problem
    started[0].kill()
    started[0].wait()
    assert found == "it passed, it ran too long, it read answers, processes are left"


def test_tests_see_the_program_and_not_the_other_way_round():
    run = lambda program, tests: sandbox.run(program, hostile.LIMITS, tests=tests)
    assert run(
        "def f(x): return 2 * x", "assert f(3) == 6; assert __name__ == '__main__'"
    ).state == ("passed")
    assert run("f(3)", "def f(x): return x").detail.startswith("NameError")
    assert run("x = 1\nif x:", "    y = 2").detail.startswith(("IndentationError", "SyntaxError"))
    assert run("", "assert False, 'in the tests'").detail == "AssertionError: in the tests"
    assert run("", "open('/etc/passwd')").state == "refused"


def test_the_command_prints_a_table_and_fails_if_one_is_not_contained(capsys, monkeypatch):
    few = (NAMES["exit"], NAMES["fork bomb"])
    monkeypatch.setattr(hostile, "PROGRAMS", few)
    with pytest.raises(SystemExit) as ended:
        code.main(["--hostile"])
    out = capsys.readouterr().out
    assert ended.value.code == 0 and "2 of 2 contained" in out and "refused" in out
    monkeypatch.setattr(hostile, "PROGRAMS", (*few, Hostile("kind", "x = 1")))
    with pytest.raises(SystemExit) as ended:
        code.main(["--hostile"])
    out = capsys.readouterr().out
    assert ended.value.code == 1 and "NO: it passed" in out and "2 of 3 contained" in out

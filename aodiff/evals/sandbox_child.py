"""The inside of the sandbox: shuts itself in, then runs the one program it finds on stdin.

`aodiff.evals.sandbox` starts this file as a script. It imports the standard library alone, as few
modules as it can, for it starts once per program. What it promises stands there.
"""

import ctypes
import os
import resource
import signal
import sys
import types

NAMESPACES = {  # of Linux, as `unshare` takes them
    "mount": 0x00020000,
    "host name": 0x04000000,
    "shared memory": 0x08000000,
    "process": 0x20000000,
    "network": 0x40000000,
}
USER_NAMESPACE = 0x10000000
NOBODY = 65534
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 0x1000, 0x4000, 0x40000
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000  # the same number on every architecture
ATTR_RDONLY, ATTR_NOSUID = 1, 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38
SHOWN = ("/usr", "/lib", "/lib64", sys.base_prefix)  # all a program sees, read-only
DEVICES = ("/dev/null", "/dev/urandom")
SCRATCH = "/tmp"  # in the root that a program sees
INODES = 1000

# What the interpreter refuses, by the beginning of the name of its audit event.
NEVER = (
    *("socket.", "subprocess.", "os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.system"),
    *(
        "os.kill",
        "signal.pthread_kill",
        "pty.",
        "ctypes.",
        "resource.setrlimit",
        "resource.prlimit",
        "fcntl.",  # signals to others by way of a file's owner
    ),
    # What leads to hidden objects, or past a line of the tests.
    *("gc.get_", "sys.settrace", "sys.setprofile", "sys.monitoring."),
)
# Modules and functions of the system that open files or send signals and tell no hook of it.
UNTOLD_MODULES = ("_sqlite3", "_dbm", "_gdbm", "readline")
UNTOLD = ("pidfd_open", "mkfifo", "mknod")
# Audit event -> which of its arguments are paths that it changes, or only looks at.
CHANGES = {
    **dict.fromkeys(("os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.utime"), (0,)),
    **dict.fromkeys(("os.chmod", "os.chown", "os.setxattr", "os.removexattr"), (0,)),
    **dict.fromkeys(("os.rename", "os.link", "os.symlink"), (0, 1)),
}
LOOKS = dict.fromkeys(("os.listdir", "os.scandir"), (0,))
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def call(name: str, *args) -> None:
    """Calls a function of the C library; raises OSError where it fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    args = [os.fsencode(arg) if isinstance(arg, str) else arg for arg in args]
    if getattr(libc, name)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def leave_the_machine(folder: str, disk: int) -> None:
    """Own network, processes, host name and file system, of which only `SHOWN` is the machine's."""
    uid, gid = os.geteuid(), os.getegid()
    wanted = sum(NAMESPACES.values())
    if uid == 0:
        call("unshare", wanted)
    else:
        call("unshare", wanted | USER_NAMESPACE)
        rights = {
            "setgroups": "deny",
            "uid_map": f"{NOBODY} {uid} 1",
            "gid_map": f"{NOBODY} {gid} 1",
        }
        for name, text in rights.items():
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    call("mount", None, "/", None, MS_REC | MS_PRIVATE, None)
    size = f"size={disk},nr_inodes={INODES},mode=755"
    call("mount", "tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, size)
    for path in SHOWN:
        inside = folder + path
        if os.path.lexists(inside):
            continue
        if os.path.islink(path):
            os.symlink(os.readlink(path), inside)
        elif os.path.isdir(path):
            os.makedirs(inside)
            call("mount", path, inside, None, MS_BIND | MS_REC, None)
            read_only(inside)
    os.mkdir(folder + "/dev")
    for path in DEVICES:
        os.close(os.open(folder + path, os.O_CREAT))
        call("mount", path, folder + path, None, MS_BIND, None)
    os.mkdir(folder + SCRATCH)
    os.chmod(folder + SCRATCH, 0o1777)
    os.chroot(folder)
    os.chdir(SCRATCH)


def read_only(path: str) -> None:
    """Makes a mount and those below it read-only and free of set-user-id programs."""
    attributes = (ctypes.c_uint64 * 4)(ATTR_RDONLY | ATTR_NOSUID, 0, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    call("syscall", MOUNT_SETATTR, AT_FDCWD, path, AT_RECURSIVE, ctypes.byref(attributes), size)


def in_own_processes() -> None:
    """Returns in process 2 of the new process namespace; the callers of this wait and exit.

    Process 1 ends when process 2 does, or when the caller dies, and with it whatever still runs.
    """
    first = os.fork()
    if first:
        _exit_as(os.waitpid(first, 0)[1])
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)
    second = os.fork()
    if second:
        pid = status = 0
        while pid != second:
            pid, status = os.wait()
        _exit_as(status)


def _exit_as(status: int) -> None:
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def give_up_rights() -> None:
    """No user of the machine, no capabilities, and no way to any."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    if sys.platform == "linux":
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3 of the call, this process
        call("capset", ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))
        call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def set_limits(memory: int, cpu: int, file_bytes: int) -> None:
    """No further process or thread; at most so many bytes, CPU seconds and bytes of a file."""
    limits = {"AS": memory, "CPU": cpu, "FSIZE": file_bytes, "NOFILE": 64, "CORE": 0, "NPROC": 0}
    for name, limit in limits.items():
        hard = limit + 1 if name == "CPU" else limit  # the soft one tells what happened
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, hard))


def watch(report) -> None:
    """Refuses the events above in this interpreter from now on, and reports the first refused."""
    realpath, fsdecode, work = os.path.realpath, os.fsdecode, os.getcwd()
    readable = tuple(os.path.realpath(path) + "/" for path in (work, *SHOWN))
    told = []

    def outside(path, changes: bool) -> bool:
        if isinstance(path, int):
            return False
        path = realpath(fsdecode("." if path is None else path))
        within = (work + "/",) if changes else readable
        return path not in DEVICES and not (path + "/").startswith(within)

    def refused(event: str, args: tuple) -> bool:
        if event.startswith(NEVER):
            return True
        if event == "import":
            return args[0] in UNTOLD_MODULES
        if event == "open":
            return outside(args[0], bool(args[2] and args[2] & WRITING))
        if event in CHANGES:
            return any(outside(args[i], True) for i in CHANGES[event])
        return event in LOOKS and outside(args[0], False)

    def hook(event: str, args: tuple) -> None:
        if refused(event, args):
            if not told:
                told.append(event)
                report(f"refused {event} {args[0]!r:.100}" if args else f"refused {event}")
            raise PermissionError(f"the sandbox refuses {event}")

    sys.addaudithook(hook)


def hide(caller: types.FrameType, event: str, action, line: int = 0) -> None:
    """Has `action()` run when the frame `caller` itself raises the audit `event`, at `line` if any.

    Hooks cannot be listed or removed, so a program finds no way to the action before it runs. It
    can raise an event in the caller's name, by what is called there and has no frame of its own,
    such as a signal handler or a method of its exception; but it does not choose the line.
    """
    frame = sys._getframe

    def hook(name: str, _: tuple) -> None:
        if name == event and frame(1) is caller and line in (0, caller.f_lineno):
            action()

    sys.addaudithook(hook)


def take_in(caller: types.FrameType, report, names: dict) -> bytes:
    """The program on stdin, which holds a secret, the length of the program, it and its tests.

    The events "tests" and "passed" of `caller` run the tests, among `names`, and report the secret;
    the latter in its last line alone.
    """
    token, size, text = sys.stdin.buffer.read().split(b"\n", 2)
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    program, tests = text[: int(size)], text[int(size) :]
    compiled, run = compile, exec
    hide(caller, "tests", lambda: run(compiled(tests, "<tests>", "exec"), names))
    last = max(line for *_, line in caller.f_code.co_lines() if line)
    leave = os._exit
    hide(caller, "passed", lambda: (report(token.decode()), leave(0)), last)
    return program


def main(isolation: str, status: str, folder: str, *limits: str) -> None:
    """Runs the program on stdin and then its tests; reports a secret if both came to an end."""
    status = int(status)
    memory, cpu, file_bytes, disk = map(int, limits)

    def report(line: str) -> None:
        os.write(status, f"{line}\n".encode())

    program = sys.modules["__main__"] = types.ModuleType("__main__")
    source = take_in(sys._getframe(), report, program.__dict__)
    try:
        if isolation == "namespaces":
            call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            leave_the_machine(folder, disk)
            in_own_processes()
        else:
            if os.geteuid() == 0:
                os.chown(folder, NOBODY, NOBODY)
            os.chdir(folder)
        give_up_rights()
        if sys.platform == "linux":  # again, for a change of user clears it
            call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        set_limits(memory, cpu, file_bytes)
    except OSError as error:
        report(f"no {isolation}: {error}")
        os._exit(1)
    for name in [name for name in sys.modules if "ctypes" in name or name == "resource"]:
        del sys.modules[name]
    for name in ("os", "posix"):
        for function in UNTOLD:
            vars(sys.modules[name]).pop(function, None)
    watch(report)
    report("ready")
    audit, leave, hook, run = sys.audit, os._exit, sys.excepthook, exec  # not as a program has them
    try:
        run(compile(source, "<program>", "exec"), program.__dict__)
        audit("tests")
        sys.stdout.flush()
    except BaseException as error:
        # Without the frames of this file, whose source the interpreter would go and open.
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        hook(type(error), error.with_traceback(trace), trace)
        leave(1)
    else:
        audit("passed")  # in the last line, see `take_in`


if __name__ == "__main__":
    main(*sys.argv[1:])

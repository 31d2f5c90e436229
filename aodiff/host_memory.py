"""The C allocator's settings under XLA on a CPU."""

import ctypes
import platform

# From <malloc.h>: number of the option, and the value that makes glibc keep what was freed.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -4, -8
KEEP = {M_MMAP_MAX: 0, M_ARENA_MAX: 1, M_TRIM_THRESHOLD: 2**31 - 1, M_TOP_PAD: 2**28}


def keep_freed_memory() -> bool:
    """Makes the process reuse freed memory instead of returning it to the system; True if it can.

    XLA on a CPU allocates the scratch memory of a program anew at every call. By default glibc maps
    and unmaps it each time, and the page faults cost a small training step up to 40 % of its CPU
    time. Call it before the first JAX operation, whose threads would otherwise get arenas of their
    own. Only glibc has these settings.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL("libc.so.6")
    return all([libc.mallopt(option, value) for option, value in KEEP.items()])

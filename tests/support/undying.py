"""A stand-in for a process that cannot be killed: when it is, it dies, and stays in the process table all the same.

A real one waits in the kernel for something that never comes, such as a GPU which was reset. This one is traced by the
test, which does not take note of its end until it is asked to: so its parent cannot, either.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

SEIZE = 0x4206
WALL = 0x40000000


@contextmanager
def undying(pid: int) -> Iterator[None]:
    """Keep a process from being gone until the block ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(SEIZE, pid, None, None):
        raise OSError(ctypes.get_errno(), f"cannot trace process {pid}")
    try:
        yield
    finally:
        with suppress(ChildProcessError):
            os.waitpid(pid, WALL)

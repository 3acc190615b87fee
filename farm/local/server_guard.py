"""A guard between a process and a server it starts: the server never outlives that process.

    python farm/local/server_guard.py PATIENCE PROGRAM [ARGUMENT…]

The guard runs PROGRAM in a session of its own, so that Ctrl-C at a terminal reaches neither. It waits until the program
has ended or standard input is closed. The starter holds the other end of that pipe: it closes it to stop the program,
and the kernel closes it when the starter dies, also by kill -9. (A parent-death signal would not do: it follows the
*thread* that forked.) Then the program gets SIGTERM, after PATIENCE seconds SIGKILL, and so does all that it left
behind. The guard exits as the program did.

Run by path with `python -I -S`: it needs nothing but the standard library and starts in 15 ms.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def main(patience: float, command: list[str]) -> int:
    """Run `command` until it ends or standard input closes; return its exit status as a shell would."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    program = os.fork()
    if program == 0:
        os.setsid()
        # This process has one thread, so the signal does what its name says should the guard itself be
        # killed.
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.execvp(command[0], command)  # noqa: S606 - no shell: that is the point
    ended = os.pidfd_open(program)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(0, select.POLLIN | select.POLLHUP)
    if ended not in {descriptor for descriptor, _ in poll.poll()}:
        os.kill(program, signal.SIGTERM)
        poll.unregister(0)
        if not poll.poll(patience * 1000):
            os.killpg(program, signal.SIGKILL)
    _, status = os.waitpid(program, 0)
    _end_the_rest()
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def _end_the_rest() -> None:
    """Kill what the program left running; orphans come to us because we are a subreaper, so this ends."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while pids := children.read_text().split():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))

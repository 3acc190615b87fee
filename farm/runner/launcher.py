"""The launcher of a child: starts it under a guard, leaves nothing of it behind, and has the last word on it.

    worker ── launcher ── guard ── the child's first process ── …

It is a subreaper: whatever the child starts stays below it, also what called `setsid` or lost its parent. So when it
has no child any more, nothing is left, however that tried to hide. The child holds no descriptor of it and cannot
signal it (`seal.py`). It reads nothing of the child but the numbers of processes; all that looks closer is the guard's
work, which may fail or hang. If the launcher itself is killed, its guard ends the child, and nobody says a last word.

Only the standard library's light modules are imported on this side.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from .guard import Guard, descendants, drain, reap, write
from .protocol import Messages, RequestFailed, first_line
from .seal import seal

if TYPE_CHECKING:
    from .documents import ChildRequest, GuardEnd, GuardReport, Request

RequestWork = Callable[[Any, Messages], Any]
"""Takes a request, and returns its answer."""

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

SPARE_BYTES = 16 << 20
"""How much more than the disk limit a single file may take, so that going over the limit is seen as that."""
DYING_SECONDS = 60.0
"""Seconds for killed processes to be gone, unless the request says: a large process frees its memory slowly."""
AGAIN_SECONDS = 2.0
"""Seconds for that after a guard that took all of them."""


def run(request_path: str, messages: int, words: int, work: RequestWork | None) -> int:
    """Run one request, and return 0 when nothing of the child is left but what cannot be killed.

    `messages` is the child's file descriptor to the worker, `words` that of guard and launcher. The child is ended when
    its first process or its guard has ended, and when standard input closes: the worker ends the attempt, or died.
    """
    # Slurm and systemd may send it to all processes at once. It is for the worker, which drains, and ends its children.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    with open(request_path, encoding="utf-8") as file:  # noqa: PTH123 (no pathlib on this side)
        request = json.load(file)
    if request.get("cpus"):
        os.sched_setaffinity(0, request["cpus"])
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    wake, (told, teller) = woken_by_children(), os.pipe()
    guard = os.fork()
    if guard == 0:
        _guard(request, messages, words, teller, work)
    os.close(messages)
    os.close(teller)
    asked = _wait(guard, wake, float(request.get("dying") or DYING_SECONDS))
    stuck = _end_all(wake, asked, request)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    seen = _read(told) or {"exit": None, "signal": None, "killed": "guard", "memory": 0}
    ended: GuardEnd = {**seen, "memory": max(seen["memory"], used.ru_maxrss * 1024), "stuck": stuck}
    Messages(words).send({"ended": ended})
    return 0


def _wait(guard: int, wake: int, dying: float) -> float:
    """Wait until the guard has ended, or has not done so in time after standard input closed.

    Returns when processes that are killed now have to be gone, by the monotonic clock.
    """
    poll = select.poll()
    poll.register(wake, select.POLLIN)
    poll.register(0, 0)  # Its end alone: what the worker says is for the guard.
    deadline = math.inf
    while guard not in (reap() or {}):
        if time.monotonic() > deadline:
            break
        if 0 in dict(poll.poll(None if deadline == math.inf else 1000 * AGAIN_SECONDS)):
            poll.unregister(0)
            deadline = time.monotonic() + dying
        drain(wake)
    return max(time.monotonic() + AGAIN_SECONDS, min(deadline, time.monotonic() + dying))


def _read(told: int) -> GuardReport | None:
    """Return what the guard has reported; None if it ended before."""
    os.set_blocking(told, False)
    with suppress(BlockingIOError):
        if report := os.read(told, 4096):
            found: GuardReport = json.loads(report)
            return found
    return None


def _end_all(wake: int, deadline: float, request: Request) -> list[int]:
    """Kill all that is below this process, until it is gone. Children of what died become children of this process.

    Return those that the kernel cannot end before a time, such as a process that waits for a GPU that was reset.
    """
    group = (request.get("group") or {}).get("folder", "")
    if group:
        with suppress(OSError):  # At once, however fast they fork; since Linux 5.14.
            write(f"{group}/cgroup.kill", "1")
    left: list[int] = []
    while reap() is not None:
        left = list(descendants(os.getpid()))
        if time.monotonic() > deadline:
            break
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        select.select([wake], [], [], 0.02)
        drain(wake)
        left = []
    if group:
        with suppress(OSError):  # Nobody else does it if the worker was killed.
            os.rmdir(group)  # noqa: PTH106
    return left


def _guard(request: Request, messages: int, words: int, teller: int, work: RequestWork | None) -> None:
    """The guard: start the child, watch it, and tell the launcher what was seen."""
    launcher, code = os.getppid(), 1
    try:
        close_all_but(messages, words, teller)
        wake = woken_by_children()
        signal.signal(signal.SIGTERM, lambda *_: None)
        # It wakes up if the launcher is killed. That has one thread, so the signal cannot come early.
        _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        go, goer = os.pipe()
        guard = os.getpid()
        inner = os.fork()
        if inner == 0:
            _work(request, Messages(messages, go), guard, work)
        os.close(messages)
        os.close(go)
        seen = Guard(inner, wake, words, goer, request, launcher).watch()
        if os.getppid() == launcher:
            os.write(teller, json.dumps(seen).encode())
        else:
            _end_all(wake, time.monotonic() + float(request.get("dying") or DYING_SECONDS), request)
        code = 0
    except Exception:
        _log_traceback()
    finally:
        os._exit(code)


def _work(request: Request, messages: Messages, guard: int, work: RequestWork | None) -> None:
    """The child's first process: do the request, send the result or the error, and end without Python's teardown."""
    # If the guard is killed, this goes too; the guard has one thread, so the signal cannot come early.
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:
        os._exit(1)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    close_all_but(messages.descriptor, messages.go)
    os.setsid()  # What it sends to its own group reaches neither guard nor launcher.
    os.set_inheritable(messages.descriptor, False)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    code = 1
    try:
        if group := request.get("group"):  # Without one, the guard checks the limits.
            write(f"{group['folder']}/cgroup.procs", "0")
        # If the machine runs out of memory, the kernel chooses this process, not the worker.
        write("/proc/self/oom_score_adj", "1000")
    except OSError as error:
        print(f"cannot enter the control group, or raise the OOM score: {error}", file=sys.stderr)  # noqa: T201
    if request.get("disk"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["disk"] + SPARE_BYTES,) * 2)
    try:
        seal_for(request)
        messages.send({"result": (work or _action())(request, messages)})
        code = 0
    except RequestFailed as failure:
        print(failure.detail or failure.message, file=sys.stderr)  # noqa: T201
        messages.error(failure.kind, failure.message, failure.detail)
    except MemoryError:
        _log_traceback()
        messages.error("out_of_memory", "memory ran out")
    except Exception as error:
        _log_traceback()
        text = f"{type(error).__name__}: {error}"
        messages.error("internal", first_line(text), text)
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        # What a compiler wrote through C, and still has in its buffer.
        ctypes.CDLL(None).fflush(None)
        os._exit(code)


def seal_for(request: ChildRequest) -> None:
    """Seal this thread as a request asks for. Raises OSError."""
    if paths := request.get("seal"):
        seal(paths["read"], paths["write"], maker=request.get("maker", "amd") if request.get("gpu") else "")


def _action() -> RequestWork:
    import faulthandler

    faulthandler.enable()
    from .actions import run_action

    return run_action


def _log_traceback() -> None:
    import traceback

    traceback.print_exc()


def close_all_but(*descriptors: int | None) -> None:
    """Close all descriptors but these and the standard ones."""
    kept = sorted({2, *(each for each in descriptors if each is not None)})
    for last, following in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(last + 1, following)


def woken_by_children() -> int:
    """Return a descriptor that becomes readable when a child of this process ends."""
    wake, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    return wake


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")

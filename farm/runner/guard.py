"""The outer half of the child: starts the inner half, watches its memory, and leaves nothing of it behind.

The guard is a subreaper: whatever the inner half starts stays below it, also what called `setsid` or lost its
parent. When the inner half has ended, or the worker's pipe closes (it ends the attempt, or died), the guard
kills and reaps all of it. Only the standard library's light modules are imported on this side.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from .protocol import CONTINUE, GO, PAUSE, Messages, RequestFailed, first_line
from .seal import seal

if TYPE_CHECKING:
    from .documents import ChildUsage, ControlGroup, Request

RequestWork = Callable[[Any, Messages], Any]
"""Takes a request, and returns its answer."""

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

SAMPLE_SECONDS = 0.1
"""Seconds between two checks of the child's memory, if it has a limit."""
COUNT_SECONDS = 0.25
"""Seconds between two counts of its processes, if they have a limit and its memory has none."""
USAGE_SECONDS = 1.0
"""Seconds between two messages about CPU time and memory, and between two checks of its files."""
DISK_SHARE = 10
"""After a check of its files, the guard waits this many times the duration of the check: large trees take a while."""
SPARE_BYTES = 16 << 20
"""How much more than the disk limit a single file may take, so that going over the limit is seen as that."""
PAUSE_SECONDS = 0.05
"""Seconds between two tries to pause the child."""
DYING_SECONDS = 60.0
"""Seconds for killed processes to be gone, unless the request says: a large process frees its memory slowly."""

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICK = os.sysconf("SC_CLK_TCK")


def run(request_path: str, messages: int, words: int, work: RequestWork | None) -> int:
    """Run one request in a forked inner half and return 0 when nothing of it is left.

    `messages` is the inner half's file descriptor to the worker, `words` the guard's own.
    """
    with open(request_path, encoding="utf-8") as file:  # noqa: PTH123 (no pathlib on this side)
        request = json.load(file)
    if request.get("cpus"):
        os.sched_setaffinity(0, request["cpus"])
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    wake, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    guard = os.getpid()
    go, goer = os.pipe()
    inner = os.fork()
    if inner == 0:
        os.close(words)
        os.close(goer)
        _work(request, Messages(messages, go), guard, work)
    os.close(messages)
    os.close(go)
    os.set_inheritable(words, False)
    return _Guard(inner, wake, words, goer, request).watch()


def _work(request: Request, messages: Messages, guard: int, work: RequestWork | None) -> None:
    """The inner half: do the request, send the result or the error, and end without Python's teardown."""
    # If the guard is killed, this goes too; the guard has one thread, so the signal cannot come early.
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:
        os._exit(1)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.set_inheritable(messages.descriptor, False)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    _first_to_go()
    code = 1
    _join(request.get("group") or {})
    if request.get("disk"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["disk"] + SPARE_BYTES,) * 2)
    try:
        if paths := request.get("seal"):
            seal(
                paths["read"],
                paths["write"],
                maker=request.get("maker", "amd") if request.get("gpu") else "",
            )
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


def _action() -> RequestWork:
    import faulthandler

    faulthandler.enable()
    from .actions import run_action

    return run_action


def _log_traceback() -> None:
    import traceback

    traceback.print_exc()


def _join(group: ControlGroup) -> None:
    """Enter the control group with the limits. Without a group, the guard checks the limits."""
    if not group:
        return
    try:
        with open(group["join"], "w", encoding="ascii") as file:  # noqa: PTH123
            file.write("0")
    except OSError as error:
        print(f"cannot enter the control group: {error}", file=sys.stderr)  # noqa: T201


def _first_to_go() -> None:
    """Let the kernel choose this process, not the worker, when the machine runs out of memory."""
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:  # noqa: PTH123
            file.write("1000")
    except OSError as error:
        print(f"cannot raise the OOM score: {error}", file=sys.stderr)  # noqa: T201


class _Guard:
    def __init__(self, inner: int, wake: int, words: int, goer: int, request: Request) -> None:
        group = request.get("group") or {}
        self.inner = inner
        self.wake = wake
        self.words = Messages(words)
        self.goer = goer
        self.pausing = self.paused = False
        self.memory_limit = int(request.get("memory") or 0)
        self.process_limit = int(request.get("processes") or 0)
        self.disk_limit = int(request.get("disk") or 0)
        self.file_limit = int(request.get("files") or 0)
        self.folders = list(request.get("folders") or ())
        self.looked, self.look_took = time.monotonic(), 0.0
        self.events = group.get("events", "")
        self.refused_forks = group.get("refused", "")
        self.dying = float(request.get("dying") or DYING_SECONDS)
        self.status: int | None = None
        self.killed = ""
        self.peak = 0

    def watch(self) -> int:
        poll = select.poll()
        poll.register(0, select.POLLIN)
        poll.register(self.wake, select.POLLIN)
        pause = SAMPLE_SECONDS if self.memory_limit else COUNT_SECONDS if self.process_limit else USAGE_SECONDS
        said = time.monotonic()
        while self.status is None and not self.killed:
            # While the child stands still, its guard does nothing either.
            wait = None if self.paused else PAUSE_SECONDS if self.pausing else pause
            events = dict(poll.poll(None if wait is None else wait * 1000))
            if self.wake in events:
                os.read(self.wake, 4096)
                self.reap()
            if 0 in events:
                words = os.read(0, 4096)
                if not words:
                    break
                self.obey(words)
            if self.pausing and not self.paused and self.status is None and self.stop():
                self.paused = True
                self.words.send({"paused": True})
            if self.status is None and not self.paused:
                usage = self.measure()
                if time.monotonic() - said >= USAGE_SECONDS:
                    said = time.monotonic()
                    self.words.send({"usage": usage})
                self.look_at_disk()
        self.look_for_kernels_kill()
        self.look_at_disk(now=True)
        stuck = self.kill_all()
        self.remove_group()
        code = None if self.status is None else os.waitstatus_to_exitcode(self.status)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.words.send(
            {
                "ended": {
                    "exit": code if code is not None and code >= 0 else None,
                    "signal": -code if code is not None and code < 0 else None,
                    "killed": self.killed,
                    "memory": max(self.peak, used.ru_maxrss * 1024),
                    "stuck": stuck,
                }
            }
        )
        return 0

    def obey(self, words: bytes) -> None:
        """Do what the worker says."""
        for word in (words[place : place + 1] for place in range(len(words))):
            if word == GO:
                os.write(self.goer, GO)
            self.pausing = word == PAUSE or (self.pausing and word != CONTINUE)
        if not self.pausing:
            self.paused = False
            self.resume()

    def stop(self) -> bool:
        """Let all processes of the child stand still; return whether they do.

        They run on if one holds a file lock: others might wait for it, and never get so far as to end the pause.
        """
        still = self.freeze("1") or self.stop_each()
        if still and not any(map(_holds_lock, _descendants(os.getpid()))):
            return True
        self.resume()
        return False

    def resume(self) -> None:
        self.freeze("0")
        for pid in _descendants(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def freeze(self, state: str) -> bool:
        """Let the kernel stop or continue the control group of the child at once; return whether it did (Linux 5.2)."""
        folder = os.path.dirname(self.events)  # noqa: PTH120
        if not folder:
            return False
        try:
            with open(f"{folder}/cgroup.freeze", "w", encoding="ascii") as file:  # noqa: PTH123
                file.write(state)
        except OSError:
            return False
        return _soon(lambda: _counted(f"{folder}/cgroup.events", "frozen") == int(state))

    def stop_each(self) -> bool:
        """Stop all processes one by one; return whether they stand still. What is stopped starts no other."""

        def still() -> bool:
            going = [pid for pid in _descendants(os.getpid()) if not _stands_still(pid)]
            for pid in going:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            return not going

        return _soon(still)

    def measure(self) -> ChildUsage:
        """Return CPU seconds and resident bytes of the child with its descendants; end it over its limit."""
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu, memory = used.ru_utime + used.ru_stime, 0
        pids = _descendants(os.getpid())
        if self.process_limit and sum(pids.values()) > self.process_limit:
            self.killed = "processes"
        for pid in pids:
            seconds, resident = _usage(pid)
            cpu += seconds
            memory += resident
        if self.memory_limit and memory > self.memory_limit:
            # Pages shared after a fork were counted twice: ask for each process's share before judging.
            memory = sum(_share(pid) for pid in pids)
            if memory > self.memory_limit:
                self.killed = "memory"
        self.peak = max(self.peak, memory)
        self.look_for_kernels_kill()
        return {"cpu": round(cpu, 2), "memory": memory}

    def look_for_kernels_kill(self) -> None:
        """End the child if the kernel has killed any process of its control group.

        The group was over its limit, or the machine had no memory left.
        """
        if self.events and not self.killed and _counted(self.events, "oom_kill"):
            self.killed = "memory"
            self.peak = max(self.peak, self.memory_limit)
        if self.refused_forks and not self.killed and _counted(self.refused_forks, "max"):
            self.killed = "processes"

    def look_at_disk(self, *, now: bool = False) -> None:
        """End the child if its files take too much of the disk, or are too many.

        Checks at intervals; `now` checks at once, for the last time.
        """
        began = time.monotonic()
        pause = 0.0 if now else max(USAGE_SECONDS, DISK_SHARE * self.look_took)
        if not self.disk_limit or began - self.looked < pause:
            return
        used, files = _disk_usage(self.folders, _descendants(os.getpid()), self.file_limit)
        if not self.killed and (used > self.disk_limit or files > self.file_limit):
            self.killed = "disk" if used > self.disk_limit else "files"
        self.looked = time.monotonic()
        self.look_took = self.looked - began

    def remove_group(self) -> None:
        """Remove the control group: nobody else does if the worker was killed."""
        if self.events:
            with suppress(OSError):
                os.rmdir(os.path.dirname(self.events))  # noqa: PTH106, PTH120

    def reap(self) -> bool:
        """Take the exit status of all that has ended; return whether any child is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.inner:
                self.status = status

    def kill_all(self) -> list[int]:
        """Kill all processes of the child. Children of a dying process become children of the guard.

        Return those that the kernel cannot end in time, such as a process that waits for a GPU that was reset.
        """
        deadline = time.monotonic() + self.dying
        if self.events:
            # At once, however fast they fork; since Linux 5.14.
            with suppress(OSError), open(f"{os.path.dirname(self.events)}/cgroup.kill", "w") as file:  # noqa: PTH120, PTH123
                file.write("1")
        while self.reap():
            left = list(_descendants(os.getpid()))
            if time.monotonic() > deadline:
                return left
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            select.select([self.wake], [], [], 0.02)
            try:
                os.read(self.wake, 4096)
            except BlockingIOError:
                continue
        return []


def _soon(is_so: Callable[[], bool]) -> bool:
    """Whether something is so, now or within `PAUSE_SECONDS`."""
    deadline = time.monotonic() + PAUSE_SECONDS
    while not (found := is_so()) and time.monotonic() < deadline:
        time.sleep(0.001)
    return found


def _stands_still(pid: int) -> bool:
    """Whether a process is stopped, or has ended."""
    try:
        return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()[0] in "TtZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def _holds_lock(pid: int) -> bool:
    """Whether a process holds a lock of a file."""
    try:
        return any("\nlock:" in _read(f"/proc/{pid}/fdinfo/{name}") for name in os.listdir(f"/proc/{pid}/fdinfo"))  # noqa: PTH208
    except OSError:
        return False


def _counted(events: str, name: str) -> int:
    for line in _read(events).splitlines():
        if line.startswith(f"{name} "):
            return int(line.split()[1])
    return 0


def _descendants(root: int) -> dict[int, int]:
    """Return every process below one with its number of threads, parents first."""
    found: dict[int, int] = {}
    pending = [root]
    while pending:
        pid = pending.pop()
        try:
            threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208
            if pid != root:
                found[pid] = len(threads)
            for thread in threads:
                pending += [int(child) for child in _read(f"/proc/{pid}/task/{thread}/children").split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def _disk_usage(folders: Iterable[str], pids: Iterable[int], most: int) -> tuple[int, int]:
    """Return the bytes that the files in folders take of the disk, with those that were deleted and are still open, and
    how many files and folders there are; beyond `most` it stops.

    A folder that cannot be read, because of its rights or a path that is too long, counts as too much: it could hide
    any number of files.
    """
    seen: set[tuple[int, int]] = set()
    devices: set[int] = set()
    used = count = 0
    todo = list(folders)
    while todo:
        try:
            entries = os.scandir(todo.pop())
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            return used, most + 1
        with entries:
            for entry in entries:
                count += 1
                if count > most:
                    return used, count
                try:
                    if entry.is_dir(follow_symlinks=False):
                        todo.append(entry.path)
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                except OSError:
                    return used, most + 1
                devices.add(status.st_dev)
                if (status.st_dev, status.st_ino) not in seen:
                    seen.add((status.st_dev, status.st_ino))
                    used += status.st_blocks * 512
    for pid in pids:
        for status in _deleted(pid):
            if status.st_dev in devices and (status.st_dev, status.st_ino) not in seen:
                seen.add((status.st_dev, status.st_ino))
                used += status.st_blocks * 512
    return used, count


def _deleted(pid: int) -> Iterator[os.stat_result]:
    """Yield the files that a process has open and that have no name any more."""
    try:
        names = os.listdir(f"/proc/{pid}/fd")  # noqa: PTH208
    except OSError:
        return
    for name in names:
        try:
            status = os.stat(f"/proc/{pid}/fd/{name}")  # noqa: PTH116
        except OSError:
            continue
        if stat.S_ISREG(status.st_mode) and not status.st_nlink:
            yield status


def _usage(pid: int) -> tuple[float, int]:
    """Return CPU seconds (with those of reaped children) and resident bytes; 0 once it is gone."""
    try:
        fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0, 0
    return sum(int(field) for field in fields[11:15]) / _TICK, int(fields[21]) * _PAGE


def _share(pid: int) -> int:
    """Return a process's proportional share of the memory it uses, in bytes; 0 once it is gone.

    Files that it has mapped are left out: the system takes their memory back when it is short.
    """
    try:
        text = _read(f"/proc/{pid}/smaps_rollup")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    except OSError:
        return _usage(pid)[1]
    shares = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in text.splitlines()[1:])}
    if "Pss_Anon" not in shares:  # before Linux 5.4
        return shares.get("Pss", 0) * 1024
    return (shares["Pss_Anon"] + shares["Pss_Shmem"]) * 1024


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123
        return file.read()


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")

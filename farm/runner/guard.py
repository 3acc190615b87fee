"""The guard of a child: watches its memory, processes and files, pauses it, and says when it is to be ended.

It is a process between the launcher and the child (`launcher.py`). What it looks at belongs to the child, so it may
meet anything there: if it fails or hangs, the launcher ends both. It is a subreaper, so that the CPU time of what lost
its parent counts. Only the standard library's light modules are imported on this side.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from .protocol import CONTINUE, GO, PAUSE, Messages

if TYPE_CHECKING:
    from .documents import ChildUsage, GuardReport, Request

SAMPLE_SECONDS = 0.1
"""Seconds between two checks of the child's memory, if it has a limit."""
COUNT_SECONDS = 0.25
"""Seconds between two counts of its processes, if they have a limit and its memory has none."""
USAGE_SECONDS = 1.0
"""Seconds between two messages about CPU time and memory, and between two checks of its files."""
DISK_SHARE = 10
"""After a check of its files, the guard waits this many times the duration of the check: large trees take a while."""
PAUSE_SECONDS = 0.05
"""Seconds between two tries to pause the child."""
AWAKE_SECONDS = 0.1
"""CPU seconds of a child that stands still: what is stopped uses none, but the kernel counts roughly."""

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICK = os.sysconf("SC_CLK_TCK")


class Guard:
    """Watches one child from a process of its own, below its launcher."""

    def __init__(self, inner: int, wake: int, words: int, goer: int, request: Request, launcher: int) -> None:
        """`inner` is the child's first process; `goer` is where `GO` is passed on to it."""
        group = request.get("group") or {}
        self.launcher = launcher
        self.inner = inner
        self.wake = wake
        self.words = Messages(words)
        self.goer = goer
        self.pausing = self.paused = False
        self.spent = 0.0
        """CPU seconds when it was paused."""
        self.memory_limit = int(request.get("memory") or 0)
        self.process_limit = int(request.get("processes") or 0)
        self.disk_limit = int(request.get("disk") or 0)
        self.file_limit = int(request.get("files") or 0)
        self.folders = list(request.get("folders") or ())
        self.looked, self.look_took = time.monotonic(), 0.0
        self.group = group.get("folder", "")
        self.events = f"{self.group}/memory.events" if group.get("memory") else ""
        self.refused_forks = f"{self.group}/pids.events" if group.get("processes") else ""
        self.status: int | None = None
        self.killed = ""
        self.peak = 0

    def watch(self) -> GuardReport:
        """Return what was seen, once the child has ended, or is to be ended, or the launcher is gone."""
        poll = select.poll()
        poll.register(0, select.POLLIN)
        poll.register(self.wake, select.POLLIN)
        pause = SAMPLE_SECONDS if self.memory_limit else COUNT_SECONDS if self.process_limit else USAGE_SECONDS
        said = time.monotonic()
        while self.status is None and not self.killed and os.getppid() == self.launcher:
            # While the child stands still, its guard does next to nothing, either.
            wait = USAGE_SECONDS if self.paused else PAUSE_SECONDS if self.pausing else pause
            events = dict(poll.poll(wait * 1000))
            if self.wake in events:
                drain(self.wake)
                self.reap()
            if 0 in events:
                words = os.read(0, 4096)
                if not words:
                    break
                self.obey(words)
            if self.pausing and not self.paused and self.status is None and self.stop():
                self.paused, self.spent = True, self.measure()["cpu"]
                self.words.send({"paused": True})
            if self.status is None:
                usage = self.measure()
                if self.paused:
                    if usage["cpu"] > self.spent + AWAKE_SECONDS:
                        self.killed = "awake"
                    continue
                if time.monotonic() - said >= USAGE_SECONDS:
                    said = time.monotonic()
                    self.words.send({"usage": usage})
                self.look_at_disk()
        self.look_for_kernels_kill()
        self.look_at_disk(now=True)
        code = None if self.status is None else os.waitstatus_to_exitcode(self.status)
        return {
            "exit": code if code is not None and code >= 0 else None,
            "signal": -code if code is not None and code < 0 else None,
            "killed": self.killed,
            "memory": self.peak,
        }

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
        if still and not any(map(holds_lock, descendants(os.getpid()))):
            return True
        self.resume()
        return False

    def resume(self) -> None:
        """Let all processes of the child continue."""
        self.freeze("0")
        for pid in descendants(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def freeze(self, state: str) -> bool:
        """Let the kernel stop or continue the control group of the child at once; return whether it did (Linux 5.2)."""
        if not self.group:
            return False
        try:
            write(f"{self.group}/cgroup.freeze", state)
        except OSError:
            return False
        return _soon(lambda: counted(f"{self.group}/cgroup.events", "frozen") == int(state))

    def stop_each(self) -> bool:
        """Stop all processes one by one; return whether they stand still. What is stopped starts no other."""

        def still() -> bool:
            going = [pid for pid in descendants(os.getpid()) if not stands_still(pid)]
            for pid in going:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            return not going

        return _soon(still)

    def measure(self) -> ChildUsage:
        """Return CPU seconds and resident bytes of the child with its descendants; end it over its limit."""
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu, memory = used.ru_utime + used.ru_stime, 0
        pids = descendants(os.getpid())
        if self.process_limit and sum(pids.values()) > self.process_limit:
            self.killed = "processes"
        for pid in pids:
            seconds, resident = usage(pid)
            cpu += seconds
            memory += resident
        if self.memory_limit and memory > self.memory_limit:
            # Pages shared after a fork were counted twice: ask for each process's share before judging.
            memory = sum(share(pid) for pid in pids)
            if memory > self.memory_limit:
                self.killed = "memory"
        self.peak = max(self.peak, memory)
        self.look_for_kernels_kill()
        return {"cpu": round(cpu, 2), "memory": memory}

    def look_for_kernels_kill(self) -> None:
        """End the child if the kernel has killed any process of its control group.

        The group was over its limit, or the machine had no memory left.
        """
        if self.events and not self.killed and counted(self.events, "oom_kill"):
            self.killed = "memory"
            self.peak = max(self.peak, self.memory_limit)
        if self.refused_forks and not self.killed and counted(self.refused_forks, "max"):
            self.killed = "processes"

    def look_at_disk(self, *, now: bool = False) -> None:
        """End the child if its files take too much of the disk, or are too many.

        Checks at intervals; `now` checks at once, for the last time.
        """
        began = time.monotonic()
        pause = 0.0 if now else max(USAGE_SECONDS, DISK_SHARE * self.look_took)
        if not self.disk_limit or began - self.looked < pause:
            return
        used, files = disk_usage(self.folders, descendants(os.getpid()), self.file_limit)
        if not self.killed and (used > self.disk_limit or files > self.file_limit):
            self.killed = "disk" if used > self.disk_limit else "files"
        self.looked = time.monotonic()
        self.look_took = self.looked - began

    def reap(self) -> None:
        """Note the exit status of the child's first process, and let go of what else has ended below it."""
        self.status = (reap() or {}).get(self.inner, self.status)


def _soon(is_so: Callable[[], bool]) -> bool:
    """Whether something is so, now or within `PAUSE_SECONDS`."""
    deadline = time.monotonic() + PAUSE_SECONDS
    while not (found := is_so()) and time.monotonic() < deadline:
        time.sleep(0.001)
    return found


# --- what the kernel's files say about processes, and about what they hold --------------------------------------------


def stands_still(pid: int) -> bool:
    """Whether all threads of a process are stopped, or have ended."""
    return all(state in "TtZX" for _, state in _threads(pid))


def holds_lock(pid: int) -> bool:
    """Whether a process holds a lock of a file."""
    folder = f"/proc/{_living(pid)}/fdinfo"
    try:
        return any("\nlock:" in _read(f"{folder}/{name}") for name in os.listdir(folder))  # noqa: PTH208
    except OSError:
        return False


def _threads(pid: int) -> Iterator[tuple[int, str]]:
    """Yield the threads of a process with their states, the first one first: it may have ended, and then is a `Z`."""
    with suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
            with suppress(FileNotFoundError, ProcessLookupError):
                yield int(thread), _read(f"/proc/{pid}/task/{thread}/stat").rpartition(")")[2].split()[0]


def _living(pid: int) -> int:
    """Return a thread of a process that says what all of them have: the first one says nothing once it has ended.

    No thread has memory or files of its own (`seal.py`).
    """
    return next((thread for thread, state in _threads(pid) if state not in "ZX"), pid)


def counted(events: str, name: str) -> int:
    """Return a number of a control group's file of events; 0 if it has none of this name."""
    for line in _read(events).splitlines():
        if line.startswith(f"{name} "):
            return int(line.split()[1])
    return 0


def descendants(root: int) -> dict[int, int]:
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


def disk_usage(folders: Iterable[str], pids: Iterable[int], most: int) -> tuple[int, int]:
    """Return the bytes that the files in folders take of the disk, with those that were deleted and are still open, and
    how many files and folders there are, with all that processes have open; beyond `most` it stops.

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
    for held in (held for pid in pids for held in _opened(pid)):
        count += 1
        if count > most:
            break
        if held and held.st_dev in devices and (held.st_dev, held.st_ino) not in seen:
            seen.add((held.st_dev, held.st_ino))
            used += held.st_blocks * 512
    return used, count


def _opened(pid: int) -> Iterator[os.stat_result | None]:
    """Yield for each file that a process has open what it takes if it has no name any more, else None."""
    with suppress(OSError), os.scandir(f"/proc/{_living(pid)}/fd") as entries:
        for entry in entries:
            status = None
            with suppress(OSError):
                status = entry.stat()
            yield status if status and stat.S_ISREG(status.st_mode) and not status.st_nlink else None


def usage(pid: int) -> tuple[float, int]:
    """Return CPU seconds (with those of reaped children) and resident bytes; 0 once it is gone."""
    try:
        fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        if fields[0] == "Z" and (living := _living(pid)) != pid:
            fields = _read(f"/proc/{living}/stat").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0, 0
    return sum(int(field) for field in fields[11:15]) / _TICK, int(fields[21]) * _PAGE


def share(pid: int) -> int:
    """Return a process's proportional share of the memory it uses, in bytes; 0 once it is gone.

    Files that it has mapped are left out: the system takes their memory back when it is short.
    """
    try:
        text = _read(f"/proc/{_living(pid)}/smaps_rollup")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    except OSError:
        return usage(pid)[1]
    shares = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in text.splitlines()[1:])}
    if "Pss_Anon" not in shares:  # before Linux 5.4
        return shares.get("Pss", 0) * 1024
    return (shares["Pss_Anon"] + shares["Pss_Shmem"]) * 1024


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123
        return file.read()


def write(path: str, text: str) -> None:
    """Tell the kernel something by one of its files. Raises OSError."""
    with open(path, "w", encoding="ascii") as file:  # noqa: PTH123
        file.write(text)


def reap() -> dict[int, int] | None:
    """Return the status of each child of this process that has ended, by its id; None if it has no child at all."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended or None
        if pid == 0:
            return ended
        ended[pid] = status


def drain(wake: int) -> None:
    """Empty a pipe that wakes this process up, if there is anything in it."""
    try:
        os.read(wake, 4096)
    except BlockingIOError:
        return

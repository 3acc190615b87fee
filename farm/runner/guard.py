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
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from .process_table import counted, descendants, disk_usage, drain, holds_lock, reap, share, stands_still, usage
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
            with open(f"{self.group}/cgroup.freeze", "w", encoding="ascii") as file:  # noqa: PTH123
                file.write(state)
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

"""Control groups: let the kernel enforce the limits of memory and processes of a child, and count what it killed.

The worker needs a group of version 2 of its own (systemd: `Delegate=memory pids`; containers: a writable cgroup), which
`hand_on` prepares. Without a group, or without its controllers, the guard checks the limits several times a second. A
fast allocation or a fast fork can be over its limit before the next check. Any group stops and kills all of a child at
once.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from farm.runner.documents import ControlGroup

LEAF = "farm-worker"  # The group of the worker itself: a group that passes controllers on may hold no process.

ROOT = Path("/")

END_SECONDS = 2.0  # Seconds for what was killed in a group to be gone.


@dataclass(frozen=True, slots=True)
class Groups:
    """The folder in which groups for children are made; None: nowhere."""

    folder: Path | None
    why: str = ""  # Why they hold no limit of memory; empty if they do.
    processes: bool = False  # Whether they also hold a limit of processes.

    @property
    def memory(self) -> bool:
        """Whether they hold a limit of memory."""
        return self.folder is not None and not self.why

    def __str__(self) -> str:
        return f"by polling: {self.why}" if self.why else f"cgroup v2 in {self.folder}"


NOWHERE = "no cgroup v2 with a memory controller is mounted"


@cache
def find(root: Path = ROOT) -> Groups:
    """Return where this process may make groups, and what limits they hold."""
    folder = _own_group(root)
    if folder is None:
        return Groups(None, why=NOWHERE)
    folder = folder.parent if folder.name == LEAF else folder
    if not os.access(folder, os.W_OK):
        return Groups(None, why=f"{folder} is not this user's to write")
    controllers = _words(folder / "cgroup.subtree_control")
    here = "memory" in _words(folder / "cgroup.controllers")
    why = f"{folder} does not hand its memory controller on" if here else NOWHERE
    return Groups(folder, "" if "memory" in controllers else why, processes="pids" in controllers)


@contextmanager
def limited(memory: int, processes: int = 0) -> Iterator[ControlGroup]:
    """Make a control group for one child; kill what is left in it and remove it when the block ends.

    The child may use `memory` bytes and have so many `processes` and threads (0: no limit), as far as the group holds
    limits. Yields nothing if no group can be made.
    """
    groups = find()
    if groups.folder is None:
        yield {}
        return
    group, counts = groups.folder / f"farm-{secrets.token_hex(8)}", groups.processes and processes > 0
    try:
        group.mkdir()
        if memory and groups.memory:
            (group / "memory.max").write_text(str(memory))
            with suppress(OSError):  # A kernel without swap accounting lacks the file, or refuses it.
                # Swapping would let a child go on for hours beyond its limit.
                (group / "memory.swap.max").write_text("0")
        if counts:
            (group / "pids.max").write_text(str(processes))
    except OSError:
        # For example, no room for more groups. Then the guard checks the limits.
        with suppress(OSError):
            group.rmdir()
        yield {}
        return
    try:
        yield {"folder": str(group), "memory": groups.memory, "processes": counts}
    finally:
        _end(group)


def _end(group: Path) -> None:
    """Kill what is in a group and remove it, if its launcher has not. What cannot be killed stays in it."""
    deadline = time.monotonic() + END_SECONDS
    with suppress(OSError):
        (group / "cgroup.kill").write_text("1")  # Since Linux 5.14.
    while group.exists() and time.monotonic() < deadline:
        try:
            group.rmdir()
        except OSError:
            time.sleep(0.01)


def _own_group(root: Path) -> Path | None:
    try:
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    paths = {controllers: path for _, controllers, path in (line.split(":", 2) for line in groups)}
    for line in mounts:
        place, _, kind = line.partition(" - ")
        top, point = place.split()[3:5]
        if kind.startswith("cgroup2 ") and "" in paths:
            mounted = root / point.lstrip("/")
            group = mounted / paths[""].removeprefix(top).lstrip("/")
            return group if group.is_dir() else mounted  # A container sees its own group as the top.
    return None


def hand_on(root: Path = ROOT) -> None:
    """Let this process's group pass the controllers of memory and processes on to groups below it.

    The processes of the group have to move to a leaf for that. So this does nothing unless all of them are this process
    and its ancestors. A worker calls it before it starts other processes.
    """
    folder = _own_group(root)
    if folder is None or folder.name == LEAF or "memory" in _words(folder / "cgroup.subtree_control"):
        return
    if "memory" not in _words(folder / "cgroup.controllers"):
        return
    members = {int(process) for process in _words(folder / "cgroup.procs")}
    if not os.access(folder, os.W_OK) or not members <= _family(root):
        return
    leaf = folder / LEAF
    with suppress(OSError):  # `find` then reports what is missing.
        leaf.mkdir(exist_ok=True)
        for process in members:
            (leaf / "cgroup.procs").write_text(str(process))
        there = [name for name in ("memory", "pids") if name in _words(folder / "cgroup.controllers")]
        (folder / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in there))
    find.cache_clear()


def _family(root: Path) -> set[int]:
    family, process = set[int](), os.getpid()
    while process and process not in family:
        family.add(process)
        stat = _words(root / f"proc/{process}/stat")
        process = int(stat[stat.index(next(word for word in reversed(stat) if word.endswith(")"))) + 2]) if stat else 0
    return family


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []

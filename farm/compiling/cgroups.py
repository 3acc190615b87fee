"""Control groups: let the kernel enforce the limits of memory and processes of a child, and count what it killed.

The worker needs a group of version 2 of its own (systemd: `Delegate=memory pids`; containers: a writable cgroup), which
`hand_on` prepares. Without a group, the guard checks the limits several times a second. A fast allocation or a fast
fork can be over its limit before the next check.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from farm.runner.documents import ControlGroup

LEAF = "farm-worker"
"""The group of the worker itself: a group that passes controllers on may hold no process."""

ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class Groups:
    """The folder in which groups for children are made; None: nowhere, and `why`."""

    folder: Path | None
    why: str = ""
    processes: bool = False
    """Whether they also hold a limit of processes."""

    def __str__(self) -> str:
        return f"cgroup v2 in {self.folder}" if self.folder else f"by polling: {self.why}"


@cache
def find(root: Path = ROOT) -> Groups:
    """Return where this process may make groups with a memory limit."""
    folder = _own_group(root)
    if folder is None:
        return Groups(None, why="no cgroup v2 with a memory controller is mounted")
    folder = folder.parent if folder.name == LEAF else folder
    if not os.access(folder, os.W_OK):
        return Groups(None, why=f"{folder} is not this user's to write")
    controllers = _words(folder / "cgroup.subtree_control")
    if "memory" not in controllers:
        return Groups(None, why=f"{folder} does not hand its memory controller on")
    return Groups(folder, processes="pids" in controllers)


@contextmanager
def limited(memory: int, processes: int = 0) -> Iterator[ControlGroup]:
    """Make a control group for one child, and remove it when the block ends.

    The child may use `memory` bytes and have so many `processes` and threads (0: no limit). Yields the group's files:
    the child writes its process id to `join`; the kernel counts the processes that it killed in `events`, and those
    that it refused to start in `refused`. Yields nothing if no group can be made.
    """
    groups = find()
    folder, counts = groups.folder, groups.processes and processes > 0
    if folder is None:
        yield {}
        return
    group = folder / f"farm-{secrets.token_hex(8)}"
    try:
        group.mkdir()
        if memory:
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
        found: ControlGroup = {"join": str(group / "cgroup.procs"), "events": str(group / "memory.events")}
        if counts:
            found["refused"] = str(group / "pids.events")
        yield found
    finally:
        with suppress(OSError):  # A process in it that even its guard could not kill.
            group.rmdir()


def _own_group(root: Path) -> Path | None:
    """Return this process's group, if it has the memory controller."""
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
            group = _inside(root, point, top, paths[""])
            if "memory" in _words(group / "cgroup.controllers"):
                return group
    return None


def _inside(root: Path, point: str, top: str, path: str) -> Path:
    """Return the path of a group in the file system; a container sees its own group as the top."""
    mounted = root / point.lstrip("/")
    group = mounted / path.removeprefix(top).lstrip("/")
    return group if group.is_dir() else mounted


def hand_on(root: Path = ROOT) -> None:
    """Let this process's group pass the controllers of memory and processes on to groups below it.

    The processes of the group have to move to a leaf for that. So this does nothing unless all of them are this process
    and its ancestors. A worker calls it before it starts other processes.
    """
    folder = _own_group(root)
    if folder is None or folder.name == LEAF or "memory" in _words(folder / "cgroup.subtree_control"):
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
    """Return the ids of this process and its ancestors."""
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

"""Control groups: memory limits that the kernel itself holds, and whom it killed for want of memory, where this process
may make groups for its children.

Version 2 needs a group that was handed to the worker (systemd: `Delegate=memory`; containers: a writable cgroup) and
made ready by `hand_on`, version 1 one that it may write to. Where neither is so, the guard looks at its child ten times
a second instead, which a fast allocation outruns.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

LEAF = "farm-worker"
"""Where the worker itself goes in version 2: a group that hands controllers on holds no process of its own."""

ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class Groups:
    """Where groups for children are made: the version of the interface (0: nowhere, and `why`) and the folder."""

    version: int
    folder: Path = ROOT
    why: str = ""

    def __str__(self) -> str:
        return f"cgroup v{self.version} in {self.folder}" if self.version else f"by polling: {self.why}"


@cache
def find(root: Path = ROOT) -> Groups:
    """Say where this process may make groups with a memory limit."""
    version, folder = _own_group(root)
    if not version:
        return Groups(0, why="no cgroup with a memory controller is mounted")
    folder = folder.parent if folder.name == LEAF else folder
    if not os.access(folder, os.W_OK):
        return Groups(0, why=f"{folder} is not this user's to write")
    if version == 2 and "memory" not in _words(folder / "cgroup.subtree_control"):
        return Groups(0, why=f"{folder} does not hand its memory controller on")
    return Groups(version, folder)


@contextmanager
def limited(memory: int) -> Iterator[Mapping[str, str]]:
    """Make a group for one child, which may use so many bytes (0: any number), and remove it when the block ends.

    Yields what the child has to know: `join`, the file into which it writes itself, and `events`, where the kernel
    counts whom it killed; nothing where no group can be made.
    """
    groups = find()
    if not groups.version:
        yield {}
        return
    group = groups.folder / f"farm-{secrets.token_hex(8)}"
    try:
        group.mkdir()
        if memory:
            _set_limit(group, groups.version, memory)
    except OSError:
        # Such as no room for more groups: then the guard's looking has to do.
        with suppress(OSError):
            group.rmdir()
        yield {}
        return
    try:
        events = "memory.events" if groups.version == 2 else "memory.oom_control"
        yield {"join": str(group / "cgroup.procs"), "events": str(group / events)}
    finally:
        with suppress(OSError):  # A process in it that even its guard could not kill.
            group.rmdir()


def _set_limit(group: Path, version: int, memory: int) -> None:
    if version == 2:
        (group / "memory.max").write_text(str(memory))
        # Swapping would let a child go on for hours beyond its limit.
        _write_where_there(group / "memory.swap.max", "0")
        return
    (group / "memory.limit_in_bytes").write_text(str(memory))
    _write_where_there(group / "memory.memsw.limit_in_bytes", str(memory))


def _write_where_there(path: Path, text: str) -> None:
    """A kernel without swap accounting lacks the file, or refuses it."""
    with suppress(OSError):
        path.write_text(text)


def _own_group(root: Path) -> tuple[int, Path]:
    """Return the version that has the memory controller, and this process's group of it; version 0 where none has."""
    try:
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return 0, root
    paths = {controllers: path for _, controllers, path in (line.split(":", 2) for line in groups)}
    for line in mounts:
        place, _, kind = line.partition(" - ")
        top, point = place.split()[3:5]
        type_, _, options = kind.split(" ", 2)
        memory = next((name for name in paths if "memory" in name.split(",")), None)
        if type_ == "cgroup" and memory is not None and "memory" in options.split(","):
            return 1, _inside(root, point, top, paths[memory])
        if type_ == "cgroup2" and "" in paths:
            group = _inside(root, point, top, paths[""])
            if "memory" in _words(group / "cgroup.controllers"):
                return 2, group
    return 0, root


def _inside(root: Path, point: str, top: str, path: str) -> Path:
    """Where a group is in the file system; a container sees its own as the top."""
    mounted = root / point.lstrip("/")
    group = mounted / path.removeprefix(top).lstrip("/")
    return group if group.is_dir() else mounted


def hand_on(root: Path = ROOT) -> None:
    """Have this process's version 2 group give groups below it the memory controller, where that is ours to do.

    Its processes move to a leaf for that, so it is done only where all of them are this process and its ancestors:
    never in a group that somebody else's processes share. To be called by a worker before it starts others.
    """
    version, folder = _own_group(root)
    if version != 2 or folder.name == LEAF or "memory" in _words(folder / "cgroup.subtree_control"):
        return
    members = {int(process) for process in _words(folder / "cgroup.procs")}
    if not os.access(folder, os.W_OK) or not members <= _family(root):
        return
    leaf = folder / LEAF
    with suppress(OSError):  # Then `find` says what is missing.
        leaf.mkdir(exist_ok=True)
        for process in members:
            (leaf / "cgroup.procs").write_text(str(process))
        (folder / "cgroup.subtree_control").write_text("+memory")
    find.cache_clear()


def _family(root: Path) -> set[int]:
    """This process, and those that led to it."""
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

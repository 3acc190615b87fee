"""Outputs: makes the folders of a child safe to read.

A hostile compiler can leave links to the worker's own files, pipes that block a reader for ever, or a thousand nested
folders. All processes of the child are gone when its folders are swept, so nothing changes after the sweep.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from farm.files import is_plain, remove_tree

DEEPEST = 32
"""Levels of folders in a child's folder; compilers' caches have three or four."""

LONGEST = 2000
"""Bytes of a path; the kernel takes 4095."""

MOST = 100_000
"""Entries in a child's folder; MIOpen's kernel cache has hundreds."""


def sweep(folder: Path) -> list[str]:
    """Remove everything from a folder except folders and regular files with one name; return what was removed and why.

    All files are made readable for their owner: a child may have changed their mode.
    """
    found: list[str] = []
    todo = [(folder, 0)]
    count = 0
    while todo:
        place, depth = todo.pop()
        place.chmod(0o700)
        with os.scandir(place) as entries:
            for entry in entries:
                count += 1
                path = Path(entry.path)
                status = entry.stat(follow_symlinks=False)
                if (
                    stat.S_ISDIR(status.st_mode)
                    and depth < DEEPEST
                    and len(os.fsencode(path)) < LONGEST
                    and count <= MOST
                ):
                    todo.append((path, depth + 1))
                elif is_plain(status) and count <= MOST:
                    if not status.st_mode & stat.S_IRUSR:
                        path.chmod(0o600)
                else:
                    found.append(f"{_shown(path.relative_to(folder))} ({_name(status, count)})")
                    _remove(path, status)
    return found


def _shown(path: Path) -> str:
    return os.fsencode(path).decode(errors="replace")[:80]


def _remove(path: Path, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        remove_tree(path)
    else:
        path.unlink()


def _name(status: os.stat_result, count: int) -> str:
    if count > MOST:
        return f"beyond {MOST} files"
    if stat.S_ISDIR(status.st_mode):
        return f"deeper than {DEEPEST} folders"
    kinds = {stat.S_IFLNK: "a link", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFREG: "a second name"}
    return kinds.get(stat.S_IFMT(status.st_mode), "a device")

"""The client's cache: downloads, converted models, canonical data and fetched artifacts, bounded in size.

`~/.cache/migraphx-farm/<shelf>/<entry>` (or below `$XDG_CACHE_HOME`): an entry is a file, or a folder that comes and
goes as a whole.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from platformdirs import user_cache_path

from farm.files import remove_tree, tree_size

LIMIT = 20 * 10**9
"""Bytes to which the cache is kept."""

IN_USE = 86_400.0
"""Seconds after its last use in which an entry stays, whatever its size: another command may be reading it."""


def default_cache() -> Path:
    """Return the folder of the user's cache."""
    return user_cache_path("migraphx-farm")


def adopt(made: Path, place: Path, whole: Path) -> None:
    """Move a finished folder to its place in the cache. `whole` is a file that exists only in a complete folder.

    If another process was faster, its folder stays: the content is the same. Raises OSError.
    """
    if place.exists() and not whole.is_file():
        place.rename(made.with_name(f"{made.name}.broken"))
    try:
        made.rename(place)
    except OSError:
        if not whole.is_file():
            raise


def note_use(cache: Path, files: Iterable[Path]) -> None:
    """Record that files are used now: those in the cache stay for a day."""
    for entry in {_entry(cache, file) for file in files if file.is_relative_to(cache)}:
        with suppress(OSError):  # A cache that is only read keeps its times.
            os.utime(entry)


def trim(cache: Path, limit: int = LIMIT) -> None:
    """Remove what was not used for longest beyond `limit`."""
    entries = []
    for entry in cache.glob("*/*"):
        with suppress(FileNotFoundError):  # Another command was faster to remove it.
            entries.append((entry, entry.stat().st_mtime, _size(entry)))
    excess = sum(size for _, _, size in entries) - limit
    for entry, used, size in sorted(entries, key=lambda found: found[1]):
        if excess <= 0 or used > time.time() - IN_USE:
            return
        _remove(entry)
        excess -= size


def _entry(cache: Path, file: Path) -> Path:
    return cache.joinpath(*file.relative_to(cache).parts[:2])


def _size(entry: Path) -> int:
    return tree_size(entry) if entry.is_dir() else entry.stat().st_size


def _remove(entry: Path) -> None:
    """Take an entry away as a whole, under another name first: half a folder must not be found."""
    going = entry.with_name(f"{entry.name}.part")
    with suppress(OSError):  # Another command removes it too, or it is not ours to remove.
        entry.rename(going)
        remove_tree(going)

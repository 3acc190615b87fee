"""What a node keeps on its disk: the folders of running work, and a cache of models and data.

Each process has a work folder of its own, and those that killed processes left are removed. A lock file next to each
shows whether it is in use: the kernel releases the lock when the process ends, in any way. Process ids and host names
cannot show that: containers repeat them, and do not see each other's processes.

The cache is shared by slots and namespaces, and bounded in size. A file in it is what its name says when it goes in and
when it comes out: it is hashed as it is copied, both times.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from farm.compiling.pipeline import Contention
from farm.errors import ArtifactGone
from farm.files import NotPlain, remove_tree, replacing, take
from farm.logging import get_logger
from farm.spec import FileReference


class WorkFolder:
    """One process's folder below `work`, made when it is first needed. Thread-safe."""

    def __init__(self, work: Path) -> None:
        """Remove the folders below `work` of processes that have ended."""
        # Under the host's name: what runs on one machine is counted together.
        self._node = work / socket.gethostname()
        self._mutex = threading.Lock()
        self._own: Path | None = None
        self._lock = -1
        for lock in work.glob("*/*.lock"):
            _clear_away(lock)

    @contextmanager
    def place(self, prefix: str) -> Iterator[Path]:
        """Make a folder for one piece of work, whose name begins with `prefix`; it is gone when the block ends.

        Raises OSError.
        """
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=self._folder()))
        try:
            yield folder
        finally:
            remove_tree(folder)

    @contextmanager
    def contention(self) -> Iterator[Contention]:
        """Yield a `Contention`. After the block it says whether other work ran on this node meanwhile."""
        contention, before = Contention(), self.at_work()
        yield contention
        contention.shared = self.at_work() != before or sum(count for count, _ in before.values()) > 1

    def at_work(self) -> dict[str, tuple[int, int]]:
        """Return how many pieces of work each process of this node has, and when one last began or ended there (ns)."""
        found = {}
        for lock in self._node.glob("*.lock"):
            folder = lock.with_suffix("")
            with suppress(FileNotFoundError):  # Another process clears away what a killed one left.
                if _in_use(lock):
                    found[folder.name] = len(list(folder.iterdir())), folder.stat().st_mtime_ns
        return found

    def close(self) -> None:
        """Remove it, and let go of its lock."""
        with self._mutex:
            if self._own:
                os.close(self._lock)
                _clear_away(self._own.with_suffix(".lock"))
                self._own = None

    def _folder(self) -> Path:
        with self._mutex:
            if self._own and not self._own.is_dir():  # Someone has cleared the disk, or it was full.
                os.close(self._lock)
                self._own = None
            if self._own is None:
                self._node.mkdir(parents=True, exist_ok=True)
                own = self._node / f"{os.getpid()}-{secrets.token_hex(4)}"
                # It is locked before it has its name, so that no other process takes it for an abandoned one.
                with replacing(own.with_suffix(".lock")) as new:
                    self._lock = os.open(new, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
                    with suppress(OSError):  # A file system without locks: others cannot lock it either.
                        fcntl.flock(self._lock, fcntl.LOCK_EX)
                self._own = own
                own.mkdir()
            return self._own


def _in_use(lock: Path) -> bool:
    """Whether the process that holds a lock is alive; true if that is unknown. Raises FileNotFoundError."""
    taken = _taken(lock, fcntl.LOCK_SH)
    if taken is not None:
        os.close(taken)
    return taken is None


def _clear_away(lock: Path) -> None:
    """Remove a folder and its lock if no process holds the lock."""
    with suppress(FileNotFoundError):
        held = _taken(lock, fcntl.LOCK_EX)
        if held is not None:
            try:
                remove_tree(lock.with_suffix(""))
                if not lock.with_suffix("").exists():
                    lock.unlink()
            finally:
                os.close(held)


def _taken(lock: Path, how: int) -> int | None:
    """Take a free lock and return its descriptor; None if another process holds it."""
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except PermissionError:
        return None
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


log = get_logger(__name__)

TRIES = 30
"""How often the copy of a file is tried that is damaged, or that another slot removed or replaced meanwhile."""

LARGEST = 1 << 62
"""Bytes of a file in the cache; the limit of its kind was checked when it was put there."""

ABANDONED_SECONDS = 86400.0
"""Seconds since the last byte of a part, after which no process can be at work on it: the one that was is dead."""


class NodeCache:
    """Files named by their SHA-256 in one folder; the least recently used go when the folder outgrows its bound."""

    def __init__(self, folder: Path, *, limit: int, download: Callable[[str, Path], object]) -> None:
        """Keep files in `folder` up to about `limit` bytes; `download(digest, path)` brings and checks one."""
        self._folder = folder
        self._limit = limit
        self._download = download

    def through(self, download: Callable[[str, Path], object]) -> NodeCache:
        """Return the same cache with another function that downloads blobs."""
        return NodeCache(self._folder, limit=self._limit, download=download)

    def place(self, files: Iterable[FileReference], folder: Path) -> list[Path]:
        """Copy files into `folder` and return their paths.

        Copies, not links: the compiler may be hostile, and what it writes must not reach another attempt.
        Raises ArtifactGone or StorageUnavailable from the download, ValueError for a path outside `folder`.
        """
        placed = []
        for file in files:
            target = folder / file["path"]
            if not target.resolve().is_relative_to(folder.resolve()):
                raise ValueError(f"{file['path']!r} leaves its folder")
            target.parent.mkdir(parents=True, exist_ok=True)
            self.copy(file["digest"], target)
            placed.append(target)
        return placed

    def copy(self, digest: str, target: Path) -> None:
        """Copy one blob to `target`, whole or not at all; a damaged file of the cache is downloaded again.

        Raises ArtifactGone if that does not help, and what the download raises.
        """
        for _ in range(TRIES):
            path = self.get(digest)
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                with replacing(target) as part:
                    if take(path, part, LARGEST)[0] != digest:
                        raise NotPlain(errno.EIO, "not what its name says", str(path))
                return
            except NotPlain as error:
                if error.errno == errno.ENOENT:
                    continue  # Another slot trimmed the cache, or downloaded the same file.
            with suppress(FileNotFoundError):
                path.unlink()
                log.error("a file of the node's cache was damaged, downloading it again", file=str(path))
        raise ArtifactGone(f"blob {digest} is not what its name says", hint="`farm doctor` looks at the node's disk")

    def get(self, digest: str) -> Path:
        """Return the path of a blob's file; download it if it is missing.

        Raises ArtifactGone for what is not a digest: every worker writes records in storage that name blobs.
        """
        if not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise ArtifactGone(f"{digest!r:.200} is named as a blob, and is not a SHA-256")
        path = self._folder / digest[:2] / digest
        try:
            os.utime(path)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._download(digest, path)
            self._trim(keep=path)
        return path

    def add(self, source: Path, limit: int, *, within: Path) -> tuple[Path, str, int]:
        """Keep a copy of a file that a child made here, so that the next attempt need not download it.

        Return the copy, its digest and its size. Raises NotPlain (`farm.files.take`), OSError.
        """
        new = self._folder / "00" / f".{secrets.token_hex(8)}.part"
        new.parent.mkdir(parents=True, exist_ok=True)
        try:
            digest, size = take(source, new, limit, within=within)
            path = self._folder / digest[:2] / digest
            path.parent.mkdir(parents=True, exist_ok=True)
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)
        self._trim(keep=path)
        return path, digest, size

    def _trim(self, *, keep: Path) -> None:
        files: list[tuple[Path, os.stat_result]] = []
        for path in self._folder.glob("??/*"):
            if path != keep:
                # What other slots download now ends in `.part`, and is renamed at any moment.
                with suppress(FileNotFoundError):
                    found = path.stat()
                    if path.suffix != ".part":
                        files.append((path, found))
                    elif time.time() - found.st_mtime > ABANDONED_SECONDS:
                        path.unlink()
        kept = 0
        with suppress(FileNotFoundError):
            kept = keep.stat().st_size
        excess = sum(stat.st_size for _, stat in files) + kept - self._limit
        for path, stat in sorted(files, key=lambda file: file[1].st_mtime):
            if excess <= 0:
                return
            path.unlink(missing_ok=True)
            excess -= stat.st_size

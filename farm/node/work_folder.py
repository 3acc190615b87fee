"""Work folders: each process of a node has its own, and folders that killed processes left are removed.

A lock file next to each folder shows whether it is in use: the kernel releases the lock when the process ends, in any
way. Process ids and host names cannot show that: containers repeat them, and do not see each other's processes.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from farm.compiling.pipeline import Contention
from farm.files import remove_tree, replacing


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

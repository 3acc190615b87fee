"""The node's content-addressed cache of models and data: shared by slots and namespaces, bounded in size.

A file is what its name says when it goes in and when it comes out: it is hashed as it is copied, both times.
"""

from __future__ import annotations

import errno
import os
import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from farm.errors import ArtifactGone
from farm.files import NotPlain, replacing, take
from farm.logging import get_logger
from farm.spec import FileReference

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
        """Return the path of a blob's file; download it if it is missing."""
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

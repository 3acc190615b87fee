"""The node's content-addressed cache of models and data: shared by slots, checked, bounded in size."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from farm.files import replacing


class NodeCache:
    """Files named by their SHA-256 in one folder; the least recently used go when the folder outgrows its bound."""

    def __init__(self, folder: Path, *, limit: int, download: Callable[[str, Path], object]) -> None:
        """Keep files in `folder` up to about `limit` bytes; `download(digest, path)` brings and checks one."""
        self._folder = folder
        self._limit = limit
        self._download = download

    def through(self, download: Callable[[str, Path], object]) -> NodeCache:
        """Return the same cache for a caller who has another way to bring blobs."""
        return NodeCache(self._folder, limit=self._limit, download=download)

    def place(self, files: Iterable[dict[str, Any]], folder: Path) -> list[Path]:
        """Copy files (`{"path", "digest", "size"}`) into `folder` and return their paths.

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
        """Copy one blob to `target`."""
        while True:
            try:
                shutil.copyfile(self.get(digest), target)
                return
            except FileNotFoundError:
                # Another slot trimmed the cache between the two steps.
                target.parent.mkdir(parents=True, exist_ok=True)

    def get(self, digest: str) -> Path:
        """Return the path of a blob's file, after bringing it where it is missing."""
        path = self._folder / digest[:2] / digest
        try:
            os.utime(path)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._download(digest, path)
            self._trim(keep=path)
        return path

    def put(self, digest: str, source: Path) -> None:
        """Keep a copy of a file that was made here, so that the next attempt need not download it."""
        path = self._folder / digest[:2] / digest
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as part:
                shutil.copyfile(source, part)
            self._trim(keep=path)

    def _trim(self, *, keep: Path) -> None:
        files = [(path, path.stat()) for path in self._folder.glob("??/*") if path != keep]
        excess = sum(stat.st_size for _, stat in files) + keep.stat().st_size - self._limit
        for path, stat in sorted(files, key=lambda file: file[1].st_mtime):
            if excess <= 0:
                return
            path.unlink(missing_ok=True)
            excess -= stat.st_size

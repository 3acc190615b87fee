"""Outbox: finished programs on the node's disk, from the end of their attempt's work until object storage has them.

A parcel is all that there is to publish, and whose it is. Its attempt publishes it. Where that has ended before (its
worker was killed, or stopped while storage was away), whoever finds the parcel does: the node's supervisor, now or
after its next start.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from farm.artifacts.s3 import S3Store
from farm.artifacts.sidecar import SidecarDocument, facts
from farm.compiling.attempt import Attempt
from farm.errors import StorageAway, StorageUnavailable, UsageError
from farm.files import take
from farm.jobs.state import Outcome
from farm.logging import get_logger
from farm.spec import FileReference

log = get_logger(__name__)

TRIES = 3
"""How often a publication that storage refuses is begun from its first blob: it may have lost what it had."""

_FIELDS = frozenset({"job", "token", "namespace", "sidecar", "files", "phases"})
"""What a parcel says of itself."""

BOOT = Path("/proc/sys/kernel/random/boot_id")


class Outbox:
    """A folder of parcels, shared by all worker processes of a node."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(
        self,
        attempt: Attempt,
        sidecar: Mapping[str, Any],
        files: Mapping[str, Path],
        phases: Mapping[str, float],
        *,
        within: Path,
        limit: int,
    ) -> Parcel:
        """Keep what an attempt has made: `files` by the name of their blob, and what the sidecar says but for them.

        They lie `within` a folder in which children wrote, and are copied, and hashed on the way: of at most `limit`
        bytes each. It is there whole or not at all, also if we are killed now, and ours until it is let go.
        Raises NotPlain for a file that is none, OSError.
        """
        new, lock = self._begin(f"{attempt.job_id}-{attempt.number}")
        document: dict[str, Any] = {
            "job": attempt.job_id,
            "token": attempt.token,
            "namespace": attempt.namespace,
            "sidecar": sidecar,
            "files": {blob: path.name for blob, path in files.items()},
            "phases": phases,
            "boot": _boot(),
        }
        try:
            taken = {blob: take(path, new / blob, limit, within=within) for blob, path in files.items()}
            document["digests"] = {blob: digest for blob, (digest, _) in taken.items()}
            (new / "parcel.json").write_text(json.dumps(document))
            return Parcel(new.rename(self._folder / new.name.lstrip(".")), lock, document)
        except BaseException:
            # On a full disk. Under our lock nobody else could remove it.
            shutil.rmtree(new, ignore_errors=True)
            os.close(lock)
            raise

    def _begin(self, name: str) -> tuple[Path, int]:
        """Make a folder for a parcel, and lock it; its name says that it is not whole yet."""
        self._folder.mkdir(parents=True, exist_ok=True)
        while True:
            new = self._folder / f".{name}-{secrets.token_hex(4)}"
            new.mkdir()
            lock = _locked(new)
            if lock is not None:
                return new, lock
            # Whoever looks for what is left came between, and removes it.

    def left(self) -> Iterator[Parcel]:
        """Yield the parcels that nobody holds any more; each is ours until the next."""
        for folder in sorted(self._folder.glob("*")):
            lock = _locked(folder)
            if lock is None:
                continue
            document = _read(folder)
            with Parcel(folder, lock, document or {}) as parcel:
                if document:
                    yield parcel
                else:
                    parcel.drop()

    @property
    def size(self) -> int:
        """Bytes of all that is in it."""
        total = 0
        for path in self._folder.glob("*/*"):
            with suppress(FileNotFoundError):
                total += path.stat().st_size
        return total


class Parcel:
    """One finished program, held by us while the block lasts: nobody else touches it."""

    def __init__(self, folder: Path, lock: int, document: Mapping[str, Any]) -> None:
        self._folder = folder
        self._lock = lock
        self._document = document
        self.settled = (folder / "settled").exists()
        """Whether it outlives a loss of power."""

    def __enter__(self) -> Parcel:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)

    @property
    def job(self) -> str:
        """The job's id."""
        return str(self._document["job"])

    @property
    def token(self) -> str:
        """The attempt's, by which its job knows it."""
        return str(self._document["token"])

    def settle(self) -> None:
        """Have it outlive a loss of power, too."""
        if self.settled:
            return
        for path in self._folder.iterdir():
            _sync(path)
        (self._folder / "settled").touch()
        for path in (self._folder, self._folder.parent):
            _sync(path)
        self.settled = True

    def publish_left(self, artifacts: S3Store) -> Outcome:
        """Do as `publish`, but look first whether it is there: its attempt may have ended just after that."""
        found = artifacts.lookup([self._document["namespace"]], self._document["sidecar"]["key"])
        return self._outcome(found.sidecar) if found else self.publish(artifacts)

    def publish(self, artifacts: S3Store) -> Outcome:
        """Upload it and return the attempt's outcome. Raises StorageUnavailable, UsageError, OSError."""
        for left in reversed(range(TRIES)):
            try:
                return self._publish(artifacts)
            except StorageAway:
                raise
            except (StorageUnavailable, UsageError) as error:
                if not left:
                    raise
                log.warning("cannot publish, trying again", job=self.job, error=error.message)
        raise AssertionError("the last try returns or raises")

    def drop(self) -> None:
        """Remove it."""
        aside = self._folder.with_name(f".{self._folder.name.lstrip('.')}.gone")
        with suppress(FileNotFoundError):  # Who had it before us removed it.
            shutil.rmtree(self._folder.rename(aside), ignore_errors=True)

    def _publish(self, artifacts: S3Store) -> Outcome:
        files = self._document["files"]
        digests = self._document.get("digests", {})  # 0.1.0 wrote none.

        def upload(blob: str) -> FileReference:
            digest, size = artifacts.put_blob_file(self._folder / blob, digest=digests.get(blob))
            return {"path": files[blob], "digest": digest, "size": size}

        # Side by side: on a line with a second of latency they would cost that each.
        with ThreadPoolExecutor(len(files)) as threads:
            blobs = dict(zip(files, threads.map(upload, files), strict=True))
        published = artifacts.publish(self._document["namespace"], {**self._document["sidecar"], "blobs": blobs})
        return self._outcome(published.sidecar, blobs["log"]["digest"])

    def _outcome(self, there: SidecarDocument, log_digest: str = "") -> Outcome:
        """The outcome where this sidecar is the artifact's now: ours, or that of an attempt which was first."""
        ours = all(there.get(name) == self._document["sidecar"][name] for name in ("job", "attempt"))
        if ours and not log_digest:
            log_digest = log_of["digest"] if (log_of := there["blobs"].get("log")) else ""
        return Outcome.success(facts(there), hit=not ours, log=log_digest, phases=self._document["phases"])


def _locked(folder: Path) -> int | None:
    """Return a lock on a folder; None where another process, or a thread of ours, holds it, or it is gone."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _read(folder: Path) -> dict[str, Any] | None:
    """Return what a parcel is; None where it is none, or its files may not have outlived a loss of power."""
    if folder.name.startswith("."):
        return None  # Whoever began it, or removed it, was killed.
    try:
        document: dict[str, Any] = json.loads((folder / "parcel.json").read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(document, dict) or not document.keys() >= _FIELDS:
        return None  # Another release's.
    sound = document.get("boot") == _boot() or (folder / "settled").exists()
    return document if sound else None


def _boot() -> str:
    """What names the time since the machine was started; the same for ever where the system does not say."""
    try:
        return BOOT.read_text()
    except OSError:
        return ""


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Outbox: keeps finished programs on the node's disk until object storage has them.

A parcel holds everything to publish for one attempt. The attempt publishes it. If the attempt ended before that (its
worker was killed, or stopped while storage was away), the node's supervisor publishes it, now or after its next start.
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
from typing import TYPE_CHECKING, Any

from farm.artifacts.sidecar import facts
from farm.artifacts.storage import Sign
from farm.compiling.attempt import Attempt
from farm.errors import StorageAway, StorageUnavailable, UsageError
from farm.files import take
from farm.jobs.state import Outcome
from farm.logging import get_logger
from farm.spec import FileReference
from farm.tuning.database import PACKED
from farm.wire.program import Sidecar

if TYPE_CHECKING:
    from farm.artifacts.s3 import S3Store

log = get_logger(__name__)

TRIES = 3
"""How often a publication that storage refuses is begun from its first blob: it may have lost what it had."""

_FIELDS = frozenset({"job", "token", "namespace", "sidecar", "files", "phases"})
"""The description of a parcel."""

LEARNT = "learnt.gz"
"""The file with what the tuning learnt; no blob has this name."""

BOOT = Path("/proc/sys/kernel/random/boot_id")


class Outbox:
    """A folder of parcels, shared by all worker processes of a node."""

    def __init__(self, folder: Path, sign: Sign | None = None) -> None:
        """Use a folder; `sign` signs what is published from it."""
        self._folder = folder
        self._sign = sign

    def put(
        self,
        attempt: Attempt,
        sidecar: Mapping[str, Any],
        files: Mapping[str, Path],
        phases: Mapping[str, float],
        *,
        learnt: tuple[str, bytes] | None = None,
        within: Path,
        limit: int,
    ) -> Parcel:
        """Keep what an attempt has made: `files` by the names of their blobs, and the sidecar without them.

        `learnt` is an object, key and bytes, with what its tuning could not bring to storage, which was away.
        The files lie `within` a folder in which children wrote. Each is copied and hashed, up to `limit` bytes. The
        parcel is written whole or not at all, even if this process is killed, and stays locked until it is released.
        Raises NotPlain for a file that is not a regular file, OSError.
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
            if learnt:
                document["learnt"], packed = learnt
                (new / LEARNT).write_bytes(packed)
            document["digests"] = {blob: digest for blob, (digest, _) in taken.items()}
            (new / "parcel.json").write_text(json.dumps(document))
            return Parcel(new.rename(self._folder / new.name.lstrip(".")), lock, document, self._sign)
        except BaseException:
            # On a full disk. Nobody else can remove it while we hold the lock.
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
            # The search for abandoned parcels was faster, and removes it.

    def left(self) -> Iterator[Parcel]:
        """Yield the abandoned parcels; each is locked until the next one is taken. Remove what is not whole."""
        for folder in sorted(self._folder.glob("*")):
            lock = _locked(folder)
            if lock is None:
                continue
            document = _read(folder)
            with Parcel(folder, lock, document or {}, self._sign) as parcel:
                if not document:
                    parcel.drop()
                elif document.keys() >= _FIELDS:
                    yield parcel
                # Else it is another release's, which delivers it when it runs here again.

    @property
    def size(self) -> int:
        """Bytes of all that is in it."""
        total = 0
        for path in self._folder.glob("*/*"):
            with suppress(FileNotFoundError):
                total += path.stat().st_size
        return total


class Parcel:
    """One finished program; nobody else touches it while the block lasts."""

    def __init__(self, folder: Path, lock: int, document: Mapping[str, Any], sign: Sign | None = None) -> None:
        self._folder = folder
        self._sign = sign
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
        """The token by which the job recognizes this attempt."""
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
        """Publish like `publish`, unless the artifact exists: the attempt may have ended just after it published."""
        found = artifacts.lookup([self._document["namespace"]], self._document["sidecar"]["key"])
        if not found:
            return self.publish(artifacts)
        self._publish_learnt(artifacts)
        return self._outcome(found.sidecar)

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
        with suppress(FileNotFoundError):  # Its former holder removed it.
            shutil.rmtree(self._folder.rename(aside), ignore_errors=True)

    def _publish(self, artifacts: S3Store) -> Outcome:
        files = self._document["files"]
        digests = self._document["digests"]

        def upload(blob: str) -> FileReference:
            digest, size = artifacts.put_blob_file(self._folder / blob, digest=digests[blob])
            return {"path": files[blob], "digest": digest, "size": size}

        # Side by side: on a line with a second of latency they would cost that each.
        with ThreadPoolExecutor(len(files)) as threads:
            blobs = dict(zip(files, threads.map(upload, files), strict=True))
        sidecar = {**self._document["sidecar"], "blobs": blobs}
        published = artifacts.publish(self._document["namespace"], sidecar, sign=self._sign)
        self._publish_learnt(artifacts)
        return self._outcome(published.sidecar, blobs["log"]["digest"])

    def _publish_learnt(self, artifacts: S3Store) -> None:
        """Upload what the tuning learnt; the program is good without it. Raises StorageAway."""
        if key := self._document.get("learnt"):
            try:
                artifacts.put_object(key, (self._folder / LEARNT).read_bytes(), content_type=PACKED)
            except StorageAway:
                raise
            except (StorageUnavailable, OSError) as error:
                log.warning("what the tuning learnt is lost", job=self.job, error=str(error))

    def _outcome(self, there: Sidecar, log_digest: str = "") -> Outcome:
        """Return the outcome with the sidecar that the artifact has now: ours, or that of a faster attempt."""
        ours = all(there.get(name) == self._document["sidecar"][name] for name in ("job", "attempt"))
        if ours and not log_digest:
            log_digest = log_of["digest"] if (log_of := there["blobs"].get("log")) else ""
        return Outcome.success(facts(there), hit=not ours, log=log_digest, phases=self._document["phases"])


def _locked(folder: Path) -> int | None:
    """Lock a folder and return the lock; None if another process or thread holds it, or the folder is gone."""
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
    """Return the description of a parcel; None if it has none, or its files may have been lost with the power.

    Of another release's parcel only that release knows whether it is whole.
    """
    if folder.name.startswith("."):
        return None  # The process that wrote or removed it was killed.
    try:
        document: Any = json.loads((folder / "parcel.json").read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(document, dict):
        return None
    found: dict[str, Any] = document
    sound = not found.keys() >= _FIELDS or found.get("boot") == _boot() or (folder / "settled").exists()
    return found if sound else None


def _boot() -> str:
    """Return the id of this boot of the machine; the same text for ever if the system has none."""
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

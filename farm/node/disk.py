"""What a node keeps on its disk: the folders of running work, a cache of models and data, and finished programs.

Each process has a work folder of its own, and those that killed processes left are removed. A lock file next to each
shows whether it is in use: the kernel releases the lock when the process ends, in any way. Process ids and host names
cannot show that: containers repeat them, and do not see each other's processes.

The cache is shared by slots and namespaces, and bounded in size. A file in it is what its name says when it goes in and
when it comes out: it is hashed as it is copied, both times.

The outbox has finished programs until object storage has them. A parcel holds everything to publish for one attempt.
The attempt publishes it. If the attempt ended before that (its worker was killed, or stopped while storage was away),
the node's supervisor publishes it, now or after its next start.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import re
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from farm.artifacts.s3 import S3Store
from farm.artifacts.sidecar import facts
from farm.artifacts.storage import Sign
from farm.compiling.attempt import Attempt
from farm.compiling.pipeline import LARGEST, Children
from farm.errors import ArtifactGone, FarmError, StorageAway, StorageUnavailable, StoreUnavailable, UsageError
from farm.extension import publishing
from farm.files import NotPlain, remove_tree, replacing, take, tree_size
from farm.jobs.state import FailureKind, Outcome, Phase
from farm.logging import get_logger
from farm.settings import Settings
from farm.spec import FileReference
from farm.store import Store
from farm.tuning.database import PACKED
from farm.wire.program import Sidecar

log = get_logger(__name__)


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
        """Make a folder for one piece of work, named after `prefix`; it is gone when the block ends. Raises OSError."""
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=self._folder()))
        try:
            yield folder
        finally:
            remove_tree(folder)

    def at_work(self) -> dict[str, tuple[int, int]]:
        """Return how many pieces of work each process of this node has, and when one last began or ended there (ns)."""
        found = {}
        for lock in self._node.glob("*.lock"):
            folder = lock.with_suffix("")
            with suppress(FileNotFoundError):  # Another process clears away what a killed one left.
                free = _taken(lock, fcntl.LOCK_SH)
                if free is not None:
                    os.close(free)
                else:
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


TRIES = 30  # How often the copy of a file is tried that is damaged, or that another slot removed or replaced meanwhile.

ABANDONED_SECONDS = 86400.0
"""Seconds since the last byte of a part, after which no process can be at work on it: the one that was is dead."""

WRITTEN = 5  # What an attempt writes, in sizes of what it fetches: a copy, a program and what leads to it, the upload.


def make_room(settings: Settings, *, new: int = 0, written: int = 0, keep: Path | None = None) -> None:
    """Remove from the cache what was used least recently, until `new` bytes fit into it, and `written` next to it.

    Then `min_free_bytes` of its disk stay free. What is being copied can be read to its end. Raises OSError.
    """
    folder = settings.data_dir / "cache"
    excess = settings.min_free_bytes + new + written - shutil.disk_usage(folder).free
    if not new and excess <= 0:
        return
    files: list[tuple[Path, os.stat_result]] = []
    for path in folder.glob("??/*"):
        # What other slots download now ends in `.part`, and is renamed at any moment.
        with suppress(FileNotFoundError):
            found = path.stat()
            if path.suffix != ".part":
                files.append((path, found))
            elif time.time() - found.st_mtime > ABANDONED_SECONDS:
                path.unlink()
    excess = max(excess, sum(stat.st_size for _, stat in files) + new - settings.cache_bytes)
    for path, stat in sorted(files, key=lambda file: file[1].st_mtime):
        if excess > 0 and path != keep:
            path.unlink(missing_ok=True)
            excess -= stat.st_size


class NodeCache:
    """Files named by their SHA-256 in one folder; the least recently used go when it or its disk has no room left."""

    def __init__(self, settings: Settings, download: Callable[[str, Path], object]) -> None:
        """`download(digest, path)` brings and checks a file."""
        self._folder = settings.data_dir / "cache"
        self._make_room = partial(make_room, settings)
        self._download = download

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
            self.copy(file, target)
            placed.append(target)
        return placed

    def copy(self, file: FileReference, target: Path) -> None:
        """Copy one blob to `target`, whole or not at all; a damaged file of the cache is downloaded again.

        Raises ArtifactGone if that does not help, and what the download raises.
        """
        digest = file["digest"]
        for _ in range(TRIES):
            path = self.get(file)
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                with replacing(target) as part:
                    if take(path, part, LARGEST)[0] != digest:  # The limit of its kind was checked as it was put there.
                        raise NotPlain(errno.EIO, "not what its name says", str(path))
                return
            except NotPlain as error:
                if error.errno == errno.ENOENT:
                    continue  # Another slot trimmed the cache, or downloaded the same file.
            with suppress(FileNotFoundError):
                path.unlink()
                log.error("a file of the node's cache was damaged, downloading it again", file=str(path))
        raise ArtifactGone(f"blob {digest} is not what its name says", hint="`farm doctor` looks at the node's disk")

    def get(self, file: FileReference) -> Path:
        """Return the path of a blob's file; download it if it is missing. Leave room on the disk to copy it.

        Raises ArtifactGone for what is not a digest: every worker writes records in storage that name blobs.
        """
        digest, size = file["digest"], file["size"]
        if not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise ArtifactGone(f"{digest!r:.200} is named as a blob, and is not a SHA-256")
        path = self._folder / digest[:2] / digest
        try:
            os.utime(path)
            self._make_room(written=WRITTEN * size, keep=path)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._make_room(new=size, written=WRITTEN * size)
            self._download(digest, path)
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
            self._make_room(new=size)
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)
        return path, digest, size


PUBLISH_TRIES = 3
"""How often a publication that storage refuses is begun from its first blob: it may have lost what it had."""

_FIELDS = frozenset({"job", "token", "namespace", "sidecar", "files", "phases"})  # The description of a parcel.
LEARNT = "learnt.gz"  # The file with what the tuning learnt; no blob has this name.
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
        children: Children,
        sidecar: Mapping[str, Any],
        files: Mapping[str, Path],
        *,
        learnt: tuple[str, bytes] | None = None,
    ) -> Parcel:
        """Keep what an attempt has made: `files` by the names of their blobs, and the sidecar without them.

        `learnt` is an object, key and bytes, with what its tuning could not bring to storage, which was away.
        The files lie in the folder in which the `children` wrote. Each is copied and hashed, up to the largest that
        they may have made. The parcel is written whole or not at all, even if this process is killed, and stays locked
        until it is released. Raises NotPlain for a file that is not a regular file, OSError.
        """
        new, lock = self._begin(f"{attempt.job_id}-{attempt.number}")
        try:
            document: dict[str, Any] = {
                "job": attempt.job_id,
                "token": attempt.token,
                "namespace": attempt.namespace,
                "sidecar": sidecar,
                "files": {blob: path.name for blob, path in files.items()},
                "digests": {
                    blob: take(path, new / blob, children.largest, within=children.folder)[0]
                    for blob, path in files.items()
                },
                "phases": children.phases,
                "boot": _boot(),
            }
            if learnt:
                document["learnt"], packed = learnt
                (new / LEARNT).write_bytes(packed)
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
            with closing(Parcel(folder, lock, document or {}, self._sign)) as parcel:
                if not document:
                    parcel.drop()
                elif document.keys() >= _FIELDS:
                    yield parcel
                # Else it is another release's, which delivers it when it runs here again.

    @property
    def size(self) -> int:
        """Bytes of all that is in it."""
        return tree_size(self._folder)


class Parcel:
    """One finished program; nobody else touches it while the block lasts."""

    def __init__(self, folder: Path, lock: int, document: Mapping[str, Any], sign: Sign | None = None) -> None:
        self._folder = folder
        self._sign = sign
        self._lock = lock
        self._document = document
        self.job, self.token = str(document.get("job")), str(document.get("token"))
        """The job's id, and the token by which it recognizes this attempt."""
        self.settled = (folder / "settled").exists()
        """Whether it outlives a loss of power."""

    def close(self) -> None:
        """Let go of its lock."""
        os.close(self._lock)

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
        return self._outcome(found)

    def publish(self, artifacts: S3Store) -> Outcome:
        """Upload it and return the attempt's outcome. Raises StorageUnavailable, UsageError, OSError."""
        for _ in range(PUBLISH_TRIES - 1):
            try:
                return self._publish(artifacts)
            except StorageAway:
                raise
            except (StorageUnavailable, UsageError) as error:
                log.warning("cannot publish, trying again", job=self.job, error=error.message)
        return self._publish(artifacts)

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
        there = artifacts.publish(self._document["namespace"], sidecar, sign=self._sign)
        self._publish_learnt(artifacts)
        return self._outcome(there, blobs["log"]["digest"])

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
        found: dict[str, Any] = json.loads((folder / "parcel.json").read_text())
        is_ours = found.keys() >= _FIELDS
    except (OSError, ValueError, AttributeError):  # It is missing, cut short, or no object.
        return None
    sound = not is_ours or found.get("boot") == _boot() or (folder / "settled").exists()
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


LOOK_SECONDS = 5.0  # Seconds between two looks into the outbox.

AWAY_PAUSES = (0.5, 1.5)
"""Seconds between two checks whether storage is back; random, so that nodes do not ask all at once."""

AWAY = "object storage is away"
"""Start of the reason for which jobs wait without a time limit; `_shared.lua` knows it, too."""


class Deliveries:
    """Watches object storage for the supervisor of a node, in a thread."""

    def __init__(self, store: Store, settings: Settings, nudge: Callable[[], None]) -> None:
        self._store = store
        self._settings = settings
        self._nudge = nudge
        self.outbox = Outbox(settings.data_dir.resolve() / "outbox", publishing(settings))
        """Programs that are on this disk alone."""
        self._wake = threading.Event()
        self._suspected = True
        self._refused: dict[str, float] = {}
        """By the tokens of parcels: since when storage refuses them while it answers others."""
        self.resting = ""
        """Why the node's workers take no jobs: storage is away or refuses, or the outbox is full."""

    def start(self) -> None:
        """Begin to watch if the farm has an object storage."""
        if self._settings.s3_bucket:
            # A daemon: the worker must be able to end while storage hangs.
            threading.Thread(target=self._run, name="deliveries", daemon=True).start()

    def suspect(self) -> None:
        """Check storage now: an attempt found it away."""
        self._suspected = True
        self._wake.set()

    def keep_left(self) -> None:
        """Let the jobs of abandoned programs wait for them: their worker process is dead. Raises StoreUnavailable."""
        try:
            for parcel in self.outbox.left():
                with suppress(OSError):  # A full disk gets room when it is delivered.
                    parcel.settle()
                self._store.jobs.renew(parcel.token, parcel.job, phase=Phase.UPLOADING, kept=True)
        except OSError as error:
            log.error("cannot look into the outbox", error=str(error))
        self._wake.set()

    def _run(self) -> None:
        artifacts = S3Store.from_settings(self._settings)
        while True:
            try:
                resting = self._look(artifacts)
            except Exception:  # The next look may succeed, and nothing else looks.
                log.exception("cannot look after the outbox")
                resting = ""
            if resting != self.resting:
                self.resting = resting
                self._nudge()
            self._wake.wait(random.uniform(*AWAY_PAUSES) if resting else LOOK_SECONDS)  # noqa: S311 - keeps no secret
            self._wake.clear()

    def _look(self, artifacts: S3Store) -> str:
        """Deliver the abandoned parcels; return why no jobs can be taken, or an empty text."""
        try:
            if self._suspected or self.resting:
                self._suspected = False
                artifacts.with_patience(0).reach()
            for parcel in self.outbox.left():
                try:
                    self._deliver(parcel, artifacts)
                except StorageAway as error:
                    # A server that lives, and has lost a part of its disk, refuses some names for ever.
                    artifacts.with_patience(0).check()
                    log.error("a finished program waits, others go first", job=parcel.job, error=error.message)
                    since = self._refused.setdefault(parcel.token, time.monotonic())
                    if time.monotonic() - since >= self._settings.outbox_hours * 3600:
                        self._give_up(parcel, error)
        except StorageAway as error:
            self._refused.clear()
            return f"{AWAY}: {error.message}"
        except StorageUnavailable as error:
            return f"its object storage refuses: {error.message}"
        except StoreUnavailable as error:
            log.info("what is left in the outbox waits for the store", error=error.message)
        most = self._settings.outbox_bytes
        if (size := self.outbox.size) > most:
            return f"its outbox is full: {size / 1e9:.2f} GB of finished programs wait, {most / 1e9:g} GB may"
        return ""

    def _deliver(self, parcel: Parcel, artifacts: S3Store) -> None:
        """Publish a program whose attempt has ended, and end the attempt. No other worker compiles it in this time."""
        with suppress(OSError):
            parcel.settle()
        self._store.jobs.renew(parcel.token, parcel.job, phase=Phase.UPLOADING, kept=True)
        try:
            # Whatever the answer was: the program of a cancelled job, or of one that has another attempt by now, is
            # good, too, and the next build that wants it need not compile it.
            outcome = parcel.publish_left(artifacts)
        except StorageAway:
            raise
        except (FarmError, OSError, ValueError) as error:
            self._give_up(parcel, error)
        else:
            self._end(parcel, outcome)

    def _give_up(self, parcel: Parcel, error: Exception) -> None:
        log.error("a finished program cannot be published", job=parcel.job, error=str(error))
        self._end(parcel, Outcome.failure(FailureKind.STORAGE, f"the finished program cannot be published: {error}"))

    def _end(self, parcel: Parcel, outcome: Outcome) -> None:
        self._refused.pop(parcel.token, None)
        answer = self._store.jobs.finish(parcel.job, parcel.token, outcome)
        log.info("finished program delivered", job=parcel.job, end=outcome.end.value, answer=answer)
        parcel.drop()

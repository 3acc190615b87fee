"""TuningDatabase: one pool's, device's and mode's tuning in object storage.

    ns/<namespace>/tuning/<pool>/<device>/<mode>/head.json                {generation, snapshot, …}, moved by If-Match
    ns/<namespace>/tuning/<pool>/<device>/<mode>/deltas/<SHA-256>.gz     what attempts committed and no head has yet

The head names a snapshot, which is a blob. Nobody but `merge` and `prune` moves the head; an attempt only adds a
delta under the name of its own bytes. A delta is deleted once a head holds it, so at every moment head and deltas
together hold everything; since merging is a join, holding something twice changes nothing. That is why a writer may
be killed at any step, and why two of them at once cost time only.

`Collector` commits what the children of one attempt learn, while they run and after they ended, and brings them what
others learn.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

from farm.artifacts.s3 import S3Store
from farm.artifacts.storage import ListedObject, at_once, blob_key, readable, until_moved
from farm.errors import ArtifactGone, Conflict, UsageError
from farm.jobs.state import WorkOrder
from farm.logging import get_logger
from farm.spec import Device
from farm.targets.pools import stem_of
from farm.tuning import exchange
from farm.tuning.formats import CHILD_LIMIT, CHILD_RECORDS, Dropped, canonical, read_folder, write_folder
from farm.tuning.records import (
    LARGEST_DATABASE,
    Log,
    Record,
    RecordSource,
    RecordStore,
    Session,
    Snapshot,
    Table,
    TuningMerged,
    TuningWork,
)

log = get_logger(__name__)

SNAPSHOT_LIMIT = 1 << 30  # Bytes of a packed snapshot that are read at most.
PACKED = "application/gzip"  # The content type of a delta.

HEAD_SCHEMA = 1

MERGE_SECONDS = 600.0  # Age of a delta at which it is merged, however small; attempts find it before, only slower.

MERGE_COUNT = 32  # Number of deltas at which they are merged: each costs a restore one request.


def device_name(device: Device) -> str:
    """Return a device as one part of an object key: `gfx942.sramecc-on.xnack-off-304cu-8xcc`, `cpu`.

    Raises UsageError for `gfx942:any`: what one device learnt is wrong on another, so it shares no tuning.
    """
    if device.arch.endswith(":any"):
        raise UsageError(f"{device.arch} names no one device, so it has no tuning database")
    arch = device.arch.replace(":", ".").replace("+", "-on")
    name = re.sub(r"-(?=\.|$)", "-off", arch)
    for value, unit in ((device.compute_units, "cu"), (device.xcc, "xcc"), (device.cpu_family, "")):
        name += f"-{value}{unit}" if value else ""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)


def mode_name(tuning: Mapping[str, object]) -> str:
    """Return the last part of a database's name, of a spec's `tuning`: the mode.

    With an enforcement of the user's own in it, since what a weaker one found would end the mode's own search for good.
    """
    enforced = tuning.get("miopen_find_enforce")
    return f"{tuning['mode']}-enforce{enforced}" if enforced else str(tuning["mode"])


@dataclass(frozen=True, slots=True)
class Head:
    """Where a database's snapshot is. `snapshot` and `previous` are digests of blobs; `size` is in bytes, packed."""

    generation: int
    snapshot: str
    size: int
    previous: str | None
    moved: str
    records: dict[str, int]  # Number of records by store.
    etag: str


_STORED = ("generation", "snapshot", "size", "previous", "moved", "records")  # The fields that the object has.


@dataclass(frozen=True, slots=True)
class Restored:
    """What was read, merged or not."""

    snapshot: Snapshot
    seen: frozenset[str] = frozenset()  # SHA-256 of every snapshot and delta that need not be read again.


class ForOneRun:
    """Stands for a database if one model is tuned by itself: it knows nothing before, and keeps nothing."""

    name = ""

    def since(self, seen: frozenset[str]) -> Restored:
        """Nobody else learns for this run."""
        return Restored(Snapshot(), seen)

    def commit(self, delta: Snapshot) -> str:
        """Keep what was learnt in the private folder, for later steps of this run."""
        return ""


class TuningDatabase:
    """The tuning records of one pool, device and mode in a namespace. Safe to use from several threads."""

    def __init__(self, artifacts: S3Store, namespace: str, pool: str, device: str, mode: str) -> None:
        """`device` is what `device_name` returns."""
        self._artifacts = artifacts
        self.namespace, self.pool, self.device, self.mode = namespace, pool, device, mode
        self._prefix = f"ns/{namespace}/tuning/{pool}/{device}/{mode}/"

    @property
    def name(self) -> str:
        """The name people give: `POOL/DEVICE/MODE`."""
        return f"{self.pool}/{self.device}/{self.mode}"

    def head(self) -> Head | None:
        """Return where the head points; None if nothing was merged yet. Raises ArtifactGone for a damaged one."""
        found = self._artifacts.get_object(f"{self._prefix}head.json")
        if found is None:
            return None
        try:
            document = json.loads(found.data)
            if document["schema"] != HEAD_SCHEMA:
                raise ValueError(f"its schema is {document['schema']}, this farm reads {HEAD_SCHEMA}")
            blob_key(document["snapshot"])
            return Head(**{name: document[name] for name in _STORED}, etag=found.etag)
        except (ValueError, KeyError, TypeError) as error:
            raise self._unreadable(f"head {found.key}", exchange.cause_of(error)) from None

    def check(self) -> Head | None:
        """Return what `head` does; raises ArtifactGone if the snapshot that it names is of no use either."""
        head = self.head()
        if head and not self._artifacts.has_blob(head.snapshot, head.size):
            raise self._unreadable(f"snapshot {head.snapshot}", "it is gone, or cut")
        if head and (problem := _problem(self._artifacts.read_blob, head.snapshot)):
            raise self._unreadable(f"snapshot {head.snapshot}", problem)
        return head

    def _unreadable(self, what: str, why: str) -> ArtifactGone:
        return ArtifactGone(
            f"the {what} cannot be read: {why}",
            hint=f"a newer farm may read it; `farm tuning prune {self.name} --all` starts an empty database",
        )

    def exists(self) -> bool:
        """Whether the database has any object, readable or not."""
        return any(True for _ in self._artifacts.list_objects(self._prefix))

    def read(self, seen: frozenset[str] = frozenset()) -> Restored:
        """Return all that is known now: the head, and the deltas that are not merged yet; but for what was `seen`."""
        # Deltas first: one that is gone meanwhile is in the head that is read after it.
        deltas, _ = self._deltas(seen)
        head, snapshot = self._merged(seen)
        seen |= {_digest(key) for key in deltas} | ({head.snapshot} if head else set())
        return Restored(snapshot.join(*deltas.values()), seen)

    def since(self, seen: frozenset[str]) -> Restored:
        """Return what is known beyond the snapshots and deltas that were `seen`.

        A namespace that is not `main` also gets what `main` knows.
        """
        own = self.read(seen)
        names = [name for name in readable(self.namespace) if name != self.namespace]
        where = self.pool, self.device, self.mode
        others = [TuningDatabase(self._artifacts, name, *where).read(seen) for name in names]
        snapshot = Snapshot(own.snapshot.join(*(other.snapshot for other in others)).tables, own.snapshot.log)
        return Restored(snapshot, own.seen.union(*(other.seen for other in others)))

    def commit(self, delta: Snapshot) -> str:
        """Add what an attempt learnt; return the delta's name. The same delta again changes nothing."""
        key, packed = self.delta_object(delta)
        self._artifacts.put_object(key, packed, content_type=PACKED)
        log.info("tuning committed", database=self.name, delta=_digest(key), records=len(delta))
        return _digest(key)

    def delta_object(self, delta: Snapshot) -> tuple[str, bytes]:
        """Return the object that adds what an attempt learnt, key and bytes. To put it there is to commit it."""
        packed = exchange.pack(delta)
        return f"{self._prefix}deltas/{hashlib.sha256(packed).hexdigest()}.gz", packed

    def merge(self) -> TuningMerged:
        """Merge all deltas into the head. May be killed and repeated at any step, and run twice at the same time.

        Raises StorageUnavailable when others never stop moving the head, ArtifactGone if head or snapshot is
        damaged.
        """
        return self._move(lambda snapshot: snapshot)

    def merge_due(self, now: datetime) -> bool:
        """Whether the deltas are many, large or old enough to be worth a new snapshot."""
        entries = self.waiting()
        if not entries:
            return False
        oldest = (now - min(entry.modified for entry in entries)).total_seconds()
        if len(entries) >= MERGE_COUNT or oldest >= MERGE_SECONDS:
            return True
        head = self.head()
        return sum(entry.size for entry in entries) * 8 >= (head.size if head else 0)

    def prune(self, keep: Callable[[Snapshot], Snapshot]) -> TuningMerged:
        """Merge, and let the head hold what `keep` leaves of it. What running jobs restored before stays with them."""
        # One after the other: a head that lacks a record is younger than the end of every delta that had it, so a
        # merge that read such a delta before finds either that it is gone, or that the head has moved.
        merged = self.merge()
        pruned = self._move(keep, deltas=False)
        return {**pruned, "deltas": merged["deltas"], "unreadable": merged["unreadable"]}

    def delete(self) -> None:
        """Forget the database. Its snapshots are blobs that retention finds unused."""
        for key in list(self._artifacts.list_objects(self._prefix)):
            self._artifacts.delete_object(key)

    def waiting(self) -> list[ListedObject]:
        """Return the deltas that no head holds yet."""
        return list(self._artifacts.list_entries(f"{self._prefix}deltas/"))

    def _deltas(self, seen: frozenset[str] = frozenset()) -> tuple[dict[str, Snapshot], list[str]]:
        keys = [key for key in self._artifacts.list_objects(f"{self._prefix}deltas/") if _digest(key) not in seen]
        deltas, unreadable = {}, []
        for key, found in zip(keys, at_once(self._artifacts.get_object, keys), strict=True):
            if found is None:
                continue  # Merged and deleted meanwhile.
            try:
                deltas[key] = exchange.unpack(found.data)
            except UsageError as error:
                log.error("delta cannot be read, left as it is", key=key, error=error.message)
                unreadable.append(key)
        return deltas, unreadable

    def _merged(self, seen: frozenset[str] = frozenset()) -> tuple[Head | None, Snapshot]:
        for turn in range(2):
            head = self.head()
            if head is None or head.snapshot in seen:
                return head, Snapshot()
            try:
                return head, exchange.unpack(self._artifacts.read_blob(head.snapshot, SNAPSHOT_LIMIT))
            except UsageError as error:
                raise self._unreadable(f"snapshot {head.snapshot}", error.message) from None
            except ArtifactGone as error:
                # Retention may have taken a snapshot that the head has left meanwhile.
                if turn or self.head() == head:
                    raise self._unreadable(f"snapshot {head.snapshot}", error.message) from None
        raise AssertionError("unreachable")

    def _move(self, change: Callable[[Snapshot], Snapshot], *, deltas: bool = True) -> TuningMerged:
        def attempt() -> TuningMerged | None:
            read, unreadable = self._deltas() if deltas else ({}, [])
            head, before = self._merged()
            # What is gone by now is in the head, or was pruned from it.
            there = {*self._artifacts.list_objects(f"{self._prefix}deltas/")} if read else set()
            waiting = {key: delta for key, delta in read.items() if key in there}
            snapshot = change(before.join(*waiting.values()).fold(datetime.now(UTC)))
            try:
                generation = self._put_head(head, snapshot)
            except Conflict:
                return None
            for key in waiting:
                self._artifacts.delete_object(key)
            log.info("tuning merged", database=self.name, generation=generation, deltas=len(waiting))
            return {
                "generation": generation,
                "deltas": len(waiting),
                "records": len(snapshot),
                "unreadable": unreadable,
            }

        return until_moved(f"{self._prefix}head.json", attempt)

    def _put_head(self, head: Head | None, snapshot: Snapshot) -> int:
        """Point the head to a snapshot, and return its generation. Raises Conflict if somebody moved it."""
        data = exchange.pack(snapshot)
        digest = hashlib.sha256(data).hexdigest()
        if head and head.snapshot == digest:
            return head.generation
        if head is None and not snapshot:
            return 0
        self._artifacts.put_blob_bytes(data)
        generation = head.generation + 1 if head else 1
        new = Head(generation, digest, len(data), head.snapshot if head else None, _now(), snapshot.counts(), etag="")
        document = {"schema": HEAD_SCHEMA, **{name: getattr(new, name) for name in _STORED}}
        self._artifacts.put_object(
            f"{self._prefix}head.json",
            json.dumps(document, indent=1).encode(),
            create=head is None,
            if_match=head.etag if head else "",
        )
        return generation


Learning = TuningDatabase | ForOneRun  # Where an attempt's tuning reads its records, and where it commits new ones.


def _digest(key: str) -> str:
    return key.rpartition("/")[2].removesuffix(".gz")


@lru_cache(maxsize=1024)
def _problem(read_blob: Callable[[str, int], bytes], digest: str) -> str:
    """Return why a blob is not a snapshot, or "". A blob never changes, so each is looked into once."""
    try:
        exchange.unpack(read_blob(digest, SNAPSHOT_LIMIT))
    except UsageError as error:
        return error.message
    return ""


def database_of(artifacts: S3Store, namespace: str, order: WorkOrder) -> TuningDatabase:
    """Return the database that a work order is tuned with.

    The pool's whole name is not part of its own: the device says what else a pool is, or it changes nothing learnt.
    """
    spec = order["spec"]
    pool = stem_of(order["target"], spec["device"]["compute_units"], spec["toolchain"])
    return TuningDatabase(artifacts, namespace, pool, device_name(Device(**spec["device"])), mode_name(spec["tuning"]))


def databases(artifacts: S3Store, namespaces: Sequence[str]) -> Iterator[TuningDatabase]:
    """Yield the databases of these namespaces."""
    for namespace in namespaces:
        root = f"ns/{namespace}/tuning/"
        for pool in artifacts.list_folders(root):
            for device in artifacts.list_folders(f"{root}{pool}/"):
                for mode in artifacts.list_folders(f"{root}{pool}/{device}/"):
                    yield TuningDatabase(artifacts, namespace, pool, device, mode)


class Collector:
    """Takes what is new in one attempt's private folders to the database, and what is new there into them.

    Each slot that tunes for the attempt has a folder of its own. Before a child begins in it, `follow` asks the
    database for news and `prepare` writes them into the folder. Every minute while the child runs, and when it has
    ended in any way, `look` finds what it learnt and `commit` sends that. If the database is away nothing is lost: the
    next call does the same again. To be called by one thread at a time.
    """

    def __init__(
        self, database: Learning, folder: Path, session: str, source: RecordSource, *, patient: Learning | None = None
    ) -> None:
        """Write all that is known into the folder; make it. `session` names this attempt, for ever and everywhere.

        `source` is who measures, whenever that will be. `patient` is the same database, but its requests wait while
        storage is away. Raises what it raises.
        """
        self._database = database
        restored = (patient or database).since(frozenset())
        self.known, self.seen = restored.snapshot, restored.seen  # All records that are known, and where they were.
        self._folders: dict[Path, Snapshot] = {}  # What each folder is known to hold.
        self._write(folder)
        self._pending = Snapshot()  # Records that are not committed yet.
        self._dropped: dict[Path, Dropped] = {}  # What the last look dropped.
        self._source = source
        self._learnt = self._learnt_size = 0  # Records, and their characters, that children have written so far.
        self._session = Session(session, "", TuningWork())
        self._seconds = 0.0
        self.others = len(self.known) > 0  # Whether others have left a record.

    @property
    def slices(self) -> Table:
        """The slices that are known to be tuned, by any job."""
        return self.known.tables.get((RecordStore.SLICES, ""), {})

    def seconds(self, operations: int) -> float:
        """Return the time that this number of operations took to tune, by the average of the known slices."""
        slices = [json.loads(value) for value, _ in self.slices.values()]
        known = sum(each["operations"] for each in slices)
        return operations * sum(each["seconds"] for each in slices) / known if known else 0.0

    def follow(self) -> None:
        """Read what others have committed since the last call. Raises StorageUnavailable."""
        news = self._database.since(self.seen)
        self.seen = news.seen
        if news.snapshot:
            # What a head brings may be our own.
            self.others = self.others or len(news.snapshot.minus(self.known)) > 0
            self.known = self.known.join(Snapshot(news.snapshot.tables))

    def prepare(self, folder: Path) -> None:
        """Write everything that is known into a folder that no child uses; make the folder if it is missing."""
        if folder not in self._folders or self.known.minus(self._folders[folder]):
            self._write(folder)

    def tidy(self, folder: Path) -> None:
        """Write a folder again if a child left broken or undecided records in it, or lost some.

        The next child would trip over them. A child that is killed while it writes a file leaves a part of it, or none.
        """
        found = read_folder(folder, self._source)
        if found.dropped.nulls or found.dropped.broken or self._folders[folder].minus(found.snapshot):
            for path in folder.iterdir():
                if path.is_dir() and not path.is_symlink():
                    continue  # Caches of MIOpen's own; what lies in the place of a file is removed as that is written.
                path.unlink()
            self._write(folder)

    def _write(self, folder: Path) -> None:
        write_folder(self.known, folder)
        self._folders[folder] = self.known

    def look(self, folder: Path, work: TuningWork, finished: Mapping[str, object] | None = None) -> Snapshot:
        """Find the records that are new in a folder since the last look, and return them.

        `work` is what this attempt's tuning has done so far, `finished` the slices that were tuned to their end there.
        Records beyond what all children of an attempt may write together (`CHILD_RECORDS`, `CHILD_LIMIT`) are left out.
        """
        source = replace(self._source, when=_now())
        # Files may be half written: what is whole in them counts now, the rest the next time.
        read = read_folder(folder, source)
        self._dropped[folder] = read.dropped
        found = self._bounded(read.snapshot.minus(self._folders[folder]), folder)
        self._folders[folder] = found.over(self._folders[folder])
        slices = [
            Record(RecordStore.SLICES, "", key, canonical(value), source) for key, value in (finished or {}).items()
        ]
        if new := found.join(Snapshot.of(slices)):
            spent, self._seconds = max(work.seconds - self._seconds, 0.0), work.seconds
            source = replace(source, seconds=round(spent / len(new), 3))
            new = Snapshot.of(replace(record, source=source) for record in new)
            self.known, self._pending = self.known.join(new), self._pending.join(new)
        return found

    def _bounded(self, found: Snapshot, folder: Path) -> Snapshot:
        """Return what was found; nothing if it is too much, since a child can write other records each time."""
        size = sum(len(record.key) + len(record.value) for record in found)
        full = bool(found) and self.known.size + found.size > LARGEST_DATABASE
        if full or self._learnt + len(found) > CHILD_RECORDS or self._learnt_size + size > CHILD_LIMIT:
            self._dropped[folder].files["all files"] = "they have more records than tuning writes"
            return Snapshot()
        self._learnt, self._learnt_size = self._learnt + len(found), self._learnt_size + size
        return found

    def commit(self, work: TuningWork, *, ended: bool = False) -> None:
        """Commit what was found since, if anything; once it `ended`, the session too. Raises as the database does."""
        if self._pending or ended:
            self.seen |= {self._database.commit(self.delta(work))}
            self._pending = Snapshot()

    def delta(self, work: TuningWork) -> Snapshot:
        """Return what was found since the last commit, and what the whole session came to."""
        session = replace(self._session, until=_now(), work=work)
        return Snapshot(self._pending.tables, Log({session.id: session}))

    def finish(self, work: TuningWork) -> None:
        """Commit what is new in all folders, and what the whole session came to. Raises StorageUnavailable."""
        for folder in list(self._folders):
            self.look(folder, work)
            dropped = self._dropped[folder]
            if dropped.broken or dropped.files:
                log.warning("tuning files were damaged", session=self._session.id, broken=dropped.broken)
        self.commit(work, ended=True)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")

"""Collector: commits what the children of one attempt learn, while they run and after they ended, and brings them what
others learn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from farm.logging import get_logger
from farm.tuning.database import Learning
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
    TuningWork,
)

log = get_logger(__name__)


class Collector:
    """Takes what is new in one attempt's private folders to the database, and what is new there into them.

    Each slot that tunes for the attempt has a folder of its own. Before a child begins in it, `follow` asks the
    database for news and `prepare` writes them into the folder. Every minute while the child runs, and when it has
    ended in any way, `look` finds what it learnt and `commit` sends that. If the database is away nothing is lost: the
    next call does the same again. To be called by one thread at a time.
    """

    def __init__(
        self,
        database: Learning,
        folder: Path,
        *,
        session: str,
        patient: Learning | None = None,
        worker: str = "",
        job: str = "",
        toolchain: str = "",
    ) -> None:
        """Write all that is known into the folder; make it. `session` names this attempt, for ever and everywhere.

        `patient` is the same database, but its requests wait while storage is away. Raises what it raises.
        """
        self._database, self._patient = database, patient or database
        restored = self._patient.since(frozenset())
        self._known, self._seen = restored.snapshot, restored.seen
        self._folders: dict[Path, Snapshot] = {}
        """What each folder is known to hold."""
        self._write(folder)
        self._pending = Snapshot()
        """Records that are not committed yet."""
        self._dropped: dict[Path, Dropped] = {}
        """What the last look dropped."""
        self._source = RecordSource("", worker, job, toolchain)
        self._learnt = self._learnt_size = 0
        """Records, and their characters, that children have written so far."""
        self._session = Session(session, "", TuningWork())
        self._seconds = 0.0
        self.others = len(self._known) > 0
        """Whether others have left a record."""

    @property
    def slices(self) -> Table:
        """The slices that are known to be tuned, by any job."""
        return self._known.tables.get((RecordStore.SLICES, ""), {})

    def seconds(self, operations: int) -> float:
        """Return the time that this number of operations took to tune, by the average of the known slices."""
        slices = [json.loads(value) for value, _ in self.slices.values()]
        known = sum(each["operations"] for each in slices)
        return operations * sum(each["seconds"] for each in slices) / known if known else 0.0

    def follow(self) -> None:
        """Read what others have committed since the last call. Raises StorageUnavailable."""
        news = self._database.since(self._seen)
        self._seen = news.seen
        if news.snapshot:
            # What a head brings may be our own.
            self.others = self.others or len(news.snapshot.minus(self._known)) > 0
            self._known = self._known.join(Snapshot(news.snapshot.tables))

    def prepare(self, folder: Path) -> None:
        """Write everything that is known into a folder that no child uses; make the folder if it is missing."""
        if folder not in self._folders or self._known.minus(self._folders[folder]):
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

    def copy(self, folder: Path) -> None:
        """Write all known records into a folder; new records there are not collected."""
        write_folder(self._known, folder)

    def _write(self, folder: Path) -> None:
        write_folder(self._known, folder)
        self._folders[folder] = self._known

    def look(self, folder: Path, work: TuningWork, finished: Mapping[str, Any] | None = None) -> Snapshot:
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
            new = new.measured_by(replace(source, seconds=round(spent / len(new), 3)))
            self._known, self._pending = self._known.join(new), self._pending.join(new)
        return found

    def _bounded(self, found: Snapshot, folder: Path) -> Snapshot:
        """Return what was found; nothing if it is too much, since a child can write other records each time."""
        size = sum(len(record.key) + len(record.value) for record in found)
        full = bool(found) and self._known.size + found.size > LARGEST_DATABASE
        if full or self._learnt + len(found) > CHILD_RECORDS or self._learnt_size + size > CHILD_LIMIT:
            self._dropped[folder].files["all files"] = "they have more records than tuning writes"
            return Snapshot()
        self._learnt, self._learnt_size = self._learnt + len(found), self._learnt_size + size
        return found

    def commit(self, work: TuningWork, *, ended: bool = False, patiently: bool = False) -> None:
        """Commit what was found since the last time, if anything; at the end also what the whole session came to.

        Raises StorageUnavailable, or what the patient database raises.
        """
        if self._pending or ended:
            name = (self._patient if patiently else self._database).commit(self.delta(work))
            self._seen |= {name}
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

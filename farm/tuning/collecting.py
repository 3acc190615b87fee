"""Collector: commits what a child's tuning learns, while it runs and after it ended."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from farm.logging import get_logger
from farm.tuning.database import Learning
from farm.tuning.files import Dropped, read_folder
from farm.tuning.records import Log, Session, Snapshot, Source, Work

log = get_logger(__name__)


def difference(before: Snapshot, folder: Path, source: Source) -> tuple[Snapshot, Dropped]:
    """Return the records that a folder's files have beyond `before`, and what was dropped in reading.

    The files may be half written: what is whole in them counts now, the rest the next time.
    """
    found = read_folder(folder, source)
    return found.snapshot.minus(before), found.dropped


class Collector:
    """Takes what is new in one attempt's private folder to the database.

    `collect` is called every minute while the child runs, `finish` once when it has ended, also when it was killed.
    Where they raise StorageUnavailable nothing is lost: the next call commits the same again.
    """

    def __init__(
        self,
        database: Learning,
        folder: Path,
        restored: Snapshot,
        *,
        session: str,
        worker: str = "",
        job: str = "",
        identifier: str = "",
        toolchain: str = "",
    ) -> None:
        """`restored` is what was in the folder at first; `session` names this attempt, for ever and everywhere."""
        self._database = database
        self._folder = folder
        self._known = restored
        self._source = Source("", worker, job, toolchain)
        self._session = Session(session, "", Work(), worker, job, identifier)

    @property
    def work(self) -> Work:
        """What has been committed of this attempt's work."""
        return self._session.work

    def collect(self, work: Work) -> int:
        """Commit the records that are new since the last call, if any; return how many those are.

        `work` is what this attempt's tuning has done so far.
        """
        return self._collect(work, ended=False)

    def finish(self, work: Work) -> int:
        """Commit what is new since the last call, and what the whole session came to; return how many are new."""
        return self._collect(work, ended=True)

    def _collect(self, work: Work, *, ended: bool) -> int:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        new, dropped = difference(self._known, self._folder, replace(self._source, when=now))
        if ended and (dropped.broken or dropped.files):
            log.warning("tuning files were damaged", session=self._session.id, broken=dropped.broken)
        if not new and not ended:
            return 0
        if new:
            spent = max(work.seconds - self._session.work.seconds, 0.0) / len(new)
            new = new.measured_by(replace(self._source, when=now, seconds=round(spent, 3)))
        session = replace(self._session, until=now, work=work)
        self._database.commit(Snapshot(new.tables, Log({session.id: session})))
        self._known, self._session = new.over(self._known), session
        return len(new)

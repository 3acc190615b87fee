"""Tuning records, and how two sets of them become one. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, astuple, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from operator import add
from typing import Annotated, NotRequired, cast

from pydantic import Field
from typing_extensions import TypedDict

FOLD_AFTER = timedelta(days=7)  # Sessions that ended earlier are kept as sums of their day; no attempt lasts that long.


class RecordStore(StrEnum):
    """The store of a record, which decides how it is merged."""

    PROBLEM_CACHE = "problem_cache"
    """MIGraphX's problem cache. Key: canonical JSON of `{"name", "problem"}`; value: canonical JSON of the solution."""
    FIND_DB = "find_db"
    """MIOpen's user find-db. Key: the problem; value: its whole record, `ID:time_ms,workspace,algorithm;…`."""
    PERF_DB = "perf_db"
    """MIOpen's user perf-db. Key: `PROBLEM=SOLVER`; value: the solver's parameters."""
    ONNXRUNTIME = "onnxruntime"
    """What ONNX Runtime's candidates took. Key: the slice; value: canonical JSON of `{candidate: seconds}`."""
    TIMING_CACHE = "timing_cache"
    """TensorRT's timing cache, whole: only TensorRT can read it. Key: `cache`; value: the file in base64."""
    SLICES = "slices"
    """Slices that were tuned to their end. Key: the slice; value: canonical JSON of `{"operations", "seconds"}`."""


@dataclass(frozen=True, slots=True, order=True)
class RecordSource:
    """Who measured a record, and when (ISO 8601, UTC). `seconds`: what each record of this source took, on average."""

    when: str
    worker: str = ""
    job: str = ""
    toolchain: str = ""
    seconds: float = 0.0


RECORD_SIZE = 200  # Bytes of memory that a record takes in addition to its key and value.

LARGEST_DATABASE = 1 << 30
"""Bytes of memory that the records of a database may take: the control plane and every worker that tunes read all."""

Measured = tuple[str, RecordSource]  # A record's value and source. A tuple, since there are hundreds of thousands.

Table = Mapping[str, Measured]  # Records of one file by key.

Place = tuple[RecordStore, str]
"""A table's place. Its second part says for which device the records are.

For MIOpen it is the file's name, which carries device and version: nothing that another version measured is mixed in.
For TensorRT it is the file's name too, which carries the compute capability. For the problem cache it is the device in
canonical JSON, or empty: ROCm 7.2 and older name none.
"""


@dataclass(frozen=True, slots=True)
class Record:
    """One thing that tuning found out."""

    store: RecordStore
    file: str
    key: str
    value: str
    source: RecordSource


@dataclass(frozen=True, slots=True)
class TuningWork:
    """What sessions of tuning cost and saved, in operations (convolutions and matrix products of a model) and seconds.

    `known` operations came from the database, `tuned` were tuned now, `untunable` left nothing to keep. `saved` is
    what the known ones took when they were tuned; it is an average if that is not known for each.
    """

    known: int = 0
    tuned: int = 0
    untunable: int = 0
    seconds: float = 0.0
    saved: float = 0.0
    sessions: int = 0  # In sums alone.

    def __add__(self, other: TuningWork) -> TuningWork:
        return TuningWork(*map(add, astuple(self), astuple(other)))

    def view(self) -> TuningWorkView:
        """Return the sum as plain JSON."""
        return cast("TuningWorkView", asdict(self))


@dataclass(frozen=True, slots=True)
class Session:
    """What one attempt's tuning has done so far. A later state of the same session takes the earlier one's place."""

    id: str
    until: str  # ISO 8601, UTC.
    work: TuningWork


class TuningWorkView(TypedDict):
    """The results of tuning sessions.

    Operations that were known, were tuned, or are not tunable; seconds spent and saved. With a `date`, the sessions are
    those that ended on this day.
    """

    date: NotRequired[str]
    sessions: int
    known: int
    tuned: int
    untunable: int
    seconds: float
    saved: float


class TuningStats(TypedDict):
    """What a tuning database holds, and what tuning took and saved."""

    database: str
    records: dict[str, int]
    total: TuningWorkView
    days: list[TuningWorkView]


class TuningImported(TypedDict):
    """The result of an import: records by store, how many are new, and the refused ones with the reason."""

    records: dict[str, int]
    added: int
    refused: dict[str, str]


class TuningMerged(TypedDict):
    """The result of a merge: the head's generation, deltas merged, records in all, deltas that cannot be read."""

    generation: int
    deltas: int
    records: int
    unreadable: list[str]


class TuningPruned(TypedDict):
    """How many records were removed, or would be, and how many are left."""

    pruned: int
    left: int


class TuningDatabaseView(TypedDict):
    """A tuning database: what tuning learnt on one pool, device and mode.

    `size` is in bytes, packed; `waiting` counts deltas; `damaged` says why it cannot be read, if so.
    """

    name: str
    namespace: str
    pool: str
    device: str
    mode: str
    generation: NotRequired[Annotated[int, Field(json_schema_extra={"default": 0})]]
    records: NotRequired[Annotated[dict[str, int], Field(json_schema_extra={"default": {}})]]
    size: NotRequired[Annotated[int, Field(json_schema_extra={"default": 0})]]
    moved: NotRequired[Annotated[str, Field(json_schema_extra={"default": ""})]]
    waiting: NotRequired[Annotated[int, Field(json_schema_extra={"default": 0})]]
    damaged: NotRequired[Annotated[str, Field(json_schema_extra={"default": ""})]]


@dataclass(frozen=True, slots=True)
class Log:
    """The sessions, newer ones each and older ones as days; `folded` is the end of the last folded day (ISO date)."""

    sessions: Mapping[str, Session] = field(default_factory=dict)
    days: Mapping[str, TuningWork] = field(default_factory=dict)
    folded: str = ""

    def by_day(self) -> dict[str, TuningWork]:
        """Return the sum of each day on which a session ended, in order."""
        days = dict(self.days)
        for session in self.sessions.values():
            day = session.until[:10]
            days[day] = days.get(day, TuningWork()) + replace(session.work, sessions=1)
        return dict(sorted(days.items()))

    def total(self) -> TuningWork:
        """Return the sum of all sessions."""
        return sum(self.by_day().values(), TuningWork())


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a tuning database holds at one time, or what an attempt adds to it (a *delta*)."""

    tables: Mapping[Place, Table] = field(default_factory=dict)
    log: Log = field(default_factory=Log)

    @classmethod
    def of(cls, records: Iterable[Record], log: Log | None = None) -> Snapshot:
        """Return the snapshot of these records; of several with one key it has the one that the rule prefers."""
        tables: dict[Place, dict[str, Measured]] = {}
        for record in records:
            table = tables.setdefault((record.store, record.file), {})
            _put(record.store, table, record.key, (record.value, record.source))
        return cls(tables, log or Log())

    def __iter__(self) -> Iterator[Record]:
        for (store, file), table in self.tables.items():
            for key, (value, source) in table.items():
                yield Record(store, file, key, value, source)

    def __len__(self) -> int:
        return sum(map(len, self.tables.values()))

    def __bool__(self) -> bool:
        return len(self) > 0 or bool(self.log.sessions or self.log.days)

    @property
    def size(self) -> int:
        """About the bytes of memory that the records take."""
        return sum(
            RECORD_SIZE + len(key) + len(value) for table in self.tables.values() for key, (value, _) in table.items()
        )

    def counts(self) -> dict[str, int]:
        """Return the number of records by store."""
        counts = dict.fromkeys(map(str, RecordStore), 0)
        for (store, _), table in self.tables.items():
            counts[store] += len(table)
        return counts

    def join(self, *others: Snapshot) -> Snapshot:
        """Return a snapshot with every key of all of them. Associative, commutative, idempotent.

        Problem cache and perf-db keep of two records with one key the one that was measured first: an existing
        solution, or solver, is kept. The find-db keeps the whole record with the lower best time, and of timing caches
        the longer one stays, since TensorRT adds to what it was given. What is left equal is decided by value, so that
        every writer comes to the same snapshot.
        """
        tables = {place: dict(table) for place, table in self.tables.items()}
        for other in others:
            for place, table in other.tables.items():
                mine = tables.setdefault(place, {})
                for key, entry in table.items():
                    _put(place[0], mine, key, entry)
        return Snapshot(tables, _join_logs(self.log, *(other.log for other in others)))

    def minus(self, before: Snapshot) -> Snapshot:
        """Return the records that `before` does not have with this value, without a log."""
        tables = {}
        for place, table in self.tables.items():
            known = before.tables.get(place, {})
            new = {key: entry for key, entry in table.items() if key not in known or known[key][0] != entry[0]}
            if new:
                tables[place] = new
        return Snapshot(tables)

    def over(self, under: Snapshot) -> Snapshot:
        """Return `under` with these records in place of its own, and its log: what a folder now holds."""
        tables = {place: dict(table) for place, table in under.tables.items()}
        for place, table in self.tables.items():
            tables.setdefault(place, {}).update(table)
        return Snapshot(tables, under.log)

    def only(self, wanted: Iterable[Record]) -> Snapshot:
        """Return the snapshot with these records alone, and the log as it is."""
        return Snapshot.of(wanted, self.log)

    def fold(self, now: datetime) -> Snapshot:
        """Return the snapshot with sessions that ended long before `now` kept as sums, so that the log stays small.

        What comes later of a folded session does not count again.
        """
        folded = max(self.log.folded, (now.astimezone(UTC) - FOLD_AFTER).date().isoformat())
        old = {name: session for name, session in self.log.sessions.items() if session.until[:10] < folded}
        kept = {name: session for name, session in self.log.sessions.items() if name not in old}
        return replace(self, log=Log(kept, Log(old, self.log.days).by_day(), folded))


def _put(store: RecordStore, table: dict[str, Measured], key: str, entry: Measured) -> None:
    there = table.get(key)
    if there is None or (there != entry and _rank(store, entry) < _rank(store, there)):
        table[key] = entry


def _rank(store: RecordStore, entry: Measured) -> tuple[float, str, str, RecordSource]:
    value, source = entry
    if store is RecordStore.TIMING_CACHE:
        return -float(len(value)), source.when, value, source
    return best_time(value) if store is RecordStore.FIND_DB else 0.0, source.when, value, source


def best_time(record: str) -> float:
    """Return the lowest time of a find-db record in ms; infinity if none can be read."""
    times = [float("inf")]
    for item in record.split(";"):
        # Records of find-db 1.0 name the solver before its time.
        for field_ in item.partition(":")[2].split(",")[:2]:
            try:
                time = float(field_)
            except ValueError:
                continue
            if time > 0:
                times.append(time)
            break
    return min(times)


def _join_logs(*logs: Log) -> Log:
    """Join logs; at most one of them is folded, because deltas contain only sessions."""
    folded = max(logs, key=lambda log: log.folded)
    sessions: dict[str, Session] = {}
    for log in logs:
        for session in log.sessions.values():
            there = sessions.get(session.id)
            if session.until[:10] >= folded.folded and (there is None or _progress(session) > _progress(there)):
                sessions[session.id] = session
    return Log(sessions, folded.days, folded.folded)


def _progress(session: Session) -> tuple[int, str, float, str]:
    """Return the sort key of a session's states. Its operations only grow; the clock of its worker may be set back."""
    work = session.work
    return work.known + work.tuned + work.untunable, session.until, work.seconds, str(session)

"""Finished builds, in an SQLite file with a row for each and for each of its cells; and what new ones compare with.

The file is made of the reports in object storage and of nothing else: each control plane has its own, fills it in the
background, and makes it again if it is lost, damaged or of another release. What a ref names is never read from it.
What a build's cells are compared with is found once, when it is planned, and kept in its plan: a report says the same
whenever it is read.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from math import inf, nextafter
from pathlib import Path
from typing import NamedTuple, TypeVar

from pydantic_core import from_json, to_json

from farm.artifacts.refs import Refs, SnapshotCell
from farm.artifacts.s3 import S3Store
from farm.artifacts.storage import build_key, builds_prefix
from farm.builds.plan import FIRST, is_measured
from farm.builds.planner import KnownArtifacts
from farm.errors import ArtifactGone, FarmFault, NotFound, UsageError, suggestion
from farm.jobs.facts import ArtifactFacts, TurnsFacts
from farm.jobs.state import State, WorkOrder
from farm.logging import get_logger
from farm.matrix.planned import UNKNOWN, Baseline, CellGates, CellPlan, PastState, Values
from farm.results.gates import MEASURES, runs_alike, turns_with, values_of
from farm.results.ref_rules import LATEST, given
from farm.results.report import BuildView, JudgedCell, PastCell, Report
from farm.results.verdict import CellEnd, CellLine
from farm.store import Store
from farm.units import view_of
from farm.wire.asked import ChosenGates

log = get_logger(__name__)

KEPT = 500  # Builds of one name whose cells are kept; older ones are read again when somebody asks for them.
AT_ONCE = 20  # Reports that one question reads at most before it is answered; the rest is read in the background.
PATIENCE = 5.0  # Seconds that one question reads reports at most.
_VERSION = 8  # Of the tables: a file of another version is made again.

_TABLES = (
    # `kept`: whether its cells are there. The first page asks for the sums of a month: of the cells of 40 builds of
    # 50,000 each that took seven seconds.
    "CREATE TABLE builds (number INTEGER PRIMARY KEY, namespace, id, name, aside, ended, kept, document,"
    " passed INTEGER, hits INTEGER, saved REAL)",
    "CREATE INDEX builds_by_name ON builds (namespace, name, ended)",
    f"CREATE TABLE cells (build INTEGER, place INTEGER, {', '.join(CellLine._fields)}, hit, toolchain, node,"
    " numbers, PRIMARY KEY (build, place)) WITHOUT ROWID",
    "CREATE INDEX cells_by_name ON cells (identifier, build)",
    "CREATE VIEW past AS SELECT cells.*, namespace, id, name, aside, ended FROM cells"
    " JOIN builds ON number = build WHERE kept",
    f"PRAGMA user_version = {_VERSION}",
)
_ADD_BUILD = (
    "INSERT OR REPLACE INTO builds SELECT ?, ?, ?, ?, ?, ?, TRUE, ?, ?, ?, ?"
    " WHERE NOT EXISTS (SELECT 1 FROM builds WHERE number = ? AND kept) RETURNING number"
)
_ADD_CELL = f"INSERT OR REPLACE INTO cells VALUES ({','.join('?' * (len(CellLine._fields) + 6))})"  # noqa: S608 - only question marks

_BY_NODE = """
WITH wanted AS (
    SELECT json_extract(value, '$[0]') AS identifier, json_extract(value, '$[1]') AS name,
        json_extract(value, '$[2]') AS toolchain, json_extract(value, '$[3]') AS program,
        strftime('%s', json_extract(value, '$[4]')) AS made
    FROM json_each(?)
)
SELECT identifier, node, numbers, MIN(ABS(ended - made)) FROM wanted JOIN past USING (identifier, name, toolchain)
WHERE made IS NOT NULL AND namespace = ? AND NOT aside AND look = 'compiled' AND node != '' AND key != program
GROUP BY identifier, node
"""


Line = TypeVar("Line", CellLine, CellEnd)


class StandIn(NamedTuple):
    """Which programs of a cell may stand in for a baseline: those of its `manifest` and `toolchain`.

    `program` is the key of the one that is compared; `made` is when the baseline was, as its sidecar says it.
    """

    manifest: str
    toolchain: str
    program: str
    made: str


class EndedCells(NamedTuple):
    """A build with its cells in short."""

    build: BuildView
    cells: list[CellLine]


class Reach(NamedTuple):
    """How far the index goes back for some manifests: it has all of their builds that ended after `since`.

    Unix seconds; minus infinity if it has all. `share` is how much of the namespace it has, from 0 to 1.
    """

    since: float
    share: float

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing."""
        return self.since == -inf

    def __str__(self) -> str:
        return f"the index is at {min(99, int(self.share * 100))} %"


class DayOfBuilds(NamedTuple):
    """The cells that succeeded on a day, which begins at `day`; compiling the hits had taken `saved` seconds."""

    day: float
    cells: int
    hits: int
    saved: float


class BuildIndex:
    """The index of finished builds. Thread-safe."""

    def __init__(self, path: Path, store: Store, artifacts: S3Store) -> None:
        self._path = path
        self._store = store
        self._artifacts = artifacts
        self._unread: dict[str, set[str]] = {}
        """The builds in object storage that may have a report which is not in the file, by namespace."""
        self._listed: dict[str, int] = {}
        self._filling = threading.Lock()  # One thread fills the index at a time; no question waits for it.

    # --- what it has --------------------------------------------------------------------------------------------

    def cells(self, namespace: str, build_id: str, kind: type[Line]) -> tuple[BuildView, list[Line]] | None:
        """Return a finished build with its cells, as lines or only how they ended; None if the index lacks it."""
        number = (_number(namespace, build_id),)
        columns = f"SELECT {', '.join(kind._fields)} FROM cells"  # noqa: S608 - only names of fields
        with self._open() as database:
            database.row_factory = None
            found = database.execute("SELECT document FROM builds WHERE number = ? AND kept", number).fetchone()
            rows = database.execute(f"{columns} WHERE build = ? ORDER BY place", number) if found else ()
            return (json.loads(found[0]), [kind._make(row) for row in rows]) if found else None

    def builds(self, namespace: str) -> dict[str, BuildView]:
        """Return the finished builds of a namespace, by id."""
        found = self._rows("SELECT id, document FROM builds WHERE namespace = ? AND document NOT NULL", (namespace,))
        return {row["id"]: json.loads(row["document"]) for row in found}

    def of(self, namespace: str, identifier: str, limit: int = 50) -> list[PastCell]:
        """Return how a cell ended, the newest build first."""
        newest = "SELECT * FROM past WHERE identifier = ? AND namespace = ? ORDER BY ended DESC LIMIT ?"
        return [_past(row) for row in self._rows(newest, (identifier, namespace, limit))]

    def last(
        self, namespace: str, manifest: str, identifiers: Collection[str], since: float = -inf
    ) -> dict[str, PastCell]:
        """Return how cells ended in the newest build of a manifest that had them and did not cancel them.

        Builds that ended up to `since` (Unix seconds) are left out, and follow-ups and shadow builds, which say nothing
        of how the manifest does.
        """
        missing, found = set(identifiers), dict[str, PastCell]()
        with self._open() as database:
            builds = database.execute(
                "SELECT number FROM builds WHERE namespace = ? AND name = ? AND ended > ? AND NOT aside"
                " ORDER BY ended DESC",
                (namespace, manifest, since),
            ).fetchall()
            for (number,) in builds:
                rows = database.execute(
                    "SELECT * FROM past WHERE build = ? AND look != 'cancelled'"
                    " AND identifier IN (SELECT value FROM json_each(?))",
                    (number, json.dumps(list(missing))),
                )
                found |= {row["identifier"]: _past(row) for row in rows}
                missing -= found.keys()
                if not missing:
                    break
        return found

    def by_node(self, namespace: str, wanted: Mapping[str, StandIn]) -> dict[str, dict[str, Values]]:
        """Return numbers that may stand in for baselines that other nodes made, by identifier and node.

        Of each node it is the program that passed in the build nearest in time to the baseline: one that is compared
        with it later cannot take its place, so many small steps do not pass together. Hits are left out.
        """
        rows = [[name, *each] for name, each in wanted.items()]
        found: dict[str, dict[str, Values]] = {}
        for row in self._rows(_BY_NODE, (json.dumps(rows), namespace)):
            found.setdefault(row["identifier"], {})[row["node"]] = json.loads(row["numbers"])
        return found

    def turns(self, namespace: str, pairs: Mapping[str, tuple[str, str]]) -> dict[str, TurnsFacts]:
        """Return how programs compared when a build last let them take turns with their baselines, by identifier.

        `pairs` has the cells, each with the cache keys of its program and of the baseline.
        """
        rows = self._rows(
            "SELECT identifier, key, json_extract(numbers, '$.turns') AS turns FROM past"
            " WHERE identifier IN (SELECT value FROM json_each(?)) AND namespace = ? AND turns NOT NULL"
            " ORDER BY ended",
            (json.dumps(list(pairs)), namespace),
        )
        found = [(row["identifier"], row["key"], json.loads(row["turns"])) for row in rows]
        return {name: turns for name, key, turns in found if pairs[name] == (key, turns["key"])}

    def days(self, namespace: str, since: float) -> list[DayOfBuilds]:
        """Return what was built on each day (UTC) since a moment (Unix seconds), the oldest day first."""
        rows = self._rows(
            "SELECT unixepoch(date(ended, 'unixepoch')) AS day, SUM(passed), SUM(hits), SUM(saved) FROM builds"
            " WHERE namespace = ? AND ended >= ? AND passed > 0 GROUP BY day ORDER BY day",
            (namespace, since),
        )
        return [DayOfBuilds(*row) for row in rows]

    # --- how it is filled ---------------------------------------------------------------------------------------

    def add(self, report: Report) -> EndedCells:
        """Take a build's report, and return the build. Repeating it changes nothing."""
        build, lines = report["build"].copy(), [CellLine.of(cell) for cell in report["cells"]]
        build.pop("outlook", None)
        number, aside = _number(build["namespace"], build["id"]), bool(build.get("follows") or build.get("shadows"))
        row = number, build["namespace"], build["id"], build["name"], aside, build["ended_at"] or 0.0, json.dumps(build)
        passed = [cell for line, cell in zip(lines, report["cells"], strict=True) if line.succeeded]
        hits = [cell["facts"] for cell in passed if cell["hit"]]
        saved = sum(facts.get("compile_seconds") or 0.0 for facts in hits if facts)
        cells = enumerate(zip(lines, report["cells"], strict=True))
        with self._open() as database:
            if database.execute(_ADD_BUILD, (*row, len(passed), len(hits), saved, number)).fetchall():
                rows = ((number, place, *line, *_more(cell)) for place, (line, cell) in cells)
                database.executemany(_ADD_CELL, rows)
            for (old,) in database.execute(
                "UPDATE builds SET kept = FALSE WHERE kept AND number IN (SELECT number"
                " FROM builds WHERE namespace = ? AND name = ? ORDER BY ended DESC LIMIT -1 OFFSET ?) RETURNING number",
                (build["namespace"], build["name"], KEPT),
            ).fetchall():
                database.execute("DELETE FROM cells WHERE build = ?", (old,))
        self._unread.get(build["namespace"], set()).discard(build["id"])
        return EndedCells(build, lines)

    def catch_up(self, namespace: str, manifests: Collection[str] | None = None) -> Reach:
        """Read the reports of some manifests (by default of all) that are not in the index yet, the newest first.

        That is bounded (`AT_ONCE`, `PATIENCE`). Return how far the index then goes back.
        """
        ids, known = self._store.builds.ids(namespace), self._known(namespace)
        unread = self.unread(namespace)
        rows = self._store.builds.list(namespace, [each for each in ids if each not in known])
        ended = {
            row["id"]: row["ended_at"] or 0.0
            for row in rows
            if row["state"] == "reported" and (manifests is None or row["name"] in manifests)
        }
        # The store forgets the oldest builds first, or all of them: what it does not know ended before what it knows.
        older = unread - set(ids)
        wanted = sorted(ended, key=lambda each: -ended[each]) + (sorted(older) if manifests is None else [])
        until, since = time.monotonic() + PATIENCE, -inf
        for count, build_id in enumerate(wanted):
            if count == AT_ONCE or time.monotonic() > until:
                since = ended.get(build_id, 0.0)
                break
            self._read(namespace, build_id, ended=build_id in ended)
        if missing := self._unread.get(namespace, older) & older:
            known = self._known(namespace)
            first = min((known[each] for each in ids if each in known), default=inf)
            since = max(since, nextafter(first, -inf))
        return Reach(since, 1 - len(missing) / max(1, self._listed[namespace]))

    def unread(self, namespace: str) -> set[str]:
        """Return the builds that may have a report which is not in the index yet: open ones, too."""
        unread = self._unread.get(namespace)
        return self._look(namespace) if unread is None else set(unread)

    def fill(self) -> None:
        """Read all reports that are not in the index yet."""
        # While a connection is open, no other one writes the log back to the file when it is closed.
        with self._filling, closing(self._connected()):
            for namespace in self._artifacts.list_folders("ns/"):
                for build_id in sorted(self._look(namespace)):
                    self._read(namespace, build_id)

    def rebuild(self) -> int:
        """Make the file again of all reports in object storage; return how many there are."""
        self._forget()
        self.fill()
        return int(self._rows("SELECT COUNT(*) FROM builds WHERE document NOT NULL")[0][0])

    def _look(self, namespace: str) -> set[str]:
        """Find out which builds in object storage are not in the index; return them."""
        listed = set(self._artifacts.list_folders(builds_prefix(namespace)))
        unread = listed - self._known(namespace).keys()
        self._listed[namespace], self._unread[namespace] = len(listed), unread
        return set(unread)

    def _known(self, namespace: str) -> dict[str, float]:
        found = self._rows("SELECT id, ended FROM builds WHERE namespace = ?", (namespace,))
        return {row["id"]: row["ended"] for row in found}

    def _read(self, namespace: str, build_id: str, *, ended: bool = False) -> None:
        """Read a build's report, if there is one. That of a build that has `ended` is never looked for again."""
        stored = self._artifacts.get_object(build_key(namespace, build_id, "report.json"))
        readable = not ended
        try:
            if stored:
                self.add(from_json(stored.data))
                readable = True
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("report unreadable, it is not in the index", build=build_id, error=repr(error))
            readable = False
        if not readable:
            with self._open() as database:
                database.execute(
                    "INSERT OR REPLACE INTO builds VALUES (?, ?, ?, NULL, NULL, 0, FALSE, NULL, 0, 0, 0)",
                    (_number(namespace, build_id), namespace, build_id),
                )
        self._unread.get(namespace, set()).discard(build_id)

    # --- the file -----------------------------------------------------------------------------------------------

    def _rows(self, statement: str, values: Sequence[object] = ()) -> list[sqlite3.Row]:
        with self._open() as database:
            return database.execute(statement, values).fetchall()

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """Open the file for one transaction; one that is found damaged is made again, and filled at the next look.

        Who writes begins with that: after a read, SQLite would refuse to write what another one wrote meanwhile.
        Raises FarmFault if it cannot be used.
        """
        try:
            with closing(self._connected()) as database:
                database.execute("BEGIN")
                yield database
                database.execute("COMMIT")
        except sqlite3.OperationalError as error:
            hint = f"look at {self._path} and the room on its disk"
            raise FarmFault(f"the index of builds cannot be used: {error}", hint=hint) from None
        except sqlite3.DatabaseError as error:
            log.warning("the index of builds is damaged, it is made again", error=str(error))
            self._forget()
            raise FarmFault("the index of builds was damaged and is made again", hint="try again") from None

    def _connected(self, *, again: bool = False) -> sqlite3.Connection:
        """Connect to the file, which is made `again`, once, if it is damaged, or of something else."""
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with suppress(OSError):  # SQLite says what is wrong.
            # It has builds of all namespaces; one of an older farm was open to others.
            self._path.touch(0o600)
            self._path.chmod(0o600)
        database = sqlite3.connect(self._path, timeout=30.0, isolation_level=None)
        try:
            database.row_factory = sqlite3.Row
            # What a crash loses is read again from the reports.
            database.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL;")
            if database.execute("PRAGMA user_version").fetchone()[0] != _VERSION:
                _make_tables(database)
                self._unread.clear()
            return database
        except sqlite3.DatabaseError as error:
            database.close()
            if again or isinstance(error, sqlite3.OperationalError):
                raise
            log.warning("the index of builds cannot be read, it is made again", error=str(error))
            self._forget()
            return self._connected(again=True)

    def _forget(self) -> None:
        for suffix in ("", "-wal", "-shm"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
        self._unread.clear()


def _number(namespace: str, build_id: str) -> int:
    """Return the number of a build, the same in every file: if one is lost, no build gets another one's cells."""
    return int(hashlib.sha256(f"{namespace} {build_id}".encode()).hexdigest()[:15], 16)


def _make_tables(database: sqlite3.Connection) -> None:
    """Make the tables. Raises DatabaseError if the file has others: of another version, or of something else."""
    database.execute("BEGIN IMMEDIATE")
    if database.execute("PRAGMA user_version").fetchone()[0] != _VERSION:
        if database.execute("SELECT 1 FROM sqlite_master").fetchone():
            raise sqlite3.DatabaseError("it has other tables")
        for statement in _TABLES:
            database.execute(statement)
    database.execute("COMMIT")


def _more(cell: JudgedCell) -> tuple[object, ...]:
    """Return what a cell's history has besides its line."""
    facts = cell.get("facts")
    if not facts:
        return bool(cell["hit"]), "", "", "{}"
    values = values_of(facts)
    if turns := facts.get("turns"):
        values["turns"] = turns
    return bool(cell["hit"]), facts["toolchain"], facts.get("node") or "", to_json(values).decode()


def _past(row: sqlite3.Row) -> PastCell:
    known = dict(zip(row.keys(), row, strict=True))
    known |= {
        "build": row["id"],
        "manifest": "" if row["aside"] else row["name"],
        "state": _STATES.get(row["look"], row["look"]),
        "expected": row["look"] == "expected",
        "hit": bool(row["hit"]),
        "values": json.loads(row["numbers"]),
    }
    return view_of(PastCell, known)


_STATES = {"compiled": "succeeded", "hit": "succeeded", "expected": "failed"}

T = TypeVar("T")


class Baselines:
    """Finds what cells are compared with."""

    def __init__(self, refs: Refs, known: KnownArtifacts, index: BuildIndex) -> None:
        self._refs = refs
        self._known = known
        self._index = index

    def attach(
        self,
        namespace: str,
        manifest: str,
        cells: Sequence[CellPlan],
        chosen: ChosenGates | None,
        *,
        instead: Mapping[str, SnapshotCell] | None = None,
        unattended: bool = False,
    ) -> list[str]:
        """Write into planned cells what they are compared with; return warnings about tags that do not exist yet.

        `instead` has the cells to compare with, by identifier, in place of those that their tags name. Nobody waits
        for an `unattended` build: if it has no baseline, its cells say that they cannot be judged.
        Where a gate on speed asks for it, the work order names the baseline's program, for turns with the new one or
        with the one that is there already (`farm.builds.plan.is_measured`). Hits keep no work order that they need not.

        Raises UsageError for a tag that does not exist, unless it is `latest` or a first run, ArtifactGone for one that
        cannot be read.
        """
        for cell in cells:
            if chosen:
                cell["gates"] = _laid_over(cell["gates"], chosen)
        limited = [cell for cell in cells if cell["gates"].get("limits")]
        asked = {chosen["baseline"]} - {""} if chosen else set()
        tags = sorted(asked | {cell["gates"]["baseline"] for cell in limited})
        first = bool(chosen and chosen.get("first"))
        named, absent, warnings = (
            self._named(namespace, tags, first=first, unattended=unattended)
            if instead is None
            else (dict.fromkeys(tags, instead), {}, [])
        )
        entries = {cell["identifier"]: named[cell["gates"]["baseline"]].get(cell["identifier"]) for cell in limited}
        facts = self._known.facts(namespace, [entry["key"] for entry in entries.values() if entry])
        manifests = {manifest, *(entry.get("manifest", "") for entry in entries.values() if entry)}
        reach = _known(lambda: self._index.catch_up(namespace, manifests), Reach(inf, 0.0))
        before = self._before(namespace, manifest, [cell["identifier"] for cell in cells], reach)
        once = [cell for cell in limited if any(MEASURES[name].how == "once" for name in cell["gates"]["limits"])]
        stand_ins = {
            cell["identifier"]: StandIn(
                entry.get("manifest", ""),
                entry["toolchain"],
                cell["facts"]["key"] if cell["facts"] else cell["key"],
                found["created"],
            )
            for cell in once
            if (entry := entries[cell["identifier"]]) and (found := facts.get(entry["key"]))
        }
        # What is not read yet may be nearer in time.
        by_node = dict[str, dict[str, Values]]()
        if reach.is_whole:
            by_node = _known(lambda: self._index.by_node(namespace, stand_ins), by_node)
        for cell in cells:
            cell["before"] = past_state = before.get(cell["identifier"])
            if past_state and past_state["state"] == State.FAILED and cell["reason"] == FIRST:
                cell["reason"] = f"failed last time: {past_state['kind']}"
        for cell in limited:
            entry = entries[cell["identifier"]]
            found = facts.get(entry["key"]) if entry else None
            tag = cell["gates"]["baseline"]
            key = entry["key"] if entry else ""
            cell["baseline"] = baseline = _baseline(tag, key, found, by_node.get(cell["identifier"], {}))
            if tag in absent:
                baseline["absent"] = absent[tag]
            if found and not reach.is_whole:
                baseline["unread"] = str(reach)
        past = self._past_turns(namespace, limited)
        for cell in limited:
            _ask_for_turns(cell, cell["baseline"], past.get(cell["identifier"]))
        for cell in cells:
            if cell["facts"] and cell["order"] and not (is_measured(cell) or cell["order"].get("background")):
                cell["order"] = None
        if unknown := sum(past["state"] == UNKNOWN for past in before.values()):
            warnings.append(f"{reach}: it is not known how {unknown} of the cells ended before")
        return warnings

    def _named(
        self, namespace: str, tags: Sequence[str], *, first: bool, unattended: bool
    ) -> tuple[Mapping[str, Mapping[str, SnapshotCell]], dict[str, str], list[str]]:
        """Return the cells that tags name, why some tags cannot judge, and warnings. Raises as `attach`."""
        named, absent, warnings = dict[str, Mapping[str, SnapshotCell]](), dict[str, str](), list[str]()
        for tag in tags:
            named[tag] = {}
            try:
                named[tag] = self._read(namespace, tag)
            except (NotFound, ArtifactGone) as error:
                if isinstance(error, NotFound) and (first or tag == LATEST):
                    warnings.append(f"{error.message}: this is a first run, nothing is compared with it")
                elif unattended:
                    absent[tag] = error.message
                    warnings.append(f"cannot judge: {error.message}")
                elif isinstance(error, ArtifactGone):
                    raise
                else:
                    hint = "; ".join(filter(None, (error.hint, "`--first` if this is the first run")))
                    raise UsageError(f"the gates have no baseline: {error.message}", hint=hint) from None
        return named, absent, warnings

    def _read(self, namespace: str, tag: str) -> Mapping[str, SnapshotCell]:
        """Return the cells that a tag names, by identifier: of several toolchains the one that readers get.

        Raises NotFound if neither the namespace nor `main` has the tag, ArtifactGone.
        """
        if found := self._refs.read(self._refs.owner(namespace, tag), tag):
            return given(found["cells"].values())
        hint = suggestion(tag, self._refs.readable(namespace))
        raise NotFound(f"the tag {tag} does not exist in namespace {namespace}", hint=hint)

    def _before(
        self, namespace: str, manifest: str, identifiers: Sequence[str], reach: Reach
    ) -> Mapping[str, PastState]:
        """Return how cells ended before; a cell whose past is not read yet is neither new nor fixed."""
        unknown: PastState = {"state": UNKNOWN, "kind": str(reach), "build": ""}
        known = _known(lambda: self._index.last(namespace, manifest, identifiers, reach.since), dict[str, PastCell]())
        found = {name: view_of(PastState, past) for name, past in known.items()}
        return found if reach.is_whole else {**dict.fromkeys(identifiers, unknown), **found}

    def _past_turns(self, namespace: str, cells: Sequence[CellPlan]) -> Mapping[str, TurnsFacts]:
        """Return how hits compared with their baselines when an earlier build measured that, by identifier."""
        pairs = {
            cell["identifier"]: (cell["facts"]["key"], baseline["key"])
            for cell in cells
            if cell["facts"] and (baseline := cell.get("baseline")) and baseline["key"]
        }
        return _known(lambda: self._index.turns(namespace, pairs), {}) if pairs else {}


def _known(question: Callable[[], T], unknown: T) -> T:
    """Return what the index answers; else `unknown`, if it cannot be used."""
    try:
        return question()
    except FarmFault as error:
        log.warning("what was before is not known", error=error.message)
        return unknown


def _laid_over(gates: CellGates, chosen: ChosenGates) -> CellGates:
    laid: CellGates = {**gates, "undecided": gates.get("undecided", "warn"), "hits": gates.get("hits", "measure")}
    limits = {**laid.pop("limits", {}), **chosen.get("limits", {})}
    budgets = {**laid.pop("budgets", {}), **chosen.get("budgets", {})}
    if on := {name: limit for name, limit in limits.items() if limit is not None}:
        laid["limits"], laid["baseline"] = on, chosen.get("baseline") or gates.get("baseline") or LATEST
    if on := {name: budget for name, budget in budgets.items() if budget is not None}:
        laid["budgets"] = on
    return laid


def _baseline(tag: str, key: str, facts: ArtifactFacts | None, by_node: Mapping[str, Values]) -> Baseline:
    baseline: Baseline = {"ref": tag, "key": key, "toolchain": "", "values": {}, "by_node": {}}
    if facts:
        baseline |= {"toolchain": str(facts["toolchain"]), "values": values_of(facts)}
        baseline |= {"by_node": by_node, "runs_as": facts.get("runs_as", "")}
    return baseline


def _ask_for_turns(cell: CellPlan, baseline: Baseline | None, past: TurnsFacts | None) -> None:
    """Let a miss take turns with its baseline, and a hit that has not yet, if a gate on speed asks for that."""
    limits = [limit for name, limit in cell["gates"]["limits"].items() if MEASURES[name].how == "in turns"]
    facts, order = cell["facts"], cell["order"]
    own = cell["key"], facts and facts["key"]
    if not (limits and order and baseline and baseline["values"]) or baseline["key"] in own:
        return
    if facts:
        if past:
            baseline["turns"] = past
        if turns_with(baseline, facts) or runs_alike(facts, baseline):
            return
        if why := _unmeasured(cell, order):
            baseline["unmeasured"] = why
            return
        cell["reason"] = f"measured in turns with {baseline['ref']}'s"
    elif cell["state"] != "miss":
        return
    cell["order"] = {**order, "against": baseline["key"], "limit": min(limits)}


def _unmeasured(cell: CellPlan, order: WorkOrder) -> str:
    """Return why a hit is not measured now; empty if it is."""
    if cell["gates"].get("hits") == "list":
        return "`hits: list` leaves it unmeasured"
    if order.get("cross"):
        return "it is compiled where its GPU is not"
    return "" if cell["live_workers"] else f"no live worker serves {cell['pool']}"

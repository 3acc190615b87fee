"""The history of each cell: how it ended in each build, and its numbers.

An SQLite file of each control plane, made of the reports in object storage and of nothing else: what is missing in it
is read from there, and a lost or damaged file is made again.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from farm.artifacts import build_key, builds_prefix
from farm.artifacts.s3 import S3Store
from farm.errors import FarmFault
from farm.jobs.facts import TurnsFacts
from farm.logging import get_logger
from farm.matrix.planned import Values
from farm.results.gates import values_of
from farm.results.report import PastCell, Report

log = get_logger(__name__)

KEPT = 500
"""Builds of one cell that are kept."""

LOOK_EVERY = 60.0
"""Seconds between two looks for reports that another control plane wrote."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS reports (namespace TEXT, build TEXT, PRIMARY KEY (namespace, build)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS cells (
    namespace TEXT, identifier TEXT, ended REAL, build TEXT, manifest TEXT, state TEXT, kind TEXT, expected INTEGER,
    hit INTEGER, "key" TEXT, toolchain TEXT, device TEXT, node TEXT, error REAL, "values" TEXT,
    PRIMARY KEY (namespace, identifier, ended, build)
) WITHOUT ROWID;
"""


class CellHistory:
    """The histories of all cells in all namespaces."""

    def __init__(self, path: Path, artifacts: S3Store) -> None:
        self._path = path
        self._artifacts = artifacts
        self._looked: dict[str, float] = {}
        self._looking = threading.Lock()

    def add(self, report: Report) -> None:
        """Take a build's report. Repeating it changes nothing."""
        namespace, build = report["build"]["namespace"], report["build"]["id"]
        rows = list(_rows(report))
        with self._open() as database:
            database.execute("INSERT OR IGNORE INTO reports VALUES (?, ?)", (namespace, build))
            database.executemany("INSERT OR REPLACE INTO cells VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)", rows)
            database.executemany(
                "DELETE FROM cells WHERE namespace = ?1 AND identifier = ?2 AND ended < (SELECT ended FROM cells"
                " WHERE namespace = ?1 AND identifier = ?2 ORDER BY ended DESC LIMIT 1 OFFSET ?3)",
                [(row[0], row[1], KEPT - 1) for row in rows],
            )

    def of(self, namespace: str, identifier: str, limit: int = 50) -> list[PastCell]:
        """Return how a cell ended, the newest build first."""
        self._catch_up(namespace)
        with self._open() as database:
            found = database.execute(
                "SELECT * FROM cells WHERE namespace = ? AND identifier = ? ORDER BY ended DESC LIMIT ?",
                (namespace, identifier, limit),
            )
            return [_past(row) for row in found]

    def last(self, namespace: str, manifest: str, identifiers: Sequence[str]) -> dict[str, PastCell]:
        """Return how cells ended in the newest build of a manifest that had them and did not cancel them."""
        self._catch_up(namespace)
        with self._open() as database:
            rows = database.execute(
                "SELECT *, MAX(ended) FROM cells WHERE namespace = ? AND manifest = ? AND state != 'cancelled'"
                " AND identifier IN (SELECT value FROM json_each(?)) GROUP BY identifier",
                (namespace, manifest, json.dumps(list(identifiers))),
            )
            return {row["identifier"]: _past(row) for row in rows}

    def by_node(self, namespace: str, toolchains: Mapping[str, str]) -> dict[str, dict[str, Values]]:
        """Return the newest numbers that were measured for cells, by identifier and node.

        `toolchains` has the cells, each with the toolchain that made the programs. Hits are none of them.
        """
        self._catch_up(namespace)
        found: dict[str, dict[str, Values]] = {}
        with self._open() as database:
            rows = database.execute(
                "SELECT *, MAX(ended) FROM cells WHERE namespace = ? AND hit = 0 AND node != ''"
                " AND identifier IN (SELECT value FROM json_each(?)) GROUP BY identifier, node, toolchain",
                (namespace, json.dumps(list(toolchains))),
            )
            for row in map(_past, rows):
                if toolchains[row["identifier"]] == row["toolchain"]:
                    found.setdefault(row["identifier"], {})[row["node"]] = row["values"]
        return found

    def turns(self, namespace: str, pairs: Mapping[str, tuple[str, str]]) -> dict[str, TurnsFacts]:
        """Return how hits compared when a build last let them take turns with their baselines, by identifier.

        `pairs` has the cells, each with the cache keys of its program and of the baseline.
        """
        self._catch_up(namespace)
        with self._open() as database:
            rows = database.execute(
                'SELECT identifier, "key", json_extract("values", \'$.turns\') AS turns FROM cells'
                " WHERE namespace = ? AND hit = 1 AND identifier IN (SELECT value FROM json_each(?))"
                " AND turns IS NOT NULL ORDER BY ended",
                (namespace, json.dumps(list(pairs))),
            )
            found = [(row["identifier"], row["key"], json.loads(row["turns"])) for row in rows]
        return {name: turns for name, key, turns in found if pairs[name] == (key, turns["key"])}

    def rebuild(self) -> int:
        """Make the file again of all reports in object storage; return how many there are."""
        with self._looking:
            self._forget()
            self._looked.clear()
            return sum(self._read_new(namespace) for namespace in self._artifacts.list_folders("ns/"))

    # --- how it is kept -----------------------------------------------------------------------------------------

    def _catch_up(self, namespace: str) -> None:
        """Read the reports that are not in the file yet, if nobody looked for a while."""
        with self._looking:
            if time.monotonic() - self._looked.get(namespace, -LOOK_EVERY) >= LOOK_EVERY:
                self._read_new(namespace)
                self._looked[namespace] = time.monotonic()

    def _read_new(self, namespace: str) -> int:
        with self._open() as database:
            found = database.execute("SELECT build FROM reports WHERE namespace = ?", (namespace,))
            known = {str(row["build"]) for row in found}
        count = 0
        for build in self._artifacts.list_folders(builds_prefix(namespace)):
            stored = None if build in known else self._artifacts.get_object(build_key(namespace, build, "report.json"))
            if stored is None:
                continue
            try:
                self.add(json.loads(stored.data))
            except (ValueError, KeyError, TypeError) as error:
                log.warning("report unreadable, it is not in the history", build=build, error=repr(error))
            else:
                count += 1
        return count

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """Open the file for one transaction; one that is damaged is begun again, and filled at the next look.

        Raises FarmFault if it cannot be used.
        """
        try:
            with closing(self._connect()) as database, database:
                yield database
        except sqlite3.OperationalError as error:
            hint = f"look at {self._path} and the room on its disk"
            raise FarmFault(f"the history of cells cannot be used: {error}", hint=hint) from None
        except sqlite3.DatabaseError as error:
            log.warning("the history of cells is damaged, it is made again", error=str(error))
            self._forget()
            self._looked.clear()
            raise FarmFault("the history of cells was damaged and is made again", hint="try again") from None

    def _connect(self) -> sqlite3.Connection:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        database = sqlite3.connect(self._path, timeout=30.0)
        try:
            database.row_factory = sqlite3.Row
            database.execute("PRAGMA journal_mode = WAL")
            # What a crash loses is read again from the reports.
            database.execute("PRAGMA synchronous = NORMAL")
            database.executescript(_SCHEMA)
        except sqlite3.Error:
            database.close()
            raise
        return database

    def _forget(self) -> None:
        for suffix in ("", "-wal", "-shm"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)


def _rows(report: Report) -> Iterator[tuple[object, ...]]:
    build = report["build"]
    ended = float(build.get("ended_at") or build.get("created_at") or 0.0)
    for cell in report["cells"]:
        facts = cell.get("facts")
        values = values_of(facts) if facts else Values()
        if facts and (turns := facts.get("turns")):
            values["turns"] = turns
        yield (
            build["namespace"],
            cell["identifier"],
            ended,
            build["id"],
            # A follow-up and a shadow build say nothing of how the manifest does.
            "" if build.get("follows") or build.get("shadows") else build["name"],
            cell["state"],
            cell["kind"] or "",
            bool(cell.get("as_expected")),
            bool(cell["hit"]),
            facts["key"] if facts else cell["key"],
            facts["toolchain"] if facts else "",
            facts["device"] if facts else "",
            (facts.get("node") or "") if facts else "",
            max(facts["errors"].values(), default=None) if facts else None,
            json.dumps(values),
        )


def _past(row: sqlite3.Row) -> PastCell:
    return {
        "identifier": row["identifier"],
        "ended": row["ended"],
        "build": row["build"],
        "manifest": row["manifest"],
        "state": row["state"],
        "kind": row["kind"],
        "expected": bool(row["expected"]),
        "hit": bool(row["hit"]),
        "key": row["key"],
        "toolchain": row["toolchain"],
        "device": row["device"],
        "node": row["node"],
        "error": row["error"],
        "values": json.loads(row["values"]),
    }

"""Extracts of large builds, so that their pages need neither the whole plan nor the whole report.

A plan of 100,000 cells has hundreds of megabytes, most of it work orders; its report has as many facts. The extracts
have what lists of cells show, as columns. They only repeat plan and report: a missing one is made again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import repeat
from typing import Any, NamedTuple, cast

from farm.artifacts.s3 import S3Store
from farm.builds.columns import Columns, pack, unpack
from farm.jobs.estimate import EstimateDocument
from farm.jobs.state import State
from farm.logging import get_logger
from farm.matrix.planned import CellPlan, PlanDocument
from farm.results.lines import CellColumns, CellLine, Look
from farm.results.report import BuildView, Report

log = get_logger(__name__)

LARGE = 1000
"""Cells from which on a build has extracts."""

KEPT = 8
"""Extracts of plans in memory."""

_JUDGED_BY = (
    "identifier",
    "model",
    "target",
    "precision",
    "shape",
    "key",
    "pool",
    "sizes",
    "sweep",
    "gates",
    "line",
    "expected",
    "estimate",
    "state",
    "reason",
    "before",
    "baseline",
)
"""What of a planned cell a judgement needs, and its line."""

_LOOKS: Mapping[str, Look] = {
    State.QUEUED: "queued",
    State.RUNNING: "running",
    State.FAILED: "failed",
    State.CANCELLED: "cancelled",
}
_SHOWN = {"identifier", "model", "target", "precision", "shape", "key", "reason"}
_EMPTY: Mapping[str, Any] = {"by_farm": False, "elapsed": None, "published": False, "shared": False}


class PlannedCells:
    """The cells of a plan, without their work orders."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self.identifiers: Sequence[str] = columns["identifier"]
        self.place = {name: place for place, name in enumerate(self.identifiers)}
        """The place of each cell in the order of the manifest, by its identifier."""

    def __getitem__(self, identifier: str) -> CellPlan:
        """Return a cell as it was planned, as far as a judgement needs it. Raises KeyError."""
        place = self.place[identifier]
        return cast(CellPlan, {name: values[place] for name, values in self._columns.items()})

    def lines(self, states: Mapping[str, str]) -> list[CellLine]:
        """Return the lines of cells in these states, before anything is judged.

        What its gates will refuse counts as compiled, and nothing has a speed.
        """
        rows = len(self.identifiers)
        known = {
            **{name: self._columns[name] for name in _SHOWN},
            "look": list(map(_look, map(states.get, self.identifiers), self._columns["state"])),
        }
        empty = {name: _EMPTY.get(name, None if name in ("size", "latency") else "") for name in CellLine._fields}
        columns = [known.get(name) or repeat(empty[name], rows) for name in CellLine._fields]
        return list(map(CellLine._make, zip(*columns, strict=True)))

    def work(self) -> Iterable[tuple[str, str, str, EstimateDocument | None]]:
        """Yield identifier, cache key, pool and estimate of each cell."""
        return zip(*(self._columns[name] for name in ("identifier", "key", "pool", "estimate")), strict=True)


class EndedCells(NamedTuple):
    """A build whose report is written."""

    build: BuildView
    cells: list[CellLine]


class LargeBuilds:
    """The extracts of large builds in object storage."""

    def __init__(self, artifacts: S3Store) -> None:
        self._artifacts = artifacts
        self.planned = lru_cache(maxsize=KEPT)(self._planned)
        """The extract of a build's plan, by namespace and id. Raises KeyError if there is none."""

    def add_planned(self, document: PlanDocument) -> None:
        """Write the extract of a large plan."""
        cells, build = document["cells"], document["build"]
        columns = {name: [cell.get(name) for cell in cells] for name in _JUDGED_BY}
        self._artifacts.put_object(_key(build["namespace"], build["id"], "planned"), pack(columns))

    def add_ended(self, report: Report) -> EndedCells:
        """Write the extract of a report, if it is large; that of the plan is no longer needed. Return it."""
        build, cells = report["build"], [CellLine.of(cell) for cell in report["cells"]]
        if len(cells) >= LARGE:
            columns = dict(zip(CellLine._fields, zip(*cells, strict=True), strict=True))
            self._artifacts.put_object(_key(build["namespace"], build["id"], "ended"), pack(columns, build=build))
            self._artifacts.delete_object(_key(build["namespace"], build["id"], "planned"))
        return EndedCells(build, cells)

    def ended(self, namespace: str, build_id: str) -> EndedCells | None:
        """Return the extract of a report; None if there is none that can be read."""
        found = self._read(_key(namespace, build_id, "ended"))
        if found is None:
            return None
        columns, more = found
        try:
            cells = map(CellLine._make, zip(*(columns[name] for name in CellLine._fields), strict=True))
            return EndedCells(more["build"], list(cells))
        except KeyError:  # Another release wrote it.
            return None

    def ended_columns(self, namespace: str, build_id: str) -> tuple[BuildView, CellColumns] | None:
        """Return of a report's extract what compares builds; None if there is none that can be read."""
        found = self._read(_key(namespace, build_id, "ended"), CellColumns._fields)
        try:
            return (found[1]["build"], CellColumns(**found[0])) if found else None
        except (KeyError, TypeError):  # Another release wrote it.
            return None

    def _planned(self, namespace: str, build_id: str) -> PlannedCells:
        found = self._read(_key(namespace, build_id, "planned"))
        if found is None or not found[0].keys() >= set(_JUDGED_BY):
            raise KeyError(build_id)
        return PlannedCells(found[0])

    def _read(self, key: str, names: Collection[str] | None = None) -> tuple[Columns, dict[str, Any]] | None:
        found = self._artifacts.get_object(key)
        if found is None:
            return None
        try:
            return unpack(found.data, names)
        except (ValueError, KeyError, TypeError) as error:
            log.warning("extract unreadable", key=key, error=repr(error))
            return None


def _key(namespace: str, build_id: str, name: str) -> str:
    return f"ns/{namespace}/extracts/{build_id}-{name}.json.gz"


def _look(state: str | None, planned: str) -> Look:
    if state is None:  # It is not accepted yet.
        return "queued"
    return _LOOKS.get(state) or ("hit" if planned == "hit" else "compiled")

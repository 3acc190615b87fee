"""One cell over time: its speed in each build with the noise band, and changes of toolchain, driver or device. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median
from typing import Literal, NamedTuple

from farm.pages.comparison import BAND
from farm.results.lines import Look
from farm.results.report import PastCell

LEARNT = 5
"""Measurements from which on a cell's own noise is known; before, `BAND` counts."""
LOOKED_AT = 10
"""Measurements before a point that make its band."""
WIDTH = 3 * 1.4826
"""Half of the band, in median deviations from the median: three standard deviations of normal noise."""
NARROWEST = 0.02
"""Half of the band at least, as a share of the median: clocks and temperatures make as much."""

STEP = 3
"""Points in a row that make a new level: one alone may be an outlier."""

_LOOKS: dict[str, Look] = {"succeeded": "compiled", "failed": "failed", "cancelled": "cancelled"}


class Band(NamedTuple):
    """Between which latencies (seconds) nothing is said."""

    low: float
    high: float


class PastPoint(NamedTuple):
    """A cell in one build. `ended` in Unix seconds, `latency` in seconds; `band` is what was known before it."""

    ended: float
    build: str
    look: Look
    kind: str
    latency: float | None
    error: float | None
    measured: bool
    """Whether this build measured it: a hit repeats an older number."""
    shared: bool
    node: str
    key: str
    band: Band | None
    moved: Literal["", "slower", "faster"]
    changes: Sequence[str]
    """What is another one than in the program before: toolchain, driver, device."""


@dataclass(frozen=True, slots=True)
class CellPast:
    """The past of one cell, oldest first."""

    points: Sequence[PastPoint]

    @property
    def drawn(self) -> list[PastPoint]:
        """The points that were measured alone."""
        return [point for point in self.points if point.measured and point.latency and not point.shared]

    @property
    def headline(self) -> str:
        """The single most important thing: how the newest build is, in words."""
        if not self.points:
            return "No build of this time had this cell"
        newest = self.points[-1]
        if newest.look == "failed":
            since = self._failed_since()
            return f"Fails with {newest.kind}" + (f" since {since.build}" if since.build != newest.build else "")
        if not self.drawn:
            return "It was never measured alone"
        last = self.drawn[-1]
        if last.moved:
            return f"Its newest program is {last.moved} than the noise of those before explains"
        within = "Its newest program is within the noise of those before"
        if step := self.step:
            return f"{within}; it became {step.moved} on {datetime.fromtimestamp(step.ended, UTC):%Y-%m-%d}"
        return within

    @property
    def step(self) -> PastPoint | None:
        """The first point of the last new level: `STEP` points in a row that moved one way; None if there is none."""
        points, found = self.drawn, None
        for place, point in enumerate(points):
            run = points[place : place + STEP]
            begins = not place or points[place - 1].moved != point.moved
            if point.moved and begins and len(run) == STEP and all(each.moved == point.moved for each in run):
                found = point
        return found

    @property
    def look(self) -> Look:
        """The look of the headline."""
        if not self.points:
            return "queued"
        if self.points[-1].look == "failed" or (self.drawn and self.drawn[-1].moved == "slower"):
            return "failed"
        return self.points[-1].look

    def _failed_since(self) -> PastPoint:
        since = self.points[-1]
        for point in reversed(self.points):
            if point.look not in ("failed", "expected"):
                break
            since = point
        return since


def past_of(rows: Iterable[PastCell]) -> CellPast:
    """Return the past of a cell from its rows in the history, in any order."""
    return CellPast(list(_points(sorted(rows, key=lambda row: (row["ended"], row["build"])))))


def _points(rows: Sequence[PastCell]) -> Iterator[PastPoint]:
    before: dict[str, str] = {}
    known: list[float] = []
    for row in rows:
        values = row["values"]
        now = {"toolchain": row["toolchain"], "driver": values.get("driver") or "", "device": row["device"]}
        changes = [f"{name} {before[name]} → {to}" for name, to in now.items() if to and before.get(name, to) != to]
        before |= {name: to for name, to in now.items() if to}
        latency = values.get("latency")
        measured = row["state"] == "succeeded" and not row["hit"] and latency is not None
        shared = bool(values.get("shared"))
        if changes:
            known = []  # What another compiler or driver makes has its own level; the mark says why.
        band = _band(known) if measured else None
        moved: Literal["", "slower", "faster"] = ""
        if measured and not shared and latency is not None:
            if band:
                moved = "slower" if latency > band.high else "faster" if latency < band.low else ""
            known.append(latency)
        yield PastPoint(
            row["ended"],
            row["build"],
            "hit" if row["hit"] else "expected" if row["expected"] else _LOOKS.get(row["state"], "cancelled"),
            row["kind"],
            latency,
            row["error"],
            measured,
            shared,
            row["node"],
            row["key"],
            band,
            moved,
            changes,
        )


def _band(known: Sequence[float]) -> Band | None:
    """Return the band after some measurements; None if there is none yet."""
    recent = known[-LOOKED_AT:]
    if not recent:
        return None
    middle = median(recent)
    half = BAND * middle
    if len(recent) >= LEARNT:
        half = max(WIDTH * median(abs(each - middle) for each in recent), NARROWEST * middle)
    return Band(max(middle - half, 0.0), middle + half)

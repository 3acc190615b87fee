"""One cell over time: its speed in each build with the noise band, and changes of toolchain, driver or device. Pure."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from statistics import median
from typing import Literal, NamedTuple

from farm.pages import quantities
from farm.results.lines import BAND, Look
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

Moved = Literal["", "slower", "faster"]

_DIGEST = re.compile(r"-[0-9a-f]{8}(?= →|$)")

_LOOKS: dict[str, Look] = {"succeeded": "compiled", "failed": "failed", "cancelled": "cancelled"}


class Band(NamedTuple):
    """Latencies (seconds) between which no change is reported."""

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
    moved: Moved
    changes: Sequence[str]
    """What is another one than in the program before: toolchain, driver, device."""
    limit: float | None = None
    """The most that its gate or budget allowed, in seconds."""


class Mark(NamedTuple):
    """Where toolchain, driver or device changed, or a new level began. Latencies in seconds."""

    ended: float
    build: str
    changes: Sequence[str]
    """Empty for a level that began with the same toolchain, driver and device."""
    before: float | None
    """The median of the measurements before, since the mark before."""
    after: float | None
    """The median of those from here on, until the next mark."""
    moved: Moved

    @property
    def change(self) -> float | None:
        """How much longer it takes than before, as a share; None if that is not known."""
        return self.after / self.before - 1 if self.after and self.before else None

    @property
    def label(self) -> str:
        """What changed, in a few words: `rocm7.1 → rocm7.2`, `driver 6.8 → 6.10`, `+11 %`."""
        short = [_DIGEST.sub("", each).removeprefix("toolchain ") for each in self.changes]
        return ", ".join(short) or quantities.percent(self.change or 0.0)


@dataclass(frozen=True)
class CellPast:
    """The past of one cell, oldest first."""

    points: Sequence[PastPoint]

    def within(self, until: date, days: int) -> CellPast:
        """Return the past in so many days until the end of a day, UTC; the first bands still know what was before."""
        end = datetime(until.year, until.month, until.day, tzinfo=UTC).timestamp() + 86_400
        return CellPast([point for point in self.points if end - days * 86_400 <= point.ended < end])

    @cached_property
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
        now = quantities.latency(last.latency)
        if last.moved:
            return f"{now}, {last.moved} than the noise of those before explains"
        within = f"{now}, within the noise of those before"
        step = next((mark for mark in reversed(self.marks) if mark.moved), None)
        if step and step.change:
            day = datetime.fromtimestamp(step.ended, UTC)
            level = f"{quantities.latency(step.before)} → {quantities.latency(step.after)}"
            why = f" ({step.label})" if step.changes else ""
            return f"{within}; {abs(step.change) * 100:.0f} % {step.moved} since {day:%Y-%m-%d}{why}: {level}"
        return within

    @cached_property
    def marks(self) -> list[Mark]:
        """Where toolchain, driver or device changed, or a new level began, oldest first."""
        steps = {point.build for point in self._steps()}
        found = [point for point in self.points if point.changes or point.build in steps]
        edges = [-math.inf, *(point.ended for point in found), math.inf]
        return [self._mark(*each) for each in zip(found, edges, edges[2:], strict=False)]

    def _mark(self, point: PastPoint, begin: float, end: float) -> Mark:
        before = [each.latency or 0.0 for each in self.drawn if begin <= each.ended < point.ended][-LOOKED_AT:]
        after = [each.latency or 0.0 for each in self.drawn if point.ended <= each.ended < end][:LOOKED_AT]
        level = median(after) if after else None
        return Mark(
            point.ended,
            point.build,
            point.changes,
            median(before) if before else None,
            level,
            _moved(level, _band(before)),
        )

    def _steps(self) -> Iterator[PastPoint]:
        """Yield the first point of each new level: of `STEP` points in a row that moved one way."""
        for moved, points in groupby(self.drawn, key=attrgetter("moved")):
            if moved:
                run = list(points)
                yield from run[: len(run) // STEP * STEP : STEP]

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
    run: list[float] = []  # The last measurements, if all of them moved one way.
    way: Moved = ""
    for row in rows:
        values = row["values"]
        now = {"toolchain": row["toolchain"], "driver": values.get("driver") or "", "device": row["device"]}
        changes = [f"{name} {before[name]} → {to}" for name, to in now.items() if to and before.get(name, to) != to]
        before |= {name: to for name, to in now.items() if to}
        latency = values.get("latency")
        measured = row["state"] == "succeeded" and not row["hit"] and latency is not None
        shared = bool(values.get("shared"))
        if changes:
            known, way = [], ""  # What another compiler or driver makes has its own level; the mark says why.
        band = _band(known) if measured else None
        moved: Moved = ""
        if measured and not shared and latency is not None:
            moved = _moved(latency, band)
            run, way = ([*run, latency] if moved == way else [latency]), moved
            known.append(latency)
            if moved and len(run) == STEP:
                known, way = run, ""  # So has what became usual.
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
            _limit(row),
        )


def _limit(row: PastCell) -> float | None:
    rules, base = json.loads(row.get("rules") or "{}"), row.get("baseline")
    limits = [base * (1 + limit) for name, limit in rules.items() if base and name.startswith("gate latency ")]
    return min([*limits, *(limit for name, limit in rules.items() if name == "budget latency")], default=None)


def _moved(latency: float | None, band: Band | None) -> Moved:
    if latency is None or band is None:
        return ""
    return "slower" if latency > band.high else "faster" if latency < band.low else ""


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

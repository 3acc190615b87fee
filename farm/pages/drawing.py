"""Drawings as SVG, made by the server: they print, need no script, and come with a table of their numbers.

What is drawn where is worked out here; `templates/drawings.html` has the shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from itertools import groupby
from math import ceil, floor, log10
from typing import NamedTuple

from markupsafe import Markup

from farm.pages.history_view import CellPast
from farm.pages.job_view import AttemptLine
from farm.pages.quantities import duration, latency
from farm.pages.rendering import macro
from farm.runner.documents import Latency

TALL = 280
"""Height of a drawing over time."""
DECADE = 10.0
"""An axis whose values differ by more than this factor is logarithmic."""
FAR = 3.0
"""A limit of more than so many times the largest value is not drawn: it would flatten the others."""
LOW = 240
"""Height of a plot."""
MARKED = 42
"""Room for the labels of marks, in three lines, above a drawing over time."""


def timeline(attempts: Iterable[AttemptLine], earlier: Iterable[tuple[str, AttemptLine]] = ()) -> Markup:
    """Return the attempts of a job on one axis of time, which begins with the first one, each with its phases.

    Below are those of `earlier` builds, by id, each from the axis's begin.
    """
    begun = [(at, one) for one in attempts if (at := one.row["started_at"])]
    origin = min((at for at, _ in begun), default=0.0)
    rows = [(f"attempt {one.row['number']}", at - origin, one) for at, one in begun]
    rows += [(build[:10], 0.0, one) for build, one in earlier]
    total = max((at + (one.seconds or 0.0) for _, at, one in rows), default=0.0) or 1.0
    return macro("drawings", "timeline")(rows, total, steps(total, total, duration))


def spreads(runs: Iterable[tuple[str, Latency]]) -> Markup:
    """Return distributions on one axis, of the kinds of runs that were measured often enough to have one."""
    found = [(label, each) for label, each in runs if each["p90"] is not None and each["p99"] is not None]
    if not found:
        return Markup("")
    total = max(each["p99"] or 0.0 for _, each in found) or 1.0
    return macro("drawings", "spreads")(found, total * 1.04, steps(total, total * 1.04, latency))


def past(cell: CellPast) -> Markup:
    """Return a cell's latencies over time: the noise band, a point for each measurement, the newest one's value, and a
    line with its label for each mark.
    """
    points = cell.drawn
    if not points:
        return Markup("")
    first, last = cell.points[0].ended, cell.points[-1].ended
    values: list[float] = [value for point in points for value in (point.latency, *(point.band or ())) if value]
    limit = next((point.limit for point in reversed(cell.points) if point.limit), None)
    limit = limit if limit and limit <= FAR * max(values) else None
    values += [limit] if limit else []
    low, high = min(values) * 0.98, max(values) * 1.02
    up = (TALL - MARKED - 26) / ((high - low) or 1.0)

    def x(moment: float) -> float:
        return 100 * (moment - first) / ((last - first) or 1.0)

    def y(value: float) -> float:
        return MARKED + (high - value) * up

    bands = []
    for _, run in groupby(points, key=lambda point: point.band is None):
        banded = [(x(point.ended), point.band) for point in run if point.band]
        edge = [f"{at:.2f},{y(band.high):.1f}" for at, band in banded]
        bands.append(" ".join([*edge, *(f"{at:.2f},{y(band.low):.1f}" for at, band in reversed(banded))]))
    line = " ".join(f"{x(point.ended):.2f},{y(point.latency or 0.0):.1f}" for point in points)
    ends = [(at, f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d}", how) for at, how in ((first, "start"), (last, "end"))]
    ticks = [low + (high - low) * share / 3 for share in range(4)]
    return macro("drawings", "past")(cell, x, y, TALL, ticks, ends, bands, line, limit)


class PlotPoint(NamedTuple):
    """A point of a plot: what a hover and its label say, its place, and its class in the style sheet."""

    href: str
    title: str
    text: str
    x: float
    y: float
    look: str = "point"
    radius: float = 4.0
    tail: float | None = None
    """Where along the first axis a line to it begins."""


class PlotAxis(NamedTuple):
    """An axis of a plot: what it measures, how its values are written, a limit across it, its ticks if not round."""

    name: str
    unit: Callable[[float], str]
    limit: tuple[str, float] | None = None
    ticks: Sequence[float] = ()

    def scaled(self, found: Iterable[float]) -> tuple[Callable[[float], float], list[tuple[float, str]], str]:
        """Return where values lie, in percent, its ticks, and the limit's words; those of one far beyond are empty.

        It is logarithmic if the values span decades.
        """
        values, words = list(found), ""
        if self.limit and self.limit[1] <= FAR * max(values):
            values, words = [*values, self.limit[1]], f"{self.limit[0]} {self.unit(self.limit[1])}"
        high, low = max(values) or 1.0, min((value for value in values if value > 0), default=1.0)
        if high < DECADE * low:
            ticks = [(100 * value / (high * 1.1), self.unit(value)) for value in self.ticks]
            return lambda value: 100 * value / (high * 1.1), ticks or steps(high * 1.1, high * 1.1, self.unit), words
        # What is zero has no logarithm: it lies at the axis's begin, a decade below the others.
        zero = min(values) <= 0
        first, last = floor(log10(low)) - zero, ceil(log10(high * 1.01))
        marks = [10.0**at for at in range(first, last + 1, ceil((last - first) / 6))]

        def place(value: float) -> float:
            return 100 * (log10(value) - first) / (last - first) if value > 0 else 0.0

        shown = self.ticks or [0.0 if zero and value == marks[0] else value for value in marks]
        return place, [(place(value), self.unit(value)) for value in shown], words


def plot(label: str, found: Iterable[PlotPoint], across: PlotAxis, up: PlotAxis) -> Markup:
    """Return points that lead to their pages, with a line through those that are not `beaten`."""
    points = sorted(found, key=lambda each: (-each.y, each.x))
    x, x_ticks, x_limit = across.scaled(point.x for point in points)
    place, y_ticks, y_limit = up.scaled(point.y for point in points)

    def y(value: float) -> float:
        return LOW - 46 - (LOW - 80) * place(value) / 100

    labels: list[tuple[float, float]] = []
    for each in points:
        at, height = x(each.x), y(each.y) + 4
        while any(abs(at - other) < 25 and abs(height - taken) < 14 for other, taken in labels):
            height += 14
        labels.append((at, height))
    line = " ".join(
        f"{x(each.x):.2f},{y(each.y):.1f}" for each in sorted(points, key=lambda each: each.x) if each.look == "point"
    )
    limits = [
        (place(axis.limit[1]), words) if axis.limit and words else None
        for axis, place, words in ((across, x, x_limit), (up, y, y_limit))
    ]
    heights = [(LOW - 46 - (LOW - 80) * at / 100, text) for at, text in y_ticks]
    drawn = [(each, at, y(each.y), height) for each, (at, height) in zip(points, labels, strict=True)]
    return macro("drawings", "plot")(label, drawn, (across.name, up.name), limits, x, x_ticks, heights, line, LOW)


def steps(total: float, whole: float, unit: Callable[[float], str]) -> list[tuple[float, str]]:
    """Return round values up to `total`: the place of each across a drawing that is `whole` wide, and its text."""
    step = 10.0 ** int(f"{total / 4:e}".partition("e")[2])
    step = next((step * factor for factor in (1, 2, 5, 10) if total / (step * factor) <= 5), step * 10)
    return [(100 * step * turn / whole, unit(step * turn)) for turn in range(int(total * 1.001 / step) + 1)]

"""Drawings as SVG, made by the server: they print, need no script, and come with a table of their numbers.

What is drawn where is worked out here; `templates/drawings.html` has the shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from itertools import groupby

from markupsafe import Markup

from farm.pages.history_view import CellPast
from farm.pages.job_view import AttemptLine
from farm.pages.quantities import duration, latency
from farm.pages.rendering import macro
from farm.runner.documents import Latency

TALL = 280
"""Height of a drawing over time."""
MARKED = 42
"""Room for the labels of marks, in three lines, above a drawing over time."""


def timeline(attempts: Iterable[AttemptLine]) -> Markup:
    """Return the attempts of a job on one axis of time, which begins with the first one, each with its phases."""
    begun = [(at, one) for one in attempts if (at := one.row["started_at"])]
    origin = min((at for at, _ in begun), default=0.0)
    total = max((at - origin + (one.seconds or 0.0) for at, one in begun), default=0.0) or 1.0
    return macro("drawings", "timeline")(begun, origin, total, steps(total, total, duration))


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
    return macro("drawings", "past")(cell, x, y, TALL, ticks, ends, bands, line)


def steps(total: float, whole: float, unit: Callable[[float], str]) -> list[tuple[float, str]]:
    """Return round values up to `total`: the place of each across a drawing that is `whole` wide, and its text."""
    step = 10.0 ** int(f"{total / 4:e}".partition("e")[2])
    step = next((step * factor for factor in (1, 2, 5, 10) if total / (step * factor) <= 5), step * 10)
    return [(100 * step * turn / whole, unit(step * turn)) for turn in range(int(total * 1.001 / step) + 1)]

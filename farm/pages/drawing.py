"""Drawings as SVG, made by the server: they print, need no script, and come with a table of their numbers.

What is drawn where is worked out here; `templates/drawings.html` has the shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from math import ceil, floor, log10

from markupsafe import Markup

from farm.pages.history_view import CellPast
from farm.pages.job_view import AttemptLine
from farm.pages.quantities import duration, latency
from farm.pages.rendering import macro
from farm.results.tradeoff import Contender
from farm.runner.documents import Latency

TALL = 280
"""Height of a drawing over time."""
DECADE = 10.0
"""An axis whose values differ by more than this factor is logarithmic."""
LOW = 240
"""Height of a drawing of programs."""
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


def tradeoff(
    found: Sequence[Contender],
    link: Callable[[str], str],
    baselines: Mapping[str, float],
    budget: tuple[str, float] | None,
    tolerance: tuple[str, float] | None,
) -> Markup:
    """Return programs by latency and error, with their sizes as areas and the Pareto front as a line.

    A program's tail begins at its baseline's latency. Limits far beyond the programs are left out.
    """
    most = max(each.latency or 0.0 for each in found), max(each.error or 0.0 for each in found)
    limits = [
        each if each and each[1] <= 3 * top else None for each, top in zip((budget, tolerance), most, strict=True)
    ]
    x, across = axis([*(each.latency or 0.0 for each in found), *(each[1] for each in limits[:1] if each)], latency)
    y, up = axis([*(each.error or 0.0 for each in found), *(each[1] for each in limits[1:] if each)], "{:g}".format)
    largest = max(each.size for each in found) or 1
    points: list[tuple[Contender, float, float, float, float]] = []
    for each in sorted(found, key=lambda each: (-(each.error or 0.0), each.latency)):
        at, height = x(each.latency or 0.0), LOW - 46 - (LOW - 80) * y(each.error or 0.0) / 100
        label = height + 4
        while any(abs(at - other[1]) < 25 and abs(label - other[4]) < 14 for other in points):
            label += 14
        points.append((each, at, height, max(4.0, 16 * (each.size / largest) ** 0.5), label))
    front = sorted((at, height) for each, at, height, *_ in points if each.on_front)
    tails = {name: x(value) for name, value in baselines.items()}
    line = " ".join(f"{at:.2f},{height:.1f}" for at, height in front)
    return macro("drawings", "tradeoff")(points, link, tails, limits, x, y, across, up, line, LOW)


def axis(
    values: Sequence[float], unit: Callable[[float], str]
) -> tuple[Callable[[float], float], list[tuple[float, str]]]:
    """Return where a value lies along an axis, in percent, and its ticks; logarithmic if values span decades."""
    high, low = max(values, default=0.0) or 1.0, min((value for value in values if value > 0), default=1.0)
    if high < DECADE * low:
        return lambda value: 100 * value / (high * 1.1), steps(high * 1.1, high * 1.1, unit)
    # What is zero has no logarithm: it lies at the axis's begin, a decade below the others.
    first, last = floor(log10(low)) - (min(values) <= 0), ceil(log10(high * 1.01))
    marks = range(first, last + 1, ceil((last - first) / 6))

    def place(value: float) -> float:
        return 100 * (log10(value) - first) / (last - first) if value > 0 else 0.0

    return place, [(place(10.0**at), unit(0.0 if min(values) <= 0 and at == first else 10.0**at)) for at in marks]


def steps(total: float, whole: float, unit: Callable[[float], str]) -> list[tuple[float, str]]:
    """Return round values up to `total`: the place of each across a drawing that is `whole` wide, and its text."""
    step = 10.0 ** int(f"{total / 4:e}".partition("e")[2])
    step = next((step * factor for factor in (1, 2, 5, 10) if total / (step * factor) <= 5), step * 10)
    return [(100 * step * turn / whole, unit(step * turn)) for turn in range(int(total * 1.001 / step) + 1)]

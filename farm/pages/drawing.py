"""Drawings as SVG, made by the server: they print, need no script, and come with a table of their numbers.

What is drawn where is worked out here; `templates/drawings.html` has the shapes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import groupby
from math import ceil, floor, log10
from typing import Literal, NamedTuple

from markupsafe import Markup

from farm.pages.build_view import CellPast
from farm.pages.job_view import AttemptLine
from farm.pages.page_answers import macro
from farm.pages.quantities import digits, duration, error, size
from farm.results.report import SweepResult
from farm.results.tradeoff import Advice, advise, by_place, front, gains, joined, title
from farm.results.verdict import CellLine
from farm.runner.documents import Latency

TALL = 280  # Height of a drawing over time.
DECADE = 10.0  # An axis whose values differ by more than this factor is logarithmic.
FAR = 3.0  # A limit of more than so many times the largest value is not drawn: it would flatten the others.
LOW, FLOOR = 240, 62  # Height of a plot, and of what lies below its lowest line: half of a point, ticks, a name.
MARKED = 42  # Room for the labels of marks, in three lines, above a drawing over time.


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
    return macro("drawings", "spreads")(found, total * 1.04, steps(total, total * 1.04, duration))


def past(cell: CellPast) -> Markup:
    """Return a cell's latencies over time, with their noise band, the newest one's value, and its marks."""
    points = cell.drawn
    if not points:
        return Markup("")
    first, last = cell.points[0].ended, cell.points[-1].ended
    values: list[float] = [value for point in points for value in (point.latency, *(point.band or ())) if value]
    limit = next((point.limit for point in reversed(cell.points) if point.limit), None)
    refused = [point.latency for point in cell.points if point.look == "failed" and point.latency]
    values += [value for value in (limit, *refused) if value and value <= FAR * max(values)]
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
    forms = ("%Y-%m-%d", "%Y-%m-%d") if last - first > 86_400 else ("%Y-%m-%d %H:%M", "%H:%M")
    days = [format(datetime.fromtimestamp(at, UTC), form) for at, form in zip((first, last), forms, strict=True)]
    ends = list(zip((first, last), days, ("start", "end"), strict=True))[: 1 + (last > first)]
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
    tail: float | None = None  # Where along the first axis a line to it begins.


class PlotAxis(NamedTuple):
    """An axis of a plot: what it measures, how its values are written, a limit across it, its ticks if not round."""

    name: str
    unit: Callable[[float], str]
    limit: tuple[str, float] | None = None
    ticks: Sequence[float] = ()

    def scaled(self, found: Iterable[float]) -> tuple[Callable[[float], float], list[tuple[float, str]], str]:
        """Return where values lie, in percent (by logarithms if they span decades), ticks, and words of its limit."""
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
        marks = self.ticks or [10.0**at for at in range(first, last + 1, ceil((last - first) / 6))]
        end = log10(high * 1.2) if self.ticks else last

        def place(value: float) -> float:
            return 100 * (log10(value) - first) / (end - first) if value > 0 else 0.0

        return place, [(place(value), self.unit(0.0 if zero and not place(value) else value)) for value in marks], words


def plot(label: str, found: Iterable[PlotPoint], across: PlotAxis, up: PlotAxis) -> Markup:
    """Return points that lead to their pages, with a line through those that are not `beaten`."""
    points = sorted(found, key=lambda each: (-each.y, each.x))
    x, x_ticks, x_limit = across.scaled(point.x for point in points)
    place, y_ticks, y_limit = up.scaled(point.y for point in points)

    def y(value: float) -> float:
        return LOW - FLOOR - (LOW - FLOOR - 34) * place(value) / 100

    labels: list[tuple[float, float]] = []
    for each in points:
        at, height = x(each.x), y(each.y) + 4
        while any(abs(at - other) < 25 and abs(height - taken) < 14 for other, taken in labels):
            height += 14
        labels.append((at, height))
    front = sorted((each for each in points if each.look == "point"), key=lambda each: each.x)
    line = " ".join(f"{x(each.x):.2f},{y(each.y):.1f}" for each in front)
    limits = [
        (place(axis.limit[1]), words) if axis.limit and words else None
        for axis, place, words in ((across, x, x_limit), (up, y, y_limit))
    ]
    heights = [(LOW - FLOOR - (LOW - FLOOR - 34) * at / 100, text) for at, text in y_ticks]
    drawn = [(each, at, y(each.y), height) for each, (at, height) in zip(points, labels, strict=True)]
    return macro("drawings", "plot")(label, drawn, (across.name, up.name), limits, x, x_ticks, heights, line, LOW)


def steps(total: float, whole: float, unit: Callable[[float], str]) -> list[tuple[float, str]]:
    """Return round values up to `total`: the place of each across a drawing that is `whole` wide, and its text."""
    step = 10.0 ** int(f"{total / 4:e}".partition("e")[2])
    step = next((step * factor for factor in (1, 2, 5, 10) if total / (step * factor) <= 5), step * 10)
    return [(100 * step * turn / whole, unit(step * turn)) for turn in range(int(total * 1.001 / step) + 1)]


# --- what to choose: which precision of a model to ship, and which batch of a sweep -----------------------------------

SIGNS = {"shared": "≈", "weak": "?", "unverified": "?", "refused": "✗"}
"""What stands behind a program's name in the drawing."""

_CURVES: Sequence[Literal["throughput", "latency"]] = ("throughput", "latency")


class Tradeoff(NamedTuple):
    """The programs of one target and shape: what to ship and why, a drawing, and what it does not have."""

    model: str
    place: str
    advice: str
    draw: Callable[[], Markup]
    """Returns the drawing: it takes milliseconds, and a page shows few of thousands."""
    limits: str
    undrawn: Sequence[tuple[str, str]]
    """The programs, by link, whose latency or error is not known, each with the reason."""


def tradeoffs(cells: Sequence[CellLine], link: Callable[[str], str]) -> list[Tradeoff]:
    """Return the targets and shapes of one model's cells for which there is a choice, in their order."""
    return [
        _tradeoff(some, advice, link)
        for some, advice in zip(by_place(cells).values(), advise(cells), strict=True)
        if len(some) > 1 and any(each.latency and each.error is not None for each in some)
    ]


def _tradeoff(found: Sequence[CellLine], advice: Advice, link: Callable[[str], str]) -> Tradeoff:
    place, chosen, why = advice
    budget, budgets = _limit(found, "budget latency", duration)
    tolerance, tolerances = _limit(found, "tolerance", error)
    points = [each for each in found if each.latency and each.error is not None]
    largest = max(each.size or 0 for each in points) or 1
    said = f"Nothing to recommend: {why}."
    if chosen and chosen.error is not None:
        gained = gains(found).get(chosen.identifier) if chosen.precision != "fp32" else None
        gain = f"{gained:.2f} times fp32’s speed, " if gained else ""
        said = f"Ship {chosen.precision}: {gain}error {error(chosen.error)}, {size(chosen.size)}; {why}."

    def draw() -> Markup:
        best = front(found)
        drawn = (_point(each, link(each.identifier), largest, on_front=each in best) for each in points)
        across, up = PlotAxis("median latency", duration, budget), PlotAxis("relative error", "{:g}".format, tolerance)
        return plot(f"Latency against error of {len(points)} programs", drawn, across, up)

    undrawn = [(link(each.identifier), f"{each.precision} {_why(each)}") for each in found if each not in points]
    model, limits = found[0].identifier.partition("/")[0], "; ".join(filter(None, (budgets, tolerances)))
    return Tradeoff(model, " ".join(place), said, draw, limits, undrawn)


def _point(each: CellLine, href: str, largest: int, *, on_front: bool) -> PlotPoint:
    """Return a program as a point: its size is the area, and its line begins at its baseline's latency."""
    marks = [*each.marks.split(), *([] if each.succeeded else ["refused"])]
    signs = dict.fromkeys(sign for mark, sign in SIGNS.items() if mark in marks)
    numbers = f"{duration(each.latency)} median, p99 {duration(each.p99)}, error {error(each.error or 0.0)}"
    place = ["on the Pareto front"] if on_front else []
    return PlotPoint(
        href,
        ", ".join([f"{each.precision}: {numbers}, {size(each.size)}", *place, *marks]),
        " ".join([each.precision, *signs]),
        each.latency or 0.0,
        each.error or 0.0,
        "point" if on_front else "beaten",
        max(4.0, 16 * ((each.size or 0) / largest) ** 0.5),
        each.baseline,
    )


def _limit(cells: Iterable[CellLine], rule: str, unit: Callable[[float], str]) -> tuple[tuple[str, float] | None, str]:
    """Return a rule's limit, if the cells that it took or refused have one and the same, and words about it."""
    found: dict[str, float] = {}
    for cell in cells:
        for name, limit in json.loads(cell.rules).items():
            if name.startswith(rule):
                found[cell.precision] = min(limit, found.get(cell.precision, limit))
    name, limits = rule.split(maxsplit=1)[0], sorted(set(found.values()))
    if len(limits) == 1:
        return (name, limits[0]), f"the {name} is {unit(limits[0])}"
    said = ", ".join(f"{unit(limit)} for {precision}" for precision, limit in found.items())
    return None, f"the {name} is {said}" if said else ""


def _why(cell: CellLine) -> str:
    if not cell.published:
        how = "is" if cell.look in ("running", "queued") else "failed:" if cell.kind else "was"
        return f"{how} {cell.kind or cell.look}"
    return "was not measured" if not cell.latency else "has no error: its outputs were compared with nothing"


# --- sweeps ----------------------------------------------------------------------------------------------------------


def sweeps(
    cells: Iterable[CellLine], link: Callable[[str], str]
) -> list[tuple[str, str, Sequence[Callable[[], Markup]]]]:
    """Return the measured sweeps among a build's cells: the title, what it found, what draws its curves."""
    found = joined(json.loads(cell.sweep) for cell in cells if cell.sweep)
    return [
        (title(sweep), _found(sweep), [partial(_curve, sweep, link, each) for each in _CURVES])
        for sweep in found
        if any(point["latency"] for point in sweep["points"])
    ]


def _found(sweep: SweepResult) -> str:
    best = next((point for point in sweep["points"] if point["identifier"] == sweep["best"]), None)
    within = f" within {duration(sweep['max_latency'])}" if sweep["max_latency"] else ""
    said = f"Best {sweep['metric']}{within}: batch {best['batch']}." if best else f"No batch was measured{within}."
    weak = " Weak: some were not measured alone (≈)." if sweep["weak"] else ""
    missing = [str(point["batch"]) for point in sweep["points"] if not point["latency"]]
    return said + weak + (f" Not drawn, without a speed: {', '.join(missing)}." if missing else "")


def _curve(sweep: SweepResult, link: Callable[[str], str], measure: Literal["throughput", "latency"]) -> Markup:
    points = []
    for each in sweep["points"]:
        if each["latency"] and each["throughput"]:
            best = each["identifier"] == sweep["best"]
            text = f"batch {each['batch']}: {duration(each['latency'])}, {digits(each['throughput'])} samples a second"
            label = f"{'≈' * each['shared']} {'best' * best}".strip()
            value = each[measure] or 0.0
            points.append(
                PlotPoint(link(each["identifier"]), text, label, each["batch"], value, radius=7.0 if best else 4.0)
            )
    batches = sorted(point.x for point in points)
    limit = ("at most", sweep["max_latency"]) if sweep["max_latency"] and measure == "latency" else None
    name, unit = ("samples a second", digits) if measure == "throughput" else ("median latency", duration)
    across = PlotAxis("batch", "{:g}".format, ticks=batches[:: -(-len(batches) // 8)])
    return plot(f"{measure} by batch", points, across, PlotAxis(name, unit, limit))

"""Drawings as SVG, made by the server: they print, need no script, and come with a table of their numbers.

Places across are in percent, so a drawing is as wide as its page, and its text as large as the page's; `farm.css` keeps
room for labels on the left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from typing import NamedTuple

from markupsafe import Markup

from farm.jobs.state import Phase
from farm.pages.history_view import CellPast
from farm.pages.quantities import duration, latency

LABELS = 84
"""Room for labels on the left, in pixels, as in `farm.css`."""
ROW = 30
TALL = 280
"""Height of a drawing over time."""
MARKED = 42
"""Room for the labels of marks, in three lines, above a drawing over time."""

PHASES: Sequence[str] = [phase.value for phase in Phase]
"""In the order in which an attempt goes through them."""
REST = "rest"
"""The time of an attempt outside of its phases."""


class Bar(NamedTuple):
    """One attempt: when it began and ended (seconds after the job's creation), and its phases in seconds."""

    label: str
    start: float
    end: float
    phases: Mapping[str, float]
    failed: bool


class Spread(NamedTuple):
    """The distribution of one kind of run, in seconds."""

    label: str
    minimum: float
    median: float
    p90: float
    p99: float


def timeline(bars: Sequence[Bar]) -> Markup:
    """Return the attempts of a job on one axis of time, each with its phases."""
    total = max((bar.end for bar in bars), default=0.0) or 1.0
    parts = [_grid(total, total, len(bars), duration)]
    for row, bar in enumerate(bars):
        y = row * ROW + 5
        parts.append(_text(y + 14, bar.label, "name"))
        at = bar.start
        known = _in_order(bar.phases)
        for name, seconds in [*known, (REST, bar.end - bar.start - sum(each for _, each in known))]:
            if seconds <= 0:
                continue
            parts.append(
                Markup(
                    '<rect class="p-{}" x="{:.2f}%" y="{}" width="{:.2f}%" height="20"><title>{}</title></rect>'
                ).format(
                    name if name in (*PHASES, REST) else "other",
                    100 * at / total,
                    y,
                    max(100 * seconds / total, 0.1),
                    f"{bar.label}: {name}, {duration(seconds)}",
                )
            )
            at += seconds
        if bar.failed:
            parts.append(
                Markup('<text class="wrong" x="{:.2f}%" dx="2" y="{}">✗</text>').format(100 * bar.end / total, y + 15)
            )
    return _picture("Attempts and their phases over time", len(bars) * ROW + 26, parts)


def spreads(found: Sequence[Spread]) -> Markup:
    """Return distributions on one axis: a line from the fastest run to p99, a box from median to p90."""
    total = max((each.p99 for each in found), default=0.0) or 1.0
    whole = total * 1.04
    parts = [_grid(total, whole, len(found), latency)]
    for row, each in enumerate(found):
        y = row * ROW + 5
        low, mid, high, end = (100 * value / whole for value in (each.minimum, each.median, each.p90, each.p99))
        parts += [
            _text(y + 14, each.label, "name"),
            Markup('<line class="range" x1="{:.2f}%" x2="{:.2f}%" y1="{}" y2="{}"/>').format(low, end, y + 10, y + 10),
            Markup('<rect class="box" x="{:.2f}%" y="{}" width="{:.2f}%" height="12"/>').format(
                mid, y + 4, max(high - mid, 0.1)
            ),
            Markup('<line class="median" x1="{:.2f}%" x2="{:.2f}%" y1="{}" y2="{}"/>').format(mid, mid, y, y + 20),
        ]
    return _picture("Distribution of latencies", len(found) * ROW + 26, parts)


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

    parts = []
    for value in (low + (high - low) * share / 3 for share in range(4)):
        parts.append(Markup('<line class="grid" x1="0" x2="100%" y1="{0:.1f}" y2="{0:.1f}"/>').format(y(value)))
        parts.append(_text(y(value) + 4, latency(value), "tick"))
    for moment, anchor in ((first, "start"), (last, "end")):
        parts.append(_at(x(moment), TALL - 4, f"{datetime.fromtimestamp(moment, UTC):%Y-%m-%d}", "tick", anchor))
    # Only what has no percent of its own is stretched: the band and the line.
    stretched = []
    for _, run in groupby(points, key=lambda point: point.band is None):
        banded = [(x(point.ended), point.band) for point in run if point.band]
        edge = [f"{at:.2f},{y(band.high):.1f}" for at, band in banded]
        edge += [f"{at:.2f},{y(band.low):.1f}" for at, band in reversed(banded)]
        stretched.append(Markup('<polygon class="band" points="{}"/>').format(" ".join(edge)))
    line = " ".join(f"{x(point.ended):.2f},{y(point.latency or 0.0):.1f}" for point in points)
    stretched.append(Markup('<polyline class="line" points="{}"/>').format(line))
    parts.append(
        Markup('<svg width="100%" height="{0}" viewBox="0 0 100 {0}" preserveAspectRatio="none">{1}</svg>').format(
            TALL, Markup("").join(stretched)
        )
    )
    for number, mark in enumerate(cell.marks):
        at, top = x(mark.ended), 11 + number % 3 * 13
        parts.append(
            Markup('<line class="change {3}" x1="{0:.2f}%" x2="{0:.2f}%" y1="{1}" y2="{2}"/>').format(
                at, top + 3, TALL - 22, mark.moved
            )
        )
        parts.append(_at(at, top, mark.label, f"mark {mark.moved}", "end" if at > 60 else "start"))
    parts += [_at(x(each.ended), TALL - 26, "✗", "wrong", "middle") for each in cell.points if each.look == "failed"]
    parts += [
        Markup('<circle class="point {}" cx="{:.2f}%" cy="{:.1f}" r="{}"><title>{}</title></circle>').format(
            point.moved, x(point.ended), y(point.latency or 0.0), 4 if point.moved or point is points[-1] else 2.5,
            f"{point.build}: {latency(point.latency)}",
        )
        for point in points
    ]  # fmt: skip
    newest = points[-1]
    parts.append(
        Markup('<text class="newest" x="{:.2f}%" dx="8" y="{:.1f}">{}</text>').format(
            x(newest.ended), y(newest.latency or 0.0) + 4, latency(newest.latency)
        )
    )
    return _picture("Median latency over time, with its noise band", TALL, parts)


def share(parts: Sequence[tuple[str, int]], label: str) -> Markup:
    """Return counts as one bar of coloured parts; each is `(class, count)`."""
    total = sum(count for _, count in parts) or 1
    at, drawn = 0.0, []
    for name, count in parts:
        width = 100 * count / total
        drawn.append(Markup('<rect class="{}" x="{:.2f}" y="0" width="{:.2f}" height="6"/>').format(name, at, width))
        at += width
    return Markup(
        '<svg class="share" viewBox="0 0 100 6" preserveAspectRatio="none" role="img" aria-label="{}">{}</svg>'
    ).format(label, Markup("").join(drawn))


def _in_order(phases: Mapping[str, float]) -> list[tuple[str, float]]:
    known = [(name, phases[name]) for name in PHASES if phases.get(name)]
    return known + [(name, seconds) for name, seconds in phases.items() if name not in PHASES and seconds]


def _grid(total: float, whole: float, rows: int, unit: Callable[[float], str]) -> Markup:
    """Return thin lines at round values up to `total`, each with its value below; `whole` is the drawing's width."""
    step = 10.0 ** int(f"{total / 4:e}".partition("e")[2])
    step = next((step * factor for factor in (1, 2, 5, 10) if total / (step * factor) <= 5), step * 10)
    bottom, lines, value = rows * ROW + 2, [], 0.0
    while value <= total * 1.001:
        x = 100 * value / whole
        lines.append(Markup('<line class="grid" x1="{0:.2f}%" x2="{0:.2f}%" y1="0" y2="{1}"/>').format(x, bottom))
        anchor = "start" if value == 0 else "end" if x > 96 else "middle"
        lines.append(_at(x, bottom + 16, unit(value), "tick", anchor))
        value += step
    return Markup("").join(lines)


def _at(x: float, y: float, text: str, name: str, anchor: str) -> Markup:
    return Markup('<text class="{}" x="{:.2f}%" y="{:.1f}" text-anchor="{}">{}</text>').format(name, x, y, anchor, text)


def _text(y: float, text: str, name: str) -> Markup:
    """Return a label on the left."""
    return Markup('<text class="{}" x="{}" y="{:.1f}">{}</text>').format(name, -LABELS, y, text)


def _picture(label: str, height: int, parts: Sequence[Markup]) -> Markup:
    return Markup('<svg class="drawing" height="{}" role="img" aria-label="{}">{}</svg>').format(
        height, label, Markup("").join(parts)
    )

"""Drawings as SVG, made by the server: they print, need no script, and come with a table of their numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from markupsafe import Markup, escape

from farm.jobs.state import Phase
from farm.pages.history_view import CellPast
from farm.pages.quantities import duration, latency

WIDTH = 720
LABELS = 116
"""Room for labels on the left."""
ROW = 30
TALL = 240
"""Height of a drawing over time."""

PHASES: Sequence[str] = [phase.value for phase in Phase]
"""In the order in which an attempt goes through them."""


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
    scale = (WIDTH - LABELS - 8) / total
    parts = [_grid(total, scale, len(bars), duration)]
    for row, bar in enumerate(bars):
        y = row * ROW + 5
        parts.append(_text(0, y + 14, bar.label, "name"))
        at = bar.start
        for name, seconds in _in_order(bar.phases):
            parts.append(
                Markup(
                    '<rect class="p-{}" x="{:.1f}" y="{}" width="{:.1f}" height="20"><title>{}</title></rect>'
                ).format(
                    name if name in PHASES else "other",
                    LABELS + at * scale,
                    y,
                    max(seconds * scale, 0.5),
                    f"{bar.label}: {name}, {duration(seconds)}",
                )
            )
            at += seconds
        if at < bar.end:
            parts.append(
                Markup(
                    '<rect class="p-rest" x="{:.1f}" y="{}" width="{:.1f}" height="20"><title>{}</title></rect>'
                ).format(
                    LABELS + at * scale, y, max((bar.end - at) * scale, 0.5), f"{bar.label}: {duration(bar.end - at)}"
                )
            )
        if bar.failed:
            parts.append(_text(LABELS + bar.end * scale - 14, y + 15, "✗", "failed"))
    return _picture("Attempts and their phases over time", len(bars) * ROW + 26, parts)


def spreads(found: Sequence[Spread]) -> Markup:
    """Return distributions on one axis: a line from the fastest run to p99, a box from median to p90."""
    total = max((each.p99 for each in found), default=0.0) or 1.0
    scale = (WIDTH - LABELS - 8) / (total * 1.04)
    parts = [_grid(total, scale, len(found), latency)]
    for row, each in enumerate(found):
        y = row * ROW + 5
        low, mid, high, end = (LABELS + value * scale for value in (each.minimum, each.median, each.p90, each.p99))
        parts += [
            _text(0, y + 14, each.label, "name"),
            Markup('<line class="range" x1="{:.1f}" x2="{:.1f}" y1="{}" y2="{}"/>').format(low, end, y + 10, y + 10),
            Markup('<rect class="box" x="{:.1f}" y="{}" width="{:.1f}" height="12"/>').format(
                mid, y + 4, max(high - mid, 1.0)
            ),
            Markup('<line class="median" x1="{:.1f}" x2="{:.1f}" y1="{}" y2="{}"/>').format(mid, mid, y, y + 20),
        ]
    return _picture("Distribution of latencies", len(found) * ROW + 26, parts)


def past(cell: CellPast) -> Markup:
    """Return a cell's latencies over time: the noise band, a point for each measurement, a line for each change."""
    points = cell.drawn
    if not points:
        return Markup("")
    first, last = cell.points[0].ended, cell.points[-1].ended
    across = (WIDTH - LABELS - 16) / ((last - first) or 1.0)
    values: list[float] = [value for point in points for value in (point.latency, *(point.band or ())) if value]
    low, high = min(values) * 0.98, max(values) * 1.02
    up = (TALL - 30) / ((high - low) or 1.0)

    def x(moment: float) -> float:
        return LABELS + 8 + (moment - first) * across

    def y(value: float) -> float:
        return 4 + (high - value) * up

    parts = []
    for value in (low + (high - low) * share / 3 for share in range(4)):
        parts.append(
            Markup('<line class="grid" x1="{0}" x2="{1}" y1="{2:.1f}" y2="{2:.1f}"/>').format(LABELS, WIDTH, y(value))
        )
        parts.append(_text(0, y(value) + 4, latency(value), "tick"))
    for moment, anchor in ((first, "start"), (last, "end")):
        text = f"{datetime.fromtimestamp(moment, UTC):%Y-%m-%d}"
        parts.append(
            Markup('<text class="tick" x="{:.1f}" y="{}" text-anchor="{}">{}</text>').format(
                x(moment), TALL - 2, anchor, text
            )
        )
    banded = [(x(point.ended), point.band) for point in points if point.band]
    if banded:
        edge = [f"{at:.1f},{y(band.high):.1f}" for at, band in banded]
        edge += [f"{at:.1f},{y(band.low):.1f}" for at, band in reversed(banded)]
        parts.append(Markup('<polygon class="band" points="{}"/>').format(" ".join(edge)))
    for each in cell.points:
        if each.changes:
            parts.append(
                Markup(
                    '<line class="change" x1="{0:.1f}" x2="{0:.1f}" y1="0" y2="{1}"><title>{2}</title></line>'
                ).format(x(each.ended), TALL - 22, "; ".join(each.changes))
            )
        if each.look == "failed":
            parts.append(
                Markup('<text class="wrong" x="{:.1f}" y="{}" text-anchor="middle">✗<title>{}</title></text>').format(
                    x(each.ended), TALL - 26, f"{each.build}: {each.kind}"
                )
            )
    line = " ".join(f"{x(point.ended):.1f},{y(point.latency or 0.0):.1f}" for point in points)
    parts.append(Markup('<polyline class="line" points="{}"/>').format(line))
    parts += [
        Markup('<circle class="point {}" cx="{:.1f}" cy="{:.1f}" r="{}"><title>{}</title></circle>').format(
            point.moved, x(point.ended), y(point.latency or 0.0), 4 if point.moved else 2.5,
            f"{point.build}: {latency(point.latency)}",
        )
        for point in points
    ]  # fmt: skip
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


def _grid(total: float, scale: float, rows: int, unit: object) -> Markup:
    """Return thin lines at round values, each with its value below."""
    step = 10.0 ** int(f"{total / 4:e}".partition("e")[2])
    step = next((step * factor for factor in (1, 2, 5, 10) if total / (step * factor) <= 5), step * 10)
    bottom, lines, value = rows * ROW + 2, [], 0.0
    while value <= total * 1.001:
        x = LABELS + value * scale
        lines.append(Markup('<line class="grid" x1="{0:.1f}" x2="{0:.1f}" y1="0" y2="{1}"/>').format(x, bottom))
        text = unit(value) if callable(unit) else ""
        lines.append(
            Markup('<text class="tick" x="{:.1f}" y="{}" text-anchor="{}">{}</text>').format(
                x, bottom + 16, "start" if value == 0 else "end" if value + step > total * 1.001 else "middle", text
            )
        )
        value += step
    return Markup("").join(lines)


def _text(x: float, y: float, text: str, name: str) -> Markup:
    return Markup('<text class="{}" x="{:.1f}" y="{:.1f}">{}</text>').format(name, x, y, text)


def _picture(label: str, height: int, parts: Sequence[Markup]) -> Markup:
    return Markup('<svg class="drawing" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        WIDTH, height, escape(label), Markup("").join(parts)
    )

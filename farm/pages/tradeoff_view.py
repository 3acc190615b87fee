"""What to choose: which precision of a model to ship, and which batch of a sweep; drawn, with a sentence. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Literal, NamedTuple

from markupsafe import Markup

from farm.pages.drawing import PlotAxis, PlotPoint, plot
from farm.pages.quantities import digits, error, latency, size
from farm.results.lines import CellLine
from farm.results.report import SweepResult
from farm.results.sweeps import joined, title
from farm.results.tradeoff import Contender, advise, by_place, weighed

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


def of_cells(cells: Sequence[CellLine], link: Callable[[str], str]) -> list[Tradeoff]:
    """Return what could be shipped of one model's cells in a build, with its budgets and baselines."""
    lines = {cell.identifier: cell for cell in cells}
    return of_programs(weighed([cell.contender for cell in cells]), link, lines.__getitem__)


def of_programs(
    found: Sequence[Contender], link: Callable[[str], str], line: Callable[[str], CellLine] | None = None
) -> list[Tradeoff]:
    """Return the targets and shapes for which there is a choice, in their order."""
    return [
        _tradeoff(place, some, (chosen, why), link, line)
        for (place, some), (_, chosen, why) in zip(by_place(found).items(), advise(found), strict=True)
        if len(some) > 1 and any(each.latency and each.error is not None for each in some)
    ]


def _tradeoff(
    place: tuple[str, str],
    found: Sequence[Contender],
    advice: tuple[Contender | None, str],
    link: Callable[[str], str],
    line: Callable[[str], CellLine] | None,
) -> Tradeoff:
    chosen, why = advice
    cells = {each.identifier: line(each.identifier) for each in found} if line else {}
    budget, tolerance = _limit(cells.values(), "budget latency"), _limit(cells.values(), "tolerance")
    limits = [
        *([f"the budget is {latency(budget[1])}"] if budget else []),
        *([f"the tolerance is {error(tolerance[1])}"] if tolerance else []),
    ]
    points = [each for each in found if each.latency and each.error is not None]
    largest = max(each.size for each in points) or 1
    said = f"Nothing to recommend: {why}."
    if chosen and chosen.error is not None:
        gain = f"{chosen.gain:.2f} times fp32’s speed, " if chosen.gain and chosen.precision != "fp32" else ""
        said = f"Ship {chosen.precision}: {gain}error {error(chosen.error)}, {size(chosen.size)}; {why}."
    return Tradeoff(
        found[0].identifier.partition("/")[0],
        " ".join(place),
        said,
        lambda: plot(
            f"Latency against error of {len(points)} programs",
            (_point(each, link(each.identifier), largest, cells.get(each.identifier)) for each in points),
            PlotAxis("median latency", latency, budget),
            PlotAxis("relative error", "{:g}".format, tolerance),
        ),
        "; ".join(limits),
        [
            (link(each.identifier), f"{each.precision} {_why(each, cells.get(each.identifier))}")
            for each in found
            if each not in points
        ],
    )


def _point(each: Contender, href: str, largest: int, cell: CellLine | None) -> PlotPoint:
    """Return a program as a point: its size is the area, and its line begins at its baseline's latency."""
    marks = [*each.marks, *([] if each.passed else ["refused"])]
    signs = dict.fromkeys(sign for mark, sign in SIGNS.items() if mark in marks)
    numbers = f"{latency(each.latency)} median, p99 {latency(each.p99)}, error {error(each.error or 0.0)}"
    front = ["on the Pareto front"] if each.on_front else []
    return PlotPoint(
        href,
        ", ".join([f"{each.precision}: {numbers}, {size(each.size)}", *front, *marks]),
        " ".join([each.precision, *signs]),
        each.latency or 0.0,
        each.error or 0.0,
        "point" if each.on_front else "beaten",
        max(4.0, 16 * (each.size / largest) ** 0.5),
        cell.baseline if cell else None,
    )


def _limit(cells: Iterable[CellLine], rule: str) -> tuple[str, float] | None:
    """Return a rule and its strictest limit among those that cells passed, or that refused them."""
    rules = [limit for cell in cells for name, limit in json.loads(cell.rules).items() if name.startswith(rule)]
    return (rule.split(maxsplit=1)[0], min(rules)) if rules else None


def _why(each: Contender, cell: CellLine | None) -> str:
    """Return why a program is not in the drawing."""
    if cell and not cell.published:
        return f"{'is' if cell.look in ('running', 'queued') else 'was' if not cell.kind else 'failed:'} " + (
            cell.kind or cell.look
        )
    return "was not measured" if not each.latency else "has no error: its outputs were compared with nothing"


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
    within = f" within {latency(sweep['max_latency'])}" if sweep["max_latency"] else ""
    said = f"Best {sweep['metric']}{within}: batch {best['batch']}." if best else f"No batch was measured{within}."
    weak = " Weak: some were not measured alone (≈)." if sweep["weak"] else ""
    missing = [str(point["batch"]) for point in sweep["points"] if not point["latency"]]
    return said + weak + (f" Not drawn, without a speed: {', '.join(missing)}." if missing else "")


def _curve(sweep: SweepResult, link: Callable[[str], str], measure: Literal["throughput", "latency"]) -> Markup:
    """Return a sweep's throughput or latency by batch."""
    points = []
    for each in sweep["points"]:
        if each["latency"] and each["throughput"]:
            best = each["identifier"] == sweep["best"]
            text = f"batch {each['batch']}: {latency(each['latency'])}, {digits(each['throughput'])} samples a second"
            label = f"{'≈' * each['shared']} {'best' * best}".strip()
            value = each[measure] or 0.0
            points.append(
                PlotPoint(link(each["identifier"]), text, label, each["batch"], value, radius=7.0 if best else 4.0)
            )
    batches = sorted(point.x for point in points)
    limit = ("at most", sweep["max_latency"]) if sweep["max_latency"] and measure == "latency" else None
    name, unit = ("samples a second", digits) if measure == "throughput" else ("median latency", latency)
    across = PlotAxis("batch", "{:g}".format, ticks=batches[:: -(-len(batches) // 8)])
    return plot(f"{measure} by batch", points, across, PlotAxis(name, unit, limit))

"""Which precision to ship: the programs of a model for one target and shape, drawn, with a recommendation. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from markupsafe import Markup

from farm.pages import drawing
from farm.pages.quantities import error, latency, size
from farm.results.lines import CellLine
from farm.results.tradeoff import Contender, advise, weighed

Line = tuple[str, float]
"""A line of a drawing: what it stands for, and where it lies."""


class Tradeoff(NamedTuple):
    """The programs of one target and shape: what to ship and why, a drawing, and what it does not have."""

    model: str
    place: str
    advice: str
    drawn: Markup
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
    advice = {place: (chosen, why) for place, chosen, why in advise(found)}
    return [
        _tradeoff(place, some, advice[place], link, line)
        for place in advice
        if len(some := [each for each in found if each.place == place]) > 1
        and any(each.latency and each.error is not None for each in some)
    ]


def _tradeoff(
    place: tuple[str, str],
    found: Sequence[Contender],
    advice: tuple[Contender | None, str],
    link: Callable[[str], str],
    line: Callable[[str], CellLine] | None,
) -> Tradeoff:
    chosen, why = advice
    cells = [line(each.identifier) for each in found] if line else []
    budget, tolerance = _limit(cells, "budget latency"), _limit(cells, "tolerance")
    limits = [
        *([f"the budget is {latency(budget[1])}"] if budget else []),
        *([f"the tolerance is {error(tolerance[1])}"] if tolerance else []),
    ]
    points = [each for each in found if each.latency and each.error is not None]
    undrawn = [(each, line(each.identifier) if line else None) for each in found if each not in points]
    said = f"Nothing to recommend: {why}."
    if chosen and chosen.error is not None:
        gain = f"{chosen.gain:.2f} times fp32’s speed, " if chosen.gain and chosen.precision != "fp32" else ""
        said = f"Ship {chosen.precision}: {gain}error {error(chosen.error)}, {size(chosen.size)}; {why}."
    return Tradeoff(
        found[0].identifier.partition("/")[0],
        " ".join(place),
        said,
        drawing.tradeoff(
            points, link, {each.identifier: each.baseline for each in cells if each.baseline}, budget, tolerance
        ),
        "; ".join(limits),
        [(link(each.identifier), f"{each.precision} {_why(each, cell)}") for each, cell in undrawn],
    )


def _limit(cells: Iterable[CellLine], rule: str) -> Line | None:
    """Return the strictest limit of a rule among the rules that cells passed, or that refused them."""
    rules = [limit for cell in cells for name, limit in json.loads(cell.rules).items() if name.startswith(rule)]
    return (rule.split(maxsplit=1)[0], min(rules)) if rules else None


def _why(each: Contender, cell: CellLine | None) -> str:
    """Return why a program is not in the drawing."""
    if cell and not cell.published:
        return f"{'is' if cell.look in ('running', 'queued') else 'was' if not cell.kind else 'failed:'} " + (
            cell.kind or cell.look
        )
    return "was not measured" if not each.latency else "has no error: its outputs were compared with nothing"

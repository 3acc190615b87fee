"""Several builds next to each other: one row for each cell, one column for each build, oldest first. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from farm.pages.build_view import ShownBuild
from farm.pages.comparison import BAND, Pair, unfair
from farm.results.lines import CellLine

MOST = 12
"""Builds on one page."""


class Place(NamedTuple):
    """A cell in one build; None if the build has no such cell."""

    cell: CellLine | None
    change: float | None
    """How much longer it takes than in the build before, as a share, if that is more than the noise and can be said."""


class AcrossRow(NamedTuple):
    """One cell in all builds."""

    identifier: str
    places: Sequence[Place]
    differs: bool
    """Whether it does not end alike everywhere, or its speed moved."""


@dataclass(frozen=True, slots=True)
class Across:
    """Builds next to each other."""

    builds: Sequence[ShownBuild]
    rows: Sequence[AcrossRow]
    """Of the cells that all builds have those that differ, or all cells."""
    same: int
    """Cells that all builds have, and that are the same in all."""
    partly: int
    """Cells that only some builds have."""


def across(builds: Sequence[ShownBuild], *, everything: bool = False) -> Across:
    """Put builds next to each other; with `everything` also the cells that are alike, or that some builds lack."""
    names = dict.fromkeys(name for build in reversed(builds) for name in build.by_identifier)
    rows = [_row(name, [build.by_identifier.get(name) for build in builds]) for name in names]
    whole = [row for row in rows if all(place.cell for place in row.places)]
    differing = [row for row in whole if row.differs]
    return Across(builds, rows if everything else differing, len(whole) - len(differing), len(rows) - len(whole))


def _row(name: str, cells: Sequence[CellLine | None]) -> AcrossRow:
    places = [Place(cell, _change(before, cell)) for before, cell in zip([None, *cells], cells, strict=False)]
    ends = {_end(cell) for cell in cells if cell}
    return AcrossRow(name, places, len(ends) > 1 or any(place.change is not None for place in places))


def _end(cell: CellLine) -> tuple[str, str]:
    """Return how a cell ended: whether its program was there already makes no difference."""
    return ("compiled" if cell.succeeded else cell.look), cell.kind


def _change(before: CellLine | None, after: CellLine | None) -> float | None:
    if before is None or after is None or not (before.succeeded and after.succeeded):
        return None
    pair = Pair(before, after)
    if unfair(pair) or -BAND <= pair.change <= BAND:
        return None
    return pair.change

"""Several builds next to each other: one row for each cell, one column for each build, oldest first. Pure.

Twelve builds may have 100,000 cells each, so cells are compared as columns, and only those that are shown become rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from farm.pages.comparison import BAND
from farm.results.lines import CellColumns, Look
from farm.results.report import BuildView

MOST = 12
"""Builds on one page."""

_PASSED = frozenset({"compiled", "hit"})


class BuildColumns(NamedTuple):
    """A build with its cells as columns."""

    build: BuildView
    cells: CellColumns


class Place(NamedTuple):
    """A cell in one build."""

    look: Look
    kind: str
    phase: str
    latency: float | None
    change: float | None
    """How much longer it takes than in the build before, as a share, if that is more than the noise and can be said."""


class AcrossRow(NamedTuple):
    """One cell in all builds; None for a build that has no such cell."""

    identifier: str
    places: Sequence[Place | None]


@dataclass(frozen=True, slots=True)
class Across:
    """Builds next to each other."""

    builds: Sequence[BuildView]
    same: int
    """Cells that all builds have, and that are the same in all."""
    partly: int
    """Cells that only some builds have."""
    worse: int
    """Cells that fail or take longer in the last build, and did not in the one before."""
    _names: Sequence[str]
    _differing: Sequence[int]
    """The rows of cells that all builds have, and that end differently or moved."""
    _cells: Sequence[CellColumns]
    _changes: Sequence[Sequence[float | None]]

    def found(self, text: str = "", *, everything: bool = False) -> Sequence[int]:
        """Return the rows of cells that differ and have `text` in their names, or of all such cells."""
        rows = range(len(self._names)) if everything else self._differing
        return [row for row in rows if text in self._names[row]] if text else rows

    def rows(self, found: Iterable[int]) -> list[AcrossRow]:
        """Return some rows, as they are shown."""
        return [
            AcrossRow(self._names[row], [self._place(build, row) for build in range(len(self.builds))]) for row in found
        ]

    def _place(self, build: int, row: int) -> Place | None:
        cells = self._cells[build]
        look = cells.look[row]
        if look is None:
            return None
        return Place(look, cells.kind[row], cells.phase[row], cells.latency[row], self._changes[build][row])


def across(builds: Sequence[BuildColumns]) -> Across:
    """Put builds next to each other, the oldest first."""
    names, cells = _aligned([build.cells for build in builds])
    none: list[float | None] = [None] * len(names)
    changes: list[Sequence[float | None]] = [none, *(_changes(before, after) for before, after in pairwise(cells))]
    ends = [_ends(each) for each in cells]
    partly = {row for each in cells if None in each.look for row, look in enumerate(each.look) if look is None}
    differing = {
        row
        for before, after, moved in zip(ends, ends[1:], changes[1:], strict=False)
        for row, (one, other, change) in enumerate(zip(before, after, moved, strict=True))
        if one != other or change is not None
    } - partly
    return Across(
        [build.build for build in builds],
        same=len(names) - len(differing) - len(partly),
        partly=len(partly),
        worse=_worse(cells, changes),
        _names=names,
        _differing=sorted(differing),
        _cells=cells,
        _changes=changes,
    )


def _aligned(builds: Sequence[CellColumns]) -> tuple[Sequence[str], list[CellColumns]]:
    """Return the names of all cells, and each build's columns in their order: without look for a cell it lacks."""
    names = builds[-1].identifier
    if all(each.identifier == names for each in builds):
        return names, [each._replace(identifier=names) for each in builds]
    names = list(dict.fromkeys(name for each in reversed(builds) for name in each.identifier))
    return names, [_in_order(each, names) for each in builds]


def _in_order(cells: CellColumns, names: Sequence[str]) -> CellColumns:
    places = dict(zip(cells.identifier, range(len(names)), strict=False))
    absent = len(cells.identifier)
    order = [places.get(name, absent) for name in names]
    return CellColumns._make(
        names if column is cells.identifier else list(map([*column, None].__getitem__, order)) for column in cells
    )


def _ends(cells: CellColumns) -> list[str | None]:
    """Return how cells ended, as texts: whether a program was there already makes no difference."""
    looks = ("compiled" if look in _PASSED else look for look in cells.look)
    return [f"{look} {kind}" if kind else look for look, kind in zip(looks, cells.kind, strict=True)]


def _changes(before: CellColumns, after: CellColumns) -> list[float | None]:
    """Return for each cell the change of its speed, if it is more than noise and both builds measured it alike."""
    compared = zip(
        before.latency, after.latency, before.look, after.look, before.key, after.key, before.shared, after.shared,
        before.device, after.device, strict=True,
    )  # fmt: skip
    return [
        change
        if then
        and now
        and key != other_key
        and not shared
        and not other_shared
        and device == other_device
        and look in _PASSED
        and other_look in _PASSED
        and not -BAND <= (change := now / then - 1) <= BAND
        else None
        for then, now, look, other_look, key, other_key, shared, other_shared, device, other_device in compared
    ]


def _worse(cells: Sequence[CellColumns], changes: Sequence[Sequence[float | None]]) -> int:
    if len(cells) < 2:
        return 0
    looks = zip(cells[-2].look, cells[-1].look, changes[-1], strict=True)
    return sum(
        (before in _PASSED and after == "failed") or (change is not None and change > BAND)
        for before, after, change in looks
    )

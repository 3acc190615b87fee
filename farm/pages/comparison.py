"""Builds compared: two with what fails, is slower or was mended, or several next to each other. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from farm.pages.build_view import Reason, ShownBuild
from farm.results.lines import SAME, CellChange, CellEnd, CellLine, Effect, change, is_quiet
from farm.results.report import BuildView


class Pair(NamedTuple):
    """The same cell in both builds, and what changed."""

    before: CellLine
    after: CellLine
    found: CellChange

    @property
    def change(self) -> float:
        """How much longer a run takes now, as a share of before: 0.25 is 25 % slower."""
        return self.found.share or 0.0


@dataclass(frozen=True, slots=True)
class ComparedBuilds:
    """How a build differs from the one before."""

    before: ShownBuild
    after: ShownBuild
    newly_failed: Sequence[Pair]
    still_failed: Sequence[Pair]
    fixed: Sequence[Pair]
    unjudged: Sequence[Pair]
    """Cells that a rule refused before, and that this rule did not judge now."""
    slower: Sequence[Pair]
    faster: Sequence[Pair]
    same: int
    """Cells that ended alike, with speeds that differ by less than the band."""
    only_before: Sequence[CellLine]
    only_after: Sequence[CellLine]
    left_out: Sequence[Reason]
    """Why speeds were not compared."""

    def __bool__(self) -> bool:
        return bool(self.newly_failed or self.fixed or self.unjudged or self.slower or self.faster)


def compare(before: ShownBuild, after: ShownBuild) -> ComparedBuilds:
    """Compare the ended cells that both builds have."""
    both = [(old, cell) for cell in after.cells if (old := before.by_identifier.get(cell.identifier))]
    pairs: dict[Effect, list[Pair]] = {}
    for old, cell in both:
        pairs.setdefault((found := change(old, cell)).effect, []).append(Pair(old, cell, found))
    ended = [pair for some in pairs.values() for pair in some if pair.before.succeeded and pair.after.succeeded]
    reasons = [pair.found.left_out for pair in ended]
    return ComparedBuilds(
        before,
        after,
        newly_failed=[pair for pair in pairs.get("newly failed", ()) if pair.before.succeeded],
        still_failed=pairs.get("still failing", ()),
        fixed=pairs.get("fixed", ()),
        unjudged=pairs.get("unjudged", ()),
        slower=sorted(pairs.get("worse", ()), key=lambda pair: -pair.change),
        faster=sorted(pairs.get("better", ()), key=lambda pair: pair.change),
        same=sum(pair.found.effect == "same" and pair.found.left_out in ("", SAME) for pair in ended),
        only_before=[cell for cell in before.cells if cell.identifier not in after.by_identifier],
        only_after=[cell for cell in after.cells if cell.identifier not in before.by_identifier],
        left_out=[Reason(reasons.count(why), why) for why in dict.fromkeys(reasons) if why and why != SAME],
    )


# --- several builds next to each other -------------------------------------------------------------------------------


MOST = 12
"""Builds on one page."""


class AcrossRow(NamedTuple):
    """One cell in all builds: how it ended in each, None where a build has no such cell.

    `shares` is how much longer it takes than in the build before, if that is more than the noise and can be said.
    """

    identifier: str
    ends: Sequence[CellEnd | None]
    shares: Sequence[float | None]


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
    _rows: Sequence[Sequence[CellEnd | None]]

    def found(self, text: str = "", *, everything: bool = False) -> Sequence[int]:
        """Return the rows of cells that differ and have `text` in their names, or of all such cells."""
        rows = range(len(self._names)) if everything else self._differing
        return [row for row in rows if text in self._names[row]] if text else rows

    def rows(self, found: Iterable[int]) -> list[AcrossRow]:
        """Return some rows, as they are shown."""
        return [AcrossRow(self._names[row], self._rows[row], list(_shares(self._rows[row]))) for row in found]


def across(builds: Sequence[tuple[BuildView, Sequence[CellEnd]]]) -> Across:
    """Put builds next to each other, the oldest first.

    Twelve builds may have 50,000 cells each, so only the cells that are shown become rows.
    """
    names, rows = _aligned([ends for _, ends in builds])
    partly = sum(None in row for row in rows)
    differing = [number for number, row in enumerate(rows) if None not in row and _differs(row)]
    return Across(
        [build for build, _ in builds],
        same=len(names) - len(differing) - partly,
        partly=partly,
        worse=sum(_is_worse(*row[-2:]) for row in rows) if len(builds) > 1 else 0,
        _names=names,
        _differing=differing,
        _rows=rows,
    )


def _aligned(builds: Sequence[Sequence[CellEnd]]) -> tuple[list[str], Sequence[Sequence[CellEnd | None]]]:
    """Return the names of all cells, and each one's ends; most builds of a manifest have the same cells."""
    names = [end.identifier for end in builds[-1]]
    if all([end.identifier for end in each] == names for each in builds):
        return names, list(zip(*builds, strict=True))
    cells = [{end.identifier: end for end in each} for each in builds]
    names = list(dict.fromkeys(name for each in reversed(cells) for name in each))
    return names, [[each.get(name) for each in cells] for name in names]


def _differs(row: Sequence[CellEnd | None]) -> bool:
    return any(
        before and now and not is_quiet(before, now) and change(before, now).is_noticed for before, now in pairwise(row)
    )


def _is_worse(before: CellEnd | None, now: CellEnd | None) -> bool:
    if before is None or now is None or is_quiet(before, now):
        return False
    effect = change(before, now).effect
    return effect == "worse" or (effect == "newly failed" and before.look in ("compiled", "hit"))


def _shares(row: Sequence[CellEnd | None]) -> Iterator[float | None]:
    for before, now in pairwise((None, *row)):
        found = change(before, now) if before and now else None
        yield found.share if found and found.effect in ("worse", "better") else None

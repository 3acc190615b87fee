"""Two builds compared: what fails now, what is slower, what was mended, what moved most, what was left out. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from farm.pages.build_view import Reason, ShownBuild
from farm.results.changes import SAME, CellChange, Effect, change
from farm.results.lines import CellLine


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

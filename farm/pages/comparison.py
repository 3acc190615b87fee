"""Two builds compared: what fails now, what is slower, what was mended, what moved most, what was left out. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from farm.pages.build_view import ShownBuild
from farm.results.lines import CellLine

BAND = 0.10
"""Relative difference of two medians below which nothing is said: they were measured at different times, perhaps on
different nodes. `farm bench` measures two programs in turns, and sees smaller ones."""


class Pair(NamedTuple):
    """The same cell in both builds."""

    before: CellLine
    after: CellLine

    @property
    def change(self) -> float:
        """How much longer a run takes now, as a share of before: 0.25 is 25 % slower."""
        assert self.before.latency and self.after.latency
        return self.after.latency / self.before.latency - 1


class NotCompared(NamedTuple):
    """Cells whose speed was not compared, and why."""

    cells: int
    why: str


@dataclass(frozen=True, slots=True)
class ComparedBuilds:
    """How a build differs from the one before."""

    before: ShownBuild
    after: ShownBuild
    newly_failed: Sequence[Pair]
    still_failed: Sequence[Pair]
    fixed: Sequence[Pair]
    slower: Sequence[Pair]
    faster: Sequence[Pair]
    same: int
    """Cells that ended alike, with speeds that differ by less than the band."""
    only_before: Sequence[CellLine]
    only_after: Sequence[CellLine]
    left_out: Sequence[NotCompared]

    def __bool__(self) -> bool:
        return bool(self.newly_failed or self.fixed or self.slower or self.faster)


def compare(before: ShownBuild, after: ShownBuild) -> ComparedBuilds:
    """Compare the ended cells that both builds have."""
    pairs = [
        Pair(before.by_identifier[cell.identifier], cell)
        for cell in after.cells
        if cell.identifier in before.by_identifier
    ]
    pairs = [pair for pair in pairs if not {pair.before.look, pair.after.look} & {"running", "queued", "cancelled"}]
    passed = [pair for pair in pairs if pair.before.succeeded and pair.after.succeeded]
    fair = [pair for pair in passed if not unfair(pair)]
    slower = sorted((pair for pair in fair if pair.change > BAND), key=lambda pair: -pair.change)
    faster = sorted((pair for pair in fair if 1 / (1 + pair.change) - 1 > BAND), key=lambda pair: pair.change)
    reasons = [unfair(pair) for pair in passed]
    return ComparedBuilds(
        before,
        after,
        newly_failed=[pair for pair in pairs if pair.before.succeeded and pair.after.look == "failed"],
        still_failed=[pair for pair in pairs if pair.before.look == "failed" and pair.after.look == "failed"],
        fixed=[pair for pair in pairs if pair.before.look == "failed" and pair.after.succeeded],
        slower=slower,
        faster=faster,
        same=len(fair) - len(slower) - len(faster) + sum(reason == SAME for reason in reasons),
        only_before=[cell for cell in before.cells if cell.identifier not in after.by_identifier],
        only_after=[cell for cell in after.cells if cell.identifier not in before.by_identifier],
        left_out=[NotCompared(reasons.count(why), why) for why in dict.fromkeys(reasons) if why and why != SAME],
    )


SAME = "the program is the same"


def unfair(pair: Pair) -> str:
    """Return why two speeds cannot be compared; empty if they can."""
    before, after = pair
    if before.key == after.key:
        return SAME
    if not before.latency or not after.latency:
        return "not measured in both builds"
    if before.shared or after.shared:
        return "measured while other work shared the node"
    if before.device != after.device:
        return "measured on different devices"
    return ""

"""Bisection: finds the first of several ordered versions at which something goes wrong, with few tries. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from farm.extras.radar.radar import RadarCell
from farm.jobs.state import FailureKind, Fault
from farm.results.gates import DECIDED


class TryVerdict(StrEnum):
    """What a try says about a version: `skipped` versions cannot be judged, as those of `git bisect skip`."""

    GOOD = "good"
    BAD = "bad"
    SKIPPED = "skipped"


@dataclass
class Bisection:
    """The search among `count` versions. As far as is known, the last one is wrong and the first one is not.

    Tries the two ends if nobody knows them, then at most log2 of the rest, rounded up; more if some cannot be judged.
    """

    count: int
    judged: dict[int, TryVerdict] = field(default_factory=dict)

    def next(self) -> int | None:
        """Return the version to try; None if the search is over."""
        ends = self._ends()
        if ends is None:
            return None
        low, high = ends
        for end in (low, high):
            if end not in self.judged:
                return end
        if (self.judged[low], self.judged[high]) != (TryVerdict.GOOD, TryVerdict.BAD):
            return None
        low, high = self._around()
        # In the middle of the longest stretch that is not judged, so that a row of broken versions costs few tries.
        stretches: list[list[int]] = [[]]
        for version in range(low + 1, high):
            if version in self.judged:
                stretches.append([])
            else:
                stretches[-1].append(version)
        longest = max(stretches, key=len)
        return longest[(len(longest) - 1) // 2] if longest else None

    def judge(self, version: int, verdict: TryVerdict) -> None:
        """Take what a try said."""
        self.judged[version] = verdict

    @property
    def suspects(self) -> list[int]:
        """The versions that may be the first wrong one, when the search is over; empty if nothing was found."""
        ends = self._ends()
        if (
            ends is None
            or self.next() is not None
            or [self.judged[end] for end in ends] != [TryVerdict.GOOD, TryVerdict.BAD]
        ):
            return []
        low, high = self._around()
        return list(range(low + 1, high + 1))

    @property
    def last_good(self) -> int | None:
        """The last version that is known to be good before the first wrong one."""
        return self._around()[0] if self.suspects else None

    def _ends(self) -> tuple[int, int] | None:
        """Return the first and the last version that are not skipped; None if all are."""
        left = [version for version in range(self.count) if self.judged.get(version) is not TryVerdict.SKIPPED]
        return (left[0], left[-1]) if left else None

    def _around(self) -> tuple[int, int]:
        """Return the last good version, and the first bad one after it."""
        bad = min(version for version, verdict in self.judged.items() if verdict is TryVerdict.BAD)
        good = max(version for version, verdict in self.judged.items() if verdict is TryVerdict.GOOD and version < bad)
        return good, bad


def verdict_on(cell: RadarCell) -> TryVerdict:
    """Return what a cell of a shadow build says about its toolchain, by the gates that were asked for.

    What ended by the farm's fault, and numbers that could not be compared surely, say nothing.
    """
    if cell["passes"]:
        decided = all(row["outcome"] in DECIDED for row in cell["compared"])
        return TryVerdict.GOOD if decided else TryVerdict.SKIPPED
    if not cell["kind"] or FailureKind(cell["kind"]).policy.fault is Fault.FARM:
        return TryVerdict.SKIPPED
    return TryVerdict.BAD

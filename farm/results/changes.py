"""What changed between two builds: one answer for reports, `farm diff`, pages and the radar. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal, NamedTuple

from farm.results.gate_rules import left_out
from farm.results.gates import GateRow, undecided
from farm.results.lines import CellEnd, CellLine

Effect = Literal["open", "newly failed", "still failing", "fixed", "unjudged", "worse", "better", "same"]
"""What happened to a cell. `open`: one of the two has not ended, or was cancelled. `unjudged`: a rule refused it, and
the second build did not judge it by that."""

BAND = 0.10
"""Relative difference of two medians below which nothing is said: they were measured at different times, perhaps on
different nodes. `farm bench` measures two programs in turns, and sees smaller ones."""

SAME = "the program is the same"

_PASSED = frozenset({"compiled", "hit"})
_FAILED = frozenset({"failed", "expected"})


class CellChange(NamedTuple):
    """What changed in a cell from one build to another one.

    `share` is how much longer a run takes now, as a share of before, if both can be compared; else `left_out` says why
    they cannot. `other_end`: it passes and did not, or fails and did not, or fails in another way.
    """

    effect: Effect
    other_end: bool = False
    share: float | None = None
    left_out: str = ""

    @property
    def is_noticed(self) -> bool:
        """Whether it ended differently, or its speed changed by more than the noise."""
        return self.other_end or self.effect in ("worse", "better")


def is_quiet(before: CellEnd, after: CellEnd) -> bool:
    """Whether `change` can notice nothing of a cell: it ends as before, at about the same speed. Much faster."""
    if before.look != after.look or before.kind != after.kind:
        return False
    then, now = before.latency, after.latency
    return not then or not now or abs(now - then) <= BAND * then


def change(before: CellEnd | CellLine | None, after: CellEnd | CellLine, rows: Sequence[GateRow] = ()) -> CellChange:
    """Return what changed in a cell; `before` is None for a new one, which counts as one that passed.

    Two speeds are compared by their medians, unless `rows` has what a comparison in turns with `before` found.
    """
    passed = before is None or before.look in _PASSED
    failed = before is not None and before.look in _FAILED
    other_end = passed != (after.look in _PASSED) or (before is not None and before.kind != after.kind)
    if after.look == "failed":
        return CellChange("still failing" if failed else "newly failed", other_end)
    if after.look not in _PASSED or not (passed or failed):
        return CellChange("same" if after.look == "expected" else "open", other_end)
    if before is None:
        return CellChange("same", other_end)
    if failed:
        unjudged = left_out(json.loads(before.rules), json.loads(after.rules))
        return CellChange("unjudged" if unjudged else "fixed", other_end, left_out="; ".join(unjudged))
    return _speed(before, after, rows)


def _speed(before: CellEnd | CellLine, after: CellEnd | CellLine, rows: Sequence[GateRow]) -> CellChange:
    if rows:
        outcomes = {row["outcome"] for row in rows}
        effect: Effect = "worse" if "worse" in outcomes else "better" if "better" in outcomes else "same"
        return CellChange(effect, left_out="; ".join(undecided(rows)))
    if why := _unfair(before, after):
        return CellChange("same", left_out=why)
    assert before.latency and after.latency
    share = after.latency / before.latency - 1
    return CellChange("worse" if share > BAND else "better" if share < -BAND else "same", False, share)


def _unfair(before: CellEnd | CellLine, after: CellEnd | CellLine) -> str:
    """Return why two speeds cannot be compared; empty if they can."""
    if before.key == after.key:
        return SAME
    if not before.latency or not after.latency:
        return "not measured in both builds"
    if before.shared or after.shared:
        return "not measured alone"
    if before.device != after.device:
        return "measured on different devices"
    return ""

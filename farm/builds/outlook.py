"""Outlooks: when a build will be done and what it costs, from its cells' estimates. Pure.

The slots of each pool take its compiles, the longest first, and each compile takes as long as its estimate expects.
One factor makes a range of the result: no estimate knows of retries, or of slots that come and go.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from farm.jobs.estimate import EstimateDocument, OutlookDocument, RangeDocument
from farm.jobs.rows import PoolView
from farm.jobs.state import State
from farm.matrix.planned import CellPlan, ShownCell
from farm.results.report import JudgedCell

WIDENING = 2.1
"""A range goes from the expected value divided by this to the expected value times this.

Chosen by `tests/benchmarks/outlooks.py`: at least 78 of 100 builds of every simulated farm end in such ranges.
"""

LATE = 0.25
"""A running compile is expected to take at least this share of its elapsed time longer."""

EstimatedCell = ShownCell | CellPlan | JudgedCell

_LIVE = frozenset({State.QUEUED, State.RUNNING, "miss", "joined"})


class _Compile(NamedTuple):
    """One future compile, or the rest of a running one."""

    pool: str
    seconds: float
    runs: bool


def outlook(
    cells: Iterable[EstimatedCell], pools: Iterable[PoolView], *, paused: str = "", parallel: int = 0
) -> OutlookDocument:
    """Return when a build's live cells will be done, what they will cost, and what was spent so far.

    `paused` is the build's id if it is paused, `parallel` how many of its jobs may run at once (0: no bound).
    """
    # Cells that share a job wait for it once.
    once = {cell.get("job") or cell.get("key") or position: cell for position, cell in enumerate(cells)}.values()
    live = [cell for cell in once if cell["state"] in _LIVE]
    to_come = [_to_come(cell, estimate) for cell in live if (estimate := cell.get("estimate"))]
    to_come.sort(key=lambda each: (not each.runs, -each.seconds))  # What runs has its slot already.
    on_gpu = [each.seconds for each in to_come if _on_gpu(each.pool)]
    known_pools = {pool["name"]: pool for pool in pools}
    slots = {name: _slots(known_pools.get(name), parallel) for name in {cell["pool"] for cell in live}}
    unserved = sorted(name for name, count in slots.items() if not count)
    ends = [0.0]
    if to_come and not unserved and not paused:
        there = Counter(cell["pool"] for cell in live if cell["state"] != "miss")  # A planned job does not wait yet.
        for name in {each.pool for each in to_come}:
            others = known_pools[name]["waiting"] + known_pools[name]["running"] - there[name]
            ends.append(_end([each.seconds for each in to_come if each.pool == name], slots[name], others))
        if parallel:  # The bound is the build's, over all of its pools.
            ends.append(_end([each.seconds for each in to_come], parallel))
    return {
        "eta": _range(max(ends)),
        "slot_seconds": _range(sum(each.seconds for each in to_come)),
        "gpu_hours": _range(sum(on_gpu) / 3600),
        "spent_seconds": round(sum(_seconds(cell, "spent") for cell in once), 3),
        "spent_gpu_hours": round(sum(_seconds(cell, "spent") for cell in once if _on_gpu(cell["pool"])) / 3600, 4),
        "unknown": len(live) - len(to_come),
        "unserved": unserved,
        "paused": [
            *filter(None, [paused]),
            *(name for name in unserved if name in known_pools and known_pools[name].get("paused")),
        ],
    }


def _to_come(cell: EstimatedCell, estimate: EstimateDocument) -> _Compile:
    runs = cell["state"] == State.RUNNING
    elapsed = _seconds(cell, "elapsed") if runs else 0.0
    seconds = max(0.001, estimate["expected"])  # Rounded to milliseconds, an estimate may be 0.
    return _Compile(cell["pool"], max(seconds - elapsed, LATE * elapsed), runs)


def _on_gpu(pool: str) -> bool:
    return "gfx" in pool or ".sm_" in pool


def _seconds(cell: EstimatedCell, name: Literal["elapsed", "spent"]) -> float:
    """Return seconds of a cell that was submitted; a planned one has none."""
    seconds = cell.get(name)
    return seconds if isinstance(seconds, float | int) else 0.0


def _slots(pool: PoolView | None, parallel: int) -> int:
    """Return the number of slots that take its jobs now."""
    slots = pool["slots"] if pool and not pool.get("paused") else 0
    return min(slots, parallel or slots)


def _end(lengths: Sequence[float], slots: int, others: int = 0) -> float:
    """Return when slots will have done compiles in this order, each on the first free slot.

    Builds take turns, so about one job of others comes for each of ours, as long as there are `others`.
    """
    free = [0.0] * min(slots, len(lengths))
    for seconds in lengths:
        heapq.heapreplace(free, free[0] + seconds)
    return max(free) + min(max(0, others), len(lengths)) * sum(lengths) / len(lengths) / slots


def _range(expected: float) -> RangeDocument | None:
    """The range around an expected value; None for 0, that is, if nothing is left or known."""
    if not expected:
        return None
    return {
        "low": round(expected / WIDENING, 4),
        "expected": round(expected, 4),
        "high": round(expected * WIDENING, 4),
    }

"""Estimates: how long a compile takes, when a build will be done and what it costs, from past durations. Pure.

A range is where about 80 of 100 such compiles end. It is learnt from compiles of the same target, precision and tuning
mode: of the same model where there are some, else of models of about its size. Where nothing is comparable, nothing is
said.
"""

from __future__ import annotations

import heapq
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from farm.jobs.state import State

FEWEST = 3
"""So many compiles of other models make a range; fewer say nothing."""

NEIGHBOURS = 40
"""How many compiles of other models are looked at: those nearest in size."""

FARTHEST = 4.0
"""A model that is so many times larger or smaller than all that are known is not comparable."""

SPREAD = 0.5
"""Standard deviation of the logarithm of a model's durations, where too few are known to tell: about half to double."""

DOUBT = 1
"""For how many compiles `SPREAD` counts where more are known. Those of one build, at the same hour and load,
resemble each other more than the next build's will: 8.2, 8.3 and 8.4 s promise nothing to a tenth of a second.
"""

SHARED_ERROR = 0.5
"""How much of the cells' errors goes the same way: a busy node, or a new toolchain, is slower for all of them."""

_T90 = (3.078, 1.886, 1.638, 1.533, 1.476, 1.440, 1.415, 1.397, 1.383, 1.372, 1.363, 1.356, 1.350, 1.345, 1.341)
"""Student's t for 10 % on each side, by degrees of freedom from 1."""

_NORMAL90 = 1.2816

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sample:
    """One past compile: its model (digest, or the start of one), the model's bytes (0: not known), its seconds."""

    model: str
    size: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds that a compile takes: the middle, and the range in which about 80 of 100 end; `by` says from what."""

    low: float
    expected: float
    high: float
    by: str = ""

    def as_dict(self) -> Document:
        """Return the estimate as plain JSON, to milliseconds."""
        return {name: round(value, 3) if name != "by" else value for name, value in asdict(self).items()}


def comparable(spec: Mapping[str, Any]) -> str:
    """Name what durations depend on beside the model: target, precision and tuning mode of a spec."""
    device = re.sub(r"[^a-z0-9]+", "-", str(spec["device"]["arch"]).lower())
    return f"{spec['compiler']['name']}-{device}.{spec['precision']}.{spec['tuning']['mode']}"


def estimate(model: str, size: int, samples: Sequence[Sample]) -> Estimate | None:
    """Return how long a compile of this model will take, by comparable ones; None where none is comparable."""
    own = [sample for sample in samples if sample.seconds > 0 and model.startswith(sample.model)]
    if own:
        logs = [math.log(sample.seconds) for sample in own]
        return _range(logs, f"{len(own)} of this model")
    others = [sample for sample in samples if sample.seconds > 0 and sample.size > 0]
    if size <= 0 or len(others) < FEWEST:
        return None
    sizes = [sample.size for sample in others]
    if size > FARTHEST * max(sizes) or size * FARTHEST < min(sizes):
        return None
    near = sorted(others, key=lambda sample: abs(math.log(sample.size / size)))[:NEIGHBOURS]
    slope = _slope(near)
    logs = [math.log(sample.seconds) + slope * math.log(size / sample.size) for sample in near]
    return _range(logs, f"{len(near)} of other models", fitted=1)


def _slope(samples: Sequence[Sample]) -> float:
    """By which power of its size a model's duration grows: least squares on logarithms, from 0 to 1.5."""
    points = [(math.log(sample.size), math.log(sample.seconds)) for sample in samples]
    middle_x, middle_y = (sum(axis) / len(points) for axis in zip(*points, strict=True))
    spread = sum((x - middle_x) ** 2 for x, _ in points)
    if spread < 1e-9:
        return 0.0
    slope: float = sum((x - middle_x) * (y - middle_y) for x, y in points) / spread
    return min(1.5, max(0.0, slope))


def _range(logs: Sequence[float], by: str, fitted: int = 0) -> Estimate:
    """The prediction interval of a normal sample (of logarithms), whose mean and deviation are estimates themselves.

    The deviation is the sample's, with `DOUBT`; `fitted` is how many more parameters were taken from the same sample.
    """
    count = len(logs)
    middle = sum(logs) / count
    freedom = count - 1 - fitted
    if count < FEWEST or freedom < 1:
        deviation, reach = SPREAD, _NORMAL90
    else:
        squares = DOUBT * SPREAD**2 + sum((value - middle) ** 2 for value in logs)
        deviation = math.sqrt(squares / (DOUBT + freedom))
        reach = _T90[freedom - 1] if freedom <= len(_T90) else _NORMAL90
    half = reach * deviation * math.sqrt(1 + 1 / count)
    return Estimate(math.exp(middle - half), math.exp(middle), math.exp(middle + half), by)


# --- a build --------------------------------------------------------------------------------------------------------


def outlook(
    cells: Iterable[Mapping[str, Any]], pools: Iterable[Mapping[str, Any]], *, paused: bool = False
) -> Document:
    """Return when a build's live cells will be done, and what they cost beside what was spent.

    Cells are `{"state", "pool", "job" or "key", "estimate", "elapsed", "spent"}` (seconds; planned ones have only
    some), pools those of the store. Answers `{"eta", "slot_seconds", "gpu_hours", "spent_seconds", "spent_gpu_hours",
    "unknown", "unserved"}`: `eta` (seconds from now) and the costs to come are `{"low", "expected", "high"}` of the
    cells that can be estimated, None where there are none; `unknown` counts the cells without a comparable compile,
    `unserved` are the pools that take no jobs now, for which nobody knows when; nor does anybody of a `paused` build.
    """
    known_pools = {pool["name"]: pool for pool in pools}
    left: dict[str, list[Estimate]] = defaultdict(list)
    jobs: set[str] = set()
    unknown, gpu_share, spent, gpu_spent = 0, [], 0.0, 0.0
    for cell in cells:
        job = str(cell.get("job") or cell.get("key") or "")
        if job and job in jobs:
            continue  # Cells that share a job wait for it once.
        jobs.add(job)
        on_gpu = "gfx" in cell["pool"]
        spent += cell.get("spent") or 0.0
        gpu_spent += (cell.get("spent") or 0.0) * on_gpu
        if cell["state"] not in _LIVE:
            continue
        if not cell.get("estimate"):
            unknown += 1
            continue
        running = cell["state"] == State.RUNNING
        rest = _rest(cell["estimate"], (cell.get("elapsed") or 0.0) if running else 0.0)
        left[cell["pool"]].append(rest)
        if on_gpu:
            gpu_share.append(rest)
    slots = {name: _slots(known_pools.get(name, {})) for name in left}
    unserved = sorted(name for name, count in slots.items() if not count)
    times = [
        _time(rests, slots[name], _others(known_pools[name], len(rests))) for name, rests in left.items() if slots[name]
    ]
    everything = [rest for rests in left.values() for rest in rests]
    eta = (
        Estimate(*(max(getattr(time, name) for time in times) for name in ("low", "expected", "high")))
        if times
        else None
    )
    return {
        "eta": None if unserved or paused else _plain(eta),
        "slot_seconds": _plain(_total(everything)),
        "gpu_hours": _plain(_total(gpu_share), 3600.0),
        "spent_seconds": round(spent, 1),
        "spent_gpu_hours": round(gpu_spent / 3600.0, 4),
        "unknown": unknown,
        "unserved": unserved,
    }


_LIVE = frozenset({State.QUEUED, State.RUNNING, "miss", "joined"})


def _slots(pool: Mapping[str, Any]) -> int:
    """How many slots take its jobs now."""
    return 0 if pool.get("paused") else int(pool.get("slots") or 0)


def _plain(estimate: Estimate | None, unit: float = 1.0) -> Document | None:
    if estimate is None:
        return None
    return {name: round(getattr(estimate, name) / unit, 4) for name in ("low", "expected", "high")}


def _rest(estimate: Mapping[str, Any], elapsed: float) -> Estimate:
    """What is left of a compile that has taken so long; one that is late is half way to the end of its range."""
    low, expected, high = (max(0.0, float(estimate[name]) - elapsed) for name in ("low", "expected", "high"))
    return Estimate(low, expected or high / 2, high)


def _total(rests: Sequence[Estimate]) -> Estimate | None:
    """The sum of estimates: their errors cancel out in part, as far as they are independent."""
    if not rests:
        return None
    expected = sum(rest.expected for rest in rests)
    ups, downs = [rest.high - rest.expected for rest in rests], [rest.expected - rest.low for rest in rests]
    return Estimate(max(0.0, expected - _together(downs)), expected, expected + _together(ups))


def _together(errors: Sequence[float]) -> float:
    return math.sqrt((1 - SHARED_ERROR) * sum(error**2 for error in errors) + SHARED_ERROR * sum(errors) ** 2)


def _others(pool: Mapping[str, Any], mine: int) -> int:
    """How many jobs of other builds may come between: builds take turns, so about one for each of ours."""
    return min(mine, max(0, int(pool["waiting"]) + int(pool["running"]) - mine))


def _time(rests: Sequence[Estimate], slots: int, others: int) -> Estimate:
    """When a pool has done them: the longest first, each on the slot that is free first.

    Jobs of other builds are counted at the range's upper end only: they may rank behind ours.
    """
    free = [0.0] * min(slots, len(rests))
    for rest in sorted(rests, key=lambda each: -each.expected):
        heapq.heappush(free, heapq.heappop(free) + rest.expected)
    expected = max(free)
    total = _total(rests)
    assert total
    scale = (total.low / total.expected, total.high / total.expected) if total.expected else (1.0, 1.0)
    longest = max(rest.high for rest in rests)
    crowd = 1 + others / len(rests)
    return Estimate(expected * scale[0], expected, max(longest, expected * scale[1]) * crowd)

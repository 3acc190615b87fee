"""Outlooks: when a build will be done and what it costs, from its cells' estimates and how past builds ended. Pure.

A build is imagined many times: each time its compiles take other times from their ranges, and a pool's slots take them,
the longest first. The ranges of an outlook are where 80 of 100 such ends lie, moved and stretched by how the ends of
past builds lay in theirs: what no estimate of a compile knows (retries, other builds, slots that come and go) is in
that.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat, takewhile
from statistics import NormalDist
from typing import Any

from farm.jobs.state import State

COMMON = 0.7
"""How much of the variance of a compile's error is common to its build: a busy node, or a new toolchain, is slower for
all of them. Half of the rest is common to the cells of one model, whose shapes and precisions resemble each other.
"""

DRAWS = (24, 160)
"""How often a build is imagined, at least and at most: less often where it has many cells."""

DRAWN = 30_000
"""Compiles that are imagined at most for one outlook, beyond the fewest draws: a status of ten thousand cells takes a
tenth of a second for it (measured: 0.09 s; 0.007 s for a thousand).
"""

UNTAUGHT = 2.0
"""For how many past builds the outlook's own range counts, made wider by `CAUTION`, when they say what came of it."""

CAUTION = 1.3

FADING = 0.97
"""By how much each older build counts less than the one after it: a farm whose speed drifts is believed anew."""

OUTLIER = 4.5
"""A past build that ended farther off, in standard deviations, counts as so far off: it may be about one bad night."""

LATEST = 1.3
"""A compile that is later than its upper end, in standard deviations, is one of the slow ones: the longer it has taken,
the longer it will.
"""

FARTHEST = math.log(1000)
"""No compile is imagined to take more than a thousand times its median, or less than a thousandth: what ended far off
in a narrow range says little of one whose range is wide.
"""

_NORMAL = NormalDist()
_REACH = _NORMAL.inv_cdf(0.9)

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Kept:
    """How a build ended against what was first said of it, in standard deviations: 0 as expected, 1.28 the upper end.

    `time` is None where nobody can say: it was paused, or its pool took no jobs.
    """

    time: float | None
    work: float


@dataclass(frozen=True, slots=True)
class _Compile:
    """One compile to come: the logarithm of its median seconds, its standard deviation, and how long it has run."""

    pool: str
    model: str
    middle: float
    deviation: float
    elapsed: float

    def left(self, error: float) -> float:
        """Seconds that are left of it, which runs, where its error is so many standard deviations.

        One that should have ended by then is one of those that take longer than it has, anywhere among them.
        """
        late = (math.log(self.elapsed) - self.middle) / self.deviation
        if error > late:
            return max(0.0, math.exp(self.middle + self._off(error)) - self.elapsed)
        below = _NORMAL.cdf(late)  # 0 far down, where the build's other cells took half as long as their ranges said.
        within = _NORMAL.cdf(error) / below if below else 0.5
        late = min(late, LATEST)
        before = _NORMAL.cdf(late)
        later = _NORMAL.inv_cdf(max(1e-9, min(before + within * (1 - before), 1 - 1e-9))) - late
        return self.elapsed * math.expm1(self._off(max(0.0, later)))

    def _off(self, error: float) -> float:
        return max(-FARTHEST, min(FARTHEST, self.deviation * error))


def outlook(
    cells: Iterable[Mapping[str, Any]],
    pools: Iterable[Mapping[str, Any]],
    *,
    paused: bool = False,
    parallel: int = 0,
    past: Sequence[Kept] = (),
) -> Document:
    """Return when a build's live cells will be done, and what they cost beside what was spent.

    Cells are `{"state", "pool", "job" or "key", "model", "estimate", "elapsed", "spent"}` (seconds; planned ones have
    only some), pools those of the store, `parallel` is how many of its jobs may run at once (0: no bound), `past` how
    builds before it ended, the newest first. Answers `{"eta", "slot_seconds", "gpu_hours", "spent_seconds",
    "spent_gpu_hours", "unknown", "unserved"}`: `eta` (seconds from now) and the costs to come are `{"low", "expected",
    "high"}` of the cells that can be estimated, None where there are none; `unknown` counts the cells without a
    comparable compile, `unserved` are the pools that take no jobs now, for which nobody knows when; nor does anybody of
    a `paused` build.
    """
    known_pools = {pool["name"]: pool for pool in pools}
    to_come: list[_Compile] = []
    ended: dict[str, list[float]] = defaultdict(list)
    there: Counter[str] = Counter()
    jobs: set[str] = set()
    unknown, spent, gpu_spent = 0, 0.0, 0.0
    for cell in cells:
        job = str(cell.get("job") or cell.get("key") or "")
        if job and job in jobs:
            continue  # Cells that share a job wait for it once.
        jobs.add(job)
        spent += cell.get("spent") or 0.0
        gpu_spent += (cell.get("spent") or 0.0) * _on_gpu(cell["pool"])
        if cell["state"] == State.SUCCEEDED and cell.get("estimate") and cell.get("elapsed") and not cell.get("hit"):
            ended[str(cell.get("model") or "")].append(_error(cell["estimate"], cell["elapsed"]))
        elif cell["state"] in _LIVE and cell.get("estimate"):
            to_come.append(_to_come(cell))
            there[cell["pool"]] += cell["state"] != "miss"  # What is only planned does not wait in its pool yet.
        elif cell["state"] in _LIVE:
            unknown += 1
    mine = Counter(each.pool for each in to_come)
    slots = {name: _slots(known_pools.get(name, {}), parallel) for name in mine}
    unserved = sorted(name for name, count in slots.items() if not count)
    others = {name: _others(known_pools[name], mine[name], there[name]) for name in mine if slots[name]}
    draws = _imagine(to_come, {} if unserved or paused else slots, others, ended, parallel)
    work = [kept.work for kept in past]
    time = [kept.time for kept in past if kept.time is not None]
    return {
        "eta": _range(draws.time, time),
        "slot_seconds": _range(draws.work, work),
        "gpu_hours": _range([seconds / 3600 for seconds in draws.gpu_work], work),
        "spent_seconds": round(spent, 3),
        "spent_gpu_hours": round(gpu_spent / 3600.0, 4),
        "unknown": unknown,
        "unserved": unserved,
    }


def kept(promised: Mapping[str, Any], *, seconds: float | None, work: float) -> Kept | None:
    """Return how a build ended against its first outlook (one without `past`): after `seconds`, with so much work.

    None where nothing was said of all of its cells, or nothing was done. A store that took over from another may have
    another clock, so a short build may seem to end before it began.
    """
    if promised["unknown"] or not promised["slot_seconds"] or work <= 0:
        return None
    eta = promised["eta"]
    time = _error(eta, seconds) if eta and seconds and seconds > 0 else None
    return Kept(time, _error(promised["slot_seconds"], work))


_LIVE = frozenset({State.QUEUED, State.RUNNING, "miss", "joined"})


def _on_gpu(pool: str) -> bool:
    return "gfx" in pool


def _slots(pool: Mapping[str, Any], parallel: int) -> int:
    """How many slots take its jobs now."""
    slots = 0 if pool.get("paused") else int(pool.get("slots") or 0)
    return min(slots, parallel or slots)


def _others(pool: Mapping[str, Any], mine: int, there: int) -> int:
    """How many jobs of other builds may come between: builds take turns, so about one for each of ours.

    `there` is how many of ours are among those that the pool has.
    """
    return min(mine, max(0, int(pool["waiting"]) + int(pool["running"]) - there))


def _to_come(cell: Mapping[str, Any]) -> _Compile:
    estimate = cell["estimate"]
    elapsed = (cell.get("elapsed") or 0.0) if cell["state"] == State.RUNNING else 0.0
    model = str(cell.get("model") or "")
    return _Compile(cell["pool"], model, math.log(max(estimate["expected"], 1e-4)), _deviation(estimate), elapsed)


def _deviation(range_: Mapping[str, Any]) -> float:
    """The standard deviation of the logarithm; ranges are rounded, so those of milliseconds may have none."""
    return max(0.01, math.log(max(range_["high"], 1e-4) / max(range_["low"], 1e-4)) / (2 * _REACH))


def _error(range_: Mapping[str, Any], seconds: float) -> float:
    return math.log(seconds / max(range_["expected"], 1e-4)) / _deviation(range_)


# --- imagining ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Draws:
    """What came of each time that a build was imagined, in seconds."""

    time: list[float]
    work: list[float]
    gpu_work: list[float]


def _imagine(
    compiles: Sequence[_Compile],
    slots: Mapping[str, int],
    others: Mapping[str, int],
    ended: Mapping[str, Sequence[float]],
    parallel: int,
) -> _Draws:
    """Imagine a build again and again; the same one always in the same way, so that its outlook does not flicker."""
    import numpy as np

    if not compiles:
        return _Draws([], [], [])
    # Those that run hold their slots; the others follow, the longest first.
    compiles = sorted(compiles, key=lambda each: (not each.elapsed, -each.middle))
    count = max(DRAWS[0], min(DRAWS[1], DRAWN // len(compiles)))
    chance = np.random.default_rng(count)
    common, known, of_model, of_cell = _errors(ended)
    models = {model: place for place, model in enumerate(dict.fromkeys(each.model for each in compiles))}
    its = [known.get(model, NormalDist(0, of_model)) for model in models]
    shares = [(number + 0.5) / count for number in range(count)]
    # One row for each draw, one column for each compile.
    errors = chance.normal(0, of_cell, (count, len(compiles)))
    errors += np.array([[common.inv_cdf(share)] for share in shares])
    of_models = chance.normal([one.mean for one in its], [one.stdev for one in its], (count, len(its)))
    errors += of_models[:, [models[each.model] for each in compiles]]
    off = np.clip(np.array([each.deviation for each in compiles]) * errors, -FARTHEST, FARTHEST)
    lengths = np.exp([each.middle for each in compiles] + off)
    for place, each in enumerate(takewhile(lambda each: each.elapsed, compiles)):
        lengths[:, place] = [each.left(error) for error in errors[:, place].tolist()]
    # Of jobs of other builds, half of the draws have as many as take turns, and the others fewer: they may rank behind.
    crowds = chance.permutation([min(1.0, 2 * share) for share in shares]).tolist()
    on_gpu = [_on_gpu(each.pool) for each in compiles]
    ends: list[list[float]] = []
    for pool, most in slots.items():
        mine = lengths[:, [each.pool == pool for each in compiles]].tolist()
        ends.append([_makespan(some, most, others[pool] * crowd) for some, crowd in zip(mine, crowds, strict=True)])
    if parallel and len(slots) > 1:  # The bound is the build's, over all of its pools.
        ends.append([_makespan(some, parallel, 0.0) for some in lengths.tolist()])
    return _Draws(
        [max(some) for some in zip(*ends, strict=True)],
        lengths.sum(axis=1).tolist(),
        lengths[:, on_gpu].sum(axis=1).tolist(),
    )


def _errors(ended: Mapping[str, Sequence[float]]) -> tuple[NormalDist, dict[str, NormalDist], float, float]:
    """What a build's ended cells, by model, say of the errors of the others.

    Returns that common to all, of those of each model what is known, and the deviations of an unknown model from the
    common error and of a cell from its model's. Where none has ended it is what `COMMON` says.
    """
    means = {model: sum(some) / len(some) for model, some in ended.items()}
    mean = sum(means.values()) / max(1, len(means))
    of_cell = _variance([error - means[model] for model, some in ended.items() for error in some], len(means))
    of_model = _variance([each - mean for each in means.values()], 1)
    doubt = sum(of_model + of_cell / len(some) for some in ended.values()) / len(ended) ** 2 if ended else math.inf
    belief = COMMON / (COMMON + doubt)
    common = NormalDist(belief * mean, math.sqrt(COMMON * (1 - belief)))
    known = {}
    for model, some in ended.items():
        weight = of_model / (of_model + of_cell / len(some))
        known[model] = NormalDist(weight * (means[model] - common.mean), math.sqrt(of_model * (1 - weight)))
    return common, known, math.sqrt(of_model), math.sqrt(of_cell)


def _variance(errors: Sequence[float], fitted: int) -> float:
    """The variance of errors about so many means; what `COMMON` leaves to it counts for `UNTAUGHT` errors more."""
    squares = UNTAUGHT * (1 - COMMON) / 2 + sum(error**2 for error in errors)
    return squares / (UNTAUGHT + max(0, len(errors) - fitted))


def _makespan(lengths: Sequence[float], slots: int, others: float) -> float:
    """When a pool has done compiles in this order, each on the first free slot, and so many of others between."""
    free = list(repeat(0.0, min(slots, len(lengths))))
    for length in lengths:
        heapq.heapreplace(free, free[0] + length)
    return max(free) + others * sum(lengths) / len(lengths) / slots


def _range(draws: Sequence[float], past: Sequence[float]) -> Document | None:
    """Where 80 of 100 draws lie, moved and stretched by where past builds lay in their ranges."""
    if not draws or not sum(draws):
        return None
    low, middle, high = (math.log(max(_quantile(draws, share), 1e-4)) for share in (0.1, 0.5, 0.9))
    shift, scale = _taught(past)
    down, up = (middle - low) / _REACH, (high - middle) / _REACH
    centre = middle + shift * (up if shift > 0 else down)
    ends = {"low": centre - scale * _REACH * down, "expected": centre, "high": centre + scale * _REACH * up}
    return {name: round(math.exp(value), 4) for name, value in ends.items()}


def _quantile(draws: Sequence[float], share: float) -> float:
    place = share * len(draws) - 0.5
    values, below = sorted(draws), math.floor(place)
    return values[below] + (place - below) * (values[below + 1] - values[below])


def _taught(past: Sequence[float]) -> tuple[float, float]:
    """By how many standard deviations past builds ended off on the average, and how much more they spread than said."""
    weights = [FADING**age for age in range(len(past))]
    errors = [max(-OUTLIER, min(OUTLIER, error)) for error in past]
    total = sum(weights) + UNTAUGHT
    shift = sum(weight * error for weight, error in zip(weights, errors, strict=True)) / total
    squares = sum(weight * (error - shift) ** 2 for weight, error in zip(weights, errors, strict=True))
    return shift, math.sqrt((UNTAUGHT * CAUTION**2 + squares) / total * (1 + 3 / total)) if past else 1.0

"""Estimates: how long a compile takes, from past durations. Pure; `farm/builds/plan.py` adds them up to builds.

About 80 of 100 compiles end within their range. It is estimated from compiles of the same target, precision and tuning
mode: of the same model if there are any, else of models of about its size. Without a comparable compile there is no
estimate.
"""

# Without annotations from `__future__`: the fields of documents would be compiled from text at every start.

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from typing_extensions import TypedDict

FEWEST = 3  # Fewest compiles of other models that give a range.
NEIGHBOURS = 40  # Most compiles of other models that are used: those nearest in size.
FARTHEST = 4.0  # A model this many times larger or smaller than all known ones is not comparable.
SPREAD = 0.5  # Standard deviation of the logarithm of a model's durations if too few are known: about half to double.

DOUBT = 1
"""For how many compiles `SPREAD` counts where more are known. Those of one build, at the same hour and load,
resemble each other more than the next build's will: 8.2, 8.3 and 8.4 s promise nothing to a tenth of a second.
"""

_T90 = (3.078, 1.886, 1.638, 1.533, 1.476, 1.440, 1.415, 1.397, 1.383, 1.372, 1.363, 1.356, 1.350, 1.345, 1.341)
"""Student's t for 10 % on each side, by degrees of freedom from 1."""

_NORMAL90 = 1.2816


class RangeDocument(TypedDict):
    """The middle, and the range in which about 80 of 100 end."""

    low: float
    expected: float
    high: float


class Estimate(RangeDocument):
    """Seconds that a compile takes, to milliseconds; `by` says from what it was learnt."""

    by: str


class OutlookDocument(TypedDict):
    """When a build will be done and what it costs.

    `eta` (seconds from now) and the costs to come are those of the cells that can be estimated, None if there are none;
    `unknown` counts the cells without a comparable compile; `unserved` are the pools that take no jobs now. `paused`
    is what somebody has paused: some of these pools, the build itself. While there is one of either, `eta` is None.
    """

    eta: RangeDocument | None
    slot_seconds: RangeDocument | None
    gpu_hours: RangeDocument | None
    spent_seconds: float
    spent_gpu_hours: float
    unknown: int
    unserved: list[str]
    paused: list[str]


class Compile(NamedTuple):
    """A compile: its model (digest, or the start of one), the model's bytes (0: unknown), and the seconds that it took.

    Of one to estimate, `seconds` is what the same cell took with the model before (0: unknown), and `sort` what its
    duration depends on (`farm.spec.comparable`).
    """

    model: str
    size: int
    seconds: float
    sort: str = ""


def estimate(model: str, size: int, samples: Sequence[Compile]) -> Estimate | None:
    """Estimate a compile of this model from comparable ones; None if there are none."""
    own = [sample for sample in samples if sample.seconds > 0 and model.startswith(sample.model)]
    if own:
        logs = [math.log(sample.seconds) for sample in own]
        return _range(logs, f"{len(own)} of this model")
    others = _models([sample for sample in samples if sample.seconds > 0 and sample.size > 0])
    if size <= 0 or len(others) < FEWEST:
        return None
    sizes = [sample.size for sample in others]
    if size > FARTHEST * max(sizes) or size * FARTHEST < min(sizes):
        return None
    near = sorted(others, key=lambda sample: abs(math.log(sample.size / size)))[:NEIGHBOURS]
    slope = _slope(near)
    logs = [math.log(sample.seconds) + slope * math.log(size / sample.size) for sample in near]
    return _range(logs, f"{len(near)} of other models", fitted=1)


def estimate_all(
    compiles: Mapping[str, Compile], history: Mapping[str, Sequence[Compile]]
) -> dict[str, Estimate | None]:
    """Estimate compiles, by any names; `history` has past ones by sort. Equal compiles are estimated once."""
    estimates = {
        # Without a comparable compile, the same cell with its previous model is the nearest comparison.
        each: estimate(each.model, each.size, history.get(each.sort, ())) or estimate(each.model, each.size, [each])
        for each in set(compiles.values())
    }
    return {name: estimates[each] for name, each in compiles.items()}


def _models(samples: Sequence[Compile]) -> list[Compile]:
    """Return one sample per model: several compiles of one model say no more about another model than one does."""
    logs: dict[tuple[str, int], list[float]] = defaultdict(list)
    for sample in samples:
        logs[sample.model, sample.size].append(math.log(sample.seconds))
    return [Compile(*model, math.exp(sum(some) / len(some))) for model, some in logs.items()]


def _slope(samples: Sequence[Compile]) -> float:
    """Return the power of its size with which a model's duration grows: least squares on logarithms, from 0 to 1.5."""
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
    low, expected, high = (round(math.exp(middle + side * half), 3) for side in (-1, 0, 1))
    return {"low": low, "expected": expected, "high": high, "by": by}

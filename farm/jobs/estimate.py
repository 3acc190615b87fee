"""Estimates: what is said about how long compiles and builds take. `farm/builds/plan.py` makes them."""

# Without annotations from `__future__`: the fields of documents would be compiled from text at every start.

from typing import NamedTuple

from typing_extensions import TypedDict


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

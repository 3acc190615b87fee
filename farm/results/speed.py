"""How fast measured runs are, and whether one program is faster than another. Pure.

Two programs take turns in rounds. What a machine does to one round (its clock, its neighbours) it does to both halves
of it, so rounds, not single runs, are what is drawn again: a bootstrap over pairs (Efron and Tibshirani, "An
Introduction to the Bootstrap", 1993, chapters 8 and 13).
"""

# Without annotations from `__future__`: the fields of documents would be compiled from text at every start.

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from typing_extensions import TypedDict

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Rounds = Sequence[Sequence[float]]  # Seconds of each run, by round.

CONFIDENCE = 0.99  # At 95 % every twentieth comparison of a program with itself would name a winner, and be believed.
BAND = 0.02  # The least difference that counts: the place of a program in memory alone makes as much.
MIN_ROUNDS = 6
"""With fewer, nothing can be shown: even one order in all of them is then a coin's luck more often than one time in
twenty."""
MIN_PAIRS = 8
"""The least rounds of `compare_pairs`: the lowest and the highest of eight ratios have the median between them in 99 of
100 cases."""
_DRAWS = 2000


class ComparisonDocument(TypedDict):
    """A `Comparison` as plain JSON."""

    ratio: float
    interval: list[float]
    verdict: str


class SpeedDocument(TypedDict):
    """The latency of runs in seconds, and the throughput in samples a second at the median."""

    minimum: float
    p50: float
    p90: float
    p99: float
    repeats: int
    throughput: float | None


class MeasuredDocument(TypedDict):
    """What was measured of a program, in seconds and bytes; `first_runs` are those of a fresh process."""

    name: str
    target: str
    batch: int
    load: float
    first_runs: list[float]
    peak_memory: int
    latency: SpeedDocument


class Comparison(NamedTuple):
    """How many times the speed of the other a program has: the ratio of medians, and its confidence interval."""

    ratio: float
    low: float
    high: float
    verdict: Literal["faster", "slower", "no difference shown"]

    def as_dict(self) -> ComparisonDocument:
        """Return it as plain JSON."""
        return {"ratio": self.ratio, "interval": [self.low, self.high], "verdict": self.verdict}


def distribution(seconds: Sequence[float], batch: int = 1) -> SpeedDocument:
    """Return how runs are distributed (seconds), and samples a second at the median. Raises ValueError without runs."""
    import numpy as np

    if not seconds:
        raise ValueError("no runs")
    p50, p90, p99 = (float(value) for value in np.quantile(np.asarray(seconds), (0.5, 0.9, 0.99)))
    return SpeedDocument(
        minimum=min(seconds), p50=p50, p90=p90, p99=p99, repeats=len(seconds), throughput=batch / p50 if p50 else None
    )


def compare(program: Rounds, other: Rounds, *, seed: int = 0) -> Comparison:
    """Compare programs that took turns, round by round. Raises ValueError for different numbers of rounds, or none."""
    import numpy as np

    ours, theirs = (np.array([np.median(runs) for runs in rounds]) for rounds in (program, other))
    if len(ours) != len(theirs) or not len(ours):
        raise ValueError(f"{len(ours)} rounds against {len(theirs)}: programs in turns have the same number")
    ratio = float(np.median(theirs) / np.median(ours))
    drawn = np.random.default_rng(seed).integers(len(ours), size=(_DRAWS, len(ours)))
    ratios = np.median(theirs[drawn], axis=1) / np.median(ours[drawn], axis=1)
    tail = (1 - CONFIDENCE) / 2
    low, high = (float(value) for value in np.quantile(ratios, (tail, 1 - tail)))
    return Comparison(ratio, low, high, _verdict(low, high, len(ours)))


def compare_pairs(program: Rounds, other: Rounds) -> Comparison:
    """Compare by the fast runs of each round and pair by pair: for machines that also do other work.

    Other work makes runs slower, never faster, so that a round's fast runs show the program; and what slows a whole
    round down slows both halves of it. The interval of the median ratio is that of order statistics, which asks nothing
    of how the ratios are distributed; it needs `MIN_PAIRS` rounds.

    Raises ValueError as `compare`.
    """
    import numpy as np

    ours, theirs = fast_runs(program), fast_runs(other)
    if len(ours) != len(theirs) or not len(ours):
        raise ValueError(f"{len(ours)} rounds against {len(theirs)}: programs in turns have the same number")
    ratios = np.sort(theirs / ours)
    outside = _ranks_outside(len(ratios))
    low, high = float(ratios[outside]), float(ratios[-1 - outside])
    return Comparison(float(np.median(ratios)), low, high, _verdict(low, high, len(ratios)))


def _ranks_outside(count: int) -> int:
    """Return how many of so many ordered values lie on each side outside the median's interval."""
    below, outside = 0.0, -1
    while 2 * below <= 1 - CONFIDENCE:
        outside += 1
        below += math.comb(count, outside) / 2**count
    return max(0, outside - 1)


def fast_runs(rounds: Rounds) -> "NDArray[np.float64]":
    """Return the first decile of each round's runs, in seconds."""
    import numpy as np

    return np.array([sorted(runs)[len(runs) // 10] for runs in rounds])


def _verdict(low: float, high: float, rounds: int) -> Literal["faster", "slower", "no difference shown"]:
    if rounds >= MIN_ROUNDS and low > 1 + BAND:
        return "faster"
    if rounds >= MIN_ROUNDS and high < 1 / (1 + BAND):
        return "slower"
    return "no difference shown"

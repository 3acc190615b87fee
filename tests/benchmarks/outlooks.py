"""How many compiles and whole builds end in their ranges, on simulated farms of several shapes.

    python tests/benchmarks/outlooks.py [--farms 20] [--builds 30]

Each farm starts with an empty history and does builds one after the other; what is said of a build when it is submitted
(time and work) and when half of its cells have ended (time) is compared with what comes. Compiles take the power 0.8 of
their model's size; models, builds and compiles differ by factors that the farm does not know. It fails if less than
76 % of the builds of a shape are in their ranges, by more than chance explains. The width is the upper end by the
lower, its median. `farm.builds.plan.WIDENING` is chosen by this.
"""

import argparse
import heapq
import math
import random
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from farm.builds.plan import estimate, outlook  # noqa: E402
from farm.jobs.estimate import Compile  # noqa: E402
from tests.benchmarks.figures import figure  # noqa: E402

KEPT = 200
"""Past compiles that a farm remembers, as `farm/store/store.py` does."""


@dataclass(frozen=True)
class Shape:
    """One sort of farm; deviations are of logarithms."""

    name: str
    slots: int = 4
    models: int = 6
    """Models in one build, each with `cells` cells."""
    cells: int = 4
    known: float = 1.0
    """Share of a build's models that were built before, once the farm has some."""
    of_model: float = 0.4
    of_build: float = 0.2
    of_compile: float = 0.15
    tail: float = 0.0
    """Share of compiles that take five times as long."""
    drift: float = 0.0
    """By how much each build is slower than the one before (logarithm)."""
    retried: float = 0.0
    """Share of compiles that are lost half way and start again."""
    leaving: float = 0.0
    """Share of builds in which half of the slots leave in the middle, or as many more join."""
    others: float = 0.0
    """Share of builds during which another one of the same size waits, and takes turns."""


SHAPES = (
    Shape("one slot", slots=1, models=3),
    Shape("few slots"),
    Shape("many slots", slots=64, models=12),
    Shape("many cells", slots=8, models=40, cells=5),
    Shape("one cell", models=1, cells=1),
    Shape("one model", models=1, cells=8),
    Shape("independent errors", of_build=0.0, of_compile=0.5),
    Shape("common errors", of_build=0.5, of_compile=0.1),
    Shape("heavy tails", tail=0.08),
    Shape("unknown models", known=0.2, of_model=0.8),
    Shape("drifting speed", drift=0.03),
    Shape("retries", retried=0.1),
    Shape("slots come and go", leaving=0.5, slots=8),
    Shape("other builds", others=0.5),
)


@dataclass
class Tally:
    """What came of the builds of one shape: whether each was in its range, and how wide that was."""

    cells: list[bool] = field(default_factory=list)
    inside: dict[str, list[bool]] = field(default_factory=lambda: defaultdict(list))
    widths: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def note(self, what: str, range_: dict[str, float], real: float) -> None:
        self.inside[what].append(range_["low"] <= real <= range_["high"])
        self.widths[what].append(range_["high"] / range_["low"])

    def share(self, what: str) -> float:
        return statistics.mean(self.inside[what])

    def width(self, what: str) -> float:
        return statistics.median(self.widths[what])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--farms", type=int, default=20)
    options.add_argument("--builds", type=int, default=30)
    given = options.parse_args()
    print(f"{'':20}  cells    time (width)    work (width)    half way (width)")
    worst = 1.0
    for shape in SHAPES:
        tally = run(shape, given.farms, given.builds)
        shown = "    ".join(f"{tally.share(what):4.0%} ({tally.width(what):5.2f})" for what in tally.inside)
        print(f"{shape.name:20}  {statistics.mean(tally.cells):5.0%}    {shown}", flush=True)
        for what in ("time", "work"):
            figure(f"{shape.name}: builds whose {what} is in range", tally.share(what), "x", 0.76, more_is_better=True)
        chance = 2 * math.sqrt(0.76 * 0.24 / len(tally.inside["work"]))
        worst = min(worst, tally.share("time") + chance, tally.share("work") + chance)
    raise SystemExit(worst < 0.76)


def run(shape: Shape, farms: int, builds: int) -> Tally:
    """Simulate farms of one shape, each with a seed of its own."""
    tally = Tally()
    for seed in range(farms):
        Farm(shape, seed, tally).work(builds)
    return tally


class Farm:
    """One simulated farm, with its history."""

    def __init__(self, shape: Shape, seed: int, tally: Tally) -> None:
        self._shape, self._tally = shape, tally
        self._chance = random.Random(f"{shape.name} {seed}")
        self._models: list[tuple[str, int, float]] = []
        self._history: list[Compile] = []
        self._slower = 0.0

    def work(self, builds: int) -> None:
        # What a farm has done before it was asked for ranges: a few models of its own.
        for _ in range(4):
            model = self._model(fresh=True)
            self._history.append(Compile(model[0], model[1], self._seconds(model, 0.0)))
        for _ in range(builds):
            self._build()

    def _model(self, *, fresh: bool = False) -> tuple[str, int, float]:
        if not fresh and self._models and self._chance.random() < self._shape.known:
            return self._chance.choice(self._models[-3 * self._shape.models :])
        name, size = f"{self._chance.getrandbits(256):064x}", int(10 ** self._chance.uniform(6.5, 8.5))
        self._models.append((name, size, self._chance.gauss(0, self._shape.of_model)))
        return self._models[-1]

    def _seconds(self, model: tuple[str, int, float], of_build: float) -> float:
        error = model[2] + of_build + self._slower + self._chance.gauss(0, self._shape.of_compile)
        return 2e-5 * model[1] ** 0.8 * math.exp(error) * (5 if self._chance.random() < self._shape.tail else 1)

    def _build(self) -> None:
        shape, chance = self._shape, self._chance
        of_build = chance.gauss(0, shape.of_build)
        first = len(self._models) < shape.models + 4
        models = [self._model(fresh=first) for _ in range(shape.models)]
        rows: list[dict[str, Any]] = []
        for model in models:
            found = estimate(model[0], model[1], self._history)
            if not found:
                continue
            for _ in range(shape.cells):
                seconds = self._seconds(model, of_build)
                retried = chance.random() < shape.retried
                self._tally.cells.append(found["low"] <= seconds <= found["high"])
                row = {"key": f"{len(rows)}", "pool": "cpu", "model": model[0], "estimate": found}
                rows.append({**row, "state": "queued", "seconds": seconds, "busy": seconds * (1.5 if retried else 1)})
        crowded = chance.random() < shape.others
        pool = {"name": "cpu", "slots": shape.slots, "waiting": len(rows) * (1 + crowded), "running": 0, "uploading": 0}
        if rows:
            self._judge(rows, pool, crowded)
        self._history += [Compile(m[0], m[1], r["seconds"]) for m in models for r in rows if r["model"] == m[0]]
        del self._history[:-KEPT]
        self._slower += shape.drift

    def _judge(self, rows: list[dict[str, Any]], pool: dict[str, Any], crowded: bool) -> None:
        promised = outlook(rows, [pool])
        ends = self._run(rows, crowded)
        time, work = max(ends.values()), sum(row["busy"] for row in rows)
        self._tally.note("time", promised["eta"], time)
        self._tally.note("work", promised["slot_seconds"], work)
        if len(rows) > 3:
            now = sorted(ends.values())[len(rows) // 2]
            rows_now = [_at(row, ends[row["key"]], now) for row in rows]
            waiting = sum(row["state"] != "succeeded" for row in rows_now) * (1 + crowded)
            half = outlook(rows_now, [{**pool, "waiting": waiting}])
            self._tally.note("half", half["eta"], time - now)

    def _run(self, rows: list[dict[str, Any]], crowded: bool) -> dict[str, float]:
        """When each cell ends: the longest first, in turn with another build's where there is one."""
        slots = self._shape.slots
        free = [0.0] * slots
        queue = sorted(rows, key=lambda row: -row["estimate"]["expected"])
        change = len(queue) // 2 if self._chance.random() < self._shape.leaving else -1
        ends = {}
        for position, row in enumerate(queue):
            if position == change:
                free = sorted(free)[slots // 2 :] if self._chance.random() < 0.5 else free + [min(free)] * slots
                heapq.heapify(free)
            if crowded:
                heapq.heapreplace(free, free[0] + self._chance.choice(rows)["busy"])
            ends[row["key"]] = free[0] + row["busy"]
            heapq.heapreplace(free, ends[row["key"]])
        return ends


def _at(row: dict[str, Any], end: float, now: float) -> dict[str, Any]:
    """A cell as it stands at some time."""
    if end <= now:
        return {**row, "state": "succeeded", "elapsed": row["busy"]}
    elapsed = now - (end - row["busy"])
    return {**row, "state": "running", "elapsed": elapsed} if elapsed > 0 else row


if __name__ == "__main__":
    main()

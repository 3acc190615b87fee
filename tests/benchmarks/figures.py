"""Figures of benchmarks: printed with their goals, and kept for `make bench`, which draws and compares them."""

from __future__ import annotations

import json
import os
import platform
import statistics
import timeit
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

KEEP = "FIGURES"
"""The variable that names the file in which figures are kept, one JSON document a line."""

NO_TIMES = ("", "kB", "MB", "MiB")
"""Units of what is the same on a machine that is slower for an hour."""


@dataclass(frozen=True)
class Figure:
    """What one benchmark found: one value of each repetition, in `unit`; a ratio within a run has the unit `x`."""

    name: str
    unit: str
    values: tuple[float, ...]
    goal: float | None = None
    more_is_better: bool = False
    loop: float = 0.0
    """Seconds that a loop took then: a machine whose neighbours work is slower. 0 if nobody knows."""

    @property
    def median(self) -> float:
        """What counts."""
        return statistics.median(self.values)

    @property
    def meets_goal(self) -> bool | None:
        """Whether it is as good as its goal; None without one."""
        if self.goal is None:
            return None
        return self.median >= self.goal if self.more_is_better else self.median <= self.goal

    def change_from(self, before: Figure, *, same_machine: bool = True) -> str:
        """Say whether it is better or worse than `before`: if so, every value lies beyond every earlier one.

        Of five and five values of the same thing that happens once in 126 times; fewer than three say nothing. Ratios
        are compared everywhere, times on the same machine if it is as fast as it was, within a tenth.
        """
        if self.unit != "x" and not same_machine:
            return "another machine"
        if self.unit not in ("x", *NO_TIMES) and not abs(self.loop - before.loop) <= before.loop / 10:
            return "another speed of the machine"
        if min(len(self.values), len(before.values)) < 3:
            return "too few values"
        if min(self.values) > max(before.values):
            return "better" if self.more_is_better else "worse"
        if max(self.values) < min(before.values):
            return "worse" if self.more_is_better else "better"
        return "same"


def figure(
    name: str, values: float | Sequence[float], unit: str, goal: float | None = None, *, more_is_better: bool = False
) -> Figure:
    """Print a figure, keep it if `make bench` asks for it, and return it."""
    found = Figure(
        name,
        unit,
        (values,) if isinstance(values, float | int) else tuple(values),
        goal,
        more_is_better=more_is_better,
        loop=loop_seconds(),
    )
    print(row(found), flush=True)
    if path := os.environ.get(KEEP):
        with Path(path).open("a") as file:
            file.write(json.dumps(asdict(found)) + "\n")
    return found


def row(found: Figure) -> str:
    """Return a figure as one line: its name, median, lowest and highest value, and goal."""
    among = f"{min(found.values):.4g} to {max(found.values):.4g}" if len(found.values) > 1 else ""
    goal = (
        ""
        if found.goal is None
        else f"goal {'>=' if found.more_is_better else '<='} {found.goal:g}: {'met' if found.meets_goal else 'MISSED'}"
    )
    return f"{found.name:52} {found.median:9.4g} {found.unit:11} {among:20} {goal}".rstrip()


def read_figures(lines: Sequence[str]) -> dict[str, Figure]:
    """Return the figures that were kept, by name; one that was kept several times has the values of all."""
    found: dict[str, Figure] = {}
    for each in map(json.loads, lines):
        earlier = found[each["name"]].values if each["name"] in found else ()
        found[each["name"]] = Figure(**{**each, "values": (*earlier, *each["values"])})
    return found


def machine() -> str:
    """Return what absolute figures belong to."""
    models = (
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    )
    return f"{next(models, platform.machine())}, {os.cpu_count()} cores, Python {platform.python_version()}"


@cache
def loop_seconds() -> float:
    """Return what a loop takes, the median of a second: a slow machine has fast moments."""
    return statistics.median(timeit.repeat("for number in range(500_000): number * number", number=1, repeat=40))

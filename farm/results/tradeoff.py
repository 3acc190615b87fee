"""What to choose of a model: a program by its latency and error, a batch by its sweep. Pure, but for the picture."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, TypeAlias

from farm.jobs.state import State
from farm.models.shapes import BATCH
from farm.units import grouped

if TYPE_CHECKING:
    from farm.jobs.facts import ArtifactFacts
    from farm.results.report import JudgedCell, SweepPoint, SweepResult
    from farm.results.verdict import CellLine


NOISY = 2.0  # From how many times the median on a p99 says that other work disturbed the runs.

Advice: TypeAlias = "tuple[tuple[str, str], CellLine | None, str]"
"""A target and shape, what to ship for it, and why; without a choice, why nothing can be said."""


def error_of(facts: ArtifactFacts) -> float | None:
    """Return the largest error of a program's outputs, or share of unequal values; None if nothing was compared."""
    unequal = [1 - share for share in (facts.get("equal") or {}).values()]
    return max([*(facts.get("errors") or {}).values(), *unequal], default=None)


def gains(found: Iterable[CellLine]) -> dict[str, float]:
    """Return the speed of programs in terms of that of fp32 for the same model, target and shape, by cell."""
    measured = [(each, each.latency) for each in found if each.latency]
    base = {(each.model, each.place): latency for each, latency in measured if each.precision == "fp32"}
    return {
        each.identifier: base[each.model, each.place] / latency
        for each, latency in measured
        if (each.model, each.place) in base
    }


def marks_of(facts: ArtifactFacts) -> list[str]:
    """Return what makes a program's numbers weak: `shared`, `noisy`, `weak`, `unverified`."""
    latency, p99 = facts.get("latency"), facts.get("p99")
    said: Mapping[str, object] = {
        "shared": latency and facts.get("shared"),
        "noisy": latency and p99 and p99 > NOISY * latency,
        "weak": facts.get("weak"),
        "unverified": error_of(facts) is None or facts.get("unverified") or facts.get("nonfinite"),
    }
    return [mark for mark, holds in said.items() if holds]


def by_place(found: Iterable[CellLine]) -> dict[tuple[str, str], list[CellLine]]:
    """Return the programs of each target and shape; a model may have thousands of them."""
    return grouped(found, lambda each: each.place)


def front(found: Iterable[CellLine]) -> list[CellLine]:
    """Return the Pareto front of one target and shape, the fastest first: each next one is nearer to the reference."""
    known = [
        (each.latency, each.error, each.size, each)
        for each in found
        if each.succeeded and each.latency and each.error is not None
    ]
    best: list[CellLine] = []
    least = math.inf
    for _, error, _, each in sorted(known, key=itemgetter(0, 1, 2)):
        if error < least:
            best.append(each)
            least = error
    return best


def advise(found: Sequence[CellLine]) -> list[Advice]:
    """Return what to ship for each target and shape: the fastest that passed, of equally fast ones the most exact."""
    return [_advice(place, some) for place, some in by_place(found).items()]


def _advice(place: tuple[str, str], found: Sequence[CellLine]) -> Advice:
    from farm.results.verdict import BAND  # Its imports take long, and most commands only need `error_of`.

    # Those that passed, and whose two numbers can be trusted; without an error they are marked as unverified.
    passed = [(each, {*each.marks.split()} - {"noisy"}) for each in found if each.succeeded]
    sure = [(each.latency, each) for each, marks in passed if each.latency and not marks]
    if not sure:
        marks = sorted({mark for _, marks in passed for mark in marks})
        why = f"every program that passed is {' or '.join(marks)}" if marks else "no program that passed was measured"
        return place, None, why
    least, fastest = min(sure, key=itemgetter(0))
    equal = [each for latency, each in sure if latency <= least * (1 + BAND)]
    best = min(equal, key=lambda each: (each.error, each.size))
    if best is not fastest:
        why = f"{fastest.precision} is not faster by more than {BAND:.0%}, and this has the smaller error"
    else:
        why = "the fastest of those that passed" if len(sure) > 1 else "the only one that passed and is sure"
    return place, best, why


# --- sweeps: cells that differ in their batches, and the best of them -------------------------------------------------


def sweeps_of(cells: Iterable[JudgedCell]) -> list[SweepResult]:
    """Return the sweeps among a build's judged cells: one for each model, target, precision and other sizes."""
    return joined(part for cell in cells if (part := part_of(cell)))


def part_of(cell: JudgedCell) -> SweepResult | None:
    """Return a sweep of one cell alone; None if no sweep seeks its batch. Its `sizes` leave out the batch."""
    asked, batch = cell.get("sweep"), cell.get("sizes", {}).get(BATCH)
    if not asked or not isinstance(batch, int):
        return None
    facts = cell.get("facts")
    latency = facts.get("latency") if facts and cell["state"] == State.SUCCEEDED else None
    point: SweepPoint = {
        "identifier": cell["identifier"],
        "batch": batch,
        "latency": latency,
        "throughput": batch / latency if latency else None,
        "shared": bool(latency and facts and facts.get("shared")),
    }
    return {
        "model": cell["model"],
        "target": cell["target"],
        "precision": cell["precision"],
        "sizes": {name: value for name, value in cell["sizes"].items() if name != BATCH},
        **asked,
        "points": [point],
        "best": None,
        "weak": point["shared"],
    }


def joined(parts: Iterable[SweepResult]) -> list[SweepResult]:
    """Return the sweeps that parts belong to, with their points in the order of their batches."""
    groups: dict[tuple[str, ...], SweepResult] = {}
    for part in parts:
        key = (part["model"], part["target"], part["precision"], str(sorted(part["sizes"].items())))
        groups.setdefault(key, {**part, "points": []})["points"] += part["points"]
    for group in groups.values():
        group["points"].sort(key=lambda point: point["batch"])
        best = _best(group)
        group["best"] = best["identifier"] if best else None
        group["weak"] = any(point["shared"] for point in group["points"])
    return list(groups.values())


def _best(group: SweepResult) -> SweepPoint | None:
    """Return the best point; of equal ones the smallest batch, which costs least memory."""
    limit = group["max_latency"]
    allowed = [point for point in group["points"] if point["latency"] and (not limit or point["latency"] <= limit)]
    if group["metric"] == "latency":
        return min(allowed, key=itemgetter("latency"), default=None)
    return max(allowed, key=itemgetter("throughput"), default=None)


def title(sweep: SweepResult) -> str:
    """Return a sweep's name for people: `resnet50 migraphx/mi300x fp16`, with the other sizes if there are any."""
    sizes = [f"{name}={size}" for name, size in sweep["sizes"].items()]
    return " ".join([sweep["model"], sweep["target"], sweep["precision"], *sizes])


def draw(sweeps: Sequence[SweepResult], name: str) -> bytes:
    """Return a picture (SVG) of a build's sweeps: throughput by batch, or latency if that is all they ask for.

    Raises UsageError if matplotlib is not installed.
    """
    from farm.results.pictures import curves

    field, axis = "throughput", "samples a second"
    if all(sweep["metric"] == "latency" for sweep in sweeps):
        field, axis = "latency", "latency in ms"
    series = {
        title(sweep): [
            (point["batch"], latency * 1000 if field == "latency" else point["batch"] / latency)
            for point in sweep["points"]
            if (latency := point["latency"])
        ]
        for sweep in sweeps
    }
    shared = " (not measured alone)" if any(sweep["weak"] for sweep in sweeps) else ""
    subject = name if len(sweeps) > 1 else title(sweeps[0])
    return curves(title=f"{subject}: {field} by batch{shared}", x="batch", y=axis, series=series)

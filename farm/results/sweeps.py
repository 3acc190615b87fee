"""Sweeps: the cells of a build that differ in their batches, and the best of them. Pure, but for the picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING

from farm.jobs.state import State
from farm.models.shapes import BATCH

if TYPE_CHECKING:
    from farm.results.report import JudgedCell, SweepPoint, SweepResult


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
    return curves(None, title=f"{subject}: {field} by batch{shared}", x="batch", y=axis, series=series)

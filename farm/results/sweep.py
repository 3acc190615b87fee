"""A batch sweep: one program for each batch, compared by what a build measured. Pure, but for the picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from farm.jobs.state import State
from farm.models.shapes import BATCH

Document = dict[str, Any]


def sweeps_of(cells: Iterable[Mapping[str, Any]]) -> list[Document]:
    """Return the sweeps among a build's judged cells: one for each model, target, precision and other sizes.

    Each has `model`, `target`, `precision`, `sizes` (but the batch), `metric`, `max_latency` (seconds or None),
    `points` by batch (`{"identifier", "batch", "latency", "throughput", "shared"}`; seconds, samples a second) and
    `best`, the identifier of the optimum among the cells that passed, None if there is none. `weak` is whether a
    point was not measured alone, so that another batch may really be the best.
    """
    groups: dict[tuple[str, ...], Document] = {}
    for cell in cells:
        asked, size = cell["sweep"], cell["sizes"].get(BATCH)
        if not asked or size is None:
            continue
        rest = {name: value for name, value in cell["sizes"].items() if name != BATCH}
        names = {name: cell[name] for name in ("model", "target", "precision")}
        group = groups.setdefault(
            (*names.values(), str(sorted(rest.items()))), {**names, "sizes": rest, **asked, "points": []}
        )
        group["points"].append(_point(cell, size))
    for group in groups.values():
        group["points"].sort(key=lambda point: point["batch"])
        best = _best(group)
        group["best"] = best["identifier"] if best else None
        group["weak"] = any(point["shared"] for point in group["points"])
    return list(groups.values())


def _point(cell: Mapping[str, Any], batch: int) -> Document:
    facts = cell.get("facts") or {}
    latency = facts.get("latency") if cell["state"] == State.SUCCEEDED else None
    return {
        "identifier": cell["identifier"],
        "batch": batch,
        "latency": latency,
        "throughput": batch / latency if latency else None,
        "shared": bool(latency and facts.get("shared")),
    }


def _best(group: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the best point; of equal ones the smallest batch, which costs least memory."""
    limit = group["max_latency"]
    allowed = [point for point in group["points"] if point["latency"] and (not limit or point["latency"] <= limit)]
    if group["metric"] == "latency":
        return min(allowed, key=lambda point: point["latency"], default=None)
    return max(allowed, key=lambda point: point["throughput"], default=None)


def title(sweep: Mapping[str, Any]) -> str:
    """Return a sweep's name for people: `resnet50 migraphx/mi300x fp16`, with the other sizes if there are any."""
    sizes = [f"{name}={size}" for name, size in sweep["sizes"].items()]
    return " ".join([sweep["model"], sweep["target"], sweep["precision"], *sizes])


def draw(sweeps: Sequence[Mapping[str, Any]], name: str) -> bytes:
    """Return a picture (SVG) of a build's sweeps: throughput by batch, or latency where that is all they ask for.

    Raises UsageError if matplotlib is not installed.
    """
    from farm.results.pictures import curves

    field, axis, scale = "throughput", "samples a second", 1
    if all(sweep["metric"] == "latency" for sweep in sweeps):
        field, axis, scale = "latency", "latency in ms", 1000
    series = {
        title(sweep): [(point["batch"], point[field] * scale) for point in sweep["points"] if point["latency"]]
        for sweep in sweeps
    }
    shared = " (measured while other attempts ran)" if any(sweep["weak"] for sweep in sweeps) else ""
    subject = name if len(sweeps) > 1 else title(sweeps[0])
    return curves(None, title=f"{subject}: {field} by batch{shared}", x="batch", y=axis, series=series)

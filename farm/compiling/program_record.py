"""Program record: what an attempt knows of its program. The sidecar adds the artifact's names and blobs."""

from __future__ import annotations

from farm.runner.documents import CompileAnswer, ProgramTimes, RunTimes
from farm.wire.program import Conditions, Latency, Measurements, Port


def outputs_of(compiled: CompileAnswer) -> list[Port]:
    """Return a program's outputs, each with the parameter for it if the caller copies."""
    parameters = compiled.get("output_parameters") or [""] * len(compiled["outputs"])
    return [
        {**output, "batch_axis": None, "parameter": name}
        for output, name in zip(compiled["outputs"], parameters, strict=True)
    ]


def speed_of(measured: ProgramTimes, *, shared: bool) -> Measurements:
    """Return what the sidecar says about a program's speed, from what its child measured."""
    found = measured.get("device_latency")
    return {
        "load": measured.get("load"),
        "first_run_cold": measured.get("cold_run"),
        "first_run_warm": measured.get("warm_run"),
        "latency": _latency(measured),
        "device_latency": {"median": found["median"], "repeats": found["repeats"]} if found else None,
        "throughput": measured.get("throughput"),
        "shared": shared,
        "points": [
            {"batch": point["batch"], "shapes": point["shapes"], "throughput": point["throughput"], "latency": latency}
            for point in measured.get("points", ())
            if (latency := _latency(point))
        ],
    }


def _latency(measured: RunTimes) -> Latency | None:
    median = measured.get("latency")
    if median is None:
        return None
    return {
        "median": median,
        "p90": measured.get("p90"),
        "p99": measured.get("p99"),
        "repeats": measured.get("repeats", 1),
    }


def is_shared(found: Conditions) -> bool:
    """Whether others held memory of the GPU at one look."""
    processes = found["processes"]
    return bool(processes and processes["count"])

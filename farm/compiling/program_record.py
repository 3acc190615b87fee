"""Program record: what an attempt knows of its program. The sidecar adds the artifact's names and blobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NotRequired

from typing_extensions import TypedDict

from farm.compiling.slots import GpuFields
from farm.jobs.order import ConversionRecord
from farm.runner.documents import (
    CompileAnswer,
    DeviceLatency,
    Placement,
    ProgramTimes,
    RunTimes,
    SessionChoice,
    VerifiedProgram,
)
from farm.spec import SpecDocument
from farm.wire.program import Against, Alone, Conditions, Latency, MeasuredPoint, Port


class TurnFigures(TypedDict, total=False):
    """What programs that took turns came to: the tuned one, the one without tuning, and a published one."""

    tuned: Latency
    baseline: Latency
    ratio: float
    interval: Sequence[float]
    against: Against


class ProgramSpeed(TurnFigures):
    """Speed of a program; seconds, and samples a second."""

    load: float | None
    first_run_cold: float | None
    first_run_warm: float | None
    latency: Latency | None
    device_latency: DeviceLatency | None
    throughput: float | None
    shared: bool
    points: Sequence[MeasuredPoint]
    conditions: NotRequired[Sequence[Conditions]]


class RecordedEvidence(VerifiedProgram):
    """How a program compares with the reference that was asked for, and which references could not run the model."""

    reference: str
    refused: Mapping[str, str]


class RecordedTuning(TypedDict, total=False):
    """What tuning came to, in operations of the model and in seconds."""

    mode: str
    session: SessionChoice | None
    operations: int
    known: int
    tuned: int
    untunable: int
    seconds: float
    saved: float
    finished: bool
    published: str
    written: int
    carried: bool
    alone: Alone
    conditions: Sequence[Conditions]


class RecordedDevice(GpuFields):
    """The device of a program."""

    arch: str
    compute_units: int | None


class ProgramRecord(TypedDict):
    """What an attempt knows of its program, and of how it was made."""

    schema: int
    identifier: str
    spec: SpecDocument
    conversion: ConversionRecord | None
    model_size: int
    toolchain: str
    device: RecordedDevice
    inputs: Sequence[Port]
    outputs: Sequence[Port]
    weight_dtypes: Sequence[str]
    compute_dtypes: Sequence[str]
    quantized: Mapping[str, int]
    emulated: Sequence[str]
    offload_copy: bool | None
    symbolic_shapes: str
    placement: Placement | None
    tuning: RecordedTuning
    verification: RecordedEvidence | None
    measurements: ProgramSpeed
    passes: Mapping[str, float]
    peak_memory: int
    phases: Mapping[str, float]
    seconds: float
    node: str
    started: str
    created: str
    farm_version: str


def outputs_of(compiled: CompileAnswer) -> list[Port]:
    """Return a program's outputs, each with the parameter for it if the caller copies."""
    parameters = compiled.get("output_parameters") or [""] * len(compiled["outputs"])
    return [
        {**output, "batch_axis": None, "parameter": name}
        for output, name in zip(compiled["outputs"], parameters, strict=True)
    ]


def speed_of(measured: ProgramTimes, *, shared: bool) -> ProgramSpeed:
    """Return what the sidecar says about a program's speed, from what its child measured."""
    return {
        "load": measured.get("load"),
        "first_run_cold": measured.get("cold_run"),
        "first_run_warm": measured.get("warm_run"),
        "latency": _latency(measured),
        "device_latency": measured.get("device_latency"),
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

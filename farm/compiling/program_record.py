"""Program record: what an attempt knows of its program. The sidecar adds the artifact's names and blobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NotRequired, TypedDict

from farm.compiling.slots import GpuFields
from farm.jobs.order import ConversionRecord
from farm.runner.documents import (
    CompileAnswer,
    DeviceLatency,
    NodePlacement,
    ProgramPort,
    ProgramTimes,
    RunTimes,
    SessionChoice,
    VerifiedProgram,
)
from farm.spec import SpecDocument


class GpuProcesses(TypedDict):
    """Processes of others that hold memory of a GPU, and its bytes in all."""

    count: int
    memory: int


class GpuConditions(TypedDict):
    """How a GPU was at one moment: clocks in MHz, temperatures in degrees Celsius, power cap in watts.

    `clock_reasons`, `ecc_errors` and `xids` come from NVML alone. None stands for what the driver does not report.
    """

    clocks: Mapping[str, float]
    temperatures: Mapping[str, float]
    power_cap: float | None
    throttled: bool | None
    processes: GpuProcesses | None
    clock_reasons: NotRequired[Sequence[str]]
    ecc_errors: NotRequired[int | None]
    xids: NotRequired[Sequence[int]]


class RecordedPort(ProgramPort):
    """An input of a program, and the axis on which its samples stack."""

    batch_axis: int | None


class RecordedOutput(ProgramPort):
    """An output of a program, and the parameter for it if the caller hands the buffers."""

    parameter: str


class RecordedLatency(TypedDict):
    """Percentiles of one kind of run, in seconds."""

    median: float
    p90: float | None
    p99: float | None
    repeats: int
    minimum: NotRequired[float]


class RecordedPoint(TypedDict):
    """Speed of a dynamic program at one of its sizes."""

    batch: int
    shapes: Mapping[str, Sequence[int]]
    throughput: float | None
    latency: RecordedLatency | None


class RecordedFollowUp(TypedDict):
    """How a program compares with the published one that has the cache key `key`."""

    key: str
    ratio: float
    interval: Sequence[float]
    verdict: str


class TurnFigures(TypedDict, total=False):
    """What programs that took turns came to: the tuned one, the one without tuning, and a published one."""

    tuned: RecordedLatency
    baseline: RecordedLatency
    ratio: float
    interval: Sequence[float]
    against: RecordedFollowUp


class ProgramSpeed(TurnFigures):
    """Speed of a program; seconds, and samples a second."""

    load: float | None
    first_run_cold: float | None
    first_run_warm: float | None
    latency: RecordedLatency | None
    device_latency: DeviceLatency | None
    throughput: float | None
    shared: bool
    points: Sequence[RecordedPoint]
    conditions: NotRequired[Sequence[GpuConditions]]


class RecordedEvidence(VerifiedProgram):
    """How a program compares with the reference that was asked for, and which references could not run the model."""

    reference: str
    refused: Mapping[str, str]


class SpeedAlone(TypedDict):
    """How many times its speed a tuned program has with empty databases, with the confidence interval."""

    ratio: float
    interval: Sequence[float]


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
    seeded_from: str
    published: str
    written: int
    carried: bool
    alone: SpeedAlone
    conditions: Sequence[GpuConditions]


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
    inputs: Sequence[RecordedPort]
    outputs: Sequence[RecordedOutput]
    weight_dtypes: Sequence[str]
    compute_dtypes: Sequence[str]
    quantized: Mapping[str, int]
    emulated: Sequence[str]
    offload_copy: bool | None
    symbolic_shapes: str
    placement: NodePlacement | None
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


def outputs_of(compiled: CompileAnswer) -> list[RecordedOutput]:
    """Return a program's outputs, each with the parameter for it if the caller copies."""
    parameters = compiled.get("output_parameters") or [""] * len(compiled["outputs"])
    return [{**output, "parameter": name} for output, name in zip(compiled["outputs"], parameters, strict=True)]


def speed_of(measured: ProgramTimes, *, shared: bool) -> ProgramSpeed:
    """Return what the sidecar says of a program's speed, from what its child measured."""
    return {
        "load": measured.get("load"),
        "first_run_cold": measured.get("cold_run"),
        "first_run_warm": measured.get("warm_run"),
        "latency": _latency(measured),
        "device_latency": measured.get("device_latency"),
        "throughput": measured.get("throughput"),
        "shared": shared,
        "points": [
            {
                "batch": point["batch"],
                "shapes": point["shapes"],
                "throughput": point["throughput"],
                "latency": _latency(point),
            }
            for point in measured.get("points", ())
        ],
    }


def _latency(measured: RunTimes) -> RecordedLatency | None:
    median = measured.get("latency")
    if median is None:
        return None
    return {
        "median": median,
        "p90": measured.get("p90"),
        "p99": measured.get("p99"),
        "repeats": measured.get("repeats", 1),
    }


def is_shared(found: GpuConditions) -> bool:
    """Whether others held memory of the GPU at one look."""
    processes = found["processes"]
    return bool(processes and processes["count"])

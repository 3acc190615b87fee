"""What is known about a program and how it was measured: parts of sidecars, as attempts write and readers get them.

A field with a default may be left out, and whoever reads a sidecar gets the default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, NotRequired

from typing_extensions import TypedDict

from farm.runner.bounds import Amount, Bound, Count, Default, Digest
from farm.runner.documents import ProgramPort

Interval = Annotated[Sequence[float], Bound(shortest=2, longest=2)]
"""The ends of a 99 % confidence interval."""


class Port(ProgramPort):
    """One input or output of the program, in the program's order.

    `dtype` is numpy's name for it; `strides` count elements; `parameter` is the program's own name where it
    differs (`main:#output_0` of a MIGraphX program that does not copy offloaded results).
    """

    batch_axis: NotRequired[Annotated[int | None, Default(None)]]
    parameter: NotRequired[Annotated[str, Default("")]]


class Processes(TypedDict):
    """Processes that are not the farm's and hold memory of a GPU: how many, and how many bytes in all."""

    count: Count
    memory: Count


class Conditions(TypedDict):
    """How the GPU was at one moment: clocks in MHz and temperatures in degrees Celsius by the driver's labels, power
    cap in watts, and whether anything held the clocks back; of a partition they are the whole card's. `processes` are
    others that used this GPU, or this partition; null where the driver does not tell.
    """

    clocks: NotRequired[Annotated[Mapping[str, float], Default({})]]
    temperatures: NotRequired[Annotated[Mapping[str, float], Default({})]]
    power_cap: NotRequired[Annotated[float | None, Default(None)]]
    throttled: NotRequired[Annotated[bool | None, Default(None)]]
    clock_reasons: NotRequired[Annotated[Sequence[str], Default([])]]
    """Why the clocks were what they were, in NVML's words."""
    ecc_errors: NotRequired[Annotated[int | None, Default(None)]]
    """Memory errors since boot that could not be corrected."""
    xids: NotRequired[Annotated[Sequence[int], Default([])]]
    """Numbers of the errors that NVIDIA's driver reported of the card since the look before."""
    processes: NotRequired[Annotated[Processes | None, Default(None)]]


class Alone(TypedDict):
    """How many times the speed a tuned program has with empty databases that it has with those that tuned it.

    By medians, of two processes; `interval` is the 99 % confidence interval.
    """

    ratio: float
    interval: Interval


class Latency(TypedDict):
    """Percentiles of one kind of run, in seconds."""

    median: Amount
    p90: NotRequired[Annotated[Amount | None, Default(None)]]
    p99: NotRequired[Annotated[Amount | None, Default(None)]]
    minimum: NotRequired[Annotated[Amount | None, Default(None)]]
    repeats: NotRequired[Annotated[int, Bound(least=1), Default(1)]]


class MeasuredPoint(TypedDict):
    """Speed of a dynamic program at one of its sizes: `shapes` by input name, `batch` samples in a run."""

    batch: int
    shapes: Mapping[str, Sequence[int]]
    latency: Latency
    throughput: NotRequired[Annotated[float | None, Default(None)]]


class Against(TypedDict):
    """How this program compares with one that was published before it; they took turns in one process.

    `ratio` is how many times the speed of the program with the cache key `key` this one has, by medians; `interval` its
    99 % confidence interval; `verdict` is `faster`, `slower` or `no difference shown`.
    """

    key: Digest
    ratio: float
    interval: Interval
    verdict: str

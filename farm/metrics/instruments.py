"""Instruments: the farm's counters and histograms, and the text in which Prometheus reads them.

Each process counts what it does itself. No label has more than `MOST_VALUES` values, and none names a model, a job, a
build or a namespace: labels are closed sets, or pass through `LabelValues`. `docs/running.md` lists the metrics.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    REGISTRY,
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector

import farm
from farm.spec import SpecDocument

disable_created_metrics()  # type: ignore[no-untyped-call]

MOST_VALUES = 100  # Values of one label at most.
OTHER = "other"  # Stands for the values beyond them.

QUICK = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
"""Seconds that requests take."""

LONG = (0.1, 0.3, 1, 3, 10, 30, 60, 180, 600, 1800, 3600, 10800, 36000)  # Seconds that attempts and their phases take.

CELLS_PLANNED = Counter(
    "farm_cells_planned", "Cells of accepted builds: hits, joined ones, and misses by reason.", ("state", "reason")
)
CELLS_ENDED = Counter("farm_cells_ended", "Cells of finished builds, as they were judged.", ("state", "kind"))
BUILDS_ENDED = Counter("farm_builds_ended", "Finished builds by the exit code of their verdict.", ("exit_code",))
LEASES_EXPIRED = Counter("farm_leases_expired", "Attempts whose lease ended because their worker was silent.")
LEASES_ENDED = Counter(
    "farm_leases_ended", "Attempts that a worker gave up: it stopped, or its process died.", ("why",)
)
ATTEMPTS = Counter("farm_attempts", "Attempts that ended here.", ("end", "kind"))
ATTEMPT_HITS = Counter("farm_attempt_hits", "Attempts that found their program in object storage.")
PHASE_SECONDS = Histogram("farm_phase_seconds", "Time of an attempt in each phase.", ("phase",), buckets=LONG)
COMPILED_SECONDS = Histogram("farm_compiled_seconds", "Time of an attempt that made a program.", buckets=LONG)
TUNING_OPERATIONS = Counter("farm_tuning_operations", "Operations of programs with tuning, by result.", ("result",))
TUNING_SECONDS = Counter("farm_tuning_seconds", "Time spent on tuning.")
TUNING_SAVED_SECONDS = Counter("farm_tuning_saved_seconds", "Time of tuning that known results saved.")
STORE_SECONDS = Histogram("farm_store_seconds", "Answers of the job store.", ("operation",), buckets=QUICK)
STORE_ERRORS = Counter("farm_store_errors", "Requests that the job store did not answer, or refused.")
STORAGE_SECONDS = Histogram(
    "farm_storage_seconds", "Requests to object storage, with all their tries.", ("action",), buckets=QUICK
)
STORAGE_ERRORS = Counter("farm_storage_errors", "Tries that object storage did not answer, or refused.", ("action",))
STORAGE_BYTES = Counter("farm_storage_bytes", "Bytes read from and written to object storage.", ("direction",))
REQUESTS = Counter("farm_requests", "Requests that the API answered.", ("method", "status"))
REQUEST_SECONDS = Histogram("farm_request_seconds", "Time until an answer's end.", ("route",), buckets=QUICK)

REASONS = {
    "first compile": "first", "failed last time": "failed", "tried again": "retry", "tuning": "background",
    "compiled again": "gone",
}  # fmt: skip
"""Reasons of misses that are not parts of the cache key, by how a plan's sentence begins."""


class LabelValues:
    """The values of one label: the first ones as they are, all others together. Thread-safe."""

    def __init__(self, most: int = MOST_VALUES) -> None:
        self._most = most
        self._known: set[str] = set()
        self._lock = threading.Lock()

    def of(self, value: str) -> str:
        """Return the value for the label, or `other`."""
        with self._lock:
            if value in self._known or len(self._known) < self._most - 1:
                self._known.add(value)
                return value
        return OTHER


METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
ROUTES = LabelValues()  # The API's routes, as their patterns are written.


def miss_reason(sentence: str) -> str:
    """Return why a cell is a miss, for a label: the first part of the cache key that changed, or another short word."""
    field = sentence.partition(":")[0].partition(".")[0]
    if field in SpecDocument.__annotations__:
        return field
    return next((reason for start, reason in REASONS.items() if sentence.startswith(start)), OTHER)


def count_tuning(counts: Mapping[str, Any]) -> None:
    """Count the tuning of one program (`farm.jobs.facts.TuningCounts`)."""
    for result in ("known", "tuned", "untunable"):
        TUNING_OPERATIONS.labels(result).inc(counts.get(result) or 0)
    TUNING_SECONDS.inc(max(0.0, counts.get("seconds") or 0))
    TUNING_SAVED_SECONDS.inc(max(0.0, counts.get("saved") or 0))


@contextmanager
def timed(histogram: Histogram, *labels: str) -> Iterator[None]:
    """Time the block, however it ends."""
    begun = time.perf_counter()
    try:
        yield
    finally:
        (histogram.labels(*labels) if labels else histogram).observe(time.perf_counter() - begun)


CONTENT_TYPE = CONTENT_TYPE_LATEST

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Names the folder in which processes count together; read when a process first imports an instrument."""

GAUGES = {
    "farm_info": ("Version of the farm.", ("version",)),
    "farm_store_up": ("Whether the job store answered this scrape.", ()),
    "farm_pool_queued_jobs": ("Jobs that wait for a worker, handed out or not.", ("pool",)),
    "farm_pool_oldest_seconds": ("Time for which a pool's oldest job has waited.", ("pool",)),
    "farm_pool_running_jobs": ("Jobs that hold a slot.", ("pool",)),
    "farm_pool_workers": ("Live workers that serve a pool.", ("pool",)),
    "farm_pool_slots": ("Slots of the workers that take a pool's jobs.", ("pool",)),
    "farm_pool_paused": ("Whether a pool is paused.", ("pool",)),
    "farm_running_jobs": ("Jobs that run, by phase.", ("phase",)),
    "farm_workers": ("Live workers by what they do: taking, resting, fenced, draining.", ("state",)),
    "farm_delayed_jobs": ("Jobs whose next attempt waits for its delay.", ()),
    "farm_kept_jobs": ("Finished programs on disks of nodes, for object storage that is away.", ()),
    "farm_unreported_builds": ("Builds that ended and wait for their report.", ()),
    "farm_worker_up": ("Whether a kind of slots takes jobs.", ("kind",)),
    "farm_worker_running_attempts": ("Attempts that run on this node.", ("kind",)),
    "farm_worker_fenced": ("Whether this node is fenced.", ("kind",)),
    "farm_worker_reaches_store": ("Whether the last heartbeat was answered.", ("kind",)),
    "farm_gpu_busy_ratio": ("Share of time in which a GPU is busy, as its driver reports it now.", ("gpu",)),
    "farm_gpu_memory_used_bytes": ("Memory of a GPU that is in use now.", ("gpu",)),
    "farm_disk_free_bytes": ("Free bytes of the disk with this node's data folder.", ()),
}
"""Gauges by name: what they say, and their labels. They are read when somebody asks, not kept."""


class GaugeValue(NamedTuple):
    """One value of a gauge, with its label's values in order."""

    name: str
    value: float
    labels: tuple[str, ...] = ()


def exposition(readings: Iterable[GaugeValue], folder: Path | None = None) -> bytes:
    """Return this process's instruments, or those of the processes that count in `folder`, and the readings."""
    counted = REGISTRY
    if folder is not None:
        counted = CollectorRegistry()
        MultiProcessCollector(counted, path=str(folder))  # type: ignore[no-untyped-call]
        counted.register(LEASES_ENDED)  # The supervisor itself counts these, since the process is dead.
    gauges = CollectorRegistry()
    gauges.register(_Gauges([GaugeValue("farm_info", 1, (farm.__version__,)), *readings]))
    return generate_latest(counted) + generate_latest(gauges)


def bounded(readings: Iterable[GaugeValue], most: int = MOST_VALUES) -> list[GaugeValue]:
    """Return readings of one label with at most so many values: the largest ones, and the sum of the others."""
    found, weight = list(readings), defaultdict[tuple[str, ...], float](float)
    for reading in found:
        weight[reading.labels] += reading.value
    if len(weight) <= most:
        return found
    kept = set(sorted(weight, key=lambda labels: (-weight[labels], labels))[: most - 1])
    rest = defaultdict[str, list[float]](list)
    for reading in found:
        if reading.labels not in kept:
            rest[reading.name].append(reading.value)
    # Ages do not add up.
    sums = {name: max(values) if name.endswith("_seconds") else sum(values) for name, values in rest.items()}
    others = [GaugeValue(name, value, (OTHER,)) for name, value in sums.items()]
    return [*(reading for reading in found if reading.labels in kept), *others]


class _Gauges:
    """Readings as Prometheus' client wants them."""

    def __init__(self, readings: Iterable[GaugeValue]) -> None:
        self._readings = list(readings)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield each gauge that has a value."""
        for name, (about, labels) in GAUGES.items():
            values = [reading for reading in self._readings if reading.name == name]
            if values:
                family = GaugeMetricFamily(name, about, labels=labels)
                for reading in values:
                    family.add_metric(reading.labels, reading.value)
                yield family

"""Instruments: the farm's counters and histograms. Each process counts what it does itself; Prometheus adds them up.

No label has more than `MOST_VALUES` values, and none names a model, a job, a build or a namespace: labels are closed
sets, or pass through `LabelValues`. Names, units and labels are in `docs/running.md`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from prometheus_client import Counter, Histogram, disable_created_metrics

disable_created_metrics()  # type: ignore[no-untyped-call]

MOST_VALUES = 100
"""Values of one label at most."""

OTHER = "other"
"""Stands for the values beyond them."""

QUICK = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
"""Seconds that requests take."""

LONG = (0.1, 0.3, 1, 3, 10, 30, 60, 180, 600, 1800, 3600, 10800, 36000)
"""Seconds that attempts and their phases take."""

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

KEY_FIELDS = frozenset(
    {
        "model", "compiler", "device", "toolchain", "precision", "inputs", "batch", "options", "tuning", "env",
        "calibration", "quantization", "verification", "salt", "schema",
    }
)  # fmt: skip
"""Parts of a cache key, as reasons of misses."""

REASONS = {
    "first compile": "first", "failed last time": "failed", "tried again": "retry", "tuning": "background",
    "compiled again": "gone",
}  # fmt: skip
"""Other reasons of misses, by how a plan's sentence begins."""


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
ROUTES = LabelValues()
"""The API's routes, as their patterns are written."""


def miss_reason(sentence: str) -> str:
    """Return why a cell is a miss, for a label: the first part of the cache key that changed, or another short word."""
    field = sentence.partition(":")[0].partition(".")[0]
    if field in KEY_FIELDS:
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

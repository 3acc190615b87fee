"""Exposition: the metrics of a process, or of a worker's processes together, as text that Prometheus reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector

import farm
from farm.metrics.instruments import LEASES_ENDED, MOST_VALUES, OTHER

CONTENT_TYPE = CONTENT_TYPE_LATEST

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Names the folder in which processes count together; read when a process first imports an instrument."""

GAUGES = {
    "farm_info": ("Version of the farm.", ("version",)),
    "farm_store_up": ("Whether the job store answered this scrape.", ()),
    "farm_pool_queued_jobs": ("Jobs that wait for a worker, handed out or not.", ("pool",)),
    "farm_pool_oldest_seconds": ("Time for which a pool's oldest job has waited.", ("pool",)),
    "farm_pool_running_jobs": ("Jobs that run.", ("pool",)),
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

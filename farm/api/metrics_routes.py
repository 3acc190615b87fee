"""`/metrics` for Prometheus: what this process counted, and queues, workers and jobs as the store has them now."""

from __future__ import annotations

from collections import Counter

from fastapi import APIRouter, Depends
from fastapi.responses import Response

from farm.api.auth import FarmDep, may_monitor
from farm.app import Farm
from farm.errors import FarmFault
from farm.jobs.rows import WorkerView
from farm.metrics.exposition import CONTENT_TYPE, GaugeValue, bounded, exposition

router = APIRouter()


@router.get("/metrics", include_in_schema=False, dependencies=[Depends(may_monitor)])
def metrics(farm: FarmDep) -> Response:
    """Return the metrics; a store that is away is a metric, too."""
    try:
        readings = [GaugeValue("farm_store_up", 1), *of_store(farm)]
    except FarmFault:
        readings = [GaugeValue("farm_store_up", 0)]
    return Response(exposition(readings), media_type=CONTENT_TYPE)


def of_store(farm: Farm) -> list[GaugeValue]:
    """Return what the store knows of pools, jobs and workers."""
    store = farm.store
    ages, states = store.workers.queue_ages(), Counter(map(_state, store.workers.list()))
    pools = [
        GaugeValue(name, value, (pool["name"],))
        for pool in store.workers.pools()
        for name, value in {
            "farm_pool_queued_jobs": pool["waiting"],
            "farm_pool_oldest_seconds": ages.get(pool["name"], 0.0),
            "farm_pool_running_jobs": pool["running"],
            "farm_pool_workers": pool["live_workers"],
            "farm_pool_slots": pool["slots"],
            "farm_pool_paused": int(pool["paused"]),
        }.items()
    ]
    phases = store.jobs.phases()
    return [
        *bounded(pools),
        *bounded([GaugeValue("farm_running_jobs", count, (phase,)) for phase, count in phases.items()]),
        *[GaugeValue("farm_workers", states[state], (state,)) for state in ("taking", "resting", "fenced", "draining")],
        *[GaugeValue(f"farm_{name}", count) for name, count in store.jobs.set_aside().items()],
    ]


def _state(worker: WorkerView) -> str:
    if worker["draining"]:
        return "draining"
    return "fenced" if worker["fenced"] else "resting" if worker["resting"] else "taking"

"""`/metrics` for Prometheus: what this process counted, and queues, workers and jobs as the store has them now."""

from __future__ import annotations

import time
from collections import Counter

from fastapi import APIRouter, Depends
from fastapi.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from farm.api.auth import FarmDep, may_monitor
from farm.app import Farm
from farm.errors import FarmFault
from farm.jobs.rows import WorkerView
from farm.metrics.exposition import CONTENT_TYPE, GaugeValue, bounded, exposition
from farm.metrics.instruments import METHODS, OTHER, REQUEST_SECONDS, REQUESTS, ROUTES

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


class CountedRequests:
    """Middleware that counts requests, and times them by the pattern of their route, without `/v1`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, status, found = time.perf_counter(), 500, dict[str, str]()

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app({**scope, FOUND: found}, receive, noting)
        finally:
            method = scope["method"] if scope["method"] in METHODS else OTHER
            REQUESTS.labels(method, str(status)).inc()
            route = found.get("route", OTHER)
            if not route.endswith("/events"):  # They last as long as somebody listens.
                REQUEST_SECONDS.labels(ROUTES.of(route)).observe(time.perf_counter() - begun)


class NotedRoutes:
    """The innermost middleware: notes which route answers. Those around it may work on a copy of the scope."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        try:
            await self._app(scope, receive, send)
        finally:
            if (route := scope.get("route")) and FOUND in scope:
                scope[FOUND]["route"] = route.path


FOUND = "farm.found"
"""Name in a request's scope of what was found out about it."""

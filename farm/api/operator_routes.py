"""What operators ask for over HTTP: workers and pools, tokens, the audit, the log of changes, garbage, metrics."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query
from fastapi.responses import Response, StreamingResponse

from farm.api import schemas
from farm.api.gate import Admin, Change, FarmDep, ReaderCaller, may_monitor, read_changes
from farm.app import Farm
from farm.artifacts.inventory import Collected, collect
from farm.artifacts.tokens import Role, Secret, TokenDocument
from farm.builds.reading import troubles
from farm.control.audit import Auditor
from farm.errors import FarmFault, NotFound
from farm.jobs.rows import Listed, PoolView, WorkerView
from farm.metrics.instruments import CONTENT_TYPE, GaugeValue, bounded, exposition

# --- workers and pools -----------------------------------------------------------------------------------------------

worker_router = APIRouter(tags=["workers"])

NodeName = Annotated[str, Path(pattern=schemas.NODE)]
PoolName = Annotated[str, Path(pattern=schemas.POOL)]


@worker_router.get("/workers", response_model=Listed[schemas.Document])
def workers(caller: ReaderCaller, farm: FarmDep) -> Listed[WorkerView]:
    """List the live workers: node, slots, pools, running jobs, and the reason if one takes no jobs.

    An administrator sees all running jobs; others see those of their namespace, and the number of the rest.
    """
    namespace = "" if caller.role is Role.ADMIN else caller.namespace
    return {"items": farm.store.workers.list(namespace)}


@worker_router.get("/troubles")
def list_troubles(_: ReaderCaller, farm: FarmDep) -> Listed[str]:
    """List what operators have to see to: which node or control plane cannot reach what, releases, slow disks."""
    return {"items": troubles(farm.store, farm.settings)}


@worker_router.post("/workers/{name}/drain", status_code=204)
def drain(name: NodeName, _: Admin, farm: FarmDep) -> None:
    """Let a worker finish its running attempts, and stop."""
    if not farm.store.workers.drain(name):
        raise NotFound(f"no worker {name}", hint="`farm ls workers` lists them")


@worker_router.post("/nodes/{name}/unfence", status_code=204)
def unfence(name: NodeName, _: Admin, farm: FarmDep) -> None:
    """Let a fenced node take jobs again, before its health probes do."""
    if not farm.store.workers.unfence(name):
        raise NotFound(f"node {name} is not fenced", hint="`farm ls workers` shows which ones are")


@worker_router.post("/pools/{name}/pause", status_code=204)
def pause(name: PoolName, _: Admin, farm: FarmDep) -> None:
    """Hand out no more jobs of a pool; running jobs go on."""
    farm.builds.pause_pool(name, paused=True)


@worker_router.post("/pools/{name}/resume", status_code=204)
def resume(name: PoolName, _: Admin, farm: FarmDep) -> None:
    """Hand out the jobs of a paused pool again."""
    farm.builds.pause_pool(name, paused=False)


@worker_router.get("/pools", response_model=Listed[schemas.Document])
def pools(_: ReaderCaller, farm: FarmDep) -> Listed[PoolView]:
    """List the pools that the farm has ever known, with live workers, slots and waiting jobs."""
    return {"items": farm.store.workers.pools()}


# --- tokens ----------------------------------------------------------------------------------------------------------

token_router = APIRouter(tags=["tokens"])

TokenName = Annotated[str, Path(pattern=schemas.TAG)]


@token_router.get("/tokens")
def tokens(_: Admin, farm: FarmDep) -> Listed[TokenDocument]:
    """List the tokens; their secrets are known to nobody but their owners."""
    return {"items": [token.as_dict() for token in farm.tokens.list()]}


@token_router.post("/tokens", status_code=201)
def create(new: schemas.NewToken, _: Admin, farm: FarmDep) -> Secret:
    """Make a token. Its secret is in this answer and nowhere else."""
    secret = farm.tokens.create(new.name, Role[new.role.upper()], new.namespace, max_cells=new.max_cells)
    return {"secret": secret}


@token_router.delete("/tokens/{name}", status_code=204)
def revoke(name: TokenName, _: Admin, farm: FarmDep) -> None:
    """Revoke a token: within seconds it is refused everywhere. What it has submitted goes on."""
    farm.tokens.revoke(name)


# --- upkeep ----------------------------------------------------------------------------------------------------------

upkeep_router = APIRouter(tags=["upkeep"])


@upkeep_router.get("/audit", response_class=StreamingResponse, responses=schemas.text("application/x-ndjson"))
def audit(
    _: Admin, farm: FarmDep, deep: Annotated[bool, Query(description="Read and hash every blob.")] = False
) -> StreamingResponse:
    """Report where store, object storage and sidecars disagree: one JSON object per line, the counts in the last."""
    found = Auditor(farm.store, farm.artifacts, deep=deep).findings()
    return StreamingResponse((f"{json.dumps(line)}\n" for line in found), media_type="application/x-ndjson")


@upkeep_router.get("/changes")
def changes(
    _: Admin,
    farm: FarmDep,
    day: Annotated[
        str, Query(pattern=r"^([0-9]{4}-[0-9]{2}-[0-9]{2})?$", description="A day, UTC; empty: today.")
    ] = "",
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Listed[Change]:
    """List who changed what on a day, the newest change first."""
    return {"items": list(read_changes(farm.artifacts, day or str(datetime.now(UTC).date()), limit))}


@upkeep_router.post("/gc")
def gc(_: Admin, farm: FarmDep, dry_run: Annotated[bool, Query(description="Delete nothing.")] = False) -> Collected:
    """Mark the blobs that nothing has named for a day, and delete those that were marked a day ago."""
    return collect(farm.artifacts, plans_kept=timedelta(days=farm.settings.keep_days), dry_run=dry_run)


# --- metrics ---------------------------------------------------------------------------------------------------------

metrics_router = APIRouter()


@metrics_router.get("/metrics", include_in_schema=False, dependencies=[Depends(may_monitor)])
def metrics(farm: FarmDep) -> Response:
    """Return the metrics; a store that is away is a metric, too."""
    try:
        readings = [GaugeValue("farm_store_up", 1), *of_store(farm)]
    except FarmFault:
        readings = [GaugeValue("farm_store_up", 0)]
    return Response(exposition(readings), media_type=CONTENT_TYPE)


@metrics_router.get("/metrics/wanted", include_in_schema=False, dependencies=[Depends(may_monitor)])
def wanted(farm: FarmDep, pool: Annotated[list[str], Query()]) -> dict[str, int]:
    """Return how many slots the pools whose names begin like this could use now, for an autoscaler that adds workers.

    A pool that no worker has served yet wants nothing: the farm takes no jobs for it.
    """
    workers = farm.store.workers
    named = [name for name in workers.pool_names() if any(begins_like(name, start) for start in pool)]
    return {"slots": sum(map(workers.wanted_slots, named))}


def begins_like(name: str, start: str) -> bool:
    """Whether a pool's name begins with these whole parts: `migraphx-gfx90` does not mean `migraphx-gfx90a`."""
    return f"{name}.".startswith((f"{start}.", f"{start}-"))


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

"""Workers and pools over HTTP."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from farm.api import schemas
from farm.api.auth import Admin, FarmDep, ReaderCaller
from farm.artifacts.tokens import Role
from farm.errors import NotFound
from farm.jobs.rows import Listed, PoolView, WorkerView

router = APIRouter(tags=["workers"])

NodeName = Annotated[str, Path(pattern=schemas.NODE)]
PoolName = Annotated[str, Path(pattern=schemas.POOL)]


@router.get("/workers", response_model=Listed[schemas.Document])
def workers(caller: ReaderCaller, farm: FarmDep) -> Listed[WorkerView]:
    """List the live workers: node, slots, pools, running jobs, and the reason if one takes no jobs.

    An administrator sees all running jobs; others see those of their namespace, and the number of the rest.
    """
    namespace = "" if caller.role is Role.ADMIN else caller.namespace
    return {"items": farm.store.workers.list(namespace)}


@router.post("/workers/{name}/drain", status_code=204)
def drain(name: NodeName, _: Admin, farm: FarmDep) -> None:
    """Let a worker finish its running attempts, and stop."""
    if not farm.store.workers.drain(name):
        raise NotFound(f"no worker {name}", hint="`farm ls workers` lists them")


@router.post("/nodes/{name}/unfence", status_code=204)
def unfence(name: NodeName, _: Admin, farm: FarmDep) -> None:
    """Let a fenced node take jobs again, before its health probes do."""
    if not farm.store.workers.unfence(name):
        raise NotFound(f"node {name} is not fenced", hint="`farm ls workers` shows which ones are")


@router.post("/pools/{name}/pause", status_code=204)
def pause(name: PoolName, _: Admin, farm: FarmDep) -> None:
    """Hand out no more jobs of a pool; running jobs go on."""
    farm.builds.pause_pool(name, paused=True)


@router.post("/pools/{name}/resume", status_code=204)
def resume(name: PoolName, _: Admin, farm: FarmDep) -> None:
    """Hand out the jobs of a paused pool again."""
    farm.builds.pause_pool(name, paused=False)


@router.get("/pools", response_model=Listed[schemas.Document])
def pools(_: ReaderCaller, farm: FarmDep) -> Listed[PoolView]:
    """List the pools that the farm has ever known, with live workers, slots and waiting jobs."""
    return {"items": farm.store.workers.pools()}

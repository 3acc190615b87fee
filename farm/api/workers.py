"""Workers and pools over HTTP."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from farm.api import schemas
from farm.api.auth import Admin, FarmDep, Reader

router = APIRouter(tags=["workers"])

PoolName = Annotated[str, Path(pattern=schemas.POOL)]


@router.get("/workers")
def workers(_: Reader, farm: FarmDep) -> schemas.Items[schemas.Document]:
    """List the workers: node, slots, pools, what they run, and whether they live."""
    return schemas.Items(items=[dict(worker) for worker in farm.store.workers.list()])


@router.post("/pools/{name}/pause", status_code=204)
def pause(name: PoolName, _: Admin, farm: FarmDep) -> None:
    """Hand out nothing of a pool any more; what runs goes on."""
    farm.builds.pause_pool(name, paused=True)


@router.post("/pools/{name}/resume", status_code=204)
def resume(name: PoolName, _: Admin, farm: FarmDep) -> None:
    """Hand out the jobs of a paused pool again."""
    farm.builds.pause_pool(name, paused=False)


@router.get("/pools")
def pools(_: Reader, farm: FarmDep) -> schemas.Items[schemas.Document]:
    """List the pools that the farm has ever known, with live workers, slots and waiting jobs."""
    return schemas.Items(items=[dict(pool) for pool in farm.store.workers.pools()])

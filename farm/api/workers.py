"""Workers and pools over HTTP."""

from __future__ import annotations

from fastapi import APIRouter

from farm.api import schemas
from farm.api.auth import FarmDep, Reader

router = APIRouter(tags=["workers"])


@router.get("/workers")
def workers(_: Reader, farm: FarmDep) -> schemas.Items[schemas.Document]:
    """List the workers: node, slots, pools, what they run, and whether they live."""
    return schemas.Items(items=[dict(worker) for worker in farm.store.workers.list()])


@router.get("/pools")
def pools(_: Reader, farm: FarmDep) -> schemas.Items[schemas.Document]:
    """List the pools that the farm has ever known, with live workers, slots and waiting jobs."""
    return schemas.Items(items=[dict(pool) for pool in farm.store.workers.pools()])

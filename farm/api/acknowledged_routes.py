"""Acknowledged failures over HTTP."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Query

from farm.api import schemas
from farm.api.auth import FarmDep, ReaderCaller, Submitter
from farm.builds.acknowledged import Acknowledged
from farm.jobs.rows import Listed

router = APIRouter(tags=["acknowledged"])

CellName = Annotated[str, Query(description="A cell's identifier.", min_length=1, max_length=500)]


@router.get("/acknowledged")
def acknowledged(caller: ReaderCaller, farm: FarmDep) -> Listed[Acknowledged]:
    """List the failures that somebody acknowledged; those that end first come first."""
    return {"items": farm.acknowledged.list(caller.namespace)}


@router.put("/acknowledged")
def acknowledge(cell: CellName, failure: schemas.KnownFailure, caller: Submitter, farm: FarmDep) -> Acknowledged:
    """Expect this failure of a cell in the builds submitted from now on, until a day. Repeating it is harmless."""
    return farm.acknowledged.put(
        caller.namespace,
        {
            "cell": cell,
            "kind": failure.kind,
            "reason": failure.reason,
            "until": failure.until,
            "link": failure.link,
            "by": caller.name,
            "at": time.time(),
        },
    )


@router.delete("/acknowledged", status_code=204)
def forget(cell: CellName, caller: Submitter, farm: FarmDep) -> None:
    """Expect nothing of a cell any more."""
    farm.acknowledged.delete(caller.namespace, cell)

"""The history of cells over HTTP."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from farm.api.auth import Admin, FarmDep, ReaderCaller
from farm.errors import StoreUnavailable
from farm.jobs.rows import Listed
from farm.results.report import PastCell, Rebuilt

router = APIRouter(tags=["history"])


@router.get("/history")
def history(
    caller: ReaderCaller,
    farm: FarmDep,
    cell: Annotated[str, Query(description="A cell's identifier.", min_length=1, max_length=500)],
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
) -> Listed[PastCell]:
    """Return how a cell ended in the newest builds that had it, with its numbers, the newest first."""
    reach = farm.build_index.catch_up(caller.namespace)
    found = farm.build_index.of(caller.namespace, cell, limit)
    if not found and not reach.is_whole:
        raise StoreUnavailable(f"{reach}: no build with {cell} is read yet", hint="try again in a minute")
    return {"items": found}


@router.post("/history/rebuild")
def rebuild(_: Admin, farm: FarmDep) -> Rebuilt:
    """Make this server's history again from all reports in object storage. Repeating it is harmless."""
    return {"reports": farm.build_index.rebuild()}

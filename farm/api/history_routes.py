"""The history of cells over HTTP."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from farm.api import schemas
from farm.api.auth import Admin, FarmDep, ReaderCaller
from farm.jobs.rows import Listed
from farm.results.report import PastCell

router = APIRouter(tags=["history"])


@router.get("/history", response_model=schemas.Items[schemas.PastCellView])
def history(
    caller: ReaderCaller,
    farm: FarmDep,
    cell: Annotated[str, Query(description="A cell's identifier.", min_length=1, max_length=500)],
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
) -> Listed[PastCell]:
    """Return how a cell ended in the newest builds that had it, with its numbers, the newest first."""
    return {"items": farm.cell_history.of(caller.namespace, cell, limit)}


@router.post("/history/rebuild", response_model=schemas.Rebuilt)
def rebuild(_: Admin, farm: FarmDep) -> dict[str, int]:
    """Make this server's history again, of all reports in object storage. Repeating it is harmless."""
    return {"reports": farm.cell_history.rebuild()}

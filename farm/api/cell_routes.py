"""Cells over HTTP: their jobs, their history, and their failures that somebody acknowledged."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Path, Query, Response
from fastapi.responses import StreamingResponse

from farm.api import schemas
from farm.api.gate import Admin, FarmDep, ReaderCaller, Submitter
from farm.builds.known_failures import Acknowledged
from farm.errors import StoreUnavailable
from farm.jobs.rows import JobView, Listed, ReproductionDocument
from farm.results.report import PastCell, Rebuilt

job_router = APIRouter(tags=["jobs"])

JobId = Annotated[str, Path(pattern=schemas.JOB_ID)]


@job_router.get("/jobs/{job_id}", response_model=schemas.Document)
def job(job_id: JobId, caller: ReaderCaller, farm: FarmDep) -> JobView:
    """Return a job with its attempts."""
    return farm.jobs.get(caller.namespace, job_id)


@job_router.get("/jobs/{job_id}/log", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
def log(job_id: JobId, caller: ReaderCaller, farm: FarmDep) -> Response:
    """Return a job's log: the last 64 KiB while it runs; after that, up to 64 MiB of the last attempt's log."""
    return StreamingResponse(
        farm.jobs.log(caller.namespace, job_id).last(),
        media_type="text/plain; charset=utf-8",
        # What a compiler printed about a hostile model must stay text in every browser.
        headers={"X-Content-Type-Options": "nosniff"},
    )


@job_router.get("/jobs/{job_id}/reproduction", response_model=schemas.Document)
def reproduction(job_id: JobId, caller: ReaderCaller, farm: FarmDep) -> ReproductionDocument:
    """Return all that is needed to rerun a job's last attempt elsewhere: work order, limits, inputs by digest."""
    return farm.jobs.reproduction(caller.namespace, job_id)


history_router = APIRouter(tags=["history"])


@history_router.get("/history")
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


@history_router.post("/history/rebuild")
def rebuild(_: Admin, farm: FarmDep) -> Rebuilt:
    """Make this server's history again from all reports in object storage. Repeating it is harmless."""
    return {"reports": farm.build_index.rebuild()}


acknowledged_router = APIRouter(tags=["acknowledged"])

CellName = Annotated[str, Query(description="A cell's identifier.", min_length=1, max_length=500)]


@acknowledged_router.get("/acknowledged")
def acknowledged(caller: ReaderCaller, farm: FarmDep) -> Listed[Acknowledged]:
    """List the failures that somebody acknowledged; those that end first come first."""
    return {"items": farm.acknowledged.list(caller.namespace)}


@acknowledged_router.put("/acknowledged")
def acknowledge(cell: CellName, failure: schemas.KnownFailure, caller: Submitter, farm: FarmDep) -> Acknowledged:
    """Expect this failure of a cell in the builds submitted from now on, until a day. Repeating it is harmless."""
    return farm.acknowledged.put(caller.namespace, {**failure, "cell": cell, "by": caller.name, "at": time.time()})


@acknowledged_router.delete("/acknowledged", status_code=204)
def forget(cell: CellName, caller: Submitter, farm: FarmDep) -> None:
    """Expect nothing of a cell any more."""
    farm.acknowledged.delete(caller.namespace, cell)

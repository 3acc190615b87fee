"""Jobs over HTTP: a job with its attempts, its log, and its reproduction."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Response

from farm.api import schemas
from farm.api.auth import FarmDep, ReaderCaller
from farm.jobs.rows import JobView, ReproductionDocument

router = APIRouter(tags=["jobs"])

JobId = Annotated[str, Path(pattern=schemas.JOB_ID)]


@router.get("/jobs/{job_id}", response_model=schemas.Document)
def job(job_id: JobId, caller: ReaderCaller, farm: FarmDep) -> JobView:
    """Return a job with its attempts."""
    return farm.jobs.get(caller.namespace, job_id)


@router.get("/jobs/{job_id}/log", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
def log(job_id: JobId, caller: ReaderCaller, farm: FarmDep) -> Response:
    """Return a job's log: the last 64 KiB while it runs; after that, up to 64 MiB of the last attempt's log."""
    return Response(
        farm.jobs.log(caller.namespace, job_id),
        media_type="text/plain; charset=utf-8",
        # What a compiler printed about a hostile model must stay text in every browser.
        headers={"X-Content-Type-Options": "nosniff"},
    )


@router.get("/jobs/{job_id}/reproduction", response_model=schemas.Document)
def reproduction(job_id: JobId, caller: ReaderCaller, farm: FarmDep) -> ReproductionDocument:
    """Return all that is needed to rerun a job's last attempt elsewhere: work order, limits, inputs by digest."""
    return farm.jobs.reproduction(caller.namespace, job_id)

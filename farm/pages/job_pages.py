"""Pages of jobs and artifacts: a job or a cell, its log, a program and how to use it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import date, timedelta
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import Response

from farm.api.auth import Caller, FarmDep
from farm.app import Farm
from farm.artifacts.sidecar import Sidecar, validate
from farm.artifacts.tokens import Role
from farm.builds.acknowledged import LONGEST, today
from farm.builds.build_index import KEPT
from farm.errors import NotFound
from farm.jobs.rows import CellOfBuild, JobView
from farm.jobs.state import FailureKind, State
from farm.pages import drawing, history_view, job_view, log_view, usage
from farm.pages.browser_sessions import Visitor
from farm.pages.build_view import ShownBuild
from farm.pages.job_view import JobPage
from farm.pages.page_answers import BASE, JobName, KeyName, Namespace, Text, page_of
from farm.results.lines import CellLine, Look

router = APIRouter()

LOG_LIMIT = 64 << 20
FORTNIGHT = timedelta(days=14)
"""For how long the form suggests to know of a failure."""


AttemptNumber = Annotated[int, Query(ge=0, le=10**6)]
"""0: the last one."""


@router.get("/ns/{namespace}/jobs/{job_id}")
def job(request: Request, caller: Visitor, farm: FarmDep, namespace: Namespace, job_id: JobName) -> Response:
    """Show a job."""
    return job_page(request, caller, farm, _page_of_job(farm, caller, farm.jobs.get(caller.namespace, job_id)))


@router.get("/ns/{namespace}/jobs/{job_id}/log")
def job_log(
    request: Request,
    caller: Visitor,
    farm: FarmDep,
    namespace: Namespace,
    job_id: JobName,
    start: Annotated[int, Query(alias="from", ge=0, le=10**9)] = 0,
    q: Text = "",
    attempt: AttemptNumber = 0,
) -> Response:
    """Show a job's log, around its first error or from a line on, or the lines with a text."""
    found = farm.jobs.get(caller.namespace, job_id)
    text = farm.jobs.log(caller.namespace, job_id, attempt).decode(errors="replace")
    ended = next((one for one in found["attempts"] if one["number"] == attempt), None)
    return _log_page(
        request,
        caller,
        text,
        found["order"].get("identifier") or job_id,
        f"{BASE}/ns/{caller.namespace}/jobs/{job_id}",
        start=start,
        search=q,
        known=ended["detail"] if ended else found["detail"],
        attempts=[one["number"] for one in found["attempts"] if one["log"]],
        attempt=attempt,
    )


@router.get("/ns/{namespace}/jobs/{job_id}/log/raw")
def raw_job_log(
    caller: Visitor, farm: FarmDep, namespace: Namespace, job_id: JobName, attempt: AttemptNumber = 0
) -> Response:
    """Return a job's log as text."""
    return _raw(farm.jobs.log(caller.namespace, job_id, attempt))


@router.get("/ns/{namespace}/history/{identifier:path}")
def past(
    request: Request,
    caller: Visitor,
    farm: FarmDep,
    namespace: Namespace,
    identifier: Annotated[str, Path(max_length=500)],
    days: Annotated[int, Query(ge=1, le=3650)] = 365,
    until: date | None = None,
) -> Response:
    """Show how a cell did in the builds of some time: so many days until the end of a day (UTC; default: today)."""
    until = until or today()
    reach = farm.build_index.catch_up(caller.namespace)
    found = history_view.past_of(farm.build_index.of(caller.namespace, identifier, KEPT)).within(until, days)
    return page_of(
        request,
        caller,
        "history",
        section="builds",
        identifier=identifier,
        past=found,
        unread="" if reach.is_whole else str(reach),
        drawn=drawing.past(found),
        days=days,
        until=until,
        looked_at=history_view.LOOKED_AT,
        learnt=history_view.LEARNT,
    )


@router.get("/ns/{namespace}/artifacts/{key}")
def artifact(
    request: Request, caller: Visitor, farm: FarmDep, namespace: Namespace, key: KeyName, use: Text = ""
) -> Response:
    """Show an artifact, and how to use it: the way that the URL names, else the first."""
    made = known_sidecar(farm, caller, key)
    ways = usage.ways(made, str(request.base_url).removesuffix("/").removesuffix(BASE))
    return page_of(
        request,
        caller,
        "artifact",
        section="models",
        made=made,
        more=[
            fact
            for extension in farm.extensions
            if extension.artifact_facts
            for fact in extension.artifact_facts(farm, caller.namespace, made)
        ],
        ways=ways,
        chosen=use if use in {way.slug for way in ways} else ways[0].slug,
        ingredients=job_view.ingredients_of(made.spec),
    )


@router.get("/ns/{namespace}/artifacts/{key}/log")
def artifact_log(
    request: Request,
    caller: Visitor,
    farm: FarmDep,
    namespace: Namespace,
    key: KeyName,
    start: Annotated[int, Query(alias="from", ge=0, le=10**9)] = 0,
    q: Text = "",
) -> Response:
    """Show the log of the attempt that made an artifact."""
    made = known_sidecar(farm, caller, key)
    text = _artifact_log(farm, made).decode(errors="replace")
    here = f"{BASE}/ns/{caller.namespace}/artifacts/{key}"
    return _log_page(request, caller, text, made.identifier, here, start=start, search=q)


@router.get("/ns/{namespace}/artifacts/{key}/log/raw")
def raw_artifact_log(caller: Visitor, farm: FarmDep, namespace: Namespace, key: KeyName) -> Response:
    """Return an artifact's log as text."""
    return _raw(_artifact_log(farm, known_sidecar(farm, caller, key)))


def _log_page(
    request: Request,
    caller: Caller,
    text: str,
    title: str,
    back: str,
    *,
    start: int,
    search: str,
    known: str = "",
    attempts: Sequence[int] = (),
    attempt: int = 0,
) -> Response:
    shown = log_view.page(text, start=start, search=search, known=known)
    which = f"attempt={attempt}" if attempt else ""
    return page_of(
        request,
        caller,
        "log",
        section="builds",
        title=title,
        page=shown,
        stages=log_view.stages(shown),
        search=search,
        back=back,
        here=f"{back}/log?{which}",
        raw=f"{back}/log/raw{'?' if which else ''}{which}",
        attempts=attempts,
        attempt=attempt or (attempts[-1] if attempts else 0),
    )


def _raw(text: bytes) -> Response:
    return Response(text, media_type="text/plain; charset=utf-8")


def _page_of_job(farm: Farm, caller: Caller, job: JobView) -> JobPage:
    order = job["order"]
    sidecar = sidecar_of(farm, caller, job["key"]) if job["state"] == State.SUCCEEDED else None
    return JobPage(
        title=str(order.get("identifier") or job["id"]),
        namespace=caller.namespace,
        build="",
        cell=None,
        job=job["id"],
        state=job["state"],
        kind=job["kind"] or "",
        message=job["message"],
        detail=job["detail"] if job["state"] == State.FAILED else "",
        advice=FailureKind(job["kind"]).policy.advice if job["kind"] else "",
        waiting=_why_it_waits(farm, caller.namespace, job["cells"][0]) if job["state"] == State.QUEUED else "",
        phase=job["phase"] or "",
        key=job["key"],
        pool=job["pool"],
        created_at=job["created_at"],
        ended_at=job["ended_at"],
        attempts=job_view.attempts_of(job, time.time()),
        cells=[(cell["build"], cell["identifier"]) for cell in job["cells"]],
        ingredients=job_view.ingredients_of(order["spec"]),
        sidecar=sidecar,
        reason="",
    )


def cell_page(farm: Farm, caller: Caller, view: ShownBuild, cell: CellLine) -> JobPage:
    """Return what the page of a cell shows."""
    job: JobView | None = None
    if cell.job:
        with suppress(NotFound):  # The store forgets jobs before reports.
            job = farm.jobs.get(caller.namespace, cell.job)
    joined: CellOfBuild = {"build": view.build["id"], "identifier": cell.identifier}
    sidecar = sidecar_of(farm, caller, cell.key) if cell.published else None
    spec = job["order"].get("spec") if job else sidecar.spec if sidecar else None
    return JobPage(
        title=cell.identifier,
        namespace=caller.namespace,
        build=view.build["id"],
        cell=cell,
        job=cell.job if job else "",
        state=cell.look,
        kind=cell.kind,
        message=cell.message,
        detail=cell.detail if cell.look in ("failed", "expected") else "",
        advice=cell.advice,
        waiting=cell.waiting or (_why_it_waits(farm, caller.namespace, joined) if cell.look == "queued" else ""),
        phase=cell.phase,
        key=cell.key,
        pool=job["pool"] if job else "",
        created_at=job["created_at"] if job else None,
        ended_at=job["ended_at"] if job else None,
        attempts=job_view.attempts_of(job, time.time()) if job else (),
        cells=[(each["build"], each["identifier"]) for each in job["cells"]] if job else (),
        ingredients=job_view.ingredients_of(spec or {}),
        sidecar=sidecar,
        reason="" if cell.look == "hit" else cell.reason,
        position=view.position if view.is_open and cell.look in ("queued", "running") else "",
    )


def _why_it_waits(farm: Farm, namespace: str, cell: CellOfBuild) -> str:
    """Return why a cell waits, also of one of thousands: its build's page says it of the first ones."""
    found = farm.build_reader.some_cells(namespace, cell["build"], [cell["identifier"]])
    return found[0]["waiting"] if found else ""


def job_page(request: Request, caller: Caller, farm: Farm, page: JobPage) -> Response:
    """Return the page of a job, or of a cell."""
    looks: Mapping[str, Look] = {"succeeded": "compiled"}
    sidecar = page.sidecar
    known = {entry["cell"]: entry for entry in farm.acknowledged.list(caller.namespace)} if page.identifier else {}
    return page_of(
        request,
        caller,
        "job",
        acknowledged=known.get(page.identifier),
        may_acknowledge=bool(page.identifier and page.kind) and caller.role >= Role.SUBMITTER,
        until=(str(today() + FORTNIGHT), str(today()), str(today() + timedelta(days=LONGEST))),
        section="builds",
        page=page,
        verdict_look=looks.get(page.state, page.state),
        timeline=drawing.timeline(page.bars()),
        spreads=drawing.spreads(found) if sidecar and (found := job_view.spreads_of(sidecar)) else "",
        outputs=job_view.outputs_of(sidecar) if sidecar else [],
    )


def known_sidecar(farm: Farm, caller: Caller, key: str) -> Sidecar:
    """Return the sidecar of an artifact that the caller may read. Raises NotFound."""
    found = sidecar_of(farm, caller, key)
    if found is None:
        raise NotFound(f"no artifact has the key {key}", hint="`farm submit` compiles it")
    return found


def sidecar_of(farm: Farm, caller: Caller, key: str) -> Sidecar | None:
    """Return the sidecar of an artifact that the caller may read; None if there is none."""
    found = farm.artifacts.lookup(caller.readable, key)
    return validate(found.sidecar) if found else None


def _artifact_log(farm: Farm, made: Sidecar) -> bytes:
    if made.blobs.log is None:
        raise NotFound("this artifact has no log")
    return farm.artifacts.read_blob(made.blobs.log.digest, limit=LOG_LIMIT)

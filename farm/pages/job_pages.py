"""Pages of jobs and artifacts: a job or a cell, its log, a program and how to use it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import date, timedelta
from typing import Annotated

from fastapi import APIRouter, Path, Query
from fastapi.responses import Response

from farm.artifacts.sidecar import validate
from farm.artifacts.tokens import Role
from farm.builds.acknowledged import LONGEST, today
from farm.builds.build_index import KEPT
from farm.errors import NotFound
from farm.jobs.rows import CellOfBuild, JobView
from farm.jobs.state import FailureKind, State
from farm.pages import drawing, history_view, job_view, log_view, usage
from farm.pages.build_view import ShownBuild
from farm.pages.job_view import JobPage
from farm.pages.page_answers import BASE, Here, JobName, KeyName, Text, Visit
from farm.results.lines import CellLine, Look
from farm.wire.program import Sidecar

router = APIRouter()

LOG_LIMIT = 64 << 20
FORTNIGHT = timedelta(days=14)
"""For how long the form suggests to know of a failure."""


AttemptNumber = Annotated[int, Query(ge=0, le=10**6)]
"""0: the last one."""


@router.get("/ns/{namespace}/jobs/{job_id}")
def job(visit: Here, job_id: JobName) -> Response:
    """Show a job."""
    return job_page(visit, _page_of_job(visit, visit.farm.jobs.get(visit.namespace, job_id)))


@router.get("/ns/{namespace}/jobs/{job_id}/log")
def job_log(
    visit: Here,
    job_id: JobName,
    start: Annotated[int, Query(alias="from", ge=0, le=10**9)] = 0,
    q: Text = "",
    attempt: AttemptNumber = 0,
) -> Response:
    """Show a job's log, around its first error or from a line on, or the lines with a text."""
    found = visit.farm.jobs.get(visit.namespace, job_id)
    text = visit.farm.jobs.log(visit.namespace, job_id, attempt).decode(errors="replace")
    ended = next((one for one in found["attempts"] if one["number"] == attempt), None)
    return _log_page(
        visit,
        text,
        found["order"].get("identifier") or job_id,
        f"{BASE}/ns/{visit.namespace}/jobs/{job_id}",
        start=start,
        search=q,
        known=ended["detail"] if ended else found["detail"],
        attempts=[one["number"] for one in found["attempts"] if one["log"]],
        attempt=attempt,
    )


@router.get("/ns/{namespace}/jobs/{job_id}/log/raw")
def raw_job_log(visit: Here, job_id: JobName, attempt: AttemptNumber = 0) -> Response:
    """Return a job's log as text."""
    return _raw(visit.farm.jobs.log(visit.namespace, job_id, attempt))


@router.get("/ns/{namespace}/history/{identifier:path}")
def past(
    visit: Here,
    identifier: Annotated[str, Path(max_length=500)],
    days: Annotated[int, Query(ge=1, le=3650)] = 365,
    until: date | None = None,
) -> Response:
    """Show how a cell did in the builds of some time: so many days until the end of a day (UTC; default: today)."""
    until = until or today()
    reach = visit.farm.build_index.catch_up(visit.namespace)
    found = history_view.past_of(visit.farm.build_index.of(visit.namespace, identifier, KEPT)).within(until, days)
    return visit.page(
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
def artifact(visit: Here, key: KeyName, use: Text = "") -> Response:
    """Show an artifact, and how to use it: the way that the URL names, else the first."""
    made = known_sidecar(visit, key)
    ways = usage.ways(made, str(visit.request.base_url).removesuffix("/").removesuffix(BASE))
    return visit.page(
        "artifact",
        section="models",
        made=made,
        more=[
            fact
            for extension in visit.farm.extensions
            if extension.artifact_facts
            for fact in extension.artifact_facts(visit.farm, visit.namespace, made)
        ],
        ways=ways,
        chosen=use if use in {way.slug for way in ways} else ways[0].slug,
        ingredients=job_view.ingredients_of(made["spec"]),
    )


@router.get("/ns/{namespace}/artifacts/{key}/log")
def artifact_log(
    visit: Here,
    key: KeyName,
    start: Annotated[int, Query(alias="from", ge=0, le=10**9)] = 0,
    q: Text = "",
) -> Response:
    """Show the log of the attempt that made an artifact."""
    made = known_sidecar(visit, key)
    text = _artifact_log(visit, made).decode(errors="replace")
    here = f"{BASE}/ns/{visit.namespace}/artifacts/{key}"
    return _log_page(visit, text, made["identifier"], here, start=start, search=q)


@router.get("/ns/{namespace}/artifacts/{key}/log/raw")
def raw_artifact_log(visit: Here, key: KeyName) -> Response:
    """Return an artifact's log as text."""
    return _raw(_artifact_log(visit, known_sidecar(visit, key)))


def _log_page(
    visit: Visit,
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
    return visit.page(
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


def _page_of_job(visit: Visit, job: JobView) -> JobPage:
    order = job["order"]
    sidecar = sidecar_of(visit, job["key"]) if job["state"] == State.SUCCEEDED else None
    return JobPage(
        title=str(order.get("identifier") or job["id"]),
        namespace=visit.namespace,
        build="",
        cell=None,
        job=job["id"],
        state=job["state"],
        kind=job["kind"] or "",
        message=job["message"],
        detail=job["detail"] if job["state"] == State.FAILED else "",
        advice=FailureKind(job["kind"]).policy.advice if job["kind"] else "",
        waiting=_why_it_waits(visit, job["cells"][0]) if job["state"] == State.QUEUED else "",
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


def cell_page(visit: Visit, view: ShownBuild, cell: CellLine) -> JobPage:
    """Return what the page of a cell shows."""
    job: JobView | None = None
    if cell.job:
        with suppress(NotFound):  # The store forgets jobs before reports.
            job = visit.farm.jobs.get(visit.namespace, cell.job)
    joined: CellOfBuild = {"build": view.build["id"], "identifier": cell.identifier}
    sidecar = sidecar_of(visit, cell.key) if cell.published else None
    spec = job["order"].get("spec") if job else sidecar["spec"] if sidecar else None
    return JobPage(
        title=cell.identifier,
        namespace=visit.namespace,
        build=view.build["id"],
        cell=cell,
        job=cell.job if job else "",
        state=cell.look,
        kind=cell.kind,
        message=cell.message,
        detail=cell.detail if cell.look in ("failed", "expected") else "",
        advice=cell.advice,
        waiting=cell.waiting or (_why_it_waits(visit, joined) if cell.look == "queued" else ""),
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


def _why_it_waits(visit: Visit, cell: CellOfBuild) -> str:
    """Return why a cell waits, also of one of thousands: its build's page says it of the first ones."""
    found = visit.farm.build_reader.some_cells(visit.namespace, cell["build"], [cell["identifier"]])
    return found[0]["waiting"] if found else ""


def job_page(visit: Visit, page: JobPage) -> Response:
    """Return the page of a job, or of a cell."""
    looks: Mapping[str, Look] = {"succeeded": "compiled"}
    sidecar = page.sidecar
    known = {entry["cell"]: entry for entry in visit.farm.acknowledged.list(visit.namespace)} if page.identifier else {}
    return visit.page(
        "job",
        acknowledged=known.get(page.identifier),
        may_acknowledge=bool(page.identifier and page.kind) and visit.caller.role >= Role.SUBMITTER,
        until=(str(today() + FORTNIGHT), str(today()), str(today() + timedelta(days=LONGEST))),
        section="builds",
        page=page,
        verdict_look=looks.get(page.state, page.state),
        timeline=drawing.timeline(page.bars()),
        spreads=drawing.spreads(found) if sidecar and (found := job_view.spreads_of(sidecar)) else "",
        outputs=job_view.outputs_of(sidecar) if sidecar else [],
    )


def known_sidecar(visit: Visit, key: str) -> Sidecar:
    """Return the sidecar of an artifact that the caller may read. Raises NotFound."""
    found = sidecar_of(visit, key)
    if found is None:
        raise NotFound(f"no artifact has the key {key}", hint="`farm submit` compiles it")
    return found


def sidecar_of(visit: Visit, key: str) -> Sidecar | None:
    """Return the sidecar of an artifact that the caller may read; None if there is none."""
    found = visit.farm.artifacts.lookup(visit.caller.readable, key)
    return validate(found.sidecar) if found else None


def _artifact_log(visit: Visit, made: Sidecar) -> bytes:
    if made["blobs"]["log"] is None:
        raise NotFound("this artifact has no log")
    return visit.farm.artifacts.read_blob(made["blobs"]["log"]["digest"], limit=LOG_LIMIT)

"""Pages of jobs and artifacts: a job or a cell, its log, a program and how to use it; a build over time."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import date, timedelta
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Path, Query
from fastapi.responses import JSONResponse, RedirectResponse, Response, StreamingResponse

from farm.api import schemas
from farm.api.build_routes import BuildReference
from farm.api.gate import FarmDep, ReaderCaller, with_role
from farm.app import Farm
from farm.artifacts.refs import Refs
from farm.artifacts.storage import blob_key, readable
from farm.artifacts.tokens import Role, Token
from farm.builds.known_failures import LONGEST, Acknowledged, today
from farm.builds.past_builds import KEPT
from farm.builds.reading import JobLog
from farm.errors import ArtifactGone, NotFound, QuotaExceeded, UsageError
from farm.jobs.rows import CellOfBuild, JobView
from farm.jobs.state import State, policy_of
from farm.pages import build_view, drawing, job_view
from farm.pages.build_view import CellFilter, ShownBuild
from farm.pages.drawing import steps
from farm.pages.job_view import AttemptLine, BuildTimeline, LogPage, timeline, trace_events
from farm.pages.page_answers import BASE, BuildName, Form, Here, OwnForm, Table, Text, Visit, same_page
from farm.pages.page_reading import PATIENCE
from farm.pages.quantities import duration
from farm.results.verdict import CellLine, look_of
from farm.spec import FileReference
from farm.units import by_number
from farm.wire.program import Sidecar

router = APIRouter()

SEARCHED = 5.0  # Seconds after which a search of a build's logs ends.
PLAIN = "text/plain; charset=utf-8"
EARLIER = 4  # Builds whose durations stand next to those of a cell's attempts.
FORTNIGHT = timedelta(days=14)  # For how long the form suggests to know of a failure.

JobName = Annotated[str, Path(pattern=schemas.JOB_ID)]
KeyName = Annotated[str, Path(pattern=schemas.DIGEST)]
LineNumber = Annotated[int, Query(alias="from", ge=0, le=10**9)]
PartNumber = Annotated[int | None, Query(ge=0, le=10**6)]  # None: the last one.
AttemptNumber = Annotated[int, Query(ge=0, le=10**6)]  # 0: the last one.


@router.get("/ns/{namespace}/jobs/{job_id}")
def job(visit: Here, job_id: JobName) -> Response:
    """Show a job."""
    job = visit.farm.jobs.get(visit.namespace, job_id)
    succeeded, kind = job["state"] == State.SUCCEEDED, job["kind"]
    line = CellLine(
        *(str(job["order"].get("identifier") or job["id"]), "", "", "", ""),
        look=look_of(job["state"]),
        kind=kind or "",
        message=job["message"],
        detail=job["detail"] if job["state"] == State.FAILED else "",
        advice=policy_of(kind).advice if kind else "",
        waiting=_why_it_waits(visit, job["cells"][0]) if job["state"] == State.QUEUED else "",
        phase=job["phase"] or "",
        job=job["id"],
        key=job["key"],
    )
    return _page_of(visit, line, job, shown=succeeded)


@router.get("/ns/{namespace}/jobs/{job_id}/log")
def job_log(
    visit: Here,
    job_id: JobName,
    start: LineNumber = 0,
    part: PartNumber = None,
    q: Text = "",
    attempt: AttemptNumber = 0,
) -> Response:
    """Show a job's log, around its first error or from a line on, or the lines with a text."""
    found = visit.farm.jobs.get(visit.namespace, job_id)
    ended = next((one for one in found["attempts"] if one["number"] == attempt), None)
    return _log_page(
        visit,
        visit.farm.jobs.log(visit.namespace, job_id, attempt),
        found["order"].get("identifier") or job_id,
        f"{BASE}/ns/{visit.namespace}/jobs/{job_id}",
        start=start,
        part=part,
        search=q,
        known=ended["detail"] if ended else found["detail"],
        attempts=[one["number"] for one in found["attempts"] if one["log"]],
        attempt=attempt,
    )


@router.get("/ns/{namespace}/builds/{build_id}/log")
def build_log(
    visit: Here,
    build_id: BuildName,
    q: Text = "",
    text: Text = "",
    first: Annotated[int, Query(ge=1, le=10**9)] = 1,
    part: PartNumber = None,
) -> Response:
    """Search the logs of all attempts of a build's cells, failed ones first, from the `first` cell on.

    Of that cell, so many parts (`part`) are searched already. It ends after `SEARCHED` seconds or as many lines as a
    search shows, and the page leads on from there.
    """
    view = visit.builds.view(visit.namespace, build_id)
    ran = {cell.job or cell.key: cell for cell in view.wanted(CellFilter(text=text)) if cell.job or cell.look == "hit"}
    cells = sorted(ran.values(), key=lambda cell: (cell.look not in ("failed", "expected"), by_number(cell.identifier)))
    found, lines, place, look = list[tuple[CellLine, str, int, LogPage]](), 0, first - 1, _Look(part or 0)
    with _only_search(visit.caller):
        while q and place < len(cells) and not look.is_over and lines < job_view.FOUND:
            before = look.done
            for href, number, log in _logs_of(visit, cells[place]):
                begin = min(before, log.parts)
                before -= begin
                shown = job_view.search(look.parts(log, begin), q, begin)
                lines += len(shown.lines)
                found += [(cells[place], href, number, shown)] if shown.lines else []
            if look.is_cut:
                break
            place, look.done = place + 1, 0
    rest = place < len(cells)
    return visit.page(
        "log_search",
        id=view.build["id"],
        build=view.build,
        search=q,
        text=text,
        found=found,
        lines=lines,
        first=first,
        last=place + look.is_cut,
        total=len(cells),
        after=same_page(visit.request, first=place + 1, part=look.done) if q and rest else "",
        cut=look.is_over and rest,
    )


class _Look:
    """One look through logs, for `SEARCHED` seconds."""

    def __init__(self, done: int) -> None:
        """Of the first cell, so many parts are searched already."""
        self._until = time.monotonic() + SEARCHED
        self.done = done
        self.is_cut = False
        """Whether its time was over before the end of a log."""

    @property
    def is_over(self) -> bool:
        """Whether its time is over."""
        return time.monotonic() >= self._until

    def parts(self, log: JobLog, first: int) -> Iterator[str]:
        """Yield the parts of a log from the `first` on, while there is time."""
        for number in range(first, log.parts):
            if self.is_over:
                self.is_cut = True
                return
            yield log.part(number)
            self.done += 1


def _logs_of(visit: Visit, cell: CellLine) -> Iterator[tuple[str, int, JobLog]]:
    """Yield the logs of a cell that can still be read: where each is, the number of its attempt, and the log."""
    with suppress(NotFound, ArtifactGone):  # The store forgets jobs before reports, and a log may be deleted.
        if not cell.job:
            made = known_sidecar(visit, cell.key)
            yield f"artifacts/{made['key']}/log?", made["attempt"], _artifact_log(visit, made)
            return
        for one in visit.farm.jobs.get(visit.namespace, cell.job)["attempts"]:
            if one["log"] or not one["end"]:
                number = one["number"] if one["end"] else 0
                log = visit.farm.jobs.log(visit.namespace, cell.job, number)
                yield f"jobs/{cell.job}/log?attempt={number}&", one["number"], log


@router.get("/ns/{namespace}/jobs/{job_id}/log/raw")
def raw_job_log(visit: Here, job_id: JobName, attempt: AttemptNumber = 0) -> Response:
    """Return a job's log as text."""
    return StreamingResponse(visit.farm.jobs.log(visit.namespace, job_id, attempt).last(), media_type=PLAIN)


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
    found = build_view.past_of(visit.farm.build_index.of(visit.namespace, identifier, KEPT)).within(until, days)
    return visit.page(
        "history",
        identifier=identifier,
        past=found,
        points=Table(visit.request, found.points[::-1], _POINT_KEYS, "past"),
        marks=Table(visit.request, found.marks[::-1], _MARK_KEYS, "marks"),
        unread="" if reach.is_whole else str(reach),
        drawn=drawing.past(found),
        days=days,
        until=until,
        looked_at=build_view.LOOKED_AT,
        learnt=build_view.LEARNT,
    )


_POINT_KEYS = {"Ended, UTC": "ended", "Median": "latency", "State": "look", "Error": "row.error", "Node": "row.node"}
_MARK_KEYS = {"Since, UTC": "ended", "Change": "change", "Before": "before", "After": "after"}


@router.get("/ns/{namespace}/artifacts/{key}")
def artifact(visit: Here, key: KeyName, use: Text = "") -> Response:
    """Show an artifact, and how to use it: the way that the URL names, else the first."""
    made = known_sidecar(visit, key)
    ways = job_view.ways(made, str(visit.request.base_url).removesuffix("/").removesuffix(BASE))
    named, unread = _refs_of(visit, key)
    asked = [extension.artifact_facts for extension in visit.farm.extensions if extension.artifact_facts]
    return visit.page(
        "artifact",
        made=made,
        named=named,
        unread=unread,
        more=[fact for ask in asked for fact in ask(visit.farm, visit.namespace, made)],
        ways=ways,
        chosen=use if use in {way.slug for way in ways} else ways[0].slug,
        ingredients=list(job_view.ingredients_of(made["spec"])),
    )


def _refs_of(visit: Visit, key: str) -> tuple[list[tuple[str, bool]], int]:
    """Return the refs that name a program now and whether another one has its place, and how many were not read."""
    refs, began, found = Refs(visit.farm.artifacts), time.monotonic(), list[tuple[str, bool]]()
    tags = sorted(refs.readable(visit.caller.namespace), key=by_number)
    for place, tag in enumerate(tags):
        if time.monotonic() - began > PATIENCE:
            return found, len(tags) - place
        with suppress(ArtifactGone):
            snapshot = refs.read(refs.owner(visit.namespace, tag), tag)
            cells = [cell for cell in snapshot["cells"].values() if cell["key"] == key] if snapshot else []
            found += [(tag, all("superseded" in cell for cell in cells))] if cells else []
    return found, 0


@router.get("/ns/{namespace}/artifacts/{key}/log")
def artifact_log(visit: Here, key: KeyName, start: LineNumber = 0, part: PartNumber = None, q: Text = "") -> Response:
    """Show the log of the attempt that made an artifact."""
    made = known_sidecar(visit, key)
    here = f"{BASE}/ns/{visit.namespace}/artifacts/{key}"
    return _log_page(visit, _artifact_log(visit, made), made["identifier"], here, start=start, part=part, search=q)


@router.get("/ns/{namespace}/artifacts/{key}/log/raw")
def raw_artifact_log(visit: Here, key: KeyName) -> Response:
    """Return an artifact's log as text."""
    return StreamingResponse(_artifact_log(visit, known_sidecar(visit, key)).last(), media_type=PLAIN)


@router.get("/ns/{namespace}/artifacts/{key}/files/{name}")
def artifact_file(visit: Here, key: KeyName, name: Annotated[str, Path(max_length=100)]) -> Response:
    """Lead to one of an artifact's files in object storage, to save it."""
    blob = _file_of(known_sidecar(visit, key), name)
    return RedirectResponse(visit.farm.artifacts.presign_get(blob_key(blob["digest"]), filename=blob["path"]), 307)


def _log_page(
    visit: Visit,
    log: JobLog,
    title: str,
    back: str,
    *,
    start: int,
    part: int | None,
    search: str,
    known: str = "",
    attempts: Sequence[int] = (),
    attempt: int = 0,
) -> Response:
    last, look = log.parts - 1, _Look(part or 0)
    part = min(look.done if search or part is not None else last, last)
    if search:
        with _only_search(visit.caller):
            shown = job_view.search(look.parts(log, part), search, part)
    else:
        shown = job_view.page(log.part(part), start=start, known=known)
    which = f"attempt={attempt}" if attempt else ""
    return visit.page(
        "log",
        title=title,
        page=shown,
        stages=job_view.stages(shown),
        search=search,
        back=back,
        here=f"{back}/log?{which}",
        raw=f"{back}/log/raw{'?' if which else ''}{which}",
        attempts=attempts,
        attempt=attempt or (attempts[-1] if attempts else 0),
        part=part,
        parts=log.parts,
        after=same_page(visit.request, part=look.done) if look.is_cut else "",
    )


@contextmanager
def _only_search(caller: Token) -> Iterator[None]:
    """Hold a caller's place for one search of a log: a long one takes a while. Raises QuotaExceeded."""
    who = caller.namespace, caller.name
    if who in _searching:
        raise QuotaExceeded("another search of yours is still reading a log", hint="wait for its answer")
    _searching.add(who)
    try:
        yield
    finally:
        _searching.discard(who)


_searching = set[tuple[str, str]]()  # Who searches a log now, by namespace and name of the token.


def cell_page(visit: Visit, view: ShownBuild, cell: CellLine) -> Response:
    """Return the page of a build's cell: with its job, if the store still has that, and the build's judgement."""
    job: JobView | None = None
    if cell.job:
        with suppress(NotFound):  # The store forgets jobs before reports.
            job = visit.farm.jobs.get(visit.namespace, cell.job)
    joined: CellOfBuild = {"build": view.build["id"], "identifier": cell.identifier}
    cell = cell._replace(
        job=cell.job if job else "",
        detail=cell.detail if cell.look in ("failed", "expected") else "",
        waiting=cell.waiting or (_why_it_waits(visit, joined) if cell.look == "queued" else ""),
        reason="" if cell.look == "hit" else cell.reason,
    )
    news_after = view.position if view.is_open and cell.look in ("queued", "running") else ""
    return _page_of(visit, cell, job, shown=cell.published, build=view.build["id"], position=news_after)


def _why_it_waits(visit: Visit, cell: CellOfBuild) -> str:
    """Return why a cell waits, also of one of thousands: its build's page says it of the first ones."""
    found = visit.farm.build_reader.some_cells(visit.namespace, cell["build"], [cell["identifier"]])
    return found[0]["waiting"] if found else ""


def _page_of(
    visit: Visit, cell: CellLine, job: JobView | None, *, shown: bool, build: str = "", position: str = ""
) -> Response:
    """Return the page of a build's cell, or of a job: then `cell` is what a cell would show, and `build` is empty.

    `shown`: it has a program to show. News of the cell may come after the build's event `position`, if there is one.
    """
    identifier = cell.identifier if "/" in cell.identifier else ""  # A job without one has no history.
    sidecar = sidecar_of(visit, cell.key) if shown else None
    attempts = job_view.attempts_of(job, time.time()) if job else []
    runs = job_view.runs_of(sidecar) if sidecar else []
    baseline = sidecar_of(visit, turns["key"]) if sidecar and (turns := sidecar["measurements"]["against"]) else None
    before = [(f"{name} before", each) for name, each in job_view.runs_of(baseline)] if baseline else []
    known = {entry["cell"]: entry for entry in visit.farm.failures.acknowledged(visit.namespace)} if identifier else {}
    earlier = list(_earlier(visit, identifier, attempts[0])) if attempts and identifier else []
    spec = job["order"].get("spec") if job else sidecar and sidecar["spec"]
    return visit.page(
        "job",
        acknowledged=known.get(identifier),
        may_acknowledge=bool(identifier and cell.kind) and visit.caller.role >= Role.SUBMITTER,
        until=(str(today() + FORTNIGHT), str(today()), str(today() + timedelta(days=LONGEST))),
        cell=cell,
        identifier=identifier,
        job=job,
        build=build,
        position=position,
        attempts=attempts,
        has_error=cell.kind and not cell.is_gate,  # Of a gate the log says nothing.
        sidecar=sidecar,
        moved=json.loads(cell.moved),
        around=json.loads(cell.around),
        timeline=drawing.timeline(attempts, earlier),
        earlier=earlier,
        runs=runs,
        spreads=drawing.spreads([*runs, *before]),
        outputs=job_view.outputs_of(sidecar["verification"]) if sidecar and sidecar["verification"] else [],
        ingredients=list(job_view.ingredients_of(spec)),
    )


def _earlier(visit: Visit, identifier: str, first: AttemptLine) -> Iterator[tuple[str, AttemptLine]]:
    """Yield the builds that compiled a cell before the `first` attempt, newest first, each with what succeeded."""
    past = visit.farm.build_index.of(visit.namespace, identifier, KEPT)
    began = first.row["started_at"] or 0.0
    made = [row for row in past if row["state"] == State.SUCCEEDED and not row["hit"] and row["ended"] < began]
    for row in made[:EARLIER]:
        if sidecar := sidecar_of(visit, row["key"]):
            yield row["build"], job_view.attempt_of(sidecar)


def known_sidecar(visit: Visit, key: str) -> Sidecar:
    """Return the sidecar of an artifact that the caller may read. Raises NotFound."""
    found = sidecar_of(visit, key)
    if found is None:
        raise NotFound(f"no artifact has the key {key}", hint="`farm submit` compiles it")
    return found


def sidecar_of(visit: Visit, key: str) -> Sidecar | None:
    """Return the sidecar of an artifact that the caller may read; None if there is none."""
    return visit.farm.artifacts.lookup(readable(visit.caller.namespace), key)


def _artifact_log(visit: Visit, made: Sidecar) -> JobLog:
    return JobLog.of_blob(visit.farm.artifacts, _file_of(made, "log")["digest"])


def _file_of(made: Sidecar, name: str) -> FileReference:
    if found := dict[str, FileReference | None](**made["blobs"]).get(name):
        return found
    raise NotFound(f"this artifact has no {name}")


# --- what is known about failures ------------------------------------------------------------------------------------


@router.get("/ns/{namespace}/known")
def known(visit: Here, text: Text = "") -> Response:
    """List the acknowledged failures of cells with a text in their names."""
    keys = {"Cell": "cell", "Failure": "kind", "Until": "until", "By": "by"}
    entries = [entry for entry in visit.farm.failures.acknowledged(visit.namespace) if text in entry["cell"]]
    table, may = Table(visit.request, entries, keys), visit.caller.role >= Role.SUBMITTER
    return visit.page("known", table=table, text=text, today=str(today()), may_change=may)


@router.post("/ns/{namespace}/known", dependencies=[OwnForm])
def acknowledge(visit: Here, form: Form) -> Response:
    """Acknowledge a failure, and lead to the list."""
    caller = with_role(Role.SUBMITTER, visit.caller)
    fields = ("cell", "kind", "reason", "until", "link")
    cell, kind, reason, until, link = (form.get(name, "").strip() for name in fields)
    if not cell or not reason or len(form.get("cell", "")) > 500 or len(reason) > 1000:
        raise UsageError("a cell and a reason are needed", hint="go back, and say what is known about it")
    if link and not link.startswith(("https://", "http://")):
        raise UsageError("the link has to begin with https://", hint="go back, and write the issue's URL")
    link, by, at = link[:500], caller.name, time.time()
    entry = Acknowledged(cell=cell, kind=kind, reason=reason, until=until, link=link, by=by, at=at)
    visit.farm.failures.acknowledge(caller.namespace, entry)
    return RedirectResponse(f"{BASE}/ns/{caller.namespace}/known#{quote(cell)}", 303)


@router.post("/ns/{namespace}/known/forget", dependencies=[OwnForm])
def forget(visit: Here, form: Form) -> Response:
    """Expect nothing of a cell any more, and lead to the list."""
    caller = with_role(Role.SUBMITTER, visit.caller)
    visit.farm.failures.forget(caller.namespace, form.get("cell", ""))
    return RedirectResponse(f"{BASE}/ns/{caller.namespace}/known", 303)


# --- a build over time: as a trace for Perfetto, and as a page --------------------------------------------------------

traces = APIRouter(tags=["builds"])

MOST = 2000  # Jobs of a build that are looked at, in the order of its manifest.
WAITED = 0.1  # Shorter waits (seconds) are not listed.
DETAILED = 300  # More attempts are drawn without their phases.


@traces.get("/builds/{build_id}/trace.json")
def trace(build_id: BuildReference, caller: ReaderCaller, farm: FarmDep) -> dict[str, Any]:
    """Return where the time of a build went, in the Chrome trace event format: for ui.perfetto.dev.

    Workers are processes, their slots threads, attempts and phases slices, and waiting jobs a counter. It has what the
    store still has of the build's jobs.
    """
    found = farm.build_reader.resolve(caller.namespace, build_id)
    over_time, left_out = _timeline(farm, caller.namespace, found)
    return trace_events(over_time, found, left_out)


@router.get("/ns/{namespace}/builds/{build_id}/trace.json")
def saved(visit: Here, build_id: BuildName) -> Response:
    """Return the same to a page, which has no token of the API."""
    return JSONResponse(trace(build_id, visit.caller, visit.farm))


@router.get("/ns/{namespace}/builds/{build_id}/timeline")
def drawn(visit: Here, build_id: BuildName) -> Response:
    """Show the attempts of a build on workers and slots over time."""
    view = visit.builds.view(visit.namespace, build_id)
    found, left_out = _timeline(visit.farm, visit.namespace, view.build["id"])
    whole = found.seconds or 1.0
    spans = [span for track in found.tracks for span in track.spans]
    return visit.page(
        "timeline",
        id=view.build["id"],
        build=view.build,
        found=found,
        is_open=view.is_open,
        position=view.position,
        left_out=left_out,
        detailed=len(spans) <= DETAILED,
        whole=whole,
        spans=spans,
        lost=[span for span in spans if span.attempt.failed],
        longest=sorted(spans, key=lambda span: -(span.attempt.seconds or 0.0))[:10],
        waits=sorted((span for span in spans if span.waited >= WAITED), key=lambda span: -span.waited)[:10],
        most_waiting=max((count for _, count in found.queue), default=0),
        ticks=steps(whole, whole, duration),
    )


def _timeline(farm: Farm, namespace: str, build_id: str) -> tuple[BuildTimeline, int]:
    """Return a build over time, and how many of its jobs that leaves out."""
    jobs = list(dict.fromkeys(name for cell in farm.build_reader.cells(namespace, build_id) if (name := cell["job"])))
    found = [job for name in jobs[:MOST] if (job := farm.store.jobs.get(name)) and job["namespace"] == namespace]
    return timeline(found, time.time()), len(jobs[MOST:])

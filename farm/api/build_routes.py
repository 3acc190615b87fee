"""Builds and cells over HTTP: plan, submit, read, follow, cancel; jobs, history, failures that were acknowledged."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Annotated, TypeVar

import anyio
from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic_core import to_json

from farm.api import schemas
from farm.api.gate import Admin, FarmDep, ReaderCaller, Submitter
from farm.app import Farm
from farm.artifacts.tokens import Token
from farm.builds.known_failures import Acknowledged
from farm.builds.reading import BuildChanges
from farm.errors import QuotaExceeded, StoreUnavailable, UsageError
from farm.jobs.rows import BuildEvent, CancelledCells, JobView, Listed, ReproductionDocument
from farm.jobs.state import State
from farm.matrix.planned import ShownPlan, SubmissionDocument
from farm.results.report import BuildChange, BuildView, JudgedCell, PastCell, Rebuilt, Report

router = APIRouter(tags=["builds"])

EVENT_WAIT = 2.0  # Seconds that one read of a build's events waits in the store.

AT_ONCE, SECONDS_APART = 16.0, 0.25
"""So many reads of a build's events follow one another at once; from then on news of so long travels together.

Each read costs the same however few events it finds. A build of one cell ends within the first ones.
"""

MANY = 100  # Who gets so many events at once lags behind, and does not wait.
LOOK_EVERY = 8  # Waits without news between two looks at the build itself, which cost more than its events.
WATCHERS = 256  # Builds followed at once, in threads of their own, so that other requests never queue behind them.
STREAMS = 256  # Builds that one token may follow at once: each takes a connection for as long as its build lasts.
NO_END = 1 << 30

Row = TypeVar("Row")

BuildReference = Annotated[
    str, Path(pattern=schemas.BUILD_REFERENCE, description="A build's id, a unique start of it, or `@latest`.")
]


@router.post("/plan", response_model=ShownPlan)
def plan(submission: SubmissionDocument, caller: Submitter, farm: FarmDep) -> Response:
    """Return what a submission would do: cells, hits, misses and why, and missing blobs. Changes nothing.

    This server keeps the submission for a quarter of an hour: `POST /v1/builds/{build_id}` accepts it.
    """
    planned = farm.builds.plan(caller.namespace, submission, by=caller.name)
    # Of a large matrix, to check our own answer would take as long as to plan it, and its memory once more.
    return Response(to_json(planned), media_type="application/json")


@router.post("/builds", status_code=201)
def submit(
    submission: SubmissionDocument,
    caller: Submitter,
    farm: FarmDep,
    request: Request,
    response: Response,
    idempotency_key: Annotated[str | None, Header(description="The build id again, for clients that send one.")] = None,
) -> BuildView:
    """Accept a build. The same build id again is answered with the build that is there."""
    if idempotency_key not in (None, submission["build_id"]):
        raise UsageError("Idempotency-Key differs from build_id", hint="leave it out, or send the build id")
    build = farm.builds.submit(caller.namespace, submission, by=caller.name, max_cells=caller.max_cells)
    return _created(build, request, response)


@router.post("/builds/{build_id}", status_code=201)
def submit_planned(
    build_id: Annotated[str, Path(pattern=schemas.BUILD_ID)],
    kept: Annotated[str, Query(pattern=schemas.DIGEST, description="`kept` of the plan, or of InputsMissing.")],
    caller: Submitter,
    farm: FarmDep,
    request: Request,
    response: Response,
) -> BuildView:
    """Accept the build of a submission that this token has sent already, to be planned or without all of its inputs.

    404 of type `NotPlanned`: this server does not keep it, send the whole submission to `POST /v1/builds`.
    """
    build = farm.builds.submit_planned(caller.namespace, build_id, kept, by=caller.name, max_cells=caller.max_cells)
    return _created(build, request, response)


def _created(build: BuildView, request: Request, response: Response) -> BuildView:
    response.headers["Location"] = request.url_for("get_build", build_id=build["id"]).path
    return build


@router.get("/builds")
def list_builds(
    caller: ReaderCaller,
    farm: FarmDep,
    limit: Annotated[int, Query(ge=1, le=1000)] = 50,
    label: Annotated[
        str, Query(max_length=400, description="Only builds with it: KEY=VALUE; of a commit its start is enough.")
    ] = "",
    after: Annotated[str, Query(max_length=64, description="Go on after this: `next` of the answer before.")] = "",
) -> Listed[BuildView]:
    """List the newest builds of the namespace, the newest first."""
    return _page_of_rows(farm.build_reader.list(caller.namespace, NO_END, label=label), itemgetter("id"), after, limit)


@router.get("/builds/{build_id}")
def get_build(build_id: BuildReference, caller: ReaderCaller, farm: FarmDep) -> BuildView:
    """Return a build: its state, counts and verdict."""
    return farm.build_reader.get(caller.namespace, build_id)


@router.get("/builds/{build_id}/cells")
def cells(
    build_id: BuildReference,
    caller: ReaderCaller,
    farm: FarmDep,
    state: Annotated[list[State] | None, Query(description="Only cells in these states.")] = None,
    limit: Annotated[int | None, Query(ge=1, le=10_000, description="At most so many; else all.")] = None,
    after: Annotated[str, Query(max_length=500, description="Go on after this: `next` of the answer before.")] = "",
) -> Listed[JudgedCell]:
    """Return a build's cells, judged, in the order of its manifest."""
    found = farm.build_reader.cells(caller.namespace, build_id)
    wanted = [cell for cell in found if state is None or cell["state"] in state]
    return _page_of_rows(wanted, itemgetter("identifier"), after, limit or NO_END)


@router.post("/builds/{build_id}/cancel")
def cancel(build_id: BuildReference, caller: Submitter, farm: FarmDep) -> CancelledCells:
    """End every cell of a build that has not ended. Repeating it is harmless."""
    return farm.builds.cancel(caller.namespace, build_id)


@router.post("/builds/{build_id}/pause")
def pause(build_id: BuildReference, caller: Submitter, farm: FarmDep) -> BuildView:
    """Hand out no more jobs of a build; running jobs go on. Repeating it is harmless."""
    return farm.builds.pause(caller.namespace, build_id, paused=True)


@router.post("/builds/{build_id}/resume")
def resume(build_id: BuildReference, caller: Submitter, farm: FarmDep) -> BuildView:
    """Hand out the jobs of a paused build again."""
    return farm.builds.pause(caller.namespace, build_id, paused=False)


@router.post("/builds/{build_id}/retry/plan")
def plan_retry(build_id: BuildReference, retry: schemas.Retry, caller: Submitter, farm: FarmDep) -> ShownPlan:
    """Return what a retry would do. Changes nothing."""
    return farm.builds.plan_retry(caller.namespace, build_id, retry.build_id, failed=retry.failed, only=retry.only)


@router.post("/builds/{build_id}/retry", status_code=201)
def retry(build_id: BuildReference, retry: schemas.Retry, caller: Submitter, farm: FarmDep) -> BuildView:
    """Accept a build with an ended build's cells as they were planned. Repeating it is harmless."""
    return farm.builds.retry(
        caller.namespace, build_id, retry.build_id,
        failed=retry.failed, only=retry.only, by=caller.name, max_cells=caller.max_cells,
    )  # fmt: skip


@router.get("/builds/{build_id}/report", response_model=schemas.Document)
def report(build_id: BuildReference, caller: ReaderCaller, farm: FarmDep) -> Report:
    """Return a build with its cells as one document. When the build has ended, `report.json` in storage holds it."""
    return farm.build_reader.report(caller.namespace, build_id)


@router.get("/builds/{build_id}/reproduction", response_model=schemas.Document)
def reproduction(
    build_id: BuildReference,
    caller: ReaderCaller,
    farm: FarmDep,
    cell: Annotated[str, Query(description="The cell's identifier.", max_length=500)],
) -> ReproductionDocument:
    """Return all that is needed to rerun a cell's last attempt elsewhere, even if its job is no longer known."""
    return farm.build_reader.reproduction_of_cell(caller.namespace, build_id, cell)


def _known_build(build_id: BuildReference, caller: ReaderCaller, farm: FarmDep) -> str:
    """Resolve the build before the stream begins: after that, an error has no status to travel in."""
    return farm.build_reader.resolve(caller.namespace, build_id)


@router.get("/builds/{build_id}/events", response_class=StreamingResponse, responses=schemas.text("text/event-stream"))
async def events(
    build_id: Annotated[str, Depends(_known_build)],
    caller: ReaderCaller,
    farm: FarmDep,
    request: Request,
    last_event_id: Annotated[str | None, Header(max_length=128)] = None,
    cells: Annotated[bool, Query(description="Send the cells that changed, as they are now.")] = False,
) -> StreamingResponse:
    """Follow a build as server-sent events, from its beginning or from `Last-Event-ID`.

    Every event has an `id:` to go on from. `event: reset` means that the position is unknown to the store, so read the
    state; `event: end` carries the build when its report is written, and is the last. With `cells`, the stream begins
    with a `reset` unless there is a position, and each `event: cells` has the cells that changed.
    """
    changes = BuildChanges(farm.build_reader, caller.namespace, build_id, last_event_id) if cells else None
    watchers = request.app.state.watchers
    return streamed(request, caller, _events(farm, caller.namespace, build_id, last_event_id, watchers, changes))


def streamed(request: Request, caller: Token, events: AsyncIterator[str]) -> StreamingResponse:
    """Return an answer that goes on as long as there are events. Raises QuotaExceeded for too many of one token."""
    streams: Counter[str] = request.app.state.streams
    # The generator counts the stream, but once it runs it can no longer answer with an error.
    if streams[caller.name] >= STREAMS:
        raise QuotaExceeded(f"this token follows {STREAMS} builds already", hint="follow fewer of them at once")

    async def counted() -> AsyncIterator[str]:
        streams[caller.name] += 1
        try:
            async for text in events:
                yield text
        finally:
            streams[caller.name] -= 1

    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(counted(), media_type="text/event-stream", headers=headers)


async def _events(
    farm: Farm,
    namespace: str,
    build_id: str,
    position: str | None,
    watchers: anyio.CapacityLimiter,
    changes: BuildChanges | None,
) -> AsyncIterator[str]:
    """Yield a build's events in the wire format, and something at least every few seconds."""
    in_thread = partial(anyio.to_thread.run_sync, limiter=watchers, abandon_on_cancel=True)
    ended, idle = False, 0
    spare, then = AT_ONCE, time.monotonic()
    while not ended:
        items: Sequence[BuildEvent | BuildChange]
        if changes:
            items = await in_thread(lambda: list(changes.after(EVENT_WAIT)))
        else:
            wait = round(EVENT_WAIT * 1000)
            items = (await in_thread(partial(farm.store.events.read, build_id, position, wait)))["items"]
        texts = []
        for item in items:
            position = item.get("id") or position
            ended = item["type"] == "build" and item.get("state") == "reported"
            place = f"id: {item['id']}\n" if item.get("id") else ""
            texts.append(f"event: {item['type']}\n{place}data: {json.dumps(item)}\n\n")
        # Without news a comment: it keeps proxies from closing the line, and shows us that the other end is gone.
        yield "".join(texts) or ":\n\n"
        if ended or any(item["type"] == "reset" for item in items) or (not items and idle % LOOK_EVERY == 0):
            # Without news look at the build itself: its events may be gone while its report is there.
            build = await in_thread(partial(farm.build_reader.get, namespace, build_id))
            ended = build["state"] == "reported"
            if ended:
                yield f"event: end\ndata: {json.dumps(build)}\n\n"
        idle += not items
        then, since = time.monotonic(), then
        # Never below -1: who has caught up with thousands of events waits no longer than others.
        spare = max(min(AT_ONCE, spare + (then - since) / SECONDS_APART) - 1, -1)
        if spare < 0 and len(items) < MANY and not ended:
            await anyio.sleep(-spare * SECONDS_APART)


def _page_of_rows(rows: Sequence[Row], name: Callable[[Row], str], after: str, limit: int) -> Listed[Row]:
    """Return up to `limit` rows after the one whose `name` is `after`. Raises UsageError if there is none.

    The place is the name of a row, so rows that come in front meanwhile move nothing.
    """
    start = 0
    if after:
        start = next((place for place, row in enumerate(rows, 1) if name(row) == after), -1)
        if start < 0:
            raise UsageError(f"the list has no {after[:100]} any more", hint="begin again without `after`")
    shown = list(rows[start : start + limit])
    more = start + limit < len(rows)
    return {"items": shown, "next": name(shown[-1]) if more else None}


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


@job_router.get("/jobs/{job_id}/reproduction", name="reproduction", response_model=schemas.Document)
def job_reproduction(job_id: JobId, caller: ReaderCaller, farm: FarmDep) -> ReproductionDocument:
    """Return all that is needed to rerun a job's last attempt elsewhere: work order, limits, inputs by digest."""
    return farm.jobs.reproduction(caller.namespace, job_id)


history_router = APIRouter(tags=["history"])

CellName = Annotated[str, Query(description="A cell's identifier.", min_length=1, max_length=500)]


@history_router.get("/history")
def history(
    caller: ReaderCaller, farm: FarmDep, cell: CellName, limit: Annotated[int, Query(ge=1, le=500)] = 50
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


@acknowledged_router.get("/acknowledged")
def acknowledged(caller: ReaderCaller, farm: FarmDep) -> Listed[Acknowledged]:
    """List the failures that somebody acknowledged; those that end first come first."""
    return {"items": farm.failures.acknowledged(caller.namespace)}


@acknowledged_router.put("/acknowledged")
def acknowledge(cell: CellName, failure: schemas.KnownFailure, caller: Submitter, farm: FarmDep) -> Acknowledged:
    """Expect this failure of a cell in the builds submitted from now on, until a day. Repeating it is harmless."""
    return farm.failures.acknowledge(caller.namespace, {**failure, "cell": cell, "by": caller.name, "at": time.time()})


@acknowledged_router.delete("/acknowledged", status_code=204)
def forget(cell: CellName, caller: Submitter, farm: FarmDep) -> None:
    """Expect nothing of a cell any more."""
    farm.failures.forget(caller.namespace, cell)

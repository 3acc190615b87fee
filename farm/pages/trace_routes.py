"""A build's time line over HTTP: as a trace for Perfetto, and as a page."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from farm.api.auth import FarmDep, ReaderCaller
from farm.api.build_routes import BuildReference
from farm.app import Farm
from farm.pages.drawing import steps
from farm.pages.page_answers import BuildName, Here
from farm.pages.quantities import duration
from farm.pages.spans import BuildTimeline, timeline, trace_events

router = APIRouter(tags=["builds"])
pages = APIRouter()

MOST = 2000
"""Jobs of a build that are looked at, in the order of its manifest."""

WAITED = 0.1
"""Shorter waits (seconds) are not listed."""
DETAILED = 300
"""More attempts are drawn without their phases."""


@router.get("/builds/{build_id}/trace.json")
def trace(build_id: BuildReference, caller: ReaderCaller, farm: FarmDep) -> dict[str, Any]:
    """Return where the time of a build went, in the Chrome trace event format: for ui.perfetto.dev.

    Workers are processes, their slots threads, attempts and phases slices, and waiting jobs a counter. It has what the
    store still has of the build's jobs.
    """
    found = farm.build_reader.resolve(caller.namespace, build_id)
    jobs = _jobs(farm, caller.namespace, found)
    document = trace_events(_timeline(farm, caller.namespace, jobs), found)
    document["otherData"]["left_out"] = len(jobs[MOST:])
    return document


@pages.get("/ns/{namespace}/builds/{build_id}/timeline")
def drawn(visit: Here, build_id: BuildName) -> Response:
    """Show the attempts of a build on workers and slots over time."""
    view = visit.builds.view(visit.namespace, build_id)
    jobs = _jobs(visit.farm, visit.namespace, view.build["id"])
    found = _timeline(visit.farm, visit.namespace, jobs)
    whole = found.seconds or 1.0
    spans = [span for track in found.tracks for span in track.spans]
    return visit.page(
        "timeline",
        section="builds",
        id=view.build["id"],
        build=view.build,
        found=found,
        is_open=view.is_open,
        position=view.position,
        left_out=len(jobs[MOST:]),
        detailed=len(spans) <= DETAILED,
        whole=whole,
        spans=spans,
        lost=[span for span in spans if span.attempt.failed],
        longest=sorted(spans, key=lambda span: span.start - span.end)[:10],
        waits=sorted((span for span in spans if span.waited >= WAITED), key=lambda span: -span.waited)[:10],
        most_waiting=max((count for _, count in found.queue), default=0),
        ticks=steps(whole, whole, duration),
    )


def _jobs(farm: Farm, namespace: str, build_id: str) -> list[str]:
    return list(dict.fromkeys(name for cell in farm.build_reader.cells(namespace, build_id) if (name := cell["job"])))


def _timeline(farm: Farm, namespace: str, jobs: Sequence[str]) -> BuildTimeline:
    found = [job for name in jobs[:MOST] if (job := farm.store.jobs.get(name)) and job["namespace"] == namespace]
    return timeline(found, time.time())

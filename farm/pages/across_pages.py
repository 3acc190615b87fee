"""Pages over several builds: builds next to each other, and what is most important now."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Annotated, NamedTuple

from fastapi import APIRouter, Query
from fastapi.responses import Response
from markupsafe import Markup

from farm.api.schemas import BUILD_REFERENCE
from farm.builds.build_index import DayOfBuilds
from farm.builds.known_failures import today
from farm.builds.reading import is_aside
from farm.builds.troubles import troubles
from farm.errors import NotFound
from farm.jobs.rows import PoolView
from farm.pages.build_view import PAGE
from farm.pages.comparison import MOST, ComparedBuilds
from farm.pages.drawing import PlotAxis, PlotPoint, plot
from farm.pages.page_answers import BASE, Here, Text, Visit, same_page
from farm.pages.page_reading import PATIENCE, StillReading
from farm.pages.quantities import duration, moment, part, plural
from farm.results.lines import BAND, Look
from farm.results.report import BuildView

router = APIRouter()

NAMES = 12
"""Names of builds on the page of what is important now."""
DOTS = 20
"""The last builds of a name, each a sign."""
MONTH = timedelta(days=30)
SOON = timedelta(days=3)
"""Before its last day, in which an acknowledged failure is named."""

BuildReference = Annotated[str, Query(pattern=BUILD_REFERENCE)]


class News(NamedTuple):
    """The single most important thing in a namespace now."""

    look: Look
    text: str
    href: str = ""
    link: str = ""


class NameLine(NamedTuple):
    """The newest build of one name, and what it made worse."""

    build: BuildView
    changes: ComparedBuilds | None
    builds: Sequence[BuildView]
    """The last builds of this name that ended, the oldest first."""


@router.get("/ns/{namespace}/across")
def builds_across(
    visit: Here,
    build: Annotated[list[BuildReference] | None, Query(max_length=MOST)] = None,
    name: Text = "",
    last: Annotated[int, Query(ge=2, le=MOST)] = 8,
    text: Text = "",
    everything: Annotated[str, Query(alias="all", max_length=10)] = "",
) -> Response:
    """Show builds next to each other: those that are named, or the last ones of a name."""
    wanted = list(build or ())
    if not wanted:
        known = [row for row in visit.farm.build_reader.list(visit.namespace, 1000) if not is_aside(row)]
        wanted = [row["id"] for row in known if row["name"] == name][:last]
    if not wanted:
        raise NotFound(f"no build is called {name}" if name else "no builds are named")
    found = visit.builds.across(visit.namespace, wanted)
    rows = found.found(text, everything=bool(everything))
    shown = PAGE // len(found.builds)
    names = {build["name"] for build in found.builds}
    return visit.page(
        "across",
        section="builds",
        title=f"Builds of {names.pop()}" if len(names) == 1 else "Builds compared",
        found=found,
        rows=found.rows(rows[:shown]),
        more=len(rows[shown:]),
        everything=bool(everything),
        other=same_page(visit.request, all="" if everything else "yes"),
        text=text,
        band=BAND,
    )


@router.get("/ns/{namespace}")
@router.get("/ns/{namespace}/")
def now(visit: Here) -> Response:
    """Show the single most important thing now, and then what else is worth a look."""
    known = visit.farm.build_reader.list(visit.namespace, 1000)
    lines = list(_lines(visit, known))
    open_ones = [build for build in known if build["state"] != "reported"]
    days = visit.farm.build_index.days(visit.namespace, time.time() - MONTH.total_seconds())
    live, pools = visit.farm.store.workers.list(""), visit.farm.store.workers.pools()
    entries = visit.farm.acknowledged.list(visit.namespace)
    return visit.page(
        "now",
        section="now",
        news=news_of(visit, known),
        lines=lines,
        open=open_ones[:NAMES],
        ending=[entry for entry in entries if entry["until"] <= str(today() + SOON)],
        entries=len(entries),
        pools=[pool for pool in pools if pool["waiting"]],
        days=days,
        unread=len(visit.farm.build_index.unread(visit.namespace) - {build["id"] for build in open_ones}),
        trends=_trends(days, f"{BASE}/ns/{visit.namespace}/builds") if len(days) > 1 else [],
        waiting=sum(pool["waiting"] for pool in pools),
        workers=len(live),
        slots=sum(worker["slots"] for worker in live),
        troubles=troubles(visit.farm.store, visit.farm.settings),
        fenced=sorted({worker["node"] for worker in live if worker["fenced"]}),
    )


def _lines(visit: Visit, known: Sequence[BuildView]) -> Iterator[NameLine]:
    ended: dict[str, list[BuildView]] = {}
    for build in known:
        if build["state"] == "reported" and not is_aside(build):
            ended.setdefault(build["name"], []).append(build)
    began = time.monotonic()
    for build in _newest(known)[:NAMES]:
        changes = None
        if time.monotonic() - began < PATIENCE:
            with suppress(StillReading, NotFound):
                changes = visit.builds.changes(visit.namespace, visit.builds.view(visit.namespace, build["id"]))
        yield NameLine(build, changes, ended[build["name"]][:DOTS][::-1])


def _trends(days: Sequence[DayOfBuilds], href: str) -> list[Markup]:
    """Return the hit rate, and what hits saved, by day."""

    def drawn(name: str, unit: Callable[[float], str], values: Iterable[float]) -> Markup:
        first = days[0].day
        points = []
        for each, value in zip(days, values, strict=True):
            text = f"{moment(each.day)[5:10]}: {unit(value)}, {plural(each.cells, 'cell')}"
            points.append(PlotPoint(href, text, "", (each.day - first) / 86_400, value))
        ticks = [point.x for point in points][:: -(-len(points) // 4)]
        across = PlotAxis("day, UTC", lambda at: moment(first + at * 86_400)[5:10], ticks=ticks)
        return plot(f"{name} by day", points, across, PlotAxis(name, unit))

    return [
        drawn("hit rate", part, (each.hits / each.cells for each in days)),
        drawn("compile time that hits saved", duration, (each.saved for each in days)),
    ]


def _newest(builds: Iterable[BuildView]) -> list[BuildView]:
    """Return the newest build of each name that ended; `builds` has the newest first."""
    newest: dict[str, BuildView] = {}
    for build in builds:
        if build["state"] == "reported" and not is_aside(build):
            newest.setdefault(build["name"], build)
    return list(newest.values())


def stuck_pools(pools: Iterable[PoolView]) -> list[PoolView]:
    """Return the pools with jobs that nobody takes, though nobody paused them."""
    return [pool for pool in pools if pool["waiting"] and not pool["slots"] and not pool["paused"]]


def news_of(visit: Visit, builds: Sequence[BuildView]) -> News | None:
    """Return the single most important thing: work that nobody takes, a red build, or that all is well."""
    home = f"{BASE}/ns/{visit.namespace}"
    if stuck := stuck_pools(visit.farm.store.workers.pools()):
        return News("failed", f"No worker takes jobs of {stuck[0]['name']} now:", f"{home}/workers", "why")
    newest = _newest(builds)
    red = [(build, verdict) for build in newest if (verdict := build["verdict"]) and verdict["exit_code"]]
    if red:
        build, verdict = red[0]
        more = f", and {len(red) - 1} more" if len(red) > 1 else ""
        return News(
            "failed", f"{build['name']}{more}: {verdict['text']}.", f"{home}/builds/{build['id']}", "Look at it"
        )
    running = [build for build in builds if build["state"] != "reported"]
    if running:
        text = f"{running[0]['name']} is under way." if len(running) == 1 else f"{plural(len(running), 'build')} run."
        return News("running", text, f"{home}/builds/{running[0]['id']}", "Watch it")
    return News("compiled", "The newest build of every name passed.") if newest else None

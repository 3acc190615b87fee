"""Pages of builds: the list, a build, its live news, its cells, two builds compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Query
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import RedirectResponse, Response

from farm.api.build_routes import streamed
from farm.artifacts.sidecar import facts
from farm.errors import NotFound
from farm.pages.across_pages import news_of
from farm.pages.build_view import METRICS, PAGE, SIGNS, WEAK, CellFilter, ShownBuild, figures, grouped, matrix
from farm.pages.comparison import Pair
from farm.pages.event_hub import EventHub
from farm.pages.job_pages import cell_page, job_page, sidecar_of
from farm.pages.page_answers import BASE, BuildName, Here, Keys, Table, Text, Visit, same_page
from farm.pages.tradeoff_view import Tradeoff, of_cells, sweeps
from farm.results.gates import Movement, moved_latency
from farm.results.lines import BAND, CellLine
from farm.results.report import BuildView
from farm.results.surroundings import between
from farm.spec import changes
from farm.units import by_number, named, together

router = APIRouter()

BUILDS = 50
"""Builds on one page."""
FAILURES = 10
RUNNING = 50
COMPARED = 100
"""Rows of one sort of difference."""
EXPLAINED = 20
"""Differences for which both sidecars are read, to say what changed."""
GROUPED = 300
"""More cells are also shown by model."""
MODELS = 100
"""Models on one page."""
LISTED = 250
"""Cells on one page if each has a row."""
NARROWING = ("text", "look", "precision", "by", "sort.cells")
"""What stays when a model and a target are chosen."""
TRADEOFFS = 8
"""Targets and shapes of a model that are drawn, and models that can be chosen."""
EARLIER = 8
"""Builds of the same name before, to compare with."""


class BuildFilter(NamedTuple):
    """The filters of the list of builds."""

    name: str = ""
    state: str = ""
    by: str = ""
    label: str = ""

    @property
    def is_set(self) -> bool:
        """Whether anything is filtered."""
        return any(self)

    def takes(self, build: BuildView) -> bool:
        """Whether a build passes."""
        key, _, value = self.label.partition("=")
        exit_code = _exit_code(build)
        return (
            (not self.name or self.name in build["name"])
            and (not self.by or build["created_by"] == self.by)
            and (not key or (key in build["labels"] and value in ("", build["labels"][key])))
            and (
                self.state not in ("open", "passed", "failed")
                or self.state == ("open" if build["state"] != "reported" else "failed" if exit_code else "passed")
            )
        )


@router.get("/ns/{namespace}/builds")
def builds(
    visit: Here,
    name: Text = "",
    state: Text = "",
    by: Text = "",
    label: Text = "",
) -> Response:
    """List the builds that pass the filters, newest first unless the URL sorts them."""
    wanted = BuildFilter(name, state, by, label)
    known = visit.farm.build_reader.list(visit.namespace, 10_000)
    table = Table(visit.request, [build for build in known if wanted.takes(build)], _BUILD_KEYS, size=BUILDS)
    return visit.page(
        "builds",
        section="builds",
        wanted=wanted,
        names=sorted({build["name"] for build in known}, key=by_number)[:200],
        table=table,
        parts_of=_parts,
        news=None if wanted.is_set or table.before else news_of(visit, known),
    )


@router.get("/ns/{namespace}/builds/{build_id}")
def build(
    visit: Here,
    build_id: BuildName,
    text: Text = "",
    look: Annotated[list[str] | None, Query(max_length=20)] = None,
    model: Text = "",
    target: Text = "",
    precision: Text = "",
    by: Text = "latency",
) -> Response:
    """Show a build; its filters, and what its tables begin with, are in the URL.

    More cells than fit on a page are counted by model and target, unless a model is chosen or they are listed.
    """
    reading = visit.builds
    view = reading.view(visit.namespace, build_id)
    wanted = CellFilter(tuple(each for each in look or () if each in SIGNS), model, target, precision, text)
    found = view.wanted(wanted)
    by = by if by in METRICS else "latency"
    listed = by == "list"
    counted = not model and len(found) > PAGE and not listed
    table = Table(visit.request, found, _CELL_KEYS if listed else {}, "cells", LISTED if listed else PAGE)
    shown = [] if counted else table.rows
    of_models = {cell.model for cell in shown}
    groups = (grouped(found) if wanted else view.groups) if len(found) > GROUPED and not model else []
    changed = reading.changes(visit.namespace, view)

    def link(cell: str) -> str:
        return f"{BASE}/ns/{visit.namespace}/builds/{view.build['id']}/cells/{cell}"

    ships, to_ship = _to_ship(found, link)
    pairs = [*changed.slower, *changed.faster] if changed else []
    return visit.page(
        "build",
        section="builds",
        id=view.build["id"],
        build=view.build,
        view=view,
        verdict_look=_verdict_look(view),
        changes=changed,
        earlier=reading.earlier(visit.namespace, view)[:EARLIER],
        band=BAND,
        slowdowns={pair.after.identifier: pair.change for pair in pairs} if by == "latency" else {},
        by=by,
        metrics={name: same_page(visit.request, by=name, **{"first.cells": "", "sort.cells": ""}) for name in METRICS},
        measured=METRICS[by][0],
        weak=[WEAK[each] for each in METRICS[by][1].split()],
        figures={} if listed else figures([cell for cell in view.cells if cell.model in of_models], by),
        wanted=wanted,
        table=table,
        matrix=matrix([] if listed else shown),
        ships=ships,
        to_ship=to_ship,
        swept=sweeps(found, link),
        tradeoffs_shown=TRADEOFFS,
        groups=Table(visit.request, groups, name="models", size=MODELS),
        counted=counted,
        listed=listed,
        narrowing="".join(
            f"&{urlencode([pair])}" for pair in visit.request.query_params.multi_items() if pair[0] in NARROWING
        ),
        page_size=PAGE,
        shown_failures=FAILURES,
        known={entry["cell"]: entry for entry in visit.farm.acknowledged.list(visit.namespace)} if view.failed else {},
        shown_running=RUNNING,
    )


@router.get("/ns/{namespace}/builds/{build_id}/events")
async def events(
    visit: Here,
    build_id: BuildName,
    after: Annotated[str, Query(max_length=128)] = "",
) -> Response:
    """Follow a build: how its changed cells are now, as server-sent events with ids."""
    whole = await run_in_threadpool(visit.farm.build_reader.resolve, visit.namespace, build_id)
    position = visit.request.headers.get("last-event-id", "")[:128] or after
    hub: EventHub = visit.request.app.state.hub
    news = hub.follow(visit.farm, visit.builds, visit.namespace, whole, position)
    return streamed(visit.request, visit.caller, news)


@router.get("/ns/{namespace}/builds/{build_id}/cells/{identifier:path}")
def cell(visit: Here, build_id: BuildName, identifier: str) -> Response:
    """Show one cell of a build."""
    view = visit.builds.view(visit.namespace, build_id)
    line = view.by_identifier.get(identifier)
    if line is None:
        raise NotFound(f"no cell {identifier[:300]} in build {view.build['id']}")
    return job_page(visit, cell_page(visit, view, line))


@router.get("/ns/{namespace}/compare")
def chosen(visit: Here, left: Text, right: Text, third: Text = "") -> Response:
    """Lead from the form to the URL of a comparison of two builds, or of three."""
    if third:
        query = urlencode([("build", each) for each in (third, left, right)])
        return RedirectResponse(f"{BASE}/ns/{visit.namespace}/across?{query}", 303)
    return RedirectResponse(f"{BASE}/ns/{visit.namespace}/compare/{quote(left)}/{quote(right)}", 303)


@router.get("/ns/{namespace}/compare/{left}/{right}")
def compared(visit: Here, left: BuildName, right: BuildName) -> Response:
    """Compare two builds."""
    reading = visit.builds
    before, after = (reading.view(visit.namespace, each) for each in (left, right))
    found = reading.compared(before, after)
    explained = [*found.newly_failed, *found.slower, *found.fixed, *found.faster][:EXPLAINED]
    reasons = {pair.after.identifier: _explained(visit, pair) for pair in explained}
    around = together((cell, text) for cell, (_, texts, _) in reasons.items() for text in texts)
    return visit.page(
        "compare",
        section="builds",
        left=before,
        right=after,
        changes=found,
        reasons=reasons,
        around=[(text, named(cells)) for cells, text in around],
        band=BAND,
        limit=COMPARED,
    )


def _to_ship(cells: Sequence[CellLine], link: Callable[[str], str]) -> tuple[list[str], list[Tradeoff]]:
    """Return the first models with several programs, and what could be shipped of the first with measured ones."""
    models: dict[str, list[CellLine]] = {}
    for cell in cells:
        models.setdefault(cell.model, []).append(cell)
    some = [name for name, each in models.items() if len({cell.precision for cell in each}) > 1][:TRADEOFFS]
    found = next((found for name in some if (found := of_cells(models[name], link))), [])
    return some, found


def _parts(build: BuildView) -> list[tuple[str, int]]:
    """Return how many cells of a build look how."""
    counts = build["counts"]
    hits = min(counts.get("hits", 0), counts["succeeded"])
    expected = counts.get("expected", 0)
    looks: dict[str, int] = {look: counts[look] for look in ("failed", "running", "queued", "cancelled")}
    looks["failed"] -= expected
    return [*looks.items(), ("expected", expected), ("compiled", counts["succeeded"] - hits), ("hit", hits)]


def _verdict_look(view: ShownBuild) -> str:
    if view.is_open:
        return "failed" if view.looks.get("failed") else "running"
    return "failed" if _exit_code(view.build) else "compiled"


def _exit_code(build: BuildView) -> int:
    return build["verdict"]["exit_code"] if build["verdict"] else 0


_BUILD_KEYS: Keys[BuildView] = {
    "State": lambda build: f"{build['state']} {_exit_code(build)}",
    "Name": lambda build: build["name"],
    "Cells": lambda build: sum(count for _, count in _parts(build)),
    "Hits": lambda build: build["counts"].get("hits", 0),
    "Failed": lambda build: build["counts"]["failed"],
    "Took": lambda build: build["ended_at"] - build["created_at"] if build["ended_at"] else None,
    "Submitted": lambda build: build["created_at"],
}
_CELL_KEYS: Keys[CellLine] = {
    "Cell": lambda cell: cell.identifier,
    "State": lambda cell: cell.look,
    "Median": lambda cell: cell.latency,
    "p99": lambda cell: cell.p99,
    "Samples/s": lambda cell: cell.throughput,
    "Error": lambda cell: cell.error,
    "Size": lambda cell: cell.size,
    "Took": lambda cell: cell.elapsed,
    "Worker": lambda cell: cell.worker or None,
}
"""What the columns of tables are sorted by."""


def _explained(visit: Visit, pair: Pair) -> tuple[str, Sequence[str], Movement | None]:
    """Return which parts of the cache key changed between two programs, what else did, and how their latencies differ.

    All of that is empty if it is not known.
    """
    before, after = pair.before, pair.after
    if before.key == after.key:
        return "the same cache key", (), None
    old, new = (sidecar_of(visit, line.key) if line.published else None for line in (before, after))
    if old is None or new is None:
        return "", (), None
    turns = visit.farm.build_index.turns(visit.namespace, {after.identifier: (after.key, before.key)})
    one, other = facts(old), facts(new)
    said = moved_latency(one, other, turns.get(after.identifier))
    return "; ".join(changes(old["spec"], new["spec"])), between(one, other), said

"""Pages of builds: the list, a build, its live news, its cells, two builds compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Query
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import RedirectResponse, Response

from farm.api.build_routes import streamed
from farm.errors import NotFound
from farm.pages.across_pages import news_of
from farm.pages.build_view import METRICS, PAGE, SIGNS, WEAK, CellFilter, ShownBuild, figures, grouped, matrix
from farm.pages.event_hub import EventHub
from farm.pages.job_pages import cell_page, job_page, sidecar_of
from farm.pages.page_answers import BASE, BuildName, Here, Text, Visit, same_page
from farm.pages.tradeoff_view import Tradeoff, of_cells, sweeps
from farm.results.lines import BAND, CellLine
from farm.results.report import BuildView
from farm.spec import changes

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
NARROWING = ("text", "look", "precision", "by")
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
    after: Text = "",
) -> Response:
    """List the builds that pass the filters, newest first."""
    wanted = BuildFilter(name, state, by, label)
    known = visit.farm.build_reader.list(visit.namespace, 10_000)
    found = [build for build in known if wanted.takes(build)]
    start = next((place + 1 for place, build in enumerate(found) if build["id"] == after), 0)
    shown = found[start : start + BUILDS]
    return visit.page(
        "builds",
        section="builds",
        wanted=wanted,
        names=sorted({build["name"] for build in known})[:200],
        rows=[(build, _parts(build)) for build in shown],
        older=same_page(visit.request, after=shown[-1]["id"]) if start + BUILDS < len(found) else "",
        news=None if wanted.is_set or after else news_of(visit, known),
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
    first: Annotated[int, Query(ge=1, le=10**9)] = 1,
    models: Annotated[int, Query(ge=1, le=10**9)] = 1,
) -> Response:
    """Show a build; its filters, and the `first` cell and model of its pages, are in the URL.

    More cells than fit on a page are counted by model and target, unless a model is chosen.
    """
    reading = visit.builds
    view = reading.view(visit.namespace, build_id)
    wanted = CellFilter(tuple(each for each in look or () if each in SIGNS), model, target, precision, text)
    found = view.wanted(wanted)
    counted = not model and len(found) > PAGE
    shown = [] if counted else found[first - 1 : first - 1 + PAGE]
    by = by if by in METRICS else "latency"
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
        metrics={name: same_page(visit.request, by=name) for name in METRICS},
        measured=METRICS[by][0],
        weak=[WEAK[each] for each in METRICS[by][1].split()],
        figures=figures([cell for cell in view.cells if cell.model in of_models], by),
        wanted=wanted,
        matrix=matrix(shown),
        found=len(found),
        ships=ships,
        to_ship=to_ship,
        swept=sweeps(found, link),
        tradeoffs_shown=TRADEOFFS,
        first=first,
        cells_shown=len(shown),
        groups=groups[models - 1 : models - 1 + MODELS],
        models_found=len(groups),
        first_model=models,
        counted=counted,
        narrowing="".join(
            f"&{urlencode([pair])}" for pair in visit.request.query_params.multi_items() if pair[0] in NARROWING
        ),
        models_before=same_page(visit.request, models=max(1, models - MODELS)) if models > 1 else "",
        models_after=same_page(visit.request, models=models + MODELS) if models - 1 + MODELS < len(groups) else "",
        before=same_page(visit.request, first=max(1, first - PAGE)) if first > 1 else "",
        after=same_page(visit.request, first=first + PAGE) if first - 1 + PAGE < len(found) else "",
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
    reasons = {pair.after.identifier: _why_other_key(visit, pair.before, pair.after) for pair in explained}
    return visit.page(
        "compare",
        section="builds",
        left=before,
        right=after,
        changes=found,
        reasons=reasons,
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


def _why_other_key(visit: Visit, before: CellLine, after: CellLine) -> str:
    """Return which parts of the cache key, and which driver, changed between two programs; empty if not known."""
    if before.key == after.key:
        return "the same cache key"
    old, new = (sidecar_of(visit, line.key) if line.published else None for line in (before, after))
    if old is None or new is None:
        return ""
    before_spec, after_spec = (each["spec"] for each in (old, new))
    drivers = [each["device"]["driver"] for each in (old, new)]
    driver = [f"driver: {drivers[0]} -> {drivers[1]}"] if all(drivers) and drivers[0] != drivers[1] else []
    return "; ".join([*changes(before_spec, after_spec), *driver])

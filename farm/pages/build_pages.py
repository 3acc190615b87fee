"""Pages of builds and of the farm: what is important now, builds, cells, comparisons; models, workers, storage."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Annotated, NamedTuple
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Query
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import RedirectResponse, Response
from markupsafe import Markup

from farm.api.build_routes import streamed
from farm.api.gate import read_changes
from farm.api.schemas import BUILD_REFERENCE
from farm.api.tuning_routes import described
from farm.artifacts.inventory import collect
from farm.artifacts.refs import Refs, SnapshotCell
from farm.artifacts.sidecar import facts
from farm.artifacts.tokens import Role
from farm.builds.known_failures import today
from farm.builds.past_builds import DayOfBuilds
from farm.builds.reading import is_aside, troubles
from farm.errors import NotFound
from farm.jobs.facts import ArtifactFacts
from farm.jobs.rows import PoolView, WorkerView
from farm.pages import build_view
from farm.pages.drawing import PlotAxis, PlotPoint, Tradeoff, plot, sweeps, tradeoffs
from farm.pages.job_pages import cell_page, sidecar_of
from farm.pages.page_answers import BASE, BuildName, Here, Keys, Table, Text, Visit, same_page
from farm.pages.page_reading import PATIENCE, RUNNING, EventHub, StillReading
from farm.pages.quantities import duration, moment, part
from farm.results.gates import Movement, between, moved_latency
from farm.results.report import BuildView
from farm.results.verdict import CellLine, Look
from farm.spec import changes
from farm.tuning.database import databases
from farm.tuning.records import TuningDatabaseView
from farm.units import alike, by_number, grouped, named, plural, together

router = APIRouter()

BUILDS = 50  # Builds on one page.
FAILURES = 10
EXPLAINED = 20  # Differences for which both sidecars are read, to say what changed.
GROUPED = 300  # More cells are also shown by model.
MODELS = 100  # Models on one page.
LISTED = 250  # Cells on one page if each has a row.
NARROWING = ("text", "look", "precision", "by", "sort.cells")  # What stays when a model and a target are chosen.
TRADEOFFS = 8  # Targets and shapes of a model that are drawn, and models that can be chosen.
EARLIER = 8  # Builds of the same name before, to compare with.


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
        state = "open" if build["state"] != "reported" else "failed" if _exit_code(build) else "passed"
        return (
            self.name in build["name"]
            and self.by in ("", build["created_by"])
            and (not key or (key in build["labels"] and value in ("", build["labels"][key])))
            and (self.state == state or self.state not in ("open", "passed", "failed"))
        )


@router.get("/ns/{namespace}/builds")
def builds(visit: Here, name: Text = "", state: Text = "", by: Text = "", label: Text = "") -> Response:
    """List the builds that pass the filters, newest first unless the URL sorts them."""
    wanted = BuildFilter(name, state, by, label)
    known = visit.farm.build_reader.list(visit.namespace, 10_000)
    table = Table(visit.request, [build for build in known if wanted.takes(build)], _BUILD_KEYS, size=BUILDS)
    return visit.page(
        "builds",
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
    looks = tuple(each for each in look or () if each in build_view.SIGNS)
    wanted = build_view.CellFilter(looks, model, target, precision, text)
    found = view.wanted(wanted)
    by = by if by in build_view.METRICS else "latency"
    listed = by == "list"
    counted = not model and len(found) > build_view.PAGE and not listed
    table = Table(visit.request, found, _CELL_KEYS if listed else {}, "cells", LISTED if listed else build_view.PAGE)
    shown = [] if counted else table.rows
    of_models = {cell.model for cell in shown}
    groups = (build_view.by_model(found) if wanted else view.groups) if len(found) > GROUPED and not model else []
    changed = reading.changes(visit.namespace, view)

    def link(cell: str) -> str:
        return f"{BASE}/ns/{visit.namespace}/builds/{view.build['id']}/cells/{cell}"

    models = grouped(found, lambda cell: cell.model)
    ships = [name for name, each in models.items() if len({cell.precision for cell in each}) > 1][:TRADEOFFS]
    pairs = [*changed.pairs["slower"], *changed.pairs["faster"]] if changed else []
    acknowledged = visit.farm.failures.acknowledged(visit.namespace) if view.failed else []
    is_bad = view.looks.get("failed") if view.is_open else _exit_code(view.build)
    return visit.page(
        "build",
        id=view.build["id"],
        build=view.build,
        view=view,
        verdict_look="failed" if is_bad else "running" if view.is_open else "compiled",
        changes=changed,
        earlier=reading.earlier(visit.namespace, view)[:EARLIER],
        slowdowns={pair.after.identifier: pair.change for pair in pairs} if by == "latency" else {},
        by=by,
        metrics={
            name: same_page(visit.request, by=name, **{"first.cells": "", "sort.cells": ""})
            for name in build_view.METRICS
        },
        measured=build_view.METRICS[by][0],
        weak=[build_view.WEAK[each] for each in build_view.METRICS[by][1].split()],
        figures={} if listed else build_view.figures([cell for cell in view.cells if cell.model in of_models], by),
        wanted=wanted,
        table=table,
        matrix=build_view.matrix([] if listed else shown),
        ships=ships,
        to_ship=next((drawn for name in ships if (drawn := tradeoffs(models[name], link))), []),
        swept=sweeps(found, link),
        tradeoffs_shown=TRADEOFFS,
        groups=Table(visit.request, groups, name="models", size=MODELS),
        counted=counted,
        listed=listed,
        narrowing="".join(
            f"&{urlencode([pair])}" for pair in visit.request.query_params.multi_items() if pair[0] in NARROWING
        ),
        page_size=build_view.PAGE,
        failures=alike(view.failed, lambda cell: (cell.kind, cell.by_farm, cell.message)),
        shown_failures=FAILURES,
        known={entry["cell"]: entry for entry in acknowledged},
        shown_running=RUNNING,
    )


@router.get("/ns/{namespace}/builds/{build_id}/events")
async def events(visit: Here, build_id: BuildName, after: Annotated[str, Query(max_length=128)] = "") -> Response:
    """Follow a build: how its changed cells are now, as server-sent events with ids."""
    whole = await run_in_threadpool(visit.farm.build_reader.resolve, visit.namespace, build_id)
    position = visit.request.headers.get("last-event-id", "")[:128] or after
    hub: EventHub = visit.request.app.state.hub
    news = hub.follow(visit.builds, visit.namespace, whole, position)
    return streamed(visit.request, visit.caller, news)


@router.get("/ns/{namespace}/builds/{build_id}/cells/{identifier:path}")
def cell(visit: Here, build_id: BuildName, identifier: str) -> Response:
    """Show one cell of a build."""
    view = visit.builds.view(visit.namespace, build_id)
    line = view.by_identifier.get(identifier)
    if line is None:
        raise NotFound(f"no cell {identifier[:300]} in build {view.build['id']}")
    return cell_page(visit, view, line)


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
    tables = {name: Table(visit.request, pairs, _PAIR_KEYS, name) for name, pairs in found.pairs.items()}
    explained = [pair for name in ("newly-failed", "slower", "fixed", "faster") for pair in tables[name].rows]
    explained = explained[:EXPLAINED]
    reasons = {pair.after.identifier: _explained(visit, pair) for pair in explained}
    around = together((cell, text) for cell, (_, texts, _) in reasons.items() for text in texts)
    return visit.page(
        "compare",
        left=before,
        right=after,
        changes=found,
        tables=tables,
        reasons=reasons,
        around=[(text, named(cells)) for cells, text in around],
    )


def _parts(build: BuildView) -> list[tuple[str, int]]:
    """Return how many cells of a build look how."""
    counts = build["counts"]
    hits, expected = min(counts.get("hits", 0), counts["succeeded"]), counts.get("expected", 0)
    passed = {"compiled": counts["succeeded"] - hits, "hit": hits}
    looks = {**counts, **passed, "failed": counts["failed"] - expected, "expected": expected}
    return [(look, looks[look]) for look in build_view.ORDER]


def _exit_code(build: BuildView) -> int:
    return build["verdict"]["exit_code"] if build["verdict"] else 0


_BUILD_KEYS: Keys[BuildView] = {
    "State": lambda build: f"{build['state']} {_exit_code(build)}",
    "Name": "name",
    "Cells": lambda build: sum(count for _, count in _parts(build)),
    "Hits": lambda build: build["counts"].get("hits", 0),
    "Failed": "counts.failed",
    "Took": lambda build: build["ended_at"] - build["created_at"] if build["ended_at"] else None,
    "Submitted": "created_at",
}
_PAIR_KEYS: Keys[build_view.Pair] = {
    "Cell": "after.identifier",
    "Change (99 %)": "change",
    "Before (fastest to p90)": "before.latency",
    "Before": lambda pair: f"{pair.before.look} {pair.before.kind}",
    "Now": lambda pair: pair.after.latency or f"{pair.after.look} {pair.after.kind}",
}
_CELL_KEYS: Keys[CellLine] = {
    "Cell": "identifier", "State": "look", "Median": "latency", "p99": "p99", "Samples/s": "throughput",
    "Error": "error", "Size": "size", "Took": "elapsed", "Worker": "worker",
}  # fmt: skip
"""What the columns of tables are sorted by."""


def _explained(visit: Visit, pair: build_view.Pair) -> tuple[str, Sequence[str], Movement | None]:
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


# --- builds next to each other, and what is most important now --------------------------------------------------------

NAMES = 12  # Names of builds on the page of what is important now.
DOTS = 20  # The last builds of a name, each a sign.
MONTH = timedelta(days=30)
SOON = timedelta(days=3)  # Before its last day, in which an acknowledged failure is named.

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
    changes: build_view.ComparedBuilds | None
    builds: Sequence[BuildView]  # The last builds of this name that ended, the oldest first.


@router.get("/ns/{namespace}/across")
def builds_across(
    visit: Here,
    build: Annotated[list[BuildReference] | None, Query(max_length=build_view.MOST)] = None,
    name: Text = "",
    last: Annotated[int, Query(ge=2, le=build_view.MOST)] = 8,
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
    latencies = {row["id"]: partial(found.latency, place) for place, row in enumerate(found.builds)}
    keys: Keys[int] = {"Cell": found.name, **latencies}
    rows, shown = found.found(text, everything=bool(everything)), build_view.PAGE // len(found.builds)
    names = {build["name"] for build in found.builds}
    return visit.page(
        "across",
        title=f"Builds of {names.pop()}" if len(names) == 1 else "Builds compared",
        found=found,
        table=Table(visit.request, rows, keys, size=shown),
        everything=bool(everything),
        other=same_page(visit.request, all="" if everything else "yes"),
        text=text,
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
    entries = visit.farm.failures.acknowledged(visit.namespace)
    return visit.page(
        "now",
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
    began = time.monotonic()
    for build, *earlier in _ended(known)[:NAMES]:
        changes = None
        if time.monotonic() - began < PATIENCE:
            with suppress(StillReading, NotFound):
                changes = visit.builds.changes(visit.namespace, visit.builds.view(visit.namespace, build["id"]))
        yield NameLine(build, changes, [build, *earlier][:DOTS][::-1])


def _trends(days: Sequence[DayOfBuilds], href: str) -> list[Markup]:
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


def _ended(builds: Iterable[BuildView]) -> list[list[BuildView]]:
    ended = (build for build in builds if build["state"] == "reported" and not is_aside(build))
    return list(grouped(ended, lambda build: build["name"]).values())


def stuck_pools(pools: Iterable[PoolView]) -> list[PoolView]:
    """Return the pools with jobs that nobody takes, though nobody paused them."""
    return [pool for pool in pools if pool["waiting"] and not pool["slots"] and not pool["paused"]]


def news_of(visit: Visit, builds: Sequence[BuildView]) -> News | None:
    """Return the single most important thing: work that nobody takes, a red build, or that all is well."""
    home = f"{BASE}/ns/{visit.namespace}"
    if stuck := stuck_pools(visit.farm.store.workers.pools()):
        return News("failed", f"No worker takes jobs of {stuck[0]['name']} now:", f"{home}/workers", "why")
    newest = [of_name[0] for of_name in _ended(builds)]
    red = [(build, verdict) for build in newest if (verdict := build["verdict"]) and verdict["exit_code"]]
    if red:
        build, verdict = red[0]
        more = f", and {len(red) - 1} more" if len(red) > 1 else ""
        text = f"{build['name']}{more}: {verdict['text']}."
        return News("failed", text, f"{home}/builds/{build['id']}", "Look at it")
    running = [build for build in builds if build["state"] != "reported"]
    if running:
        text = f"{running[0]['name']} is under way." if len(running) == 1 else f"{plural(len(running), 'build')} run."
        return News("running", text, f"{home}/builds/{running[0]['id']}", "Watch it")
    return News("compiled", "The newest build of every name passed.") if newest else None


# --- models that a ref names, workers and pools, storage --------------------------------------------------------------

PROGRAMS = 250  # Models, or programs of one, on one page.
NAMESPACES = 100
CHANGES_SHOWN = 50


class NamespaceLine(NamedTuple):
    """What a namespace keeps, and how many unfinished cells it has; bytes of programs only if they were counted."""

    name: str
    artifacts: int
    size: int | None
    live: int


@router.get("/ns/{namespace}/models")
@router.get("/ns/{namespace}/models/{model}")
def models(visit: Here, model: str = "", ref: Text = "latest", text: Text = "") -> Response:
    """List the models that a ref names, or the programs of one of them: those with a text in their names."""
    refs = Refs(visit.farm.artifacts)
    owner = refs.owner(visit.namespace, ref)
    snapshot = refs.read(owner, ref)
    named = list(snapshot["cells"].values()) if snapshot else []
    named.sort(key=lambda cell: by_number(cell["identifier"]))
    facts: Mapping[str, ArtifactFacts] = {}
    to_ship: Sequence[Tradeoff] = ()
    table: Table[SnapshotCell] | Table[tuple[str, list[SnapshotCell]]]
    if model:
        programs = [program for program in named if program["model"] == model]
        if not programs:
            raise NotFound(f"{ref} names no program of {model[:300]}")
        facts = visit.farm.store.index.get_many(owner, [program["key"] for program in programs])
        current = {each["identifier"]: each for each in programs if "superseded" not in each and each["key"] in facts}
        newest = {name: past for name in current for past in visit.farm.build_index.of(owner, name, 1)}
        lines = [CellLine.named(each, facts[each["key"]], newest.get(name)) for name, each in current.items()]
        to_ship = tradeoffs(lines, lambda name: f"{BASE}/ns/{visit.namespace}/artifacts/{current[name]['key']}")
        keys: Keys[SnapshotCell] = {
            "Program": "identifier",
            "Median": lambda each: facts[each["key"]]["latency"] if each["key"] in facts else None,
            "Size": "program.size",
            "Device": "device",
            "Toolchain": "toolchain",
        }
        table = Table(visit.request, [each for each in programs if text in each["identifier"]], keys, size=PROGRAMS)
    else:
        by_model = grouped((each for each in named if text in each["model"]), lambda each: each["model"])
        table = Table(visit.request, list(by_model.items()), _MODEL_KEYS, size=PROGRAMS)
    tags = sorted(refs.readable(visit.caller.namespace), key=by_number)
    row = refs.find(owner, ref) if ref in tags else None
    return visit.page(
        "models",
        tag=ref,
        tags=tags,
        owner=owner,
        moved=row["moved"] if row else "",
        model=model,
        text=text,
        table=table,
        facts=facts,
        to_ship=to_ship,
        tradeoffs_shown=TRADEOFFS,
    )


@router.get("/ns/{namespace}/workers")
def workers(visit: Here, text: Text = "") -> Response:
    """Show pools and live workers, those with a text in a name, and why jobs wait."""
    live = visit.farm.store.workers.list("" if visit.caller.role is Role.ADMIN else visit.namespace)
    pools = sorted(visit.farm.store.workers.pools(), key=lambda pool: (not pool["waiting"], pool["name"]))
    builds = [build for build in visit.farm.build_reader.list(visit.namespace, 1000) if build["state"] == "open"]
    views = []
    for build in builds[:10]:
        with suppress(StillReading):  # Its own page says why it waits.
            views.append(visit.builds.view(visit.namespace, build["id"]))
    fitting = [each for each in live if text in " ".join((each["id"], str(each["node"]), *each["pools"]))]
    takers = [worker for worker in live if not (worker["fenced"] or worker["draining"] or worker["resting"])]
    return visit.page(
        "workers",
        text=text,
        workers=Table(visit.request, fitting, _WORKER_KEYS, "workers"),
        cells={cell.job: cell.identifier for view in views for cell in view.running},
        pools=Table(visit.request, [pool for pool in pools if text in pool["name"]], _POOL_KEYS, "pools"),
        waiting=[(view.build, reasons) for view in views if (reasons := view.reasons())],
        worst=_worst(live, pools),
        troubles=troubles(visit.farm.store, visit.farm.settings),
        fine=f"{len(takers)} of {plural(len(live), 'worker')} take{'s' * (len(live) == 1)} jobs; "
        f"{sum(pool['running'] for pool in pools):,} running, "
        + (f"{uploading:,} uploading, " if (uploading := sum(pool["uploading"] for pool in pools)) else "")
        + f"{sum(pool['waiting'] for pool in pools):,} waiting",
    )


@router.get("/ns/{namespace}/storage")
def storage(visit: Here, garbage: Text = "") -> Response:
    """Show what the namespace keeps; administrators also see garbage and tokens.

    With `garbage`, bytes are counted: of programs, and for administrators of what nothing names.
    """
    refs = Refs(visit.farm.artifacts)
    found = [refs.listed(visit.namespace, tag) for tag in sorted(refs.list(visit.namespace), key=by_number)[:200]]
    is_admin = visit.caller.role is Role.ADMIN
    names = sorted(visit.farm.artifacts.list_folders("ns/")) if is_admin else []
    lines = [_namespace(visit, name, counted=bool(garbage)) for name in names[:NAMESPACES]]
    changed = list(read_changes(visit.farm.artifacts, str(today()), CHANGES_SHOWN)) if is_admin else []
    tuning = [described(each) for each in databases(visit.farm.artifacts, [visit.namespace])]
    kept = timedelta(days=visit.farm.settings.keep_days)
    return visit.page(
        "storage",
        own=_namespace(visit, visit.namespace, counted=bool(garbage)),
        quota=visit.farm.settings.namespace_cells,
        keep_days=visit.farm.settings.keep_days,
        refs=Table(visit.request, [ref for ref in found if ref], _REF_KEYS, "refs"),
        tuning=Table(visit.request, sorted(tuning, key=lambda each: each["name"]), _TUNING_KEYS, "tuning"),
        tokens=Table(visit.request, visit.farm.tokens.list() if is_admin else [], _TOKEN_KEYS, "tokens"),
        is_admin=is_admin,
        gc=visit.farm.settings.gc,
        namespaces=Table(visit.request, lines, _NAMESPACE_KEYS, "namespaces"),
        changes=Table(visit.request, changed, _CHANGE_KEYS, "changes"),
        garbage=collect(visit.farm.artifacts, plans_kept=kept, dry_run=True) if is_admin and garbage else None,
    )


def _namespace(visit: Visit, name: str, *, counted: bool) -> NamespaceLine:
    index = visit.farm.store.index
    live = sum(visit.farm.store.builds.live_cells(name).values())
    return NamespaceLine(name, index.count(name), index.program_bytes(name) if counted else None, live)


_MODEL_KEYS: Keys[tuple[str, list[SnapshotCell]]] = {
    "Model": lambda row: row[0],
    "Programs": lambda row: len(row[1]),
    "Shapes": lambda row: len({each["shape"] for each in row[1]}),
    "Size": lambda row: sum(each["program"]["size"] for each in row[1]),
}
_POOL_KEYS = {"Pool": "name", "Workers": "live_workers", "Slots": "slots", "Running": "running", "Waiting": "waiting"}
_REF_KEYS = {"Ref": "tag", "Generation": "generation", "Moved, UTC": "moved"}
_TUNING_KEYS: Keys[TuningDatabaseView] = {
    "Database": "name",
    "Records": lambda each: sum(each["records"].values()),
    "Size": "size",
    "Waiting": "waiting",
    "Changed, UTC": "moved",
}
_NAMESPACE_KEYS = {"Namespace": "name", "Programs": "artifacts", "Size": "size", "Unfinished cells": "live"}
_CHANGE_KEYS = {"At, UTC": "at", "By": "by", "Role": "role", "Namespace": "namespace"}
_TOKEN_KEYS = {
    "Name": "name", "Role": "role", "Namespace": "namespace", "Most cells": "max_cells", "Made, UTC": "created",
}  # fmt: skip
_WORKER_KEYS: Keys[WorkerView] = {
    "Worker": "id",
    "Node": "node",
    "Slots": "slots",
    "Runs": lambda worker: len(worker["running"]) + worker["running_others"],
    "Heard from": "seen_at",
}
"""What the columns of tables are sorted by."""


def _worst(workers: Sequence[WorkerView], pools: Sequence[PoolView]) -> str:
    """Return what keeps most jobs from running; empty if nothing does."""
    if stuck := stuck_pools(pools):
        pool = max(stuck, key=lambda each: int(each["waiting"]))
        why = "its workers take no jobs now" if pool["live_workers"] else "no live worker serves it"
        return f"{plural(pool['waiting'], 'job')} of {pool['name']} wait{'s' * (pool['waiting'] == 1)}: {why}"
    fenced = sorted({str(worker["node"]) for worker in workers if worker["fenced"]})
    if fenced:
        return f"fenced: {', '.join(fenced[:5])}; `farm unfence NODE` when it is mended"
    return "" if workers else "no worker is live"

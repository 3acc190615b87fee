"""Pages of the farm: models that a ref names, workers and pools, storage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

from fastapi import APIRouter
from fastapi.responses import Response

from farm.api.gate import read_changes
from farm.api.tuning_routes import described
from farm.artifacts.ownership import collect
from farm.artifacts.refs import Refs, SnapshotCell
from farm.artifacts.tokens import Role
from farm.builds.known_failures import today
from farm.builds.troubles import troubles
from farm.errors import NotFound
from farm.jobs.facts import ArtifactFacts
from farm.jobs.rows import PoolView, WorkerView
from farm.pages.across_pages import stuck_pools
from farm.pages.build_pages import TRADEOFFS
from farm.pages.build_view import ShownBuild
from farm.pages.page_answers import BASE, Here, Keys, Table, Text, Visit
from farm.pages.page_reading import StillReading
from farm.pages.quantities import plural
from farm.pages.tradeoff_view import Tradeoff, of_programs
from farm.results.report import BuildView
from farm.results.tradeoff import choices
from farm.tuning.database import databases
from farm.units import by_number

router = APIRouter()

MODELS = 250
"""Models, or programs of one, on one page."""
NAMESPACES = 100
CHANGES_SHOWN = 50


class NamespaceLine(NamedTuple):
    """What a namespace keeps, and how many unfinished cells it has; bytes of programs only if they were counted."""

    name: str
    artifacts: int
    size: int | None
    live: int


@router.get("/ns/{namespace}/models")
def models(visit: Here, ref: Text = "latest", text: Text = "") -> Response:
    """List the models that a ref names."""
    by_model: dict[str, list[SnapshotCell]] = {}
    for program in _programs(visit, ref):
        if text in program["model"]:
            by_model.setdefault(program["model"], []).append(program)
    table = Table(visit.request, list(by_model.items()), _MODEL_KEYS, size=MODELS)
    return _models_page(visit, ref, text=text, table=table)


@router.get("/ns/{namespace}/models/{model}")
def one_model(visit: Here, model: str, ref: Text = "latest", text: Text = "") -> Response:
    """List the programs of one model, those with a text in their names."""
    programs = [program for program in _programs(visit, ref) if program["model"] == model]
    if not programs:
        raise NotFound(f"{ref} names no program of {model[:300]}")
    owner = Refs(visit.farm.artifacts).owner(visit.namespace, ref)
    facts = visit.farm.store.index.get_many(owner, [program["key"] for program in programs])
    current = {each["identifier"]: each for each in programs if "superseded" not in each}
    found = choices((name, True, facts[key]) for name, each in current.items() if (key := each["key"]) in facts)
    to_ship = of_programs(found, lambda name: f"{BASE}/ns/{visit.namespace}/artifacts/{current[name]['key']}")
    keys: Keys[SnapshotCell] = {
        "Program": lambda each: each["identifier"],
        "Median": lambda each: facts[each["key"]]["latency"] if each["key"] in facts else None,
        "Size": lambda each: each["program"]["size"],
        "Device": lambda each: each["device"],
        "Toolchain": lambda each: each["toolchain"],
    }
    table = Table(visit.request, [each for each in programs if text in each["identifier"]], keys, size=MODELS)
    return _models_page(visit, ref, model=model, text=text, table=table, facts=facts, to_ship=to_ship)


@router.get("/ns/{namespace}/workers")
def workers(visit: Here, text: Text = "") -> Response:
    """Show pools and live workers, those with a text in a name, and why jobs wait."""
    live = visit.farm.store.workers.list("" if visit.caller.role is Role.ADMIN else visit.namespace)
    pools = sorted(visit.farm.store.workers.pools(), key=lambda pool: (not pool["waiting"], pool["name"]))
    builds = [build for build in visit.farm.build_reader.list(visit.namespace, 1000) if build["state"] == "open"]
    views = list(_views(visit, builds[:10]))
    takers = [worker for worker in live if not (worker["fenced"] or worker["draining"] or worker["resting"])]
    return visit.page(
        "workers",
        section="workers",
        text=text,
        workers=Table(
            visit.request,
            [each for each in live if text in " ".join((each["id"], str(each["node"]), *each["pools"]))],
            _WORKER_KEYS,
            "workers",
        ),
        cells={cell.job: cell.identifier for view in views for cell in view.running},
        pools=Table(visit.request, [pool for pool in pools if text in pool["name"]], _POOL_KEYS, "pools"),
        waiting=[(view.build, reasons) for view in views if (reasons := view.reasons())],
        worst=_worst(live, pools),
        troubles=troubles(visit.farm.store, visit.farm.settings),
        fine=f"{len(takers)} of {plural(len(live), 'worker')} take{'s' * (len(live) == 1)} jobs; "
        f"{sum(pool['running'] for pool in pools):,} running, {sum(pool['waiting'] for pool in pools):,} waiting",
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
    kept = timedelta(days=visit.farm.settings.keep_days)
    return visit.page(
        "storage",
        section="storage",
        own=_namespace(visit, visit.namespace, counted=bool(garbage)),
        quota=visit.farm.settings.namespace_cells,
        keep_days=visit.farm.settings.keep_days,
        refs=[ref for ref in found if ref],
        tuning=list(map(described, databases(visit.farm.artifacts, [visit.namespace]))),
        tokens=visit.farm.tokens.list() if is_admin else None,
        is_admin=is_admin,
        gc=visit.farm.settings.gc,
        namespaces=[_namespace(visit, name, counted=bool(garbage)) for name in names[:NAMESPACES]],
        changes=list(read_changes(visit.farm.artifacts, str(today()), CHANGES_SHOWN)) if is_admin else [],
        garbage=collect(visit.farm.artifacts, plans_kept=kept, dry_run=True) if is_admin and garbage else None,
    )


def _views(visit: Visit, builds: Sequence[BuildView]) -> Iterator[ShownBuild]:
    for build in builds:
        with suppress(StillReading):  # Its own page says why it waits.
            yield visit.builds.view(visit.namespace, build["id"])


def _namespace(visit: Visit, name: str, *, counted: bool) -> NamespaceLine:
    index = visit.farm.store.index
    live = sum(visit.farm.store.builds.live_cells(name).values())
    return NamespaceLine(name, index.count(name), index.program_bytes(name) if counted else None, live)


def _programs(visit: Visit, tag: str) -> list[SnapshotCell]:
    refs = Refs(visit.farm.artifacts)
    snapshot = refs.read(refs.owner(visit.namespace, tag), tag)
    return sorted(snapshot["cells"].values(), key=lambda cell: by_number(cell["identifier"])) if snapshot else []


def _models_page(
    visit: Visit,
    tag: str,
    *,
    table: Table[tuple[str, list[SnapshotCell]]] | Table[SnapshotCell],
    model: str = "",
    text: str = "",
    facts: Mapping[str, ArtifactFacts] | None = None,
    to_ship: Sequence[Tradeoff] = (),
) -> Response:
    refs = Refs(visit.farm.artifacts)
    owner = refs.owner(visit.namespace, tag)
    tags = sorted({each for namespace in visit.caller.readable for each in refs.list(namespace)}, key=by_number)
    found = refs.find(owner, tag) if tag in tags else None
    return visit.page(
        "models",
        section="models",
        tag=tag,
        tags=tags,
        owner=owner,
        moved=found["moved"] if found else "",
        model=model,
        text=text,
        table=table,
        facts=facts or {},
        to_ship=to_ship,
        tradeoffs_shown=TRADEOFFS,
    )


_MODEL_KEYS: Keys[tuple[str, list[SnapshotCell]]] = {
    "Model": lambda row: row[0],
    "Programs": lambda row: len(row[1]),
    "Shapes": lambda row: len({each["shape"] for each in row[1]}),
    "Size": lambda row: sum(each["program"]["size"] for each in row[1]),
}
_POOL_KEYS: Keys[PoolView] = {
    "Pool": lambda pool: pool["name"],
    "Workers": lambda pool: pool["live_workers"],
    "Slots": lambda pool: pool["slots"],
    "Running": lambda pool: pool["running"],
    "Waiting": lambda pool: pool["waiting"],
}
_WORKER_KEYS: Keys[WorkerView] = {
    "Worker": lambda worker: worker["id"],
    "Node": lambda worker: str(worker["node"]),
    "Slots": lambda worker: worker["slots"],
    "Runs": lambda worker: len(worker["running"]) + worker["running_others"],
    "Heard from": lambda worker: worker["seen_at"],
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

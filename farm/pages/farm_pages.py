"""Pages of the farm: models that a ref names, workers and pools, storage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from operator import itemgetter
from typing import NamedTuple

from fastapi import APIRouter, Request
from fastapi.responses import Response

from farm.api.auth import Caller, FarmDep
from farm.api.change_log import read_changes
from farm.app import Farm
from farm.artifacts.ownership import collect
from farm.artifacts.refs import Refs, SnapshotCell
from farm.artifacts.tokens import Role
from farm.builds.acknowledged import today
from farm.errors import ArtifactGone, NotFound
from farm.jobs.rows import PoolView, WorkerView
from farm.pages.browser_sessions import Visitor
from farm.pages.build_view import ShownBuild
from farm.pages.page_answers import Namespace, Text, page_of, reading_of
from farm.pages.page_reading import BuildPages, StillReading
from farm.pages.quantities import plural
from farm.results.report import BuildView
from farm.tuning.database import databases

router = APIRouter()

MODELS = 1000
NAMESPACES = 100
CHANGES_SHOWN = 50


class ModelLine(NamedTuple):
    """A model with the programs that a ref names."""

    model: str
    programs: int
    targets: Sequence[str]
    precisions: Sequence[str]
    shapes: int
    size: int


class DatabaseLine(NamedTuple):
    """A tuning database."""

    name: str
    records: int
    size: int
    waiting: int
    moved: str
    damaged: str


class NamespaceLine(NamedTuple):
    """What a namespace keeps, and how many unfinished cells it has; bytes of programs only if they were counted."""

    name: str
    artifacts: int
    size: int | None
    live: int


class GarbageFound(NamedTuple):
    """Blobs that nothing names."""

    blobs: int
    bytes: int


@router.get("/ns/{namespace}/models")
def models(
    request: Request, caller: Visitor, farm: FarmDep, namespace: Namespace, ref: Text = "latest", text: Text = ""
) -> Response:
    """List the models that a ref names."""
    by_model: dict[str, list[SnapshotCell]] = {}
    for program in _programs(farm, caller, ref):
        if text in program["model"]:
            by_model.setdefault(program["model"], []).append(program)
    return _models_page(request, caller, farm, ref, text=text, rows=[_model_line(*each) for each in by_model.items()])


@router.get("/ns/{namespace}/models/{model}")
def one_model(
    request: Request, caller: Visitor, farm: FarmDep, namespace: Namespace, model: str, ref: Text = "latest"
) -> Response:
    """List the programs of one model."""
    programs = [program for program in _programs(farm, caller, ref) if program["model"] == model]
    if not programs:
        raise NotFound(f"{ref} names no program of {model[:300]}")
    owner = Refs(farm.artifacts).owner(caller.namespace, ref)
    facts = farm.store.index.get_many(owner, [program["key"] for program in programs])
    speeds = {key: known["latency"] for key, known in facts.items()}
    return _models_page(request, caller, farm, ref, model=model, rows=programs, speeds=speeds)


@router.get("/ns/{namespace}/workers")
def workers(request: Request, caller: Visitor, farm: FarmDep, namespace: Namespace) -> Response:
    """Show pools and live workers, and why jobs wait."""
    live = farm.store.workers.list("" if caller.role is Role.ADMIN else caller.namespace)
    pools = sorted(farm.store.workers.pools(), key=lambda pool: (not pool["waiting"], pool["name"]))
    builds = [build for build in farm.build_reader.list(caller.namespace, 1000) if build["state"] == "open"]
    views = list(_views(reading_of(farm, request), caller, builds[:10]))
    takers = [worker for worker in live if not (worker["fenced"] or worker["draining"] or worker["resting"])]
    return page_of(
        request,
        caller,
        "workers",
        section="workers",
        workers=live,
        cells={cell.job: cell.identifier for view in views for cell in view.running},
        pools=pools,
        waiting=[(view.build, reasons) for view in views if (reasons := view.reasons())],
        worst=_worst(live, pools),
        fine=f"{len(takers)} of {plural(len(live), 'worker')} take{'s' * (len(live) == 1)} jobs; "
        f"{sum(pool['running'] for pool in pools):,} running, {sum(pool['waiting'] for pool in pools):,} waiting",
    )


@router.get("/ns/{namespace}/storage")
def storage(request: Request, caller: Visitor, farm: FarmDep, namespace: Namespace, garbage: Text = "") -> Response:
    """Show what the namespace keeps; administrators also see garbage and tokens.

    With `garbage`, bytes are counted: of programs, and for administrators of what nothing names.
    """
    refs = Refs(farm.artifacts)
    found = [refs.listed(caller.namespace, tag) for tag in sorted(refs.list(caller.namespace))[:200]]
    is_admin = caller.role is Role.ADMIN
    return page_of(
        request,
        caller,
        "storage",
        section="storage",
        own=_namespace(farm, caller.namespace, counted=bool(garbage)),
        quota=farm.settings.namespace_cells,
        keep_days=farm.settings.keep_days,
        refs=[ref for ref in found if ref],
        tuning=_databases(farm, caller),
        tokens=farm.tokens.list() if is_admin else None,
        is_admin=is_admin,
        gc=farm.settings.gc,
        namespaces=list(_namespaces(farm, counted=bool(garbage))) if is_admin else [],
        changes=list(read_changes(farm.artifacts, str(today()), CHANGES_SHOWN)) if is_admin else [],
        garbage=_garbage(farm) if is_admin and garbage else None,
    )


def _views(reading: BuildPages, caller: Caller, builds: Sequence[BuildView]) -> Iterator[ShownBuild]:
    for build in builds:
        with suppress(StillReading):  # Its own page says why it waits.
            yield reading.view(caller.namespace, build["id"])


def _namespaces(farm: Farm, *, counted: bool) -> Iterator[NamespaceLine]:
    for name in sorted(farm.artifacts.list_folders("ns/"))[:NAMESPACES]:
        yield _namespace(farm, name, counted=counted)


def _namespace(farm: Farm, name: str, *, counted: bool) -> NamespaceLine:
    index = farm.store.index
    live = sum(farm.store.builds.live_cells(name).values())
    return NamespaceLine(name, index.count(name), index.program_bytes(name) if counted else None, live)


def _programs(farm: Farm, caller: Caller, tag: str) -> list[SnapshotCell]:
    refs = Refs(farm.artifacts)
    snapshot = refs.read(refs.owner(caller.namespace, tag), tag)
    return sorted(snapshot["cells"].values(), key=itemgetter("identifier")) if snapshot else []


def _model_line(model: str, programs: Sequence[SnapshotCell]) -> ModelLine:
    return ModelLine(
        model,
        len(programs),
        sorted({program["target"] for program in programs}),
        sorted({program["precision"] for program in programs}),
        len({program["shape"] for program in programs}),
        sum(program["program"]["size"] for program in programs),
    )


def _models_page(
    request: Request,
    caller: Caller,
    farm: Farm,
    tag: str,
    *,
    rows: Sequence[ModelLine] | Sequence[SnapshotCell],
    model: str = "",
    text: str = "",
    speeds: Mapping[str, float | None] | None = None,
) -> Response:
    refs = Refs(farm.artifacts)
    owner = refs.owner(caller.namespace, tag)
    tags = sorted({each for namespace in caller.readable for each in refs.list(namespace)})
    found = refs.find(owner, tag) if tag in tags else None
    return page_of(
        request,
        caller,
        "models",
        section="models",
        tag=tag,
        tags=tags,
        owner=owner,
        moved=found.moved if found else "",
        model=model,
        text=text,
        rows=rows[:MODELS],
        speeds=speeds or {},
        more=max(0, len(rows) - MODELS),
    )


def _worst(workers: Sequence[WorkerView], pools: Sequence[PoolView]) -> str:
    """Return what keeps most jobs from running; empty if nothing does."""
    stuck = [pool for pool in pools if pool["waiting"] and not pool["slots"] and not pool["paused"]]
    if stuck:
        pool = max(stuck, key=lambda each: int(each["waiting"]))
        why = "its workers take no jobs now" if pool["live_workers"] else "no live worker serves it"
        return f"{plural(pool['waiting'], 'job')} of {pool['name']} wait{'s' * (pool['waiting'] == 1)}: {why}"
    fenced = sorted({str(worker["node"]) for worker in workers if worker["fenced"]})
    if fenced:
        return f"fenced: {', '.join(fenced[:5])}; `farm unfence NODE` when it is mended"
    return "" if workers else "no worker is live"


def _databases(farm: Farm, caller: Caller) -> list[DatabaseLine]:
    found = []
    for database in databases(farm.artifacts, [caller.namespace]):
        waiting = len(database.waiting())
        try:
            head = database.check()
        except ArtifactGone as error:
            found.append(DatabaseLine(database.name, 0, 0, waiting, "", error.message))
            continue
        records = sum(head.records.values()) if head else 0
        found.append(
            DatabaseLine(database.name, records, head.size if head else 0, waiting, head.moved if head else "", "")
        )
    return sorted(found)


def _garbage(farm: Farm) -> GarbageFound:
    found = collect(farm.artifacts, plans_kept=timedelta(days=farm.settings.keep_days), dry_run=True)
    return GarbageFound(len(found.deleted), sum(entry.size for entry in found.deleted))

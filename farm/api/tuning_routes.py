"""Tuning databases over HTTP."""

from __future__ import annotations

from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Annotated

import anyio
from fastapi import APIRouter, Body, Depends, Path, Query, Request, Response

from farm.api import schemas
from farm.api.gate import FarmDep, ReaderCaller, Submitter
from farm.app import Farm
from farm.errors import ArtifactGone, NotFound, UsageError
from farm.jobs.rows import Listed
from farm.targets.compilers import compilers
from farm.targets.pools import Pool
from farm.tuning import exchange, records
from farm.tuning.database import Head, TuningDatabase, databases, device_name
from farm.tuning.exchange import fitting, read_offered
from farm.units import view_of

router = APIRouter(tags=["tuning"])

TABLE = "text/tab-separated-values"
CENTURY = 100 * 365 * 86_400  # In seconds: no record is older, and the calendar has an end.

Part = Annotated[str, Path(pattern=schemas.POOL)]


def _addressed(pool: Part, device: Part, mode: Part, caller: ReaderCaller, farm: FarmDep) -> TuningDatabase:
    return TuningDatabase(farm.artifacts, caller.namespace, pool, device, mode)


Addressed = Annotated[TuningDatabase, Depends(_addressed)]


def _there(database: Addressed) -> TuningDatabase:
    if not database.exists():
        hint = "`farm tuning ls` shows which hold records"
        raise NotFound(f"the tuning database {database.name} holds nothing yet", hint=hint)
    return database


There = Annotated[TuningDatabase, Depends(_there)]


@router.get("/tuning")
def tuning_databases(caller: ReaderCaller, farm: FarmDep) -> Listed[records.TuningDatabaseView]:
    """List the namespace's tuning databases, and the possible ones: one for each mode of a known pool."""
    found = {database.name: described(database) for database in databases(farm.artifacts, [caller.namespace])}
    for pool in _pools(farm):
        for device, mode in _possible(pool):
            database = TuningDatabase(farm.artifacts, caller.namespace, pool.stem, device, mode)
            found.setdefault(database.name, _view(database))
    return {"items": [found[name] for name in sorted(found)]}


@router.get("/tuning/{pool}/{device}/{mode}/snapshot", response_class=Response, responses=schemas.text(TABLE))
def tuning_snapshot(database: There) -> Response:
    """Return all records that are known now, merged or not, as text; `docs/tuning.md` describes it."""
    data = exchange.pack(database.read().snapshot)
    return Response(data, media_type=TABLE, headers={"Content-Encoding": "gzip"})


@router.get("/tuning/{pool}/{device}/{mode}/stats")
def tuning_stats(database: There) -> records.TuningStats:
    """Return what the database holds, and what tuning cost and saved: in total and per day."""
    snapshot = database.read().snapshot
    log = snapshot.log
    days: list[records.TuningWorkView] = [{"date": date, **work.view()} for date, work in log.by_day().items()]
    return {"database": database.name, "records": snapshot.counts(), "total": log.total().view(), "days": days}


@router.post("/tuning/{pool}/{device}/{mode}/import")
async def tuning_import(
    database: Addressed,
    caller: Submitter,
    farm: FarmDep,
    request: Request,
    snapshot: Annotated[bytes, Body(media_type="application/gzip", description="A snapshot as gzipped text.")],
    miopen: Annotated[str, Query(pattern=r"^[\w.-]{0,64}$", description="The version of MIOpen that is taken.")] = "",
) -> records.TuningImported:
    """Add records of a user's own databases that fit the pool's device; the answer names the refused ones.

    At most 64 MiB of text, with 500,000 records.
    """
    # One after the other, since each takes memory, and waiting takes none of the threads that serve others.
    work = partial(_import, farm, database, caller.name, snapshot, miopen)
    return await anyio.to_thread.run_sync(work, limiter=request.app.state.imports)


def _import(farm: Farm, database: TuningDatabase, by: str, snapshot: bytes, miopen: str) -> records.TuningImported:
    pools = [pool for pool in _pools(farm) if pool.stem == database.pool]
    own = [pool for pool in pools if (database.device, database.mode) in _possible(pool)]
    # Those with an enforcement of MIOpen's search are there once a job has asked for it.
    same = [pool for pool in pools if database.device in {device for device, _ in _possible(pool)}]
    pool = next(iter(own or ((same or pools) if database.exists() else [])), None)
    if pool is None:
        raise NotFound(f"no known pool has a database {database.name}", hint="`farm tuning ls` lists them")
    known_now = database.since(frozenset()).snapshot
    if known_now.size > records.LARGEST_DATABASE:
        raise UsageError(f"{database.name} is full", hint=f"`farm tuning prune {database.name}` makes room")
    source = records.RecordSource(
        datetime.now(UTC).isoformat(timespec="seconds"), f"import by {by}", "", pool.toolchain
    )
    found = fitting(read_offered(snapshot, source), known_now, pool.device, pool.toolchain, miopen)
    if found.snapshot:
        database.commit(found.snapshot)
    known = known_now.tables
    added = sum(len(table.keys() - known.get(place, {}).keys()) for place, table in found.snapshot.tables.items())
    return {"records": found.snapshot.counts(), "added": added, "refused": dict(found.refused)}


@router.post("/tuning/{pool}/{device}/{mode}/merge")
def tuning_merge(_: Submitter, database: There) -> records.TuningMerged:
    """Merge what attempts committed into the head now; the control plane also does so after a while."""
    return database.merge()


@router.post("/tuning/{pool}/{device}/{mode}/prune")
def tuning_prune(
    _: Submitter,
    database: There,
    older: Annotated[float | None, Query(gt=0, le=CENTURY, description="Records measured so many seconds ago.")] = None,
    job: Annotated[str, Query(max_length=64, description="Records that this job measured.")] = "",
    everything: Annotated[bool, Query(description="The whole database.")] = False,
    dry_run: Annotated[bool, Query(description="Remove nothing.")] = False,
) -> records.TuningPruned:
    """Remove records, so that they are measured again. If there are several conditions, all must hold.

    `everything` also works for a damaged database; records that cannot be read are not counted.
    """
    if everything == bool(older or job):
        raise UsageError("choose what to prune: by age, by job, or everything")
    before = "" if older is None else (datetime.now(UTC) - timedelta(seconds=older)).isoformat(timespec="seconds")

    def goes(record: records.Record) -> bool:
        return (not before or record.source.when < before) and (not job or record.source.job == job)

    try:
        snapshot = database.read().snapshot
    except ArtifactGone:
        if not everything:
            raise
        snapshot = records.Snapshot()
    pruned = sum(map(goes, snapshot))
    if not dry_run and everything:
        database.delete()
    elif not dry_run and pruned:
        database.prune(lambda snapshot: snapshot.only(record for record in snapshot if not goes(record)))
    return {"pruned": pruned, "left": len(snapshot) - pruned}


def _pools(farm: Farm) -> list[Pool]:
    return [Pool.from_dict(row["pool"]) for row in farm.store.workers.pools()]


def _possible(pool: Pool) -> list[tuple[str, str]]:
    """Return the databases that a pool's jobs can tune into: device and mode of each."""
    compiler = compilers()[pool.target.compiler]
    if pool.untuned:
        return []
    family = pool.cpu_family if compiler.tuning_binds else None
    return [(device_name(replace(pool.device, cpu_family=family)), mode) for mode in pool.target.kind.tuning]


def described(database: TuningDatabase) -> records.TuningDatabaseView:
    """Return what a database holds; of a damaged one, why it cannot be read."""
    waiting = len(database.waiting())
    try:
        return _view(database, database.check(), waiting)
    except ArtifactGone as error:
        return {**_view(database, None, waiting), "damaged": error.message}


def _view(database: TuningDatabase, head: Head | None = None, waiting: int = 0) -> records.TuningDatabaseView:
    known = {"generation": 0, "records": {}, "size": 0, "moved": "", **(asdict(head) if head else {})}
    found = {**vars(database), **known, "name": database.name, "waiting": waiting, "damaged": ""}
    return view_of(records.TuningDatabaseView, found)

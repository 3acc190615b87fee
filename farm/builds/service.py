"""Accept builds: plan, submit, retry; and cancel, pause and resume them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from farm.artifacts import build_key, open_key, open_prefix, readable
from farm.artifacts.ownership import lacking
from farm.artifacts.refs import Refs, SnapshotCell
from farm.artifacts.s3 import S3Store
from farm.builds import large_builds
from farm.builds.acknowledged import AcknowledgedFailures
from farm.builds.baselines import Baselines
from farm.builds.bucket_models import BucketModels
from farm.builds.cell_history import CellHistory
from farm.builds.expansions import Expansions
from farm.builds.known import KnownArtifacts
from farm.builds.latest import LATEST, PROD
from farm.builds.plan import Plan, PlannedCell, is_measured, is_unfinished, make_plan
from farm.builds.reading import BuildReader
from farm.builds.retry import plan_retry, unsuccessful
from farm.errors import (
    Conflict,
    FarmError,
    FarmFault,
    InputsMissing,
    ManifestError,
    NotFound,
    QuotaExceeded,
    UsageError,
)
from farm.jobs.estimate import Compile, estimate_all
from farm.jobs.order import job_key, keys_of
from farm.jobs.rows import CancelledCells, ConcurrencyGroup, NewCell, OpenMark, PlannedBuild
from farm.jobs.state import AttemptLimits
from farm.logging import get_logger
from farm.manifest import Concurrency, Manifest, parse_manifest
from farm.matrix.cells import Cell, expand
from farm.matrix.planned import CellPlan, PlanDocument, ShownCell, ShownPlan, SubmissionDocument
from farm.metrics.instruments import CELLS_PLANNED, miss_reason
from farm.models.data import FrozenData
from farm.models.model import FrozenModel
from farm.results.report import AcceptedBuild, BuildView, Report
from farm.results.verdict import expected_failure
from farm.settings import Settings
from farm.spec import Device, comparable, digest_of
from farm.store import Store
from farm.targets.pools import Pool, in_use
from farm.tuning.seeds import announced

log = get_logger(__name__)

PAUSED_POOLS = "config/paused-pools/"
"""Prefix of the marks of paused pools."""

LOT = 500
"""Cells that one script call accepts."""


class BuildService:
    """Accepts builds and changes to them. All answers are plain JSON."""

    def __init__(
        self,
        store: Store,
        artifacts: S3Store,
        settings: Settings,
        *,
        reader: BuildReader,
        known: KnownArtifacts,
        history: CellHistory,
        acknowledged: AcknowledgedFailures,
    ) -> None:
        self._store = store
        self._artifacts = artifacts
        self._settings = settings
        self._reader = reader
        self._known = known
        self._refs = Refs(artifacts)
        self._baselines = Baselines(self._refs, known, history)
        self._bucket_models = BucketModels(artifacts, settings.s3_sources)
        self._expansions = Expansions()
        self._acknowledged = acknowledged

    # --- before a build -----------------------------------------------------------------------------------------

    def plan(self, namespace: str, submission: SubmissionDocument) -> ShownPlan:
        """Return what a submission would do, and which blobs have to be uploaded first. Changes nothing.

        Raises ManifestError with every problem found.
        """
        plan, manifest = self._plan(namespace, submission)
        documents = [_planned_document(planned) for planned in plan.cells]
        found = self._baselines.attach(namespace, manifest.name, documents, submission.get("gates"))
        cells: list[ShownCell] = [
            {**planned.as_dict(), "reason": document["reason"]}
            for planned, document in zip(plan.cells, documents, strict=True)
        ]
        return {
            "build_id": submission["build_id"],
            "digest": plan.digest,
            "name": manifest.name,
            "cells": cells,
            "outlook": self._reader.outlook(cells, manifest.max_parallel),
            "warnings": [*plan.warnings, *found],
            "conversions": plan.conversions,
            "missing_blobs": lacking(self._artifacts, plan.needed_blobs),
        }

    def _plan(self, namespace: str, submission: SubmissionDocument) -> tuple[Plan, Manifest]:
        self._known.require_index(namespace)
        file = submission.get("file") or "manifest"
        manifest = parse_manifest(submission["manifest"], file)
        in_buckets = self._in_buckets(manifest)
        pools = self._store.workers.pools()
        known = [Pool.from_dict(pool["pool"]) for pool in pools]
        used = in_use(zip(known, (pool["live_workers"] for pool in pools), strict=True), self._settings.toolchains)
        used = self._as_named(namespace, used)
        slots, files = {pool["name"]: pool["slots"] for pool in pools}, submission.get("files") or {}
        limits = AttemptLimits(time=self._settings.time_limit, memory=self._settings.memory_limit)
        inputs = {
            "slots": slots,
            "files": files,
            "file": file,
            "limits": limits,
            "manifest": submission["manifest"],
            "models": submission["models"],
            "data": submission["data"],
            "in_buckets": {name: model.as_dict() for name, model in in_buckets.items()},
            "known": [pool["pool"] for pool in pools],
            "used": [pool.as_dict() for pool in used],
        }
        cells = self._expansions.get(
            inputs,
            lambda: expand(
                manifest,
                {name: FrozenModel.from_dict(model) for name, model in submission["models"].items()} | in_buckets,
                {name: FrozenData.from_dict(data) for name, data in submission["data"].items()},
                used,
                known=known,
                slots=slots,
                files=files,
                file=file,
                limits=limits,
            ),
        )
        whole = self._known.whole(namespace, {cell.job: keys_of(cell.order, cell.key) for cell in cells})
        missing = list(dict.fromkeys(cell.job for cell in cells if cell.job not in whole))
        last = self._last_passed(namespace) if missing else {}
        compiles = {
            cell.identifier: _compile(cell, last.get(cell.identifier)) for cell in cells if cell.job not in whole
        }
        plan = make_plan(
            cells,
            known=whole,
            running=self._store.jobs.unfinished(namespace, missing),
            last=last,
            read_spec=lambda key: self._known.read_spec(namespace, key),
            live_workers={pool["name"]: pool["live_workers"] for pool in pools},
            estimates=estimate_all(
                compiles, self._store.history.samples(readable(namespace), {each.sort for each in compiles.values()})
            ),
        )
        if to_tune := plan.to_tune:
            plan = replace(plan, warnings=(*plan.warnings, *announced(self._artifacts, namespace, to_tune)))
        return plan, manifest

    def _as_named(self, namespace: str, pools: Sequence[Pool]) -> list[Pool]:
        """Return the pools to plan for, without those of toolchains that readers do not get yet.

        If several toolchains of a target are in use, it is the one of which `prod` (else `latest`) gives programs to
        readers: a new toolchain on some workers changes no build until it is promoted.
        """
        groups: dict[tuple[str, Device], set[str]] = {}
        for pool in pools:
            groups.setdefault((str(pool.target), pool.device), set()).add(pool.toolchain)
        open_ones = {place: toolchains for place, toolchains in groups.items() if len(toolchains) > 1}
        chosen: dict[tuple[str, Device], str] = {}
        for tag in (PROD, LATEST) if open_ones else ():
            named = sorted(self._given(namespace, tag), key=lambda cell: cell.get("submitted", 0.0))
            for place, toolchains in open_ones.items():
                fitting = [
                    cell["toolchain"]
                    for cell in named
                    if cell["target"] == place[0]
                    and cell["toolchain"] in toolchains
                    and cell["device"].partition(":")[0] == place[1].arch.partition(":")[0]
                ]
                if fitting:
                    chosen.setdefault(place, fitting[-1])
        return [pool for pool in pools if chosen.get((str(pool.target), pool.device), pool.toolchain) == pool.toolchain]

    def _given(self, namespace: str, tag: str) -> list[SnapshotCell]:
        """Return what readers get of a tag."""
        cells = self._refs.read_or_empty(namespace, tag)["cells"].values()
        return [cell for cell in cells if not cell.get("superseded")]

    def _in_buckets(self, manifest: Manifest) -> dict[str, FrozenModel]:
        """Read the models that the manifest leaves to the farm. Raises ManifestError with every problem found."""
        models: dict[str, FrozenModel] = {}
        problems = []
        for index, entry in enumerate(manifest.models):
            if entry.source.s3:
                try:
                    models[entry.name] = self._bucket_models.freeze(
                        entry.source.s3, entry.format, entry.source.sha256, entry.output_nodes
                    )
                except UsageError as error:
                    problems.append(manifest.written.problem(error.message, "models", index, "source", hint=error.hint))
        if problems:
            raise ManifestError(problems)
        return models

    def _last_passed(self, namespace: str) -> dict[str, SnapshotCell]:
        cells = self._refs.read_or_empty(namespace, LATEST)["cells"].values()
        return {cell["identifier"]: cell for cell in sorted(cells, key=lambda cell: cell.get("submitted", 0.0))}

    # --- a build's life -----------------------------------------------------------------------------------------

    def submit(
        self,
        namespace: str,
        submission: SubmissionDocument,
        *,
        by: str,
        max_cells: int = 0,
        request: str = "",
        warnings: Sequence[str] = (),
    ) -> AcceptedBuild:
        """Accept a build. It is acknowledged when object storage and the store have it; repeating is harmless.

        `max_cells` is how many unfinished cells the builds of this caller may have (0: no bound). `request` is the
        digest of what asked for the build, by default of the submission. The build has the `warnings`, too.

        Raises ManifestError for what is wrong in the manifest, InputsMissing for what was not uploaded, QuotaExceeded,
        Conflict if the build's id was used for another request.
        """
        build_id = submission["build_id"]
        text = submission["manifest"].encode()
        request = request or digest_of_request(submission)
        if self.is_accepted(namespace, build_id, text, request):
            if known := self._store.builds.get(build_id):
                self._replace_older(known)
            return self.accepted(namespace, build_id)
        plan, manifest = self._plan(namespace, submission)
        if absent := lacking(self._artifacts, plan.needed_blobs):
            raise InputsMissing(
                f"{len(absent)} inputs of the build are not in object storage, the first is {absent[0]}",
                absent,
                hint="upload the missing inputs, then submit again",
            )
        cells = [_planned_document(planned) for planned in plan.cells]
        self._acknowledged.attach(namespace, cells)
        found = self._baselines.attach(namespace, manifest.name, cells, submission.get("gates"))
        self.check_quotas(namespace, by, sum(map(is_unfinished, cells)), max_cells)
        document: PlanDocument = {
            "schema": 1,
            "build": {
                "id": build_id,
                "namespace": namespace,
                "name": manifest.name,
                "labels": {**manifest.labels, **submission.get("labels", {})},
                "created_by": by,
                "created_at": self._store.now(),
                "cells": len(plan.cells),
                "hits": sum(planned.state == "hit" for planned in plan.cells),
                "max_parallel": manifest.max_parallel,
                "fail_fast": manifest.fail_fast,
                "warnings": [*warnings, *plan.warnings, *found],
                "plan": plan.digest,
                "request": request,
            },
            "cells": cells,
        }
        if manifest.concurrency:
            document["build"]["concurrency"] = _group(manifest.concurrency, document["build"]["labels"])
        self.accept(document, text)
        log.info("build submitted", build=build_id, cells=len(plan.cells), by=by)
        return self.accepted(namespace, build_id)

    def accepted(self, namespace: str, build_id: str) -> AcceptedBuild:
        """Return a submitted build with the digest of its plan: the submitter may have seen another plan."""
        planned = self._reader.read_plan(namespace, build_id)
        return {**self._reader.get(namespace, build_id), "plan": planned["build"].get("plan")}

    def plan_retry(self, namespace: str, build_id: str, new_id: str, *, failed: bool) -> ShownPlan:
        """Return what `retry` would do. Changes nothing. Raises as `retry`."""
        document = self._plan_retry(namespace, build_id, new_id, failed=failed)
        return {
            "build_id": new_id,
            "name": document["build"]["name"],
            "cells": (cells := document["cells"]),
            "outlook": self._reader.outlook(cells, document["build"]["max_parallel"]),
            "warnings": [],
            "missing_blobs": [],
        }

    def retry(
        self, namespace: str, build_id: str, new_id: str, *, failed: bool, by: str, max_cells: int = 0
    ) -> BuildView:
        """Accept a build with an ended build's cells as they were planned, and return it. Repeating it is harmless.

        `new_id` is the id of the new build; with `failed` it has only the cells that did not succeed. `max_cells` as in
        `submit`.

        Raises NotFound, Conflict for a build that has not ended, UsageError for inputs that are gone, QuotaExceeded.
        """
        manifest = self._artifacts.get_object(
            build_key(namespace, self._reader.resolve(namespace, build_id), "manifest.yaml")
        )
        text = manifest.data if manifest else b""
        request = digest_of({"retry": True, "failed": failed})
        if not self.is_accepted(namespace, new_id, text, request):
            document = self._plan_retry(namespace, build_id, new_id, failed=failed)
            self._acknowledged.attach(namespace, document["cells"])
            document["build"] |= {"created_by": by, "created_at": self._store.now(), "request": request}
            self.check_quotas(namespace, by, sum(map(is_unfinished, document["cells"])), max_cells)
            self.accept(document, text)
            log.info("build retried", build=new_id, retries=document["build"]["retries"], by=by)
        return self._reader.get(namespace, new_id)

    def _plan_retry(self, namespace: str, build_id: str, new_id: str, *, failed: bool) -> PlanDocument:
        self._known.require_index(namespace)
        report = self._reader.report(namespace, build_id)
        build_id = report["build"]["id"]
        if report["build"]["state"] == "open":
            raise Conflict(f"build {build_id} has not ended", hint="wait with `farm watch`, or `farm cancel` it")
        planned = self._reader.read_plan(namespace, build_id)
        wanted = unsuccessful(report) if failed else {cell["identifier"] for cell in planned["cells"]}
        cells = [cell for cell in planned["cells"] if cell["identifier"] in wanted]
        if not cells:
            verdict = report["build"]["verdict"]
            raise NotFound(f"no cell of build {build_id} can be tried again: {verdict['text'] if verdict else ''}")
        known = self._known.whole(namespace, {cell["identifier"]: _published_as(cell) for cell in cells})
        missing = [job_key(cell["order"], cell["key"]) for cell in cells if cell["identifier"] not in known]
        document = plan_retry(
            planned,
            cells,
            known=known,
            running=self._store.jobs.unfinished(namespace, missing),
            live_workers={pool["name"]: pool["live_workers"] for pool in self._store.workers.pools()},
            build_id=new_id,
        )
        self._known.require_inputs(document["cells"], f"build {build_id}")
        return document

    def is_known(self, namespace: str, build_id: str, request: str) -> bool:
        """Whether a build was accepted. Raises Conflict if another request made it, as far as that is known."""
        row = self._store.builds.get(build_id)
        if row and row["namespace"] != namespace:
            raise Conflict(f"the id {build_id} is taken", hint="submit again with a new build id")
        if row and row.get("request", request) != request:
            raise Conflict(
                f"build {build_id} was made by another request", hint="choose another build id or Idempotency-Key"
            )
        return self.is_whole(build_id) or self._reader.read_report(namespace, build_id) is not None

    def is_accepted(self, namespace: str, build_id: str, manifest: bytes, request: str) -> bool:
        """Whether a build was submitted before. Raises Conflict if another build has its id."""
        known = self._artifacts.get_object(build_key(namespace, build_id, "manifest.yaml"))
        if known and known.data != manifest:
            raise Conflict(
                f"build {build_id} was submitted with another manifest", hint="submit again with a new build id"
            )
        return self.is_known(namespace, build_id, request) and known is not None

    def accept(self, document: PlanDocument, manifest: bytes) -> None:
        """Record a planned build in object storage, then accept it into the store."""
        namespace, build_id = document["build"]["namespace"], document["build"]["id"]
        self._artifacts.put_object(build_key(namespace, build_id, "manifest.yaml"), manifest)
        self._artifacts.put_object(build_key(namespace, build_id, "plan.json"), json.dumps(document).encode())
        if len(document["cells"]) >= large_builds.LARGE:
            self._reader.large.add_planned(document)
        self._artifacts.put_object(open_key(namespace, build_id), b"{}")
        for cell in document["cells"]:
            CELLS_PLANNED.labels(cell["state"], miss_reason(cell["reason"]) if cell["state"] == "miss" else "").inc()
        self._create(document)

    def check_quotas(self, namespace: str, by: str, cells: int, max_cells: int) -> None:
        """Check that a caller may have so many more unfinished cells. Raises QuotaExceeded.

        Two builds submitted at once may exceed one together: it limits load, not trust."""
        quotas = {"": self._settings.namespace_cells, by: max_cells}
        if not cells or not any(quotas.values()):
            return
        live = self._store.builds.live_cells(namespace)
        for caller, quota in quotas.items():
            under_way = live.get(caller, 0) if caller else sum(live.values())
            if quota and under_way + cells > quota:
                whose = f"the token {caller}" if caller else f"the namespace {namespace}"
                less = "wait until some have ended, cancel a build" if cells <= quota else "submit fewer cells at once"
                raise QuotaExceeded(
                    f"{whose} may have {quota} unfinished cells; {under_way} are under way, this build has {cells}",
                    hint=f"{less}, or ask the operator for more",
                )

    def _create(self, document: PlanDocument) -> None:
        namespace = document["build"]["namespace"]
        self._store.builds.create(document["build"], _lots(_new_cell(namespace, cell) for cell in document["cells"]))
        self._replace_older(document["build"])

    def _replace_older(self, build: PlannedBuild) -> None:
        """Cancel what waits in the older builds of a build's group, or in itself if a newer one is there already."""
        if not (concurrency := build.get("concurrency")):
            return
        group = concurrency["group"]
        newest, older = self._store.builds.join_group(
            build["id"], build["namespace"], group, at=build["created_at"], cancels=concurrency["cancels"]
        )
        for old in older:
            reason = f"replaced by build {newest}, a newer one of the group {group}"
            if count := self._store.builds.cancel_queued(old, reason):
                log.info("cells replaced by a newer build", build=old, newer=newest, group=group, cells=count)

    def resume(self) -> None:
        """Restore unfinished builds that the store has lost, and end reported builds that are open in it.

        A store that was restored from old data has such builds. Repeating changes nothing.
        """
        for mark in self._artifacts.list_objects(PAUSED_POOLS):
            self._store.workers.pause_pool(mark.removeprefix(PAUSED_POOLS), paused=True)
        for build in self._store.builds.unreported():
            # One that has ended is finished as always: who wrote its report may have died before it was announced.
            if build["state"] == "open" and (report := self._reader.read_report(build["namespace"], build["id"])):
                self._end_again(build["namespace"], build["id"], report)
        for namespace in self._artifacts.list_folders("ns/"):
            for mark in self._artifacts.list_objects(open_prefix(namespace)):
                build_id = mark.rpartition("/")[2]
                if self._reader.read_report(namespace, build_id):
                    self._artifacts.delete_object(mark)
                elif not self.is_whole(build_id):
                    try:
                        self.resume_one(namespace, build_id)
                    except FarmFault:
                        raise
                    except FarmError as error:
                        log.error("build not resumed", namespace=namespace, build=build_id, error=error.message)
                    except Exception:  # One build that cannot be resumed must not stop the others.
                        log.exception("build not resumed", namespace=namespace, build=build_id)

    def _end_again(self, namespace: str, build_id: str, report: Report) -> None:
        """End a build that is open in the store with its report's verdict; its cells are then read from the report."""
        self._store.builds.cancel(build_id)
        self.let_go(namespace, build_id, report)
        log.warning("a reported build was open in the store, which was restored from old data", build=build_id)

    def resume_one(self, namespace: str, build_id: str) -> None:
        """Restore a build that the store has lost from its plan and its open mark."""
        self._known.require_index(namespace)
        document = self._reader.read_plan(namespace, build_id)
        known = self._known.facts(namespace, [cell["key"] for cell in document["cells"]])
        # A hit of the plan stays a hit; a cell that was published since is a hit now.
        cells: list[CellPlan] = [
            {**cell, "facts": known.get(cell["key"]) or cell["facts"]} for cell in document["cells"]
        ]
        mark = self._artifacts.get_object(open_key(namespace, build_id))
        wish: OpenMark = json.loads(mark.data) if mark else {}
        # Before its cells are added: none of them may start.
        self._store.builds.create(document["build"], [])
        if wish.get("paused"):
            self._store.builds.pause(build_id, paused=True)
        if wish.get("cancelled"):
            self._store.builds.cancel(build_id)
        self._create({**document, "cells": cells})
        log.info("build resumed", build=build_id, cells=len(cells))

    def is_whole(self, build_id: str) -> bool:
        """Whether the store has a build with all of its cells."""
        row = self._store.builds.get(build_id)
        return row is not None and row["accepted"] >= row["cells"]

    def let_go(self, namespace: str, build_id: str, report: Report) -> None:
        """Mark a build as reported."""
        self._artifacts.delete_object(open_key(namespace, build_id))
        self._store.builds.mark_reported(build_id, report["build"]["verdict"])

    def cancel(self, namespace: str, build_id: str) -> CancelledCells:
        """Cancel every cell of a build that has not ended; return their number."""
        build_id = self._reader.resolve(namespace, build_id)
        self._mark(namespace, build_id, cancelled=True)
        return {"build": build_id, "cancelled": self._store.builds.cancel(build_id)}

    def pause(self, namespace: str, build_id: str, *, paused: bool) -> BuildView:
        """Hand out no more of a build's jobs, or hand them out again. Running jobs go on."""
        build_id = self._reader.resolve(namespace, build_id)
        self._mark(namespace, build_id, paused=paused)
        if not self._store.builds.pause(build_id, paused=paused):
            raise Conflict(f"build {build_id} has ended")
        return self._reader.get(namespace, build_id)

    def _mark(self, namespace: str, build_id: str, **wish: bool) -> None:
        """Record a request on a build's open mark, so that it survives a loss of the store."""
        key = open_key(namespace, build_id)
        if found := self._artifacts.get_object(key):
            self._artifacts.put_object(key, json.dumps({**json.loads(found.data), **wish}).encode())

    def pause_pool(self, pool: str, *, paused: bool) -> None:
        """Hand out no more of a pool's jobs, or hand them out again. Raises NotFound for an unknown pool."""
        known = self._store.workers.pool_names()
        if pool not in known:
            raise NotFound(f"no pool {pool}", hint=f"known are: {', '.join(sorted(known)) or 'none'}")
        if paused:
            self._artifacts.put_object(f"{PAUSED_POOLS}{pool}", b"{}")
        else:
            self._artifacts.delete_object(f"{PAUSED_POOLS}{pool}")
        self._store.workers.pause_pool(pool, paused=paused)
        self._store.wakeups.wake_pool(pool)


def _group(concurrency: Concurrency, labels: Mapping[str, str]) -> ConcurrencyGroup:
    per = concurrency.per
    name = f"{concurrency.group} {per}={labels.get(per, '')}" if per else concurrency.group
    return {"group": name, "cancels": concurrency.cancel_in_progress}


def digest_of_request(submission: SubmissionDocument) -> str:
    """Return the digest of what a submission asks for, whatever release its client is of."""
    return digest_of(
        {
            "manifest": submission["manifest"],
            "models": {name: model["digest"] for name, model in submission["models"].items()},
            "data": {name: data["digest"] for name, data in submission["data"].items()},
            "files": {path: file["digest"] for path, file in (submission.get("files") or {}).items()},
            "labels": submission.get("labels") or {},
            "gates": submission.get("gates"),
        }
    )


def _compile(cell: Cell, before: SnapshotCell | None) -> Compile:
    """Return what the duration of a cell's compile is estimated from; `before` is the cell as it last passed."""
    spec, size = cell.order["spec"], sum(file["size"] for file in cell.order["model"]["files"])
    seconds = before.get("seconds", 0.0) if before else 0.0
    return Compile(comparable(spec), spec["model"]["digest"], size, seconds)


def _planned_document(planned: PlannedCell) -> CellPlan:
    cell = planned.cell
    return {
        **planned.as_dict(),
        "order": cell.order,
        "limits": cell.limits,
        "priority": cell.priority,
        "gates": cell.gates,
        "expected": cell.expected,
        "sweep": cell.sweep,
        "facts": planned.facts,
        "before": None,
        "baseline": None,
    }


def _published_as(cell: CellPlan) -> list[str]:
    """Return the cache keys under which a planned cell's program may be; for a hit, the key that the plan found."""
    if cell["order"]:
        return keys_of(cell["order"], cell["key"])
    return [cell["facts"]["key"]] if cell["facts"] else []


def _new_cell(namespace: str, cell: CellPlan) -> NewCell:
    facts, order = cell["facts"], cell["order"]
    if facts:
        order = {**order, "hit": True} if order and is_measured(cell) else None
    return {
        "identifier": cell["identifier"],
        "key": cell["key"],
        "pool": cell["pool"],
        "priority": cell["priority"],
        "limits": cell["limits"],
        "expected_seconds": cell["expected_seconds"],
        "facts": None if order else facts,
        "namespace": namespace,
        "order": order,
        "failure": None,
        "expected": expected_failure(cell),
    }


def _lots(cells: Iterable[NewCell]) -> Iterator[list[NewCell]]:
    iterator = iter(cells)
    while lot := list(islice(iterator, LOT)):
        yield lot

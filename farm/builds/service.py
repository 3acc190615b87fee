"""Accept builds: plan, submit, retry; cancel, pause and resume them; and restore those that the store has lost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from farm.artifacts import planned_orders
from farm.artifacts.inventory import lacking
from farm.artifacts.s3 import S3Store
from farm.artifacts.storage import build_key, open_key, open_prefix
from farm.builds.known_failures import KnownFailures
from farm.builds.past_builds import Baselines
from farm.builds.plan import Plan, is_measured, is_unfinished, plan_retry, unsuccessful
from farm.builds.planner import KnownArtifacts, Planner, kept_as
from farm.builds.reading import BuildReader
from farm.errors import Conflict, FarmError, FarmFault, InputsMissing, NotFound, QuotaExceeded
from farm.jobs.rows import CancelledCells, ConcurrencyGroup, NewCell, OpenMark, PlannedBuild
from farm.jobs.state import job_key, keys_of
from farm.logging import get_logger
from farm.manifest.entries import Manifest
from farm.matrix.combinations import fits_any
from farm.matrix.planned import CellPlan, PlanDocument, ShownCell, ShownPlan, SubmissionDocument
from farm.metrics.instruments import CELLS_PLANNED, miss_reason
from farm.results.report import BuildView, Report
from farm.results.verdict import expected_failure
from farm.settings import Settings
from farm.spec import digest_of
from farm.store import Store
from farm.units import view_of

log = get_logger(__name__)

PAUSED_POOLS = "config/paused-pools/"  # Prefix of the marks of paused pools.


@dataclass(eq=False)
class Admission:
    """Accepts planned builds, and restores those that the store has lost."""

    _store: Store
    _artifacts: S3Store
    _settings: Settings
    _reader: BuildReader
    _known: KnownArtifacts

    def is_known(self, namespace: str, build_id: str, request: str) -> bool:
        """Whether a build was accepted. Raises Conflict if another request made it, as far as that is known."""
        self._require_own(namespace, build_id, request)
        return self.is_whole(build_id) or self._reader.read_report(namespace, build_id) is not None

    def _require_own(self, namespace: str, build_id: str, request: str) -> None:
        row = self._store.builds.get(build_id)
        if row and row["namespace"] != namespace:
            raise Conflict(f"the id {build_id} is taken", hint="submit again with a new build id")
        if row and row.get("request", request) != request:
            hint = "choose another build id or Idempotency-Key"
            raise Conflict(f"build {build_id} was made by another request", hint=hint)

    def is_accepted(self, namespace: str, build_id: str, manifest: bytes, request: str) -> bool:
        """Whether a build was submitted before. Raises Conflict if another build has its id."""
        known = self._artifacts.get_object(build_key(namespace, build_id, "manifest.yaml"))
        if known and known.data != manifest:
            hint = "submit again with a new build id"
            raise Conflict(f"build {build_id} was submitted with another manifest", hint=hint)
        if known is None:  # Then it has no report either, which storage need not be asked for.
            self._require_own(namespace, build_id, request)
            return False
        return self.is_known(namespace, build_id, request)

    def accept(self, document: PlanDocument, manifest: bytes) -> None:
        """Record a planned build in object storage, then accept it into the store."""
        namespace, build_id = document["build"]["namespace"], document["build"]["id"]
        for name, data in (("manifest.yaml", manifest), ("plan.json", json.dumps(document).encode())):
            self._artifacts.put_object(build_key(namespace, build_id, name), data)
        self._reader.keep_plan(document)
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
        self._list_orders(document)
        self._store.builds.create(document["build"], (_new_cell(namespace, cell) for cell in document["cells"]))
        self.replace_older(document["build"])

    def _list_orders(self, document: PlanDocument) -> None:
        """Let workers run what the build has planned. Before its cells are in the store, so that none has to wait."""
        planned = [(cell["key"], cell["order"]) for cell in document["cells"] if cell["order"]]
        planned_orders.keep(self._artifacts, document["build"]["namespace"], document["build"]["id"], planned)

    def replace_older(self, build: PlannedBuild) -> None:
        """Cancel what waits in the older builds of a build's group, or in itself if a newer one is there already."""
        if not (concurrency := build.get("concurrency")):
            return
        group = concurrency["group"]
        newest, older = self._store.builds.join_group(
            build["id"], build["namespace"], group, at=build["created_at"], cancels=concurrency["cancels"]
        )
        for old in older:
            reason = f"replaced by build {newest}, a newer one of the group {group}"
            count = self._store.builds.cancel_queued(old, reason)
            log.info("build replaced by a newer one", build=old, newer=newest, group=group, cells=count)

    # --- after a loss -------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Restore unfinished builds that the store has lost, and end reported builds that are open in it.

        A store that was restored from old data has such builds. Repeating changes nothing.
        """
        for mark in self._artifacts.list_objects(PAUSED_POOLS):
            self._store.workers.pause_pool(mark.removeprefix(PAUSED_POOLS), paused=True)
        for build in self._store.builds.unreported():
            # One that has ended is finished as always: its report's writer may have died before announcing it.
            if build["state"] == "open" and (report := self._reader.read_report(build["namespace"], build["id"])):
                # Its cells are then read from the report.
                self._store.builds.cancel(build["id"])
                self.let_go(build["namespace"], build["id"], report)
                log.warning("a reported build was open in a store of old data", build=build["id"])
        for namespace in self._artifacts.list_folders("ns/"):
            for mark in self._artifacts.list_objects(open_prefix(namespace)):
                build_id = mark.rpartition("/")[2]
                if self._reader.read_report(namespace, build_id):
                    self._artifacts.delete_object(mark)
                else:
                    try:
                        if not self.is_whole(build_id):
                            self.resume_one(namespace, build_id)
                        elif not planned_orders.is_kept(self._artifacts, namespace, build_id):  # Of a release before.
                            self._list_orders(self._reader.read_plan(namespace, build_id))
                    except FarmFault:
                        raise
                    except FarmError as error:
                        log.error("build not resumed", namespace=namespace, build=build_id, error=error.message)
                    except Exception:  # One build that cannot be resumed must not stop the others.
                        log.exception("build not resumed", namespace=namespace, build=build_id)

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


def _new_cell(namespace: str, cell: CellPlan) -> NewCell:
    facts, order = cell["facts"], cell["order"]
    if facts:
        order = {**order, "hit": True} if order and is_measured(cell) else None
    known = {**cell, "namespace": namespace, "order": order, "expected": expected_failure(cell)}
    return view_of(NewCell, known)


SET_BACK = 10.0  # Seconds by which submissions may be dated ahead of the clock before somebody hears of it.


@dataclass(eq=False)
class BuildService:
    """Accepts builds and changes to them. All answers are plain JSON."""

    _store: Store
    _artifacts: S3Store
    _reader: BuildReader
    _known: KnownArtifacts
    _planner: Planner
    _baselines: Baselines
    _known_failures: KnownFailures
    _admission: Admission

    # --- before a build -----------------------------------------------------------------------------------------

    def plan(self, namespace: str, submission: SubmissionDocument, *, by: str = "") -> ShownPlan:
        """Return what a submission would do, and which blobs have to be uploaded first. Changes nothing.

        The submission is kept a while, for its caller's `submit_planned`. Raises ManifestError with every problem.
        """
        plan, manifest, absent, found = self._plan(namespace, submission, by)
        return {
            "build_id": submission["build_id"],
            "kept": kept_as(submission),
            "digest": plan.digest,
            "name": manifest.name,
            "cells": [view_of(ShownCell, {**cell, "expected": cell["expected"] is not None}) for cell in plan.cells],
            "outlook": self._reader.outlook(plan.cells, manifest.max_parallel),
            "warnings": [*plan.warnings, *found],
            "conversions": plan.conversions,
            "missing_blobs": absent,
        }

    def _plan(
        self, namespace: str, submission: SubmissionDocument, by: str, *, unattended: bool = False
    ) -> tuple[Plan, Manifest, list[str], list[str]]:
        """Return a plan and its manifest, which inputs have to be uploaded, and what to know of the baselines."""
        plan, manifest = self._planner.plan(namespace, submission, by)
        chosen = submission.get("gates")
        found = self._baselines.attach(namespace, manifest.name, plan.cells, chosen, unattended=unattended)
        return plan, manifest, lacking(self._artifacts, plan.needed), found

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
        unattended: bool = False,
    ) -> BuildView:
        """Accept a build. It is acknowledged when object storage and the store have it; repeating is harmless.

        `max_cells` is how many unfinished cells the builds of this caller may have (0: no bound). `request` is the
        digest of what asked for the build, by default of the submission. The build has the `warnings`, too.
        `unattended` as in `Baselines.attach`.

        Raises ManifestError for what is wrong in the manifest, InputsMissing for what was not uploaded, QuotaExceeded,
        Conflict if the build's id was used for another request.
        """
        build_id = submission["build_id"]
        text = submission["manifest"].encode()
        request = request or digest_of_request(submission)
        if self._admission.is_accepted(namespace, build_id, text, request):
            if known := self._store.builds.get(build_id):
                self._admission.replace_older(known)
        else:
            document = self._plan_document(namespace, submission, by, request, unattended=unattended)
            document["build"]["warnings"] = [*warnings, *document["build"]["warnings"]]
            self._admission.check_quotas(namespace, by, sum(map(is_unfinished, document["cells"])), max_cells)
            self._admission.accept(document, text)
            log.info("build submitted", build=build_id, cells=len(document["cells"]), by=by)
        return self._accepted(namespace, build_id)

    def _plan_document(
        self, namespace: str, submission: SubmissionDocument, by: str, request: str, *, unattended: bool
    ) -> PlanDocument:
        """Return the plan of a build that may be accepted now. Raises InputsMissing, and as `Planner.plan`."""
        plan, manifest, absent, found = self._plan(namespace, submission, by, unattended=unattended)
        if absent:
            said = f"{len(absent)} inputs of the build are not in object storage, the first is {absent[0]}"
            # A stored manifest's build is asked for in another way.
            kept = kept_as(submission) if request == digest_of_request(submission) else ""
            raise InputsMissing(said, absent, kept=kept, hint="upload the missing inputs, then submit again")
        self._known_failures.attach(namespace, plan.cells)
        moment = self._store.next_moment()
        if (ahead := moment - self._store.now()) > SET_BACK:
            back = f"the clock of Redis was set back by {ahead / 60:.0f} min"
            found.append(f"{back}: the build is dated after the last one")
        document: PlanDocument = {
            "schema": 1,
            "build": {
                "id": submission["build_id"],
                "namespace": namespace,
                "name": manifest.name,
                "labels": {**manifest.labels, **submission.get("labels", {})},
                "created_by": by,
                "created_at": moment,
                "cells": len(plan.cells),
                "hits": sum(cell["state"] == "hit" for cell in plan.cells),
                "max_parallel": manifest.max_parallel,
                "fail_fast": manifest.fail_fast or submission.get("fail_fast", False),
                "warnings": [*plan.warnings, *found],
                "plan": plan.digest,
                "request": request,
            },
            "cells": plan.cells,
        }
        if group := manifest.concurrency:
            per = f" {group.per}={document['build']['labels'].get(group.per, '')}" if group.per else ""
            asked: ConcurrencyGroup = {"group": group.group + per, "cancels": group.cancel_in_progress}
            document["build"]["concurrency"] = asked
        if only := submission.get("only"):
            document["build"]["only"] = list(only)
        return document

    def submit_planned(self, namespace: str, build_id: str, kept: str, *, by: str, max_cells: int = 0) -> BuildView:
        """Accept the build of a submission that this caller had planned here; `kept` is what the plan answered.

        Raises NotPlanned if this server does not keep it, and as `submit`.
        """
        submission = self._planner.planned(namespace, build_id, kept, by)
        return self.submit(namespace, submission, by=by, max_cells=max_cells)

    def accepted_before(self, namespace: str, build_id: str, request: str) -> BuildView | None:
        """Return a build that was accepted before, if it was. Raises Conflict if another request made it."""
        return self._accepted(namespace, build_id) if self._admission.is_known(namespace, build_id, request) else None

    def _accepted(self, namespace: str, build_id: str) -> BuildView:
        """Return a submitted build with the digest of its plan: the submitter may have seen another plan."""
        planned = self._reader.read_plan(namespace, build_id)
        return {**self._reader.get(namespace, build_id), "plan": planned["build"].get("plan")}

    def plan_retry(
        self, namespace: str, build_id: str, new_id: str, *, failed: bool, only: Sequence[str] = ()
    ) -> ShownPlan:
        """Return what `retry` would do. Changes nothing. Raises as `retry`."""
        document = self._plan_retry(namespace, build_id, new_id, failed, only)
        return {
            "build_id": new_id,
            "name": document["build"]["name"],
            "cells": (cells := document["cells"]),
            "outlook": self._reader.outlook(cells, document["build"]["max_parallel"]),
            "warnings": [],
            "missing_blobs": [],
        }

    def retry(
        self, namespace: str, build_id: str, new_id: str, *, failed: bool, only: Sequence[str] = (), by: str,
        max_cells: int = 0,
    ) -> BuildView:  # fmt: skip
        """Accept a build with an ended build's cells as they were planned, and return it. Repeating it is harmless.

        `new_id` is the id of the new build; with `failed` it has only the cells that did not succeed, of which one
        of the patterns in `only` fits the identifier (none: all). `max_cells` as in `submit`.

        Raises NotFound, Conflict for a build that has not ended, UsageError for inputs that are gone, QuotaExceeded.
        """
        build_id = self._reader.resolve(namespace, build_id)
        manifest = self._artifacts.get_object(build_key(namespace, build_id, "manifest.yaml"))
        text = manifest.data if manifest else b""
        request = digest_of({"retry": True, "failed": failed, **({"only": list(only)} if only else {})})
        if not self._admission.is_accepted(namespace, new_id, text, request):
            document = self._plan_retry(namespace, build_id, new_id, failed, only)
            self._known_failures.attach(namespace, document["cells"])
            document["build"] |= {"created_by": by, "created_at": self._store.next_moment(), "request": request}
            self._admission.check_quotas(namespace, by, sum(map(is_unfinished, document["cells"])), max_cells)
            self._admission.accept(document, text)
            log.info("build retried", build=new_id, retries=document["build"]["retries"], by=by)
        return self._reader.get(namespace, new_id)

    def _plan_retry(
        self, namespace: str, build_id: str, new_id: str, failed: bool, only: Sequence[str]
    ) -> PlanDocument:
        self._known.require_index(namespace)
        report = self._reader.report(namespace, build_id)
        build_id = report["build"]["id"]
        if report["build"]["state"] == "open":
            raise Conflict(f"build {build_id} has not ended", hint="wait with `farm watch`, or `farm cancel` it")
        planned = self._reader.read_plan(namespace, build_id)
        wanted = unsuccessful(report) if failed else {cell["identifier"] for cell in planned["cells"]}
        if only:
            wanted = {name for name in wanted if fits_any(only, [name])}
        cells = [cell for cell in planned["cells"] if cell["identifier"] in wanted]
        if not cells:
            fits, end = f" that fits {', '.join(only)}" * bool(only), report["build"]["verdict"]
            raise NotFound(f"no cell of build {build_id}{fits} can be tried again: {end['text'] if end else ''}")
        known = self._known.whole(namespace, {cell["identifier"]: _published_as(cell) for cell in cells})
        missing = [job_key(cell["order"], cell["key"]) for cell in cells if cell["identifier"] not in known]
        running = self._store.jobs.unfinished(namespace, missing)
        live = {pool["name"]: pool["live_workers"] for pool in self._store.workers.pools()}
        document = plan_retry(planned, cells, known=known, running=running, live_workers=live, build_id=new_id)
        self._known.require_inputs(document["cells"], f"build {build_id}")
        return document

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
            **{name: value for name in ("only", "fail_fast") if (value := submission.get(name))},
        }
    )


def _published_as(cell: CellPlan) -> list[str]:
    """Return the cache keys under which a planned cell's program may be; for a hit, the key that the plan found."""
    if cell["order"]:
        return keys_of(cell["order"], cell["key"])
    return [cell["facts"]["key"]] if cell["facts"] else []

"""Admission: what was planned becomes a build, once, in object storage and in the store; also after a loss."""

from __future__ import annotations

import json

from farm.artifacts import planned_orders
from farm.artifacts.s3 import S3Store
from farm.artifacts.storage import build_key, open_key, open_prefix
from farm.builds.plan import is_measured
from farm.builds.planner import KnownArtifacts
from farm.builds.reading import BuildReader
from farm.errors import Conflict, FarmError, FarmFault, QuotaExceeded
from farm.jobs.rows import NewCell, OpenMark, PlannedBuild
from farm.logging import get_logger
from farm.matrix.planned import CellPlan, PlanDocument
from farm.metrics.instruments import CELLS_PLANNED, miss_reason
from farm.results.report import Report
from farm.results.verdict import expected_failure
from farm.settings import Settings
from farm.store import Store

log = get_logger(__name__)

PAUSED_POOLS = "config/paused-pools/"
"""Prefix of the marks of paused pools."""


class Admission:
    """Accepts planned builds, and restores those that the store has lost."""

    def __init__(
        self, store: Store, artifacts: S3Store, settings: Settings, *, reader: BuildReader, known: KnownArtifacts
    ) -> None:
        self._store = store
        self._artifacts = artifacts
        self._settings = settings
        self._reader = reader
        self._known = known

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
        planned = ((cell["key"], cell["order"]) for cell in document["cells"] if cell["order"])
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
    return {
        "identifier": cell["identifier"],
        "key": cell["key"],
        "pool": cell["pool"],
        "priority": cell["priority"],
        "limits": cell["limits"],
        "expected_seconds": cell["expected_seconds"],
        "facts": facts,
        "namespace": namespace,
        "order": order,
        "expected": expected_failure(cell),
    }

"""Builds: plan, submit, cancel, judge, report; and the one read path of a build.

A build is read from the store while it lives there, else from its report in object storage.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

from farm.artifacts import readable
from farm.artifacts.index import rebuild, without_program
from farm.artifacts.ownership import lacking
from farm.artifacts.refs import Refs
from farm.artifacts.s3 import S3Store
from farm.builds.bucket_models import BucketModels
from farm.builds.follow_up import background_cells, follow_up_id, is_proven, plan_follow_up
from farm.builds.job_views import JobViews
from farm.builds.latest import given_up, submitted
from farm.builds.outlook import outlook
from farm.builds.plan import Plan, make_plan, needed_blobs
from farm.builds.retry import plan_retry, unsuccessful
from farm.compiling.attempt import Attempt
from farm.errors import (
    Conflict,
    FarmError,
    FarmFault,
    InputsMissing,
    ManifestError,
    NotFound,
    QuotaExceeded,
    StoreUnavailable,
    UsageError,
)
from farm.jobs.estimate import comparable
from farm.jobs.state import WAITS_FOR_STORAGE, AttemptEnd, State
from farm.logging import get_logger
from farm.manifest import Manifest, parse_manifest
from farm.matrix import Cell, expand
from farm.models.data import FrozenData
from farm.models.model import FrozenModel
from farm.results import junit
from farm.results.sweep import draw, sweeps_of
from farm.results.verdict import expected_failure, judge_cell, verdict_of
from farm.settings import Settings
from farm.spec import job_key, keys_of
from farm.store import Store
from farm.targets.pools import Pool, in_use

log = get_logger(__name__)

PAUSED_POOLS = "config/paused-pools/"
"""A mark for each pool that hands out nothing."""

LATEST = "latest"
"""The ref that a finished build moves to the cells that passed."""

EXPLAINED = 20
"""For how many queued cells of one build is said why they wait; the others wait for the same."""

LOT = 500
"""Cells that one script call takes."""

Document = dict[str, Any]


class BuildService:
    """What can be asked of builds. All answers are plain JSON."""

    def __init__(self, store: Store, artifacts: S3Store, settings: Settings) -> None:
        self._store = store
        self._artifacts = artifacts
        self._refs = Refs(artifacts)
        self._jobs = JobViews(store, artifacts)
        self._settings = settings
        self._bucket_models = BucketModels(artifacts, settings.s3_sources)
        self._filling = threading.Lock()
        self._read_plan = lru_cache(maxsize=32)(self._load_plan)

    # --- before a build -----------------------------------------------------------------------------------------

    def plan(self, namespace: str, submission: Mapping[str, Any]) -> Document:
        """Say what a submission would do, and which blobs the submitter has to bring first. Changes nothing.

        Raises ManifestError with every problem found.
        """
        plan, manifest = self._plan(namespace, submission)
        return {
            "build_id": submission["build_id"],
            "name": manifest.name,
            "cells": (cells := [planned.as_dict() for planned in plan.cells]),
            "outlook": self._outlook(cells, manifest.max_parallel),
            "warnings": list(plan.warnings),
            "conversions": plan.conversions,
            "missing_blobs": lacking(self._artifacts, plan.needed_blobs),
        }

    def _plan(self, namespace: str, submission: Mapping[str, Any]) -> tuple[Plan, Manifest]:
        self._require_index(namespace)
        file = submission.get("file") or "manifest"
        manifest = parse_manifest(submission["manifest"], file)
        brought = {name: FrozenModel.from_dict(model) for name, model in submission["models"].items()}
        pools = self._store.workers.pools()
        known = [(Pool.from_dict(pool["pool"]), pool["live_workers"]) for pool in pools]
        cells = expand(
            manifest,
            {**brought, **self._in_buckets(manifest)},
            {name: FrozenData.from_dict(data) for name, data in submission["data"].items()},
            in_use(known, self._settings.toolchains),
            known=[pool for pool, _ in known],
            slots={pool["name"]: pool["slots"] for pool in pools},
            files=submission.get("files") or {},
            file=file,
            limits={"time": self._settings.time_limit, "memory": self._settings.memory_limit},
        )
        keys = dict.fromkeys(job_key(cell.order, cell.key) for cell in cells)
        whole = self._whole_of(
            namespace, {job_key(cell.order, cell.key): keys_of(cell.order, cell.key) for cell in cells}
        )
        missing = [key for key in keys if key not in whole]
        last = self._last_passed(namespace) if missing else {}
        plan = make_plan(
            cells,
            known=whole,
            running=self._store.jobs.unfinished(namespace, missing),
            last=last,
            read_spec=lambda key: self._read_spec(namespace, key),
            live_workers={pool["name"]: pool["live_workers"] for pool in pools},
            history=self._store.history.samples(
                readable(namespace),
                {comparable(cell.order["spec"]) for cell in cells if job_key(cell.order, cell.key) not in whole},
            ),
        )
        return plan, manifest

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
                    problems.append(manifest.problem(error.message, "models", index, "source", hint=error.hint))
        if problems:
            raise ManifestError(problems)
        return models

    def _whole_of(self, namespace: str, names: Mapping[str, Sequence[str]]) -> dict[str, Mapping[str, Any]]:
        """Facts of whole artifacts; `names` are the cache keys under which each may be, the best first, by any name."""
        found = self._known(namespace, [name for all_ in names.values() for name in all_])
        for name in without_program(self._artifacts, found):
            del found[name]  # The index hears of it within ten minutes.
        return {key: found[name] for key, all_ in names.items() for name in reversed(all_) if name in found}

    def _known(self, namespace: str, keys: Sequence[str]) -> dict[str, Mapping[str, Any]]:
        """Facts of the whole artifacts among `keys`: `main` is asked first."""
        known: dict[str, Mapping[str, Any]] = {}
        for source in readable(namespace):
            missing = [key for key in keys if key not in known]
            known |= self._store.index.get_many(source, missing)
        return known

    def _require_index(self, namespace: str) -> None:
        """Refill the index from object storage where Redis has lost it."""
        for source in readable(namespace):
            # One fills it for all who ask meanwhile: reading every sidecar of a large farm takes a while.
            with self._filling:
                if not self._store.index.complete(source):
                    self._store.index.fill(source, rebuild(self._artifacts, source))

    def _last_passed(self, namespace: str) -> dict[str, Mapping[str, Any]]:
        cells = self._refs.read_or_empty(namespace, LATEST)["cells"].values()
        return {cell["identifier"]: cell for cell in sorted(cells, key=lambda cell: cell.get("submitted", 0.0))}

    def _read_spec(self, namespace: str, key: str) -> Mapping[str, Any] | None:
        artifact = self._artifacts.lookup(readable(namespace), key)
        return artifact.sidecar["spec"] if artifact else None

    # --- a build's life -----------------------------------------------------------------------------------------

    def submit(self, namespace: str, submission: Mapping[str, Any], *, by: str, max_cells: int = 0) -> Document:
        """Accept a build. It is acknowledged when both object storage and the store have it; repeating is harmless.

        `max_cells` is how many unfinished cells the builds of this caller may have (0: no bound).

        Raises ManifestError for what is wrong in the manifest, InputsMissing for what was not uploaded, QuotaExceeded.
        """
        build_id = submission["build_id"]
        text = submission["manifest"].encode()
        if self._is_accepted(namespace, build_id, text):
            return self.get(namespace, build_id)
        plan, manifest = self._plan(namespace, submission)
        if absent := lacking(self._artifacts, plan.needed_blobs):
            raise InputsMissing(
                f"{len(absent)} inputs of the build are not in object storage, the first is {absent[0]}",
                absent,
                hint="upload what is listed as missing, then submit again",
            )
        self._check_quotas(namespace, by, sum(planned.state != "hit" for planned in plan.cells), max_cells)
        document = {
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
                "warnings": list(plan.warnings),
            },
            "cells": [_planned_document(planned) for planned in plan.cells],
        }
        self._accept(document, text)
        log.info("build submitted", build=build_id, cells=len(plan.cells), by=by)
        return self.get(namespace, build_id)

    def plan_retry(self, namespace: str, build_id: str, retry: Mapping[str, Any]) -> Document:
        """Say what `retry` would do. Changes nothing. Raises as `retry`."""
        document = self._plan_retry(namespace, build_id, retry)
        return {
            "build_id": retry["build_id"],
            "name": document["build"]["name"],
            "cells": (cells := document["cells"]),
            "outlook": self._outlook(cells, document["build"]["max_parallel"]),
            "warnings": [],
            "missing_blobs": [],
        }

    def retry(
        self, namespace: str, build_id: str, retry: Mapping[str, Any], *, by: str, max_cells: int = 0
    ) -> Document:
        """Accept a build with an ended build's cells as they were planned, and return it. Repeating it is harmless.

        `retry` is `{"build_id": of the new build, "failed": whether it has only what did not succeed}`; `max_cells` as
        in `submit`.

        Raises NotFound, Conflict for a build that has not ended, UsageError for inputs that are gone, QuotaExceeded.
        """
        manifest = self._artifacts.get_object(
            f"ns/{namespace}/builds/{self.resolve(namespace, build_id)}/manifest.yaml"
        )
        text = manifest.data if manifest else b""
        if not self._is_accepted(namespace, retry["build_id"], text):
            document = self._plan_retry(namespace, build_id, retry)
            document["build"] |= {"created_by": by, "created_at": self._store.now()}
            unfinished = document["build"]["cells"] - document["build"]["hits"]
            self._check_quotas(namespace, by, unfinished, max_cells)
            self._accept(document, text)
            log.info("build retried", build=retry["build_id"], retries=document["build"]["retries"], by=by)
        return self.get(namespace, retry["build_id"])

    def _plan_retry(self, namespace: str, build_id: str, retry: Mapping[str, Any]) -> Document:
        self._require_index(namespace)
        report = self.report(namespace, build_id)
        build_id = report["build"]["id"]
        if report["build"]["state"] == "open":
            raise Conflict(f"build {build_id} has not ended", hint="wait with `farm watch`, or `farm cancel` it")
        planned = self._read_plan(namespace, build_id)
        wanted = unsuccessful(report) if retry["failed"] else {cell["identifier"] for cell in planned["cells"]}
        cells = [cell for cell in planned["cells"] if cell["identifier"] in wanted]
        if not cells:
            raise NotFound(f"no cell of build {build_id} is to be tried again: {report['build']['verdict']['text']}")
        known = self._whole_of(namespace, {cell["identifier"]: _published_as(cell) for cell in cells})
        missing = [job_key(cell["order"] or {}, cell["key"]) for cell in cells if cell["identifier"] not in known]
        document = plan_retry(
            planned,
            cells,
            known=known,
            running=self._store.jobs.unfinished(namespace, missing),
            live_workers={pool["name"]: pool["live_workers"] for pool in self._store.workers.pools()},
            build={"id": retry["build_id"]},
        )
        needed = needed_blobs((cell["state"], cell["order"]) for cell in document["cells"])
        # Its plan names them, so a mark is no reason to bring them again.
        if absent := [digest for digest, size in needed.items() if not self._artifacts.has_blob(digest, size)]:
            raise UsageError(
                f"{len(absent)} inputs of build {build_id} are gone from object storage, the first is {absent[0]}",
                hint="submit the manifest again, which brings them",
            )
        return document

    def _is_accepted(self, namespace: str, build_id: str, manifest: bytes) -> bool:
        """Whether a build was submitted before. Raises Conflict where its id is another build's."""
        row = self._store.builds.get(build_id)
        if row and row["namespace"] != namespace:
            raise Conflict(f"the id {build_id} is taken", hint="submit again with a new build id")
        known = self._artifacts.get_object(f"ns/{namespace}/builds/{build_id}/manifest.yaml")
        if known and known.data != manifest:
            raise Conflict(
                f"build {build_id} was submitted with another manifest", hint="submit again with a new build id"
            )
        return known is not None and (self._whole(build_id) or self._read_report(namespace, build_id) is not None)

    def _accept(self, document: Document, manifest: bytes) -> None:
        """Write down a planned build, then take it in."""
        namespace, build_id = document["build"]["namespace"], document["build"]["id"]
        folder = f"ns/{namespace}/builds/{build_id}"
        self._artifacts.put_object(f"{folder}/manifest.yaml", manifest)
        self._artifacts.put_object(f"{folder}/plan.json", json.dumps(document).encode())
        self._artifacts.put_object(f"ns/{namespace}/open/{build_id}", b"{}")
        self._create(document)

    def _check_quotas(self, namespace: str, by: str, cells: int, max_cells: int) -> None:
        """Two builds that are submitted in one moment may together exceed a quota: it bounds load, not trust."""
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

    def _create(self, document: Document) -> None:
        namespace = document["build"]["namespace"]
        self._store.builds.create(document["build"], _lots(_new_cell(namespace, cell) for cell in document["cells"]))

    def resume(self) -> None:
        """Give the store back every unfinished build that it has lost, and end reported ones that it has open again.

        It has those if it was restored from old data. Repeating all of it changes nothing.
        """
        for mark in self._artifacts.list_objects(PAUSED_POOLS):
            self._store.workers.pause_pool(mark.removeprefix(PAUSED_POOLS), paused=True)
        for build in self._store.builds.unreported():
            if report := self._read_report(build["namespace"], build["id"]):
                self._end_again(build["namespace"], build["id"], report)
        for namespace in self._artifacts.list_folders("ns/"):
            for mark in self._artifacts.list_objects(f"ns/{namespace}/open/"):
                build_id = mark.rpartition("/")[2]
                if self._read_report(namespace, build_id):
                    self._artifacts.delete_object(mark)
                elif not self._whole(build_id):
                    try:
                        self._resume(namespace, build_id)
                    except FarmFault:
                        raise
                    except FarmError as error:
                        log.error("build not resumed", namespace=namespace, build=build_id, error=error.message)
                    except Exception:  # One build that cannot be resumed must not keep the others.
                        log.exception("build not resumed", namespace=namespace, build=build_id)

    def _end_again(self, namespace: str, build_id: str, report: Document) -> None:
        """End a build that is open in the store with the verdict of its report, from which its cells are read then."""
        self._store.builds.cancel(build_id)
        self._let_go(namespace, build_id, report)
        log.warning("the store had a reported build open: it was restored from old data", build=build_id)

    def _resume(self, namespace: str, build_id: str) -> None:
        self._require_index(namespace)
        document = self._read_plan(namespace, build_id)
        known = self._known(namespace, [cell["key"] for cell in document["cells"]])
        # What was a hit when the build was planned stays one; what was published since is one now.
        cells = [{**cell, "facts": known.get(cell["key"]) or cell["facts"]} for cell in document["cells"]]
        mark = self._artifacts.get_object(f"ns/{namespace}/open/{build_id}")
        wish = json.loads(mark.data) if mark else {}
        if wish.get("paused"):
            # Before its cells come: none of them is to start.
            self._store.builds.create(document["build"], [])
            self._store.builds.pause(build_id, paused=True)
        self._create({**document, "cells": cells})
        if wish.get("cancelled"):
            self._store.builds.cancel(build_id)
        log.info("build resumed", build=build_id, cells=len(cells))

    def _whole(self, build_id: str) -> bool:
        """Whether the store has a build with all of its cells."""
        row = self._store.builds.get(build_id)
        return row is not None and row["accepted"] >= row["cells"]

    def cancel(self, namespace: str, build_id: str) -> Document:
        """End every cell of a build that has not ended; say how many that were."""
        build_id = self.resolve(namespace, build_id)
        self._mark(namespace, build_id, cancelled=True)
        return {"build": build_id, "cancelled": self._store.builds.cancel(build_id)}

    def pause(self, namespace: str, build_id: str, *, paused: bool) -> Document:
        """Hand out no more of a build's jobs, or hand them out again. What runs goes on."""
        build_id = self.resolve(namespace, build_id)
        self._mark(namespace, build_id, paused=paused)
        if not self._store.builds.pause(build_id, paused=paused):
            raise Conflict(f"build {build_id} has ended")
        return self.get(namespace, build_id)

    def _mark(self, namespace: str, build_id: str, **wish: bool) -> None:
        """Note on a build's open mark what is to hold for it, also after the store was lost."""
        key = f"ns/{namespace}/open/{build_id}"
        if found := self._artifacts.get_object(key):
            self._artifacts.put_object(key, json.dumps({**json.loads(found.data), **wish}).encode())

    def pause_pool(self, pool: str, *, paused: bool) -> None:
        """Hand out nothing of a pool any more, or hand it out again. Raises NotFound for a pool never seen."""
        known = self._store.workers.pool_names()
        if pool not in known:
            raise NotFound(f"no pool {pool}", hint=f"known are: {', '.join(sorted(known)) or 'none'}")
        if paused:
            self._artifacts.put_object(f"{PAUSED_POOLS}{pool}", b"{}")
        else:
            self._artifacts.delete_object(f"{PAUSED_POOLS}{pool}")
        self._store.workers.pause_pool(pool, paused=paused)
        self._store.wakeups.wake_pool(pool)

    def report(self, namespace: str, build_id: str) -> Document:
        """Return a build with its cells as they stand: from the store while it lives there, else its report.

        Raises NotFound.
        """
        build_id = self.resolve(namespace, build_id)
        row = self._live(namespace, build_id)
        # A report is final: the store may have other cells if it was restored, and an expectation may run out.
        final = self._read_report(namespace, build_id) if row and row["state"] == "reported" else None
        return final or self._live_report(namespace, build_id) or self._stored_report(namespace, build_id)

    def get(self, namespace: str, build_id: str) -> Document:
        """Return a build without its cells. Raises NotFound.

        Until its report is written, `counts` are those of the jobs: what failed a gate counts as succeeded.
        """
        build_id = self.resolve(namespace, build_id)
        row = self._live(namespace, build_id)
        if row is None:
            return dict(self._stored_report(namespace, build_id)["build"])
        return _build_document({**row, "followed_by": self._follower(build_id)})

    def cells(self, namespace: str, build_id: str) -> list[Document]:
        """Return a build's cells, judged, in the order of its manifest. Raises NotFound."""
        return list(self.report(namespace, build_id)["cells"])

    def list(self, namespace: str, limit: int = 50) -> list[Document]:
        """Return the newest builds of a namespace that the store still knows."""
        return [_build_document(row) for row in self._store.builds.list(namespace)[:limit]]

    def events(self, namespace: str, build_id: str, after: str | None, block_seconds: float) -> Document:
        """Return what happened to a build after an event id, waiting up to `block_seconds` for the first.

        `reset` means that the position is unknown to the store (trimmed, or of a store that was lost): read the state.
        """
        found = self._store.events.read(self.resolve(namespace, build_id), after, int(block_seconds * 1000))
        return {"items": list(found.items), "reset": found.reset}

    def junit(self, namespace: str, build_id: str) -> str:
        """Return a build's report as JUnit XML."""
        return junit.render(self.report(namespace, build_id))

    def resolve(self, namespace: str, build_id: str) -> str:
        """Return the whole id of a build that is named by id, unique prefix or `@latest`. Raises NotFound.

        `@latest` is the newest that somebody submitted: no follow-up, for whose verdict nobody waits.
        """
        if self._live(namespace, build_id):
            return build_id
        known = self._store.builds.list(namespace)
        if build_id == "@latest":
            newest = next((str(row["id"]) for row in known if not row.get("follows")), None)
            if newest is None:
                raise NotFound(f"no build in namespace {namespace}", hint="`farm submit MANIFEST` makes one")
            return newest
        matches = [str(row["id"]) for row in known if str(row["id"]).startswith(build_id)]
        if len(matches) > 1:
            raise UsageError(f"{build_id} is the start of {len(matches)} builds", hint=", ".join(matches[:5]))
        if matches:
            return matches[0]
        if re.fullmatch(r"b-[0-9a-f]{16}", build_id) and self._artifacts.get_object(
            f"ns/{namespace}/builds/{build_id}/manifest.yaml"
        ):
            return build_id
        raise NotFound(f"no build {build_id} in namespace {namespace}", hint="`farm status` lists the builds")

    def reproduction_of_cell(self, namespace: str, build_id: str, identifier: str) -> Document:
        """Return what `JobViews.reproduction` says of a cell's job; once it is forgotten, from its build's documents.

        Raises NotFound, also for a cell that was a hit when it was planned: its artifact has its own.
        """
        build_id = self.resolve(namespace, build_id)
        cell = next((cell for cell in self.cells(namespace, build_id) if cell["identifier"] == identifier), None)
        if cell is None:
            raise NotFound(f"no cell {identifier} in build {build_id}")
        if cell["job"] and self._store.jobs.get(cell["job"]):
            return self._jobs.reproduction(namespace, cell["job"])
        planned = next(row for row in self._read_plan(namespace, build_id)["cells"] if row["identifier"] == identifier)
        if planned["order"] is None:
            raise NotFound(f"{identifier} was there before build {build_id}", hint=f"`farm reproduce {cell['key']}`")
        attempt = Attempt(
            cell["job"] or "",
            cell["attempt"],
            token="",
            order=planned["order"],
            limits=planned["limits"],
            namespace=namespace,
            key=cell["key"],
            build=build_id,
            worker=cell["worker"] or "",
        )
        return self._jobs.described(attempt, cell)

    # --- the end of a build -------------------------------------------------------------------------------------

    def finish(self, build_id: str) -> None:
        """Write an ended build's report, move `latest` to the cells that passed, and let the build go.

        What it left for the background is submitted. Every step can be repeated; a build whose report is written never
        reopens: its verdict stays, and it moves no ref.
        """
        row = self._store.builds.get(build_id)
        if row is None or row["state"] != "ended":
            return
        namespace = row["namespace"]
        report = self._read_report(namespace, build_id) or self._write_report(namespace, build_id)
        if report is None:
            return
        self._let_go(namespace, build_id, report)
        log.info("build finished", build=build_id, verdict=report["build"]["verdict"]["text"])

    def _write_report(self, namespace: str, build_id: str) -> Document | None:
        """Do what an ended build leads to and write its report last; return the report that counts.

        None if the store has lost the build meanwhile.
        """
        report = self._live_report(namespace, build_id)
        if report is None:
            return None
        report["build"]["state"] = "reported"
        folder = f"ns/{namespace}/builds/{build_id}"
        self._artifacts.put_object(f"{folder}/junit.xml", junit.render(report).encode())
        self._draw(folder, report)
        passed = [cell for cell in report["cells"] if _passed(cell)]
        if passed and report["build"]["follows"]:
            self._replace_slower(namespace, build_id, passed)
        elif passed:
            self._name_latest(namespace, build_id, passed)
        report["build"]["followed_by"] = self._follower(build_id)
        key, data = f"{folder}/report.json", json.dumps(report).encode()
        try:
            self._artifacts.put_object(key, data, create=True)
        except Conflict:
            if first := self._read_report(namespace, build_id):  # Another control plane was faster.
                return first
            self._artifacts.put_object(key, data)
        return report

    def _let_go(self, namespace: str, build_id: str, report: Document) -> None:
        """Let a build go whose report is written."""
        self._artifacts.delete_object(f"ns/{namespace}/open/{build_id}")
        self._store.builds.mark_reported(build_id, report["build"]["verdict"])

    def _name_latest(self, namespace: str, build_id: str, passed: Sequence[Document]) -> None:
        """Let `latest` name what passed, or what its follow-up has shown to be faster; let what is missing follow."""
        planned = self._read_plan(namespace, build_id)
        behind = background_cells(planned["cells"], passed)
        known = self._known(namespace, [cell["key"] for cell in behind])
        proven = {
            cell["identifier"]: known[cell["key"]]
            for cell in behind
            if cell["key"] in known and is_proven(known[cell["key"]], cell["order"]["against"])
        }
        best = [{**cell, "facts": proven.get(cell["identifier"], cell["facts"])} for cell in passed]
        named = [_snapshot_cell(planned["build"], cell) for cell in best]
        self._refs.add_cells(namespace, LATEST, named, drop=given_up(planned, passed))
        if missing := [cell for cell in behind if cell["key"] not in known]:
            self._follow_up(planned, missing)

    def _follow_up(self, planned: Mapping[str, Any], missing: Sequence[Document]) -> None:
        """Submit a build's follow-up with these cells, or take in one that is written down and was refused then."""
        namespace, build_id = planned["build"]["namespace"], planned["build"]["id"]
        follower = follow_up_id(build_id)
        if self._read_report(namespace, follower):
            return
        try:
            if not self._artifacts.get_object(f"ns/{namespace}/open/{follower}"):
                manifest = self._artifacts.get_object(f"ns/{namespace}/builds/{build_id}/manifest.yaml")
                self._accept(plan_follow_up(planned, missing, self._store.now()), manifest.data if manifest else b"")
                log.info("background tuning submitted", build=follower, follows=build_id, cells=len(missing))
            elif not self._whole(follower):
                self._resume(namespace, follower)
        except FarmFault:
            raise  # The build's end is repeated.
        except FarmError as error:
            log.error("no background tuning", build=follower, follows=build_id, error=error.message)

    def _replace_slower(self, namespace: str, build_id: str, passed: Sequence[Document]) -> None:
        """Let `latest` name a follow-up's programs in place of those that they were shown to be faster than."""
        build = self._read_plan(namespace, build_id)["build"]
        faster = [
            (cell["facts"]["against"]["key"], _snapshot_cell(build, cell))
            for cell in passed
            if cell["facts"].get("against") and is_proven(cell["facts"], cell["facts"]["against"]["key"])
        ]
        if faster:
            self._refs.replace_cells(namespace, LATEST, faster)

    def _follower(self, build_id: str) -> str | None:
        follower = follow_up_id(build_id)
        return follower if self._store.builds.get(follower) else None

    def _draw(self, folder: str, report: Document) -> None:
        """Put a picture of the build's sweeps beside its report."""
        if report["sweeps"]:
            try:
                picture = draw(report["sweeps"], report["build"]["name"])
            except UsageError as error:
                log.warning("sweep not drawn", build=report["build"]["id"], error=error.message, hint=error.hint)
                return
            self._artifacts.put_object(f"{folder}/sweep.svg", picture, content_type="image/svg+xml")

    # --- reading ------------------------------------------------------------------------------------------------

    def _live(self, namespace: str, build_id: str) -> Document | None:
        """Return a build as the store has it: ids are the clients' own, and one of another namespace is not ours."""
        row = self._store.builds.get(build_id)
        return row if row and row["namespace"] == namespace else None

    def _live_report(self, namespace: str, build_id: str) -> Document | None:
        row = self._live(namespace, build_id)
        if row is None:
            return None
        planned = self._read_plan(namespace, build_id)
        rows = {cell["identifier"]: cell for cell in self._store.builds.cells(build_id)}
        if len(rows) < row["accepted"]:
            return None  # The store lost them since it told of the build.
        cells = [judge_cell(document, rows.get(document["identifier"], {})) for document in planned["cells"]]
        queued = [cell for cell in cells if cell["state"] == State.QUEUED][:EXPLAINED]
        explained = self._store.jobs.explain([cell["job"] or "" for cell in queued])
        for cell, facts in zip(queued, explained, strict=True):
            cell["waiting"] = self._waiting(cell, facts)
        for cell in cells:
            if cell["state"] == State.RUNNING and cell["detail"].startswith(WAITS_FOR_STORAGE):
                cell["waiting"] = f"on {cell['worker']}: {cell['detail']}"
        verdict = verdict_of(cells)
        live = {"counts": verdict["counts"], "verdict": verdict if row["state"] != "open" else None}
        build = _build_document({**planned["build"], **row, **live, "followed_by": self._follower(build_id)})
        build["outlook"] = self._outlook(cells, row["max_parallel"], paused=bool(row["paused"]))
        return {"schema": 1, "build": build, "cells": cells, "sweeps": sweeps_of(cells)}

    def _outlook(self, cells: Sequence[Document], parallel: int | None, *, paused: bool = False) -> Document:
        return outlook(cells, self._store.workers.pools(), paused=paused, parallel=parallel or 0)

    def _stored_report(self, namespace: str, build_id: str) -> Document:
        report = self._read_report(namespace, build_id)
        if report:
            return report
        if self._artifacts.get_object(f"ns/{namespace}/open/{build_id}"):
            raise StoreUnavailable(
                f"the store lost build {build_id}, which is in object storage",
                hint="the control plane gives it back to the store within seconds",
            )
        raise NotFound(f"build {build_id} was not accepted", hint="submit it again")

    def _read_report(self, namespace: str, build_id: str) -> Document | None:
        found = self._artifacts.get_object(f"ns/{namespace}/builds/{build_id}/report.json")
        if found is None:
            return None
        try:
            report: Document = json.loads(found.data)
            report["build"]["verdict"]["exit_code"]
        except (ValueError, KeyError, TypeError) as error:
            log.warning("report unreadable", key=found.key, error=repr(error))
            return None
        return report

    def _load_plan(self, namespace: str, build_id: str) -> Document:
        found = self._artifacts.get_object(f"ns/{namespace}/builds/{build_id}/plan.json")
        if found is None:
            hint = "it is kept for `keep_days` after the build's end; submit the manifest again"
            raise NotFound(f"build {build_id} has no plan in object storage", hint=hint)
        document: Document = json.loads(found.data)
        return document

    def _waiting(self, cell: Mapping[str, Any], facts: Mapping[str, Any] | None) -> str:
        """Say in one sentence why a queued cell waits, and how its last attempt ended, if there was one."""
        if facts is None:
            return "the farm is taking the build in"
        pool, name, then = cell["pool"], facts["paused"], facts["delayed_until"]
        ahead, slots = facts["ahead"], facts["slots"]
        reasons = [
            (name, f"{name} is paused; `farm resume {name}` lets it go on"),
            (not facts["live_workers"], f"no live worker serves {pool}"),
            (facts["resting"], f"{facts['resting']}"),
            (then, f"tries again in {max(0.0, (then or 0.0) - self._store.now()):.0f} s"),
            (facts["bounded_by"], f"build {facts['bounded_by']} already runs as many as its max-parallel"),
            (facts["handed_out"], "handed out; the next free slot takes it"),
            (True, f"{ahead} job{'s' * (ahead != 1)} ahead for {slots} slot{'s' * (slots != 1)} of {pool}"),
        ]
        return next(reason for holds, reason in reasons if holds) + _after(facts["before"])


def _after(attempt: Mapping[str, Any] | None) -> str:
    """Say how the attempt before this one ended, as a sentence goes on."""
    if attempt is None:
        return ""
    how = {
        AttemptEnd.FAILED: f"failed: {attempt['kind']}: {attempt['message']}",
        AttemptEnd.RELEASED: f"was given back: {attempt['message'] or attempt['worker'] + ' stops'}",
    }.get(attempt["end"], f"was lost: {attempt['message'] or attempt['worker']}")
    return f"; attempt {attempt['number']} {how}"


def _passed(cell: Mapping[str, Any]) -> bool:
    return cell["state"] == State.SUCCEEDED and not cell["warning"] and cell["facts"] is not None


def _planned_document(planned: Any) -> Document:
    cell: Cell = planned.cell
    return {
        **planned.as_dict(),
        "order": None if planned.facts and not cell.order.get("background") else cell.order,
        "limits": cell.limits,
        "priority": cell.priority,
        "gates": cell.gates,
        "expected": cell.expected,
        "sweep": cell.sweep,
        "facts": planned.facts,
    }


def _published_as(cell: Mapping[str, Any]) -> list[str]:
    """Return the cache keys under which a planned cell's program may be; a hit's was found when it was planned."""
    return keys_of(cell["order"], cell["key"]) if cell["order"] else [cell["facts"]["key"]]


def _new_cell(namespace: str, cell: Mapping[str, Any]) -> Document:
    names = ("identifier", "key", "pool", "priority", "limits", "expected_seconds", "facts")
    order = None if cell["facts"] else cell["order"]
    return {
        **{name: cell[name] for name in names},
        "namespace": namespace,
        "order": order,
        "failure": None,
        "expected": expected_failure(cell),
    }


def _lots(cells: Iterable[Document]) -> Iterator[list[Document]]:
    iterator = iter(cells)
    while lot := list(islice(iterator, LOT)):
        yield lot


def _snapshot_cell(build: Mapping[str, Any], cell: Mapping[str, Any]) -> Document:
    facts = cell["facts"]
    return {
        "manifest": build["name"],
        "submitted": submitted(build),
        **{name: cell[name] for name in ("identifier", "model", "target", "precision", "shape", "sizes")},
        # The artifact's key: that of a tuning which was cut short is not the cell's.
        **{name: facts[name] for name in ("key", "device", "toolchain", "program", "sidecar", "seconds")},
    }


def _build_document(row: Mapping[str, Any]) -> Document:
    """Return what people and scripts see of a build; once there is a verdict, its counts are the judged ones."""
    names = ("id", "namespace", "name", "labels", "state", "paused", "created_by", "created_at", "ended_at", "verdict")
    verdict = row.get("verdict")
    return {
        **{name: row.get(name) for name in (*names, "follows", "followed_by", "retries")},
        "counts": verdict["counts"] if verdict else {"hits": row.get("hits", 0), **row["counts"]},
        "warnings": row.get("warnings") or [],
    }

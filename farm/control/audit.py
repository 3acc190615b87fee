"""Audit: checks that the store, object storage and the sidecars agree. Each finding says what to do.

Runs while the farm works: a build or job is read in one step, and young blobs are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

from farm.artifacts import sidecar as sidecars
from farm.artifacts.inventory import orphans
from farm.artifacts.refs import Refs
from farm.artifacts.s3 import S3Store
from farm.artifacts.storage import AT_ONCE, BLOBS, artifacts_prefix, build_key, builds_prefix, open_prefix, sidecar_key
from farm.errors import ArtifactGone
from farm.jobs.rows import AuditLine
from farm.jobs.state import ENDED
from farm.spec import FileReference, canonical_fields, key_of_fields
from farm.store import Store

SETTLED = timedelta(minutes=2)
"""How long after its sidecar an artifact may be missing in the index: its attempt may have died, and be tried again. As
long may a build be written down that the store does not have.
"""


def _finding(where: str, problem: str, remedy: str) -> AuditLine:
    """Return one disagreement: where (an object's key, a build, a job), what, and what to do."""
    return {"where": where, "problem": problem, "remedy": remedy}


class Auditor:
    """Checks one farm."""

    def __init__(self, store: Store, artifacts: S3Store, *, deep: bool = False) -> None:
        """With `deep`, every blob of an artifact is read and hashed."""
        self._store = store
        self._artifacts = artifacts
        self._deep = deep
        self._counts: dict[str, int] = {}

    def findings(self) -> Iterator[AuditLine]:
        """Yield all findings, those in the store first; the last line says how much was checked."""
        yield from self._in_store()
        blobs = list(self._artifacts.list_entries(BLOBS))
        sizes = {entry.key.rpartition("/")[2]: entry.size for entry in blobs}
        self._counts["blobs"] = len(blobs)
        for namespace in self._artifacts.list_folders("ns/"):
            yield from self._artifacts_of(namespace, sizes)
            yield from self._refs_of(namespace)
            yield from self._builds_of(namespace)
        for entry in orphans(self._artifacts, blobs):
            yield _finding(entry.key, "nothing names this blob", "`farm gc` removes it")
        yield {"counts": self._counts}

    def _in_store(self) -> Iterator[AuditLine]:
        self._counts |= self._store.audit.count()
        remedy = "please report it: no script may leave this behind"
        for build_id, problem in self._store.audit.builds():
            yield _finding(f"build {build_id}", problem, remedy)
        for job_id, problem in self._store.audit.jobs():
            yield _finding(f"job {job_id}", problem, remedy)

    # --- artifacts ----------------------------------------------------------------------------------------------

    def _artifacts_of(self, namespace: str, sizes: Mapping[str, int]) -> Iterator[AuditLine]:
        entries = list(self._artifacts.list_entries(artifacts_prefix(namespace)))
        self._counts["artifacts"] = self._counts.get("artifacts", 0) + len(entries)
        settled, whole = datetime.now(UTC) - SETTLED, set()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            problems = pool.map(lambda entry: self._problem_of(namespace, entry.key, sizes), entries)
            for entry, problem in zip(entries, problems, strict=True):
                if problem:
                    yield _finding(entry.key, problem, "the next build that wants it makes it again")
                elif problem is not None and entry.modified < settled:
                    whole.add(entry.key.rpartition("/")[2].removesuffix(".json"))
        yield from self._index_of(namespace, whole)

    def _problem_of(self, namespace: str, place: str, sizes: Mapping[str, int]) -> str | None:
        """Return what is wrong with an artifact; None if retention has removed it since the listing."""
        found = self._artifacts.get_object(place)
        if found is None:
            return None
        try:
            sidecar = sidecars.read(found.data)
        except ValueError as error:
            return f"the sidecar cannot be read: {error}"
        key = key_of_fields(canonical_fields(json.loads(found.data)["spec"]))
        if sidecar_key(namespace, key) != found.key:
            return f"its spec has another cache key, {key}"
        return next(
            (problem for blob in sidecars.required(sidecar["blobs"]) if (problem := self._damage(blob, sizes))), ""
        )

    def _damage(self, blob: FileReference, sizes: Mapping[str, int]) -> str:
        size = sizes.get(blob["digest"])
        if size is None and not self._artifacts.has_blob(blob["digest"]):  # it may be younger than the listing
            return f"the blob of {blob['path']} is missing: {blob['digest']}"
        damaged = self._deep and not self._artifacts.verify_blob(blob["digest"], blob["size"])  # goes into quarantine
        if size is not None and size != blob["size"]:
            return f"the blob of {blob['path']} has {size} bytes instead of {blob['size']}"
        if damaged:
            return f"the blob of {blob['path']} is damaged: {blob['digest']}"
        return ""

    def _index_of(self, namespace: str, whole: set[str]) -> Iterator[AuditLine]:
        if not self._store.index.complete(namespace):
            return
        where, remedy = f"index of {namespace}", "it is repaired within ten minutes"
        known = self._store.index.keys(namespace)
        for key in sorted(known - whole):
            # Published since the listing, or missing.
            if self._artifacts.lookup([namespace], key) is None:
                yield _finding(where, f"it lists {key}, which does not exist", remedy)
        for key in sorted(whole - known):
            yield _finding(where, f"it lacks {key}", remedy)

    # --- refs and builds ------------------------------------------------------------------------------------------

    def _refs_of(self, namespace: str) -> Iterator[AuditLine]:
        refs = Refs(self._artifacts)
        for tag in refs.list(namespace):
            where = f"ref {tag} of {namespace}"
            try:
                snapshot = refs.read(namespace, tag)
            except ArtifactGone as error:
                yield _finding(where, error.message, error.hint)
                continue
            for cell in snapshot["cells"].values() if snapshot else ():
                if self._artifacts.get_object(cell["sidecar"]) is None:
                    problem = f"{cell['identifier']} leads to no artifact: {cell['sidecar']}"
                    yield _finding(where, problem, "build it again")

    def _builds_of(self, namespace: str) -> Iterator[AuditLine]:
        prefix, marks = builds_prefix(namespace), open_prefix(namespace)
        there: dict[str, set[str]] = {}
        for key in self._artifacts.list_objects(prefix):
            build_id, _, name = key.removeprefix(prefix).partition("/")
            there.setdefault(build_id, set()).add(name)
        open_builds = {entry.key.removeprefix(marks): entry.modified for entry in self._artifacts.list_entries(marks)}
        reported = [build_id for build_id, names in there.items() if "report.json" in names]
        self._counts["reports"] = self._counts.get("reports", 0) + len(reported)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for findings in pool.map(lambda build_id: list(self._report(namespace, build_id)), reported):
                yield from findings
        for build_id, names in there.items():
            unknown = "plan.json" in names and "report.json" not in names and build_id not in open_builds
            if unknown and not self._ended_since(namespace, build_id):
                never = "it was never acknowledged: it has neither a report nor a mark"
                yield _finding(f"build {build_id}", never, "submit it again")

        settled = datetime.now(UTC) - SETTLED
        for build_id, modified in open_builds.items():
            if modified < settled and not (self._ended_since(namespace, build_id) or self._store.builds.get(build_id)):
                remedy = "submit it again, or restart `farm serve`, which accepts it"
                yield _finding(f"build {build_id}", "it was recorded, but the store does not have it", remedy)

    def _ended_since(self, namespace: str, build_id: str) -> bool:
        return self._artifacts.get_object(build_key(namespace, build_id, "report.json")) is not None

    def _report(self, namespace: str, build_id: str) -> Iterator[AuditLine]:
        """Check the ledger: every accepted cell has ended, and every succeeded cell has its artifact."""
        where, remedy = f"build {build_id}", "please report it"
        found = self._artifacts.get_object(build_key(namespace, build_id, "report.json"))
        plan = self._artifacts.get_object(build_key(namespace, build_id, "plan.json"))
        if found is None or plan is None:
            return
        try:
            cells, planned = json.loads(found.data)["cells"], json.loads(plan.data)["cells"]
        except (ValueError, KeyError, TypeError) as error:
            yield _finding(where, f"its report cannot be read: {error!r}", "submit it again")
            return
        accepted, ended = {cell["identifier"] for cell in planned}, [cell["identifier"] for cell in cells]
        if len(ended) != len(set(ended)) or set(ended) != accepted:
            yield _finding(where, f"{len(accepted)} cells were accepted, but {len(ended)} reported", remedy)
        for cell in cells:
            if cell["state"] not in ENDED:
                yield _finding(where, f"reported with {cell['identifier']} {cell['state']}", remedy)

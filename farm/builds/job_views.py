"""Reading jobs. All answers are plain JSON, except a log."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from farm.artifacts.keys import reference_key
from farm.artifacts.s3 import S3Store
from farm.compiling.attempt import Attempt
from farm.compiling.requests import reference_recipe, references_of
from farm.errors import NotFound
from farm.jobs.rows import FailureDocument, JobView, ReproductionDocument
from farm.jobs.state import AttemptLimits, State
from farm.results.report import JudgedCell
from farm.spec import FileReference, digest_of
from farm.store import Store
from farm.wire.asked import BlobSize

SHOWN_LOG = 64 << 20
"""Most bytes of a log that are shown, from its end; a compiler with traces writes more."""


class JobViews:
    """The jobs of every namespace, while the store has them."""

    def __init__(self, store: Store, artifacts: S3Store) -> None:
        self._store = store
        self._artifacts = artifacts

    def get(self, namespace: str, job_id: str) -> JobView:
        """Return a job with its attempts. Raises NotFound."""
        job = self._store.jobs.get(job_id)
        if job is None or job["namespace"] != namespace:
            raise NotFound(f"no job {job_id} in namespace {namespace}")
        return job

    def log(self, namespace: str, job_id: str, attempt: int = 0) -> bytes:
        """Return a job's log: its last part while it runs, then the last attempt's, at most `SHOWN_LOG` bytes.

        With `attempt` that of an attempt that ended. Raises NotFound if it has none.
        """
        job = self.get(namespace, job_id)
        digest = job["log"]
        if attempt:
            digest = next((one["log"] for one in job["attempts"] if one["number"] == attempt), None)
            if not digest:
                raise NotFound(f"attempt {attempt} of job {job_id} has no log")
        elif not digest or job["state"] == State.RUNNING:
            return self._store.jobs.log_tail(job_id) or b""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "log.txt"
            self._artifacts.get_blob(digest, path)
            with path.open("rb") as whole:
                left_out = max(0, path.stat().st_size - SHOWN_LOG)
                whole.seek(left_out)
                shown = whole.read()
        return b"(%d bytes before this are in blob %s)\n" % (left_out, digest.encode()) + shown if left_out else shown

    def reproduction(self, namespace: str, job_id: str) -> ReproductionDocument:
        """Return everything that determines a job's last attempt, see `farm.compiling.attempt.Attempt.describe`.

        Raises NotFound.
        """
        job = self.get(namespace, job_id)
        tried = job["attempts"]
        attempt = Attempt(
            job_id,
            job["attempt"],
            token="",
            order=job["order"],
            limits=tried[-1]["limits"] if tried else AttemptLimits(time=0.0, memory=0),
            namespace=namespace,
            key=job["key"],
            build=job["cells"][0]["build"] if job["cells"] else "",
            worker=tried[-1]["worker"] or "" if tried else "",
            previous=tuple(one["kind"] or "" for one in tried[:-1]),
        )
        return self.described(attempt, job)

    def described(self, attempt: Attempt, ended: JobView | JudgedCell) -> ReproductionDocument:
        """Return everything that determines an attempt; `ended` is the job or cell with its end."""
        namespace, order = attempt.namespace, attempt.order
        failure: FailureDocument | None = (
            {"kind": ended["kind"], "message": ended["message"]} if ended["kind"] else None
        )
        recipes = (reference_recipe(order, used) for used in references_of(order) or ("",))
        known = (self._artifacts.get_object(reference_key(namespace, digest_of(recipe))) for recipe in recipes)
        made: BlobSize | None = next((json.loads(found.data) for found in known if found), None)
        reference: FileReference | None = (
            {"path": "reference.npz", "digest": made["digest"], "size": made["size"]} if made else None
        )
        return attempt.describe(reference=reference, ended=failure)

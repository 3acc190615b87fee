"""Reading jobs. All answers are plain JSON, except a log."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from farm.artifacts.s3 import S3Store
from farm.artifacts.storage import blob_key, reference_key
from farm.compiling.attempt import Attempt
from farm.compiling.requests import reference_recipe, references_of
from farm.errors import ArtifactGone, NotFound
from farm.jobs.rows import FailureDocument, JobView, ReproductionDocument
from farm.jobs.state import AttemptLimits, State
from farm.results.report import JudgedCell
from farm.spec import FileReference, digest_of
from farm.store import Store
from farm.wire.asked import BlobSize

SHOWN_LOG = 64 << 20
"""Most bytes of a log that are shown, from its end; a compiler with traces writes more."""


PART = 4 << 20
"""Bytes of a log that are read at once."""

LONGEST_LINE = 64 << 10
"""Bytes of a line that stay together at the end of a part."""


class JobLog:
    """A log, read in parts: a long one takes no more memory than a short one."""

    def __init__(self, size: int, read: Callable[[int, int], bytes], blob: str = "") -> None:
        """`read` returns the bytes from one place to another; the log has `size` of them, in a blob of this digest."""
        self.size, self._read, self._blob = size, read, blob

    @classmethod
    def of_blob(cls, artifacts: S3Store, digest: str) -> JobLog:
        """Return the log in a blob. Raises ArtifactGone."""
        found = artifacts.head(blob_key(digest))
        if not found:
            raise ArtifactGone(f"the log {digest} is not in object storage", hint="it was deleted")
        return cls(found.size, lambda start, end: artifacts.read_range(digest, start, end), digest)

    @property
    def parts(self) -> int:
        """How many parts the log has, at least one."""
        return max(1, -(-self.size // PART))

    def part(self, number: int) -> str:
        """Return the lines that begin in a part, counted from 0."""
        start, end = number * PART, (number + 1) * PART
        before = max(0, start - 1)
        data = self._read(before, min(self.size, end + LONGEST_LINE))
        # A line that began in the part before belongs to that one.
        first = data.find(b"\n", 0, LONGEST_LINE + 1) + 1 or LONGEST_LINE + 1 if start else 0
        last = data.find(b"\n", end - 1 - before) + 1 or len(data)
        return data[first:last].decode(errors="replace")

    def last(self) -> Iterator[bytes]:
        """Yield the log piece by piece, from its end if it has more than `SHOWN_LOG` bytes; then it says so first."""
        begin = max(0, self.size - SHOWN_LOG)
        if begin:
            yield b"(%d bytes before this are in blob %s)\n" % (begin, self._blob.encode())
        for start in range(begin, self.size, PART):
            yield self._read(start, min(self.size, start + PART))


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

    def log(self, namespace: str, job_id: str, attempt: int = 0) -> JobLog:
        """Return a job's log: its last part while it runs, then the last attempt's.

        With `attempt` that of an attempt that ended. Raises NotFound if it has none.
        """
        job = self.get(namespace, job_id)
        digest = job["log"]
        if attempt:
            digest = next((one["log"] for one in job["attempts"] if one["number"] == attempt), None)
            if not digest:
                raise NotFound(f"attempt {attempt} of job {job_id} has no log")
        elif not digest or job["state"] == State.RUNNING:
            tail = self._store.jobs.log_tail(job_id) or b""
            return JobLog(len(tail), lambda start, end: tail[start:end])
        return JobLog.of_blob(self._artifacts, digest)

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

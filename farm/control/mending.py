"""Mending: what each control plane looks for again and again, because a process or a message may have been lost."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from farm.artifacts.storage import ArtifactStore
from farm.control.wakeups import Send
from farm.errors import ArtifactGone, FarmFault
from farm.logging import get_logger
from farm.metrics.instruments import LEASES_EXPIRED
from farm.store import Store
from farm.tuning.database import databases

log = get_logger(__name__)

STRAY_SECONDS = 3.0
"""A message that left its queue is claimed within milliseconds; after these seconds it is lost."""

LATE_LOTS_SECONDS = 60.0
"""After these seconds, the missing cells of a build will not come by themselves."""

Queued = Callable[[str], set[tuple[str, int]]]
"""Returns the attempts whose messages lie in a pool's queue."""


def send_strays(store: Store, send: Send, queued: Queued) -> int:
    """Send jobs again that were handed out and are neither claimed nor in the broker's queue; return their number.

    An extra message does no harm: the answer to a second claim of an attempt is `stale`.
    """
    count = 0
    for pool in store.workers.pool_names():
        strays = store.jobs.strays(pool, STRAY_SECONDS)
        lost = [stray for stray in strays if stray not in queued(pool)] if strays else []
        if lost:
            log.warning("messages lost, sending again", pool=pool, count=len(lost))
            store.jobs.hand_again(pool, [job_id for job_id, _ in lost])
            send(pool, lost)
            count += len(lost)
    return count


class Resumer:
    """Calls `resume` if the store may lack builds: at the start, after a new epoch, or if cells are missing."""

    def __init__(self, store: Store, resume: Callable[[], None]) -> None:
        self._store = store
        self._resume = resume
        self._epoch = ""

    def check(self) -> None:
        """Compare the epoch with the last one, and resume if needed."""
        epoch = self._store.epoch()
        if epoch != self._epoch or self._store.builds.incomplete(LATE_LOTS_SECONDS):
            self._resume()
            self._epoch = epoch


def reap(store: Store, reaper: str) -> None:
    """Expire leases and promote delayed jobs.

    Call it several times per lease. A reaper that was silent for half a lease expires nothing for a whole lease:
    workers that could not reach the store either then have time to renew.
    """
    for job_id in store.jobs.expire_leases(reaper):
        LEASES_EXPIRED.inc()
        log.warning("attempt lost", job=job_id)
    store.jobs.promote()


def fail_unserved(store: Store, seconds: float) -> int:
    """Fail jobs that waited longer than this for a pool whose live workers took none; return their number.

    The pool has no worker, or they are fenced, resting, draining, or die at start. A worker that waits for object
    storage is not one of these. The kind is `toolchain_mismatch`.
    """
    total = 0
    for pool in store.workers.pool_names():
        while count := store.jobs.fail_unserved(pool, seconds):
            log.warning("jobs failed, no worker serves their pool", pool=pool, count=count)
            total += count
    return total


MERGE_INTERVAL = 60.0
"""Seconds between two checks. Restoring reads deltas too, so a late merge costs only time."""


def merge_tuning(artifacts: ArtifactStore) -> int:
    """Merge databases with enough deltas; return their number. A failure does not stop the others."""
    merged = 0
    for database in databases(artifacts, artifacts.list_folders("ns/")):
        try:
            if database.merge_due(datetime.now(UTC)):
                database.merge()
                merged += 1
        except (ArtifactGone, FarmFault) as error:
            where = {"namespace": database.namespace, "database": database.name}
            log.error("cannot merge tuning; its deltas stay", **where, error=error.message, hint=error.hint)
    return merged

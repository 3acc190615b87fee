"""Reconciler: makes the store and the broker agree again."""

from __future__ import annotations

from collections.abc import Callable

from farm.control.wakeups import Send
from farm.logging import get_logger
from farm.store import Store

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

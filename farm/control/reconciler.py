"""Reconciler: what the store believes and what the broker holds, made one again."""

from __future__ import annotations

from collections.abc import Callable

from farm.control.dispatcher import Send
from farm.logging import get_logger
from farm.store import Store

log = get_logger(__name__)

STRAY_SECONDS = 3.0
"""A message that left its queue is claimed within milliseconds; after this it went with a worker, or with the queue."""

LATE_LOTS_SECONDS = 60.0
"""After this, the lots that a build still misses will not come by themselves."""

Queued = Callable[[str], set[tuple[str, int]]]
"""Returns the attempts whose messages lie in a pool's queue."""


def send_strays(store: Store, send: Send, queued: Queued) -> int:
    """Send again what was handed out and is neither claimed nor in the broker's queue; return how much that was.

    A message too many does no harm: the second claim of an attempt is answered `stale`.
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
    """Calls `resume` when the store may miss builds: at first, when its epoch is new, when lots stay away."""

    def __init__(self, store: Store, resume: Callable[[], None]) -> None:
        self._store = store
        self._resume = resume
        self._epoch = ""

    def check(self) -> None:
        """Compare the epoch with the last one seen, and resume where that is called for."""
        epoch = self._store.epoch()
        if epoch != self._epoch or self._store.builds.incomplete(LATE_LOTS_SECONDS):
            self._resume()
            self._epoch = epoch

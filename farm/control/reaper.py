"""Reaper: takes jobs back from silent workers, and queues them again when their delay has passed."""

from __future__ import annotations

from farm.logging import get_logger
from farm.metrics.instruments import LEASES_EXPIRED
from farm.store import Store

log = get_logger(__name__)


def reap(store: Store, reaper: str) -> None:
    """Expire leases and promote delayed jobs.

    Call it several times per lease. A reaper that was silent for half a lease expires nothing for a whole lease:
    workers that could not reach the store either then have time to renew.
    """
    for job_id in store.jobs.expire_leases(reaper):
        LEASES_EXPIRED.inc()
        log.warning("attempt lost", job=job_id)
    store.jobs.promote()

"""Pool timeout: a job does not wait for ever for a pool that no worker serves."""

from __future__ import annotations

from farm.logging import get_logger
from farm.store import Store

log = get_logger(__name__)


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

"""Dispatcher: hands jobs to the broker as soon as there is one to hand out and room for it."""

from __future__ import annotations

from farm.scheduler import Send, hand_out
from farm.store import Store


def dispatch_next(store: Store, send: Send, seconds: float) -> int:
    """Wait up to `seconds` for a pool that may have something to hand out, and hand it out; return how many jobs."""
    pool = store.wakeups.next_pool(seconds)
    return hand_out(store, send, pool) if pool else 0


def wake_pools(store: Store) -> None:
    """Have every pool with waiting jobs looked at: a process that took a wake-up may have died with it."""
    for pool in store.workers.pool_names():
        if store.jobs.pending(pool):
            store.wakeups.wake_pool(pool)

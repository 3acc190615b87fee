"""Dispatcher: hands jobs to the broker as soon as there is one to hand out and room for it.

Order: the highest priority first; then one job of each build in turn, where a build's first turn comes before those of
builds that had some; in a build the longest first, else in the order of its manifest. The store keeps that order as it
changes (`lua/_lanes.lua`, `lua/hand_out.lua`), because only there can a choice and its record be one step.
"""

from __future__ import annotations

from collections.abc import Callable

from farm.store import Store

Send = Callable[[str, list[tuple[str, int]]], None]
"""Sends a pool's attempts (job id, number) to the broker."""

PER_SLOT = 1
"""Jobs that may lie in the broker, unclaimed, for each live slot of a pool.

More would take the order out of our hands, since the broker's queue is first in, first out; with one, a new build's
turn comes within two job lengths (docs/decisions/0026). With none, slots would wait for the dispatcher.
"""


def dispatch_next(store: Store, send: Send, seconds: float) -> int:
    """Wait up to `seconds` for a pool that may have something to hand out, and hand it out; return how many jobs."""
    pool = store.wakeups.next_pool(seconds)
    return hand_out(store, send, pool) if pool else 0


def hand_out(store: Store, send: Send, pool: str) -> int:
    """Hand a pool's next jobs to the broker; return how many. None if no live worker serves it."""
    chosen = store.jobs.hand_out(pool, PER_SLOT)
    if chosen:
        send(pool, chosen)
    return len(chosen)


def wake_pools(store: Store) -> None:
    """Have every pool with waiting jobs looked at: a process that took a wake-up may have died with it."""
    for pool in store.workers.pool_names():
        if store.jobs.pending(pool):
            store.wakeups.wake_pool(pool)

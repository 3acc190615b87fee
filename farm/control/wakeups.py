"""What the store wakes the control plane up for: jobs to hand out, builds that ended or have to be stopped.

Jobs go to the broker as soon as there are jobs and room for them. Order: the highest priority first; then one job of
each build in turn, first turns before others; within a build the longest job first, else the manifest's order. The
store keeps this order (`lua/_lanes.lua`, `lua/hand_out.lua`), because only there a choice and its record can be one
step.
"""

from __future__ import annotations

from collections.abc import Callable

from farm.errors import FarmFault
from farm.logging import bound, get_logger
from farm.store import Store

Send = Callable[[str, list[tuple[str, int]]], None]
"""Sends a pool's attempts (job id, number) to the broker."""

PER_SLOT = 1
"""Unclaimed jobs that the broker may hold for each live slot of a pool.

With more, the dispatcher could not order them, because the broker's queue is first in, first out; with one, a new
build's turn comes within two job lengths (docs/decisions/0026). With none, slots would wait for the dispatcher.
"""


def dispatch_next(store: Store, send: Send, seconds: float) -> int:
    """Wait up to `seconds` for a pool that may have jobs to hand out; hand them out and return their number."""
    pool = store.wakeups.next_pool(seconds)
    return hand_out(store, send, pool) if pool else 0


def hand_out(store: Store, send: Send, pool: str) -> int:
    """Hand a pool's next jobs to the broker; return their number. None if no live worker serves it."""
    chosen = store.jobs.hand_out(pool, PER_SLOT)
    if chosen:
        send(pool, chosen)
    return len(chosen)


def wake_pools(store: Store) -> None:
    """Wake a dispatcher for every pool with waiting jobs: a process may have died with a wake-up."""
    for pool in store.workers.pool_names():
        if store.jobs.pending(pool):
            store.wakeups.wake_pool(pool)


log = get_logger(__name__)

FinishBuild = Callable[[str], None]
"""Writes the report of an ended build, and marks it reported. Repeatable."""


def settle_next(store: Store, finish: FinishBuild, seconds: float) -> None:
    """Wait up to `seconds` for a build that ended or has to be stopped, and handle it."""
    build_id = store.wakeups.next_build(seconds)
    if build_id:
        settle(store, finish, build_id)


def settle(store: Store, finish: FinishBuild, build_id: str) -> None:
    """Cancel the live cells of a build that has to be stopped; report a build that ended."""
    with bound(build=build_id):
        build = store.builds.get(build_id)
        if build and build["state"] == "open" and build_id in store.builds.to_stop():
            store.builds.stop(build_id)
        elif build and build["state"] == "ended":
            finish(build_id)


def settle_left(store: Store, finish: FinishBuild) -> None:
    """Handle builds whose wake-up was missed: object storage was away, or a process died with it."""
    for build_id in [*store.builds.to_stop(), *store.builds.ended_unreported()]:
        try:
            settle(store, finish, build_id)
        except FarmFault:
            raise
        except Exception:  # One build that cannot be reported must not stop the others.
            log.exception("build not settled", build=build_id)

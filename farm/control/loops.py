"""The loops of the control plane: each calls one kind of function repeatedly, in a thread of its own."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial

from farm.app import Farm
from farm.artifacts.inventory import collect, rebuild
from farm.artifacts.s3 import S3Store
from farm.errors import ArtifactGone, FarmError, FarmFault
from farm.extension import Loop
from farm.logging import bound, get_logger
from farm.metrics.instruments import LEASES_EXPIRED
from farm.settings import Settings
from farm.store import Store, broker
from farm.store.build_records import STOPPED
from farm.tuning.database import databases

Send = Callable[[str, list[tuple[str, int]]], None]  # Sends a pool's attempts (job id, number) to the broker.

PER_SLOT = 1
"""Unclaimed jobs that the broker may hold for each live slot of a pool.

With more, the dispatcher could not order them, because the broker's queue is first in, first out; with one, a new
build's turn comes within two job lengths (docs/decisions/0026). With none, slots would wait for the dispatcher.
"""


def hand_out(store: Store, send: Send, pool: str) -> int:
    """Hand a pool's next jobs to the broker; return their number. None are handed out if no live worker serves it.

    Order: the highest priority first; then one job of each build in turn, first turns before others; within a build the
    longest job first, else the manifest's order. The store keeps this order (`lua/_shared.lua`, `lua/hand_out.lua`),
    because only there a choice and its record can be one step.
    """
    chosen = store.jobs.hand_out(pool, PER_SLOT)
    if chosen:
        send(pool, chosen)
    return len(chosen)


def wake_pools(store: Store) -> None:
    """Wake a dispatcher for every pool that is short of jobs: a process may have died with a wake-up."""
    for pool in store.workers.pool_names():
        if store.jobs.are_short(pool):
            store.wakeups.wake_pool(pool)


log = get_logger(__name__)

FinishBuild = Callable[[str], None]  # Writes the report of an ended build, and marks it reported. Repeatable.


def settle(store: Store, finish: FinishBuild, build_id: str) -> None:
    """Cancel the live cells of a build that has to be stopped; report a build that ended."""
    with bound(build=build_id):
        build = store.builds.get(build_id)
        if build and build["state"] == "open" and build_id in store.builds.to_stop():
            store.builds.cancel(build_id, STOPPED)
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


# --- what may have been lost -----------------------------------------------------------------------------------------

STRAY_SECONDS = 3.0  # A message that left its queue is claimed within milliseconds; after these seconds it is lost.
LATE_LOTS_SECONDS = 60.0  # After these seconds, the missing cells of a build will not come by themselves.
Queued = Callable[[str], set[tuple[str, int]]]  # Returns the attempts whose messages lie in a pool's queue.


def send_strays(store: Store, send: Send, queued: Queued) -> int:
    """Send jobs again that were handed out and are neither claimed nor in the broker's queue; return their number.

    An extra message does no harm: the answer to a second claim of an attempt is `stale`.
    """
    count = 0
    for pool in store.workers.pool_names():
        strays = set(store.jobs.strays(pool, STRAY_SECONDS))
        gone = strays - queued(pool) if strays else strays
        # Not lost: what has left the queue and was claimed since the first look.
        if lost := sorted(gone.intersection(store.jobs.strays(pool, STRAY_SECONDS))) if gone else []:
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


MERGE_INTERVAL = 60.0  # Seconds between two checks. Restoring reads deltas too, so a late merge costs only time.


def merge_tuning(artifacts: S3Store) -> int:
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


# --- retention -------------------------------------------------------------------------------------------------------

CHANGES = "config/changes/"
"""Prefix of the log of changes: a folder for each day (ISO, UTC), in it objects in the order of time."""

INTERVAL = 600.0
"""Seconds between two runs: after a loss of Redis, only sidecars younger than this are read one by one."""

GENTLY = 2
"""Requests at once of a tidying, which reads each new sidecar: with 16, one in a hundred of this process' requests to
Redis takes over 0.1 s meanwhile, with 2 a quarter of that.
"""

COLLECTIONS = 86_400.0  # Seconds between two garbage collections: each reads all documents.
UPLOADS_KEPT = timedelta(days=1)  # How long a multipart upload may take.


def forget_changes(artifacts: S3Store, kept: timedelta) -> None:
    """Delete the days of the log of changes that are older than this."""
    first = str((datetime.now(UTC) - kept).date())
    old = [day for day in artifacts.list_folders(CHANGES) if day < first]
    for day in old:
        for key in artifacts.list_objects(f"{CHANGES}{day}/"):
            artifacts.delete_object(key)
        log.info("a day of the log of changes deleted", day=day)


def tidy_storage(store: Store, artifacts: S3Store, *, changes_kept: timedelta) -> None:
    """Abort abandoned uploads, forget old changes, and update every namespace's index from object storage.

    The index's checkpoint is what makes planning fast again after Redis was lost.
    """
    aborted = artifacts.abort_uploads(UPLOADS_KEPT)
    if aborted:
        log.info("abandoned uploads aborted", count=aborted)
    forget_changes(artifacts, changes_kept)
    for namespace in artifacts.list_folders("ns/"):
        store.index.fill(namespace, rebuild(artifacts, namespace, GENTLY))


def collect_garbage(artifacts: S3Store, *, delete: bool, plans_kept: timedelta) -> None:
    """Collect garbage like `farm gc`; without `delete`, only log how much there is."""
    found = collect(artifacts, plans_kept=plans_kept, dry_run=not delete)
    if delete:
        log.info("garbage collected", **found)
    elif found["blobs"]:
        log.info("some blobs are garbage; `gc = true` or `farm gc` deletes them", **found)


# --- presence --------------------------------------------------------------------------------------------------------

ASK_SECONDS = 5.0  # Seconds between two looks of a control plane at object storage.

PATIENCE = 4.0
"""Seconds without an answer after which it counts as out of reach; a request gives up only after half a minute."""


class Presence:
    """What one control plane tells the others: that it is there, and if it does not reach object storage.

    `farm/builds/reading.py` reads it.
    """

    def __init__(self, store: Store, reach: Callable[[], object]) -> None:
        """`reach` asks object storage for something."""
        self._store = store
        self._reach = reach
        self._name = f"{socket.gethostname()} (process {os.getpid()})"
        self._asked: float | None = None
        self._away = ""

    def look(self) -> None:
        """Ask object storage."""
        self._asked = time.monotonic()
        try:
            self._reach()
            self._away = ""
        except FarmError as error:
            self._away = error.message
        self._asked = None

    def report(self) -> None:
        """Say that this control plane is there, and what it found. Raises StoreUnavailable."""
        asked, away = self._asked, self._away
        if asked is not None and time.monotonic() - asked > PATIENCE:
            away = away or f"no answer for {time.monotonic() - asked:.0f} s"
        self._store.planes.report(self._name, away)

    def leave(self) -> None:
        """Say that this control plane ends. Raises StoreUnavailable."""
        self._store.planes.leave(self._name)


# --- the loops -------------------------------------------------------------------------------------------------------

SWEEP_SECONDS = 2.0
"""Seconds between two checks of what should have happened by itself. Leases are looked at twice as often."""

FIRST_TIDYING = 60.0  # Seconds until the first upkeep of object storage, so that it does not slow a farm's start.
FIRST_COLLECTION = 3600.0  # Seconds until the first garbage collection.

SETTLERS = 4
"""Builds that are reported at the same time, which is mostly waiting for object storage. Beside the API's threads one
loop alone falls behind while many builds are submitted.
"""

LOOK_EVERY = 60.0  # Seconds between two looks for reports that another control plane wrote.

LEADER_SECONDS = 10.0
AGAIN = 60.0  # Seconds after which a step that failed is taken again, at most.

WAIT_SECONDS = 0.5
"""Seconds that one call waits for a wake-up, and so the time that a loop needs to stop; also the shortest pause after a
failure.
"""


def repeat_all(store: Store, loops: Sequence[Loop], stop: threading.Event) -> None:
    """Run loops, each in a thread, until `stop` is set. Waits for servers that are away."""
    name = _own_name()
    threads = [
        threading.Thread(target=_repeat, args=(store, name, loop, stop), name=f"control-{loop.name}") for loop in loops
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        store.planes.resign(name)
    except FarmFault as error:
        log.info("cannot release the leader's lease, it expires by itself", error=error.message)


def _repeat(store: Store, name: str, loop: Loop, stop: threading.Event) -> None:
    """Take a loop's step until `stop` is set; no exception ends the loop."""
    healthy = True
    stop.wait(loop.first)
    while not stop.is_set():
        pause = min(max(loop.seconds, WAIT_SECONDS), AGAIN)
        try:
            if loop.leader_only and not store.planes.lead(name, LEADER_SECONDS):
                pause = min(loop.seconds, LEADER_SECONDS)
            else:
                loop.step()
                pause = loop.seconds
            if not healthy:
                log.info("control loop continues", loop=loop.name)
            healthy = True
        except FarmFault as error:
            if healthy:
                log.warning("control loop waits", loop=loop.name, error=error.message, hint=error.hint)
            healthy = False
        except Exception:
            log.exception("control loop failed, continuing", loop=loop.name)
        stop.wait(pause)


def run_loops(farm: Farm, stop: threading.Event) -> None:
    """Run the control plane of a farm until `stop` is set."""
    presence = Presence(farm.store, lambda: farm.artifacts.with_patience(0.0).get_object("config/health"))
    beat = min(SWEEP_SECONDS, farm.settings.lease_seconds / 4)
    changes, plans = timedelta(days=farm.settings.changes_days), timedelta(days=farm.settings.keep_days)
    tidy = partial(tidy_storage, farm.store, farm.artifacts, changes_kept=changes)
    collect = partial(collect_garbage, farm.artifacts, delete=farm.settings.gc, plans_kept=plans)
    loops = [
        Loop("presence", presence.report, beat, leader_only=False),
        Loop("look", presence.look, ASK_SECONDS, leader_only=False),
        *job_loops(
            farm.settings,
            farm.store,
            send=partial(broker.dispatch, farm.celery),
            queued=partial(broker.queued, farm.celery),
            finish=farm.build_finisher.finish,
            resume=farm.admission.resume,
        ),
        # Each in a thread of its own: they read much of object storage, and take long.
        Loop("tidy", tidy, INTERVAL, first=FIRST_TIDYING),
        Loop("tuning", partial(merge_tuning, farm.artifacts), MERGE_INTERVAL, first=MERGE_INTERVAL),
        Loop("garbage", collect, COLLECTIONS, first=FIRST_COLLECTION),
        Loop("pack", farm.build_finisher.pack_reported, INTERVAL),
        Loop("index", farm.build_index.fill, LOOK_EVERY, leader_only=False),
        *(loop for extension in farm.extensions if extension.loops for loop in extension.loops(farm)),
    ]
    repeat_all(farm.store, loops, stop)
    with suppress(FarmFault):  # Then it is known as silent for an hour.
        presence.leave()


def job_loops(
    settings: Settings, store: Store, *, send: Send, queued: Queued, finish: FinishBuild, resume: Callable[[], None]
) -> list[Loop]:
    """Return the loops that jobs and builds need.

    They reach the broker by `send` and `queued`; `finish` reports a build that ended, `resume` gives the store back
    builds that it lost.
    """
    reaping = min(SWEEP_SECONDS / 2, settings.lease_seconds / 12)

    def dispatch_next() -> None:
        if pool := store.wakeups.next("pools", WAIT_SECONDS):  # That may have jobs to hand out.
            hand_out(store, send, pool)

    def settle_next() -> None:
        if build_id := store.wakeups.next("builds", WAIT_SECONDS):  # That ended or has to be stopped.
            settle(store, finish, build_id)

    sweep = partial(
        _each,
        partial(wake_pools, store),
        partial(send_strays, store, send, queued),
        partial(fail_unserved, store, settings.pool_timeout),
    )
    # Names of what is long gone.
    forget = partial(_each, store.builds.forget_expired, store.workers.forget_dead, store.planes.forget_dead)
    # Separate from the sweep, because these also need object storage.
    repair = partial(_each, Resumer(store, resume).check, partial(settle_left, store, finish))
    return [
        Loop("dispatch", dispatch_next, 0.0, leader_only=False),
        *[Loop("settle", settle_next, 0.0, leader_only=False)] * SETTLERS,
        Loop("reap", partial(reap, store, _own_name()), reaping, leader_only=False),
        Loop("sweep", sweep, SWEEP_SECONDS),
        Loop("repair", repair, SWEEP_SECONDS),
        Loop("forget", forget, INTERVAL),
    ]


def _own_name() -> str:
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


def _each(*steps: Callable[[], object]) -> None:
    """Take every step: a failed step does not stop the others. Raises FarmFault at once: it affects all steps."""
    for step in steps:
        try:
            step()
        except FarmFault:
            raise
        except Exception:
            log.exception("a step of a control loop failed, continuing with the next")

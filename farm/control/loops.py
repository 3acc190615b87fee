"""The loops of the control plane: each calls one kind of function repeatedly, in a thread of its own."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

from farm.app import Farm
from farm.artifacts.s3 import S3Store
from farm.control import retention
from farm.control.mending import (
    MERGE_INTERVAL,
    Queued,
    Resumer,
    fail_unserved,
    merge_tuning,
    reap,
    send_strays,
)
from farm.control.wakeups import FinishBuild, Send, dispatch_next, settle_left, settle_next, wake_pools
from farm.errors import FarmFault
from farm.extension import Loop
from farm.logging import get_logger
from farm.settings import Settings
from farm.store import Store, broker

log = get_logger(__name__)

SWEEP_SECONDS = 1.0
"""Seconds between two checks of what should have happened by itself."""

FIRST_TIDYING = 60.0
"""Seconds until the first upkeep of object storage, so that it does not slow a farm's start."""

FIRST_COLLECTION = 3600.0
"""Seconds until the first garbage collection."""

SETTLERS = 4
"""Builds that are reported at the same time, which is mostly waiting for object storage. Beside the API's threads one
loop alone falls behind while many builds are submitted.
"""

LOOK_EVERY = 60.0
"""Seconds between two looks for reports that another control plane wrote."""

LEADER_SECONDS = 10.0
AGAIN = 60.0
"""Seconds after which a step that failed is taken again, at most."""

WAIT_SECONDS = 0.5
"""Seconds that one call waits for a wake-up, and so the time that a loop needs to stop; also the shortest pause after a
failure.
"""


class ControlPlane:
    """Runs loops in threads, until it has to stop. Any number of them may run for one farm."""

    def __init__(self, store: Store, loops: Sequence[Loop]) -> None:
        self._store = store
        self._loops = loops
        self._name = _own_name()

    def run(self, stop: threading.Event) -> None:
        """Run all loops until `stop` is set. Waits for servers that are away."""
        threads = [
            threading.Thread(target=self._repeat, args=(loop, stop), name=f"control-{loop.name}")
            for loop in self._loops
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        try:
            self._store.leader.resign(self._name)
        except FarmFault as error:
            log.info("cannot release the leader's lease, it expires by itself", error=error.message)

    def _repeat(self, loop: Loop, stop: threading.Event) -> None:
        """Take a loop's step until `stop` is set; no exception ends the loop."""
        healthy = True
        stop.wait(loop.first)
        while not stop.is_set():
            pause = min(max(loop.seconds, WAIT_SECONDS), AGAIN)
            try:
                if loop.leader_only and not self._store.leader.lead(self._name, LEADER_SECONDS):
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
    loops = [
        *job_loops(
            farm.settings,
            farm.store,
            send=partial(broker.dispatch, farm.celery),
            queued=partial(broker.queued, farm.celery),
            finish=farm.build_finisher.finish,
            resume=farm.admission.resume,
        ),
        *storage_loops(farm.settings, farm.store, farm.artifacts),
        Loop("index", farm.build_index.fill, LOOK_EVERY, leader_only=False),
        *(loop for extension in farm.extensions if extension.loops for loop in extension.loops(farm)),
    ]
    ControlPlane(farm.store, loops).run(stop)


def job_loops(
    settings: Settings, store: Store, *, send: Send, queued: Queued, finish: FinishBuild, resume: Callable[[], None]
) -> list[Loop]:
    """Return the loops that jobs and builds need.

    They reach the broker by `send` and `queued`; `finish` reports a build that ended, `resume` gives the store back
    builds that it lost.
    """
    every = min(SWEEP_SECONDS, settings.lease_seconds / 12)
    settle = Loop("settle", partial(settle_next, store, finish, WAIT_SECONDS), 0.0, leader_only=False)
    sweep = partial(
        _each,
        partial(wake_pools, store),
        partial(send_strays, store, send, queued),
        partial(fail_unserved, store, settings.pool_timeout),
    )
    # Separate from the sweep, because these also need object storage.
    repair = partial(_each, Resumer(store, resume).check, partial(settle_left, store, finish))
    return [
        Loop("dispatch", partial(dispatch_next, store, send, WAIT_SECONDS), 0.0, leader_only=False),
        *[settle] * SETTLERS,
        Loop("reap", partial(reap, store, _own_name()), min(every, 0.25), leader_only=False),
        Loop("sweep", sweep, SWEEP_SECONDS),
        Loop("repair", repair, SWEEP_SECONDS),
        Loop("forget", partial(retention.forget_expired, store), retention.INTERVAL),
    ]


def storage_loops(settings: Settings, store: Store, artifacts: S3Store) -> list[Loop]:
    """Return the loops that look after object storage, each in a thread of its own: they read much, and take long."""
    days = timedelta(days=settings.changes_days)
    tidy = partial(retention.tidy_storage, store, artifacts, changes_kept=days)
    kept = timedelta(days=settings.keep_days)
    collect = partial(retention.collect_garbage, artifacts, delete=settings.gc, plans_kept=kept)
    return [
        Loop("tidy", tidy, retention.INTERVAL, first=FIRST_TIDYING),
        Loop("tuning", partial(merge_tuning, artifacts), MERGE_INTERVAL, first=MERGE_INTERVAL),
        Loop("garbage", collect, retention.COLLECTIONS, first=FIRST_COLLECTION),
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

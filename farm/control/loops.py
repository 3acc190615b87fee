"""The loops of the control plane: each calls one kind of function repeatedly, in a thread of its own."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial

from farm import broker
from farm.app import Farm
from farm.control import retention
from farm.control.pool_timeout import fail_unserved
from farm.control.reaper import reap
from farm.control.reconciler import Queued, Resumer, send_strays
from farm.control.schedule import Schedule
from farm.control.tuning_merges import INTERVAL as MERGE_INTERVAL
from farm.control.tuning_merges import merge_tuning
from farm.control.wakeups import Send, dispatch_next, settle_left, settle_next, wake_pools
from farm.errors import FarmFault
from farm.logging import get_logger
from farm.settings import Settings
from farm.store import Store

log = get_logger(__name__)

SWEEP_SECONDS = 1.0
"""Seconds between two checks of what should have happened by itself."""

FIRST_TIDYING = 60.0
"""Seconds until the first upkeep of object storage, so that it does not slow a farm's start."""

FIRST_COLLECTION = 3600.0
"""Seconds until the first garbage collection."""

FIRE_SECONDS = 10.0
"""Seconds between two looks at the triggers of stored manifests: each reads their heads."""

DELIVER_SECONDS = 5.0
"""Seconds between two looks for messages to webhooks: each is a listing."""

SETTLERS = 4
"""Builds that are reported at the same time, which is mostly waiting for object storage. Beside the API's threads one
loop alone falls behind while many builds are submitted.
"""

RADAR_SECONDS = 30.0
"""Seconds between two looks for toolchains that have appeared."""

LEADER_SECONDS = 10.0
WAIT_SECONDS = 0.5
"""Seconds that one call waits for a wake-up, and so the time that a loop needs to stop."""


class ControlPlane:
    """Dispatches, reaps, reconciles, finishes and cleans up, until it has to stop."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        *,
        send: Send,
        queued: Queued,
        finish_build: Callable[[str], None],
        resume: Callable[[], None],
        tidy: Callable[[], None],
        merge: Callable[[], object],
        collect: Callable[[], object],
        fire: Callable[[], object],
        deliver: Callable[[], object],
        radar: Callable[[], object] = lambda: None,
    ) -> None:
        """Reach the broker by `send` and `queued`; `finish_build` reports a build that ended, `resume` gives the store
        back builds that it lost, `tidy` looks after object storage, `merge` after tuning databases, `collect`
        after blobs that nothing names, `fire` builds stored manifests whose triggers are due, `deliver` calls webhooks,
        `radar` looks for toolchains that appear. All may be called again for the same thing, and by several control
        planes.
        """
        self._settings = settings
        self._store = store
        self._send = send
        self._queued = queued
        self._finish = finish_build
        self._resumer = Resumer(store, resume)
        self._name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._tidy = tidy
        self._merge = merge
        self._collect = collect
        self._fire = fire
        self._deliver = deliver
        self._radar = radar
        self._forgetting = Schedule(retention.INTERVAL)
        self._tidying = Schedule(retention.INTERVAL, first=FIRST_TIDYING)
        self._collecting = Schedule(retention.COLLECTIONS, first=FIRST_COLLECTION)

    def run(self, stop: threading.Event) -> None:
        """Run all loops until `stop` is set. Waits for servers that are away."""
        every = min(SWEEP_SECONDS, self._settings.lease_seconds / 12)
        settle = partial(settle_next, self._store, self._finish, WAIT_SECONDS)
        loops: list[tuple[str, Callable[[], object]]] = [
            ("dispatch", partial(dispatch_next, self._store, self._send, WAIT_SECONDS)),
            *[("settle", settle)] * SETTLERS,
            ("reap", partial(self._reap, stop, min(every, 0.25))),
            ("sweep", partial(self._sweep, stop)),
            ("repair", partial(self._repair, stop)),
            ("tuning", partial(self._merge_tuning, stop)),
            ("triggers", partial(self._fire_triggers, stop)),
            ("webhooks", partial(self._call_webhooks, stop)),
            ("garbage", partial(self._collect_garbage, stop)),
            ("radar", partial(self._look_for_toolchains, stop)),
        ]
        threads = [
            threading.Thread(target=_repeat, args=(name, step, stop), name=f"control-{name}") for name, step in loops
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        try:
            self._store.leader.resign(self._name)
        except FarmFault as error:
            log.info("cannot release the leader's lease, it expires by itself", error=error.message)

    def _reap(self, stop: threading.Event, seconds: float) -> None:
        reap(self._store, self._name)
        stop.wait(seconds)

    def _sweep(self, stop: threading.Event) -> None:
        if self._store.leader.lead(self._name, LEADER_SECONDS):
            _each(
                partial(wake_pools, self._store),
                partial(send_strays, self._store, self._send, self._queued),
                partial(fail_unserved, self._store, self._settings.pool_timeout),
                self._forget,
            )
        stop.wait(SWEEP_SECONDS)

    def _forget(self) -> None:
        if self._forgetting.is_due():
            retention.forget_expired(self._store)
            self._forgetting.done()

    def _repair(self, stop: threading.Event) -> None:
        """Separate from the sweep, because these also need object storage."""
        if self._store.leader.lead(self._name, LEADER_SECONDS):
            self._resumer.check()
            settle_left(self._store, self._finish)
            if self._tidying.is_due():
                self._tidy()
                self._tidying.done()
        stop.wait(SWEEP_SECONDS)

    def _merge_tuning(self, stop: threading.Event) -> None:
        """In a loop of its own, because a large database takes long."""
        stop.wait(MERGE_INTERVAL)
        if not stop.is_set() and self._store.leader.lead(self._name, LEADER_SECONDS):
            self._merge()

    def _fire_triggers(self, stop: threading.Event) -> None:
        """In a loop of its own, because to accept a large build takes long."""
        if self._store.leader.lead(self._name, LEADER_SECONDS):
            self._fire()
        stop.wait(FIRE_SECONDS)

    def _look_for_toolchains(self, stop: threading.Event) -> None:
        """In a loop of its own, because it plans whole builds."""
        stop.wait(RADAR_SECONDS)
        if not stop.is_set() and self._store.leader.lead(self._name, LEADER_SECONDS):
            self._radar()

    def _call_webhooks(self, stop: threading.Event) -> None:
        """In a loop of its own, because it waits for the servers of others."""
        if self._store.leader.lead(self._name, LEADER_SECONDS):
            self._deliver()
        stop.wait(DELIVER_SECONDS)

    def _collect_garbage(self, stop: threading.Event) -> None:
        """In a loop of its own, because it reads every document."""
        stop.wait(SWEEP_SECONDS)
        if not stop.is_set() and self._store.leader.lead(self._name, LEADER_SECONDS) and self._collecting.is_due():
            self._collect()
            self._collecting.done()


def run_loops(farm: Farm, stop: threading.Event) -> None:
    """Run the control plane of a farm until `stop` is set."""
    ControlPlane(
        farm.settings,
        farm.store,
        send=partial(broker.dispatch, farm.celery),
        queued=partial(broker.queued, farm.celery),
        finish_build=farm.build_finisher.finish,
        resume=farm.builds.resume,
        tidy=partial(
            retention.tidy_storage,
            farm.store,
            farm.artifacts,
            changes_kept=timedelta(days=farm.settings.changes_days),
        ),
        merge=partial(merge_tuning, farm.artifacts),
        collect=partial(
            retention.collect_garbage,
            farm.artifacts,
            delete=farm.settings.gc,
            plans_kept=timedelta(days=farm.settings.keep_days),
        ),
        fire=farm.trigger_rounds.go,
        deliver=farm.delivery_rounds.go,
        radar=partial(_follow_toolchains, farm),
    ).run(stop)


def _follow_toolchains(farm: Farm) -> None:
    if farm.settings.radar:
        farm.toolchains.follow(farm.settings.radar)


def _each(*steps: Callable[[], object]) -> None:
    """Take every step: a failed step does not stop the others. Raises FarmFault at once: it affects all steps."""
    for step in steps:
        try:
            step()
        except FarmFault:
            raise
        except Exception:
            log.exception("a step of a control loop failed, continuing with the next")


def _repeat(name: str, step: Callable[[], object], stop: threading.Event) -> None:
    """Call `step` until `stop` is set; no exception ends the loop."""
    healthy = True
    while not stop.is_set():
        try:
            step()
        except FarmFault as error:
            if healthy:
                log.warning("control loop waits", loop=name, error=error.message, hint=error.hint)
            healthy = False
            stop.wait(WAIT_SECONDS)
        except Exception:
            log.exception("control loop failed, continuing", loop=name)
            stop.wait(WAIT_SECONDS)
        else:
            if not healthy:
                log.info("control loop continues", loop=name)
            healthy = True

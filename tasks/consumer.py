"""The task that messages name, and the consumer that takes them.

It is Celery's own, except that the job store alone records who took a message. It looks for a lost broker more often,
and logs that in one line.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from celery import bootsteps, shared_task
from celery.exceptions import Reject
from celery.worker import consumer
from celery.worker.consumer.tasks import Tasks

from farm.logging import get_logger
from farm.node.attempts import Attempts, Draining

log = get_logger(__name__)

RECONNECT_SECONDS = 3.0
"""Seconds between two tries to reach a broker; Celery's own pauses grow to half a minute."""

CALM_SECONDS = 4 * RECONNECT_SECONDS
"""Seconds without trouble after which new trouble is logged again."""


class Reading(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery has no types
    """Reads messages only while the supervisor allows it, and skips entries that are not messages.

    Attempts continue in this time. Each connection has a channel of its own, and starts here.
    """

    requires = (Tasks,)

    def start(self, parent: Any) -> None:
        """Ask before each message, as Celery itself does for `worker_disable_prefetch`."""
        attempts, channel = Attempts.current(), parent.task_consumer.channel
        has_room = channel.qos.can_consume
        channel.qos.can_consume = lambda: attempts.may_consume and has_room()
        # The event loop checks again after an event, or after some seconds.
        attempts.when_resumed = lambda: parent.hub.call_soon(_nothing)
        channel.handlers["BRPOP"] = partial(_read, channel.handlers["BRPOP"])


def _read(read: Callable[[], Any]) -> Any:
    """Read one message; skip an entry that is not a message, which would end the process with all its attempts."""
    try:
        return read()
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        log.error("dropped what is not a message from a queue", error=f"{type(error).__name__}: {error}")
        return None


def _nothing() -> None:
    """Wake up an event loop."""


class Consumer(consumer.Consumer):  # type: ignore[misc]  # Celery has no types
    """Takes messages; `worker_consumer` names it."""

    _troubled = -math.inf

    def ensure_connected(self, connection: Any) -> Any:
        """Return the connection once there is one."""
        ensure = connection.ensure_connection

        def patiently(_: Any, *rest: Any, **options: Any) -> Any:
            pauses = {"interval_start": RECONNECT_SECONDS, "interval_step": 0.0}
            return ensure(lambda error, _: self._tell(error), *rest, **options, **pauses)

        connection.ensure_connection = patiently
        connected = super().ensure_connected(connection)
        # A lost connection is not a reason to send again what runs here: it would be stale.
        connected.default_channel.do_restore = False
        return connected

    def on_connection_error_before_connected(self, error: Exception) -> None:
        """Give the server time: it can be reached, and refuses what a connection begins with."""
        self._tell(error)
        time.sleep(RECONNECT_SECONDS)

    def on_connection_error_after_connected(self, error: Exception) -> None:
        """Drop a broken connection; wait a little if the server refuses requests."""
        self._tell(error)
        super().on_connection_error_after_connected(error)
        if isinstance(error, self.channel_errors):
            time.sleep(RECONNECT_SECONDS)

    def _tell(self, error: Exception) -> None:
        if time.monotonic() - self._troubled > CALM_SECONDS:
            log.warning("cannot take messages, trying again", error=f"{type(error).__name__}: {error}")
        self._troubled = time.monotonic()


@shared_task(name="tasks.compile")  # type: ignore[untyped-decorator]  # Celery has no types
def compile_model(job_id: str, attempt: int, *_: object, **__: object) -> None:
    """Run one attempt of a job. Further arguments are those of a later release, and ignored."""
    try:
        Attempts.current().run(job_id, attempt)
    except Draining:
        raise Reject("the worker is draining", requeue=True) from None

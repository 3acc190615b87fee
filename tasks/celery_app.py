"""The Celery application of a worker process, the task that messages name, and the consumer that takes them.

`farm/node/supervisor.py` starts it. The consumer is Celery's own, except that the job store alone records who took a
message. It looks for a lost broker more often, and logs that in one line.
"""

from __future__ import annotations

import gc
import logging
import math
import random
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from celery import bootsteps, shared_task, signals
from celery.exceptions import CPendingDeprecationWarning, Reject
from celery.worker import consumer, state
from celery.worker.consumer.tasks import Tasks

from farm.app import Farm
from farm.compiling.attempt import CONSUMING, slots_of
from farm.errors import FarmFault
from farm.logging import configure, get_logger
from farm.node.attempts import Attempts, Draining

log = get_logger(__name__)

RECONNECT_SECONDS = 3.0
"""Seconds between two tries to reach a broker, in the middle; Celery's own pauses grow to half a minute."""

CALM_SECONDS = 4 * RECONNECT_SECONDS  # Seconds without trouble after which new trouble is logged again.

app = Farm.current().celery
app.conf.worker_consumer = "tasks.celery_app:Consumer"


def _pause() -> float:
    """Seconds until the next try: workers that lost a broker together do not return together."""
    return random.uniform(0.5, 1.5) * RECONNECT_SECONDS  # noqa: S311 - keeps no secret


class Lifeline(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery has no types
    """Makes the slots that attempts run in, and ties the process to its supervisor.

    Of the options, `lifeline` is the file descriptor on which the supervisor speaks: its end ends the process. `worker`
    is the id under which the supervisor registered it, on `node`; `slots` has the fields of each slot.
    """

    def __init__(self, parent: Any, lifeline: int, worker: str, node: str, slots: list[Any], **options: Any) -> None:
        farm = Farm.current()
        try:
            attempts = Attempts(farm.store, farm.executor, farm.settings, slots_of(slots), worker=worker, node=node)
        except FarmFault as error:
            raise SystemExit(f"the worker process cannot start: {error.message}; {error.hint}") from None
        Attempts.current = attempts
        attempts.obey(lifeline)
        super().__init__(parent, **options)


class Reading(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery has no types
    """Reads messages only while the supervisor allows it, and skips entries that are not messages.

    Attempts continue in this time. Each connection has a channel of its own, and starts here.
    """

    requires = (Tasks,)

    def start(self, parent: Any) -> None:
        """Ask before each message, as Celery itself does for `worker_disable_prefetch`."""
        attempts, channel = Attempts.current, parent.task_consumer.channel
        has_room = channel.qos.can_consume
        channel.qos.can_consume = lambda: attempts.may_consume(len(state.reserved_requests)) and has_room()
        # The event loop checks again after an event, such as a call that does nothing, or after some seconds.
        attempts.when_resumed = partial(parent.hub.call_soon, bool)
        channel.handlers["BRPOP"] = partial(_read, channel.handlers["BRPOP"])


def _read(read: Callable[[], Any]) -> Any:
    """Read one message; skip an entry that is not a message, which would end the process with all its attempts."""
    try:
        return read()
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        log.error("dropped what is not a message from a queue", error=f"{type(error).__name__}: {error}")
        return None


class Consumer(consumer.Consumer):  # type: ignore[misc]  # Celery has no types
    """Takes messages; `worker_consumer` names it."""

    _troubled = -math.inf

    def ensure_connected(self, connection: Any) -> Any:
        """Return the connection once there is one."""
        ensure = connection.ensure_connection

        def patiently(_: Any, *rest: Any, **options: Any) -> Any:
            pauses = {"interval_start": _pause(), "interval_step": 0.0}
            return ensure(lambda error, _: self._tell(error), *rest, **options, **pauses)

        connection.ensure_connection = patiently
        connected = super().ensure_connected(connection)
        # A lost connection is not a reason to send again what runs here: it would be stale.
        connected.default_channel.do_restore = False
        return connected

    def on_connection_error_before_connected(self, error: Exception) -> None:
        """Give the server time: it can be reached, and refuses what a connection begins with."""
        self._tell(error)
        time.sleep(_pause())

    def on_connection_error_after_connected(self, error: Exception) -> None:
        """Drop a broken connection; wait a little if the server refuses requests."""
        self._tell(error)
        super().on_connection_error_after_connected(error)
        if isinstance(error, self.channel_errors):
            time.sleep(_pause())

    def _tell(self, error: Exception) -> None:
        if time.monotonic() - self._troubled > CALM_SECONDS:
            log.warning("cannot take messages, trying again", error=f"{type(error).__name__}: {error}")
        self._troubled = time.monotonic()


@shared_task(name="tasks.compile")  # type: ignore[untyped-decorator]  # Celery has no types
def compile_model(job_id: str, attempt: int, *_: object, **__: object) -> None:
    """Run one attempt of a job. Further arguments are those of a later release, and ignored."""
    try:
        Attempts.current.run(job_id, attempt)
    except Draining:
        raise Reject("the worker is draining", requeue=True) from None


app.steps["worker"].add(Lifeline)
app.steps["consumer"].add(Reading)


@signals.setup_logging.connect  # type: ignore[untyped-decorator]  # Celery has no types
def configure_logging(**_: Any) -> None:
    """Log like the rest of the farm. With a receiver of this signal, Celery does not set up its own logging."""
    configure(Farm.current().settings)
    for name in ("celery.app.trace", "celery.worker.strategy"):  # Attempts log the same with their ids.
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in ("celery.worker.consumer.connection", "celery.worker.consumer.consumer"):  # As our consumer says it.
        logging.getLogger(name).setLevel(logging.ERROR)


@signals.celeryd_after_setup.connect  # type: ignore[untyped-decorator]  # Celery has no types
def ignore_warnings(**_: Any) -> None:
    """Ignore warnings about settings that we have chosen on purpose."""
    warnings.simplefilter("ignore", CPendingDeprecationWarning)


@signals.worker_ready.connect  # type: ignore[untyped-decorator]  # Celery has no types
def tell_supervisor(**_: Any) -> None:
    """Report that this process takes messages."""
    gc.freeze()  # What was imported is not garbage: to look for some in it takes 0.4 s at the end.
    Attempts.current.say(CONSUMING)

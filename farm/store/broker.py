"""The broker: Celery on Redis carries messages and nothing else; the truth is in the job store.

A message names an attempt: job id and number. It may come late, twice or never; `claim` and the reconciler handle that.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import urlsplit, urlunsplit

import kombu
import redis
from celery import Celery
from kombu.exceptions import BatchPublishError, OperationalError
from kombu.transport.redis import SentinelChannel

from farm.errors import FarmFault, StoreUnavailable
from farm.settings import Settings
from farm.store.link import SOCKET_TIMEOUT, place_of, refused, sentinels_of, spelt

TASK = "tasks.compile"

PREFIX = "{farm}:broker:"  # Prefix of Celery's keys, so that they do not collide with the store's in the same database.
SOCKET_SECONDS = 10  # A silent broker counts as gone; longer than Celery's own blocking reads.

CHECK_SECONDS = 5
"""A worker looks so often whether its blocking read, of a second, was answered: else the server's host has vanished."""

TOGETHER = 100  # Messages that are sent at once.


def make_celery(settings: Settings) -> Celery:
    """Return the Celery application for the broker at `redis_url`. Does not connect."""
    url = settings.redis_url.get_secret_value()
    app = Celery("farm", broker=_broker_url(url), set_as_current=True)
    sentinels = sentinels_of(url)
    app.conf.update(
        farm_place=place_of(url),  # For messages; Celery does not know it.
        broker_use_ssl=sentinels.certificates if sentinels else None,
        accept_content=["json"],
        task_serializer="json",
        task_ignore_result=True,
        # A message is done with when its attempt has ended: a worker that drains gives it back. None holds more than it
        # runs.
        task_acks_late=True,
        task_reject_on_worker_lost=False,
        worker_prefetch_multiplier=1,
        worker_disable_prefetch=True,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        # One queue for each pool, made when it is first named.
        task_create_missing_queues=True,
        # Code that watches or repairs Celery must not run through Celery.
        worker_enable_remote_control=False,
        worker_send_task_events=False,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        # Wait for a server that refuses for now (full, a replica after a failover), as for one that is away.
        broker_channel_error_retry=True,
        broker_transport_options={
            "global_keyprefix": PREFIX,
            # The job store records who has taken a message (docs/decisions/0029).
            "ack_emulation": False,
            "socket_timeout": SOCKET_SECONDS,
            "socket_connect_timeout": SOCKET_TIMEOUT,
            "socket_keepalive": True,
            "health_check_interval": CHECK_SECONDS,
            "priority_steps": [0],
            **({"master_name": sentinels.master, "sentinel_kwargs": sentinels.sentinel} if sentinels else {}),
        },
    )
    return app


def dispatch(app: Celery, pool: str, attempts: Sequence[tuple[str, int]]) -> None:
    """Send messages for attempts (job id, number) to a pool's queue, in order. Raises StoreUnavailable.

    Jobs that were started before go ahead of the queue: they have waited their turn, and nothing more urgent
    is queued (`lua/hand_out.lua`).
    """
    fresh = [attempt for attempt in attempts if attempt[1] == 1]
    again = [attempt for attempt in attempts if attempt[1] > 1]
    with _reaching(app), app.producer_pool.acquire(block=True) as producer:

        def send(job_id: str, number: int) -> None:
            task = f"{job_id}.{number}"
            # A list in Redis needs no declaration, which would take a fifth of the time.
            options = {"queue": pool, "task_id": task, "producer": producer, "declare": [], "ignore_result": True}
            app.send_task(TASK, args=(job_id, number), **options)

        try:
            # Together: with a thousand free slots each would wait for the answer about the one before.
            with producer.batch(TOGETHER):
                for job_id, number in fresh:
                    send(job_id, number)
        except BatchPublishError:  # Each by itself is tried again. Those that had arrived do no harm.
            for job_id, number in fresh:
                send(job_id, number)
        for job_id, number in reversed(again):
            send(job_id, number)
            # From the end where Kombu puts messages to the one where workers take them. A worker may have been
            # faster: then another message is first, or none. Kombu's own priorities would be further lists, to be
            # added up by all who count what is queued.
            queue = PREFIX + pool
            producer.connection.default_channel.client.lmove(queue, queue, "LEFT", "RIGHT")


def queued(app: Celery, pool: str) -> set[tuple[str, int]]:
    """Return the attempts whose messages are in a pool's queue. Raises StoreUnavailable."""
    with _reaching(app), app.pool.acquire(block=True) as connection:
        messages = connection.default_channel.client.lrange(PREFIX + pool, 0, -1)
    return {attempt for message in messages if (attempt := _attempt_of(message))}


def _attempt_of(message: bytes) -> tuple[str, int] | None:
    """The attempt that a message names; None for a foreign message."""
    try:
        job_id, _, number = json.loads(message)["headers"]["id"].rpartition(".")
        return job_id, int(number)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


@contextmanager
def _reaching(app: Celery) -> Iterator[None]:
    try:
        yield
    except (OperationalError, *app.pool.connection.connection_errors, *app.pool.connection.channel_errors) as error:
        cause = error.__cause__ if isinstance(error, OperationalError) else error
        if ours := refused("the broker", app.conf.farm_place, cause):
            raise ours from None
        if isinstance(cause, app.pool.connection.channel_errors):
            said, hint = f"refuses: {cause}", "it is full, or a replica: `farm doctor` says which one"
        else:
            said = f"cannot be reached: {type(cause or error).__name__}"
            hint = "start it, or set FARM_REDIS_URL to its address"
        raise StoreUnavailable(f"the broker at {app.conf.farm_place} {said}", hint=hint) from error


def _broker_url(url: str) -> str:
    """Kombu's spelling of an address: redis-py checks certificates unasked."""
    if found := sentinels_of(url):
        return ";".join(f"sentinel://{found.who}{spelt(*place)}{found.path}" for place in found.places)
    parts = urlsplit(url)
    query = parts.query
    if parts.scheme == "rediss" and "ssl_cert_reqs=" not in query:
        query = f"{query}&ssl_cert_reqs=required".lstrip("&")
    return urlunsplit(parts._replace(query=query))


def require_sentinels() -> None:
    """Raise FarmFault if kombu found nothing of Sentinels in the installed redis-py (celery/kombu#2420)."""
    if SentinelChannel.connection_class is None:
        versions, hint = f"redis-py {redis.__version__}", "pip install --upgrade 'kombu>=5.7' 'redis>=6.4'"
        raise FarmFault(f"kombu {kombu.__version__} cannot use sentinel:// with {versions}", hint=hint)

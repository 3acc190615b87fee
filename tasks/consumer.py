"""The consumer of a worker process: Celery's own, which looks for a lost broker more often."""

from __future__ import annotations

from functools import partial
from typing import Any

from celery.worker import consumer

RECONNECT_SECONDS = 3.0
"""Between two looks for a broker that is away; Celery's own pauses grow to half a minute."""


class Consumer(consumer.Consumer):  # type: ignore[misc]  # Celery has no types
    """Takes messages; `worker_consumer` names it."""

    def ensure_connected(self, connection: Any) -> Any:
        """Return the connection once there is one."""
        connection.ensure_connection = partial(
            connection.ensure_connection, interval_start=RECONNECT_SECONDS, interval_step=0.0
        )
        return super().ensure_connected(connection)

"""The consumer of a worker process: Celery's own, for messages of which the job store knows who took them."""

from __future__ import annotations

from functools import partial
from typing import Any

from celery.worker import consumer

RECONNECT_SECONDS = 3.0
"""Between two looks for a broker that is away; Celery's own pauses grow to half a minute."""


class Consumer(consumer.Consumer):  # type: ignore[misc]  # Celery has no types
    """Takes messages; `worker_consumer` names it."""

    def ensure_connected(self, connection: Any) -> Any:
        """Return the connection once there is one; a lost broker is looked for more often than by Celery itself."""
        connection.ensure_connection = partial(
            connection.ensure_connection, interval_start=RECONNECT_SECONDS, interval_step=0.0
        )
        connected = super().ensure_connected(connection)
        # A lost connection is no reason to send again what runs here: it would be stale.
        connected.default_channel.do_restore = False
        return connected

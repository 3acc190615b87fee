"""Schedule: when a periodic task is due."""

from __future__ import annotations

import time

AGAIN = 60.0
"""Seconds until a failed task is tried again."""


class Schedule:
    """The schedule of one task in one process. Times are in seconds."""

    def __init__(self, interval: float, first: float = 0.0) -> None:
        """The first run is due after `first`, each later one `interval` after the end of the previous run."""
        self._interval = interval
        self._next = time.monotonic() + first

    def is_due(self) -> bool:
        """Whether the task is due; unless `done` follows, it is due again after `AGAIN`."""
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + min(AGAIN, self._interval)
        return True

    def done(self) -> None:
        """Record that the task was done."""
        self._next = time.monotonic() + self._interval

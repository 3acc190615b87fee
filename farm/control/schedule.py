"""Schedule: when something is due that is done now and then."""

from __future__ import annotations

import time

AGAIN = 60.0
"""Seconds until what failed is tried again."""


class Schedule:
    """One thing's turns, in one process. Times are in seconds."""

    def __init__(self, interval: float, first: float = 0.0) -> None:
        """The first turn comes after `first`, each later one `interval` after the end of the one before."""
        self._interval = interval
        self._next = time.monotonic() + first

    def is_due(self) -> bool:
        """Whether it is to be done now; unless `done` follows, it is due again after `AGAIN`."""
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + min(AGAIN, self._interval)
        return True

    def done(self) -> None:
        """Note that it was done."""
        self._next = time.monotonic() + self._interval

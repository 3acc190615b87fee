"""A worker's health probes: when they run, and what the last one found."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from farm.logging import get_logger

log = get_logger(__name__)

LONGEST_PAUSE = 3600.0
"""Seconds between two health probes of a fenced node, however long it has been."""


class Probes:
    """A worker's health probes: one at a time, each in a thread, at growing pauses while the node is fenced."""

    def __init__(self, probe: Callable[[], str], pause: float, nudge: Callable[[], None]) -> None:
        self._probe = probe
        self._nudge = nudge
        self._first_pause = pause
        self._running = False
        self._fences = 0
        self._since = 0
        self._next = 0.0
        self.answer: str | None = None
        """What the last probe found wrong, until it is reported; empty: nothing."""
        self.row = 0
        """How many passed in a row since the node was fenced."""
        self.proven = False
        """Whether the store knows one's answer."""

    @property
    def due(self) -> bool:
        """Whether the pause after the last one is over."""
        return time.monotonic() >= self._next

    def begin_row(self) -> None:
        """The node was fenced: earlier passes do not count. Each further fence makes the pauses longer."""
        self.row, self._since, self._next = 0, 0, 0.0
        self._fences += 1

    def hurry(self) -> None:
        """The next one is due now."""
        self._next = 0.0

    def start(self) -> None:
        """Start a probe, unless one runs or its result has not been reported yet."""
        if self._running or self.answer is not None:
            return
        self._running = True
        # A daemon: it may take minutes, and nobody waits for it when the worker ends.
        threading.Thread(target=self._run, name="health-probe", daemon=True).start()

    def reported(self) -> None:
        """The store knows the answer."""
        self.answer = None
        self.proven = True

    def forget(self) -> None:
        """The last answer is not to be believed."""
        self.answer = None

    def _run(self) -> None:
        try:
            wrong = self._probe()
        except Exception as error:  # What breaks a probe would break attempts.
            log.exception("health probe broke")
            wrong = f"{type(error).__name__}: {error}"
        self.row = 0 if wrong else self.row + 1
        self._next = time.monotonic() + min(
            self._first_pause * 2 ** min(self._since + max(0, self._fences - 1), 20), LONGEST_PAUSE
        )
        self._since += 1
        self._running, self.answer = False, wrong
        self._nudge()

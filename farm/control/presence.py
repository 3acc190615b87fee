"""Presence: a control plane tells the others that it is there, and if it does not reach object storage."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

from farm.errors import FarmError
from farm.store import Store

ASK_SECONDS = 5.0
"""Seconds between two looks of a control plane at object storage."""

PATIENCE = 4.0
"""Seconds without an answer after which it counts as out of reach; a request gives up only after half a minute."""


class Presence:
    """What one control plane says of itself; `farm/builds/troubles.py` reads it."""

    def __init__(self, store: Store, reach: Callable[[], object]) -> None:
        """`reach` asks object storage for something."""
        self._store = store
        self._reach = reach
        self._name = f"{socket.gethostname()} (process {os.getpid()})"
        self._asked: float | None = None
        self._away = ""

    def look(self) -> None:
        """Ask object storage."""
        self._asked = time.monotonic()
        try:
            self._reach()
            self._away = ""
        except FarmError as error:
            self._away = error.message
        self._asked = None

    def report(self) -> None:
        """Say that this control plane is there, and what it found. Raises StoreUnavailable."""
        asked, away = self._asked, self._away
        if asked is not None and time.monotonic() - asked > PATIENCE:
            away = away or f"no answer for {time.monotonic() - asked:.0f} s"
        self._store.planes.report(self._name, away)

    def leave(self) -> None:
        """Say that this control plane ends. Raises StoreUnavailable."""
        self._store.planes.leave(self._name)

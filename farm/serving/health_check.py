"""Health checks: at most one open question to each server, however many callers ask for the farm's health."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future

from farm.errors import FarmFault

HEALTH_SECONDS = 2.0
"""How long a server has to answer."""


class HealthCheck:
    """Asks one server whether it is there. Callers who ask meanwhile wait for the same answer.

    A server that hangs keeps one thread busy, since a question that waits cannot be taken back.
    """

    def __init__(self, what: str, ask: Callable[[], object]) -> None:
        """`what` names the server in messages; `ask` raises if it is not there."""
        self._what = what
        self._ask = ask
        self._lock = threading.Lock()
        self._asked: Future[None] | None = None

    async def answers(self) -> None:
        """Return if the server answers. Raises FarmFault if it takes too long, and what `ask` raises."""
        asked = asyncio.wrap_future(self._question())
        done, _ = await asyncio.wait([asked], timeout=HEALTH_SECONDS)
        if not done:
            asked.cancel()
            raise FarmFault(f"{self._what} did not answer within {HEALTH_SECONDS:g} s", hint="`farm doctor` says more")
        await asked

    def _question(self) -> Future[None]:
        with self._lock:
            if self._asked is None or self._asked.done():
                self._asked = Future()
                self._asked.set_running_or_notify_cancel()  # Nobody who stops waiting ends it for others.
                threading.Thread(target=self._run, args=[self._asked], name="health", daemon=True).start()
            return self._asked

    def _run(self, asked: Future[None]) -> None:
        try:
            self._ask()
        except BaseException as error:
            asked.set_exception(error)
        else:
            asked.set_result(None)

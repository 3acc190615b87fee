"""Connections: how long one may take to say what it wants, and how many there are at once.

Who has no token can still connect and say nothing, or one byte a minute. So a connection has seconds for its header
and for its whole request, and who asks has to take what is answered. Where there are too many, the one that has waited
longest without a request goes first: those that are being answered, and whoever comes with a request, do not notice.
"""

from __future__ import annotations

import asyncio
import resource
from enum import Enum
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

from farm.logging import get_logger

log = get_logger(__name__)

MOST = 4096
"""Connections at once at most, whatever the system allows."""

LEAST = 16 << 10
"""Bytes of an answer that who waits for it takes in `answer_seconds`, however bad his line is."""

OTHER_FILES = 256
"""Descriptors that a server needs beside its connections: to Redis and object storage, log, library files."""


class _Stage(Enum):
    HEADER = "header"
    BODY = "body"
    ANSWER = "answer"


class BoundedConnection(H11Protocol):
    """One connection to the API."""

    most: ClassVar[int] = MOST
    header_seconds: ClassVar[float] = 10.0
    """For all of a request's header, from the connection or its first byte on."""
    body_seconds: ClassVar[float] = 120.0
    """For all of a request's body."""
    answer_seconds: ClassVar[float] = 60.0
    """Without taking anything of an answer, where so much of one lies here that no more is written."""
    handshake_seconds: ClassVar[float] = 10.0
    """For TLS to be agreed upon, before anything of this class sees the connection."""

    _stage: _Stage | None = None
    _timer: asyncio.TimerHandle | None = None
    _taking: asyncio.TimerHandle | None = None
    """Looks whether anything of an answer was taken."""
    _since = 0.0
    """When its stage began, on the clock of the event loop."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection; one too many costs the idle one that is oldest, or itself."""
        super().connection_made(transport)
        self._enter(_Stage.HEADER)
        if len(self.connections) > self.most:
            others = (each for each in self.connections if isinstance(each, BoundedConnection) and each._is_idle)
            oldest = min(others, key=lambda each: each._since, default=self)
            log.warning("too many connections, closing an idle one", connections=len(self.connections))
            oldest.transport.abort()
            self.connections.discard(oldest)

    def data_received(self, data: bytes) -> None:
        """Take what comes, and note how far the request is."""
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._enter(_Stage.HEADER)
        else:
            self._enter_request()

    def on_response_complete(self) -> None:
        """Go on with the request that came together with the one that is answered now."""
        super().on_response_complete()
        if self.cycle is not None and not self.cycle.response_complete:
            self._enter_request()

    def pause_writing(self) -> None:
        """Write no more until what is there is taken; who takes nothing of it loses the connection."""
        super().pause_writing()
        self._await_taking()

    def resume_writing(self) -> None:
        """Write on."""
        self._stop_awaiting()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_timer()
        self._stop_awaiting()
        super().connection_lost(exc)

    @property
    def _is_idle(self) -> bool:
        """Whether nothing is being answered, or the answer waits for who asked."""
        return (
            self._taking is not None
            or self._stage is not _Stage.ANSWER
            or (self.cycle is not None and self.cycle.response_complete)
        )

    def _enter_request(self) -> None:
        self._enter(_Stage.BODY if self.cycle.more_body else _Stage.ANSWER)

    def _enter(self, stage: _Stage) -> None:
        if stage is self._stage:
            return
        self._stop_timer()
        self._stage, self._since = stage, self.loop.time()
        if stage is not _Stage.ANSWER:
            seconds = self.header_seconds if stage is _Stage.HEADER else self.body_seconds
            self._timer = self.loop.call_later(seconds, self._too_late)

    def _too_late(self) -> None:
        self.transport.abort()

    def _await_taking(self) -> None:
        self._stop_awaiting()
        left = self.transport.get_write_buffer_size()
        self._taking = self.loop.call_later(self.answer_seconds, self._look_at_taking, left)

    def _look_at_taking(self, before: int) -> None:
        if before - self.transport.get_write_buffer_size() < LEAST:
            self.transport.abort()
        else:
            self._await_taking()

    def _stop_awaiting(self) -> None:
        if self._taking:
            self._taking.cancel()
            self._taking = None

    def _stop_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None


def bounded() -> type[BoundedConnection]:
    """Return the kind of connection that this process can hold, with as many descriptors as the system lets it have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    room = MOST if soft == resource.RLIM_INFINITY else min(MOST, max(soft - OTHER_FILES, soft // 2))
    members: dict[str, Any] = {"most": room, "__doc__": BoundedConnection.__doc__}
    return type("BoundedConnection", (BoundedConnection,), members)

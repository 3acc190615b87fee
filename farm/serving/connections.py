"""Connections: how long a client may take to send a request and to read its answer, and how many connections there are.

A client without a token can still connect and send nothing, or one byte a minute. So there is a time limit for the
header, for the whole request and for reading the answer. If there are too many connections, the one that has been idle
longest is closed. Connections with a running request are not affected. A connection counts from its TLS handshake on.
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
"""Bytes of a waiting answer that a client has to read within `answer_seconds`, even on a slow line."""

OTHER_FILES = 256
"""Descriptors that a server needs for the rest: Redis, object storage, its log, library files."""


class _Stage(Enum):
    HEADER = "header"
    BODY = "body"
    ANSWER = "answer"


class BoundedConnection(H11Protocol):
    """One connection to the API."""

    most: ClassVar[int] = MOST
    header_seconds: ClassVar[float] = 10.0
    """For the whole header of a request, from the connection or the first byte on."""
    body_seconds: ClassVar[float] = 120.0
    """For the whole body of a request."""
    answer_seconds: ClassVar[float] = 60.0
    """For the client to read `LEAST` bytes of an answer, if so much of it waits that nothing more is written."""
    handshake_seconds: ClassVar[float] = 10.0
    """For the TLS handshake."""
    _handshakes: ClassVar[set[asyncio.Task[Any]]] = set()
    """Connections whose TLS handshake is not done: asyncio accepts each in a task that ends with the handshake."""

    _stage: _Stage | None = None
    _timer: asyncio.TimerHandle | None = None
    _taking: asyncio.TimerHandle | None = None
    """Checks whether the client has read enough of an answer."""
    _since = 0.0
    """When the current stage began, by the clock of the event loop."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """Accept a connection. Raises ConnectionAbortedError, which closes it, if too many are in a handshake."""
        super().__init__(*arguments, **named)
        if self.config.is_ssl and (task := asyncio.current_task()):
            if len(self._handshakes) >= self.most // 2:
                log.warning("too many TLS handshakes, closing a new connection", handshakes=len(self._handshakes))
                raise ConnectionAbortedError("too many TLS handshakes")
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)
            self._make_room(None)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin. If there are too many connections, close the one that has been idle longest, or else this one."""
        super().connection_made(transport)
        self._enter(_Stage.HEADER)
        self._make_room(self)

    def _make_room(self, new: BoundedConnection | None) -> None:
        count = len(self.connections) + len(self._handshakes)
        if count <= self.most:
            return
        others = (each for each in self.connections if isinstance(each, BoundedConnection) and each._is_idle)
        if oldest := min(others, key=lambda each: each._since, default=new):
            log.warning("too many connections, closing an idle one", connections=count)
            oldest.transport.abort()
            self.connections.discard(oldest)

    def data_received(self, data: bytes) -> None:
        """Read data, and note how much of the request has arrived."""
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._enter(_Stage.HEADER)
        else:
            self._enter_request()

    def on_response_complete(self) -> None:
        """Start the timer of a request that came together with the one just answered."""
        super().on_response_complete()
        if self.cycle is not None and not self.cycle.response_complete:
            self._enter_request()

    def pause_writing(self) -> None:
        """Stop writing until the client has read what waits; close the connection if it reads too little."""
        super().pause_writing()
        self._await_taking()

    def resume_writing(self) -> None:
        """Write again."""
        self._stop_awaiting()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_timer()
        self._stop_awaiting()
        super().connection_lost(exc)

    @property
    def _is_idle(self) -> bool:
        """Whether no request is being answered, or the client does not read its answer."""
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
    """Raise the limit of descriptors as far as allowed, and return the class of connections bounded by it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    room = MOST if soft == resource.RLIM_INFINITY else min(MOST, max(soft - OTHER_FILES, soft // 2))
    members: dict[str, object] = {"most": room, "_handshakes": set(), "__doc__": BoundedConnection.__doc__}
    return type("BoundedConnection", (BoundedConnection,), members)

"""Plain HTTP/1.1: an httpx transport that asks with the standard library's client.

httpx parses an answer's body in steps of 64 KiB and copies each several times, which costs more than to hash it.
`http.client` lets the system write straight into the bytes that are handed on. It is also imported anyway, and what
httpx asks with takes a tenth of a command's start.
"""

from __future__ import annotations

import http.client
import selectors
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, cached_property
from threading import Lock
from urllib.request import getproxies

import httpx

PIECE = 1 << 18
"""Bytes that are read at once: what the processor's cache holds until they are written."""

PACKED_PIECE = 1 << 14
"""Bytes of a compressed body that are read at once: they may unpack to a thousand times as many."""

IDLE = 5.0
"""Seconds after which a kept connection is not used again: what lies between may have forgotten it without a word."""

LAST_PORT = 65535
_PORTS = {"http": 80, "https": 443}
_ENDED = (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError)
"""How a connection ends that the server has closed."""

_Origin = tuple[str, str, int]


@cache
def trusted() -> ssl.SSLContext:
    """Return the certificates that this process trusts; to read them takes longer than all else in a client."""
    return httpx.create_ssl_context()


def names_no_proxy() -> bool:
    """Whether the environment asks for no proxy: this transport knows none."""
    return not getproxies().keys() & {"http", "https", "all"}


class PlainHTTP(httpx.BaseTransport):
    """Requests on kept connections; one whose body is not whole is left to httpx. It may be shared by threads."""

    def __init__(self, trusted: Callable[[], ssl.SSLContext] = trusted) -> None:
        """`trusted` gives the certificates; it takes long, and is asked only if TLS needs them."""
        self._trusted = trusted
        self._lock = Lock()
        self._idle: dict[_Origin, list[tuple[float, http.client.HTTPConnection]]] = {}
        self._closed = False

    @cached_property
    def _others(self) -> httpx.HTTPTransport:
        return httpx.HTTPTransport(verify=self._trusted())

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Ask, and return the answer with its body unread. Raises httpx.TransportError."""
        if (request.url.port or 0) > LAST_PORT:
            # The system's resolver would ask the port of its last 16 bits, at which somebody else may listen.
            raise httpx.UnsupportedProtocol(f"there is no port {request.url.port}", request=request)
        if not isinstance(request.stream, httpx.ByteStream) or request.url.scheme not in ("http", "https"):
            return self._others.handle_request(request)
        scheme = request.url.scheme
        # With its port: without one `http.client` looks for it in the host, and finds it in an IPv6 address.
        origin = (scheme, request.url.raw_host.decode("ascii"), request.url.port or _PORTS[scheme])
        try:
            connection, answer = self._ask(origin, request)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise httpx.ConnectError(str(error) or type(error).__name__, request=request) from None
        if "," in answer.getheader("Content-Encoding", ""):
            connection.close()
            raise httpx.RemoteProtocolError("it is compressed more than once", request=request)
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in answer.getheaders()]
        return httpx.Response(answer.status, headers=headers, stream=_Body(self, origin, connection, answer))

    def close(self) -> None:
        """Close the connections that nobody uses; the others are closed by those who do."""
        with self._lock:
            self._closed, idle, self._idle = True, self._idle, {}
        for connections in idle.values():
            for _, connection in connections:
                connection.close()
        if "_others" in self.__dict__:
            self._others.close()

    def keep(self, origin: _Origin, connection: http.client.HTTPConnection) -> None:
        """Take back a connection on which an answer was read to its end."""
        with self._lock:
            if not self._closed:
                self._idle.setdefault(origin, []).append((time.monotonic(), connection))
                return
        connection.close()

    def _kept(self, origin: _Origin) -> http.client.HTTPConnection | None:
        """Return a connection that can be used again, if one is kept.

        One that has something to read has none for us: the server has closed it, or answers what nobody asked.
        """
        while True:
            with self._lock:
                idle = self._idle.get(origin)
                if not idle:
                    return None
                since, connection = idle.pop()
            if connection.sock and time.monotonic() - since < IDLE and not _has_something(connection):
                return connection
            connection.close()

    def _ask(
        self, origin: _Origin, request: httpx.Request
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        while connection := self._kept(origin):
            with suppress(*_ENDED):  # The server closes it now, as it may.
                return connection, _answer_on(connection, request)
        connection = self._new(origin, request)
        return connection, _answer_on(connection, request)

    def _new(self, origin: _Origin, request: httpx.Request) -> http.client.HTTPConnection:
        scheme, host, port = origin
        wait = request.extensions["timeout"]["connect"]
        made = (
            http.client.HTTPSConnection(host, port, timeout=wait, context=self._trusted())
            if scheme == "https"
            else http.client.HTTPConnection(host, port, timeout=wait)
        )
        made.response_class = _Answer
        return made


class _Answer(http.client.HTTPResponse):
    """An answer that is whole: `http.client` also takes a head that is cut off, a length that is none, and a 103."""

    def begin(self) -> None:
        """Read the head. Raises HTTPException for one without an end, or with a length that is none."""
        readline = self.fp.readline

        def whole(limit: int | None = -1) -> bytes:
            line = readline(limit)
            if not line.endswith(b"\n") and len(line) != limit:
                raise http.client.RemoteDisconnected("the connection ended in the middle of an answer")
            return line

        self.fp.readline = whole  # type: ignore[method-assign]
        super().begin()
        while 100 < self.status < 200:
            self.headers = self.msg = None  # type: ignore[assignment]
            super().begin()
        if self.length is None and not self.chunked and "Content-Length" in self.headers:
            raise http.client.HTTPException(f"its length is {self.headers['Content-Length']!r}")


def _has_something(connection: http.client.HTTPConnection) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(connection.sock, selectors.EVENT_READ)
        return bool(selector.select(0))


def _answer_on(connection: http.client.HTTPConnection, request: httpx.Request) -> http.client.HTTPResponse:
    try:
        if not connection.sock:
            connection.connect()
        connection.sock.settimeout(request.extensions["timeout"]["read"])
        target = request.url.raw_path.decode("ascii")
        connection.putrequest(request.method, target, skip_host=True, skip_accept_encoding=True)
        for name, value in request.headers.raw:
            connection.putheader(name, value)
        with suppress(*_ENDED):  # Who refuses a body may answer before its end.
            connection.endheaders(request.content)
        return connection.getresponse()
    except BaseException:
        connection.close()
        raise


class _Body(httpx.SyncByteStream):
    def __init__(
        self,
        transport: PlainHTTP,
        origin: _Origin,
        connection: http.client.HTTPConnection,
        answer: http.client.HTTPResponse,
    ) -> None:
        self._transport = transport
        self._origin = origin
        self._connection = connection
        self._answer = answer

    def __iter__(self) -> Iterator[bytes]:
        # What has no known length may come line by line, as it happens.
        read = self._answer.read1 if self._answer.length is None else self._answer.read
        size = PACKED_PIECE if self._answer.getheader("Content-Encoding") else PIECE
        try:
            while data := read(size):
                yield data
        except (OSError, http.client.HTTPException) as error:
            raise httpx.ReadError(str(error) or type(error).__name__) from None
        if self._answer.length:  # `read` does not say that the server ended too early.
            raise httpx.RemoteProtocolError(f"{self._answer.length} bytes are missing")

    def close(self) -> None:
        if self._answer.isclosed() and not self._answer.length:
            self._transport.keep(self._origin, self._connection)
        else:
            self._connection.close()
            self._answer.close()

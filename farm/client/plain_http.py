"""Plain HTTP/1.1: an httpx transport that asks with the standard library's client.

httpx parses an answer's body in steps of 64 KiB and copies each several times, which costs more than to hash it.
`http.client` lets the system write straight into the bytes that are handed on. It is also imported anyway, and what
httpx asks with takes a tenth of a command's start.
"""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, cached_property
from threading import Lock
from urllib.request import getproxies

import httpx

PIECE = 1 << 18
"""Bytes that are read at once: what the processor's cache holds until they are written."""

_Origin = tuple[str, str, int | None]


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
        self._idle: dict[_Origin, list[http.client.HTTPConnection]] = {}

    @cached_property
    def _others(self) -> httpx.HTTPTransport:
        return httpx.HTTPTransport(verify=self._trusted())

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Ask, and return the answer with its body unread. Raises httpx.TransportError."""
        if not isinstance(request.stream, httpx.ByteStream) or request.url.scheme not in ("http", "https"):
            return self._others.handle_request(request)
        origin = (request.url.scheme, request.url.raw_host.decode("ascii"), request.url.port)
        try:
            connection, answer = self._ask(origin, request)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise httpx.ConnectError(str(error) or type(error).__name__, request=request) from None
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in answer.getheaders()]
        return httpx.Response(answer.status, headers=headers, stream=_Body(self, origin, connection, answer))

    def close(self) -> None:
        """Close the connections that nobody uses; the others are closed by those who do."""
        with self._lock:
            idle, self._idle = self._idle, {}
        for connections in idle.values():
            for connection in connections:
                connection.close()
        if "_others" in self.__dict__:
            self._others.close()

    def keep(self, origin: _Origin, connection: http.client.HTTPConnection) -> None:
        """Take back a connection on which an answer was read to its end."""
        with self._lock:
            self._idle.setdefault(origin, []).append(connection)

    def _ask(
        self, origin: _Origin, request: httpx.Request
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        while True:
            with self._lock:
                idle = self._idle.get(origin)
                connection = idle.pop() if idle else None
            if connection is None:
                connection = self._new(origin, request)
                return connection, _answer_on(connection, request)
            with suppress(ConnectionError):  # The server has closed it since, as it may.
                return connection, _answer_on(connection, request)

    def _new(self, origin: _Origin, request: httpx.Request) -> http.client.HTTPConnection:
        scheme, host, port = origin
        wait = request.extensions["timeout"]["connect"]
        if scheme == "https":
            return http.client.HTTPSConnection(host, port, timeout=wait, context=self._trusted())
        return http.client.HTTPConnection(host, port, timeout=wait)


def _answer_on(connection: http.client.HTTPConnection, request: httpx.Request) -> http.client.HTTPResponse:
    try:
        if not connection.sock:
            connection.connect()
        connection.sock.settimeout(request.extensions["timeout"]["read"])
        target = request.url.raw_path.decode("ascii")
        connection.putrequest(request.method, target, skip_host=True, skip_accept_encoding=True)
        for name, value in request.headers.raw:
            connection.putheader(name, value)
        with suppress(ConnectionError):  # Who refuses a body may answer before its end.
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
        read = self._answer.read if self._answer.length else self._answer.read1
        try:
            while data := read(PIECE):
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

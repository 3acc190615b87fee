"""Large answers by urllib3: an httpx transport for downloads. httpx's own copies each byte several times."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any

import httpx
import urllib3
from urllib3.connection import HTTPConnection
from urllib3.exceptions import HTTPError, ProtocolError

PIECE = 1 << 18  # Bytes that are read at once: what the processor's cache holds until they are written.

_ALIVE = [
    *HTTPConnection.default_socket_options,
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]
"""What lies between may forget an idle connection without a word: the system asks after 5 s, and closes it then."""


class LargeAnswers(httpx.BaseTransport):
    """Asks without a body and without a proxy, on kept connections. It may be shared by threads."""

    def __init__(self, connections: int, trusted: Callable[[], ssl.SSLContext]) -> None:
        """`connections` to one server are kept at most; `trusted` gives the certificates if TLS needs them."""
        self._trusted = trusted
        self._options: dict[str, Any] = {"maxsize": connections, "socket_options": _ALIVE, "retries": False}

    @cached_property
    def _plain(self) -> urllib3.PoolManager:
        return urllib3.PoolManager(**self._options)

    @cached_property
    def _secure(self) -> urllib3.PoolManager:
        return urllib3.PoolManager(**self._options, ssl_context=self._trusted())

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Ask, and return the answer with its body unread. Raises httpx.TransportError."""
        if request.url.scheme not in ("http", "https"):
            raise httpx.UnsupportedProtocol("the address has to begin with http:// or https://", request=request)
        pool = self._secure if request.url.scheme == "https" else self._plain
        wait = request.extensions["timeout"]
        ask = partial(
            pool.request,
            request.method,
            str(request.url),
            headers=dict(request.headers),
            timeout=urllib3.Timeout(connect=wait["connect"], read=wait["read"]),
            preload_content=False,
            decode_content=False,
        )
        try:
            try:
                answer = ask()
            except ProtocolError as error:
                # Its server closed a kept connection while it was asked, and has answered nothing.
                if not isinstance(error.args[-1], ConnectionResetError):
                    raise
                answer = ask()
        except (HTTPError, OSError, ValueError) as error:
            raise httpx.ConnectError(str(error) or type(error).__name__, request=request) from None
        if answer.status in (200, 206) and answer.length_remaining is None and not answer.chunked:
            answer.close()  # Its head may be cut off: then nothing would say that its body is.
            raise httpx.RemoteProtocolError("the answer does not say its length", request=request)
        return httpx.Response(answer.status, headers=list(answer.headers.items()), stream=_Body(answer))

    def close(self) -> None:
        """Close the connections that nobody uses; the others are closed by those who do."""
        for pool in (self.__dict__.get("_plain"), self.__dict__.get("_secure")):
            if pool:
                pool.clear()


class _Body(httpx.SyncByteStream):
    def __init__(self, answer: urllib3.BaseHTTPResponse) -> None:
        self._answer = answer

    def __iter__(self) -> Iterator[bytes]:
        try:
            # As much as is there: to fill a piece would take days of a server that sends in drops.
            yield from iter(partial(self._answer.read1, PIECE), b"")
        except (HTTPError, OSError) as error:
            raise httpx.ReadError(str(error) or type(error).__name__) from None

    def close(self) -> None:
        self._answer.close()

"""Requests to addresses that others choose: the address is checked and pinned, and the answer is bounded.

A name is resolved once, and the connection goes to the very address that was checked: a name that leads elsewhere a
moment later (DNS rebinding) gains nothing. No redirect is followed, and no proxy of the environment is used.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import httpcore

from farm.wire.addresses import address_of, is_public

SECONDS = 20.0
"""Seconds that one request may take in all, from the connection to the answer's first line."""

LARGEST_ANSWER = 64 << 10
"""Bytes that are read of an answer: its headers. Its body is not read."""


class Refused(Exception):
    """An address that the farm does not call."""


class NoAnswer(Exception):
    """The request got no answer; the message says why."""


def post(url: str, headers: Mapping[str, str], body: bytes, networks: Sequence[str], seconds: float = SECONDS) -> int:
    """Send a POST and return the answer's status.

    `networks` are the operator's, in CIDR: private addresses that may be called, also without TLS. Raises Refused for
    an address that may not be called, NoAnswer.
    """
    backend = _Pinned(networks, plain=not url.lower().startswith("https:"), deadline=time.monotonic() + seconds)
    timeouts = dict.fromkeys(("connect", "read", "write", "pool"), seconds)
    try:
        with (
            httpcore.ConnectionPool(ssl_context=ssl.create_default_context(), network_backend=backend) as pool,
            pool.stream(
                "POST",
                url,
                headers=[*headers.items(), ("Content-Length", str(len(body)))],
                content=body,
                extensions={"timeout": timeouts},
            ) as response,
        ):
            return int(response.status)
    except httpcore.TimeoutException:
        raise NoAnswer(f"no answer within {seconds:g} s") from None
    except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.UnsupportedProtocol, OSError) as error:
        raise NoAnswer(str(error) or type(error).__name__) from None
    except ValueError:  # Such as a port above 65535, which could be stored once.
        raise Refused(f"{url} is not an address") from None


def why_not(address: str, networks: Iterable[str], *, plain: bool) -> str:
    """Return why an address may not be called, or an empty text. `plain`: without TLS."""
    found = address_of(address)
    if any(found in ipaddress.ip_network(network) for network in networks):
        return ""
    if not is_public(found):
        return f"{address} is not a public address (the setting webhook_networks allows others)"
    return f"{address} would be called without TLS" if plain else ""


class _Pinned(httpcore.NetworkBackend):
    """Connects to addresses that were checked, before a deadline."""

    def __init__(self, networks: Sequence[str], *, plain: bool, deadline: float) -> None:
        self._networks = networks
        self._plain = plain
        self._deadline = deadline
        self._sockets = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise httpcore.ConnectError(f"{host} is not known: {error}") from None
        addresses = list(dict.fromkeys(str(each[4][0]) for each in found))
        # All of them: a name that has a public and a private address is not to choose between them.
        for address in addresses:
            if problem := why_not(address, self._networks, plain=self._plain):
                raise Refused(f"{host}: {problem}")
        for address in addresses[:-1]:
            try:
                return self._connected(address, port, timeout)
            except httpcore.ConnectError:
                continue
        return self._connected(addresses[-1], port, timeout)

    def _connected(self, address: str, port: int, timeout: float | None) -> httpcore.NetworkStream:
        left = _left(self._deadline, timeout)
        return _BoundedStream(self._sockets.connect_tcp(address, port, timeout=left), self._deadline)


class _BoundedStream(httpcore.NetworkStream):
    """A connection that ends at a deadline, and after so many bytes: an answer that comes in drops ends, too."""

    def __init__(self, stream: httpcore.NetworkStream, deadline: float) -> None:
        self._stream = stream
        self._deadline = deadline
        self._read = 0

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data = self._stream.read(max_bytes, _left(self._deadline, timeout))
        self._read += len(data)
        if self._read > LARGEST_ANSWER:
            raise httpcore.ReadError(f"the answer has more than {LARGEST_ANSWER >> 10} KiB before its body")
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, _left(self._deadline, timeout))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        left = _left(self._deadline, timeout)
        return _BoundedStream(self._stream.start_tls(ssl_context, server_hostname, left), self._deadline)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def _left(deadline: float, timeout: float | None) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise httpcore.ReadTimeout
    return min(left, timeout or left)

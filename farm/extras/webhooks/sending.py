"""Sending: signs what webhooks get, and tries again until it is taken. Addresses that others choose are checked first.

A name is resolved once, and the connection goes to the very address that was checked: a name that leads elsewhere a
moment later (DNS rebinding) gains nothing. No redirect is followed, and no proxy of the environment is used.
"""

from __future__ import annotations

import ipaddress
import random
import socket
import ssl
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import httpcore
from standardwebhooks import Webhook as Signer

from farm.errors import FarmError, FarmFault, NotFound
from farm.extension import Loop
from farm.extras.webhooks.hooks import AttemptToDeliver, Delivery, Webhook, Webhooks, signing_secrets
from farm.logging import get_logger
from farm.wire.addresses import address_of, is_public

if TYPE_CHECKING:
    from farm.app import Farm

SECONDS = 20.0  # Seconds that one request may take in all, from the connection to the answer's first line.
LARGEST_ANSWER = 64 << 10  # Bytes that are read of an answer: its headers. Its body is not read.


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


log = get_logger(__name__)

PAUSES = (5.0, 300.0, 1800.0, 7200.0, 18_000.0, 36_000.0, 50_400.0, 72_000.0, 86_400.0)
"""Seconds between the attempts of one message, as Standard Webhooks suggests: three days in all."""

LEASE = 3 * SECONDS  # Seconds for which a message belongs to the control plane that sends it.
DELIVER_SECONDS = 5.0  # Seconds between two looks for messages: each is a listing.
AT_ONCE = 8  # Messages that are sent at once, so that a slow receiver does not hold up the others.
GONE = 410  # The answer of a receiver that wants to hear nothing any more.


def loops(farm: Farm) -> list[Loop]:
    """Return the loop that sends messages: one of its own, because it waits for the servers of others."""
    return [Loop("webhooks", DeliveryRounds(farm).go, DELIVER_SECONDS)]


class DeliveryRounds:
    """Sends what waits. Any number of control planes may: each attempt is made by one."""

    def __init__(self, farm: Farm) -> None:
        self._hooks, self._now, self._networks = Webhooks(farm), farm.store.now, farm.settings.webhook_networks
        self._later: dict[tuple[str, str, str], tuple[str, float]] = {}
        """When messages are due that are not yet, with the mark that says so."""

    def go(self) -> int:
        """Send what is due, and return how many messages were delivered."""
        now = self._now()
        marks = {(namespace, name, message): mark for namespace, name, message, mark in self._hooks.due()}
        self._later = {key: known for key, known in self._later.items() if marks.get(key) == known[0]}
        due = [key for key in marks if key not in self._later or self._later[key][1] <= now]
        if not due:
            return 0
        with ThreadPoolExecutor(min(AT_ONCE, len(due))) as threads:
            return sum(threads.map(lambda key: self._send(key, marks[key]), due))

    def _send(self, key: tuple[str, str, str], mark: str) -> bool:
        namespace, name, message = key
        where = {"namespace": namespace, "webhook": name, "message": message}
        try:
            found = self._hooks.claim(namespace, name, message, LEASE)
            if not isinstance(found, tuple):
                if found is not None:
                    self._later[key] = mark, found
                return False
            delivery, etag = found
            hook = self._hooks.find(namespace, name)
            attempt = self._attempt(hook, delivery)
            after = _judged(delivery, attempt, self._now())
            self._hooks.ended(namespace, name, after, etag)
            if attempt["status"] == GONE:
                self._hooks.disable(namespace, name, "it answered 410 Gone")
            log.info("webhook called", **where, status=attempt["status"], error=attempt["error"])
            return after["state"] == "delivered"
        except NotFound:  # The webhook was removed; what waited for it must not go to the next one of its name.
            self._hooks.forget(namespace, name, message)
        except FarmFault:
            raise
        except FarmError as error:
            log.error("webhook not called", **where, error=error.message)
        except Exception:  # One message that cannot be sent must not stop the others.
            log.exception("webhook not called", **where)
        return False

    def _attempt(self, hook: Webhook, delivery: Delivery) -> AttemptToDeliver:
        began, at, status, error = time.monotonic(), self._now(), 0, ""
        moment = datetime.fromtimestamp(int(at), UTC)
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "migraphx-farm",
            "webhook-id": delivery["id"],
            "webhook-timestamp": str(int(at)),
            "webhook-signature": " ".join(
                Signer(secret).sign(delivery["id"], moment, delivery["body"]) for secret in signing_secrets(hook, at)
            ),
        }
        try:
            status = post(hook["url"], headers, delivery["body"].encode(), self._networks)
            if not 200 <= status < 300:
                error = f"it answered {status}" + (", and redirects are not followed" if 300 <= status < 400 else "")
        except (Refused, NoAnswer) as problem:
            error = str(problem)
        return {"at": at, "status": status, "error": error, "seconds": round(time.monotonic() - began, 3)}


def _judged(delivery: Delivery, attempt: AttemptToDeliver, now: float) -> Delivery:
    """Return a delivery after an attempt: delivered, to be tried again, or failed for good."""
    after: Delivery = {**delivery, "attempts": [*delivery["attempts"], attempt], "next": None}
    if not attempt["error"]:
        after["state"] = "delivered"
    elif attempt["status"] == GONE or delivery["tries"] > len(PAUSES):
        after["state"] = "failed"
    else:
        # Not all at once after an outage of their receiver.
        after["next"] = now + PAUSES[delivery["tries"] - 1] * random.uniform(0.9, 1.2)  # noqa: S311
    return after

"""Sentinel: several servers, one is the primary, and Sentinels say which one it is now.

Their address is `sentinel://USER:PASSWORD@HOST:PORT,HOST:PORT/0?master=NAME` with the Sentinels' places;
`sentinels://` is the same with TLS, also to the Sentinels. `sentinel_username` and `sentinel_password` are for these.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import redis
from redis.connection import SSLConnection, parse_url
from redis.sentinel import Sentinel, SentinelManagedConnection

ASK_SECONDS = 1.0
"""A Sentinel that is silent for so long is passed over: its host may have vanished with the primary."""


_ADDRESS = re.compile(r"(sentinels?)://([^/?#]*@)?([^/?#]*)([^?#]*)\??([^#\s]*)")
"""Scheme, user, places, path, query. The `urlsplit` of newer Pythons refuses lists of places with an IPv6 address."""


class Sentinels:
    """What an address with Sentinels says: their places, the primary's name, and options as redis-py has them."""

    def __init__(self, scheme: str, who: str, hosts: str, path: str, query_text: str) -> None:
        """Takes the parts of `_ADDRESS`. Raises ValueError for a wrong address."""
        self.who = who
        self.path = path
        self.places = [_place(host) for host in hosts.split(",")]
        query = dict(parse_qsl(query_text))
        self.master = query.pop("master", "")
        if not self.master:
            raise ValueError("`?master=NAME` is missing, with the name that `sentinel monitor` gives the primary")
        own = {name: query.pop(f"sentinel_{name}", None) for name in ("username", "password")}
        self.tls = scheme == "sentinels"
        address = f"redis{'s' * self.tls}://{who}{path}?{urlencode(query)}"
        self.primary: dict[str, Any] = parse_url(address)  # type: ignore[no-untyped-call]
        """Options of connections to the primary: user, database, certificates."""
        self.primary.pop("connection_class", None)
        certificates = {name: value for name, value in self.primary.items() if name.startswith("ssl_")}
        self.certificates = {"ssl_cert_reqs": "required", **certificates} if self.tls else {}
        self.sentinel = {
            **own,
            **self.certificates,
            "ssl": self.tls,
            "socket_timeout": ASK_SECONDS,
            "socket_connect_timeout": ASK_SECONDS,
        }
        """Options of connections to a Sentinel."""

    def connect(self, **options: Any) -> Any:
        """Return a client of the primary, whichever it is; connects at its first use."""
        asked: Any = Sentinel(self.places, sentinel_kwargs=self.sentinel)  # type: ignore[no-untyped-call]
        connection = _PrimaryByTls if self.tls else _Primary
        return asked.master_for(self.master, connection_class=connection, **self.primary, **options)


def read(url: str) -> Sentinels | None:
    """Return what an address with Sentinels says; None if it is the address of a server. Raises ValueError."""
    found = _ADDRESS.match(url)
    return Sentinels(*found.groups("")) if found else None


def connect(url: str, **options: Any) -> Any:
    """Return a client of redis-py for an address of either kind; connects at its first use. Raises ValueError."""
    if found := read(url):
        return found.connect(**options)
    return redis.Redis.from_url(url.replace("redis+socket://", "unix://"), **options)


class _Primary(SentinelManagedConnection):
    """A connection that closes when an answer does not come.

    redis-py's own stays open: to a vanished host for ever, and the next command gets the answer that came late.
    """

    def read_response(self, *arguments: Any, **options: Any) -> Any:
        """Return the next answer."""
        return super().read_response(*arguments, **{"disconnect_on_error": True, **options})


class _PrimaryByTls(_Primary, SSLConnection):
    """The same, by TLS."""


def place_of(url: str) -> str:
    """Return where an address leads, for messages: without user and password."""
    if found := read(url):
        return f"{found.master} ({', '.join(spelt(*place) for place in found.places)})"
    parts = urlsplit(url)
    return spelt(parts.hostname, parts.port or 6379) if parts.hostname else parts.path


def spelt(host: str, port: int) -> str:
    """Return a place as addresses have it: an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _place(host: str) -> tuple[str, int]:
    parts = urlsplit(f"//{host}")
    if not parts.hostname:
        raise ValueError("the place of a Sentinel is empty")
    return parts.hostname, parts.port or 26379

"""Sites: a server answers under its own names only, and answers no page of another site, even with a token.

A browser lets any page send requests to a server on its user's machine, also under a name that the page's owner gave
to that machine's address (DNS rebinding). A server without a token would obey.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection

from starlette.datastructures import Headers

from farm.errors import NotAllowed

LOCALHOST = "localhost"
"""The name of the loopback addresses, which no other machine can reach."""

_HINT = "the operator lists further names in the setting `api_hosts`"


class OwnSite:
    """Refuses requests to another host, and from pages of another site."""

    def __init__(self, hosts: Collection[str], *, named: bool) -> None:
        """`hosts` are the names to answer under, besides those of loopback; without `named`, any name is accepted."""
        self._hosts = frozenset(map(host_name, hosts))
        self._named = named

    def check(self, headers: Headers) -> None:
        """Raises NotAllowed for a request with such headers."""
        host = headers.get("host", "").lower()
        if self._named and not (host_name(host) in self._hosts or is_loopback(host_name(host))):
            raise NotAllowed(f"this server does not answer as {host[:100]!r}", hint=_HINT)
        origin = headers.get("origin", "").lower()
        if origin:
            _, _, site = origin.partition("://")
            if not site or (site != host and (host_name(site) not in self._hosts or is_loopback(host_name(site)))):
                raise NotAllowed(f"a page of {origin[:100]!r} may not send requests here", hint=_HINT)
        # Requests for a page's pictures and scripts have no Origin. Following a link to this server is allowed.
        elif headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate":
            raise NotAllowed("a page of another site may not send requests here", hint=_HINT)


def is_loopback(host: str) -> bool:
    """Whether a host, a name or an address without a port, is this machine and cannot be reached from another one."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == LOCALHOST


def host_name(host: str) -> str:
    """Return a host without its port and without the dot that ends a whole name: `[::1]:8000` is `::1`."""
    host = host.lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].removesuffix(".")

"""Who calls the API, and with which rights: bearer tokens, roles, namespaces."""

from __future__ import annotations

import hmac
import re
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated

import anyio
from fastapi import Depends, Header, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.types import Scope

from farm.api.proxy_sign_in import user_of
from farm.app import Farm
from farm.artifacts.tokens import ADMINISTRATOR, Role
from farm.errors import FarmFault, NotAllowed, QuotaExceeded
from farm.settings import NAMESPACE

_bearer = HTTPBearer(auto_error=False, description="The farm's token: `Authorization: Bearer …`.")


SMALL_BODY = 16 << 10
"""Bytes of a body that the API reads before it checks the token."""

LARGEST_BODY = 32 << 20
"""Bytes that a request may bring. Models and data never come this way, they go straight to object storage."""

BODIES_OF_ONE = 64 << 20
"""Bytes of large bodies that one token may send at once."""

BODIES_OF_ALL = 256 << 20
"""Bytes of large bodies that all tokens together may send at once: each stays in memory until it is answered."""


COOKIES = ("__Host-farm", "farm")
"""Names of the cookie that holds a browser's token: with TLS, and on loopback without."""

RATE = 100.0
"""Requests a second that one token may send for long."""

BURST = 3000.0
"""Requests that a token may send at once after it was quiet: a client that fetches a large build sends thousands."""

KNOWN = 4096
"""Tokens whose rates are remembered."""

EVENTS = re.compile(r"/builds/[^/]+/events$")
"""Ends of the paths of streams."""

TURNS = 8
"""Requests of one token that are answered at once, of the 40 that the server's threads answer."""


class Unauthenticated(NotAllowed):
    """No token, or one that the farm does not know."""

    http_status = 401


@dataclass(frozen=True, slots=True)
class Caller:
    """Who made a request: the namespace they work in, their role there, and their name in records.

    `max_cells` is how many unfinished cells their builds may have; 0 means no bound.
    """

    namespace: str
    role: Role
    name: str
    max_cells: int = 0

    @property
    def readable(self) -> list[str]:
        """The namespaces that the caller reads, in the order in which they are asked."""
        return list(dict.fromkeys(["main", self.namespace]))


def get_farm(request: Request) -> Farm:
    """Return the farm that this app was made for."""
    farm: Farm = request.app.state.farm
    return farm


FarmDep = Annotated[Farm, Depends(get_farm)]


def authenticate(
    farm: FarmDep,
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
    namespace: Annotated[
        str | None,
        Header(alias="Farm-Namespace", pattern=NAMESPACE, description="The namespace to work in; else the token's."),
    ] = None,
) -> Caller:
    """Return the caller behind a request.

    The administrator's own token is a setting; the others are the farm's (`farm.artifacts.tokens`), each for one
    namespace.
    Without a configured token the app serves this machine only (`create_app`), and every caller is the administrator.

    Raises Unauthenticated, and NotAllowed for a namespace that is not the token's.
    """
    expected = farm.settings.api_token.get_secret_value()
    shown = credentials.credentials if credentials else ""
    if not expected or hmac.compare_digest(shown.encode(), expected.encode()):
        return Caller(namespace or farm.settings.namespace or "main", Role.ADMIN, ADMINISTRATOR)
    token = (
        (user_of(shown, farm.settings.proxy_secret.get_secret_value()) or farm.tokens.find(shown)) if shown else None
    )
    if token is None:
        raise Unauthenticated(
            "this farm does not know this token" if shown else "a token is needed",
            hint="set FARM_API_TOKEN, or api_token in farm.toml; `farm token create` makes one",
        )
    if token.role < Role.ADMIN and namespace not in (None, token.namespace):
        raise NotAllowed(
            f"this token is for the namespace {token.namespace}, not for {namespace}",
            hint=f"unset FARM_NAMESPACE, or ask for a token of {namespace}",
        )
    return Caller(namespace or token.namespace, token.role, token.name, token.max_cells)


class Rates:
    """How many requests tokens may send: `BURST` at once, and `RATE` a second for long."""

    def __init__(self) -> None:
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """By token: how many requests it had left, and when."""

    def takes(self, token: str) -> bool:
        """Whether a token may send a request now."""
        now = time.monotonic()
        left, at = self._left.pop(token, (BURST, now))
        left = min(BURST, left + (now - at) * RATE)
        self._left[token] = (left - 1 if left >= 1 else left, now)
        if len(self._left) > KNOWN:
            self._left.popitem(last=False)
        return left >= 1


class Turns:
    """Lets one token have `TURNS` requests answered at once; its others wait.

    Requests are answered by a few threads, and some take long: hashing a large upload, planning thousands of cells.
    """

    def __init__(self) -> None:
        self._turns: dict[str, anyio.Semaphore] = {}
        """By token; of those that have requests now."""
        self._present: Counter[str] = Counter()
        self._rates = Rates()

    @asynccontextmanager
    async def turn(self, scope: Scope) -> AsyncIterator[None]:
        """Wait until it is a request's turn. Raises QuotaExceeded if its token sends more than `Rates` allows."""
        token = _shown(Headers(scope=scope))
        if token and not self._rates.takes(token):
            raise QuotaExceeded(f"this token sends more than {RATE:g} requests a second", hint="ask less often")
        if EVENTS.search(scope["path"]):  # These have a bound and threads of their own.
            yield
            return
        self._present[token] += 1
        try:
            async with self._turns.setdefault(token, anyio.Semaphore(TURNS)):
                yield
        finally:
            self._present[token] -= 1
            if not self._present[token]:
                del self._present[token], self._turns[token]


def _shown(headers: Headers) -> str:
    """Return the token that a request shows, in its header or a browser's cookie; empty if there is none."""
    cookies = cookie_parser(headers.get("cookie", ""))
    browser = next((cookies[name] for name in COOKIES if name in cookies), "")
    return headers.get("authorization", "").partition(" ")[2].strip() or browser


class RoomForBodies:
    """Checks the token before a large body is read, and bounds how many of them are in memory."""

    def __init__(self, farm: Callable[[], Farm]) -> None:
        """`farm` returns the farm that knows the tokens."""
        self._farm = farm
        self._sizes: Counter[tuple[str, str]] = Counter()
        """Bytes of the large bodies that are in memory or on their way, by namespace and name of the token."""

    @asynccontextmanager
    async def of(self, scope: Scope) -> AsyncIterator[None]:
        """Hold the room of a request's body while it is answered.

        Raises Unauthenticated, FarmFault if there are too many, before anything of the body is read.
        """
        size = _size(Headers(scope=scope))
        if size <= SMALL_BODY:
            yield
            return
        owner = await self._admitted(Headers(scope=scope), size)
        try:
            yield
        finally:
            self._sizes[owner] -= size
            self._sizes += Counter()  # Forgets those who have none.

    async def _admitted(self, headers: Headers, size: int) -> tuple[str, str]:
        """Count a body, and return whose it is. Raises Unauthenticated, FarmFault if there are too many."""
        scheme, _, shown = headers.get("authorization", "").partition(" ")
        credentials = HTTPAuthorizationCredentials(
            scheme=scheme, credentials=shown if scheme.lower() == "bearer" else ""
        )
        caller = await run_in_threadpool(authenticate, self._farm(), credentials)
        owner = caller.namespace, caller.name
        if self._sizes[owner] + size > BODIES_OF_ONE or self._sizes.total() + size > BODIES_OF_ALL:
            raise FarmFault("too many large requests at once", hint="send them one after the other")
        self._sizes[owner] += size
        return owner


def _size(headers: Headers) -> int:
    """Return how many bytes a body may have; the length of a chunked body is unknown."""
    length = headers.get("content-length", "0")
    if "transfer-encoding" in headers or not length.isdecimal():
        return LARGEST_BODY
    return min(int(length), LARGEST_BODY)


def require(role: Role) -> Callable[[Request, Caller], Caller]:
    """Return a dependency that lets only callers of that role, or a higher one, through."""

    def check(request: Request, caller: Annotated[Caller, Depends(authenticate)]) -> Caller:
        request.state.caller = caller  # The log of changes names the caller.
        if caller.role < role:
            raise NotAllowed(f"this needs the role {role.name.lower()}; the token has {caller.role.name.lower()}")
        return caller

    return check


def may_monitor(caller: Annotated[Caller, Depends(authenticate)]) -> None:
    """Let only callers through who may read what concerns all namespaces. Raises NotAllowed."""
    if caller.role not in (Role.MONITOR, Role.ADMIN):
        raise NotAllowed(
            f"this needs the role monitor; the token has {caller.role.name.lower()}",
            hint="metrics are of all namespaces: `farm token create --role monitor` makes a token for them",
        )


ReaderCaller = Annotated[Caller, Depends(require(Role.READER))]
Submitter = Annotated[Caller, Depends(require(Role.SUBMITTER))]
Admin = Annotated[Caller, Depends(require(Role.ADMIN))]

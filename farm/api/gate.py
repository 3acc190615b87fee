"""The gate: all that a request passes before a route answers, in order, and what is done with its answer; who calls."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import re
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated
from weakref import WeakValueDictionary

import anyio
from fastapi import Depends, Header, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.datastructures import Headers, MutableHeaders, State
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import TypedDict

from farm.api.problems import refusal
from farm.app import Farm
from farm.artifacts.s3 import S3Store
from farm.artifacts.storage import MAIN, folder_name
from farm.artifacts.tokens import ADMINISTRATOR, PERSON, Role, Token
from farm.control.loops import CHANGES
from farm.errors import FarmError, FarmFault, NotAllowed, QuotaExceeded
from farm.logging import bound, get_logger
from farm.metrics.instruments import METHODS, OTHER, REQUEST_SECONDS, REQUESTS, ROUTES
from farm.settings import NAMESPACE

_bearer = HTTPBearer(auto_error=False, description="The farm's token: `Authorization: Bearer …`.")

COOKIES = ("__Host-farm", "farm")  # Names of the cookie with a browser's token: with TLS, and on loopback without.


class Unauthenticated(NotAllowed, http_status=401):
    """No token, or one that the farm does not know."""


def get_farm(request: Request) -> Farm:
    """Return the farm that this app was made for."""
    farm: Farm = request.app.state.farm
    return farm


FarmDep = Annotated[Farm, Depends(get_farm)]


def authenticate(
    request: Request,
    farm: FarmDep,
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
    namespace: Annotated[
        str | None,
        Header(alias="Farm-Namespace", pattern=NAMESPACE, description="The namespace to work in; else the token's."),
    ] = None,
) -> Token:
    """Return the token of a request's caller, for the namespace that they work in.

    The administrator's own token is a setting; the others (`farm.artifacts.tokens`) are for one namespace each.
    Without a configured token the app serves this machine only (`create_app`), and every caller is the administrator.

    Raises Unauthenticated, NotAllowed for a namespace that is not the token's, UsageError for one that cannot be.
    """
    shown = credentials.credentials if credentials else ""
    token: Token | None = token_of(farm, shown) or request.scope.get(SIGNED_IN)
    if token is None:
        raise unknown(shown)
    if token.role < Role.ADMIN and namespace not in (None, token.namespace):
        hint = f"unset FARM_NAMESPACE, or ask for a token of {namespace}"
        raise NotAllowed(f"this token is for the namespace {token.namespace}, not for {namespace}", hint=hint)
    return replace(token, namespace=folder_name(namespace or token.namespace))


def token_of(farm: Farm, shown: str) -> Token | None:
    """Return the token that a caller shows; None if the farm does not know it."""
    expected = farm.settings.api_token.get_secret_value()
    if not expected or hmac.compare_digest(shown.encode(), expected.encode()):
        return Token(ADMINISTRATOR, Role.ADMIN, farm.settings.namespace or MAIN)
    return farm.tokens.find(shown) if shown else None


def unknown(shown: str) -> Unauthenticated:
    """Return the error for a token that the farm does not know, or for none."""
    hint = "set FARM_API_TOKEN, or api_token in farm.toml; `farm token create` makes one"
    return Unauthenticated("this farm does not know this token" if shown else "a token is needed", hint=hint)


def shown_token(scope: Scope) -> str:
    """Return the token that a request shows: as a bearer, else in the cookie that a browser has for this connection.

    Whom a proxy has signed in shows none. It is the same for the API, for pages and for what bounds requests, so nobody
    counts as two.
    """
    if scope.get(SIGNED_IN):
        return ""
    headers = Headers(scope=scope)
    scheme, _, shown = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return shown.strip()
    return cookie_parser(headers.get("cookie", "")).get(cookie_name(scope), "")


def cookie_name(scope: Scope) -> str:
    """Return the name of a browser's cookie: its prefix keeps it from neighbouring sites, and needs TLS.

    A server without TLS, not even by a proxy, is on loopback.
    """
    host = host_name(Headers(scope=scope).get("host", ""))
    return COOKIES[0 if scope["scheme"] == "https" or not is_loopback(host) else 1]


def require(role: Role) -> Callable[[Request, Token], Token]:
    """Return a dependency that lets only callers of that role, or a higher one, through."""

    def check(request: Request, caller: Annotated[Token, Depends(authenticate)]) -> Token:
        request.state.caller = caller  # The log of changes names the caller.
        return with_role(role, caller)

    return check


def with_role(role: Role, caller: Token) -> Token:
    """Return a caller of that role, or a higher one. Raises NotAllowed."""
    if caller.role < role:
        raise NotAllowed(f"this needs the role {role.name.lower()}; the token has {caller.role.name.lower()}")
    return caller


def may_monitor(caller: Annotated[Token, Depends(authenticate)]) -> None:
    """Let only callers through who may read what concerns all namespaces. Raises NotAllowed."""
    if caller.role not in (Role.MONITOR, Role.ADMIN):
        hint = "metrics are of all namespaces: `farm token create --role monitor` makes a token for them"
        raise NotAllowed(f"this needs the role monitor; the token has {caller.role.name.lower()}", hint=hint)


ReaderCaller = Annotated[Token, Depends(require(Role.READER))]
Submitter = Annotated[Token, Depends(require(Role.SUBMITTER))]
Admin = Annotated[Token, Depends(require(Role.ADMIN))]


# --- sign-in by a proxy ----------------------------------------------------------------------------------------------

SECRET, USER, ROLE, OWN_NAMESPACE = "farm-proxy-secret", "farm-user", "farm-user-role", "farm-user-namespace"
"""The proxy's headers: its secret, and name, role (default reader) and namespace (default main) of the user."""

SIGNED_IN = "farm.signed-in"  # Where a request's scope has the person whom the proxy has signed in, if any.
_OURS = {SECRET, USER, ROLE, OWN_NAMESPACE}
_USER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,127}")


def sign_in(scope: Scope, secret: str) -> None:
    """Note in a request who the person is that the proxy names; what others say about themselves is left out.

    The proxy proves itself by the setting `proxy_secret`, which it sends with every request. A request with a token of
    its own (`Authorization`) is that token's. An empty `secret` trusts nobody.
    """
    headers = Headers(scope=scope)
    trusted = bool(secret) and hmac.compare_digest(headers.get(SECRET, "").encode(), secret.encode())
    if trusted and "authorization" not in headers:
        scope[SIGNED_IN] = _person(headers)
    scope["headers"] = [pair for pair in scope["headers"] if pair[0].decode("latin-1") not in _OURS]


def _person(headers: Headers) -> Token | None:
    """Return the person whom the proxy names; None if it names none, or one that cannot be."""
    user = headers.get(USER, "")
    role = headers.get(ROLE, "reader").lower()
    namespace = headers.get(OWN_NAMESPACE, "main")
    known = role in [each.name.lower() for each in Role]
    if not known or not _USER.fullmatch(user) or not re.fullmatch(NAMESPACE, namespace):
        return None
    return Token(f"{PERSON}{user}", Role[role.upper()], namespace)


# --- sites -----------------------------------------------------------------------------------------------------------

LOCALHOST = "localhost"  # The name of the loopback addresses, which no other machine can reach.


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


log = get_logger(__name__)

SMALL_BODY = 16 << 10  # Bytes of a body that the API reads before it checks the token.
LARGEST_BODY = 32 << 20  # Bytes that a request may bring: models and data go straight to object storage instead.
BODIES_OF_ONE = 64 << 20  # Bytes of large bodies that one token may send at once.
BODIES_OF_ALL = 256 << 20  # Bytes of large bodies of all tokens at once: each stays in memory until it is answered.
RATE = 100.0  # Requests a second that one token may send for long.
BURST = 3000.0  # Requests of a token at once after it was quiet: a client that fetches a large build sends thousands.
KNOWN = 4096  # Tokens whose rates are remembered.
EVENTS = re.compile(r"/builds/[^/]+/events$")  # Ends of the paths of streams.
TURNS = 8  # Requests of one token that are answered at once, of the 40 that the server's threads answer.
SOME = 4  # The same for all together whom the farm does not know, for signing in, and for looking up new tokens.
STRANGERS = "\n"  # The caller of requests whose token the farm does not know; no token is this.
SIGN_IN = "/ui/sign-in"
STRANGERS_BODY_SECONDS = 5.0  # Time for the body of a caller unknown to the farm; the connection bounds others.

_NAMED = re.compile(r"/(build|job|worker)s/([A-Za-z0-9@._-]{1,100})(?=/|$)")
_BUILD = re.compile(r"b-[0-9a-f]{16}")  # Ids in paths, and in the header that names a new build.
_KEPT = ("etag", "cache-control", "vary")  # Headers of an answer that its caller has already.


class Gate:
    """Middleware: counts a request, refuses it or lets it in, and looks after its answer.

    It is the only one, so that the order can be read here. What it calls knows nothing of what comes next.
    """

    def __init__(self, app: ASGIApp, state: State, site: OwnSite) -> None:
        """`state` is the app's, with the `farm` that it serves."""
        self._app = app
        self._compressed = GZipMiddleware(self._tagged, minimum_size=4096, compresslevel=5)
        self._state = state
        self._site = site
        self._turns = Turns()
        self._room = RoomForBodies()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count a request, and time it by the pattern of its route, without `/v1`.

        A HEAD is answered as a GET, whose body the server leaves out; a stream of events is nothing but its body.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, status, method = time.perf_counter(), 500, scope["method"]
        if method == "HEAD" and not EVENTS.search(scope["path"]):
            scope = {**scope, "method": "GET", "farm.looks": True}

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            ids: dict[str, str] = dict(_NAMED.findall(scope["path"]))
            if _BUILD.fullmatch(new := Headers(scope=scope).get("idempotency-key", "")):
                ids["build"] = new
            with bound(**ids):  # In every line that is logged meanwhile, also in threads.
                await self._let_in(scope, receive, noting)
                if may_change(scope) and status < 400:
                    await write_change(self._state.farm.artifacts, scope, status)
        finally:
            REQUESTS.labels(method if method in METHODS else OTHER, str(status)).inc()
            route = scope["route"].path if "route" in scope else OTHER
            if not route.endswith("/events"):  # They last as long as somebody listens.
                REQUEST_SECONDS.labels(ROUTES.of(route)).observe(time.perf_counter() - begun)

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request with Problem Details, or answer it when it is its turn."""
        try:
            self._site.check(Headers(scope=scope))
            sign_in(scope, self._state.farm.settings.proxy_secret.get_secret_value())
            path = scope["path"]
            drawing = path in ("/v1/health", SIGN_IN) or path.startswith("/ui/static/")
            if drawing and scope["method"] in ("GET", "HEAD"):  # Never behind a turn.
                await self._compressed(scope, receive, send)
                return
            caller = await self._turns.caller(self._state.farm, scope)
            async with self._room.of(scope, caller):
                with_body = await whole_body(receive, caller)
                if with_body:
                    async with self._turns.turn(scope, caller):
                        await self._compressed(scope, with_body, send)
        except FarmError as error:  # Those of a route became answers there.
            await refusal(error)(scope, receive, send)

    async def _tagged(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the app answer, and give a whole answer to a GET its ETag, unless it has one.

        A caller that has that answer already asks again with `If-None-Match`, and gets 304 without a body. Streams do
        not say how long they are, and pass.
        """
        begun: Message | None = None

        async def tagging(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                if message["status"] == 200 and "content-length" in Headers(raw=message["headers"]):
                    begun = message  # Held back until its body is there.
                    return
            elif begun:
                headers = MutableHeaders(raw=begun["headers"])
                tag = headers.setdefault("etag", f'W/"{hashlib.sha256(message.get("body", b"")).hexdigest()[:32]}"')
                headers.setdefault("cache-control", "private, no-cache")
                shown = Headers(scope=scope).get("if-none-match", "")
                if {tag.removeprefix("W/"), "*"} & {known.strip().removeprefix("W/") for known in shown.split(",")}:
                    kept = [(name, value) for name, value in headers.raw if name.decode() in _KEPT]
                    begun, message = {**begun, "status": 304, "headers": kept}, {**message, "body": b""}
                await send(begun)
                begun = None
            await send(message)

        wanted = scope["method"] == "GET" and scope["path"].startswith("/v1/")
        await self._app(scope, receive, tagging if wanted else send)


# --- whose site -------------------------------------------------------------------------------------------------------

_HINT = "the operator lists further names in the setting `api_hosts`"


class OwnSite:
    """Refuses requests to another host, and from pages of another site.

    A browser lets any page send requests to a server on its user's machine, also under a name that the page's owner
    gave to that machine's address (DNS rebinding). A server without a token would obey.
    """

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


# --- whose turn -------------------------------------------------------------------------------------------------------


class Turns:
    """Lets one caller have some requests answered at once; the caller's others wait.

    Requests are answered by a few threads, and some take long: hashing a large upload, planning thousands of cells.
    Callers that the farm does not know have one small bound together, so they never wait in front of one it knows.
    """

    def __init__(self) -> None:
        self._turns: WeakValueDictionary[str, anyio.Semaphore] = WeakValueDictionary()
        """By caller; of those that have requests now, which hold them."""
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """By token: how many requests it may still send at once, and when that was so."""

    async def caller(self, farm: Farm, scope: Scope) -> str:
        """Return the token that counts for a request, or a person's name; `STRANGERS` if the farm does not know it.

        Only a token that this process has not seen yet is looked up in storage, a few at a time and without patience.
        Raises QuotaExceeded if the token sends more than `BURST` at once and `RATE` a second for long, StorageAway.
        """
        person: Token | None = scope.get(SIGNED_IN)
        token = f"\n{person.name}" if person else shown_token(scope)  # No token is this.
        if token and not self._takes(token):
            raise QuotaExceeded(f"this token sends more than {RATE:g} requests a second", hint="ask less often")
        own = farm.settings.api_token.get_secret_value()
        if not own or hmac.compare_digest(token.encode(), own.encode()):
            token = own  # Without one, every caller is this machine's administrator.
        elif not person and not farm.tokens.remembers(token):
            async with self._places("lookups", SOME):
                if not token or not await run_in_threadpool(farm.tokens.find, token):
                    return STRANGERS
        return token

    def _takes(self, token: str) -> bool:
        now = time.monotonic()
        left, at = self._left.pop(token, (BURST, now))
        left = min(BURST, left + (now - at) * RATE)
        self._left[token] = (left - 1 if left >= 1 else left, now)
        if len(self._left) > KNOWN:
            self._left.popitem(last=False)
        return left >= 1

    def turn(self, scope: Scope, caller: str) -> AbstractAsyncContextManager[object]:
        """Return what waits until it is a request's turn; streams have a bound and threads of their own."""
        if EVENTS.search(scope["path"]):
            return nullcontext()
        if scope["path"] == SIGN_IN:  # Has a place that no other request takes.
            return self._places(SIGN_IN, SOME)
        return self._places(caller, SOME if caller == STRANGERS else TURNS)

    def _places(self, whose: str, most: int) -> anyio.Semaphore:
        return self._turns.setdefault(whose, anyio.Semaphore(most))


# --- bodies -----------------------------------------------------------------------------------------------------------


class TooSlow(NotAllowed, http_status=408):
    """A body did not come in time."""


async def whole_body(receive: Receive, caller: str) -> Receive | None:
    """Wait for a request's body, and return what gives it again; None if the caller went away.

    So no request has a turn while its body is on its way. Raises TooSlow.
    """
    parts, size, more = list[bytes](), 0, True
    with anyio.move_on_after(STRANGERS_BODY_SECONDS if caller == STRANGERS else None) as waiting_for_it:
        while more and size <= LARGEST_BODY:  # The app refuses what is larger.
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size, more = size + len(parts[-1]), message.get("more_body", False)
    if waiting_for_it.cancelled_caught:
        raise TooSlow(f"the body of a request without a valid token has to come in {STRANGERS_BODY_SECONDS:g} s")
    waiting = [{"type": "http.request", "body": b"".join(parts), "more_body": more}]

    async def again() -> Message:
        return waiting.pop() if waiting else await receive()

    return again


class RoomForBodies:
    """Takes large bodies only of callers that the farm knows, and bounds how many of them are in memory."""

    def __init__(self) -> None:
        self._sizes: Counter[str] = Counter()
        """Bytes of the large bodies that are in memory or on their way, by caller."""

    @asynccontextmanager
    async def of(self, scope: Scope, caller: str) -> AsyncIterator[None]:
        """Hold the room of a request's body while it is answered.

        Raises Unauthenticated, FarmFault if there are too many, before anything of the body is read.
        """
        size = _size(Headers(scope=scope))
        if size <= SMALL_BODY:
            yield
            return
        if caller == STRANGERS:
            raise unknown(shown_token(scope))
        if self._sizes[caller] + size > BODIES_OF_ONE or self._sizes.total() + size > BODIES_OF_ALL:
            raise FarmFault("too many large requests at once", hint="send them one after the other")
        self._sizes[caller] += size
        try:
            yield
        finally:
            self._sizes[caller] -= size
            self._sizes += Counter()  # Forgets those who have none.


def _size(headers: Headers) -> int:
    """Return how many bytes a body may have; the length of a chunked body is unknown."""
    length = headers.get("content-length", "0")
    if "transfer-encoding" in headers or not length.isdecimal():
        return LARGEST_BODY
    return min(int(length), LARGEST_BODY)


# --- the log of changes -----------------------------------------------------------------------------------------------

_NOTHING = ("/v1/plan", "/v1/blobs", "/ui/sign-", "/v1/health")
"""Starts of paths whose requests change nothing but bytes that are named by their hash."""


class Change(TypedDict):
    """Who changed what, when: a small object for each change, which only administrators read.

    `at` in Unix seconds, `by` a token's name, `path` with its parameters; bodies are not kept.
    """

    at: float
    by: str
    role: str
    namespace: str
    method: str
    path: str
    status: int


def may_change(scope: Scope) -> bool:
    """Whether a request may change something."""
    method, path = scope["method"], scope["path"]
    # A ref, a token or a manifest may be named plan: only POST asks for one.
    plans = method == "POST" and path.endswith("/plan")
    return method in ("POST", "PUT", "DELETE", "PATCH") and not path.startswith(_NOTHING) and not plans


async def write_change(artifacts: S3Store, scope: Scope, status: int) -> None:
    """Write down a request that has succeeded, if its caller is known."""
    caller = scope.get("state", {}).get("caller")
    if caller is None:
        return
    query = scope["query_string"].decode(errors="replace")
    change: Change = {
        "at": time.time(),
        "by": caller.name,
        "role": caller.role.name.lower(),
        "namespace": caller.namespace,
        "method": scope["method"],
        "path": f"{scope['path']}?{query}" if query else scope["path"],
        "status": status,
    }
    log.info("change", **change)
    await run_in_threadpool(_write, artifacts, change)


def _write(artifacts: S3Store, change: Change) -> None:
    day = datetime.fromtimestamp(change["at"], UTC).date()
    name = f"{CHANGES}{day}/{int(change['at'] * 1000)}-{secrets.token_hex(4)}.json"
    try:
        artifacts.put_object(name, json.dumps(change).encode())
    except FarmError as error:
        # It is in the server's log.
        log.error("a change is not in the log of changes", error=error.message)


def read_changes(artifacts: S3Store, day: str, limit: int) -> Iterator[Change]:
    """Yield the changes of a day (ISO, UTC), the newest first."""
    for name in sorted(artifacts.list_objects(f"{CHANGES}{day}/"), reverse=True)[:limit]:
        if found := artifacts.get_object(name):
            yield json.loads(found.data)

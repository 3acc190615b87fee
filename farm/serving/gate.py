"""The gate: all that a request passes before a route answers, in order."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from farm.api.auth import EVENTS, RoomForBodies, Turns
from farm.api.change_log import may_change, write_change
from farm.api.problems import refusal
from farm.api.proxy_sign_in import sign_in
from farm.api.sites import OwnSite
from farm.app import Farm
from farm.errors import FarmError
from farm.logging import bound
from farm.metrics.instruments import METHODS, OTHER, REQUEST_SECONDS, REQUESTS, ROUTES

_NAMED = re.compile(r"/(build|job|worker)s/([A-Za-z0-9@._-]{1,100})(?=/|$)")
_BUILD = re.compile(r"b-[0-9a-f]{16}")
"""Ids in paths, and in the header that names a new build."""

_KEPT = ("etag", "cache-control", "vary")
"""Headers of an answer that its caller has already."""


class Gate:
    """Middleware: counts a request, refuses it or lets it in, and looks after its answer.

    It is the only one, so that the order can be read here. What it calls knows nothing of what comes next.
    """

    def __init__(self, app: ASGIApp, farm: Callable[[], Farm], site: OwnSite) -> None:
        """`farm` returns the farm that the app serves now."""
        self._app = app
        self._compressed = GZipMiddleware(self._tagged, minimum_size=4096, compresslevel=5)
        self._farm = farm
        self._site = site
        self._turns = Turns()
        self._room = RoomForBodies(farm)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count a request, and time it by the pattern of its route, without `/v1`.

        A HEAD is answered as a GET, whose body the server leaves out; a stream of events is nothing but its body.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, status, method = time.perf_counter(), 500, scope["method"]
        if method == "HEAD" and not EVENTS.search(scope["path"]):
            scope = {**scope, "method": "GET"}

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            with bound(**_ids(scope)):  # In every line that is logged meanwhile, also in threads.
                await self._let_in(scope, receive, noting)
                if may_change(scope) and status < 400:
                    await write_change(self._farm().artifacts, scope, status)
        finally:
            REQUESTS.labels(method if method in METHODS else OTHER, str(status)).inc()
            route = scope["route"].path if "route" in scope else OTHER
            if not route.endswith("/events"):  # They last as long as somebody listens.
                REQUEST_SECONDS.labels(ROUTES.of(route)).observe(time.perf_counter() - begun)

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request with Problem Details, or answer it when it is its turn."""
        try:
            self._site.check(Headers(scope=scope))
            sign_in(scope, self._farm().settings.proxy_secret.get_secret_value())
            async with self._turns.turn(scope), self._room.of(scope):
                await self._compressed(scope, receive, send)
        except FarmError as error:  # Those of a route became answers there.
            await refusal(error)(scope, receive, send)

    async def _tagged(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the app answer; hold its answer back if all of it comes at once, for its ETag."""
        tag = EntityTag(scope)

        async def tagging(message: Message) -> None:
            for each in tag.of(message):
                await send(each)

        await self._app(scope, receive, tagging)


def _ids(scope: Scope) -> dict[str, str]:
    """Return the ids in a request's path, and the id that a new build will have, by what they are of."""
    ids: dict[str, str] = dict(_NAMED.findall(scope["path"]))
    new = Headers(scope=scope).get("idempotency-key", "")
    return {**ids, "build": new} if _BUILD.fullmatch(new) else ids


class EntityTag:
    """Gives a whole answer to a GET its ETag, unless it has one.

    A caller that has that answer already asks again with `If-None-Match`, and gets 304 without a body.
    """

    def __init__(self, scope: Scope) -> None:
        self._wanted = scope["method"] == "GET" and scope["path"].startswith("/v1/")
        shown = Headers(scope=scope).get("if-none-match", "")
        self._known = {tag.strip().removeprefix("W/") for tag in shown.split(",")}
        self._start: Message | None = None
        """The beginning of a whole answer, held back until its body is there."""

    def of(self, message: Message) -> list[Message]:
        """Return what to send for one message of the answer."""
        if self._wanted and message["type"] == "http.response.start" and _is_whole(message):
            self._start = message
            return []
        if message["type"] != "http.response.body" or not self._start:
            return [message]
        start, self._start = self._start, None
        headers = MutableHeaders(raw=start["headers"])
        tag = headers.setdefault("etag", f'W/"{hashlib.sha256(message.get("body", b"")).hexdigest()[:32]}"')
        headers.setdefault("cache-control", "private, no-cache")
        if tag.removeprefix("W/") in self._known or "*" in self._known:
            kept = [(name, value) for name, value in headers.raw if name.decode() in _KEPT]
            return [
                {"type": "http.response.start", "status": 304, "headers": kept},
                {"type": "http.response.body", "body": b""},
            ]
        return [start, message]


def _is_whole(message: Message) -> bool:
    """Whether an answer is a success whose body comes in one piece: streams do not say how long they are."""
    return message["status"] == 200 and "content-length" in Headers(raw=message["headers"])

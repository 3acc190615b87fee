"""ETags: a client that has an answer already asks for it again with `If-None-Match`, and gets 304 without a body."""

from __future__ import annotations

import hashlib

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_KEPT = ("etag", "cache-control", "vary")


class EntityTags:
    """Middleware that gives whole answers to GET an ETag, unless they have one, and answers 304 to who has it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on; hold its answer back if all of it comes at once."""
        if scope["type"] != "http" or scope["method"] != "GET" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        known = {tag.strip().removeprefix("W/") for tag in Headers(scope=scope).get("if-none-match", "").split(",")}
        start: Message | None = None

        async def tagged(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start" and _is_whole(message):
                start = message
                return
            if message["type"] == "http.response.body" and start:
                held, start = start, None
                headers = MutableHeaders(raw=held["headers"])
                tag = headers.setdefault("etag", f'W/"{hashlib.sha256(message.get("body", b"")).hexdigest()[:32]}"')
                headers.setdefault("cache-control", "private, no-cache")
                if tag.removeprefix("W/") in known or "*" in known:
                    kept = [(name, value) for name, value in headers.raw if name.decode() in _KEPT]
                    await send({"type": "http.response.start", "status": 304, "headers": kept})
                    await send({"type": "http.response.body", "body": b""})
                    return
                await send(held)
            await send(message)

        await self._app(scope, receive, tagged)


def _is_whole(message: Message) -> bool:
    """Whether an answer is a success whose body comes in one piece: streams do not say how long they are."""
    return message["status"] == 200 and "content-length" in Headers(raw=message["headers"])

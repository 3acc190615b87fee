"""ETags: a client that has an answer already asks for it again with `If-None-Match`, and gets 304 without a body."""

from __future__ import annotations

import hashlib

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Scope

_KEPT = ("etag", "cache-control", "vary")


class EntityTag:
    """Gives a whole answer to a GET its ETag, unless it has one; a caller that has that answer already gets 304."""

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

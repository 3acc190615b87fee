"""Sign-in by a proxy in front of the farm: it knows who somebody is, and says so in headers. Off by default.

The proxy proves itself by the setting `proxy_secret`, which it sends with every request. From its headers this makes a
token of the farm that nobody else can make, so that everything behind sees a caller like any other.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Receive, Scope, Send

from farm.app import Farm
from farm.artifacts.tokens import Role, Token
from farm.settings import NAMESPACE

SECRET, USER, ROLE, OWN_NAMESPACE = "farm-proxy-secret", "farm-user", "farm-user-role", "farm-user-namespace"
"""The proxy's headers: its secret, and name, role (default reader) and namespace (default main) of the user."""

_PREFIX = "proxy."
_USER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,127}")


class ProxySignIn:
    """Middleware that lets in whom the proxy names; what others say about themselves is left out.

    A request with a token of its own (`Authorization`) is that token's.
    """

    def __init__(self, app: ASGIApp, farm: Callable[[], Farm]) -> None:
        """`farm` returns the farm, whose settings have the secret; an empty one trusts nobody."""
        self._app = app
        self._farm = farm

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Put the user's token into the request, and pass it on."""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            secret = self._farm().settings.proxy_secret.get_secret_value()
            shown = headers.get(SECRET, "")
            trusted = bool(secret) and hmac.compare_digest(shown.encode(), secret.encode())
            token = _token(headers, secret) if trusted and "authorization" not in headers else ""
            kept = MutableHeaders(raw=[pair for pair in scope["headers"] if pair[0].decode("latin-1") not in _OURS])
            if headers.get("authorization", "").partition(" ")[2].strip().startswith(_PREFIX):
                del kept["authorization"]  # Only this middleware makes such tokens.
            if token:
                kept["authorization"] = f"Bearer {token}"
            scope["headers"] = kept.raw  # Of this very scope, in which others in front look for the route later.
        await self._app(scope, receive, send)


_OURS = {SECRET, USER, ROLE, OWN_NAMESPACE}


def _token(headers: Headers, secret: str) -> str:
    """Return the token of the user whom the proxy names; empty if it names none, or one that cannot be."""
    user = headers.get(USER, "")
    role = headers.get(ROLE, "reader").lower()
    namespace = headers.get(OWN_NAMESPACE, "main")
    known = role in [each.name.lower() for each in Role]
    if not known or not _USER.fullmatch(user) or not re.fullmatch(NAMESPACE, namespace):
        return ""
    document = json.dumps({"name": user, "role": role, "namespace": namespace})
    text = base64.urlsafe_b64encode(document.encode()).decode()
    return f"{_PREFIX}{text}.{_signature(text, secret)}"


def user_of(token: str, secret: str) -> Token | None:
    """Return the user behind a token that `ProxySignIn` made; None for any other."""
    text, _, signature = token.removeprefix(_PREFIX).rpartition(".")
    if not secret or not token.startswith(_PREFIX) or not hmac.compare_digest(signature, _signature(text, secret)):
        return None
    document = json.loads(base64.urlsafe_b64decode(text))
    return Token(document["name"], Role[document["role"].upper()], document["namespace"])


def _signature(text: str, secret: str) -> str:
    return hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()

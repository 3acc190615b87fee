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

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Scope

from farm.artifacts.tokens import Role, Token
from farm.settings import NAMESPACE

SECRET, USER, ROLE, OWN_NAMESPACE = "farm-proxy-secret", "farm-user", "farm-user-role", "farm-user-namespace"
"""The proxy's headers: its secret, and name, role (default reader) and namespace (default main) of the user."""

_OURS = {SECRET, USER, ROLE, OWN_NAMESPACE}
_PREFIX = "proxy."
_USER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,127}")


def sign_in(scope: Scope, secret: str) -> None:
    """Put the token of the user that the proxy names into a request; what others say about themselves is left out.

    A request with a token of its own (`Authorization`) is that token's. An empty `secret` trusts nobody.
    """
    headers = Headers(scope=scope)
    trusted = bool(secret) and hmac.compare_digest(headers.get(SECRET, "").encode(), secret.encode())
    token = _token(headers, secret) if trusted and "authorization" not in headers else ""
    kept = MutableHeaders(raw=[pair for pair in scope["headers"] if pair[0].decode("latin-1") not in _OURS])
    if headers.get("authorization", "").partition(" ")[2].strip().startswith(_PREFIX):
        del kept["authorization"]  # Only this function makes such tokens.
    if token:
        kept["authorization"] = f"Bearer {token}"
    scope["headers"] = kept.raw


def _token(headers: Headers, secret: str) -> str:
    """Return the token of the user that the proxy names; empty if it names none, or one that cannot be."""
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
    """Return the user behind a token that `sign_in` made; None for any other."""
    text, _, signature = token.removeprefix(_PREFIX).rpartition(".")
    if not secret or not token.startswith(_PREFIX) or not hmac.compare_digest(signature, _signature(text, secret)):
        return None
    document = json.loads(base64.urlsafe_b64decode(text))
    return Token(document["name"], Role[document["role"].upper()], document["namespace"])


def _signature(text: str, secret: str) -> str:
    return hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()

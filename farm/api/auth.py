"""Who calls the API, from where, and with which rights: bearer tokens, roles, namespaces, proxies, sites."""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

from fastapi import Depends, Header, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.types import Scope

from farm.app import Farm
from farm.artifacts.storage import MAIN, folder_name
from farm.artifacts.tokens import ADMINISTRATOR, PERSON, Role, Token
from farm.errors import NotAllowed
from farm.settings import NAMESPACE

_bearer = HTTPBearer(auto_error=False, description="The farm's token: `Authorization: Bearer …`.")


COOKIES = ("__Host-farm", "farm")
"""Names of the cookie that holds a browser's token: with TLS, and on loopback without."""


class Unauthenticated(NotAllowed):
    """No token, or one that the farm does not know."""

    http_status = 401


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
) -> Token:
    """Return the token of a request's caller, for the namespace that they work in.

    The administrator's own token is a setting; the others are the farm's (`farm.artifacts.tokens`), each for one
    namespace.
    Without a configured token the app serves this machine only (`create_app`), and every caller is the administrator.

    Raises Unauthenticated, NotAllowed for a namespace that is not the token's, UsageError for one that cannot be.
    """
    expected = farm.settings.api_token.get_secret_value()
    shown = credentials.credentials if credentials else ""
    if not expected or hmac.compare_digest(shown.encode(), expected.encode()):
        return Token(ADMINISTRATOR, Role.ADMIN, folder_name(namespace or farm.settings.namespace or MAIN))
    secret = farm.settings.proxy_secret.get_secret_value()
    token = (user_of(shown, secret) or farm.tokens.find(shown)) if shown else None
    if token is None:
        raise unknown(shown)
    if token.role < Role.ADMIN and namespace not in (None, token.namespace):
        raise NotAllowed(
            f"this token is for the namespace {token.namespace}, not for {namespace}",
            hint=f"unset FARM_NAMESPACE, or ask for a token of {namespace}",
        )
    return replace(token, namespace=folder_name(namespace or token.namespace))


def unknown(shown: str) -> Unauthenticated:
    """Return the error for a token that the farm does not know, or for none."""
    return Unauthenticated(
        "this farm does not know this token" if shown else "a token is needed",
        hint="set FARM_API_TOKEN, or api_token in farm.toml; `farm token create` makes one",
    )


def shown_token(scope: Scope) -> str:
    """Return the token that a request shows: as a bearer, else in the cookie that a browser has for this connection.

    It is the same for the API, for pages and for what bounds requests, so nobody counts as two.
    """
    headers = Headers(scope=scope)
    scheme, _, shown = headers.get("authorization", "").partition(" ")
    return (
        shown.strip()
        if scheme.lower() == "bearer"
        else cookie_parser(headers.get("cookie", "")).get(cookie_name(scope), "")
    )


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
        raise NotAllowed(
            f"this needs the role monitor; the token has {caller.role.name.lower()}",
            hint="metrics are of all namespaces: `farm token create --role monitor` makes a token for them",
        )


ReaderCaller = Annotated[Token, Depends(require(Role.READER))]
Submitter = Annotated[Token, Depends(require(Role.SUBMITTER))]
Admin = Annotated[Token, Depends(require(Role.ADMIN))]


# --- sign-in by a proxy ----------------------------------------------------------------------------------------------


SECRET, USER, ROLE, OWN_NAMESPACE = "farm-proxy-secret", "farm-user", "farm-user-role", "farm-user-namespace"
"""The proxy's headers: its secret, and name, role (default reader) and namespace (default main) of the user."""

_OURS = {SECRET, USER, ROLE, OWN_NAMESPACE}
_PREFIX = "proxy."
_USER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,127}")


def sign_in(scope: Scope, secret: str) -> None:
    """Put the token of the user that the proxy names into a request; what others say about themselves is left out.

    The proxy proves itself by the setting `proxy_secret`, which it sends with every request. From its headers this
    makes a token of the farm that nobody else can make, so that everything behind sees a caller like any other.
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
    shown, wanted = signature.encode(), _signature(text, secret).encode()
    if not secret or not token.startswith(_PREFIX) or not hmac.compare_digest(shown, wanted):
        return None
    document = json.loads(base64.urlsafe_b64decode(text))
    return Token(f"{PERSON}{document['name']}", Role[document["role"].upper()], document["namespace"])


def _signature(text: str, secret: str) -> str:
    return hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()


# --- sites -----------------------------------------------------------------------------------------------------------


LOCALHOST = "localhost"
"""The name of the loopback addresses, which no other machine can reach."""


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

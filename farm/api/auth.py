"""Who calls, and what he may do: bearer tokens, roles, namespaces."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Header, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from farm.api.problems import refusal
from farm.app import Farm
from farm.artifacts.tokens import Role
from farm.errors import FarmError, NotAllowed
from farm.settings import NAMESPACE

_bearer = HTTPBearer(auto_error=False, description="The farm's token: `Authorization: Bearer …`.")


SMALL_BODY = 16 << 10
"""Bytes of a body that the API reads before it checks the token."""


class Unauthenticated(NotAllowed):
    """No token, or one that the farm does not know."""

    http_status = 401


@dataclass(frozen=True, slots=True)
class Caller:
    """Who made a request: the namespace he works in, his role there, and his name in records.

    `max_cells` is how many unfinished cells his builds may have; 0 is no bound.
    """

    namespace: str
    role: Role
    name: str
    max_cells: int = 0

    @property
    def readable(self) -> list[str]:
        """The namespaces he reads, the one that is asked first in front."""
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
        return Caller(namespace or farm.settings.namespace or "main", Role.ADMIN, "admin")
    token = farm.tokens.find(shown) if shown else None
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


class TokenFirst:
    """Middleware that checks the token before it reads a large body, which would fill memory until then."""

    def __init__(self, app: ASGIApp, farm: Callable[[], Farm]) -> None:
        """`farm` returns the farm that knows the tokens."""
        self._app = app
        self._farm = farm

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401 without reading the body, or pass the request on."""
        refused = None
        if scope["type"] == "http" and _is_large(headers := Headers(scope=scope)):
            scheme, _, shown = headers.get("authorization", "").partition(" ")
            credentials = HTTPAuthorizationCredentials(
                scheme=scheme, credentials=shown if scheme.lower() == "bearer" else ""
            )
            try:
                await run_in_threadpool(authenticate, self._farm(), credentials)
            except FarmError as error:
                refused = refusal(error)
        await (refused or self._app)(scope, receive, send)


def _is_large(headers: Headers) -> bool:
    """Whether a body is, or may be, larger than `SMALL_BODY`: the length of a chunked body is unknown."""
    length = headers.get("content-length", "0")
    return "transfer-encoding" in headers or not length.isdecimal() or int(length) > SMALL_BODY


def require(role: Role) -> Callable[[Caller], Caller]:
    """Return a dependency that lets only callers of that role, or a higher one, through."""

    def check(caller: Annotated[Caller, Depends(authenticate)]) -> Caller:
        if caller.role < role:
            raise NotAllowed(f"this needs the role {role.name.lower()}; the token has {caller.role.name.lower()}")
        return caller

    return check


ReaderCaller = Annotated[Caller, Depends(require(Role.READER))]
Submitter = Annotated[Caller, Depends(require(Role.SUBMITTER))]
Admin = Annotated[Caller, Depends(require(Role.ADMIN))]

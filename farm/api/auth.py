"""Who calls, and what he may do: bearer tokens, roles, namespaces."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Header, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from farm.app import Farm
from farm.artifacts.tokens import Role
from farm.errors import NotAllowed
from farm.settings import NAMESPACE

_bearer = HTTPBearer(auto_error=False, description="The farm's token: `Authorization: Bearer …`.")


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
            "this token is not known here" if shown else "a token is needed",
            hint="set FARM_API_TOKEN, or api_token in farm.toml; `farm token create` makes one",
        )
    if token.role < Role.ADMIN and namespace not in (None, token.namespace):
        raise NotAllowed(
            f"this token is for the namespace {token.namespace}, not for {namespace}",
            hint=f"unset FARM_NAMESPACE, or ask for a token of {namespace}",
        )
    return Caller(namespace or token.namespace, token.role, token.name, token.max_cells)


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

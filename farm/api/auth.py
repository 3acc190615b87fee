"""Who calls, and what he may do: bearer tokens, roles, namespaces."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

from fastapi import Depends, Header, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from farm.app import Farm
from farm.errors import NotAllowed

NAMESPACE_PATTERN = r"^[a-z0-9._-]{1,64}$"

_bearer = HTTPBearer(auto_error=False, description="The farm's token: `Authorization: Bearer …`.")


class Unauthenticated(NotAllowed):
    """No token, or one that the farm does not know."""

    http_status = 401


class Role(IntEnum):
    """What a token may do; a higher role includes the lower ones."""

    READER = 1
    SUBMITTER = 2
    ADMIN = 3


@dataclass(frozen=True, slots=True)
class Caller:
    """Who made a request: the namespace he works in, his role there, and his name in records."""

    namespace: str
    role: Role
    name: str

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
        Header(alias="Farm-Namespace", pattern=NAMESPACE_PATTERN, description="The namespace to work in."),
    ] = None,
) -> Caller:
    """Return the caller behind a request.

    There is one token, the administrator's; a table of tokens with roles and namespaces takes this function's place.
    Without a configured token the app serves this machine only (`create_app`), and every caller is the administrator.

    Raises Unauthenticated.
    """
    expected = farm.settings.api_token.get_secret_value()
    shown = credentials.credentials if credentials else ""
    if expected and not hmac.compare_digest(shown.encode(), expected.encode()):
        raise Unauthenticated(
            "this token is not known here" if shown else "a token is needed",
            hint="set FARM_API_TOKEN, or api_token in farm.toml",
        )
    return Caller(namespace or farm.settings.namespace, Role.ADMIN, "admin")


def require(role: Role) -> Callable[[Caller], Caller]:
    """Return a dependency that lets only callers of that role, or a higher one, through."""

    def check(caller: Annotated[Caller, Depends(authenticate)]) -> Caller:
        if caller.role < role:
            raise NotAllowed(f"this needs the role {role.name.lower()}; the token has {caller.role.name.lower()}")
        return caller

    return check


Reader = Annotated[Caller, Depends(require(Role.READER))]
Submitter = Annotated[Caller, Depends(require(Role.SUBMITTER))]
Admin = Annotated[Caller, Depends(require(Role.ADMIN))]

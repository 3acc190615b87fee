"""Browsers: a cookie that holds the token, the headers of every page, and no form that another site sends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import Depends, Request, Response
from fastapi.security import HTTPAuthorizationCredentials
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from farm.api.auth import COOKIES, FarmDep, Unauthenticated, authenticate, cookie_name, shown_token, with_role
from farm.app import Farm
from farm.artifacts.tokens import Role, Token
from farm.errors import NotAllowed

WEEK = 7 * 86_400

POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""Nothing inline, nothing from elsewhere: text that got into a page as markup could not run."""

_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    # With `no-referrer`, browsers send forms without saying which site they belong to.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class PageHeaders:
    """Middleware that adds the headers of pages; nothing caches pages unless they say so."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and add the headers to its answer."""

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        await self._app(scope, receive, with_headers if scope["type"] == "http" else send)


def remember(request: Request, response: Response, token: str) -> None:
    """Let a browser keep a token, where no script and no other site gets at it."""
    name = cookie_name(request.scope)
    response.set_cookie(name, token, max_age=WEEK, path="/", secure=name == COOKIES[0], httponly=True, samesite="lax")


def forget(request: Request, response: Response) -> None:
    """Let a browser forget its token."""
    name = cookie_name(request.scope)
    response.delete_cookie(name, path="/", secure=name == COOKIES[0], httponly=True, samesite="lax")


def is_here(request: Request) -> bool:
    """Whether the browser runs on the server's machine, without TLS: only there links sign in."""
    return cookie_name(request.scope) == COOKIES[1]


def has_cookie(request: Request) -> bool:
    """Whether somebody signed in with a token, which signing out forgets."""
    return cookie_name(request.scope) in request.cookies


def knows(farm: Farm, token: str) -> bool:
    """Whether the farm knows a token."""
    try:
        authenticate(farm, HTTPAuthorizationCredentials(scheme="bearer", credentials=token))
    except Unauthenticated:
        return False
    return True


def visitor(farm: FarmDep, request: Request, namespace: str = "") -> Token:
    """Return who looks at a page. Raises Unauthenticated, and NotAllowed for a namespace of others."""
    credentials = HTTPAuthorizationCredentials(scheme="bearer", credentials=shown_token(request.scope))
    caller = authenticate(farm, credentials, namespace or None)
    if caller.role < Role.READER:
        raise NotAllowed(f"pages need the role reader; the token has {caller.role.name.lower()}")
    request.state.caller = caller  # The log of changes names the caller.
    return caller


Visitor = Annotated[Token, Depends(visitor)]


def visitor_with(role: Role) -> Callable[[Token], Token]:
    """Return a dependency that lets only visitors of that role, or a higher one, through."""

    def check(caller: Visitor) -> Token:
        return with_role(role, caller)

    return check


SubmittingVisitor = Annotated[Token, Depends(visitor_with(Role.SUBMITTER))]
AdminVisitor = Annotated[Token, Depends(visitor_with(Role.ADMIN))]


def own_form(request: Request) -> None:
    """Let only forms of this site through: browsers say which site a form belongs to. Raises NotAllowed.

    `OwnSite` has refused the origins of other sites; here something has to say that it is this one.
    """
    if not request.headers.get("origin") and request.headers.get("sec-fetch-site") != "same-origin":
        raise NotAllowed("this form was not sent by a page of this farm", hint="sign in on the farm's own page")


OwnForm = Depends(own_form)

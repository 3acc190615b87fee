"""Browsers: a cookie that holds the token, the headers of every page, and no form that another site sends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import Depends, Request, Response
from fastapi.security import HTTPAuthorizationCredentials
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from farm.api.auth import COOKIES, Caller, FarmDep, Unauthenticated, authenticate
from farm.api.sites import host_name, is_loopback
from farm.app import Farm
from farm.artifacts.tokens import Role
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
    secure = _is_secure(request)
    response.set_cookie(_cookie(secure), token, max_age=WEEK, path="/", secure=secure, httponly=True, samesite="lax")


def forget(request: Request, response: Response) -> None:
    """Let a browser forget its token."""
    secure = _is_secure(request)
    response.delete_cookie(_cookie(secure), path="/", secure=secure, httponly=True, samesite="lax")


def token_of(request: Request) -> str:
    """Return the token that a browser, or another caller, shows; empty if there is none."""
    scheme, _, shown = request.headers.get("authorization", "").partition(" ")
    return shown if scheme.lower() == "bearer" else request.cookies.get(_cookie(_is_secure(request)), "")


def has_cookie(request: Request) -> bool:
    """Whether somebody signed in with a token, which signing out forgets."""
    return _cookie(_is_secure(request)) in request.cookies


def knows(farm: Farm, token: str) -> bool:
    """Whether the farm knows a token."""
    try:
        authenticate(farm, HTTPAuthorizationCredentials(scheme="bearer", credentials=token))
    except Unauthenticated:
        return False
    return True


def visitor(farm: FarmDep, request: Request, namespace: str = "") -> Caller:
    """Return who looks at a page. Raises Unauthenticated, and NotAllowed for a namespace of others."""
    credentials = HTTPAuthorizationCredentials(scheme="bearer", credentials=token_of(request))
    caller = authenticate(farm, credentials, namespace or None)
    if caller.role < Role.READER:
        raise NotAllowed(f"pages need the role reader; the token has {caller.role.name.lower()}")
    request.state.caller = caller  # The log of changes names the caller.
    return caller


Visitor = Annotated[Caller, Depends(visitor)]


def visitor_with(role: Role) -> Callable[[Caller], Caller]:
    """Return a dependency that lets only visitors of that role, or a higher one, through."""

    def check(caller: Visitor) -> Caller:
        if caller.role < role:
            raise NotAllowed(f"this needs the role {role.name.lower()}; the token has {caller.role.name.lower()}")
        return caller

    return check


SubmittingVisitor = Annotated[Caller, Depends(visitor_with(Role.SUBMITTER))]
AdminVisitor = Annotated[Caller, Depends(visitor_with(Role.ADMIN))]


def own_form(request: Request) -> None:
    """Let only forms of this site through: browsers say which site a form belongs to. Raises NotAllowed.

    `OwnSite` has refused the origins of other sites; here something has to say that it is this one.
    """
    if not request.headers.get("origin") and request.headers.get("sec-fetch-site") != "same-origin":
        raise NotAllowed("this form was not sent by a page of this farm", hint="sign in on the farm's own page")


OwnForm = Depends(own_form)


def _cookie(secure: bool) -> str:
    # The prefix makes browsers refuse it from a neighbouring site, and without TLS.
    return COOKIES[0 if secure else 1]


def _is_secure(request: Request) -> bool:
    """Whether the browser talks TLS: a server that does not, not even by a proxy, is on loopback."""
    return request.url.scheme == "https" or not is_loopback(host_name(request.headers.get("host", "")))

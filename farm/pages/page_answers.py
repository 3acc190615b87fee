"""Answers with pages: who looks, templates and the headers of every page, what all pages show, names in URLs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import getmembers, isfunction
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar
from urllib.parse import parse_qs, urlencode

from fastapi import Depends, HTTPException, Query, Request, Response
from fastapi import Path as InPath
from fastapi.responses import HTMLResponse
from fastapi.security import HTTPAuthorizationCredentials
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from farm.api import schemas
from farm.api.gate import COOKIES, FarmDep, authenticate, cookie_name, get_farm, shown_token
from farm.app import Farm
from farm.artifacts.tokens import Role, Token
from farm.errors import NotAllowed
from farm.files import hash_file
from farm.inert import inert, one_line
from farm.pages import quantities
from farm.pages.build_view import SIGNS, ranked, said
from farm.pages.page_reading import BuildPages
from farm.results.gates import UNCHANGED
from farm.results.verdict import BAND
from farm.settings import NAMESPACE
from farm.units import by_number, plural

BASE = "/ui"  # Where the pages are.
FORM_LIMIT = 16 << 10  # Bytes of a form.

Namespace = Annotated[str, InPath(pattern=NAMESPACE)]
BuildName = Annotated[str, InPath(pattern=schemas.BUILD_REFERENCE)]
Text = Annotated[str, Query(max_length=300)]

Row = TypeVar("Row")
Keys = Mapping[str, str | Callable[[Row], str | float | None]]
"""What rows are sorted by, by column: numbers, or texts by the numbers in them; rows with None come last. A text names
a field of a row, or of what is in it: `row.error`."""


async def form_of(request: Request) -> dict[str, str]:
    """Return the fields of a form that a page sent. Raises HTTPException if it is too large."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > FORM_LIMIT:
            raise HTTPException(413, "Too large")
    return {name: values[0] for name, values in parse_qs(body.decode(errors="replace")).items()}


Form = Annotated[dict[str, str], Depends(form_of)]


def page_of(
    request: Request, caller: Token | None, template: str, *, status: int = 200, **context: Any
) -> HTMLResponse:
    """Return a page, with what all pages show."""
    namespace = caller.namespace if caller else ""
    known = {
        "base": BASE,
        "namespace": namespace,
        "home": f"{BASE}/ns/{namespace}",
        "who": caller.name if caller else "",
        "signed_in": bool(caller and cookie_name(request.scope) in request.cookies),
        "section": "",
        "menu": tuple(entry for extension in get_farm(request).extensions for entry in extension.menu),
        "now": time.time(),
        "id": "",
    }
    return HTMLResponse(render(template, **{**known, **context}), status)


@dataclass(frozen=True, slots=True)
class Visit:
    """One look at a page of a namespace: who looks, and what the page is made of."""

    request: Request
    caller: Token
    farm: Farm

    @property
    def namespace(self) -> str:
        """The namespace that is looked at."""
        return self.caller.namespace

    @property
    def builds(self) -> BuildPages:
        """What reads builds for pages."""
        return self.farm.part(BuildPages)

    def page(self, template: str, **context: Any) -> HTMLResponse:
        """Return a page, with what all pages show."""
        return page_of(self.request, self.caller, template, **context)


def visit(request: Request, caller: Visitor, farm: FarmDep, namespace: Namespace) -> Visit:
    """Return a look at a namespace. Raises Unauthenticated, and NotAllowed for a namespace of others."""
    return Visit(request, caller, farm)


Here = Annotated[Visit, Depends(visit)]


def same_page(request: Request, **changes: str | int) -> str:
    """Return this page's URL with other parameters; an empty one is left out."""
    kept = [(name, value) for name, value in request.query_params.multi_items() if name not in changes]
    return f"?{urlencode([(name, value) for name, value in (*kept, *changes.items()) if value])}"


class Table(Generic[Row]):
    """The rows of a table that a page shows, as its address sorts and pages them.

    `sort=-Cells` shows those with the most cells first, `first=51` begins with the 51st row. Of a table with a `name`
    these are `sort.NAME` and `first.NAME`, so that a page may have several.
    """

    def __init__(
        self, request: Request, rows: Sequence[Row], keys: Keys[Row] | None = None, name: str = "", size: int = 100
    ) -> None:
        self._request, self._size, self.end, self.keys = request, size, name and f".{name}", keys or {}
        sort, first = (request.query_params.get(each + self.end, "") for each in ("sort", "first"))
        self.sort = sort if sort.removeprefix("-") in self.keys else ""
        self.first = int(first) if first.isdecimal() and 0 < len(first) < 10 else 1
        if self.sort:
            key = self.keys[self.sort.removeprefix("-")]
            found = [(_field(row, key) if isinstance(key, str) else key(row), row) for row in rows]
            known = [(by_number(at) if isinstance(at, str) else at, row) for at, row in found if at not in (None, "")]
            known.sort(key=lambda each: each[0], reverse=self.sort[0] == "-")
            rows = [row for _, row in known] + [row for at, row in found if at in (None, "")]
        self.total, self.rows = len(rows), rows[max(0, self.first - 1) :][:size]

    def order(self, column: str) -> str:
        """Return whether a column sorts the rows: `ascending`, `descending`, or not."""
        return {column: "ascending", f"-{column}": "descending"}.get(self.sort, "") if column else ""

    def head(self, column: str) -> str:
        """Return where a click on a column's title leads: to its order, the other way round, and the usual one."""
        return self._link(sort={column: f"-{column}", f"-{column}": ""}.get(self.sort, column), first="")

    @property
    def before(self) -> str:
        """Where the rows before are; empty if these are the first."""
        return self._link(first=max(1, self.first - self._size)) if self.first > 1 else ""

    @property
    def after(self) -> str:
        """Where the next rows are; empty if these are the last."""
        return self._link(first=self.first + self._size) if self.first - 1 + self._size < self.total else ""

    def _link(self, **changes: str | int) -> str:
        changed = {f"{each}{self.end}": to for each, to in changes.items()}
        return same_page(self._request, **changed) + self.end.replace(".", "#")


def _field(row: object, path: str) -> Any:
    found: Any = row
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else getattr(found, name)
    return found


# --- browsers: a cookie that holds the token, and no form that another site sends -------------------------------------

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


def set_token(request: Request, response: Response, token: str) -> None:
    """Let a browser keep a token, where no script and no other site gets at it; an empty one ends the one it has."""
    name, age = cookie_name(request.scope), WEEK if token else 0
    response.set_cookie(name, token, max_age=age, path="/", secure=name == COOKIES[0], httponly=True, samesite="lax")


def is_here(request: Request) -> bool:
    """Whether the browser runs on the server's machine, without TLS: only there links sign in."""
    return cookie_name(request.scope) == COOKIES[1]


def visitor(farm: FarmDep, request: Request, namespace: str = "") -> Token:
    """Return who looks at a page. Raises Unauthenticated, and NotAllowed for a namespace of others."""
    credentials = HTTPAuthorizationCredentials(scheme="bearer", credentials=shown_token(request.scope))
    caller = authenticate(request, farm, credentials, namespace or None)
    if caller.role < Role.READER:
        raise NotAllowed(f"pages need the role reader; the token has {caller.role.name.lower()}")
    request.state.caller = caller  # The log of changes names the caller.
    return caller


Visitor = Annotated[Token, Depends(visitor)]


def own_form(request: Request) -> None:
    """Let only forms of this site through: browsers say which site a form belongs to. Raises NotAllowed.

    `OwnSite` has refused the origins of other sites; here something has to say that it is this one.
    """
    if not request.headers.get("origin") and request.headers.get("sec-fetch-site") != "same-origin":
        raise NotAllowed("this form was not sent by a page of this farm", hint="sign in on the farm's own page")


OwnForm = Depends(own_form)


# --- templates: documents in, HTML out; all text is escaped and made inert --------------------------------------------

FOLDER = Path(__file__).parent
STATIC = {name: FOLDER / "static" / name for name in ("farm.css", "farm.js")}
"""Files that pages ask browsers to fetch."""

_folders = [str(FOLDER / "templates")]


def render(template: str, **context: Any) -> str:
    """Return a page."""
    return _environment().get_template(f"{template}.html").render(context)


def macro(template: str, name: str) -> Callable[..., Markup]:
    """Return a macro of a template."""
    found: Callable[..., Markup] = getattr(_environment().get_template(f"{template}.html").module, name)
    return found


def add_templates(folders: Iterable[Path]) -> None:
    """Let pages use templates of these folders, too."""
    _folders.extend(str(folder) for folder in folders if str(folder) not in _folders)


@cache
def version_of(name: str) -> str:
    """Return what changes with a file's bytes: pages name it in the URL, so browsers may keep the file for ever."""
    return hash_file(STATIC[name])[0][:12]


_QUOTED = re.compile(r"`([^`]{1,300})`")


def _marked(text: str) -> Markup:
    return Markup(_QUOTED.sub(r"<code>\1</code>", str(escape(one_line(text, 1000)))))  # noqa: S704 - escaped


@cache
def _environment() -> Environment:
    loader = FileSystemLoader(())
    loader.searchpath = _folders  # It may grow.
    environment = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        # What a template puts out has no control characters, and nothing that reverses text or hides in it.
        finalize=lambda value: inert(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"SIGNS": SIGNS, "band": BAND, "ranked": ranked, "version_of": version_of, "same": UNCHANGED}
    environment.filters |= dict(getmembers(quantities, isfunction))
    environment.filters |= {
        "marked": _marked,
        "said": said,
        "short": lambda name: name[:10],
        "places": lambda number, count=2: f"{number:.{count}f}",
        "one_line": one_line,
        "plural": plural,
        "inert": inert,
    }
    return environment

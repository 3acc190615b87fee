"""Answers with pages: what all of them show, and the names in their URLs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar
from urllib.parse import parse_qs, urlencode

from fastapi import Depends, HTTPException, Path, Query, Request
from fastapi.responses import HTMLResponse

from farm.api import schemas
from farm.api.auth import FarmDep, get_farm
from farm.app import Farm
from farm.artifacts.tokens import Token
from farm.pages import rendering
from farm.pages.browser_sessions import Visitor, has_cookie
from farm.pages.page_reading import BuildPages
from farm.settings import NAMESPACE
from farm.units import by_number

BASE = "/ui"
"""Where the pages are."""

FORM_LIMIT = 16 << 10
"""Bytes of a form."""

Namespace = Annotated[str, Path(pattern=NAMESPACE)]
BuildName = Annotated[str, Path(pattern=schemas.BUILD_REFERENCE)]
JobName = Annotated[str, Path(pattern=schemas.JOB_ID)]
KeyName = Annotated[str, Path(pattern=schemas.DIGEST)]
Text = Annotated[str, Query(max_length=300)]

Row = TypeVar("Row")
Keys = Mapping[str, Callable[[Row], str | float | None]]
"""What rows are sorted by, by column: numbers, or texts by the numbers in them; rows with None come last."""


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
        "signed_in": bool(caller and has_cookie(request)),
        "section": "",
        "menu": tuple(entry for extension in get_farm(request).extensions for entry in extension.menu),
        "now": time.time(),
        "id": "",
    }
    return HTMLResponse(rendering.render(template, **{**known, **context}), status)


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
        self,
        request: Request,
        rows: Sequence[Row],
        keys: Keys[Row] | None = None,
        name: str = "",
        size: int = 100,
    ) -> None:
        self._request, self._size, self.end, self.keys = request, size, name and f".{name}", keys or {}
        sort, first = (request.query_params.get(each + self.end, "") for each in ("sort", "first"))
        self.sort = sort if sort.removeprefix("-") in self.keys else ""
        self.first = int(first) if first.isdecimal() and 0 < len(first) < 10 else 1
        if self.sort:
            found = [(self.keys[self.sort.removeprefix("-")](row), row) for row in rows]
            known = [(by_number(key) if isinstance(key, str) else key, row) for key, row in found if key is not None]
            known.sort(key=lambda each: each[0], reverse=self.sort[0] == "-")
            rows = [row for _, row in known] + [row for key, row in found if key is None]
        self.total, self.rows = len(rows), rows[max(0, self.first - 1) :][:size]

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

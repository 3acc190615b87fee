"""Answers with pages: what all of them show, and the names in their URLs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated, Any
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

BASE = "/ui"
"""Where the pages are."""

FORM_LIMIT = 16 << 10
"""Bytes of a form."""

Namespace = Annotated[str, Path(pattern=NAMESPACE)]
BuildName = Annotated[str, Path(pattern=schemas.BUILD_REFERENCE)]
JobName = Annotated[str, Path(pattern=schemas.JOB_ID)]
KeyName = Annotated[str, Path(pattern=schemas.DIGEST)]
Text = Annotated[str, Query(max_length=300)]


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

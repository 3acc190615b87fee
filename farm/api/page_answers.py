"""Answers with pages: what all of them show, and the names in their URLs."""

from __future__ import annotations

import time
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import Path, Query, Request
from fastapi.responses import HTMLResponse

from farm.api import schemas
from farm.api.auth import Caller
from farm.api.browser_sessions import token_of
from farm.api.page_reading import BuildPages
from farm.app import Farm
from farm.pages import rendering
from farm.settings import NAMESPACE

BASE = "/ui"
"""Where the pages are."""

Namespace = Annotated[str, Path(pattern=NAMESPACE)]
BuildName = Annotated[str, Path(pattern=schemas.BUILD_REFERENCE)]
JobName = Annotated[str, Path(pattern=schemas.JOB_ID)]
KeyName = Annotated[str, Path(pattern=schemas.DIGEST)]
Text = Annotated[str, Query(max_length=300)]


def page_of(
    request: Request, caller: Caller | None, template: str, *, status: int = 200, **context: Any
) -> HTMLResponse:
    """Return a page, with what all pages show."""
    namespace = caller.namespace if caller else ""
    known = {
        "base": BASE,
        "namespace": namespace,
        "home": f"{BASE}/ns/{namespace}",
        "who": caller.name if caller else "",
        "signed_in": bool(caller and token_of(request)),
        "section": "",
        "now": time.time(),
        "id": "",
    }
    return HTMLResponse(rendering.render(template, **{**known, **context}), status)


def reading_of(farm: Farm, request: Request) -> BuildPages:
    """Return what reads builds for pages: one for each farm that the app serves."""
    kept: tuple[Farm, BuildPages] | None = getattr(request.app.state, "build_pages", None)
    if kept is None or kept[0] is not farm:
        kept = request.app.state.build_pages = (farm, BuildPages(farm))
    return kept[1]


def url_with(request: Request, **changes: str | int) -> str:
    """Return this page's URL with other parameters; an empty one is left out."""
    query = {**request.query_params, **{name: str(value) for name, value in changes.items()}}
    return f"?{urlencode({name: value for name, value in query.items() if value})}"

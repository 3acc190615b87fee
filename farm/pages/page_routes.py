"""Pages over HTTP: an app of its own below `/ui`, read-only but for signing in and out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pkgutil import resolve_name
from urllib.parse import quote

import anyio
from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, RedirectResponse, Response
from starlette.exceptions import HTTPException

from farm.api.gate import FarmDep, Unauthenticated, get_farm, token_of
from farm.app import Farm
from farm.errors import FarmError, NotFound
from farm.extension import Extension
from farm.logging import get_logger
from farm.pages import build_pages, job_pages, page_answers
from farm.pages.page_answers import BASE, Form, OwnForm, PageHeaders, Text, Visitor, page_of, visitor
from farm.pages.page_reading import EventHub, StillReading

log = get_logger(__name__)

TITLES = {401: "Sign in first", 403: "Not allowed", 404: "Not found", 410: "Gone", 503: "The farm cannot say now"}
"""Of pages about errors, by their status."""


def create_pages(limiter: anyio.CapacityLimiter, extensions: Sequence[Extension[Farm]]) -> FastAPI:
    """Return the app of the pages. The app that mounts it shares its state, which has the farm.

    `limiter` bounds the threads in which builds are followed.
    """
    pages = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    pages.add_middleware(PageHeaders)
    pages.state.hub = EventHub(limiter)
    page_answers.add_templates(each.templates for each in extensions if each.templates)
    _add_errors(pages)
    _add_entrance(pages)
    added = (resolve_name(name) for extension in extensions for name in extension.pages)
    for room in (build_pages.router, job_pages.router, *added):
        pages.include_router(room)
    return pages


# --- errors -----------------------------------------------------------------------------------------------------------


def _add_errors(pages: FastAPI) -> None:
    """Answer with a page wherever a request does not succeed."""

    def problem(request: Request, status: int, title: str, detail: str, hint: str = "") -> Response:
        caller = None
        with suppress(FarmError):
            caller = visitor(get_farm(request), request)
        return page_of(request, caller, "problem", status=status, title=title, detail=detail, hint=hint)

    @pages.exception_handler(StillReading)
    def still_reading(request: Request, error: StillReading) -> Response:
        namespace, build_id = error.key
        farm = get_farm(request)
        caller = visitor(farm, request, namespace)
        build = farm.build_reader.get(namespace, build_id)
        answer = page_of(request, caller, "reading", status=503, id=build_id, build=build)
        answer.headers["Retry-After"] = "2"
        return answer

    @pages.exception_handler(FarmError)
    def farm_error(request: Request, error: FarmError) -> Response:
        if isinstance(error, Unauthenticated) and "text/html" in request.headers.get("accept", ""):
            here = f"{request.url.path}?{request.url.query}" if request.url.query else request.url.path
            return RedirectResponse(f"{BASE}/sign-in?next={quote(here)}", 303)
        return problem(request, error.http_status, TITLES.get(error.http_status, "Refused"), error.message, error.hint)

    @pages.exception_handler(RequestValidationError)
    def invalid(request: Request, error: RequestValidationError) -> Response:
        wrong = "; ".join(f"{each['loc'][-1]}: {each['msg']}" for each in error.errors()[:5])
        return problem(request, 404, "Not found", f"there is no such page: {wrong}")

    @pages.exception_handler(HTTPException)
    def http(request: Request, error: HTTPException) -> Response:
        return problem(request, error.status_code, str(error.detail), "there is no such page")

    @pages.exception_handler(Exception)
    def unexpected(request: Request, error: Exception) -> Response:
        log.error("page failed", path=request.url.path, exc_info=error)
        detail, hint = "this page could not be made", "the server's log has the details"
        return page_of(request, None, "problem", status=500, title="A bug in the farm", detail=detail, hint=hint)


# --- signing in -------------------------------------------------------------------------------------------------------


def _add_entrance(pages: FastAPI) -> None:
    @pages.get("/")
    def entrance(caller: Visitor) -> Response:
        return RedirectResponse(f"{BASE}/ns/{caller.namespace}", 303)

    @pages.get("/sign-in")
    def sign_in(request: Request, farm: FarmDep, next: Text = "", once: Text = "") -> Response:
        token, wrong = farm.settings.api_token.get_secret_value(), ""
        if once and not page_answers.is_here(request):
            wrong = "This link works only in a browser on the farm's own machine, at the address it came with."
        elif once and not request.scope.get("farm.looks"):  # What looks at links before people do asks for the head.
            if farm.tokens.spend(once, token):
                response = RedirectResponse(_own_path(next), 303)
                page_answers.set_token(request, response, token)
                return response
            wrong = "This link was used, or is older than ten minutes."
        return page_of(request, None, "sign_in", next=_own_path(next), wrong=wrong)

    @pages.post("/sign-in", dependencies=[OwnForm])
    async def signed_in(request: Request, farm: FarmDep, form: Form) -> Response:
        token, after = (form.get(name, "").strip() for name in ("token", "next"))
        if not token or not await run_in_threadpool(token_of, farm, token):
            wrong = "This farm does not know this token."
            return page_of(request, None, "sign_in", status=401, next=_own_path(after), wrong=wrong)
        response = RedirectResponse(_own_path(after), 303)
        page_answers.set_token(request, response, token)
        return response

    @pages.post("/sign-out", dependencies=[OwnForm])
    def sign_out(request: Request) -> Response:
        response = RedirectResponse(f"{BASE}/sign-in", 303)
        page_answers.set_token(request, response, "")
        return response

    @pages.get("/static/{name:path}")
    def static(name: str, v: Text = "") -> Response:
        if name not in page_answers.STATIC:
            raise NotFound(f"no file {name}")
        kept = "public, max-age=31536000, immutable" if v == page_answers.version_of(name) else "no-cache"
        return FileResponse(page_answers.STATIC[name], headers={"Cache-Control": kept})


def _own_path(path: str) -> str:
    """Return where to go after signing in: a page of the farm, whatever the form says."""
    plain = path.isprintable() and "\\" not in path and "//" not in path
    return path if path.startswith(f"{BASE}/") and plain else f"{BASE}/"

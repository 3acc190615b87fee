"""Errors on the wire: every error of the farm as Problem Details (RFC 9457)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from farm.errors import FarmError, FarmFault, InputsMissing, ManifestError, ProblemDetails, QuotaExceeded, UsageError
from farm.logging import get_logger

MEDIA_TYPE = "application/problem+json"
TYPE_PREFIX = "urn:farm:error:"
"""What follows in `type` is the name of the error's class in `farm.errors`, so that the client raises the same."""

_log = get_logger(__name__)


def problem(error: FarmError) -> ProblemDetails:
    """Return the Problem Details of an error."""
    document: ProblemDetails = {
        "type": TYPE_PREFIX + type(error).__name__,
        "title": re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(error).__name__).capitalize(),
        "status": error.http_status,
        "detail": error.message,
    }
    if error.hint:
        document["hint"] = error.hint
    if isinstance(error, ManifestError):
        document["problems"] = [asdict(each) for each in error.problems]
    if isinstance(error, InputsMissing):
        document["missing_blobs"] = error.blobs
        if error.kept:
            document["kept"] = error.kept
    return document


def refusal(error: FarmError) -> JSONResponse:
    """Return the answer that refuses a request."""
    headers = {}
    if isinstance(error, FarmFault):
        headers["Retry-After"] = "2"
    if isinstance(error, QuotaExceeded):
        headers["Retry-After"] = "60"
    if error.http_status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return _answer(problem(error), headers)


def install(app: FastAPI) -> None:
    """Make the app answer with Problem Details wherever it does not succeed."""

    @app.exception_handler(FarmError)
    def farm_error(_: Request, error: FarmError) -> JSONResponse:
        return refusal(error)

    @app.exception_handler(RequestValidationError)
    def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        wrong = UsageError("; ".join(_wrong(each) for each in error.errors()[:20]))
        return _answer({**problem(wrong), "status": 422})

    @app.exception_handler(HTTPException)
    def http(_: Request, error: HTTPException) -> JSONResponse:
        document = ProblemDetails(type="about:blank", title=error.detail, status=error.status_code, detail=error.detail)
        return _answer(document, dict(error.headers or {}))

    @app.exception_handler(Exception)
    def unexpected(request: Request, error: Exception) -> JSONResponse:
        _log.error("request failed", method=request.method, path=request.url.path, exc_info=error)
        bug = FarmFault("this is a bug in the farm", hint="the server's log has the details")
        return _answer({**problem(bug), "status": 500})


def _answer(document: ProblemDetails, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse(document, document["status"], headers, media_type=MEDIA_TYPE)


def _wrong(problem: Mapping[str, Any]) -> str:
    """What is wrong with one value; of names, which callers type, the value itself."""
    place = problem["loc"]
    if problem["type"] == "string_pattern_mismatch" and isinstance(place[-1], str):
        wrong = f"{str(problem['input'])[:100]!r} is not a {place[-1].replace('_', ' ')}"
        return wrong if place[0] == "path" else f"{wrong}, which has to match {problem['ctx']['pattern']}"
    return f"{'.'.join(map(str, place))}: {problem['msg']}"

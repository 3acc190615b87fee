"""The app: everything under `/v1`, with its limits."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable
from pkgutil import resolve_name

import anyio
from fastapi import APIRouter, FastAPI, Request
from starlette.responses import PlainTextResponse, RedirectResponse

import farm as package
from farm.api import (
    artifact_routes,
    build_routes,
    cell_routes,
    operator_routes,
    problems,
    schemas,
    tuning_routes,
)
from farm.api.gate import LARGEST_BODY, Gate, OwnSite
from farm.app import Farm
from farm.errors import FarmFault, UsageError
from farm.manifest.schema import manifest_schema
from farm.pages import job_pages, page_answers, page_routes
from farm.settings import load_settings
from farm.spec import JsonSchema

router = APIRouter(tags=["farm"])

HEALTH_SECONDS = 2.0
"""How long a server has to say that it is there."""


def create_app(farm: Farm, *, loopback: bool = False) -> FastAPI:
    """Return the API of a farm.

    Without a configured token the app is only made for a server that binds to the loopback address (`loopback`). Such
    a server refuses other host names than its own and those of the setting `api_hosts`; one for everybody does where
    that setting has any. No page of another site is answered.

    Raises UsageError if a token is missing.
    """
    token = farm.settings.api_token.get_secret_value()
    if not token and not loopback:
        raise UsageError(
            "the API would be open to everybody: no token is set",
            hint="set FARM_API_TOKEN (`openssl rand -hex 32` makes one), or serve on 127.0.0.1",
        )
    app = _Application(
        title="The compile farm",
        version=package.__version__,
        description="Distributed batch compilation of models. Errors are Problem Details (RFC 9457).",
        openapi_url="/v1/openapi.json",
        separate_input_output_schemas=False,
        # The interactive pages load scripts from elsewhere; a farm often has no way there.
        docs_url=None,
        redoc_url=None,
        max_body_size=LARGEST_BODY,
    )
    app.state.farm = farm
    app.state.watchers = anyio.CapacityLimiter(build_routes.WATCHERS)
    app.state.streams = Counter()
    app.state.imports = anyio.CapacityLimiter(1)
    app.state.health = (
        HealthCheck("the job store", lambda: app.state.farm.store.check()),  # noqa: PLW0108 - it may serve another farm
        HealthCheck("object storage", lambda: app.state.farm.artifacts.with_patience(0.0).get_object("config/health")),
    )
    pages = page_routes.create_pages(app.state.watchers, farm.extensions)
    problems.install(app)
    for room in (
        router,
        build_routes.router,
        job_pages.traces,
        cell_routes.history_router,
        cell_routes.acknowledged_router,
        cell_routes.job_router,
        artifact_routes.router,
        artifact_routes.blobs,
        operator_routes.worker_router,
        operator_routes.upkeep_router,
        operator_routes.token_router,
        tuning_routes.router,
        *(resolve_name(name) for extension in farm.extensions for name in extension.routes),
    ):
        app.include_router(room, prefix="/v1")
    app.include_router(operator_routes.metrics_router)
    # Pages have the state of this app, which has the farm.
    app.state.hub, pages.state = pages.state.hub, app.state
    app.mount(page_answers.BASE, pages)
    # For those who start a hung server again: the servers that it uses are not asked.
    app.add_route("/live", lambda _: PlainTextResponse("ok"), include_in_schema=False)
    app.add_route("/", lambda _: RedirectResponse(f"{page_answers.BASE}/", 303), include_in_schema=False)
    hosts = farm.settings.api_hosts
    app.add_middleware(Gate, state=app.state, site=OwnSite(hosts, named=bool(hosts) or loopback))
    return app


def openapi() -> JsonSchema:
    """Return the API's document, as `docs/openapi.json` has it; needs no server."""
    return create_app(Farm(load_settings({})), loopback=True).openapi()


class _Application(FastAPI):
    """FastAPI whose document calls our schemas by their published names: `CellView` is `Cell` for callers."""

    def openapi(self) -> JsonSchema:
        """Return the document; it is made once."""
        if not self.openapi_schema:
            self.openapi_schema = json.loads(re.sub(r'(?:View|Document)(?=["\]_])', "", json.dumps(super().openapi())))
        return self.openapi_schema


@router.get("/health", response_model=schemas.HealthView)
async def health(request: Request) -> schemas.HealthView:
    """Check that the farm, its store and its object storage answer; needs no token. 503 if one does not."""
    for look in request.app.state.health:
        await look.answers()
    return schemas.HealthView(status="ok", version=package.__version__, store="ok", storage="ok")


@router.get("/schema/manifest")
def schema(draft7: bool = False) -> schemas.Document:
    """Return the manifest's JSON Schema, draft 2020-12 or draft-07; needs no token, since editors ask for it."""
    return manifest_schema(draft7=draft7)


class HealthCheck:
    """Asks one server whether it is there. Callers who ask meanwhile, however many, wait for the same answer.

    A server that hangs keeps one thread busy, since a question that waits cannot be taken back.
    """

    def __init__(self, what: str, ask: Callable[[], object]) -> None:
        """`what` names the server in messages; `ask` raises if it is not there."""
        self._what = what
        self._ask = ask
        self._asked: asyncio.Future[object] | None = None

    async def answers(self) -> None:
        """Return if the server answers. Raises FarmFault if it takes too long, and what `ask` raises."""
        asked = self._asked  # By the time that it is answered, the next caller may ask again.
        if asked is None or asked.done():
            # It needs none of the threads that serve others: they may all wait for the same server.
            limiter = anyio.CapacityLimiter(1)
            asked = self._asked = asyncio.ensure_future(anyio.to_thread.run_sync(self._ask, limiter=limiter))
        done, _ = await asyncio.wait([asked], timeout=HEALTH_SECONDS)
        if not done:
            raise FarmFault(f"{self._what} did not answer within {HEALTH_SECONDS:g} s", hint="`farm doctor` says more")
        asked.result()

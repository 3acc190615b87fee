"""The server: all under `/v1` as one app, with its limits, and the process that runs it with the control loops."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import signal
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from types import FrameType
from typing import Any, ClassVar, NamedTuple

import anyio
import uvicorn
from fastapi import APIRouter, FastAPI, Request
from starlette.responses import PlainTextResponse, RedirectResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

import farm as package
from farm.api import artifact_routes, build_routes, operator_routes, problems, schemas, tuning_routes
from farm.api.gate import LARGEST_BODY, Gate, OwnSite, is_loopback
from farm.app import Farm
from farm.control.loops import run_loops
from farm.errors import FarmFault, UsageError
from farm.logging import configure, get_logger
from farm.manifest.entries import manifest_schema
from farm.pages import job_pages, page_answers, page_routes
from farm.settings import load_settings
from farm.spec import JsonSchema

router = APIRouter(tags=["farm"])

HEALTH_SECONDS = 2.0  # How long a server has to say that it is there.


def create_app(farm: Farm, *, loopback: bool = False) -> FastAPI:
    """Return the API of a farm.

    Without a configured token the app is only made for a server that binds to the loopback address (`loopback`). Such
    a server refuses other host names than its own and those of the setting `api_hosts`; one for everybody does where
    that setting has any. No page of another site is answered.

    Raises UsageError if a token is missing.
    """
    token = farm.settings.api_token.get_secret_value()
    if not token and not loopback:
        hint = "set FARM_API_TOKEN (`openssl rand -hex 32` makes one), or serve on 127.0.0.1"
        raise UsageError("the API would be open to everybody: no token is set", hint=hint)
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
        build_routes.history_router,
        build_routes.acknowledged_router,
        build_routes.job_router,
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


log = get_logger(__name__)

MOST = 4096  # Connections at once at most, whatever the system allows.
LEAST = 16 << 10  # Bytes of a waiting answer that a client has to read within `answer_seconds`, even on a slow line.
OTHER_FILES = 256  # Descriptors that a server needs for the rest: Redis, object storage, its log, library files.


class _Stage(Enum):
    HEADER = "header"
    BODY = "body"
    ANSWER = "answer"


class BoundedConnection(H11Protocol):
    """One connection to the API."""

    most: ClassVar[int] = MOST
    header_seconds: ClassVar[float] = 10.0
    """For the whole header of a request, from the connection or the first byte on."""
    body_seconds: ClassVar[float] = 120.0  # For the whole body of a request.
    answer_seconds: ClassVar[float] = 60.0
    """For the client to read `LEAST` bytes of an answer, if so much of it waits that nothing more is written."""
    handshake_seconds: ClassVar[float] = 10.0  # For the TLS handshake.
    _handshakes: ClassVar[set[asyncio.Task[Any]]] = set()
    """Connections whose TLS handshake is not done: asyncio accepts each in a task that ends with the handshake."""

    _stage: _Stage | None = None
    _timer: asyncio.TimerHandle | None = None
    _taking: asyncio.TimerHandle | None = None  # Checks whether the client has read enough of an answer.
    _since = 0.0  # When the current stage began, by the clock of the event loop.

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """Accept a connection. Raises ConnectionAbortedError, which closes it, if too many are in a handshake."""
        super().__init__(*arguments, **named)
        if self.config.is_ssl and (task := asyncio.current_task()):
            if len(self._handshakes) >= self.most // 2:
                log.warning("too many TLS handshakes, closing a new connection", handshakes=len(self._handshakes))
                raise ConnectionAbortedError("too many TLS handshakes")
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)
            self._make_room(None)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin. If there are too many connections, close the one that has been idle longest, or else this one."""
        super().connection_made(transport)
        self._enter(_Stage.HEADER)
        self._make_room(self)

    def _make_room(self, new: BoundedConnection | None) -> None:
        count = len(self.connections) + len(self._handshakes)
        if count <= self.most:
            return
        others = (each for each in self.connections if isinstance(each, BoundedConnection) and each._is_idle)
        if oldest := min(others, key=lambda each: each._since, default=new):
            log.warning("too many connections, closing an idle one", connections=count)
            oldest.transport.abort()
            self.connections.discard(oldest)

    def data_received(self, data: bytes) -> None:
        """Read data, and note how much of the request has arrived."""
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._enter(_Stage.HEADER)
        else:
            self._enter_request()

    def on_response_complete(self) -> None:
        """Start the timer of a request that came together with the one just answered."""
        super().on_response_complete()
        if self.cycle is not None and not self.cycle.response_complete:
            self._enter_request()

    def pause_writing(self) -> None:
        """Stop writing until the client has read what waits; close the connection if it reads too little."""
        super().pause_writing()
        self._await_taking()

    def resume_writing(self) -> None:
        """Write again."""
        self._stop_awaiting()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        if self._timer:
            self._timer.cancel()
        self._stop_awaiting()
        super().connection_lost(exc)

    @property
    def _is_idle(self) -> bool:
        """Whether no request is being answered, or the client does not read its answer."""
        return (
            self._taking is not None
            or self._stage is not _Stage.ANSWER
            or (self.cycle is not None and self.cycle.response_complete)
        )

    def _enter_request(self) -> None:
        self._enter(_Stage.BODY if self.cycle.more_body else _Stage.ANSWER)

    def _enter(self, stage: _Stage) -> None:
        if stage is self._stage:
            return
        if self._timer:
            self._timer.cancel()
        self._stage, self._since = stage, self.loop.time()
        if stage is not _Stage.ANSWER:
            seconds = self.header_seconds if stage is _Stage.HEADER else self.body_seconds
            self._timer = self.loop.call_later(seconds, self.transport.abort)

    def _await_taking(self) -> None:
        self._stop_awaiting()
        left = self.transport.get_write_buffer_size()
        self._taking = self.loop.call_later(self.answer_seconds, self._look_at_taking, left)

    def _look_at_taking(self, before: int) -> None:
        if before - self.transport.get_write_buffer_size() < LEAST:
            self.transport.abort()
        else:
            self._await_taking()

    def _stop_awaiting(self) -> None:
        if self._taking:
            self._taking.cancel()
            self._taking = None


def bounded() -> type[BoundedConnection]:
    """Raise the limit of descriptors as far as allowed, and return the class of connections bounded by it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    room = MOST if soft == resource.RLIM_INFINITY else min(MOST, max(soft - OTHER_FILES, soft // 2))
    members: dict[str, object] = {"most": room, "_handshakes": set(), "__doc__": BoundedConnection.__doc__}
    return type("BoundedConnection", (BoundedConnection,), members)


TICK_SECONDS = 1.0  # Seconds for which an idle server may sleep: so late are its answers' dates.

DRAIN_SECONDS = 3
"""Seconds that a stopping server waits for open requests; clients that follow events reconnect elsewhere."""


class Listening(NamedTuple):
    """Where a server listens, and how its callers' words are kept from others.

    `certificate` and `key` are PEM files. `proxy`: another program ends TLS in front of this one.
    """

    host: str
    port: int
    certificate: Path | None = None
    key: Path | None = None
    proxy: bool = False

    def check(self) -> None:
        """Refuse to send tokens through a network as they are. Raises UsageError."""
        if (self.certificate is None) != (self.key is None):
            raise UsageError("--certificate and --key are needed together", hint="name both files, in PEM form")
        for path in (self.certificate, self.key):
            if path and not (os.access(path, os.R_OK) and path.is_file()):
                raise UsageError(f"there is no file {path} that this user may read")
        if not (is_loopback(self.host) or self.certificate or self.proxy):
            what = f"{self.host} is not a loopback address, and there is no TLS: the network could read the tokens"
            hint = "add --certificate and --key, or --behind-proxy if a proxy in front of it has TLS"
            raise UsageError(what, hint=hint)


def serve(farm: Farm, listening: Listening, *, ready: Callable[[str], None]) -> None:
    """Serve the API and run the control loops until SIGINT or SIGTERM; `ready` gets the URL once it answers.

    Port 0 takes a free one. Raises UsageError if the address is taken or would be open to everybody, or the signing key
    or the trust policy is wrong, FarmFault if the store or object storage is not fit for the farm.
    """
    configure(farm.settings)
    # A proxy passes on requests from anywhere, under its own name.
    app = create_app(farm, loopback=is_loopback(listening.host) and not listening.proxy)
    listening.check()
    config = server_config(app, bounded(), listening)
    farm.start()
    _ = farm.store
    farm.artifacts.check()
    host = f"[{listening.host}]" if ":" in listening.host else listening.host
    listener = _bind(listening.host, listening.port)
    url = f"{'https' if config.is_ssl else 'http'}://{host}:{listener.getsockname()[1]}"
    stop = threading.Event()
    loops = threading.Thread(target=run_loops, args=(farm, stop), name="control")
    # uvicorn shuts down on a signal, and then raises it again for the handler from before: ours.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    loops.start()
    try:
        _Server(config, lambda: ready(url)).run(sockets=[listener])
    except KeyboardInterrupt:
        pass
    finally:
        stop.set()
        loops.join()


def server_config(app: FastAPI, connection: type[BoundedConnection], listening: Listening) -> uvicorn.Config:
    """Return the configuration of the server. Raises UsageError if the certificate cannot be used."""
    config = uvicorn.Config(
        app,
        http=connection,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        # Whose word would a header like X-Forwarded-For be? Nothing here asks where a caller is.
        proxy_headers=False,
        lifespan="off",
        ssl_certfile=listening.certificate,
        ssl_keyfile=listening.key,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=DRAIN_SECONDS,
    )
    try:
        config.load()
    except (ssl.SSLError, OSError) as error:
        hint = "both files have to be PEM, and have to match"
        raise UsageError(f"the certificate cannot be used: {error}", hint=hint) from None
    return config


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready
        self._signalled = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        if self.config.is_ssl:
            # Until then a connection is not ours, and asyncio would wait a minute.
            seconds = BoundedConnection.handshake_seconds
            loop.create_server = partial(loop.create_server, ssl_handshake_timeout=seconds)  # type: ignore[method-assign]
        await super().startup(sockets)
        self._ready()

    async def main_loop(self) -> None:
        # uvicorn itself looks ten times a second for a signal, and once a second at the clock, for its header `Date`.
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._signalled.wait(), TICK_SECONDS)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        asyncio.get_running_loop().call_soon_threadsafe(self._signalled.set)


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise UsageError(f"cannot serve on {host}:{port}: {error.strerror}", hint="choose another --port") from None
    return listener

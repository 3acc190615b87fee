"""A farm with its API over real servers, in which the test itself plays the worker."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
import uvicorn
from fastapi import FastAPI
from pydantic import SecretStr

from farm.app import Farm
from farm.artifacts.sidecar import facts, validate
from farm.client.client import FarmClient
from farm.client.freezing import Frozen, freeze
from farm.extension import publishing
from farm.jobs.state import Outcome
from farm.pages import page_reading
from farm.runner import onnxruntime_compiler
from farm.serving.server import BoundedConnection, Listening, create_app, server_config
from farm.settings import Settings, load_settings
from farm.spec import Device
from farm.targets.pools import Pool, Target
from tests.support.helpers import wait_until
from tests.support.sound_store import kept_sound

POOL = Pool(
    Target("onnxruntime", "cpu"), onnxruntime_compiler.probe({})["toolchain"], Device("cpu"), 1, {"onnx": "1.23.2"}
)
"""What is installed here: children compile for nothing else."""

MANIFEST = """\
version: 1
name: demo
targets: [onnxruntime/cpu]
precisions: [fp32, fp16]
models:
  - name: net
    source: {path: net.onnx}
"""

ANY_PORT = Listening("127.0.0.1", 0)

ADMINS_ONLY = {
    "/v1/audit",
    "/v1/changes",
    "/v1/gc",
    "/v1/history/rebuild",
    "/v1/tokens",
    "/v1/tokens/{name}",
    "/v1/roles/publish",
    "/v1/roles/withdraw",
    "/v1/pools/{name}/pause",
    "/v1/pools/{name}/resume",
    "/v1/workers/{name}/drain",
    "/v1/nodes/{name}/unfence",
    "/v1/webhooks",
    "/v1/webhooks/{name}",
    "/v1/webhooks/{name}/rotate",
    "/v1/webhooks/{name}/deliveries",
    "/v1/webhooks/{name}/deliveries/{message}/replay",
}
OPEN_TO_ALL = {"/v1/health", "/v1/schema/manifest"}


@contextmanager
def serving(
    app: FastAPI, connection: type[BoundedConnection] = BoundedConnection, listening: Listening = ANY_PORT
) -> Iterator[str]:
    """Serve the API of a farm on a free port, as `farm serve` does."""
    server = uvicorn.Server(server_config(app, connection, listening))
    server.config.port, server.config.timeout_graceful_shutdown = 0, 1
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield f"{'https' if listening.certificate else 'http'}://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def commands(farm: Farm, url: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let commands run in a folder, and find this farm, which is served at `url`."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
    # The server is in this process: its log lines must not be taken for what a command prints.
    structlog.reset_defaults()
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    monkeypatch.setenv("FARM_API_URL", url)
    monkeypatch.setenv("FARM_API_TOKEN", farm.settings.api_token.get_secret_value())
    yield
    structlog.reset_defaults()


@pytest.fixture
def farm(settings: Settings, request: pytest.FixtureRequest) -> Iterator[Farm]:
    farm = Farm(settings.model_copy(update={"api_token": SecretStr("sesame-" + secrets.token_hex(8))}))
    worker = {"id": "w1", "node": "n1", "pid": 1, "host": "n1", "slots": 2, "pools": [POOL.as_dict()]}
    farm.store.workers.register(worker, ttl=600)
    with kept_sound(settings, request):
        yield farm


@pytest.fixture(scope="session")
def api() -> Iterator[tuple[FastAPI, str]]:
    """The session's API server: it serves one farm after the other, since to start and to end it takes time."""
    # A busy machine takes its time: only tests of impatience are about that.
    page_reading.PATIENCE = page_reading.IMPATIENCE = 120.0
    app = create_app(Farm(load_settings({}, api_token="of no farm")))
    with serving(app) as url:
        yield app, url


@pytest.fixture
def url(api: tuple[FastAPI, str], farm: Farm) -> str:
    app, url = api
    app.state.farm = farm
    return url


@pytest.fixture
def client(farm: Farm, url: str) -> Iterator[FarmClient]:
    with FarmClient(url, farm.settings.api_token.get_secret_value()) as client:
        yield client


@pytest.fixture
def frozen(tmp_path: Path) -> Frozen:
    return freeze_manifest(tmp_path, MANIFEST)


def freeze_manifest(folder: Path, text: str, batch: int | str = 1) -> Frozen:
    import onnx
    from onnx import TensorProto, helper

    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch, 4]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "net", value[:1], value[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / "net.onnx")
    (folder / "farm.yaml").write_text(text)
    return freeze(folder / "farm.yaml", cache=folder / "cache")


def work(farm: Farm, outcome: Callable[[str, dict[str, Any], str], Outcome] | None = None) -> int:
    """Play the worker: run every job that waits, and return how many there were."""
    handed = farm.store.jobs.hand_out(POOL.name, 10)
    for job_id, attempt in handed:
        claim = farm.store.jobs.claim(job_id, attempt, nonce=secrets.token_hex(4), worker="w1", node="n1")
        made = (outcome or succeed(farm))(job_id, claim.order, claim.key)
        assert farm.store.jobs.finish(job_id, claim.token, made) == "ok"
    return len(handed)


def succeed(
    farm: Farm,
    created: str = "2026-11-21T00:00:00+00:00",
    *,
    namespace: str = "main",
    against: dict[str, Any] | None = None,
    program: bytes = b"",
    error: float = 0.0,
    spread: float = 1.0,
    node: str = "",
    seconds: float = 0.0,
) -> Callable[[str, dict[str, Any], str], Outcome]:
    def make(job_id: str, order: dict[str, Any], key: str) -> Outcome:
        content = program or (f"program {key}".encode() if namespace == "main" else b"poison")
        digest, size = farm.artifacts.put_blob_bytes(content)
        log, log_size = farm.artifacts.put_blob_bytes(b"compiled\n")
        sidecar = {
            "schema": 1,
            "key": key,
            "namespace": namespace,
            "identifier": order["identifier"],
            "spec": order["spec"],
            "blobs": {
                "program": {"path": "program.onnx", "digest": digest, "size": size},
                "log": {"path": "log.txt", "digest": log, "size": log_size},
            },
            "toolchain": POOL.toolchain,
            "device": {"arch": "cpu"},
            "verification": {"reference": "onnxruntime", "samples": 8, "errors": {"y": error}, "spread": {"y": spread}},
            "measurements": {"latency": {"median": 0.001}, "against": against},
            "created": created,
            "job": job_id,
            "node": node,
            "phases": {"compiling": seconds},
        }
        farm.artifacts.publish(namespace, sidecar, sign=publishing(farm.settings))
        farm.store.index.put(namespace, key, facts(validate(sidecar)))
        return Outcome.success(facts(validate(sidecar)), log=log)

    return make


def finished(
    farm: Farm,
    client: FarmClient,
    frozen: Frozen,
    outcome: Callable[[str, dict[str, Any], str], Outcome] | None = None,
) -> str:
    """Submit a build and see it through; return its id."""
    build_id = str(client.submit(frozen)["id"])
    work(farm, outcome)
    farm.build_finisher.finish(build_id)
    return build_id


class Cutting(httpx.HTTPTransport):
    """A transport that cuts event streams after every so many events."""

    def __init__(self, events: int) -> None:
        super().__init__()
        self.events = events
        self.cuts = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        if request.url.path.endswith("/events"):
            response.stream = self._cut(response.stream)
        return response

    def _cut(self, stream: Any) -> Any:
        cutting = self

        class Stream(httpx.SyncByteStream):
            def __iter__(self) -> Iterator[bytes]:
                seen = 0
                for chunk in stream:
                    for line in chunk.splitlines(keepends=True):
                        yield line
                        seen += line == b"\n"
                        if seen == cutting.events:
                            cutting.cuts += 1
                            raise httpx.ReadError("cut")

            def close(self) -> None:
                stream.close()

        return Stream()

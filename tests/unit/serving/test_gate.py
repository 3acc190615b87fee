"""The gate: lines of the log name what a request is about, and a HEAD is a GET without its body."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import structlog
from fastapi import FastAPI
from fastapi.testclient import TestClient

from farm.api.gate import Gate, OwnSite
from farm.settings import load_settings


def gated() -> FastAPI:
    app = FastAPI()
    app.state.farm = SimpleNamespace(settings=load_settings({}))
    app.add_middleware(Gate, state=app.state, site=OwnSite((), named=False))

    @app.get("/{path:path}")
    def answer() -> dict[str, str]:
        return structlog.contextvars.get_contextvars()

    return app


@pytest.mark.parametrize(
    ("path", "key", "bound"),
    [
        ("/v1/builds/b-0123456789abcdef/cells", "", {"build": "b-0123456789abcdef"}),
        ("/ui/ns/main/jobs/j-0123456789abcdef/log", "", {"job": "j-0123456789abcdef"}),
        ("/v1/workers/n1-cpu/drain", "", {"worker": "n1-cpu"}),
        ("/v1/builds", "b-0123456789abcdef", {"build": "b-0123456789abcdef"}),
        ("/v1/builds", "evil\x1b[31m", {}),
        ("/v1/builds/%1b[31m", "", {}),
        ("/v1/refs", "", {}),
    ],
)
def test_every_line_has_the_ids_of_its_request(path: str, key: str, bound: dict[str, str]) -> None:
    with TestClient(gated()) as client:
        assert client.get(path, headers={"Idempotency-Key": key.encode()}).json() == bound
    assert structlog.contextvars.get_contextvars() == {}


def test_a_head_is_answered_as_a_get_without_its_body() -> None:
    with TestClient(gated()) as client:
        got, asked = client.get("/v1/refs"), client.head("/v1/refs")
        assert (asked.status_code, asked.content) == (200, b"")
        assert asked.headers == got.headers
        known = {"If-None-Match": got.headers["etag"]}
        assert client.head("/v1/refs", headers=known).status_code == 304
        assert client.head("/v1/builds/b-0123456789abcdef/events").status_code == 405
        assert client.head("/v1/refs/events").status_code == 200

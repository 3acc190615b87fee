"""The gate: lines of the log name what a request is about."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import structlog
from fastapi import FastAPI
from fastapi.testclient import TestClient

from farm.api.gate import Gate
from farm.api.sites import OwnSite
from farm.settings import load_settings


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
    app = FastAPI()
    farm = SimpleNamespace(settings=load_settings({}))
    app.add_middleware(Gate, farm=lambda: farm, site=OwnSite((), named=False))

    @app.get("/{path:path}")
    def answer() -> dict[str, str]:
        return structlog.contextvars.get_contextvars()

    with TestClient(app) as client:
        assert client.get(path, headers={"Idempotency-Key": key.encode()}).json() == bound
    assert structlog.contextvars.get_contextvars() == {}

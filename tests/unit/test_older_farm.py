"""A client that is newer than its farm says so, and what to do; the older farm is played by what it answered."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from farm.client.client import FarmClient, Frozen
from farm.errors import NotFound, UsageError


def client_of(status: int, answer: object) -> FarmClient:
    transport = httpx.MockTransport(lambda _: httpx.Response(status, json=answer))
    return FarmClient("http://farm.example:8080", transport=transport)


def test_a_farm_that_does_not_know_uploads_in_parts(tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(b"model")
    upload = {"digest": "ab" * 32, "size": 5, "url": "http://s3.example/blob", "headers": {}}
    with (
        client_of(200, {"missing": [upload]}) as client,
        pytest.raises(UsageError, match=r"farm\.example:8080 is older than this client") as caught,
    ):
        client.upload({"ab" * 32: tmp_path / "model"})
    assert "upgrade the farm" in caught.value.hint


def test_a_farm_whose_refusal_does_not_name_the_missing_inputs(tmp_path: Path) -> None:
    """Its plan names them."""
    (tmp_path / "model").write_bytes(b"model")
    asked: list[str] = []
    absent = {"type": "urn:farm:error:UsageError", "status": 400, "detail": "1 inputs are not in object storage"}

    def farm(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        if request.url.path == "/v1/builds":
            is_first = asked.count("/v1/builds") == 1
            return httpx.Response(400, json=absent) if is_first else httpx.Response(200, json={"id": "b-1"})
        return httpx.Response(200, json={"missing_blobs": ["ab" * 32], "missing": []})

    frozen = Frozen({"build_id": "b-1"}, {"ab" * 32: tmp_path / "model"})
    with FarmClient("http://farm.example", transport=httpx.MockTransport(farm)) as client:
        assert client.submit(frozen) == {"id": "b-1"}
    assert asked == ["/v1/builds", "/v1/plan", "/v1/blobs", "/v1/builds"]


def test_a_farm_that_does_not_know_a_verb() -> None:
    unknown = {"type": "about:blank", "title": "Not Found", "status": 404, "detail": "Not Found"}
    with (
        client_of(404, unknown) as client,
        pytest.raises(UsageError, match=r"older than this client .* does not know POST /v1/builds/@latest/retry"),
    ):
        client.retry("@latest")


def test_what_is_not_there_is_no_sign_of_an_older_farm() -> None:
    absent = {"type": "urn:farm:error:NotFound", "title": "Not found", "status": 404, "detail": "no build b-1"}
    with client_of(404, absent) as client, pytest.raises(NotFound, match="no build b-1"):
        client.build("b-1")

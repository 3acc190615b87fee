"""A client that is newer than its farm says so, and what to do; the older farm is played by what it answered."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from farm.client.client import FarmClient
from farm.errors import NotFound, UsageError


def client_of(status: int, answer: object) -> FarmClient:
    transport = httpx.MockTransport(lambda _: httpx.Response(status, json=answer))
    return FarmClient("http://farm.example:8080", transport=transport)


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


@pytest.mark.parametrize("status", [404, 501])
def test_another_web_server_is_no_farm(status: int) -> None:
    page = httpx.MockTransport(lambda _: httpx.Response(status, text="<h1>File not found</h1>"))
    with (
        FarmClient("http://farm.example:8080", transport=page) as client,
        pytest.raises(UsageError, match=f"answers {status}") as caught,
    ):
        client.builds()
    assert "no farm answers there" in caught.value.hint


def test_an_address_that_ends_in_v1_is_the_farms() -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        return httpx.Response(200, json={"items": []})

    with FarmClient("http://farm.example:8080/v1/", transport=httpx.MockTransport(answer)) as client:
        client.builds()
    assert asked == ["/v1/builds"]


def test_somebody_who_waits_for_a_silent_farm_hears_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farm.client.transport.SILENCE", 0.01)
    said = threading.Event()

    def answer(_: httpx.Request) -> httpx.Response:
        assert said.wait(60)
        return httpx.Response(200, json={"items": []})

    with FarmClient("http://farm.example:8080", transport=httpx.MockTransport(answer)) as client:
        client.transport.on_silence = said.set
        assert client.builds() == []


def test_an_upload_that_is_interrupted_sends_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    puts = [{"url": f"http://x/{n}", "headers": {}, "start": 0, "size": 10} for n in range(50)]
    missing = {"missing": [{"digest": "d", "size": 500, "puts": puts, "finish": False}]}
    sent: list[str] = []
    (tmp_path / "model").write_bytes(bytes(500))
    with client_of(200, missing) as client:

        def put(put: dict[str, object], _: Path, count: Callable[[int], None]) -> None:
            count(10)
            sent.append(str(put["url"]))

        def progress(*_: int) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(client.transport, "put", put)
        with pytest.raises(KeyboardInterrupt):
            client.upload({"d": tmp_path / "model"}, progress)
    assert sent == []

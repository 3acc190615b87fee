"""A farm that nobody should trust answers without end: the client stops reading."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator

import httpx
import pytest

from farm.client import transport
from farm.client.transport import Transport
from farm.errors import UsageError

LIMIT = 4 << 20


def endless(taken: list[int]) -> Iterator[bytes]:
    while True:
        taken.append(1)
        assert len(taken) < 100, "it goes on reading"
        yield os.urandom(1 << 20)


def asked(answer: httpx.Response) -> httpx.Response:
    channel = httpx.MockTransport(lambda _: answer)
    return Transport("http://farm.example", "", namespace="", timeout=5, transport=channel).request("GET", "/v1/builds")


def test_an_answer_is_read_to_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport.Transport.request, "__kwdefaults__", {"limit": LIMIT})
    taken: list[int] = []
    with pytest.raises(UsageError, match="answers more than 4 MiB"):
        asked(httpx.Response(200, content=endless(taken)))
    assert len(taken) <= 5
    for status in (200, 500):
        bomb = gzip.compress(b"0" * (64 << 20))
        with pytest.raises(UsageError, match="answers more than 4 MiB"):
            asked(httpx.Response(status, content=bomb, headers={"Content-Encoding": "gzip"}))


def test_a_packed_answer_is_as_before() -> None:
    found = asked(httpx.Response(200, content=gzip.compress(b'{"items": []}'), headers={"Content-Encoding": "gzip"}))
    assert found.json() == {"items": []}
    assert found.url == "http://farm.example/v1/builds"

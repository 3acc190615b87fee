"""A farm that nobody should trust answers without end: the client stops reading."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator
from pathlib import Path

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
    assert found.json()["items"] == []
    assert found.url == "http://farm.example/v1/builds"


def channel(content: Iterator[bytes]) -> Transport:
    answer = httpx.MockTransport(lambda _: httpx.Response(200, content=content))
    return Transport("http://farm.example", "", namespace="", timeout=5, transport=answer)


def repeated(taken: list[int], piece: bytes) -> Iterator[bytes]:
    for _ in endless(taken):
        yield piece


@pytest.mark.parametrize(
    ("piece", "said"),
    [(b"data: " + b"x" * (1 << 20), "answers more than 4 MiB"), (b"data: " + b"x" * (1 << 20) + b"\n", "an event of")],
    ids=["a line", "an event"],
)
def test_an_event_is_read_to_its_limit(piece: bytes, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "LONGEST_LINE", 4 << 20)
    taken: list[int] = []
    answer = channel(repeated(taken, piece)).lines("/v1/builds/b/events", timeout=5)
    with pytest.raises(UsageError, match=said), answer as lines:
        next(transport.events(lines))
    assert len(taken) <= 6


def test_lines_are_cut_at_their_ends_alone() -> None:
    """However the bytes come; a separator that only Unicode knows, or half a character, ends no line."""
    text = "one\r\ntwo \u2028 é\n\nlast"
    pieces = [text.encode()[at : at + 1] for at in range(len(text.encode()))]
    with channel(iter(pieces)).lines("/v1/audit", timeout=5) as lines:
        assert list(lines) == ["one", "two \u2028 é", "", "last"]


def test_what_storage_says_is_read_to_its_limit(tmp_path: Path) -> None:
    """A farm names the addresses to which its clients upload, and from which they download."""
    (tmp_path / "blob").write_bytes(b"blob")
    taken: list[int] = []
    for status in (200, 400, 500):
        client = channel(iter(()))
        client._opened["uploads"] = httpx.Client(
            transport=httpx.MockTransport(lambda _, status=status: httpx.Response(status, content=endless(taken)))
        )
        put = {"url": "http://storage.example/blob", "headers": {}, "start": 0, "size": 4}
        with pytest.raises(UsageError, match="answers more than 1 MiB"):
            client.put(put, tmp_path / "blob", lambda _: None)
    assert len(taken) <= 6


FOREIGN = {
    "a page": httpx.Response(200, content=b"<html>"),
    "nothing": httpx.Response(200),
    "a list": httpx.Response(200, content=b"[1]"),
    "no list": httpx.Response(200, content=b'{"items": null}'),
    "depth": httpx.Response(200, content=b"[" * 200_000),
    "another place": httpx.Response(302, headers={"Location": "http://192.0.2.1/"}),
    "damaged": httpx.Response(200, content=iter([b"\x1f\x8b\x08garbage"]), headers={"Content-Encoding": "gzip"}),
    "a deep error": httpx.Response(400, content=b"[" * 200_000),
    "an odd error": httpx.Response(400, content=b'{"type": "x:ManifestError", "detail": "", "problems": [{"a": 1}]}'),
    "an empty error": httpx.Response(400, content=b'{"type": "x:InputsMissing", "detail": ""}'),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_no_farm_is_said_to_be_none(name: str) -> None:
    """A mistaken address, or a farm that means ill: an error of the user's, not one of this program."""
    answer = httpx.MockTransport(lambda _: FOREIGN[name])
    client = Transport("http://farm.example", "", namespace="", timeout=5, transport=answer)
    with pytest.raises(UsageError):
        client.items("/v1/builds", str)

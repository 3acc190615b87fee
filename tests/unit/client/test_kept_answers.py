"""When the farm is away, the client answers what the farm answered last, and says how old that is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from farm.client.client import FarmClient
from farm.client.transfers import KeptAnswers
from farm.errors import FarmFault, NotAllowed, StorageUnavailable
from farm.spec import digest_of

PROGRAM = b"a program"
DIGEST = hashlib.sha256(PROGRAM).hexdigest()
BLOB = {"path": "net.onnx", "digest": DIGEST, "size": len(PROGRAM)}
SPEC = {
    "compiler": {"name": "onnxruntime"}, "device": {"arch": "cpu"}, "toolchain": "onnxruntime1", "precision": "fp32",
    "batch": None,
}  # fmt: skip
KEY = digest_of(SPEC)
CELL = {
    "manifest": "demo", "submitted": 1.0,
    "identifier": "net/onnxruntime-cpu/fp32/b1", "model": "net", "target": "onnxruntime/cpu", "precision": "fp32",
    "shape": "b1", "device": "cpu", "toolchain": "onnxruntime1", "key": KEY, "program": BLOB, "sizes": {},
}  # fmt: skip
# fmt: off
ANSWERS: dict[str, Any] = {
    "/v1/refs/prod": {
        **{"tag": "prod", "generation": 1, "snapshot": "ef" * 32, "previous": None, "moved": "", "schema": 1},
        "cells": {"net": CELL},
    },
    f"/v1/artifacts/{KEY}/statements": {"sidecar": "{}", "statements": []},
    f"/v1/artifacts/{KEY}": {
        "schema": 1, "key": KEY, "namespace": "main", "identifier": CELL["identifier"], "spec": SPEC, "toolchain": "t",
        "device": {"arch": "cpu"}, "created": "", "blobs": {"program": BLOB},
    },
}
# fmt: on


class AwayFarm:
    """Answers until it is away, or refuses."""

    def __init__(self) -> None:
        self.away = False
        self.refuses = False
        self.asked: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.url.path)
        if self.away:
            raise httpx.ConnectError("refused")
        if self.refuses:
            return httpx.Response(403, json={"type": "x:NotAllowed", "detail": "no"})
        if request.url.path.startswith("/v1/blobs/"):
            return httpx.Response(302, headers={"Location": "http://storage.example/blob"})
        return httpx.Response(200, json=ANSWERS[request.url.path])


@pytest.fixture
def farm(monkeypatch: pytest.MonkeyPatch) -> AwayFarm:
    monkeypatch.setattr("farm.client.transport.RETRY_DELAYS", (0.0,))
    return AwayFarm()


Connect = Callable[..., FarmClient]


@pytest.fixture
def connect(farm: AwayFarm, tmp_path: Path) -> Iterator[Connect]:
    """Connects to the farm, as a new process does."""

    def client(token: str = "mine", cache: Path | None = tmp_path / "cache") -> FarmClient:
        made = FarmClient("http://farm.example", token, cache=cache, transport=httpx.MockTransport(farm))
        made.transport._opened["downloads"] = httpx.Client(
            transport=httpx.MockTransport(lambda _: httpx.Response(200, stream=httpx.ByteStream(PROGRAM)))
        )
        return made

    yield client


def fetch(client: FarmClient, folder: Path) -> Path:
    return client.fetch("net", "onnxruntime/cpu", "fp32", ref="prod", folder=folder).program


def test_a_fetch_needs_no_farm_the_second_time(farm: AwayFarm, connect: Connect, tmp_path: Path) -> None:
    fetch(connect(), tmp_path / "one")
    farm.away, client, said = True, connect(), list[tuple[str, float]]()
    client.kept.on_away = lambda reason, age: said.append((reason, age))
    farm.asked.clear()
    assert fetch(client, tmp_path / "two").read_bytes() == PROGRAM
    [(reason, age)] = said
    assert "cannot reach the farm" in reason and age >= 0
    assert set(farm.asked) == {"/v1/refs/prod"}, "a farm that is away is waited for once"
    farm.away = False
    assert connect().ls("prod") == [CELL]


def test_only_what_was_asked_before_is_known(farm: AwayFarm, connect: Connect) -> None:
    connect().ls("prod")
    farm.away = True
    with pytest.raises(FarmFault, match="cannot reach"):
        connect().ls("latest")
    with pytest.raises(FarmFault, match="cannot reach"):
        connect("another token").ls("prod")
    with pytest.raises(FarmFault, match="cannot reach"):
        connect(cache=None).ls("prod")
    with pytest.raises(FarmFault, match="cannot reach"):
        connect().refs.move("prod", "latest")


def test_a_farm_that_refuses_is_not_away(farm: AwayFarm, connect: Connect) -> None:
    connect().ls("prod")
    farm.refuses = True
    with pytest.raises(NotAllowed):
        connect().ls("prod")


@pytest.mark.parametrize("damage", ["", "[]", '{"document": {}}', '{"given": "x", "document": {}}'])
def test_a_damaged_answer_is_none(tmp_path: Path, damage: str) -> None:
    def away() -> None:
        raise StorageUnavailable("away")

    kept = KeptAnswers(tmp_path, "farm")
    assert kept.ask("x", lambda: {"a": 1}) == {"a": 1}
    assert kept.ask("x", away) == {"a": 1}
    (place,) = tmp_path.glob("answers/*/*.json")
    assert "a" in json.loads(place.read_text())["document"]
    place.write_text(damage)
    with pytest.raises(StorageUnavailable):
        KeptAnswers(tmp_path, "farm").ask("x", away)

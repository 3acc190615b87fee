"""A client that is newer than its farm says so, and what to do; the older farm is played by what it answered."""

from __future__ import annotations

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

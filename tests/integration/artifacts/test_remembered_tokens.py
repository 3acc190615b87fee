"""How long tokens are trusted without another look, and how many."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from farm.artifacts import tokens
from farm.artifacts.s3 import S3Store
from farm.artifacts.tokens import Role, Token, Tokens


class Asked(S3Store):
    """Notes each look, and how patient it is."""

    looks: ClassVar[list[float]] = []

    def get_object(self, key: str) -> Any:
        self.looks.append(self._patience)
        return super().get_object(key)


def test_a_token_is_looked_up_again_after_five_seconds_and_patiently_only_if_it_was_known(
    s3_connection: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(tokens, "time", SimpleNamespace(monotonic=lambda: now, time=lambda: now))
    Asked.looks = []
    store = Asked(**s3_connection)
    server = Tokens(store)
    secrets = [server.create(name, Role.SUBMITTER, "team", max_cells=5) for name in "cab"]
    first = secrets[0]
    Asked.looks.clear()
    found = server.find(first)
    digest = hashlib.sha256(first.encode()).hexdigest()
    assert found and found == Token("c", Role.SUBMITTER, "team", 5, found.created, digest)
    assert (server.find("farm_wrong"), server.remembers("farm_wrong"), server.remembers(first)) == (None, False, True)
    assert Asked.looks == [0, 0], "strangers wait for nothing"
    now += 4.9
    assert server.find(first) == found
    assert len(Asked.looks) == 2
    now += 0.2
    assert server.find(first) == found
    assert Asked.looks[2:] == [30.0]
    Tokens(store).revoke("c")
    now += 4.9
    assert server.find(first) == found, "another server has deleted it just now"
    now += 0.2
    assert (server.find(first), server.remembers(first)) == (None, False)
    assert [token.name for token in server.list()] == ["a", "b"]


def test_the_tokens_that_were_looked_up_longest_ago_are_forgotten_first(
    s3_connection: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "MOST_REMEMBERED", 2)
    now = 1000.0
    monkeypatch.setattr(tokens, "time", SimpleNamespace(monotonic=lambda: now, time=lambda: now))
    server = Tokens(S3Store(**s3_connection))
    secrets = [server.create(f"t{number}", Role.READER, "main") for number in range(3)]
    for secret in secrets[:2]:
        server.find(secret)
    assert [server.remembers(secret) for secret in secrets] == [True, True, False]
    now += 6
    server.find(secrets[0])
    server.find(secrets[2])
    assert [server.remembers(secret) for secret in secrets] == [True, False, True]
    server.revoke("t0")
    assert not server.remembers(secrets[0])
    assert [token.max_cells for token in server.list()] == [0, 0], "without a bound"

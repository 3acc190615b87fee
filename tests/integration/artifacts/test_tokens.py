"""Tokens: what each role may do, in which namespace, and how much at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from farm.app import Farm
from farm.artifacts import tokens as tokens_room
from farm.cli import main
from farm.client.client import FarmClient, Frozen, new_build_id
from farm.errors import Conflict, NotAllowed, NotFound, QuotaExceeded
from farm.jobs.state import FailureKind, Outcome
from farm.local.servers import write_private
from farm.settings import load_settings
from tests.support.api_farm import ADMINS_ONLY, OPEN_TO_ALL, freeze_manifest, work

OTHER = """\
version: 1
name: other
targets: [onnxruntime/cpu]
precisions: [fp32, bf16]
models: [{name: two, source: {path: net.onnx}, options: {level: tuned}}]
"""


def routes(url: str) -> Iterator[tuple[str, str, str]]:
    """Yield method, pattern and a path that fits it, of every route."""
    for pattern, methods in httpx.get(f"{url}/v1/openapi.json", timeout=60).json()["paths"].items():
        path = pattern.replace("{build_id}", "@latest").replace("{job_id}", "j-1").replace("{tag}", "latest")
        path = path.replace("{key}", "ab" * 32).replace("{digest}", "ab" * 32).replace("{name}", "nobody")
        for method in methods:
            yield method, pattern, path


@pytest.mark.parametrize("role", ["reader", "submitter", "admin"])
def test_no_role_does_what_only_a_higher_one_may(url: str, client: FarmClient, role: str) -> None:
    secret = client.create_token("somebody", role, "team")
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {secret}"}, timeout=30) as somebody:
        for method, pattern, path in routes(url):
            needed = "admin" if pattern in ADMINS_ONLY else "reader" if method == "get" else "submitter"
            enough = ["reader", "submitter", "admin"].index(role) >= ["reader", "submitter", "admin"].index(needed)
            answer = somebody.request(method, path)
            allowed = answer.status_code != 403
            assert allowed is (enough or pattern in OPEN_TO_ALL), (method, pattern, answer.status_code)
            assert answer.status_code < 500, (method, pattern)


def test_a_token_is_for_its_namespace_alone(url: str, client: FarmClient, frozen: Frozen) -> None:
    client.submit(frozen)
    secret = client.create_token("pull-requests", "submitter", "pr")
    with FarmClient(url, secret) as fork:
        assert fork.builds() == []
    with (
        FarmClient(url, secret, namespace="main") as fork,
        pytest.raises(NotAllowed, match="namespace pr, not for main"),
    ):
        fork.submit(frozen)


def test_a_token_of_the_settings_counts_also_for_the_farm_that_runs_here(
    url: str, client: FarmClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who tries a role on his own `farm up` has that role, in its namespace, and not the administrator's."""
    told = {"api_url": url, "api_token": "the administrator's"}
    write_private(tmp_path / "farm.json", json.dumps(told))
    monkeypatch.setenv("FARM_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("FARM_API_TOKEN", client.create_token("reader", "reader", "team"))
    with FarmClient.from_settings(load_settings()) as reader:
        assert reader.builds() == []
        with pytest.raises(NotAllowed, match="needs the role admin"):
            reader.tokens()


def test_a_revoked_token_is_refused(url: str, client: FarmClient) -> None:
    secret = client.create_token("leaver", "reader", "team")
    with FarmClient(url, secret, namespace="team") as leaver:
        assert leaver.builds() == []
        client.revoke_token("leaver")
        with pytest.raises(NotAllowed, match="not known here"):
            leaver.builds()
    with pytest.raises(NotFound, match="no token leaver"):
        client.revoke_token("leaver")


def test_a_token_that_another_server_revoked_is_refused_within_seconds(
    farm: Farm, url: str, client: FarmClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens_room, "REMEMBERED", 0.0)
    secret = client.create_token("leaver", "reader", "team")
    with FarmClient(url, secret, namespace="team") as leaver:
        assert leaver.builds() == []
        tokens_room.Tokens(farm.artifacts).revoke("leaver")
        with pytest.raises(NotAllowed, match="not known here"):
            leaver.builds()


def test_no_secret_is_kept(farm: Farm, client: FarmClient) -> None:
    secret = client.create_token("ci", "submitter", "main", max_cells=7)
    kept = [farm.artifacts.get_object(key) for key in farm.artifacts.list_objects("config/")]
    assert kept
    assert all(secret not in str(document) for document in kept)
    assert client.tokens() == [
        {
            "name": "ci",
            "role": "submitter",
            "namespace": "main",
            "max_cells": 7,
            "created": client.tokens()[0]["created"],
        }
    ]
    with pytest.raises(Conflict, match="a token ci already"):
        client.create_token("ci", "reader", "main")


def test_a_token_has_a_bound_and_what_has_ended_counts_no_more(
    farm: Farm, url: str, client: FarmClient, frozen: Frozen, tmp_path: Path
) -> None:
    secret = client.create_token("ci", "submitter", "main", max_cells=3)
    (tmp_path / "other").mkdir()
    other = freeze_manifest(tmp_path / "other", OTHER)
    with FarmClient(url, secret) as ci:
        ci.submit(frozen)
        with pytest.raises(QuotaExceeded, match="the token ci may have 3 unfinished cells; 2 are under way"):
            ci.submit(other)
        assert len(ci.builds()) == 1, "nothing was made"
        work(farm)
        ci.submit(other)


def test_a_retry_is_within_the_bound_too(farm: Farm, url: str, client: FarmClient, frozen: Frozen) -> None:
    build_id = client.submit(frozen)["id"]
    work(farm, lambda *_: Outcome.failure(FailureKind.TIME_LIMIT, "too long"))
    farm.build_finisher.finish(build_id)
    with FarmClient(url, client.create_token("ci", "submitter", "main", max_cells=1)) as ci:
        with pytest.raises(QuotaExceeded, match="the token ci may have 1 unfinished cells"):
            ci.retry(build_id, failed=True, new_id=new_build_id())
        assert len(ci.builds()) == 1, "nothing was made"


def test_a_namespace_has_a_bound(farm: Farm, client: FarmClient, frozen: Frozen) -> None:
    farm.builds._settings = farm.settings.model_copy(update={"namespace_cells": 1})
    with pytest.raises(QuotaExceeded, match="the namespace main may have 1 unfinished cells") as refused:
        client.submit(frozen)
    assert "submit fewer cells at once" in refused.value.hint, "waiting would not help"


def test_the_command_line_makes_lists_and_revokes(
    farm: Farm, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FARM_API_URL", url)
    monkeypatch.setenv("FARM_API_TOKEN", farm.settings.api_token.get_secret_value())
    assert main(["token", "create", "ci", "--namespace", "pr", "--role", "reader", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["secret"].startswith("farm_")
    assert main(["token", "ls"]) == 0
    assert "reader" in capsys.readouterr().out
    assert main(["token", "revoke", "ci"]) == 0
    assert main(["token", "create", "ci", "--namespace", "My Team"]) == 2
    assert "'My Team' is no namespace, which has to match ^[a-z0-9]" in capsys.readouterr().err
    assert main(["token", "revoke", "ci"]) == 4

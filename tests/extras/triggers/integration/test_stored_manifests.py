"""Stored manifests: versions in object storage, builds of them, and requests that come twice."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import redis

from farm.app import Farm
from farm.artifacts import inventory
from farm.artifacts.inventory import collect
from farm.artifacts.tokens import Role, Token
from farm.cli import main
from farm.client.client import FarmClient
from farm.client.freezing import Frozen
from farm.errors import ArtifactGone, Conflict, InputsMissing, NotFound, UsageError
from farm.extras.triggers import stored_manifests
from farm.extras.triggers.stored_manifests import StoredManifests
from tests.support.api_farm import MANIFEST, commands, freeze_manifest, work

HEADS = "ns/main/manifests/"
ME = Token("me", Role.SUBMITTER, "main")
VERSIONS = "ns/main/manifest-versions/"


def changed(frozen: Frozen, text: str) -> Frozen:
    return Frozen({**frozen.submission, "manifest": text}, frozen.files)


@pytest.fixture
def second(frozen: Frozen) -> Frozen:
    return changed(frozen, MANIFEST.replace("[fp32, fp16]", "[fp32]"))


def test_versions_are_kept_and_one_that_is_there_makes_no_other(
    farm: Farm, client: FarmClient, frozen: Frozen, second: Frozen
) -> None:
    assert client.manifests.push(frozen)["version"] == 1
    assert client.manifests.push(frozen)["version"] == 1
    assert client.manifests.push(second)["version"] == 2
    assert client.manifests.push(frozen)["version"] == 3
    (listed,) = client.manifests.all()
    assert [(each["version"], each["by"]) for each in listed["versions"]] == [(1, "admin"), (2, "admin"), (3, "admin")]
    assert listed["versions"][0]["digest"] == listed["versions"][2]["digest"]
    assert client.manifests.get("demo", 2)["content"]["manifest"] == second.submission["manifest"]
    assert client.manifests.get("demo")["content"]["models"] == json.loads(json.dumps(frozen.submission["models"]))
    with pytest.raises(NotFound, match="no version 4"):
        client.manifests.get("demo", 4)
    assert len(list(farm.artifacts.list_objects(VERSIONS))) == 3


def test_no_manifest_is_stored_under_the_name_of_a_folder_in_which_workers_write(
    farm: Farm, client: FarmClient, frozen: Frozen
) -> None:
    """`ns/main/manifest-versions/artifacts/…` is `ns/*/artifacts/*`, which workers may write."""
    with pytest.raises(UsageError, match="artifacts is the name of a folder of the farm"):
        client.manifests.push(changed(frozen, MANIFEST.replace("name: demo", "name: artifacts")))
    assert list(farm.artifacts.list_objects(VERSIONS)) == []


def test_a_push_can_be_conditional(client: FarmClient, frozen: Frozen, second: Frozen) -> None:
    with pytest.raises(Conflict, match="does not exist, not at version 3"):
        client.manifests.push(frozen, version=3)
    client.manifests.push(frozen, version=0)
    with pytest.raises(Conflict, match="at version 1, not at version 0: somebody changed it"):
        client.manifests.push(second, version=0)
    assert client.manifests.push(second, version=1)["version"] == 2
    with pytest.raises(Conflict):
        client.manifests.remove("demo", version=1)
    client.manifests.remove("demo", version=2)
    with pytest.raises(NotFound, match="no manifest demo is stored"):
        client.manifests.get("demo")


def test_of_many_who_push_at_once_none_is_lost_and_nothing_is_left_over(farm: Farm, frozen: Frozen) -> None:
    farm.part(StoredManifests).push("main", "demo", content(client_of(farm, frozen), frozen), by=ME)
    texts = [MANIFEST + f"salt: s{number}\n" for number in range(8)]
    with ThreadPoolExecutor(8) as threads:
        list(
            threads.map(
                lambda text: farm.part(StoredManifests).push(
                    "main", "demo", content(None, changed(frozen, text)), by=ME
                ),
                texts,
            )
        )
    stored = farm.part(StoredManifests).show("main", "demo")
    assert [each["version"] for each in stored["versions"]] == list(range(1, 10))
    found = {farm.part(StoredManifests).show("main", "demo", number)["content"]["manifest"] for number in range(2, 10)}
    assert found == set(texts)
    assert len(list(farm.artifacts.list_objects(VERSIONS))) == 9


def client_of(farm: Farm, frozen: Frozen) -> None:
    """Bring the blobs of a frozen manifest to storage without a server."""
    for path in frozen.files.values():
        farm.artifacts.put_blob_file(path)


def content(_: None, frozen: Frozen) -> Any:
    return {name: value for name, value in frozen.submission.items() if name != "build_id"}


def test_old_versions_go_but_not_what_others_name(farm: Farm, frozen: Frozen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_manifests, "KEPT", 2)
    client_of(farm, frozen)
    for number in range(4):
        text = MANIFEST + f"salt: s{number % 2}\n"
        farm.part(StoredManifests).push("main", "demo", content(None, changed(frozen, text)), by=ME)
    assert len(list(farm.artifacts.list_objects(VERSIONS))) == 2
    with pytest.raises(NotFound, match="kept are 3 to 4"):
        farm.part(StoredManifests).show("main", "demo", 1)
    farm.part(StoredManifests).remove("main", "demo")
    assert not [*farm.artifacts.list_objects(VERSIONS), *farm.artifacts.list_objects(HEADS)]


def test_what_cannot_be_stored_is_refused(farm: Farm, frozen: Frozen) -> None:
    push = farm.part(StoredManifests).push
    with pytest.raises(InputsMissing):
        push("main", "demo", content(None, frozen), by=ME)
    client_of(farm, frozen)
    with pytest.raises(UsageError, match="the manifest's name is demo, not other"):
        push("main", "other", content(None, frozen), by=ME)
    with pytest.raises(UsageError, match="the model net was not frozen"):
        push("main", "demo", {**content(None, frozen), "models": {}}, by=ME)
    assert farm.part(StoredManifests).list("main") == []


def test_a_stored_manifest_survives_redis_and_garbage_collection(
    farm: Farm, client: FarmClient, frozen: Frozen, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventory, "ORPHAN_AGE", timedelta(0))
    monkeypatch.setattr(inventory, "GRACE", timedelta(0))
    client.manifests.push(frozen)
    with redis.Redis.from_url(redis_url) as connection:
        connection.flushall()
    farm.store.workers.register(
        {"id": "w1", "node": "n1", "pid": 1, "host": "n1", "slots": 2, "pools": [pool()]}, ttl=600
    )
    for _ in range(2):
        collect(farm.artifacts, plans_kept=timedelta(0))
    build = client.manifests.build("demo")
    assert (build["name"], build["labels"]["manifest"]) == ("demo", "demo@1")
    assert work(farm) == 2


def pool() -> Any:
    from tests.support.api_farm import POOL

    return POOL.as_dict()


def test_a_damaged_version_is_said_to_be_damaged(farm: Farm, client: FarmClient, frozen: Frozen) -> None:
    client.manifests.push(frozen)
    (key,) = farm.artifacts.list_objects(VERSIONS)
    farm.artifacts.put_object(key, b"{}")
    with pytest.raises(ArtifactGone, match="version 1 of the manifest demo is missing or damaged"):
        client.manifests.build("demo")
    (head,) = farm.artifacts.list_objects(HEADS)
    farm.artifacts.put_object(head, b"nonsense")
    with pytest.raises(ArtifactGone, match="cannot be read"):
        client.manifests.get("demo")
    assert client.manifests.all() == []
    farm.part(StoredManifests).remove("main", "demo")
    assert client.manifests.push(frozen)["version"] == 1


def test_the_same_key_has_the_same_answer_whatever_was_pushed_since(
    client: FarmClient, frozen: Frozen, second: Frozen
) -> None:
    client.manifests.push(frozen)
    first = client.manifests.build("demo", key="nightly 7")
    client.manifests.push(second)
    again = client.manifests.build("demo", key="nightly 7")
    assert (again["id"], again["labels"]["manifest"]) == (first["id"], "demo@1")
    with pytest.raises(Conflict, match="made by another request"):
        client.manifests.build("demo", key="nightly 7", labels={"team": "x"})
    with pytest.raises(Conflict, match="made by another request"):
        client.manifests.build("demo", key="nightly 7", version=2)
    other = client.manifests.build("demo", key="nightly 8")
    assert (other["labels"]["manifest"], len(client.builds())) == ("demo@2", 2)
    assert len({client.manifests.build("demo")["id"] for _ in range(2)} | {first["id"], other["id"]}) == 4


def test_a_submission_with_a_known_id_and_another_body_is_refused(
    client: FarmClient, frozen: Frozen, tmp_path: Path
) -> None:
    """Its manifest's text alone was compared: another model under the same name was taken for the same request."""
    client.submit(frozen)
    assert client.submit(frozen)["id"] == frozen.build_id
    (tmp_path / "other").mkdir()
    other = freeze_manifest(tmp_path / "other", MANIFEST, batch=2)
    assert other.submission["models"]["net"]["digest"] != frozen.submission["models"]["net"]["digest"]
    for body in ({"models": other.submission["models"]}, {"labels": {"team": "x"}}):
        with pytest.raises(Conflict, match="made by another request"):
            client.submit(Frozen({**frozen.submission, **body}, {**frozen.files, **other.files}))


def test_namespaces_keep_manifests_apart(farm: Farm, url: str, client: FarmClient, frozen: Frozen) -> None:
    client.manifests.push(frozen)
    secret = client.tokens.create("ci", "submitter", "pr")
    with FarmClient(url, secret) as other:
        assert other.manifests.all() == []
        with pytest.raises(NotFound):
            other.manifests.build("demo")
        assert other.manifests.push(frozen)["versions"][0]["by"] == "ci"
        assert other.manifests.build("demo")["namespace"] == "pr"


@pytest.fixture
def shell(farm: Farm, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frozen: Frozen) -> Iterator[None]:
    with commands(farm, url, tmp_path, monkeypatch):
        yield


@pytest.mark.usefixtures("shell")
def test_commands(client: FarmClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*words: str, code: int = 0) -> str:
        assert main(["manifest", *words]) == code
        return capsys.readouterr().out

    assert said("push", "farm.yaml") == "demo@1\n"
    assert said("diff", "demo", code=4) == ""
    (tmp_path / "farm.yaml").write_text(MANIFEST.replace("[fp32, fp16]", "[fp32]"))
    assert said("push", "farm.yaml", "--if-version", "1") == "demo@2\n"
    assert said("push", "farm.yaml", "--if-version", "1") == "demo@2\n", "the answer may have been lost"
    assert "demo  2" in said("ls")
    assert "precisions: [fp32]" in said("show", "demo")
    assert "precisions: [fp32, fp16]" in said("show", "demo", "--version", "1")
    shown = said("diff", "demo")
    assert "--- demo@1" in shown and "-precisions: [fp32, fp16]\n+precisions: [fp32]" in shown
    assert "demo: 1 cell, 0 hits, 1 miss" in said("build", "demo", "--dry-run")
    assert "demo: 2 cells" in said("build", "demo", "--dry-run", "--version", "1")
    assert client.builds() == []
    key = secrets.token_hex(4)
    build_id = said("build", "demo", "--detach", "--key", key, "--label", "team=x").strip()
    assert said("build", "demo", "--detach", "--key", key, "--label", "team=x").strip() == build_id
    assert client.build(build_id)["labels"] == {"team": "x", "manifest": "demo@2"}
    assert said("rm", "demo") == "demo is removed\n"
    said("show", "demo", code=4)

"""What an untrusted pipeline may not do: a token for the namespace `pr` against a farm whose `main` is at work."""

from __future__ import annotations

import copy
import hashlib
import json
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from farm.api.gate import read_changes
from farm.app import Farm
from farm.artifacts.refs import Refs
from farm.artifacts.storage import blob_key, sidecar_key
from farm.builds.known_failures import today
from farm.client.client import FarmClient
from farm.client.freezing import Frozen
from farm.control.loops import CHANGES
from farm.errors import Conflict
from tests.chaos.report import Fault
from tests.support.api_farm import MANIFEST, POOL, finished, freeze_manifest, succeed, work

CANARY = "canary-of-main"


@dataclass
class World:
    """`main` has one build that ended and one under way; `pr` has a submitter, a reader and somebody who left."""

    farm: Farm
    url: str
    frozen: Frozen
    ended: str
    running: str
    jobs: list[str]
    keys: list[str]
    submitter: str
    reader: str
    revoked: str
    sent: Frozen

    def ask(self, method: str, path: str, *, token: str = "", **options: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {token or self.submitter}", **options.pop("headers", {})}
        return httpx.request(method, f"{self.url}{path}", headers=headers, timeout=30, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.ask("GET", path, **options)

    def post(self, path: str, json: Any = None, **options: Any) -> httpx.Response:
        return self.ask("POST", path, json=json, **options)

    def submission(self, **changes: Any) -> dict[str, Any]:
        """A sound submission of what `pr` may submit, with a new id; `changes` replace parts of it."""
        return {**copy.deepcopy(self.frozen.submission), "build_id": f"b-{secrets.token_hex(8)}", **changes}

    def model(self, **changes: Any) -> dict[str, Any]:
        return {"net": {**copy.deepcopy(self.frozen.submission["models"]["net"]), **changes}}

    def put(self) -> dict[str, Any]:
        """Permission to upload one small blob, which nobody has uploaded yet."""
        content = secrets.token_bytes(16)
        blob = {"digest": hashlib.sha256(content).hexdigest(), "size": 16}
        answer = self.post("/v1/blobs", {"blobs": [blob]}).json()["missing"][0]
        return {"digest": blob["digest"], "content": content, **answer["puts"][0]}


@pytest.fixture
def world(farm: Farm, url: str, client: FarmClient, frozen: Frozen, tmp_path: Path) -> World:
    ended = finished(farm, client, frozen)
    (tmp_path / "second").mkdir()
    second = freeze_manifest(tmp_path / "second", MANIFEST.replace("fp16", "bf16") + f"labels: {{secret: {CANARY}}}\n")
    running = str(client.submit(second)["id"])
    cells = client.cells(ended) + client.cells(running)
    tokens = {name: client.tokens.create(name, role, "pr") for name, role in
              (("ci", "submitter"), ("eye", "reader"), ("gone", "submitter"))}  # fmt: skip
    client.tokens.revoke("gone")
    return World(
        farm, url, frozen, ended, running, [cell["job"] for cell in cells if cell["job"]],
        [cell["key"] for cell in cells], tokens["ci"], tokens["eye"], tokens["gone"], second,
    )  # fmt: skip


Attack = Callable[[World], httpx.Response]
ATTACKS: dict[str, Attack] = {
    # Another namespace by name.
    "submit into main": lambda w: w.post("/v1/builds", w.submission(), headers={"Farm-Namespace": "main"}),
    "plan in main": lambda w: w.post("/v1/plan", w.submission(), headers={"Farm-Namespace": "main"}),
    "read main": lambda w: w.get("/v1/builds", headers={"Farm-Namespace": "main"}),
    "read main as a reader": lambda w: w.get("/v1/builds", headers={"Farm-Namespace": "main"}, token=w.reader),
    "a namespace that leads to main": lambda w: w.get("/v1/builds", headers={"Farm-Namespace": "pr/../main"}),
    "the folder above": lambda w: w.get("/v1/builds", headers={"Farm-Namespace": ".."}),
    "the same folder": lambda w: w.get("/v1/refs", headers={"Farm-Namespace": "."}),
    "the namespace in capitals": lambda w: w.get("/v1/builds", headers={"Farm-Namespace": "MAIN"}),
    # Another namespace's builds and jobs by their ids.
    "a build of main": lambda w: w.get(f"/v1/builds/{w.running}"),
    "a build of main by a part of its id": lambda w: w.get(f"/v1/builds/{w.running[:10]}"),
    "its cells": lambda w: w.get(f"/v1/builds/{w.running}/cells"),
    "its report": lambda w: w.get(f"/v1/builds/{w.ended}/report"),
    "its JUnit": lambda w: w.get(f"/v1/builds/{w.ended}/junit"),
    "its events": lambda w: w.get(f"/v1/builds/{w.running}/events"),
    "cancel it": lambda w: w.post(f"/v1/builds/{w.running}/cancel"),
    "pause it": lambda w: w.post(f"/v1/builds/{w.running}/pause"),
    "resume it": lambda w: w.post(f"/v1/builds/{w.running}/resume"),
    "a job of main": lambda w: w.get(f"/v1/jobs/{w.jobs[0]}"),
    "its log": lambda w: w.get(f"/v1/jobs/{w.jobs[0]}/log"),
    "what reproduces it": lambda w: w.get(f"/v1/jobs/{w.jobs[0]}/reproduction"),
    "delete the ref of main": lambda w: w.ask("DELETE", "/v1/refs/latest"),
    "the ref of main by a path": lambda w: w.get("/v1/refs/..%2f..%2fmain%2frefs%2flatest"),
    # The id of another's build.
    "replay a build": lambda w: w.post("/v1/builds", w.frozen.submission),
    "replay a build under way": lambda w: w.post("/v1/builds", w.sent.submission),
    "more cells for a build under way": lambda w: w.post(
        "/v1/builds", w.submission(build_id=w.running, manifest=MANIFEST.replace("fp16", "int8"))
    ),
    # A key that is not that of the files.
    "other files under main's digest": lambda w: w.post(
        "/v1/builds", w.submission(models=w.model(files=[{"path": "net.onnx", "digest": "ab" * 32, "size": 4}]))
    ),
    "main's files under another digest": lambda w: w.post("/v1/plan", w.submission(models=w.model(digest="cd" * 32))),
    "a file above its folder": lambda w: w.post(
        "/v1/plan", w.submission(models=w.model(files=[{"path": "../net.onnx", "digest": "ab" * 32, "size": 4}]))
    ),
    "a manifest whose name is a path": lambda w: w.post(
        "/v1/builds", w.submission(manifest=MANIFEST.replace("name: demo", "name: ../../main"))
    ),
    "a model whose name is a path": lambda w: w.post(
        "/v1/builds", w.submission(manifest=MANIFEST.replace("name: net", "name: ../net"))
    ),
    "a build whose id is a path": lambda w: w.post("/v1/builds", w.submission(build_id="../../main/builds/b-0")),
    "an endless label": lambda w: w.post("/v1/builds", w.submission(labels={"a": "x" * 257})),
    # Object storage, past the API.
    "upload other bytes": lambda w: httpx.put(
        (p := w.put())["url"], content=b"x" * 16, headers=p["headers"], timeout=60
    ),
    "upload to main's sidecar": lambda w: httpx.put(
        (p := w.put())["url"].replace(blob_key(p["digest"]), sidecar_key("main", w.keys[0])),
        content=p["content"], headers=p["headers"], timeout=60),
    "upload over main's program": lambda w: httpx.put(
        (p := w.put())["url"].replace(blob_key(p["digest"]), blob_key(_program(w))),
        content=p["content"], headers=p["headers"], timeout=60),
    "download the tokens": lambda w: httpx.get(
        w.get(f"/v1/blobs/{_program(w)}").headers["Location"].replace(
            blob_key(_program(w)), next(iter(w.farm.artifacts.list_objects("config/tokens/")))), timeout=60),
    "delete a blob": lambda w: httpx.delete(w.get(f"/v1/blobs/{_program(w)}").headers["Location"], timeout=60),
    # Tokens.
    "a revoked token reads": lambda w: w.get("/v1/builds", token=w.revoked),
    "a revoked token submits": lambda w: w.post("/v1/builds", w.submission(), token=w.revoked),
    "a token's name": lambda w: w.get("/v1/builds", token="ci"),
    "a token's hash": lambda w: w.get("/v1/builds", token=hashlib.sha256(w.submitter.encode()).hexdigest()),
    "a token and more": lambda w: w.get("/v1/builds", token=w.submitter + "x"),
    "no token": lambda w: httpx.get(f"{w.url}/v1/builds", timeout=60),
    "a token in the address": lambda w: httpx.get(f"{w.url}/v1/builds", params={"token": w.submitter}, timeout=60),
    "a token as a password": lambda w: httpx.get(f"{w.url}/v1/builds", auth=("ci", w.submitter), timeout=60),
    "a reader submits": lambda w: w.post("/v1/builds", w.submission(), token=w.reader),
    "a reader uploads": lambda w: w.post("/v1/blobs", {"blobs": []}, token=w.reader),
    "make an administrator": lambda w: w.post("/v1/tokens", {"name": "me", "role": "admin", "namespace": "main"}),
    "revoke another's": lambda w: w.ask("DELETE", "/v1/tokens/eye"),
    "collect garbage": lambda w: w.post("/v1/gc"),
    "audit": lambda w: w.get("/v1/audit"),
    "stop a pool": lambda w: w.post(f"/v1/pools/{POOL.name}/pause"),
}  # fmt: skip


def _program(world: World) -> str:
    """Digest of a program of main."""
    return str(world.farm.artifacts.lookup(["main"], world.keys[0])["blobs"]["program"]["digest"])


def of_others(farm: Farm) -> dict[str, bytes]:
    """Every object that is not `pr`'s own, and no new blob. Without the log of changes, which others write later."""
    return {
        key: farm.artifacts.get_object(key).data
        for key in farm.artifacts.list_objects("")
        if not key.startswith(("ns/pr/", "uploads/pr/", CHANGES))
    }


@pytest.mark.fault("24")
def test_nothing_of_another_namespace_is_read_or_changed(fault: Fault, world: World, client: FarmClient) -> None:
    before = of_others(world.farm)
    builds = {build_id: (client.build(build_id), client.cells(build_id)) for build_id in (world.ended, world.running)}
    answers = {name: attack(world) for name, attack in ATTACKS.items()}
    statuses = Counter(answer.status_code for answer in answers.values())
    accepted = sum(count for status, count in statuses.items() if status < 400)
    fault.measured(attacks=len(answers), accepted=accepted, changed=len(of_others(world.farm).items() ^ before.items()))
    assert len(answers) >= fault.count.attacks
    assert {name: answer.status_code for name, answer in answers.items() if answer.status_code < 400} == {}
    assert {name: answer.status_code for name, answer in answers.items() if answer.status_code >= 500} == {}
    assert [name for name, answer in answers.items() if CANARY in answer.text] == []
    assert of_others(world.farm) == before
    assert [line for line in read_changes(world.farm.artifacts, str(today()), 1000) if line["namespace"] == "pr"] == []
    assert {build_id: (client.build(build_id), client.cells(build_id)) for build_id in builds} == builds
    assert not list(world.farm.artifacts.list_objects("ns/pr/")), "nothing was half accepted"


def test_a_fork_that_comes_first_changes_nothing_for_main(
    farm: Farm, url: str, client: FarmClient, frozen: Frozen
) -> None:
    """Both have the same key (CVE-2025-36852): each gets its own artifact, then main's is read by both."""
    secret = client.tokens.create("ci", "submitter", "pr")
    with FarmClient(url, secret, namespace="pr") as fork:
        again = {**frozen.submission, "build_id": f"b-{secrets.token_hex(8)}"}
        build_id = fork.submit(Frozen(again, frozen.files))["id"]
        work(farm, succeed(farm, namespace="pr"))
        farm.build_finisher.finish(build_id)
        assert {cell["state"] for cell in fork.cells(build_id)} == {"succeeded"}
        planned = client.plan(frozen)
        assert {cell["state"] for cell in planned["cells"]} == {"miss"}, "main does not see what the fork made"
        assert Refs(farm.artifacts).read("main", "latest") is None
        ended = finished(farm, client, frozen)
        for cell in client.cells(ended):
            sidecar = client.artifacts.get(cell["key"])
            assert sidecar["namespace"] == "main"
            assert fork.artifacts.get(cell["key"]) == sidecar, "the fork reads main's first"
            program = farm.artifacts.read_blob(sidecar["blobs"]["program"]["digest"], 1 << 20)
            assert program == f"program {cell['key']}".encode()


def test_the_id_of_a_build_is_one_namespaces(farm: Farm, client: FarmClient, frozen: Frozen, redis_url: str) -> None:
    """Also where the API's own look came too early, and where the store was lost while both marks lie in storage."""
    build_id = client.submit(frozen)["id"]
    other = {"id": build_id, "namespace": "pr", "cells": 1}
    with pytest.raises(Conflict, match="is taken"):
        farm.store.builds.create(other, [])
    document = json.loads(farm.artifacts.get_object(f"ns/main/builds/{build_id}/plan.json").data)
    document["build"]["namespace"] = "pr"
    farm.artifacts.put_object(f"ns/pr/builds/{build_id}/plan.json", json.dumps(document).encode())
    farm.artifacts.put_object(f"ns/pr/open/{build_id}", b"{}")
    with redis.Redis.from_url(redis_url) as connection:
        connection.flushall()
    farm.admission.resume()
    assert client.build(build_id)["namespace"] == "main"

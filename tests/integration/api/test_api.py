"""The HTTP API and its client, over a real server, store and object storage. The test itself plays the worker."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import httpx
import jsonschema
import pytest
import redis
from fastapi import FastAPI
from pydantic import SecretStr

from farm.api import artifact_routes
from farm.app import Farm
from farm.artifacts import s3
from farm.artifacts.refs import Refs
from farm.artifacts.storage import blob_key
from farm.artifacts.tokens import ADMINISTRATOR
from farm.builds import planner
from farm.cli import main
from farm.client.client import FarmClient
from farm.client.fetching import family_schema
from farm.client.freezing import Frozen, new_build_id
from farm.client.transfers import BLOBS_AT_ONCE, lots
from farm.errors import ArtifactGone, Conflict, FarmFault, ManifestError, NotAllowed, NotFound, NotPlanned, UsageError
from farm.jobs.state import FailureKind, Outcome
from farm.local import servers
from farm.matrix.cells import expand
from farm.results.ref_rules import entries
from farm.serving.server import HealthCheck, create_app
from farm.settings import Settings
from tests.support.api_farm import MANIFEST, POOL, Cutting, finished, freeze_manifest, serving, succeed, work

# --- who may ask ----------------------------------------------------------------------------------------------------


def test_every_route_but_health_and_schema_needs_the_token(url: str) -> None:
    open_to_all = {"/v1/health", "/v1/schema/manifest"}
    with httpx.Client(base_url=url, timeout=60) as anybody:
        for path, methods in anybody.get("/v1/openapi.json").json()["paths"].items():
            filled = path.replace("{build_id}", "@latest").replace("{job_id}", "j-1").replace("{tag}", "latest")
            filled = filled.replace("{key}", "ab" * 32).replace("{digest}", "ab" * 32)
            for method in methods:
                for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic c2VzYW1l"}):
                    answer = anybody.request(method, filled, headers=headers)
                    assert answer.status_code == (200 if path in open_to_all else 401), (method, path)
                    if path not in open_to_all:
                        assert answer.headers["WWW-Authenticate"] == "Bearer"
                        assert answer.json()["title"] == "Unauthenticated"


def test_the_client_says_not_allowed(url: str) -> None:
    with FarmClient(url, "wrong") as client, pytest.raises(NotAllowed, match="does not know this token"):
        client.builds()


def test_without_a_token_there_is_no_app_for_everybody(settings: Settings) -> None:
    with pytest.raises(UsageError, match="no token is set"):
        create_app(Farm(settings))


def test_without_a_token_loopback_serves_its_own_names_only(settings: Settings) -> None:
    with serving(create_app(Farm(settings), loopback=True)) as url:
        assert httpx.get(f"{url}/v1/builds", timeout=60).json()["items"] == []
        rebound = httpx.get(f"{url}/v1/builds", headers={"Host": "evil.example"}, timeout=60)
        assert rebound.status_code == 403


def test_namespaces_keep_builds_apart(farm: Farm, url: str, client: FarmClient, frozen: Frozen) -> None:
    build_id = client.submit(frozen)["id"]
    with FarmClient(url, farm.settings.api_token.get_secret_value(), namespace="fork") as other:
        assert other.builds() == []
        with pytest.raises(NotFound):
            other.build(build_id)


# --- what is refused, and how ---------------------------------------------------------------------------------------


def test_errors_are_problem_details(url: str, client: FarmClient) -> None:
    answer = client.transport._api.get("/v1/builds/b-0123456789abcdef")
    assert answer.status_code == 404
    assert answer.headers["Content-Type"] == "application/problem+json"
    document = answer.json()
    assert document["type"] == "urn:farm:error:NotFound"
    assert document["title"] == "Not found"
    assert document["status"] == 404
    assert "b-0123456789abcdef" in document["detail"]
    with pytest.raises(NotFound, match="b-0123456789abcdef"):
        client.build("b-0123456789abcdef")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/builds/..%2f..%2fworkers",
        "/v1/builds/b-XYZ",
        "/v1/builds/b-0123456789abcdef0",
        "/v1/builds/%7Bfarm%7D:builds",
        "/v1/jobs/j-1%0Aflushall/log",
        "/v1/jobs/J1",
        "/v1/artifacts/abc",
        "/v1/blobs/..%2f..",
        "/v1/refs/Latest",
        "/v1/refs/.hidden",
        "/v1/builds?limit=0",
    ],
)
def test_names_from_urls_are_checked(client: FarmClient, path: str) -> None:
    answer = client.transport._api.get(path)
    assert answer.status_code in (404, 422)
    assert answer.headers["Content-Type"] == "application/problem+json"


@pytest.mark.parametrize(
    "change",
    [
        {"build_id": "b-1"},
        {"build_id": "../x"},
        {"surprise": 1},
        {"manifest": "x" * (2**20 + 1)},
        {"models": {"net": {"digest": "no"}}},
        {"labels": {"team": "x" * 300}},
    ],
)
def test_malformed_submissions_are_the_callers_fault(
    client: FarmClient, frozen: Frozen, change: dict[str, Any]
) -> None:
    answer = client.transport._api.post("/v1/plan", json={**frozen.submission, **change})
    assert answer.status_code == 422
    assert answer.json()["detail"]


def test_what_is_no_name_at_all_is_said_in_words(client: FarmClient) -> None:
    answer = client.transport._api.get("/v1/jobs/onnxruntime1.31")
    assert answer.json()["detail"] == "'onnxruntime1.31' is not a job id"


def test_a_model_file_outside_its_folder_is_refused(client: FarmClient, frozen: Frozen) -> None:
    submission = json.loads(json.dumps(frozen.submission))
    submission["models"]["net"]["files"][0]["path"] = "../../etc/passwd"
    answer = client.transport._api.post("/v1/builds", json=submission)
    assert answer.status_code == 422
    assert "relative path" in answer.json()["detail"]


def test_bodies_over_the_limit_are_refused(client: FarmClient) -> None:
    answer = client.transport._api.post("/v1/plan", content=b"[" + b" " * (40 << 20))
    assert answer.status_code == 413


def test_manifest_errors_reach_the_client_with_their_places(client: FarmClient, frozen: Frozen) -> None:
    wrong = Frozen({**frozen.submission, "manifest": MANIFEST.replace("precisions", "precisons")}, frozen.files)
    with pytest.raises(ManifestError) as caught:
        client.plan(wrong)
    (problem,) = caught.value.problems
    assert (problem.line, problem.column) == (4, 1)
    assert "precisions" in problem.hint


def test_a_store_that_is_away_is_503_and_says_when_to_come_back(settings: Settings) -> None:
    away = settings.model_copy(update={"redis_url": SecretStr("redis://127.0.0.1:9/0")})
    with serving(create_app(Farm(away), loopback=True)) as url:
        answer = httpx.get(f"{url}/v1/health", timeout=30)
        assert answer.status_code == 503
        assert answer.headers["Retry-After"]
        assert answer.json()["type"] == "urn:farm:error:StoreUnavailable"


def test_a_store_that_is_full_or_read_only_is_503_until_it_is_not(
    farm: Farm, client: FarmClient, frozen: Frozen, redis_url: str
) -> None:
    for path in frozen.files.values():
        farm.artifacts.put_blob_file(path)
    with redis.Redis.from_url(redis_url) as raw:
        for refuse, heal in [
            (("CONFIG", "SET", "maxmemory", "1mb"), ("CONFIG", "SET", "maxmemory", "0")),
            (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")),
        ]:
            raw.execute_command(*refuse)
            try:
                api = client.transport._api
                answers = [api.post("/v1/builds", json=frozen.submission), api.get("/v1/health")]
            finally:
                raw.execute_command(*heal)
            for answer in answers:
                assert (answer.status_code, answer.headers["Retry-After"]) == (503, "2")
                assert answer.json()["type"] == "urn:farm:error:StoreUnavailable"
            assert client.health()["status"] == "ok"
    assert client.submit(frozen)["state"] == "open"


def test_a_store_that_hangs_is_503_before_callers_give_up(settings: Settings, tmp_path: Path) -> None:
    store = servers.start_valkey(tmp_path / "valkey", secrets.token_hex(8))
    assert store.pid
    try:
        farm = Farm(settings.model_copy(update={"redis_url": SecretStr(store.url)}))
        with serving(create_app(farm, loopback=True)) as url:
            assert httpx.get(f"{url}/v1/builds", timeout=60).json()["items"] == []
            os.kill(store.pid, signal.SIGSTOP)
            answer = httpx.get(f"{url}/v1/builds", timeout=10)
            assert (answer.status_code, answer.headers["Retry-After"]) == (503, "2")
            assert "did not answer within 4 s" in answer.json()["detail"]
            os.kill(store.pid, signal.SIGCONT)
            assert httpx.get(f"{url}/v1/builds", timeout=10).json()["items"] == []
    finally:
        os.kill(store.pid, signal.SIGCONT)
        store.stop()


def test_health_says_which_server_is_away(settings: Settings) -> None:
    away = settings.model_copy(update={"s3_endpoint": "http://127.0.0.1:9"})
    with serving(create_app(Farm(away), loopback=True)) as url:
        answer = httpx.get(f"{url}/v1/health", timeout=30)
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "2")
        assert answer.json()["type"] == "urn:farm:error:StorageAway"


def test_who_waited_for_health_gets_his_answer_also_if_the_next_one_asks_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between an answer and the one who waited for it, another caller begins the next question."""
    check, wait, later = HealthCheck("the store", lambda: None), asyncio.wait, list[asyncio.Future[None]]()

    async def late(*futures: Any, **options: Any) -> Any:
        found = await wait(*futures, **options)
        monkeypatch.setattr(asyncio, "wait", wait)
        later.append(asyncio.ensure_future(check.answers()))
        await asyncio.sleep(0)
        return found

    async def asked() -> None:
        await check.answers()
        await later[0]

    monkeypatch.setattr(asyncio, "wait", late)
    asyncio.run(asked())


def test_who_asks_for_health_takes_no_thread_of_his_own(settings: Settings) -> None:
    """A server that hangs would keep one for each who asks, without a token, until nobody is served."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        away = settings.model_copy(update={"redis_url": SecretStr(f"redis://127.0.0.1:{silent.getsockname()[1]}/0")})
        with serving(create_app(Farm(away), loopback=True)) as url:
            before = set(threading.enumerate())
            with ThreadPoolExecutor(20) as callers:
                answers = list(callers.map(lambda _: httpx.get(f"{url}/v1/health", timeout=60), range(60)))
            assert {answer.status_code for answer in answers} == {503}
            # As many as wrote answers at once, which serve others now, and one that waits for the store.
            assert len(set(threading.enumerate()) - before) <= 20 + 1


def test_the_secrets_are_in_no_answer(farm: Farm, client: FarmClient, frozen: Frozen) -> None:
    build_id = finished(farm, client, frozen)
    texts = [
        client.transport._api.get(path).text for path in ("/v1/workers", "/v1/pools", f"/v1/builds/{build_id}/report")
    ]
    secret = farm.settings.s3_secret_key.get_secret_value()
    assert not any(secret in text or farm.settings.api_token.get_secret_value() in text for text in texts)


# --- a build's life -------------------------------------------------------------------------------------------------


def test_plan_changes_nothing_and_names_what_is_missing(client: FarmClient, frozen: Frozen) -> None:
    planned = client.plan(frozen)
    assert planned["build_id"] == frozen.build_id
    assert [(cell["identifier"], cell["state"]) for cell in planned["cells"]] == [
        ("net/onnxruntime-cpu/fp32/static", "miss"),
        ("net/onnxruntime-cpu/fp16/static", "miss"),
    ]
    assert planned["missing_blobs"] == [frozen.submission["models"]["net"]["files"][0]["digest"]]
    assert client.builds() == []


def test_submit_uploads_inputs_and_may_be_repeated(farm: Farm, client: FarmClient, frozen: Frozen) -> None:
    progress: list[tuple[int, int]] = []
    build = client.submit(frozen, progress=lambda sent, total: progress.append((sent, total)))
    assert build["id"] == frozen.build_id
    assert build["counts"]["queued"] == 2
    (digest,) = frozen.files
    size = frozen.files[digest].stat().st_size
    assert progress[-1] == (size, size)
    assert farm.artifacts.verify_blob(digest, size)
    assert client.submit(frozen)["id"] == build["id"]
    assert [each["id"] for each in client.builds()] == [build["id"]]


@pytest.fixture
def expanded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each time that a server expanded a matrix."""
    found: list[int] = []
    monkeypatch.setattr(planner, "expand", lambda *args, **options: found.append(1) or expand(*args, **options))
    return found


@pytest.fixture
def sent(client: FarmClient) -> list[tuple[str, int]]:
    """The path, and the bytes of the body, of each request that the client sends."""
    found: list[tuple[str, int]] = []

    def note(request: httpx.Request) -> None:
        found.append((request.url.path, int(request.headers.get("Content-Length", 0))))

    client.transport._api.event_hooks = {"request": [note]}
    return found


def test_a_submission_is_sent_and_expanded_once(
    client: FarmClient, frozen: Frozen, expanded: list[int], sent: list[tuple[str, int]]
) -> None:
    planned = client.plan(frozen)
    build = client.submit(frozen, plan=planned)
    assert build["plan"] == planned["digest"]
    bodies = [(path, size > 500) for path, size in sent]
    accepted = f"/v1/builds/{frozen.build_id}"
    assert bodies == [("/v1/plan", True), ("/v1/blobs", False), (accepted, False)]
    assert len(expanded) == 1
    assert client.submit(frozen, plan=planned)["plan"] == planned["digest"], "it is known"
    again = Frozen({**frozen.submission, "build_id": new_build_id()}, frozen.files)
    assert client.submit(again)["plan"] == planned["digest"]
    assert len(expanded) == 1, "another build of the same shares the work"


def test_a_submission_without_its_inputs_is_not_sent_again(
    client: FarmClient, frozen: Frozen, expanded: list[int], sent: list[tuple[str, int]]
) -> None:
    assert client.submit(frozen)["id"] == frozen.build_id
    assert [path for path, size in sent if size > 500] == ["/v1/builds"]
    assert len(expanded) == 1


def test_a_server_that_did_not_see_the_plan_takes_the_whole_submission(
    api: tuple[FastAPI, str], farm: Farm, client: FarmClient, frozen: Frozen, sent: list[tuple[str, int]]
) -> None:
    planned = client.plan(frozen)
    api[0].state.farm = Farm(farm.settings)
    assert client.submit(frozen, plan=planned)["plan"] == planned["digest"]
    assert [path for path, _ in sent][2:] == [f"/v1/builds/{frozen.build_id}", "/v1/builds"]


def test_a_plan_is_accepted_only_by_those_who_asked_for_it(farm: Farm, client: FarmClient, frozen: Frozen) -> None:
    kept = client.plan(frozen)["kept"]
    client.upload(frozen.files)
    accept = {"build_id": frozen.build_id, "kept": kept, "by": ADMINISTRATOR}
    for other in ({"by": "somebody"}, {"kept": "0" * 64}):
        with pytest.raises(NotPlanned, match="keeps no plan"):
            farm.builds.submit_planned("main", **{**accept, **other})
    with pytest.raises(NotPlanned):
        farm.builds.submit_planned("pr", **accept)
    assert farm.builds.submit_planned("main", **accept)["id"] == frozen.build_id


def test_an_id_that_another_request_took_is_refused_with_a_plan_too(
    client: FarmClient, frozen: Frozen, tmp_path: Path
) -> None:
    first, second = frozen.submission, {**frozen.submission, "labels": {"run": "2"}}
    other = Frozen(second, frozen.files)
    plans = client.plan(frozen), client.plan(other)
    client.submit(frozen, plan=plans[0])
    with pytest.raises(Conflict, match="made by another request"):
        client.submit(other, plan=plans[1])
    assert client.build(first["build_id"])["labels"] == {}


def test_pools_that_came_since_the_plan_count(
    farm: Farm, client: FarmClient, frozen: Frozen, expanded: list[int]
) -> None:
    planned = client.plan(frozen)
    newer = replace(POOL, recipe=POOL.recipe + 1).as_dict()
    farm.store.workers.register(
        {"id": "w1", "node": "n1", "pid": 1, "host": "n1", "slots": 2, "pools": [newer]}, ttl=600
    )
    assert client.submit(frozen, plan=planned)["plan"] != planned["digest"]
    assert len(expanded) == 2


def test_an_input_that_goes_between_plan_and_submit_is_brought_again(
    farm: Farm, client: FarmClient, frozen: Frozen
) -> None:
    """Nothing names it yet, so retention may take it while others are still uploaded."""
    client.upload(frozen.files)
    plan = client.plan(frozen)
    assert plan["missing_blobs"] == []
    (digest,) = frozen.files
    farm.artifacts.delete_object(blob_key(digest))
    assert client.submit(frozen, plan=plan)["id"] == frozen.build_id
    assert farm.artifacts.has_blob(digest, frozen.files[digest].stat().st_size)


def test_the_idempotency_key_is_the_build_id(client: FarmClient, frozen: Frozen) -> None:
    answer = client.transport._api.post(
        "/v1/builds", json=frozen.submission, headers={"Idempotency-Key": "b-" + "0" * 16}
    )
    assert answer.status_code == 400
    assert client.builds() == []


def test_uploads_are_checked_against_their_digest(farm: Farm, client: FarmClient, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"abc")
    digest = "00" * 32
    with pytest.raises((UsageError, FarmFault)):
        client.upload({digest: other})
    assert not farm.artifacts.has_blob(digest)


class Breaking(httpx.HTTPTransport):
    """Storage that takes so many requests and refuses the rest."""

    def __init__(self, takes: int) -> None:
        super().__init__()
        self.takes = takes

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.takes -= 1
        if self.takes < 0:
            raise httpx.ConnectError("gone")
        return super().handle_request(request)


def test_a_large_blob_is_sent_in_parts_and_goes_on_where_it_broke_off(
    farm: Farm, client: FarmClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts that an earlier try has brought are not sent again; the blob is there once the whole was hashed."""
    monkeypatch.setattr(artifact_routes, "MAX_PUT", 10 << 20)
    monkeypatch.setattr(s3, "CLIENT_PART", 5 << 20)
    monkeypatch.setattr("farm.client.transport.RETRY_DELAYS", ())
    file = tmp_path / "weights.bin"
    file.write_bytes(secrets.token_bytes(17 << 20))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    client.transport._opened["uploads"] = httpx.Client(transport=Breaking(takes=2))
    with pytest.raises(FarmFault, match=r"cannot upload weights\.bin"):
        client.upload({digest: file})
    assert not farm.artifacts.has_blob(digest)
    del client.transport._opened["uploads"]
    seen: list[tuple[int, int]] = []
    sent = client.upload({digest: file}, lambda *progress: seen.append(progress))
    assert sent in (7 << 20, 12 << 20), "two of four parts, of 5 and 2 MiB, were there"
    assert seen[-1] == (sent, sent)
    assert farm.artifacts.verify_blob(digest, 17 << 20)
    assert list(farm.artifacts.list_objects("uploads/")) == []
    assert client.upload({digest: file}) == 0


def test_promised_sizes_cost_nothing_before_they_are_summed(
    client: FarmClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part of an upload takes a signature: what one request asks for is counted before the first is made."""
    begun: list[int] = []
    begin = s3.LargeUploads.begin_upload
    monkeypatch.setattr(s3.LargeUploads, "begin_upload", lambda *given: begun.append(given[-1]) or begin(*given))
    api = client.transport._api

    def ask(size: int, count: int) -> httpx.Response:
        blobs = [{"digest": f"{number:064x}", "size": size} for number in range(count)]
        return api.post("/v1/blobs", json={"blobs": blobs})

    assert ask(2**44, 1).status_code == 422
    assert ask(2**42, 3).status_code == 400
    assert ask(100 << 30, 1000).json()["detail"].startswith("these blobs need 800000 upload parts")
    assert begun == []
    (upload,) = ask(2**42, 1).json()["missing"]
    assert len(upload["puts"]) == 1000
    assert max(put["size"] for put in upload["puts"]) <= 5 << 30, "S3 takes no larger part"


def test_the_client_asks_for_as_many_blobs_as_the_farm_answers() -> None:
    sizes = {f"{number:064x}": 100 << 30 for number in range(7)} | {f"{number:064x}": 4 for number in range(7, 3000)}
    asked = list(lots(sizes))
    assert [digest for lot in asked for digest in lot] == list(sizes)
    for lot in asked:
        assert len(lot) <= BLOBS_AT_ONCE
        large = sum(s3.client_parts(sizes[digest]) for digest in lot if sizes[digest] > artifact_routes.MAX_PUT)
        assert large <= artifact_routes.MAX_PERMISSIONS


def test_a_large_blob_with_other_bytes_is_refused(
    farm: Farm, client: FarmClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifact_routes, "MAX_PUT", 10 << 20)
    file = tmp_path / "weights.bin"
    file.write_bytes(bytes(11 << 20))
    with pytest.raises(UsageError, match=f"the uploaded bytes have the SHA-256 .*, not {'0' * 64}"):
        client.upload({"0" * 64: file})
    assert not farm.artifacts.has_blob("0" * 64)
    assert list(farm.artifacts.list_objects("uploads/")) == []
    with pytest.raises(UsageError, match="no upload of blob"):
        farm.artifacts.finish_upload("main", "0" * 64, 11 << 20)


def test_a_build_is_found_by_prefix_and_latest(client: FarmClient, frozen: Frozen) -> None:
    build_id = client.submit(frozen)["id"]
    for name in (build_id, build_id[:8], build_id[2:8], "@latest"):
        assert client.build(name)["id"] == build_id


def test_a_build_from_submit_to_fetch(farm: Farm, client: FarmClient, frozen: Frozen, tmp_path: Path) -> None:
    build_id = client.submit(frozen)["id"]
    assert work(farm) == 2
    farm.build_finisher.finish(build_id)
    build = client.build(build_id)
    assert (build["state"], build["verdict"]["exit_code"]) == ("reported", 0)
    cells = client.cells(build_id)
    assert [cell["state"] for cell in cells] == ["succeeded", "succeeded"]
    assert client.jobs.log(cells[0]["job"]) == b"compiled\n"
    assert client.jobs.get(cells[0]["job"])["state"] == "succeeded"
    assert build_id in client.junit(build_id)
    assert client.report(build_id)["build"]["id"] == build_id
    assert client.refs.all() == ["latest"]
    assert [cell["precision"] for cell in client.ls()] == ["fp16", "fp32"]

    fetched = client.fetch("net", "onnxruntime/cpu", "fp16", folder=str(tmp_path / "out"), log=True)
    assert fetched.program.read_bytes() == f"program {cells[1]['key']}".encode()
    assert json.loads(fetched.sidecar.read_text()) == client.artifacts.get(cells[1]["key"])
    assert fetched.log is not None
    assert sorted(path.name for path in fetched.folder.iterdir()) == [
        f"net--onnxruntime-cpu--fp16--static.onnx{ending}" for ending in ("", ".artifact.json", ".log.txt")
    ]  # fmt: skip


FAMILY = MANIFEST.replace("[fp32, fp16]", "[fp32]") + "    inputs: {x: {shape: [batch, 4]}}\n    batches: [8, 1, 32]\n"


def test_a_family_is_fetched_into_one_folder(farm: Farm, client: FarmClient, tmp_path: Path) -> None:
    finished(farm, client, freeze_manifest(tmp_path, FAMILY, batch="batch"))
    family = client.fetch_family("net", "onnxruntime/cpu", "fp32", folder=tmp_path / "out")
    assert json.loads((tmp_path / "out" / "family.json").read_text()) == family.document
    jsonschema.validate(family.document, family_schema())
    members = family.document["members"]
    assert [(member["shape"], member["batch"]["max"], member["sizes"]) for member in members] == [
        ("b1", 1, {"batch": 1}),
        ("b8", 8, {"batch": 8}),
        ("b32", 32, {"batch": 32}),
    ]
    for member in members:
        assert (tmp_path / "out" / member["program"]).read_bytes() == f"program {member['key']}".encode()
        assert json.loads((tmp_path / "out" / member["sidecar"]).read_text())["key"] == member["key"]
    with pytest.raises(UsageError, match="3 shapes") as caught:
        client.fetch("net", "onnxruntime/cpu", "fp32", folder=tmp_path / "one")
    assert "b1, b8, b32, or --family for all" in caught.value.hint


def test_a_fetch_leaves_the_other_programs_of_its_folder(farm: Farm, client: FarmClient, tmp_path: Path) -> None:
    finished(farm, client, freeze_manifest(tmp_path, FAMILY, batch="batch"))
    first = client.fetch("net", "onnxruntime/cpu", "fp32", "b1", folder=tmp_path / "out")
    other = first.program.rename(first.program.with_name("other.onnx"))
    first.sidecar.rename(first.sidecar.with_name("other.onnx.artifact.json"))
    before = other.read_bytes()
    second = client.fetch("net", "onnxruntime/cpu", "fp32", "b8", folder=tmp_path / "out")
    assert json.loads(second.sidecar.read_text())["key"] == second.artifact["key"] != first.artifact["key"]
    assert other.read_bytes() == before
    assert len(list((tmp_path / "out").iterdir())) == 4


TWINS = MANIFEST.replace("[fp32, fp16]", "[fp32]").replace("net\n", "c\n") + (
    "    salt: new\n  - name: a\n    source: {path: net.onnx}\n"
)


def test_a_file_is_named_after_the_cell_that_was_asked_for(farm: Farm, client: FarmClient, tmp_path: Path) -> None:
    """Both had one program, which was published as `c`'s; by now `c` has another."""
    finished(farm, client, freeze_manifest(tmp_path, TWINS.replace("    salt: new\n", "")))
    names = [cell["identifier"] for cell in client.ls()]
    assert names == ["a/onnxruntime-cpu/fp32/static", "c/onnxruntime-cpu/fp32/static"]
    assert {client.artifacts.sidecar_of(cell)["identifier"] for cell in client.ls()} == {names[1]}
    finished(farm, client, freeze_manifest(tmp_path, TWINS))
    keys = {cell["model"]: cell["key"] for cell in client.ls()}
    for model in ("c", "a"):
        client.fetch(model, "onnxruntime/cpu", "fp32", folder=tmp_path / "out")
        client.fetch_family(model, "onnxruntime/cpu", "fp32", folder=tmp_path / model)
    for model, folder in (("c", "out"), ("a", "out"), ("c", "c/static"), ("a", "a/static")):
        program = tmp_path / folder / f"{model}--onnxruntime-cpu--fp32--static.onnx"
        assert program.read_bytes() == f"program {keys[model]}".encode()
    index = json.loads((tmp_path / "a" / "family.json").read_text())
    assert (tmp_path / "a" / index["members"][0]["program"]).is_file()
    assert (tmp_path / "a" / index["members"][0]["sidecar"]).is_file()


def test_a_family_is_of_one_toolchain(farm: Farm, client: FarmClient, tmp_path: Path) -> None:
    """What another toolchain made is not a member, even for a shape that the family does not have."""
    finished(farm, client, freeze_manifest(tmp_path, FAMILY, batch="batch"))
    other = {"identifier": "net/onnxruntime-cpu/fp32/b64", "shape": "b64", "toolchain": "onnxruntime1.32.0-ffffffff"}
    more = entries("main", [{**client.ls()[0], **other}])
    Refs(farm.artifacts).move("main", "latest", lambda there: {**there, **more})
    family = client.fetch_family("net", "onnxruntime/cpu", "fp32", folder=tmp_path / "out")
    assert [member["shape"] for member in family.document["members"]] == ["b1", "b8", "b32"]
    assert family.document["toolchain"] == POOL.toolchain
    assert family.left_out == ["net/onnxruntime-cpu/fp32/b64"]


def test_a_family_is_of_one_model_file(farm: Farm, client: FarmClient, tmp_path: Path) -> None:
    """A batch that only the older model was built for must not serve together with the newer one."""
    finished(farm, client, freeze_manifest(tmp_path, FAMILY, batch="batch"))

    def later(job_id: str, order: dict[str, Any], key: str) -> Outcome:
        return succeed(farm, created="2026-11-22T00:00:00+00:00")(job_id, order, key)

    text = FAMILY.replace("batches: [8, 1, 32]", "batches: [1]")
    build_id = client.submit(freeze_manifest(tmp_path, text, batch="N"))["id"]
    assert work(farm, later) == 1
    farm.build_finisher.finish(str(build_id))
    family = client.fetch_family("net", "onnxruntime/cpu", "fp32", folder=tmp_path / "out")
    assert [member["shape"] for member in family.document["members"]] == ["b1"]
    assert len(family.left_out) == 2


def test_a_sweep_is_in_the_report_and_drawn_next_to_it(
    farm: Farm, client: FarmClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = FAMILY.replace("batches: [8, 1, 32]", "sweep: [8, 1, 32]")
    build_id = finished(farm, client, freeze_manifest(tmp_path, text, batch="batch"))
    (sweep,) = client.report(build_id)["sweeps"]
    assert [point["throughput"] for point in sweep["points"]] == pytest.approx([1000, 8000, 32000])
    assert sweep["best"] == "net/onnxruntime-cpu/fp32/b32"
    stored = farm.artifacts.get_object(f"ns/main/builds/{build_id}/sweep.svg")
    assert stored is not None
    assert b"net onnxruntime/cpu fp32" in stored.data
    assert json.loads(farm.artifacts.get_object(f"ns/main/builds/{build_id}/report.json").data)["sweeps"] == [sweep]

    monkeypatch.setenv("FARM_API_URL", client.url)
    monkeypatch.setenv("FARM_API_TOKEN", farm.settings.api_token.get_secret_value())
    assert main(["status", build_id, "--picture", str(tmp_path / "curve.svg")]) == 0
    assert (tmp_path / "curve.svg").read_bytes() == stored.data


def test_the_second_build_is_all_hits(farm: Farm, client: FarmClient, frozen: Frozen) -> None:
    finished(farm, client, frozen)
    again = Frozen({**frozen.submission, "build_id": "b-" + "1" * 16}, frozen.files)
    assert [cell["state"] for cell in client.plan(again)["cells"]] == ["hit", "hit"]
    build = client.submit(again)
    assert build["counts"]["hits"] == 2


def test_cancel_ends_what_has_not_ended(client: FarmClient, frozen: Frozen) -> None:
    build_id = client.submit(frozen)["id"]
    assert client.cancel(build_id) == 2
    assert client.cancel(build_id) == 0
    assert {cell["state"] for cell in client.cells(build_id)} == {"cancelled"}


def test_cells_can_be_asked_for_by_state(farm: Farm, client: FarmClient, frozen: Frozen) -> None:
    build_id = client.submit(frozen)["id"]
    work(farm, lambda *_: Outcome.failure(FailureKind.BAD_MODEL, "node `a` has no input"))
    answer = client.transport._api.get(f"/v1/builds/{build_id}/cells?state=failed").json()["items"]
    assert {(cell["kind"], cell["message"], cell["fault"]) for cell in answer} == {
        ("bad_model", "node `a` has no input", "user")
    }
    assert client.transport._api.get(f"/v1/builds/{build_id}/cells?state=running").json()["items"] == []


# --- events ---------------------------------------------------------------------------------------------------------


def test_events_tell_the_whole_build_and_end(farm: Farm, client: FarmClient, frozen: Frozen) -> None:
    build_id = client.submit(frozen)["id"]
    events: list[dict[str, Any]] = []
    watcher = threading.Thread(target=lambda: events.extend(client.watch(build_id)))
    watcher.start()
    work(farm)
    farm.build_finisher.finish(build_id)
    watcher.join(timeout=60)
    assert not watcher.is_alive()
    for identifier in ("net/onnxruntime-cpu/fp32/static", "net/onnxruntime-cpu/fp16/static"):
        states = [e["state"] for e in events if e["type"] == "cell" and e["identifier"] == identifier]
        assert states == ["running", "succeeded"]
    assert [e["state"] for e in events if e["type"] == "build"][-1] == "reported"


def test_a_cut_stream_goes_on_without_gap_or_repeat(
    farm: Farm, url: str, client: FarmClient, frozen: Frozen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farm.client.client.FOLLOW_DELAYS", (0.0,) * 8)
    build_id = finished(farm, client, frozen)
    whole = [event["id"] for event in client.watch(build_id)]
    assert len(whole) > 6
    transport = Cutting(events=1)
    token = farm.settings.api_token.get_secret_value()
    with FarmClient(url, token, transport=transport) as cut:
        assert [event["id"] for event in cut.watch(build_id)] == whole
    assert transport.cuts >= len(whole)


def test_an_unknown_position_gets_one_reset(farm: Farm, client: FarmClient, frozen: Frozen) -> None:
    build_id = finished(farm, client, frozen)
    types = [event["type"] for event in client.watch(build_id, after="ffffffff.1-1")]
    assert types == ["reset"]


def test_events_of_an_unknown_build_are_an_error_not_a_stream(client: FarmClient) -> None:
    with pytest.raises(NotFound):
        next(client.watch("b-0123456789abcdef"))


def test_events_without_a_server_that_streams_fall_back_to_reading(
    farm: Farm, url: str, client: FarmClient, frozen: Frozen, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_id = finished(farm, client, frozen)
    monkeypatch.setattr("farm.client.client.FOLLOW_DELAYS", (0.0,) * 8)
    with FarmClient(url, farm.settings.api_token.get_secret_value(), transport=Cutting(events=0)) as cut:
        monkeypatch.setattr(cut.transport, "lines", _silent)
        assert list(cut.watch(build_id)) == []


def _silent(*_: object, **__: object) -> NoReturn:
    raise FarmFault("nothing comes through")


# --- refs -----------------------------------------------------------------------------------------------------------


class Forgetting(httpx.HTTPTransport):
    """A transport that loses the first answer of each kind of change: it is done, and the client asks again."""

    def __init__(self) -> None:
        super().__init__()
        self.lost: set[str] = set()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        if request.method not in {"GET", *self.lost}:
            self.lost.add(request.method)
            response.close()
            raise httpx.ReadError("the answer is lost")
        return response


def test_a_ref_is_moved_once_where_answers_are_lost(farm: Farm, url: str, client: FarmClient, frozen: Frozen) -> None:
    finished(farm, client, frozen)
    client.refs.move("prod", "latest")
    refs = Refs(farm.artifacts)
    emptied = refs.move("main", "prod", lambda there: {})["generation"]
    with FarmClient(url, farm.settings.api_token.get_secret_value(), transport=Forgetting()) as forgetful:
        moved = forgetful.refs.move("prod", "prod", previous=True)
        assert moved["generation"] == emptied + 1
        assert forgetful.ls("prod") == client.ls("latest")
        with pytest.raises(Conflict):
            client.refs.move("prod", "prod", previous=True, generation=emptied)
        forgetful.refs.remove("prod")
    assert client.refs.all() == ["latest"]
    with pytest.raises(NotFound):
        client.refs.remove("prod")


# --- fetch ----------------------------------------------------------------------------------------------------------


def test_fetch_refuses_damaged_bytes(
    farm: Farm, client: FarmClient, frozen: Frozen, s3_client: Any, tmp_path: Path
) -> None:
    finished(farm, client, frozen)
    cell = client.ls()[0]
    program = cell["program"]
    damaged = b"x" * program["size"]
    s3_client.put_object(Bucket=farm.settings.s3_bucket, Key=blob_key(program["digest"]), Body=damaged)
    with pytest.raises(ArtifactGone, match="damaged"):
        client.fetch("net", "onnxruntime/cpu", cell["precision"], folder=tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_fetch_of_a_deleted_artifact_says_it_is_gone(
    farm: Farm, client: FarmClient, frozen: Frozen, s3_client: Any, tmp_path: Path
) -> None:
    finished(farm, client, frozen)
    program = client.ls()[0]["program"]
    s3_client.delete_object(Bucket=farm.settings.s3_bucket, Key=blob_key(program["digest"]))
    with pytest.raises(ArtifactGone):
        client.fetch("net", "onnxruntime/cpu", "fp16", folder=tmp_path)


def test_fetch_of_what_is_not_there_says_what_is(
    farm: Farm, client: FarmClient, frozen: Frozen, tmp_path: Path
) -> None:
    finished(farm, client, frozen)
    with pytest.raises(NotFound) as caught:
        client.fetch("nett", "onnxruntime/cpu", "fp32", folder=tmp_path)
    assert caught.value.hint == "it has net"
    with pytest.raises(NotFound) as caught:
        client.fetch("net", "onnxruntime/cpu", "int8", folder=tmp_path)
    assert "net/onnxruntime-cpu/fp16/static" in caught.value.hint
    with pytest.raises(NotFound, match="no ref prod"):
        client.fetch("net", "onnxruntime/cpu", "fp32", ref="prod", folder=tmp_path)


def test_a_blob_is_a_redirect_that_needs_no_token(farm: Farm, url: str, client: FarmClient, frozen: Frozen) -> None:
    finished(farm, client, frozen)
    digest = client.ls()[0]["program"]["digest"]
    answer = client.transport._api.get(f"/v1/blobs/{digest}")
    assert answer.status_code == 307
    assert answer.headers["Location"] == answer.json()["url"]
    assert httpx.get(answer.json()["url"], timeout=60).content.startswith(b"program ")
    assert client.transport._api.get(f"/v1/blobs/{'0' * 64}").status_code == 404


# --- the rest -------------------------------------------------------------------------------------------------------


def test_workers_and_pools(client: FarmClient) -> None:
    (worker,) = client.workers.all()
    assert (worker["id"], worker["pools"]) == ("w1", [POOL.name])
    (pool,) = client.pools.all()
    assert (pool["name"], pool["live_workers"], pool["slots"]) == (POOL.name, 1, 2)


def test_schema_is_served_for_editors(url: str) -> None:
    assert "2020-12" in httpx.get(f"{url}/v1/schema/manifest", timeout=60).json()["$schema"]
    assert "draft-07" in httpx.get(f"{url}/v1/schema/manifest?draft7=true", timeout=60).json()["$schema"]


def test_large_answers_are_compressed(client: FarmClient) -> None:
    answer = client.transport._api.get("/v1/schema/manifest")
    assert answer.headers["Content-Encoding"] == "gzip"

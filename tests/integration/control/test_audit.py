"""The audit: a farm at work has nothing to be said about, and every kind of damage is named with its place."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import redis

from farm.app import Farm
from farm.artifacts import inventory
from farm.client.client import FarmClient
from farm.client.freezing import Frozen
from farm.control.audit import Auditor
from tests.support.api_farm import POOL, finished
from tests.support.helpers import wait_until

Damage = Callable[[Farm, redis.Redis, str], object]


@pytest.fixture
def raw(redis_url: str) -> redis.Redis:
    return redis.Redis.from_url(redis_url, decode_responses=True)


def findings(farm: Farm, *, deep: bool = False) -> list[Any]:
    return list(Auditor(farm.store, farm.artifacts, deep=deep).findings())[:-1]


def test_a_farm_at_work_and_one_at_rest_agree_with_themselves(farm: Farm, client: FarmClient, frozen: Frozen) -> None:
    finished(farm, client, frozen)
    client.submit(type(frozen)({**frozen.submission, "build_id": f"b-{'1' * 16}"}, frozen.files))
    assert findings(farm, deep=True) == []


def test_it_looks_at_everything(farm: Farm, client: FarmClient, frozen: Frozen) -> None:
    finished(farm, client, frozen)
    *found, last = client.upkeep.audit()
    assert found == []
    assert last["counts"] == {"builds": 1, "jobs": 2, "blobs": 5, "artifacts": 2, "reports": 1}
    farm.artifacts.put_object("ns/team/refs/none", b"another namespace, in which nothing was built")
    assert list(client.upkeep.audit())[-1]["counts"]["reports"] == 1


def first_artifact(farm: Farm) -> str:
    return next(iter(farm.artifacts.list_objects("ns/main/artifacts/")))


def change_sidecar(farm: Farm, change: Callable[[dict[str, Any]], object]) -> None:
    key = first_artifact(farm)
    found = farm.artifacts.get_object(key)
    assert found
    sidecar = json.loads(found.data)
    change(sidecar)
    farm.artifacts.put_object(key, json.dumps(sidecar).encode())


REPORT = "ns/main/builds/{}/report.json"


def change_report(farm: Farm, build: str, change: Callable[[list[dict[str, Any]]], object]) -> None:
    found = farm.artifacts.get_object(REPORT.format(build))
    assert found
    report = json.loads(found.data)
    change(report["cells"])
    farm.artifacts.put_object(found.key, json.dumps(report).encode())


def program(farm: Farm) -> str:
    found = farm.artifacts.get_object(first_artifact(farm))
    assert found
    return str(json.loads(found.data)["blobs"]["program"]["digest"])


def overwrite(farm: Farm, digest: str, change: Callable[[bytes], bytes]) -> None:
    data = farm.artifacts.read_blob(digest, 1 << 20)
    farm.artifacts.put_object(f"blobs/sha256/{digest[:2]}/{digest}", change(data))


@pytest.mark.damaged
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            lambda farm, raw, _: change_sidecar(farm, lambda sidecar: sidecar.pop("blobs")),
            "cannot be read: blobs: Field required",
        ),
        (
            lambda farm, raw, _: change_sidecar(farm, lambda sidecar: sidecar["spec"].update(salt="x")),
            "its spec has another cache key",
        ),
        (
            lambda farm, raw, _: farm.artifacts.delete_object(f"blobs/sha256/{program(farm)[:2]}/{program(farm)}"),
            "the blob of program.onnx is missing",
        ),
        (lambda farm, raw, _: overwrite(farm, program(farm), lambda data: data[:-1]), "bytes instead of"),
        (lambda farm, raw, _: overwrite(farm, program(farm), lambda data: data[:-1] + b"?"), "is damaged"),
        (lambda farm, raw, _: farm.artifacts.delete_object(first_artifact(farm)), "leads to no artifact"),
        (lambda farm, raw, _: farm.store.index.put("main", "0" * 64, {}), "which does not exist"),
        (
            lambda farm, raw, build: change_report(farm, build, lambda cells: cells.pop()),
            "2 cells were accepted, but 1",
        ),
        (
            lambda farm, raw, build: change_report(farm, build, lambda cells: cells[0].update(state="running")),
            "reported with net/onnxruntime-cpu/fp32/static running",
        ),
        (lambda farm, raw, build: farm.artifacts.delete_object(REPORT.format(build)), "neither a report nor a mark"),
        (lambda farm, raw, build: raw.hincrby(f"{{farm}}:build:{build}", "n:succeeded", 1), "counts 3 cells as"),
        (
            lambda farm, raw, build: raw.sadd(f"{{farm}}:build:{build}:live", "ghost"),
            "waits for cells",
        ),
    ],
)
def test_damage_is_named_with_its_place(
    farm: Farm, client: FarmClient, frozen: Frozen, raw: redis.Redis, damage: Damage, words: str
) -> None:
    build_id = finished(farm, client, frozen)
    farm.store.index.fill("main", [(key, {}) for key in farm.store.index.keys("main")])
    damage(farm, raw, build_id)
    found = findings(farm, deep=True)
    assert any(words in finding["problem"] for finding in found), found
    assert all(finding["where"] and finding["remedy"] for finding in found)


@pytest.mark.damaged
@pytest.mark.parametrize(
    ("command", "words"),
    [
        (lambda raw, job: raw.zrem("{farm}:leases", job), "without a lease"),
        (lambda raw, job: raw.hset(f"{{farm}}:job:{job}", "where", "handed"), "among its pool's"),
        (lambda raw, job: raw.delete(*raw.keys("{farm}:active:*")), "not the one of its key"),
        (lambda raw, job: raw.delete(f"{{farm}}:job:{job}:cells"), "nobody wants it"),
    ],
)
def test_a_job_that_would_be_stuck_is_named(
    farm: Farm, client: FarmClient, frozen: Frozen, raw: redis.Redis, command: Any, words: str
) -> None:
    client.submit(frozen)
    job_id, attempt = farm.store.jobs.hand_out(POOL.name, 10)[0]
    farm.store.jobs.claim(job_id, attempt, nonce="n", worker="w1", node="n1")
    assert findings(farm) == []
    command(raw, job_id)
    assert [
        finding for finding in findings(farm) if finding["where"] == f"job {job_id}" and words in finding["problem"]
    ]


@pytest.mark.damaged
def test_a_submission_that_failed_half_way_is_named(
    farm: Farm, client: FarmClient, frozen: Frozen, raw: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was written down, the store refused it, and no epoch has changed that would bring it back."""
    build_id = client.submit(frozen)["id"]
    monkeypatch.setattr("farm.control.audit.SETTLED", timedelta(minutes=-2))
    assert findings(farm) == []
    raw.delete(*raw.keys(f"{{farm}}:build:{build_id}*"))
    named = [finding["problem"] for finding in findings(farm) if finding["where"] == f"build {build_id}"]
    assert "it was recorded, but the store does not have it" in named


def test_what_nobody_names_is_collected_and_nothing_else(
    farm: Farm, client: FarmClient, frozen: Frozen, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished(farm, client, frozen)
    orphan, _ = farm.artifacts.put_blob_bytes(b"brought, and never submitted")
    assert client.upkeep.gc()["blobs"] == 0, "it is younger than a day"
    monkeypatch.setattr(inventory, "ORPHAN_AGE", timedelta(days=-1))
    assert [finding["problem"] for finding in findings(farm)] == ["nothing names this blob"]
    assert client.upkeep.gc(dry_run=True) == {"blobs": 1, "bytes": 28, "marked": 0}
    assert client.upkeep.gc() == {"blobs": 0, "bytes": 0, "marked": 1}
    assert farm.artifacts.has_blob(orphan), "it goes a day after its mark"
    monkeypatch.setattr(inventory, "GRACE", timedelta(0))
    assert wait_until(lambda: (found := client.upkeep.gc())["blobs"] and found) == {
        "blobs": 1,
        "bytes": 28,
        "marked": 0,
    }
    assert not farm.artifacts.has_blob(orphan)
    assert findings(farm, deep=True) == []


def test_a_snapshot_keeps_what_was_made_again_since(
    farm: Farm, client: FarmClient, frozen: Frozen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older ref leads to bytes that no sidecar names any more."""
    finished(farm, client, frozen)
    change_sidecar(
        farm,
        lambda sidecar: sidecar["blobs"].update(
            program={**sidecar["blobs"]["program"], "digest": farm.artifacts.put_blob_bytes(b"again")[0], "size": 5}
        ),
    )
    monkeypatch.setattr(inventory, "ORPHAN_AGE", timedelta(days=-1))
    assert client.upkeep.gc()["blobs"] == 0

"""Faults around object storage: races, deaths between two writes, a bad line, damaged bytes. Real SeaweedFS."""

from __future__ import annotations

import os
import random
import secrets
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from threading import Barrier
from typing import Any
from urllib.parse import urlsplit

import pytest
from botocore.awsrequest import AWSResponse

from farm.artifacts import inventory
from farm.artifacts.s3 import S3Store
from farm.artifacts.s3_bucket import PART
from farm.artifacts.storage import QUARANTINE, blob_key, sidecar_key
from farm.control.audit import Auditor
from farm.control.loops import tidy_storage
from farm.errors import ArtifactGone
from farm.jobs.state import WAITS_FOR_STORAGE
from farm.local import servers
from tests.chaos.conftest import Rigs
from tests.chaos.pace import Pace
from tests.chaos.proxy import Proxy
from tests.chaos.report import Fault
from tests.chaos.rig import LEASE, Rig, pause
from tests.support.helpers import wait_until

SEED = 16


def sidecar_of(order: dict[str, Any], blobs: dict[str, Any], worker: str) -> dict[str, Any]:
    """What a worker would publish for an order."""
    return {
        "schema": 1,
        "key": order["key"],
        "namespace": "main",
        "identifier": order["identifier"],
        "spec": order["spec"],
        "blobs": blobs,
        "toolchain": order["spec"]["toolchain"],
        "device": {"arch": "cpu"},
        "created": "2026-01-01T00:00:00Z",
        "worker": worker,
    }


def put(store: S3Store, name: str, data: bytes) -> dict[str, Any]:
    digest, size = store.put_blob_bytes(data)
    return {"path": name, "digest": digest, "size": size}


@pytest.mark.fault("16")
def test_two_publish_the_same_key(fault: Fault, rig: Rigs) -> None:
    """A fifth of the creations is first answered with 409, as AWS does during another write; SeaweedFS never does."""
    farm, chance, answered = rig(), random.Random(SEED), Counter[int]()
    stores = [S3Store.from_settings(farm.settings) for _ in range(2)]
    winner: dict[str, str] = {}
    barrier = Barrier(2)

    def conflict(request: Any, **_: Any) -> AWSResponse | None:
        if "If-None-Match" in request.headers and chance.random() < 0.2:
            answered[409] += 1
            body = b"<Error><Code>ConditionalRequestConflict</Code></Error>"
            return AWSResponse(request.url, 409, {}, _Body(body))
        return None

    def note(http_response: Any, **_: Any) -> None:
        answered[http_response.status_code] += http_response.status_code == 412

    for store in stores:
        store.s3.meta.events.register("before-send.s3.PutObject", conflict)
        store.s3.meta.events.register("after-call.s3.PutObject", note)

    def publish(number: int, order: dict[str, Any]) -> Any:
        store, worker = stores[number], f"w{number}"
        blobs = {"program": put(store, "p", f"{order['key']} by {worker}".encode())}
        barrier.wait()
        return store.publish("main", sidecar_of(order, blobs, worker))

    wins: Counter[str] = Counter()
    adopted = 0
    with ThreadPoolExecutor(2) as pool:
        for order in farm.orders(fault.count.publications):
            first, second = pool.map(publish, range(2), [order, order])
            adopted += first == second
            winner[order["key"]] = first["worker"]
            wins[first["worker"]] += 1
    there = {key: farm.artifacts.lookup(["main"], key)["worker"] for key in winner}
    overwritten = sum(there[key] != worker for key, worker in winner.items())
    fault.measured(
        winners=dict(wins), losers_adopted=adopted, overwritten=overwritten, answers=dict(answered), **farm.ledger()
    )
    assert (overwritten, adopted) == (0, fault.count.publications)
    assert answered[412]
    assert answered[409]


class _Body:
    """The body of an answer that no server gave."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def stream(self, **_: Any) -> Any:
        yield self.data


STEPS = ("in the program's upload", "after the program", "after the log", "before the sidecar", "after the sidecar")


def die_while_publishing(farm: Rig, order: dict[str, Any], path: Path, step: int) -> None:
    """Publish in a process of its own, which is killed at a step."""
    pid = os.fork()
    if pid:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        return

    def die(**_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    try:
        store = S3Store.from_settings(farm.settings)
        if step == 0:
            store.s3.meta.events.register("before-send.s3.CompleteMultipartUpload", die)
            store.put_blob_file(path)
        program = put(store, "p", b"program " + order["key"].encode())
        if step == 1:
            die()
        log = put(store, "log", b"log " + order["key"].encode())
        if step == 2:
            die()
        if step == 3:
            store.s3.meta.events.register("before-send.s3.PutObject", die)
        store.publish("main", sidecar_of(order, {"program": program, "log": log}, "w"))
        die()
    finally:
        os._exit(1)


@pytest.mark.fault("17")
def test_killed_between_blobs_and_sidecar(
    fault: Fault, rig: Rigs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    farm, times = rig(), fault.count.times
    whole, none = 0, 0
    for number, order in enumerate(farm.orders(len(STEPS) * times)):
        step = number % len(STEPS)
        path = tmp_path / "large"
        if step == 0:
            path.write_bytes(os.urandom(64) + bytes(2 * PART + 1))
        die_while_publishing(farm, order, path, step)
        found = farm.artifacts.lookup(["main"], order["key"])
        if found:
            assert all(farm.artifacts.verify_blob(one["digest"]) for one in found["blobs"].values() if one)
            whole += 1
        else:
            none += 1
        assert bool(found) == (step == 4), STEPS[step]
    monkeypatch.setattr(inventory, "ORPHAN_AGE", timedelta(0))
    monkeypatch.setattr(inventory, "GRACE", timedelta(0))
    kept = timedelta(days=1)
    orphans = inventory.collect(farm.artifacts, plans_kept=kept, dry_run=True)["blobs"]

    def left_over() -> int:
        """The server may tell times in whole seconds, and spares what it was brought in that of its mark."""
        inventory.collect(farm.artifacts, plans_kept=kept)
        return inventory.collect(farm.artifacts, plans_kept=kept, dry_run=True)["blobs"]

    wait_until(lambda: not left_over(), message="all orphans are collected")
    left = left_over()
    uploads = farm.artifacts.abort_uploads(timedelta(0))
    uploads_left = farm.artifacts.abort_uploads(timedelta(0))
    fault.measured(
        readers_saw={"none": none, "whole": whole},
        orphans=orphans,
        orphans_left=left,
        uploads=uploads,
        uploads_left=uploads_left,
        **farm.ledger(),
    )
    assert (whole, none) == (times, 4 * times)
    assert (left, uploads, uploads_left) == (0, times, 0)
    # After the program one blob, later two; both of the last step have an owner.
    assert orphans == times * (1 + 2 + 2)


@pytest.mark.fault("18")
def test_bad_object_storage(fault: Fault, rig: Rigs) -> None:
    """The compile is a sleep of 10 s; the same jobs run over a good line first."""
    slots, sleep = 16, 10.0
    walls = {}
    place = urlsplit(rig.s3["s3_endpoint"])
    with Proxy(str(place.hostname), int(place.port or 80)) as line:
        for name in ("good", "bad"):
            farm = rig(s3_endpoint=f"http://127.0.0.1:{line.port}") if name == "bad" else rig()
            client = farm.serve(s3_endpoint=rig.s3["s3_endpoint"])
            farm.script({"": [{"seconds": sleep}]})
            farm.workers("n1", "n2", slots=slots // 2)
            if name == "bad":
                line.latency, line.errors, line.resets = 1.0, 0.20, 0.05
            start = time.monotonic()
            cells = farm.wait(farm.submit(client, fault.count.jobs), timeout=1800)
            walls[name] = time.monotonic() - start
            ends = Counter(one["end"] for cell in cells for one in farm.attempts(cell))
            line.latency = line.errors = line.resets = 0.0
            fault.measured(
                **{f"{name}_seconds": walls[name], f"{name}_attempts": dict(ends)},
                requests=dict(line.done),
                **farm.ledger(),
            )
            assert ends == {"succeeded": fault.count.jobs}, "something was compiled twice"
            farm.stop_workers()
    fault.measured(ratio=walls["bad"] / walls["good"])
    assert walls["bad"] <= 2 * walls["good"]


@pytest.mark.fault("19")
def test_damaged_artifacts(fault: Fault, rig: Rigs, tmp_path: Path) -> None:
    """A flipped bit, a cut, an unreadable sidecar, or one of another key; each found by the client that fetches it."""
    farm, chance = rig(), random.Random(SEED)
    client = farm.serve()
    farm.workers("n1", slots=4)
    salt = "damaged"
    cells = farm.wait(farm.submit(client, fault.count.damages, salt=salt), timeout=900)
    documents = {cell["key"]: farm.artifacts.lookup(["main"], cell["key"]) for cell in cells}
    kinds: dict[str, str] = {}
    damaged_blobs = set()
    for number, (key, document) in enumerate(documents.items()):
        kind = ("bit", "cut", "sidecar unreadable", "sidecar of another key")[number % 4]
        blob = document["blobs"]["program"]
        place = blob_key(blob["digest"])
        if kind in ("bit", "cut"):
            data = bytearray(farm.artifacts.read_blob(blob["digest"], 1 << 20))
            if kind == "bit":
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            else:
                del data[chance.randrange(len(data)) :]
            farm.artifacts.put_object(place, bytes(data))
            damaged_blobs.add(blob["digest"])
        else:
            other = farm.artifacts.get_object(sidecar_key("main", chance.choice([k for k in documents if k != key])))
            farm.artifacts.put_object(
                sidecar_key("main", key), b'{"schema": 1' if kind == "sidecar unreadable" else other.data
            )
        try:
            client.artifacts.download(client.artifacts.get(key)["blobs"]["program"], tmp_path)
        except ArtifactGone:
            kinds[key] = kind
    found = list(Auditor(farm.store, farm.artifacts, deep=True).findings())[:-1]
    named = {finding["where"].rpartition("/")[2].removesuffix(".json") for finding in found}
    quarantined = {key.rpartition("/")[2] for key in farm.artifacts.list_objects(QUARANTINE)}
    tidy_storage(farm.store, farm.artifacts, changes_kept=timedelta(days=400))
    again = farm.wait(farm.submit(client, fault.count.damages, salt=salt), timeout=900)
    rebuilt = Counter(kinds[cell["key"]] for cell in again if farm.compiled(cell) == 1)
    fault.measured(
        refused=dict(Counter(kinds.values())),
        audit_named=len(named & set(documents)),
        quarantined=len(quarantined),
        rebuilt=dict(rebuilt),
        **farm.ledger(rebuilt=set(documents)),
    )
    assert len(kinds) == fault.count.damages
    assert quarantined == damaged_blobs
    assert rebuilt.total() == fault.count.damages
    for key in documents:
        client.artifacts.download(client.artifacts.get(key)["blobs"]["program"], tmp_path)


OUTAGES = (20, 60, 600)
"""Seconds for which storage is stopped, one after the other."""


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[tuple[servers.Server, dict[str, str]]]:
    """A SeaweedFS that may be stopped, and the settings that name it."""
    access, secret = secrets.token_hex(8), secrets.token_hex(16)
    weed = servers.start_weed(tmp_path / "weed", access, secret, bucket="farm")
    names = {"s3_endpoint": weed.url, "s3_bucket": "farm", "s3_access_key": access, "s3_secret_key": secret}
    yield weed, names
    weed.stop()


def start(storage: servers.Server) -> None:
    storage.spawn()
    assert storage.wait_until_ready(), storage.last_words()


def rests(farm: Rig) -> set[str]:
    """Why workers rest, without what they were just asked for."""
    return {one["resting"][:24] for one in farm.store.workers.list()}


def nothing_wasted(fault: Fault, farm: Rig, build: str, jobs: int) -> list[dict[str, Any]]:
    """Every job was compiled once and none of its attempts charged."""
    cells = farm.wait(build, timeout=900)
    charged = sum(farm.store.jobs.get(cell["job"])["charged"] for cell in cells)
    ends = Counter(one["end"] for cell in cells for one in farm.attempts(cell))
    mine = {cell["job"] for cell in cells}
    compiles = Counter({job: count for job, count in farm.compiles().items() if job in mine})
    twice = {job: count for job, count in compiles.items() if count > 1}
    fault.measured(charged=charged, compiles=compiles.total(), compiled_twice=len(twice), ends=dict(ends))
    fault.measured(**farm.ledger())
    assert Counter(cell["state"] for cell in cells) == {"succeeded": jobs}
    assert charged == 0
    assert not twice
    assert compiles.total() == jobs
    return cells


@pytest.mark.fault("26")
def test_storage_stops(fault: Fault, rig: Rigs, storage: tuple[servers.Server, dict[str, str]], tmp_path: Path) -> None:
    """Compiles of 3 s, so attempts are in every phase when it stops."""
    weed, names = storage
    farm = rig(**names)
    client = farm.serve()
    farm.workers("n1", "n2", slots=3)
    pace, small = Pace(farm, client), farm.published().total()
    farm.script({"": [{"seconds": 3.0}]})
    build = farm.submit(client, fault.count.jobs)
    recoveries, said = [], set[tuple[str, str]]()
    for number, seconds in enumerate(OUTAGES[: fault.count.outages], 1):
        enough = fault.count.jobs * number // (fault.count.outages + 1) // 2
        wait_until(lambda enough=enough: farm.published().total() - small >= enough, 600, "some are done")
        client.cells(build)  # Whoever has looked at a build before sees why it waits.
        weed.stop()
        began = time.monotonic()
        wait_until(lambda: rests(farm) == {"object storage is away: "}, 180, "all workers rest")
        fault.measured(**{f"rest_after_{seconds}": time.monotonic() - began})
        while time.monotonic() < began + seconds:
            said |= {(cell["state"], cell["waiting"].partition(": ")[2][:39]) for cell in client.cells(build)}
            pause(0.5)
        start(weed)
        back, done = time.monotonic(), farm.published().total()
        wait_until(lambda: rests(farm) == {""}, 180, "all workers take jobs")
        wait_until(lambda done=done: farm.published().total() > done, 180, "programs are published")
        recoveries.append(time.monotonic() - back)
    farm.wait(build, timeout=900)
    pace.measure()
    fault.measured(small_build=pace.build)
    nothing_wasted(fault, farm, build, fault.count.jobs)
    fault.recovered(recoveries, pace.bound(15, 15))
    assert {("running", WAITS_FOR_STORAGE), ("queued", "object storage is away: cannot reach s3")} <= said


@pytest.mark.fault("26-kill")
def test_workers_die_while_their_programs_wait(
    fault: Fault, rig: Rigs, storage: tuple[servers.Server, dict[str, str]], tmp_path: Path
) -> None:
    """The Celery process is killed, or the whole worker, or it is stopped as for an upgrade; leases end meanwhile."""
    weed, names = storage
    farm = rig(**names, grace_seconds=1.0)
    client = farm.serve()
    go = tmp_path / "go"
    farm.script({"": [{"wait": str(go)}]})
    ways = Counter[str]()
    for _ in range(fault.count.times):
        for way in ("process", "worker", "stop"):
            go.unlink(missing_ok=True)
            (worker,) = farm.workers("n1", slots=fault.count.jobs)
            build = farm.submit(client, fault.count.jobs)
            wait_until(
                lambda build=build: (
                    Counter(cell["phase"] for cell in farm.running(build)) == {"compiling": fault.count.jobs}
                ),
                120,
                "all compile",
            )
            weed.stop()
            go.touch()
            wait_until(lambda: farm.raw.zcard("{farm}:kept") == fault.count.jobs, 180, "all programs wait")
            cell = farm.running(build)[0]
            assert cell["detail"] == f"{WAITS_FOR_STORAGE}; its program is finished"
            if way == "process":
                os.kill(worker.celery(), signal.SIGKILL)
            elif way == "worker":
                farm.stop_workers()
            else:
                assert worker.stop() == 0
                farm.started.clear()
            pause(2 * LEASE)
            assert len(farm.running(build)) == fault.count.jobs, (
                "a job was taken away from the disk that has its program"
            )
            start(weed)
            if way != "process":
                farm.workers("n1", slots=1)
            farm.wait(build)
            farm.stop_workers()
            ways[way] += 1
            fault.measured(builds=dict(ways))
    jobs = [farm.store.jobs.get(cell["job"]) for each in farm.builds for cell in farm.wait(each)]
    charged = sum(job["charged"] for job in jobs)
    wasted = [one["message"] for job in jobs for one in job["attempts"] if one["end"] != "succeeded"]
    compiles = farm.compiles()
    fault.measured(charged=charged, wasted=wasted, compiles=compiles.total(), **farm.ledger())
    assert charged == 0
    assert compiles.total() == len(compiles) == fault.count.jobs * len(farm.builds)
    assert not list((farm.folder / "data" / "outbox").iterdir())

"""Faults of Valkey and of the way to it, and of the farm's own two halves when their releases differ."""

from __future__ import annotations

import secrets
import shutil
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import redis

from farm.errors import FarmFault, StoreUnavailable
from farm.jobs.state import Outcome
from farm.local import servers
from farm.settings import load_settings
from farm.store import Store
from tests.chaos.conftest import Rigs
from tests.chaos.pace import Pace
from tests.chaos.proxy import Proxy
from tests.chaos.report import Fault
from tests.chaos.rig import ENDED, LEASE, Rig, insist, pause
from tests.support.helpers import alive, wait_until
from tests.support.jobs import join_pool, new_cell, submit
from tests.support.scripted_pool import POOL

SUCCESS = Outcome.success({"latency": 0.001})


def seconds_until_at_work(farm: Rig, client: Any) -> list[float]:
    """Seconds from now until each worker has begun a job; there are new ones for it until all have."""
    since = time.time()
    nodes, begun = {worker.node for worker in farm.started}, dict[str, float]()
    while begun.keys() < nodes:
        for cell in farm.wait(insist(lambda: farm.submit(client, 8)), timeout=120):
            for one in farm.attempts(cell):
                begun[one["node"]] = min(begun.get(one["node"], one["started_at"]), one["started_at"])
        assert time.time() - since < 180, f"only {sorted(begun)} take work"
    return [at - since for at in begun.values()]


@pytest.mark.fault("9")
def test_valkey_dies_while_builds_are_submitted(fault: Fault, rig: Rigs) -> None:
    """Four submitters; most builds are hits of a few manifests, and every tenth one has a job that is new."""
    farm = rig()
    client = farm.serve()
    workers = farm.workers("n1", "n2")
    assert workers
    pace = Pace(farm, client)
    acknowledged: list[str] = []
    refused: Counter[str] = Counter()
    lock, todo = threading.Lock(), iter(range(fault.count.submits))
    same = farm.freeze(1, salt="same")

    def submit_many() -> None:
        while True:
            with lock:
                number = next(todo, None)
                if number is None:
                    return
                frozen = farm.freeze(1) if number % 10 == 0 else same
            fresh = type(frozen)({**frozen.submission, "build_id": f"b-{secrets.token_hex(8)}"}, frozen.files)
            while True:
                try:
                    build = client.submit(fresh)
                except FarmFault as error:
                    refused[type(error).__name__] += 1
                else:
                    acknowledged.append(str(build["id"]))
                    break

    threads = [threading.Thread(target=submit_many) for _ in range(4)]
    for thread in threads:
        thread.start()
    faults = ["stop", "kill"] * max(fault.count.stops, fault.count.kills)
    faults = faults[: fault.count.stops + fault.count.kills]
    recoveries: list[float] = []
    share = fault.count.submits / (len(faults) + 1)
    for number, kind in enumerate(faults):
        due = share * (number + 0.5)
        wait_until(lambda due=due: len(acknowledged) >= due, timeout=600, message="builds are acknowledged")
        farm.restart_valkey() if kind == "stop" else farm.kill_valkey()
        recoveries += seconds_until_at_work(farm, client)
    for thread in threads:
        thread.join()
    farm.valkey.stop()
    pause(fault.count.away_seconds)
    farm.start_valkey()
    recoveries += seconds_until_at_work(farm, client)
    with ThreadPoolExecutor(8) as pool:
        plans = pool.map(lambda one: farm.artifacts.get_object(f"ns/main/builds/{one}/plan.json"), acknowledged)
        lost = sum(plan is None for plan in plans)
    farm.builds += acknowledged
    pace.measure()
    fault.measured(
        acknowledged=len(acknowledged),
        builds_lost=lost,
        refused=dict(refused),
        small_build=pace.build,
        **farm.ledger(),
    )
    assert len(acknowledged) == fault.count.submits
    assert lost == 0
    fault.recovered(recoveries, pace.bound(10, 15))


@pytest.mark.fault("10")
def test_a_black_hole(fault: Fault, rig: Rigs) -> None:
    """Each worker has a line of its own that swallows everything; connections of before stay dead afterwards."""
    farm = rig()
    client = farm.serve()
    place = urlsplit(farm.valkey.url)
    ports = servers.free_ports(fault.count.holes)
    with ExitStack() as stack:
        lines = [stack.enter_context(Proxy(str(place.hostname), int(place.port or 0))) for _ in ports]
        for port, line in zip(ports, lines, strict=True):
            through = farm.valkey.url.replace(f":{place.port}", f":{line.port}")
            changed = {**farm.settings.model_dump(), "redis_url": through, "health_port": port}
            farm.workers(f"n{port}", settings=load_settings({}, **changed))
        pace = Pace(farm, client)
        farm.script({"": [{"seconds": 1.0}]})
        build_id = farm.submit(client, 6 * fault.count.holes)
        wait_until(
            lambda: len({cell["worker"] for cell in farm.running(build_id)}) == fault.count.holes,
            message="all are at work",
        )
        for line in lines:
            line.hole = True
        start = time.monotonic()
        wait_until(lambda: not farm.store.workers.list(), timeout=300, message="they count as dead")
        unknown = time.monotonic() - start
        wait_until(lambda: not any(map(is_ready, ports)), timeout=300, message="they say that they are not ready")
        red = time.monotonic() - start
        pause(max(0.0, fault.count.seconds - red))
        for line in lines:
            line.hole = False
        recoveries = seconds_until_at_work(farm, client)
        wait_until(lambda: all(map(is_ready, ports)), timeout=300, message="they say that they are ready")
        farm.wait(build_id, timeout=120)
        pace.measure()
        fault.measured(not_live_after=unknown, not_ready_after=red, small_build=pace.build, **farm.ledger())
        farm.stop_workers()
    assert max(unknown, red) <= pace.bound(60, 60)
    fault.recovered(recoveries, pace.bound(60, 60))


def is_ready(port: int) -> bool:
    """Whether a worker says on its health port that it takes jobs."""
    return httpx.get(f"http://127.0.0.1:{port}/ready", timeout=10).status_code == 200


@pytest.mark.fault("11")
def test_lost_calls_and_answers(fault: Fault, rig: Rigs, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every script, of submitter, dispatcher, worker and reaper; who hears nothing asks again."""
    farm = rig()
    store, chance = Store.connect(farm.settings), secrets.SystemRandom()
    whole, fates = store._link.run, Counter[str]()

    def flaky(script: str, **arguments: Any) -> Any:
        fate = chance.random()
        if fate < 0.05:
            fates["never arrived"] += 1
            raise StoreUnavailable("never arrived")
        answer = whole(script, **arguments)
        if fate > 0.95:
            fates["answer dropped"] += 1
            raise StoreUnavailable("done, but nobody heard")
        fates["heard"] += 1
        return answer

    again = partial(insist, every=0.0)
    join_pool(store, slots=16, ttl=3600)
    jobs = fault.count.transitions // 4
    monkeypatch.setattr(store._link, "run", flaky)
    lots = [[new_cell() for _ in range(50)] for _ in range(-(-jobs // 50))]
    builds = []
    for lot in lots:
        build = {"id": f"b-{secrets.token_hex(8)}", "namespace": "main", "name": "test", "cells": len(lot)}
        again(lambda build=build, lot=lot: store.builds.create(build, lot))
        builds.append(build["id"])
    moves, ends = 0, Counter[str]()
    while store.jobs.pending(POOL.name) or again(lambda: store.jobs.strays(POOL.name, 0)):
        again(lambda: store.jobs.hand_out(POOL.name, 2))
        for job_id, number in again(lambda: store.jobs.strays(POOL.name, 0)):
            moves += 1
            nonce = f"{job_id}.{number}"
            claim = again(
                lambda j=job_id, n=number, nonce=nonce: store.jobs.claim(j, n, nonce=nonce, worker="w1", node="n1")
            )
            if claim.answer != "run":
                continue
            assert again(lambda c=claim, j=job_id: store.jobs.renew(c.token, j, phase="compiling")) == "ok"
            outcome = SUCCESS if chance.random() < 0.8 else Outcome.released()
            assert again(lambda j=job_id, c=claim, o=outcome: store.jobs.finish(j, c.token, o)) == "ok"
            ends[outcome.end.value] += 1
            moves += 3
        again(store.jobs.promote)
    monkeypatch.undo()
    cells = [cell for build_id in builds for cell in store.builds.cells(build_id)]
    twice = sum(
        [one["end"] for one in store.jobs.get(cell["job"])["attempts"]].count("succeeded") != 1 for cell in cells
    )
    events = 0
    for build_id in builds:
        found, after = [], None
        while items := (page := store.events.read(build_id, after))["items"]:
            assert not page["reset"]
            found += items
            after = items[-1]["id"]
        ended = Counter(one["identifier"] for one in found if one.get("state") == "succeeded")
        events += sum(count != 1 for count in ended.values()) + 50 - len(ended)
    stuck = sum(cell["state"] != "succeeded" for cell in cells)
    findings = [*store.audit.builds(), *store.audit.jobs()]
    fault.measured(
        transitions=moves, calls=dict(fates), jobs=len(cells), counted_twice=twice, stuck=stuck, events_wrong=events
    )
    assert moves >= fault.count.transitions
    assert (twice, stuck, events, findings) == (0, 0, 0, [])
    assert ends["succeeded"] == len(cells)


@pytest.mark.fault("12")
def test_full_and_read_only(fault: Fault, rig: Rigs) -> None:
    """Valkey takes no write, for half of the time because its memory is full, then because it is a replica."""
    farm = rig()
    client = farm.serve()
    (worker,) = farm.workers("n1", slots=2)
    pace = Pace(farm, client)
    slowest, retry_after = 0.0, set()
    half = fault.count.seconds / 2
    ends: Counter[str] = Counter()
    for kind in ("full", "read-only"):
        farm.script({"": [{"seconds": half + 2}]})
        build_id = farm.submit(client, 2)
        wait_until(
            # Not the children that make references, which end by themselves.
            lambda b=build_id: (
                [one["phase"] for one in farm.running(b)] == ["compiling"] * 2 and len(farm.compilers()) >= 4
            ),
            message="compilers run",
        )
        compilers, celery = farm.compilers(), worker.celery()
        farm.script({"": [{}]})
        frozen = farm.freeze(1)
        if kind == "full":
            farm.raw.config_set("maxmemory", 1)
        else:
            farm.raw.replicaof("127.0.0.1", 1)
        until = time.monotonic() + half
        while time.monotonic() < until:
            start = time.monotonic()
            answer = httpx.post(
                f"{client.url}/v1/builds",
                json=frozen.submission,
                headers={"Authorization": f"Bearer {farm.settings.api_token.get_secret_value()}"},
                timeout=30,
            )
            slowest = max(slowest, time.monotonic() - start)
            assert answer.status_code == 503, answer.text
            retry_after.add(answer.headers.get("Retry-After"))
            assert all(alive(pid) for pid in compilers), "a compiler was ended"
            pause(0.5)
        if kind == "full":
            farm.raw.config_set("maxmemory", 0)
        else:
            farm.raw.execute_command("REPLICAOF", "NO", "ONE")
        cells = farm.wait(build_id, timeout=60)
        ends.update(one["end"] for cell in cells for one in farm.attempts(cell))
        assert worker.celery() == celery
        # Who was refused comes again; until then the audit names the build that was written down.
        farm.builds.append(str(client.submit(frozen)["id"]))
        farm.wait(farm.builds[-1], timeout=60)
        farm.wait(farm.submit(client, 4), timeout=60)
    farm.raw.config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(FarmFault, match="may evict"):
        Store.connect(farm.settings).check()
    farm.raw.config_set("maxmemory-policy", "noeviction")
    pace.measure()
    fault.measured(
        slowest_503=slowest,
        retry_after=sorted(map(str, retry_after)),
        ends=dict(ends),
        small_build=pace.build,
        **farm.ledger(),
    )
    assert None not in retry_after
    assert ends == {"succeeded": 4}
    assert slowest <= pace.bound(1, 2)


@pytest.mark.fault("13")
def test_failover_to_a_replica_that_missed_writes(fault: Fault, rig: Rigs, tmp_path: Path) -> None:
    """Everybody reaches Valkey by one address, as by a virtual one; the replica behind it takes over, too old."""
    farm = rig()
    first = urlsplit(farm.valkey.url)
    replica = servers.start_valkey(tmp_path / "replica", str(first.password))
    farm.parts.callback(replica.stop)
    second = urlsplit(replica.url)
    raw = redis.Redis.from_url(replica.url, decode_responses=True)
    with Proxy(str(first.hostname), int(first.port or 0)) as line:
        farm.through(farm.valkey.url.replace(f":{first.port}", f":{line.port}"))
        client = farm.serve()
        raw.config_set("masterauth", first.password)
        raw.replicaof(first.hostname, first.port)
        wait_until(lambda: raw.info("replication")["master_link_status"] == "up")
        farm.workers("n1", "n2")
        before = farm.submit(client, 20)
        farm.wait(before)
        pace = Pace(farm, client)
        running = farm.submit(client, 40)
        wait_until(lambda: farm.store.builds.get(running)["counts"]["succeeded"] > 10, timeout=60)
        # From here on the replica hears nothing more.
        raw.config_set("masterauth", "wrong")
        raw.execute_command("CLIENT", "KILL", "TYPE", "master")
        scripts = scripts_run(farm.raw)
        after = farm.submit(client, 60)
        wait_until(
            lambda: (
                scripts_run(farm.raw) - scripts >= fault.count.writes
                and farm.store.builds.get(after)["counts"]["succeeded"] > 5
            ),
            timeout=120,
        )
        missed = scripts_run(farm.raw) - scripts
        epoch = farm.store.epoch()
        published = set(farm.published())
        raw.execute_command("REPLICAOF", "NO", "ONE")
        line.redirect(str(second.hostname), int(second.port or 0))
        promoted, at = time.monotonic(), time.time()
        farm.valkey.stop()
        wait_until(lambda: insist(farm.store.epoch) != epoch, timeout=120, message="a new epoch")
        seen = time.monotonic() - promoted
        cells = [cell for build_id in (running, after) for cell in farm.wait(build_id, timeout=120)]
        begun = [one["started_at"] for cell in cells if cell["job"] for one in farm.attempts(cell)]
        begun = [at, *sorted(time_ for time_ in begun if time_ > at)]
        standstill = max(second - first for first, second in pairwise(begun))
        settled = time.monotonic() - promoted
        again = {key: count for key, count in farm.published().items() if count > 1}
        lost = [key for key in published if not farm.artifacts.lookup(["main"], key)]
        pace.measure()
        fault.measured(
            scripts_missed=missed,
            epoch_seen_after=seen,
            longest_standstill=standstill,
            all_ended_after=settled,
            artifacts_lost=len(lost),
            small_build=pace.build,
            **farm.ledger(),
        )
        assert (lost, again) == ([], {})
        assert seen <= pace.bound(10, 15)
        assert standstill <= pace.bound(2 * LEASE, 10)
        farm.stop_workers()
        farm.server.stop()


def scripts_run(raw: redis.Redis) -> int:
    """How many scripts a server has run so far."""
    stats = raw.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("evalsha", "eval"))


@pytest.mark.fault("restored")
def test_restored_from_old_data(fault: Fault, rig: Rigs, tmp_path: Path) -> None:
    """In the old data the builds are open; since then they ended, and a newer one moved `latest`.

    One cell of each failed, and would succeed now: a build that ran again would get another verdict.
    """
    farm = rig()
    client, cells = farm.serve(), fault.count.cells
    farm.workers("n1", "n2", slots=3)
    gate = tmp_path / "gate"
    farm.script({"": [{"until": str(gate)}], "1": [{"until": str(gate), "exit": 42}]})
    frozen = [farm.freeze(cells) for _ in range(fault.count.builds)]
    builds = [str(client.submit(one)["id"]) for one in frozen]
    farm.builds += builds
    wait_until(lambda: farm.running(builds[0]), message="work has begun")
    farm.valkey.stop()
    shutil.copytree(farm.folder / "valkey" / "appendonlydir", tmp_path / "old")
    farm.start_valkey()
    gate.touch()
    for build_id in builds:
        farm.wait(build_id)
    farm.script({"": [{}]})
    newest = farm.submit(client, cells)
    farm.wait(newest)
    farm.builds.remove(newest)  # The old data do not have it.

    def state() -> tuple[list[Any], Any]:
        reports = [farm.artifacts.get_object(f"ns/main/builds/{one}/report.json").data for one in [*builds, newest]]
        return reports, farm.artifacts.get_object("ns/main/refs/latest.json").data

    before, published = state(), farm.published()
    farm.valkey.stop()
    shutil.rmtree(farm.folder / "valkey" / "appendonlydir")
    shutil.copytree(tmp_path / "old", farm.folder / "valkey" / "appendonlydir")
    farm.start_valkey()
    again = [insist(lambda one=one: client.submit(one)["id"]) for one in frozen]
    verdicts = [insist(lambda one=one: client.build(one)) for one in builds if farm.wait(one, timeout=60)]
    fault.measured(
        reports_changed=sum(one != other for one, other in zip(before[0], state()[0], strict=True)),
        verdicts=dict(Counter(one["verdict"]["exit_code"] for one in verdicts)),
        latest_moved=before[1] != state()[1],
        compiled_again=(farm.published() - published).total(),
        **farm.ledger(),
    )
    assert again == builds
    assert before == state()
    assert [one["verdict"]["exit_code"] for one in verdicts] == [1] * len(builds)
    assert farm.published() == published
    assert list(farm.artifacts.list_objects("ns/main/open/")) == []


@pytest.mark.fault("flush")
def test_flushed_in_mid_work(fault: Fault, rig: Rigs) -> None:
    """Three builds at a time, of different manifests; each has cells that ended, that run and that wait."""
    farm = rig()
    client = farm.serve()
    farm.workers("n1", "n2", slots=3)
    pace = Pace(farm, client)
    expected = [{"succeeded": 12}, {"succeeded": 14}, {"succeeded": 15, "failed": 1}]
    farm.script({"": [{"seconds": 1.0}], "16": [{"exit": 42}]})
    recoveries: list[float] = []
    sums, before, compiled_again = Counter[str](farm.ledger()), 0, 0
    farm.builds.clear()  # A flush takes them out of the store.
    for _ in range(fault.count.flushes):
        # Two jobs of each at a time, so that the first build leaves slots to those that come a moment later.
        builds = [farm.submit(client, sum(counts.values()), options="max-parallel: 2") for counts in expected]

        def in_mid_work(builds: list[str] = builds) -> bool:
            return all(
                all(farm.store.builds.get(one)["counts"][state] for state in ("succeeded", "running", "queued"))
                for one in builds
            )

        wait_until(in_mid_work, timeout=60, message="every build has cells that ended, that run and that wait")
        published = set(farm.published())
        at = float("{}.{:06}".format(*farm.raw.time()))
        farm.raw.flushall()
        for build_id, counts in zip(builds, expected, strict=True):
            cells = farm.wait(build_id, timeout=120)
            begun = [one["started_at"] for cell in cells if cell["job"] for one in farm.attempts(cell)]
            recoveries.append(min(time_ for time_ in begun if time_ > at) - at)
            known = [cell for cell in cells if cell["key"] in published]
            before += len(known)
            compiled_again += sum(map(farm.compiled, known))
            counted = client.report(build_id)["build"]["counts"]
            assert {state: counted[state] for state in ENDED if counted.get(state)} == counts
        sums.update(farm.ledger())
        farm.builds.clear()
    pace.measure()
    fault.measured(
        published_before=before,
        compiled_again=compiled_again,
        adopted=farm.adopted(),
        small_build=pace.build,
        **sums,
    )
    assert compiled_again == 0
    fault.recovered(recoveries, pace.bound(10, 15))


@pytest.mark.fault("15")
def test_what_stays_after_retention(fault: Fault, rig: Rigs) -> None:
    """Builds of a hundred jobs end, are reported and expire; nothing of them may stay, nor anything without a name."""
    farm = rig(keep_days=3.0 / 86400)
    store, raw = farm.store, farm.raw
    join_pool(store, slots=64, ttl=3600)
    build_id = submit(store, new_cell())
    run_all(store)
    store.builds.mark_reported(build_id, {"exit_code": 0})
    baseline = raw.dbsize()
    most = 0
    for start in range(0, fault.count.jobs, 100):
        build_id = submit(store, *[new_cell() for _ in range(min(100, fault.count.jobs - start))])
        run_all(store)
        most = max(most, raw.dbsize())
        store.builds.mark_reported(build_id, {"exit_code": 0})

    def expired() -> bool:
        store.builds.forget_expired()
        return raw.dbsize() <= baseline + 100

    wait_until(expired, timeout=60, message="what ended is forgotten")
    left = [key for key in raw.scan_iter(count=1000) if raw.ttl(key) == -1]
    lists = ("pools", "pool:", "wake:", "worker", "namespaces", "builds:", "index:", "unreported")
    known = tuple(f"{{farm}}:{name}" for name in lists)
    unknown = [key for key in left if not key.startswith(known)]
    fault.measured(baseline=baseline, most=most, after=raw.dbsize(), without_expiry=len(left), unaccounted=unknown)
    assert unknown == []


def run_all(store: Store) -> None:
    while handed := store.jobs.hand_out(POOL.name, 2):
        for job_id, number in handed:
            claim = store.jobs.claim(job_id, number, nonce=secrets.token_hex(8), worker="w1", node="n1")
            store.jobs.finish(job_id, claim.token, SUCCESS)

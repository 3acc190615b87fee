"""Events, workers and pools, the index, what is kept and for how long, and what is refused."""

import re
import secrets
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from farm.control.mending import Resumer
from farm.errors import FarmFault, StorageUnavailable, StoreUnavailable
from farm.jobs.estimate import Sample
from farm.jobs.state import FailureKind, Outcome
from farm.settings import load_settings
from farm.store import Store
from farm.store.link import load_scripts
from tests.support.helpers import wait_until
from tests.support.jobs import join_pool, new_cell, run_next, submit, take
from tests.support.places import ROOT
from tests.support.scripted_pool import POOL

DOCUMENT = ROOT / "docs" / "job-store.md"


@pytest.fixture
def raw(redis_url: str) -> Iterator[redis.Redis]:
    """A plain connection, to look at the server past the code under test."""
    with redis.Redis.from_url(redis_url, decode_responses=True) as connection:
        yield connection


# --- events ----------------------------------------------------------------------------------------------------------


def test_a_reader_goes_on_where_it_stopped(store: Store) -> None:
    join_pool(store)
    build_id = submit(store, new_cell())
    seen = store.events.read(build_id).items
    assert [(event["type"], event.get("state")) for event in seen] == [("build", "open"), ("accepted", None)]
    run_next(store, Outcome.success({}))
    after = store.events.read(build_id, seen[-1]["id"])
    assert not after.reset
    assert [(event["type"], event["state"]) for event in after.items] == [
        ("cell", "running"),
        ("cell", "succeeded"),
        ("build", "ended"),
    ]
    running = after.items[0]
    assert (running["attempt"], running["worker"], running["build"]) == (1, "w1", build_id)
    assert store.events.read(build_id, after.items[-1]["id"]).items == []


def test_a_reader_that_waits_hears_at_once(store: Store) -> None:
    join_pool(store)
    build_id = submit(store, new_cell())
    last = store.events.read(build_id).items[-1]["id"]
    heard: list[str] = []
    reader = threading.Thread(
        target=lambda: heard.extend(e["state"] for e in store.events.read(build_id, last, 9000).items)
    )
    reader.start()
    take(store)
    reader.join(8)
    assert heard == ["running"]


def test_a_reader_whose_position_was_trimmed_gets_one_reset(store: Store, raw: redis.Redis) -> None:
    join_pool(store)
    build_id = submit(store, new_cell())
    old = store.events.read(build_id).items[0]["id"]
    run_next(store, Outcome.success({}))
    raw.xtrim(f"{{farm}}:build:{build_id}:events", maxlen=1, approximate=False)
    found = store.events.read(build_id, old)
    assert found.reset
    assert [event["type"] for event in found.items] == ["reset"]
    assert store.events.read(build_id, found.items[0]["id"]) == type(found)([])


@pytest.mark.parametrize("position", ["1-2-3", "", "-", "1-", "18446744073709551616-0", "٣-0", "1-2\n"])
def test_an_id_that_no_stream_has_gets_one_reset(store: Store, position: str) -> None:
    build_id = submit(store, new_cell())
    found = store.events.read(build_id, f"{store.epoch()}.{position}")
    assert found.reset
    assert not store.events.read(build_id, found.items[0]["id"]).reset


@pytest.mark.parametrize("position", ["deadbeef.1700000000000-0", "nonsense", "a.b.c"])
def test_a_position_of_another_epoch_gets_one_reset(store: Store, position: str) -> None:
    build_id = submit(store, new_cell())
    found = store.events.read(build_id, position)
    assert found.reset
    assert not store.events.read(build_id, found.items[0]["id"]).reset


def test_the_epoch_is_new_when_the_store_was_lost(store: Store, raw: redis.Redis) -> None:
    epoch = store.epoch()
    assert store.epoch() == epoch
    raw.flushall()
    assert store.epoch() != epoch


def test_builds_are_resumed_at_first_and_when_the_epoch_is_new(store: Store, raw: redis.Redis) -> None:
    calls: list[str] = []
    failing = True

    def resume() -> None:
        calls.append("resume")
        if failing:
            raise StorageUnavailable("object storage is away")

    resumer = Resumer(store, resume)
    with pytest.raises(StorageUnavailable):
        resumer.check()
    failing = False
    resumer.check()
    assert len(calls) == 2, "what failed is tried again"
    resumer.check()
    assert len(calls) == 2
    raw.flushall()
    resumer.check()
    assert len(calls) == 3


# --- workers and pools -----------------------------------------------------------------------------------------------


HOUR = 3600.0


def an_hour_later(raw: redis.Redis) -> None:
    """Have what was handed out, and the worker's last claim or end of an attempt, be an hour older."""
    handed = f"{{farm}}:pool:{POOL.name}:handed"
    for job in raw.zrange(handed, 0, -1):
        raw.zincrby(handed, -HOUR * 1000, job)
    raw.hincrby("{farm}:worker:w1", "busy_at", -int(HOUR) * 1000)


def test_a_worker_between_two_long_jobs_does_not_idle(store: Store, raw: redis.Redis) -> None:
    """Jobs wait with the broker for as long as those before them take; that alone says nothing against the worker."""
    join_pool(store, slots=2)
    submit(store, new_cell(), new_cell())
    first, _ = store.jobs.hand_out(POOL.name, 1)
    an_hour_later(raw)
    assert store.workers.heartbeat("w1").unclaimed >= HOUR
    claim = store.jobs.claim(*first, nonce="n", worker="w1", node="n1")
    assert store.workers.heartbeat("w1").unclaimed < HOUR
    an_hour_later(raw)
    assert store.workers.heartbeat("w1").unclaimed >= HOUR
    store.jobs.finish(first[0], claim.token, Outcome.success({}))
    beat = store.workers.heartbeat("w1")
    assert (beat.running, beat.unclaimed < HOUR) == (0, True)
    an_hour_later(raw)
    assert store.workers.heartbeat("w1").unclaimed >= HOUR, "it leaves a job lying"


def test_workers_of_one_kernel_with_other_lock_files_are_known(store: Store) -> None:
    def register(name: str, locks: str) -> None:
        pools = [POOL.as_dict()]
        store.workers.register({"id": name, "node": name, "slots": 1, "locks": locks, "pools": pools}, ttl=60)

    join_pool(store)
    register("w2", "kernel-a 1:2")
    register("w3", "kernel-a 1:2")
    register("w4", "kernel-b 1:3")
    assert not store.workers.is_split("kernel-a 1:2")
    assert store.workers.is_split("kernel-a 1:9")
    register("w5", "kernel-a none")
    assert store.workers.is_split("kernel-a 1:2")
    store.workers.leave("w5")
    assert not store.workers.is_split("kernel-a 1:2")


def test_workers_live_by_their_heartbeats_and_pools_for_good(store: Store) -> None:
    join_pool(store)
    join_pool(store, "w2", node="n2", slots=3)
    assert store.workers.heartbeat("w1").answer == "ok"
    (pool,) = store.workers.pools()
    assert (pool["live_workers"], pool["slots"], pool["pool"]) == (2, 4, POOL.as_dict())
    join_pool(store, ttl=0.1)
    wait_until(lambda: [worker["id"] for worker in store.workers.list()] == ["w2"])
    assert store.workers.heartbeat("w1").answer == "unknown"
    store.workers.leave("w2")
    (pool,) = store.workers.pools()
    assert (pool["live_workers"], pool["slots"]) == (0, 0)
    store.workers.forget_dead()


def test_a_worker_is_listed_with_what_it_runs(store: Store) -> None:
    join_pool(store)
    submit(store, new_cell(), new_cell())
    job_id, _ = take(store)
    (worker,) = store.workers.list()
    assert (worker["running"], worker["draining"]) == ([job_id], False)
    assert store.workers.heartbeat("w1").running == 1


def test_a_drained_worker_hears_of_it_and_gets_no_more(store: Store) -> None:
    join_pool(store)
    submit(store, new_cell())
    (handed,) = store.jobs.hand_out(POOL.name, 1)
    assert store.workers.drain("w1")
    assert store.jobs.claim(*handed, nonce="n", worker="w1", node="n1").answer == "elsewhere", "before it hears of it"
    assert store.workers.heartbeat("w1").answer == "drain"
    store.workers.heartbeat("w1", draining=True)
    assert store.jobs.hand_out(POOL.name, 2) == []
    assert store.jobs.get(handed[0])["charged"] == 0
    assert not store.workers.drain("w7")


def test_one_process_leads(store: Store) -> None:
    assert store.leader.lead("a", 60)
    assert store.leader.lead("a", 60)
    assert not store.leader.lead("b", 60)
    store.leader.resign("b")
    store.leader.resign("a")
    assert store.leader.lead("b", 60)


# --- index -----------------------------------------------------------------------------------------------------------


def test_the_index_knows_what_was_put_and_whether_it_is_complete(store: Store) -> None:
    keys = [secrets.token_hex(32) for _ in range(2500)]
    assert not store.index.complete("main")
    assert store.index.fill("main", ((key, {"latency": 1.5}) for key in keys)) == 2500
    assert store.index.complete("main")
    assert not store.index.complete("other")
    store.index.put("main", "f" * 64, {"latency": None})
    assert store.index.get_many("main", [keys[7], "0" * 64, "f" * 64]) == {
        keys[7]: {"latency": 1.5},
        "f" * 64: {"latency": None},
    }
    store.index.remove("main", [keys[7]])
    assert store.index.get_many("main", [keys[7]]) == {}
    assert store.index.get_many("main", []) == {}


# --- keys ------------------------------------------------------------------------------------------------------------


def live_through(store: Store) -> list[str]:
    """Builds that end in every way; returns their ids."""
    join_pool(store)
    builds = [submit(store, new_cell(), new_cell(facts={}), max_parallel=1) for _ in range(2)]
    builds.append(submit(store, new_cell(), new_cell(), fail_fast=True))
    builds.append(submit(store, *[new_cell() for _ in range(3)]))
    job_id, claim = take(store)
    store.jobs.renew(claim.token, job_id, phase="compiling", log_tail=b"log")
    store.jobs.finish(job_id, claim.token, Outcome.success({}))
    run_next(store, Outcome.success({}))
    run_next(store, Outcome.failure(FailureKind.BAD_MODEL, "bad"))
    store.builds.stop(builds[2])
    run_next(store, Outcome.failure(FailureKind.STORAGE, "down"))
    store.builds.cancel(builds[3])
    return builds


def test_everything_of_a_finished_build_expires(store: Store, raw: redis.Redis) -> None:
    """The leak check: what has no expiry is a record of the farm itself, never of a build or a job."""
    for build_id in live_through(store):
        assert store.builds.get(build_id)["state"] == "ended"
        store.builds.mark_reported(build_id, {"exit_code": 0})
    store.workers.leave("w1")
    assert store.builds.ended_unreported() == []
    immortal = {key for key in raw.scan_iter() if raw.ttl(key) < 0}
    allowed = {
        f"pool:{POOL.name}:low",
        "epoch",
        "pools",
        "namespaces",
        "builds:main",
        "wake:pools",
        "wake:builds",
        "index:main",
    }
    assert {key.removeprefix("{farm}:") for key in immortal} <= allowed
    for key in raw.scan_iter("{farm}:build:*"):
        raw.delete(key)
    assert store.builds.forget_expired() == 4
    assert store.builds.list("main") == []


def test_a_reported_build_keeps_its_verdict_and_never_reopens(store: Store) -> None:
    join_pool(store)
    cell = new_cell()
    build_id = submit(store, cell)
    store.builds.mark_reported(build_id, {"exit_code": 0})
    assert store.builds.get(build_id)["state"] == "open", "it has not ended"
    run_next(store, Outcome.success({}))
    store.builds.mark_reported(build_id, {"exit_code": 0})
    store.builds.mark_reported(build_id, {"exit_code": 1})
    store.builds.create({"id": build_id, "namespace": "main", "cells": 1}, [[cell]])
    build = store.builds.get(build_id)
    assert (build["state"], build["verdict"]) == ("reported", {"exit_code": 0})


def test_every_key_is_documented(store: Store, raw: redis.Redis) -> None:
    patterns = re.findall(r"^\| `([^`]+)`", DOCUMENT.read_text(), re.MULTILINE)
    known = [
        re.compile(re.sub(r"<\\?[a-z-]+\\?>", ".+", re.escape(pattern).replace("\\-", "-"))) for pattern in patterns
    ]
    seen = set(raw.scan_iter())
    live_through(store)
    submit(store, new_cell(), new_cell())
    take(store)
    store.jobs.expire_leases("reaper")
    store.leader.lead("a", 60)
    store.epoch()
    store.index.fill("main", [("a" * 64, {})])
    seen |= set(raw.scan_iter())
    assert len(seen) > 20
    assert [key for key in seen if not any(one.fullmatch(key.removeprefix("{farm}:")) for one in known)] == []


def test_every_script_says_what_it_takes_and_answers() -> None:
    folder = ROOT / "farm" / "store" / "lua"
    for path in folder.glob("[!_]*.lua"):
        header = path.read_text().split("\n\n")[0]
        assert all(f"\n-- {part}: " in header for part in ("keys", "arguments", "answer")), path.name


def test_lines_of_scripts_are_no_longer_than_those_of_python() -> None:
    folder = ROOT / "farm" / "store" / "lua"
    lines = [(path.name, line) for path in sorted(folder.glob("*.lua")) for line in path.read_text().splitlines()]
    assert [(name, line) for name, line in lines if len(line) > 120] == []


def test_a_script_refuses_arguments_that_its_header_does_not_name() -> None:
    claim = load_scripts("")["claim"]
    with pytest.raises(TypeError, match=r"claim.lua takes job, attempt, nonce"):
        claim.bind({"job": "j", "attempt": 1})


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "fix"),
    [({"appendonly": "no"}, "appendonly yes"), ({"maxmemory-policy": "allkeys-lru"}, "maxmemory-policy noeviction")],
)
def test_a_server_that_would_lose_work_is_refused_with_the_fix(store: Store, raw: redis.Redis, wrong, fix) -> None:
    before = {name: raw.config_get(name)[name] for name in wrong}
    store.check()
    try:
        for name, value in wrong.items():
            raw.config_set(name, value)
        with pytest.raises(FarmFault, match=re.escape(fix)):
            store.check()
    finally:
        for name, value in before.items():
            raw.config_set(name, value)
    store.check()


def test_a_server_that_is_away_is_named_without_its_password() -> None:
    store = Store.connect(load_settings({}, redis_url="redis://:hunter2@127.0.0.1:1/0"))
    with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:1 ") as caught:
        store.builds.get("b-0000000000000000")
    assert "hunter2" not in str(caught.value)


def test_a_full_server_is_unavailable_and_loses_nothing(store: Store, raw: redis.Redis) -> None:
    join_pool(store)
    build_id = submit(store, new_cell())
    job_id, claim = take(store)
    raw.config_set("maxmemory", "1mb")
    try:
        with pytest.raises(StoreUnavailable, match="refuses"):
            submit(store, new_cell())
        with pytest.raises(StoreUnavailable):
            store.jobs.renew(claim.token, job_id)
    finally:
        raw.config_set("maxmemory", "0")
    assert store.jobs.finish(job_id, claim.token, Outcome.success({})) == "ok"
    assert store.builds.get(build_id)["state"] == "ended"


def test_a_server_that_refuses_commands_sent_in_one_go_is_unavailable_too(store: Store, raw: redis.Redis) -> None:
    raw.config_set("min-replicas-to-write", 1)
    try:
        with pytest.raises(StoreUnavailable, match="refuses: NOREPLICAS") as refused:
            store.history.remember("main", [worked("a" * 64, 12.25)])
    finally:
        raw.config_set("min-replicas-to-write", 0)
    assert "ZADD" not in refused.value.message


# --- durations ----------------------------------------------------------------------------------------------------


def worked(key: str, seconds: float, day: int = 1) -> dict[str, Any]:
    work = {"like": "onnxruntime-cpu.fp32.off", "model": "ab" * 6, "size": 1000}
    return {"key": key, "seconds": seconds, "created": f"2026-11-{day:02}T00:00:00+00:00", "work": work}


def test_durations_are_the_same_from_attempts_and_from_object_storage(store: Store) -> None:
    join_pool(store)
    submit(store, new_cell("a" * 64), new_cell("b" * 64))
    run_next(store, Outcome.success(worked("a" * 64, 12.25)))
    run_next(store, Outcome.success(worked("b" * 64, 99.0), hit=True))
    learnt = store.history.samples(["main"], ["onnxruntime-cpu.fp32.off"])
    assert learnt == {"onnxruntime-cpu.fp32.off": [Sample("ab" * 6, 1000, 12.25)]}, "a hit took no time"
    store.index.fill("main", [("a" * 64, worked("a" * 64, 12.25))])
    assert store.history.samples(["main"], ["onnxruntime-cpu.fp32.off"]) == learnt


def test_the_newest_durations_are_kept(store: Store) -> None:
    store.history.remember("main", [worked(f"{number:064}", float(number), 1 + number // 100) for number in range(300)])
    (samples,) = store.history.samples(["main", "other"], ["onnxruntime-cpu.fp32.off"]).values()
    assert sorted(sample.seconds for sample in samples) == [float(number) for number in range(100, 300)]


def test_what_a_job_took_is_counted_over_its_attempts(store: Store) -> None:
    join_pool(store)
    build_id = submit(store, new_cell())
    job_id, claim = take(store)
    wait_until(lambda: store.builds.cells(build_id)[0]["started_at"] < time.time() - 0.05)
    store.jobs.finish(job_id, claim.token, Outcome.released())
    first = store.builds.cells(build_id)[0]["spent"]
    assert first >= 0.05
    run_next(store, Outcome.success({}))
    assert store.builds.cells(build_id)[0]["spent"] >= first

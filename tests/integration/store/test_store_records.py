"""Events, workers and pools, the index, what is kept and for how long, and what is refused."""

import json
import os
import re
import secrets
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from prometheus_client import REGISTRY

from farm.control.loops import Resumer
from farm.errors import FarmFault, StorageUnavailable, StoreUnavailable
from farm.jobs.estimate import Compile
from farm.jobs.state import FailureKind, Outcome
from farm.local import servers
from farm.settings import Settings, load_settings
from farm.store import Store, broker, job_records
from farm.store.build_records import STOPPED
from farm.store.link import key as key_of
from farm.store.link import load_scripts
from farm.store.store import Beat
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
    seen = store.events.read(build_id)["items"]
    assert [(event["type"], event.get("state")) for event in seen] == [("build", "open"), ("accepted", None)]
    run_next(store, Outcome.success({}))
    after = store.events.read(build_id, seen[-1]["id"])
    assert not after["reset"]
    assert [(event["type"], event["state"]) for event in after["items"]] == [
        ("cell", "running"),
        ("cell", "succeeded"),
        ("build", "ended"),
    ]
    running = after["items"][0]
    assert (running["attempt"], running["worker"], running["build"]) == (1, "w1", build_id)
    assert store.events.read(build_id, after["items"][-1]["id"])["items"] == []


def test_a_reader_that_waits_hears_at_once(store: Store) -> None:
    join_pool(store)
    build_id = submit(store, new_cell())
    last = store.events.read(build_id)["items"][-1]["id"]
    heard: list[str] = []
    reader = threading.Thread(
        target=lambda: heard.extend(e["state"] for e in store.events.read(build_id, last, 9000)["items"])
    )
    reader.start()
    take(store)
    reader.join(8)
    assert heard == ["running"]


@pytest.mark.damaged
def test_a_reader_whose_position_was_trimmed_gets_one_reset(store: Store, raw: redis.Redis) -> None:
    join_pool(store)
    build_id = submit(store, new_cell())
    old = store.events.read(build_id)["items"][0]["id"]
    run_next(store, Outcome.success({}))
    raw.xtrim(f"{{farm}}:build:{build_id}:events", maxlen=1, approximate=False)
    found = store.events.read(build_id, old)
    assert found["reset"]
    assert [event["type"] for event in found["items"]] == ["reset"]
    assert store.events.read(build_id, found["items"][0]["id"]) == {"items": [], "reset": False}


@pytest.mark.parametrize("position", ["1-2-3", "", "-", "1-", "18446744073709551616-0", "٣-0", "1-2\n"])
def test_an_id_that_no_stream_has_gets_one_reset(store: Store, position: str) -> None:
    build_id = submit(store, new_cell())
    found = store.events.read(build_id, f"{store.epoch()}.{position}")
    assert found["reset"]
    assert not store.events.read(build_id, found["items"][0]["id"])["reset"]


@pytest.mark.parametrize("position", ["deadbeef.1700000000000-0", "nonsense", "a.b.c"])
def test_a_position_of_another_epoch_gets_one_reset(store: Store, position: str) -> None:
    build_id = submit(store, new_cell())
    last = store.events.read(build_id)["items"][-1]
    found = store.events.read(build_id, position)
    assert found["reset"]
    assert [(event["id"], event["at"]) for event in found["items"]] == [(last["id"], last["at"])]
    (gone,) = store.events.read("b-gone", position)["items"]
    assert gone["at"] == pytest.approx(last["at"], abs=60)
    assert not store.events.read(build_id, found["items"][0]["id"])["reset"]


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


def test_what_a_worker_asks_costs_the_server_no_more_in_a_large_fleet(store: Store, raw: redis.Redis) -> None:
    def cost(ask: Callable[[], object]) -> int:
        """Commands that the server runs for it, also within scripts; others ask now and then."""
        before, after = [], []
        for _ in range(3):
            before.append(raw.info("stats")["total_commands_processed"])
            ask()
            after.append(raw.info("stats")["total_commands_processed"])
        return min(late - early for early, late in zip(before, after, strict=True))

    def costs() -> list[int]:
        return [
            cost(lambda: store.workers.heartbeat("w1")),
            cost(lambda: store.jobs.claim(job, 1, nonce="the same", worker="w1", node="w1")),
        ]

    def fleet(numbers: range) -> None:
        for number in numbers:
            name = f"w{number}"
            worker = {"id": name, "node": name, "slots": 1, "locks": f"kernel-{number} 1:2", "pools": [POOL.as_dict()]}
            store.workers.register(worker, ttl=60)
            submit(store, new_cell())
            take(store, name, name)

    fleet(range(1, 3))
    submit(store, new_cell())
    ((job, _),) = store.jobs.hand_out(POOL.name, 1)
    costs()  # The job is claimed once; later claims are the same.
    alone = costs()
    fleet(range(3, 40))
    assert costs() == alone


def test_a_claim_says_whether_workers_of_the_same_kernel_have_other_lock_files(store: Store) -> None:
    def register(name: str, locks: str) -> None:
        pools = [POOL.as_dict()]
        store.workers.register({"id": name, "node": name, "slots": 1, "locks": locks, "pools": pools}, ttl=60)

    def is_split(name: str) -> bool:
        return store.jobs.claim(job, 1, nonce="the same", worker=name, node=name).is_split

    join_pool(store)
    submit(store, new_cell())
    ((job, _),) = store.jobs.hand_out(POOL.name, 1)
    register("w2", "kernel-a 1:2")
    register("w3", "kernel-a 1:2")
    register("w4", "kernel-b 1:3")
    assert not is_split("w1"), "it cannot say what its kernel is"
    assert not is_split("w2")
    register("w5", "kernel-a none")
    assert is_split("w2")
    assert is_split("w5")
    assert not is_split("w4")
    store.workers.leave("w5")
    assert not is_split("w2")


def test_workers_live_by_their_heartbeats_and_pools_for_good(store: Store) -> None:
    join_pool(store)
    join_pool(store, "w2", node="n2", slots=3)
    assert store._link.ask("PTTL", ("worker", "w2")) == pytest.approx(60_000, abs=15_000)
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
    assert store.planes.lead("a", 60)
    assert store.planes.lead("a", 60)
    assert not store.planes.lead("b", 60)
    store.planes.resign("b")
    assert not store.planes.lead("b", 60), "it was not the leader"
    store.planes.resign("a")
    assert store.planes.lead("b", 60)


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


def test_an_artifact_in_the_index_takes_less_than_half_a_kilobyte(store: Store, raw: redis.Redis) -> None:
    """It stays for ever: a job that ended leaves nothing else for so long."""
    join_pool(store)
    known = {}
    for _ in range(50):
        key, digests = secrets.token_hex(32), [secrets.token_hex(32) for _ in range(3)]
        submit(store, new_cell(key))
        known[key] = {
            **worked(key, 12.25),
            **{"namespace": "main", "sidecar": f"ns/main/artifacts/{key[:2]}/{key}.json", "device": "gfx942"},
            **{"program": {"path": "program.mxr", "digest": digests[0], "size": 123456}, "runs_as": digests[1]},
            **{"toolchain": f"migraphx2.13-{digests[2][:8]}", "driver": "6.12", "verified": True, "unverified": ""},
            **{"errors": {"logits": 1.5e-7}, "rms": {"logits": 1e-7}, "equal": {}, "nonfinite": [], "weak": False},
            **{"spread": {"logits": 3.25}, "doubted": {}, "latency": 0.00123, "p99": 0.00234, "ratio": None},
            **{"baseline_latency": None, "against": None, "tuning": None, "load": 0.5, "throughput": 813.0},
            **{"compile_seconds": 12.25, "node": "gpu-17", "shared": False, "processes": None, "peak_memory": 10**9},
            **{"quantized": {}, "fallback": {}},
        }
        run_next(store, Outcome.success(known[key]))
    assert store.index.get_many("main", list(known)) == known
    assert raw.memory_usage("{farm}:index:main:facts", samples=0) < 500 * len(known)


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
    store.builds.cancel(builds[2], STOPPED)
    run_next(store, Outcome.failure(FailureKind.STORAGE, "down"))
    store.builds.cancel(builds[3])
    return builds


def test_everything_of_a_finished_build_expires(store: Store, raw: redis.Redis) -> None:
    """The leak check: what has no expiry is a record of the farm itself, never of a build or a job."""
    for build_id in live_through(store):
        assert store.builds.get(build_id)["state"] == "ended"
        store.builds.mark_reported(build_id, {"exit_code": 0})
        if len(store.builds.jobs(build_id)) < 3:
            pack(store, build_id)
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
        "index:main:facts",
    }
    assert {key.removeprefix("{farm}:") for key in immortal} <= allowed
    for key in raw.scan_iter("{farm}:build:*"):
        raw.delete(key)
    assert store.builds.forget_expired() == 4
    assert store.builds.list("main") == []


def pack(store: Store, build_id: str) -> None:
    store.builds.mark_reported(build_id, {"exit_code": 0})
    store.jobs.pack(build_id, store.builds.jobs(build_id).values())
    store.builds.pack(build_id)


def full_records(raw: redis.Redis) -> set[str]:
    """Return the jobs with a record that is not packed."""
    return {key for key in raw.scan_iter("{farm}:job:*") if not key.endswith((":packed", ":log"))}


def jobs_of(store: Store, *builds: str) -> dict[str, Any]:
    names = {job for build_id in builds for job in store.builds.jobs(build_id).values()}
    return {name: store.jobs.get(name) for name in names}


def test_a_packed_job_is_read_as_it_was(store: Store, raw: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_records, "PACKED_TOGETHER", 2)
    builds = live_through(store)
    before = jobs_of(store, *builds)
    assert None not in before.values() and full_records(raw)
    for build_id in builds:
        pack(store, build_id)
    assert full_records(raw) == set()
    assert {name: store.jobs.get(name) for name in before} == before
    assert [store.builds.get(build_id)["state"] for build_id in builds] == ["reported"] * 4


def test_packing_that_was_cut_off_is_done_again(
    store: Store, raw: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_records, "PACKED_TOGETHER", 2)
    build_id = submit(store, *[new_cell() for _ in range(5)])
    join_pool(store)
    last, claim = take(store)
    for _ in range(4):
        run_next(store, Outcome.success({}))
    store.builds.cancel(build_id)
    before = {name: job for name, job in jobs_of(store, build_id).items() if name != last}
    store.builds.mark_reported(build_id, {"exit_code": 1})
    run, calls = store._link.run, []

    def cut_off(script: str, **arguments: Any) -> Any:
        calls.append(script)
        if len(calls) == 2:
            raise StoreUnavailable("away")
        return run(script, **arguments)

    with monkeypatch.context() as patched, pytest.raises(StoreUnavailable):
        patched.setattr(store._link, "run", cut_off)
        store.jobs.pack(build_id, store.builds.jobs(build_id).values())
    assert {name: store.jobs.get(name) for name in before} == before
    assert store.jobs.get(last)["state"] == "running", "nobody wants it, but its worker has not heard so"
    assert store.jobs.finish(last, claim.token, Outcome.cancelled()) == "ok"
    pack(store, build_id)
    assert full_records(raw) == set()
    assert {name: store.jobs.get(name) for name in before} == before
    assert store.jobs.get(last)["state"] == "cancelled"


def test_a_job_that_runs_on_after_its_build_is_not_packed(store: Store, raw: redis.Redis) -> None:
    join_pool(store)
    build_id = submit(store, new_cell(), new_cell())
    run_next(store, Outcome.success({}))
    job_id, claim = take(store)
    store.builds.cancel(build_id)
    records = store.jobs._records([job_id])
    pack(store, build_id)
    store._link.run("pack_jobs", build=build_id, jobs=json.dumps([job_id]), logged="[]", packed=b"")
    assert store.jobs._records([job_id]) == records
    assert all(job_id in key for key in full_records(raw)), "the other one is packed"
    assert store.jobs.finish(job_id, claim.token, Outcome.cancelled()) == "ok"
    assert store.jobs.get(job_id)["state"] == "cancelled"


def test_a_worker_that_ends_a_packed_attempt_is_refused_and_leaves_nothing(store: Store, raw: redis.Redis) -> None:
    join_pool(store)
    build_id = submit(store, new_cell())
    store.jobs.expire_leases("reaper")
    job_id, claim = take(store)
    store.jobs.finish(job_id, claim.token, Outcome.failure(FailureKind.BAD_MODEL, "bad"))
    pack(store, build_id)
    before = set(raw.scan_iter()), store.jobs.get(job_id)
    assert store.jobs.finish(job_id, claim.token, Outcome.success({})) == "superseded"
    assert store.jobs.renew(claim.token, job_id, phase="compiling", log_tail=b"late") == "lost"
    assert store.jobs.claim(job_id, 1, nonce="n", worker="w1", node="n1").answer == "stale"
    assert (set(raw.scan_iter()), store.jobs.get(job_id)) == before


def test_a_build_that_goes_on_keeps_its_cells_when_another_one_packs_their_job(store: Store) -> None:
    join_pool(store)
    shared, alone = new_cell(), new_cell()
    first, second = submit(store, shared), submit(store, shared, alone)
    job_id = run_next(store, Outcome.success({"key": shared["key"]}))
    cells, job = store.builds.cells(second), store.jobs.get(job_id)
    pack(store, first)
    assert (store.builds.cells(second), store.jobs.get(job_id)) == (cells, job)
    run_next(store, Outcome.success({}))
    pack(store, second)
    assert store.jobs.get(job_id) == job


def test_who_follows_a_packed_build_is_led_to_its_report(store: Store) -> None:
    join_pool(store)
    build_id = submit(store, new_cell())
    seen = store.events.read(build_id)["items"][-1]["id"]
    run_next(store, Outcome.success({}))
    store.builds.mark_reported(build_id, {"exit_code": 0})
    end = store.events.read(build_id)["items"][-1]["id"]
    store.builds.pack(build_id)
    store.builds.pack(build_id)
    for position in (None, seen, end):
        answer = store.events.read(build_id, position)
        assert [item["type"] for item in answer["items"]] == ["reset"]
    assert store.events.read(build_id, answer["items"][0]["id"])["items"] == []


def test_only_a_reported_build_is_packed(store: Store) -> None:
    join_pool(store)
    build_id = submit(store, cell := new_cell())
    store.builds.pack(build_id)
    run_next(store, Outcome.success({}))
    store.builds.pack(build_id)
    assert [row["state"] for row in store.builds.cells(build_id)] == ["succeeded"]
    assert list(store.builds.unpacked(-60.0)) == [], "it waits for its report"
    store.builds.mark_reported(build_id, {"exit_code": 0})
    assert list(store.builds.unpacked(60.0)) == []
    assert list(store.builds.unpacked(-60.0)) == [("main", build_id)]
    pack(store, build_id)
    assert list(store.builds.unpacked(-60.0)) == []
    assert store.builds.create({"id": build_id, "namespace": "main", "cells": 1}, [cell]) == 1, "a repeated submission"
    assert store.builds.cells(build_id) == []


@pytest.mark.parametrize(("log", "left"), [("f" * 64, None), ("", b"last words")])
def test_the_last_words_of_a_packed_job_stay_if_no_log_was_stored(store: Store, log: str, left: bytes | None) -> None:
    join_pool(store)
    build_id = submit(store, new_cell())
    job_id, claim = take(store)
    store.jobs.renew(claim.token, job_id, phase="compiling", log_tail=b"last words")
    store.jobs.finish(job_id, claim.token, Outcome.failure(FailureKind.BAD_MODEL, "bad", log=log))
    pack(store, build_id)
    assert store.jobs.log_tail(job_id) == left


def test_a_packed_job_takes_less_than_a_kilobyte(store: Store, raw: redis.Redis) -> None:
    """With an order of a kilobyte, and what its build keeps of it."""
    join_pool(store)
    build_id = submit(store, *[new_cell() for _ in range(100)])
    for _ in range(100):
        run_next(store, Outcome.success({"key": secrets.token_hex(32)}, log=secrets.token_hex(32)))
    pack(store, build_id)
    kept = [key for key in raw.scan_iter() if key.startswith(("{farm}:job:", "{farm}:build:"))]
    assert sum(raw.memory_usage(key, samples=0) for key in kept) < 700 * 100


def test_a_reported_build_keeps_its_verdict_and_never_reopens(store: Store) -> None:
    join_pool(store)
    cell = new_cell()
    build_id = submit(store, cell)
    store.builds.mark_reported(build_id, {"exit_code": 0})
    assert store.builds.get(build_id)["state"] == "open", "it has not ended"
    run_next(store, Outcome.success({}))
    store.builds.mark_reported(build_id, {"exit_code": 0})
    store.builds.mark_reported(build_id, {"exit_code": 1})
    store.builds.create({"id": build_id, "namespace": "main", "cells": 1}, [cell])
    build = store.builds.get(build_id)
    assert (build["state"], build["verdict"]) == ("reported", {"exit_code": 0})


def test_every_key_is_documented(store: Store, raw: redis.Redis) -> None:
    patterns = re.findall(r"^\| `([^`]+)`", DOCUMENT.read_text(), re.MULTILINE)
    known = [
        re.compile(re.sub(r"<\\?[a-z-]+\\?>", ".+", re.escape(pattern).replace("\\-", "-"))) for pattern in patterns
    ]
    seen = set(raw.scan_iter())
    finished = live_through(store)
    submit(store, new_cell(), new_cell())
    take(store)
    pack(store, finished[0])
    store.jobs.expire_leases("reaper")
    store.planes.lead("a", 60)
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


def test_the_newest_signed_version_of_a_ref_is_known_until_it_is_forgotten(store: Store) -> None:
    for path, version in (("main/prod", 3), ("main/prod", 2), ("main/v1", 1)):
        store.signed.remember(path, version)
    assert (store.signed.version("main/prod"), store.signed.version("main/v1")) == (3, 1)
    store.signed.forget("main/prod")
    assert (store.signed.version("main/prod"), store.signed.version("main/v1")) == (0, 1)
    store.signed.forget()
    assert store.signed.version("main/v1") == 0


def test_a_server_that_is_away_is_named_without_its_password() -> None:
    store = Store.connect(load_settings({}, redis_url="redis://:hunter2@127.0.0.1:1/0"))
    with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:1 ") as caught:
        store.builds.get("b-0000000000000000")
    assert "hunter2" not in str(caught.value)


def test_a_store_that_is_closed_has_no_connection(redis_url: str, raw: redis.Redis) -> None:
    store = Store.connect(load_settings({}, redis_url=redis_url))
    ours = str(store._link.ask("CLIENT ID"))
    assert ours in {client["id"] for client in raw.client_list()}
    store.close()
    wait_until(lambda: ours not in {client["id"] for client in raw.client_list()}, message="it is closed")


def test_a_wrong_password_is_said_and_not_shown(redis_url: str, raw: redis.Redis) -> None:
    place = redis_url.rpartition("@")[2].removeprefix("redis://")
    settings = load_settings({}, redis_url=f"redis://nobody-known:s3cret@{place}")
    for ask in (Store.connect(settings).now, lambda: broker.queued(broker.make_celery(settings), "pool")):
        with pytest.raises(StoreUnavailable, match="refuses the user or password") as raised:
            ask()
        assert "redis_url" in raised.value.hint
        assert "s3cret" not in str(raised.value)


def test_a_password_that_a_sentinel_refuses_is_said_and_not_shown(redis_url: str, tmp_path: Path) -> None:
    (port,) = servers.free_ports(1)
    known = redis.connection.parse_url(redis_url)
    lines = [f"port {port}", "requirepass ask", f"sentinel monitor farm 127.0.0.1 {known['port']} 1"]
    (tmp_path / "sentinel.conf").write_text("\n".join([*lines, f"sentinel auth-pass farm {known['password']}"]))
    with subprocess.Popen(
        [servers.valkey_binary(), tmp_path / "sentinel.conf", "--sentinel"], stdout=subprocess.DEVNULL
    ) as sentinel:
        try:
            place = f"127.0.0.1:{port}/0?master=farm"
            mine = f":{known['password']}@"
            right = Store.connect(load_settings({}, redis_url=f"sentinel://{mine}{place}&sentinel_password=ask"))
            wait_until(lambda: answers(right), message="the Sentinel")
            settings = load_settings({}, redis_url=f"sentinel://{mine}{place}&sentinel_password=s3cret")
            for ask in (Store.connect(settings).now, lambda: broker.queued(broker.make_celery(settings), "pool")):
                with pytest.raises(StoreUnavailable, match=r"a Sentinel at .* refuses the user or password") as raised:
                    ask()
                assert "sentinel_password" in raised.value.hint
                assert "s3cret" not in str(raised.value)
        finally:
            sentinel.terminate()


def answers(store: Store) -> bool:
    with suppress(StoreUnavailable):
        return bool(store.now())
    return False


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
        with pytest.raises(StoreUnavailable, match="NOREPLICAS"):
            store.check()
    finally:
        raw.config_set("min-replicas-to-write", 0)
    assert "ZADD" not in refused.value.message


def test_a_wait_for_work_is_not_counted_as_a_slow_answer(store: Store) -> None:
    def answers() -> float:
        return REGISTRY.get_sample_value("farm_store_seconds_count", {"operation": "command"}) or 0.0

    before = answers()
    store.wakeups.next("pools", 0.01)
    assert answers() == before
    store.now()
    assert answers() == before + 1


# --- durations ----------------------------------------------------------------------------------------------------


def worked(key: str, seconds: float, second: int = 0) -> dict[str, Any]:
    work = {"like": "onnxruntime-cpu.fp32.off", "model": "ab" * 6, "size": 1000}
    return {
        "key": key,
        "seconds": seconds,
        "created": f"2026-11-01T00:{second // 60:02}:{second % 60:02}+00:00",
        "work": work,
    }


def test_durations_are_the_same_from_attempts_and_from_object_storage(store: Store) -> None:
    join_pool(store)
    submit(store, new_cell("a" * 64), new_cell("b" * 64))
    run_next(store, Outcome.success(worked("a" * 64, 12.25)))
    run_next(store, Outcome.success(worked("b" * 64, 99.0), hit=True))
    learnt = store.history.samples(["main"], ["onnxruntime-cpu.fp32.off"])
    assert learnt == {"onnxruntime-cpu.fp32.off": [Compile("ab" * 6, 1000, 12.25)]}, "a hit took no time"
    store.index.fill("main", [("a" * 64, worked("a" * 64, 12.25))])
    assert store.history.samples(["main"], ["onnxruntime-cpu.fp32.off"]) == learnt


def test_the_newest_durations_are_kept(store: Store) -> None:
    store.history.remember("main", [worked(f"{999 - number:064}", float(number), number) for number in range(300)])
    (samples,) = store.history.samples(["main", "other"], ["onnxruntime-cpu.fp32.off"]).values()
    assert sorted(sample.seconds for sample in samples) == [float(number) for number in range(100, 300)]
    join_pool(store)
    submit(store, new_cell())
    run_next(store, Outcome.success(worked("a" * 64, 300.0, 300)))
    (samples,) = store.history.samples(["main"], ["onnxruntime-cpu.fp32.off"]).values()
    assert sorted(sample.seconds for sample in samples) == [float(number) for number in range(101, 301)]


def test_what_ended_is_kept_for_as_many_days_as_is_set(redis_url: str) -> None:
    store = Store.connect(load_settings({}, redis_url=redis_url, keep_days=3))
    join_pool(store)
    submit(store, new_cell())
    job_id = run_next(store, Outcome.success({}))
    assert store._link.ask("PTTL", ("job", job_id)) == pytest.approx(3 * 86_400_000, abs=600_000)


def test_what_a_job_took_is_counted_over_its_attempts(store: Store) -> None:
    join_pool(store)
    build_id = submit(store, new_cell())
    job_id, claim = take(store)
    wait_until(lambda: store.builds.cells(build_id)[0]["elapsed"] > 0.05)
    assert store.builds.cells(build_id)[0]["spent"] > 0.05, "what runs counts, too"
    store.jobs.finish(job_id, claim.token, Outcome.released())
    first = store.builds.cells(build_id)[0]["spent"]
    assert first >= 0.05
    run_next(store, Outcome.success({}))
    assert store.builds.cells(build_id)[0]["spent"] >= first


# --- what records say ------------------------------------------------------------------------------------------------


def test_a_heartbeat_says_all_of_a_worker_and_of_its_node(store: Store) -> None:
    assert store.workers.heartbeat("w1") == Beat("unknown", 0, 0.0)
    assert Beat("ok", 0, 0.0).failed == 0
    join_pool(store)
    beat = store.workers.heartbeat("w1")
    assert (beat.answer, beat.running, beat.fenced, beat.failed) == ("ok", 0, "", 0)
    submit(store, new_cell())
    run_next(store, Outcome.failure(FailureKind.COMPILER_CRASH, "signal 11"))
    submit(store, new_cell(pool=POOL.name))
    (*_, handed) = store.jobs.hand_out(POOL.name, 1)
    store.jobs.claim(*handed, nonce="n", worker="w1", node="n1")
    beat = store.workers.heartbeat("w1")
    assert (beat.answer, beat.running, beat.failed) == ("ok", 1, 1)
    store.workers.drain("w1")
    assert store.workers.heartbeat("w1").answer == "drain"
    assert store.workers.probed("w1", node="n1", wrong="it hangs", row=0) is not None
    beat = store.workers.heartbeat("w1")
    assert beat.fenced.endswith("it hangs") and beat.failed == 0, "the fence is the answer to what failed"


def test_a_worker_that_fell_silent_right_after_it_registered_is_missed(store: Store) -> None:
    before = int(store.now())
    join_pool(store, ttl=0.05)
    ((node, heard),) = wait_until(store.workers.silent, message="it is not live any more").items()
    assert (node, before <= heard <= store.now()) == ("n1", True)
    assert store._link.ask("PTTL", ("worker", "w1", "last")) == pytest.approx(3_600_000, abs=60_000)
    store.workers.forget_dead()
    assert list(store.workers.silent()) == ["n1"], "it died within the hour"
    store._link.ask("ZADD", ("workers",), (before - 3601) * 1000, "w1")
    store.workers.forget_dead()
    assert store.workers.silent() == {}


def test_a_control_plane_that_is_silent_for_an_hour_is_forgotten(store: Store) -> None:
    store.planes.report("here", "storage: refused")
    for name, ago in (("late", 3590), ("gone", 3610)):
        store._link.ask("HSET", ("planes",), name, json.dumps([int((store.now() - ago) * 1000), ""]))
    store.planes.forget_dead()
    found = store.planes.list()
    assert list(found) == ["here", "late"]
    at, away = found["here"]
    assert (0 <= store.now() - at < 60, away) == (True, "storage: refused")
    store.planes.leave("here")
    assert list(store.planes.list()) == ["late"]


@pytest.mark.parametrize("queue", ["waiting", "handed"])
def test_the_age_of_a_queue_is_that_of_its_own_pool(store: Store, raw: redis.Redis, queue: str) -> None:
    others = [{**POOL.as_dict(), "toolchain": f"onnxruntime9.{number}-00000000"} for number in range(3)]
    store.workers.register({"id": "w1", "node": "n1", "slots": 1, "pools": [*others, POOL.as_dict()]}, ttl=60.0)
    submit(store, new_cell())
    if queue == "handed":
        store.jobs.hand_out(POOL.name, 1)
    (key,) = raw.keys(f"*pool:{POOL.name}:{queue}")
    ((job_id, since),) = raw.zrange(key, 0, -1, withscores=True)
    raw.zadd(key, {job_id: since - 100_000})
    assert store.workers.queue_ages() == {POOL.name: pytest.approx(100, abs=50)}


def test_a_worker_that_takes_jobs_again_or_finds_half_of_the_stock_gone_wakes_its_pool(store: Store) -> None:
    join_pool(store, slots=4)
    submit(store, *[new_cell() for _ in range(5)])
    (first, second, third, _) = store.jobs.hand_out(POOL.name, 1)

    def woken() -> bool:
        return store.wakeups.next("pools", 0.01) is not None

    def claim(handed: tuple[str, int]) -> None:
        assert store.jobs.claim(*handed, nonce=secrets.token_hex(8), worker="w1", node="n1").answer == "run"

    while woken():
        pass
    claim(first)
    assert not woken(), "three of four are there"
    claim(second)
    assert woken(), "two are there: it can be filled up"
    claim(third)
    while woken():
        pass
    store.workers.heartbeat("w1", resting="its disk is full")
    store.workers.heartbeat("w1", resting="its disk is full")
    assert not woken()
    store.workers.heartbeat("w1")
    assert woken()


def test_a_cell_has_the_time_since_its_attempt_began_and_a_job_its_limits(store: Store) -> None:
    join_pool(store)
    build_id = submit(store, new_cell(limits={"time": 7.0, "memory": 5 << 30}), new_cell())
    job_id, claim = take(store)
    (attempt,) = store.jobs.get(job_id)["attempts"]
    assert attempt["limits"] in ({"time": 7.0, "memory": 5 << 30}, {"time": 60.0, "memory": 0})
    assert attempt["limits"] == claim.limits
    wait_until(lambda: store.now() > attempt["started_at"] + 0.002)  # In the same millisecond, it has run for no time.
    (running,) = (cell for cell in store.builds.cells(build_id) if cell["state"] == "running")
    assert 0 < running["elapsed"] < 60
    assert store.jobs.renew(claim.token, job_id, paused=60.0) == "ok"
    assert store.jobs.renew(claim.token, job_id) == "ok", "that says nothing of pauses"
    (running,) = (cell for cell in store.builds.cells(build_id) if cell["state"] == "running")
    assert running["elapsed"] == 0 < running["spent"] < 60, "a slot was held all the time"
    store.jobs.finish(job_id, claim.token, Outcome.success({}))
    (ended,) = (cell for cell in store.builds.cells(build_id) if cell["state"] == "succeeded")
    assert ended["elapsed"] == 0 < ended["spent"] < 60
    (other,) = store.jobs.hand_out(POOL.name, 1)
    store.jobs.claim(*other, nonce="n", worker="w1", node="n1")
    assert {store.jobs.get(each)["attempts"][0]["limits"]["memory"] for each in (job_id, other[0])} == {5 << 30, 0}


def test_moments_go_on_by_one_where_the_clock_does_not(store: Store, raw: redis.Redis) -> None:
    first = store.next_moment()
    (key,) = raw.keys("*moment")
    raw.set(key, int(raw.get(key)) + 3_600_000)
    later = store.next_moment()
    assert later == pytest.approx(first + 3600, abs=60)
    assert store.next_moment() == pytest.approx(later + 0.001, abs=1e-4)


def test_a_pool_has_the_slots_of_those_of_its_workers_that_take_jobs(store: Store) -> None:
    for number, slots in enumerate((1, 2, 4, 8), 1):
        join_pool(store, f"w{number}", node=f"n{number}", slots=slots)

    def shown() -> tuple[int, int]:
        (pool,) = store.workers.pools()
        return pool["live_workers"], pool["slots"]

    assert shown() == (4, 15)
    store.workers.drain("w1")
    assert shown() == (4, 14)
    store.workers.heartbeat("w2", resting="its disk is full")
    assert shown() == (4, 12)
    store.workers.probed("w3", node="n3", wrong="it hangs", row=0)
    assert shown() == (4, 8)


def run_all(store: Store, outcome: Outcome, number: int) -> None:
    """Run so many jobs at once, on node n1 the first time and on n2 later."""
    for handed in wait_until(lambda: (found := store.jobs.hand_out(POOL.name, 1)) and found):
        node = "n1" if handed[1] == number else "n2"
        claim = store.jobs.claim(*handed, nonce="n", worker=f"w{node[1]}", node=node)
        store.jobs.finish(handed[0], claim.token, outcome)


@pytest.mark.parametrize("also", [False, True])
def test_three_jobs_that_another_node_made_fence_the_one_that_failed_them_unless_it_had_the_same_trouble(
    store: Store, also: bool
) -> None:
    crash = Outcome.failure(FailureKind.COMPILER_CRASH, "signal 11")
    join_pool(store, "w1", node="n1", slots=3)
    for old in () if also else ("j-1", "j-2"):
        store._link.ask("ZADD", ("node", "n1", "blamed"), (store.now() - 86_401) * 1000, old)
    submit(store, *[new_cell() for _ in range(3)])
    run_all(store, crash, 1)
    store.workers.drain("w1")
    join_pool(store, "w2", node="n2", slots=1)
    if also:
        submit(store, new_cell(priority=5))
        run_all(store, crash, 0)
    for _ in range(3 + also):  # The job that failed here, too, is made first.
        assert not store.workers.heartbeat("w1").fenced
        store.jobs.promote()
        run_all(store, Outcome.success({}), 0)
    fenced = store.workers.heartbeat("w1").fenced
    assert fenced == ("" if also else "3 jobs failed on it and then succeeded elsewhere, the last by compiler_crash")


# --- the broker ------------------------------------------------------------------------------------------------------


def test_what_was_started_before_is_taken_first_and_what_is_no_attempt_is_no_message_of_ours(
    farm_settings: Settings, store: Store, raw: redis.Redis
) -> None:
    app = broker.make_celery(farm_settings)
    assert broker.queued(app, "p") == set()
    broker.dispatch(app, "p", [("j-1", 1), ("j-4", 2), ("j-2", 1), ("j-3", 3)])
    queue = broker.PREFIX + "p"
    taken = [json.loads(message)["headers"]["id"] for message in reversed(raw.lrange(queue, 0, -1))]
    assert taken == ["j-4.2", "j-3.3", "j-1.1", "j-2.1"]
    raw.lpush(queue, "{", "[]", "{}", json.dumps({"headers": {"id": "j-5.x"}}))
    assert broker.queued(app, "p") == {("j-1", 1), ("j-2", 1), ("j-3", 3), ("j-4", 2)}


def test_messages_travel_together_and_all_arrive_over_a_connection_that_was_lost(
    farm_settings: Settings, raw: redis.Redis
) -> None:
    app = broker.make_celery(farm_settings)
    broker.dispatch(app, "p", [("j-0", 1)])
    before = int(raw.info("stats")["total_reads_processed"])  # type: ignore[index]
    broker.dispatch(app, "p", [(f"j-{number}", 1) for number in range(1, 500)])
    assert int(raw.info("stats")["total_reads_processed"]) - before < 250  # type: ignore[index]
    raw.client_kill_filter(_type="normal", skipme=True)
    broker.dispatch(app, "p", [(f"j-{number}", 1) for number in range(500, 800)])
    assert broker.queued(app, "p") == {(f"j-{number}", 1) for number in range(800)}


def test_a_broker_that_refuses_is_said_with_its_reason(farm_settings: Settings, raw: redis.Redis) -> None:
    app = broker.make_celery(farm_settings)
    raw.config_set("maxmemory", "1mb")
    try:
        with pytest.raises(StoreUnavailable, match=r"refuses: .*maxmemory"):
            broker.dispatch(app, "p", [("j-1", 1)])
    finally:
        raw.config_set("maxmemory", "0")
    broker.dispatch(app, "p", [("j-1", 1)])
    assert broker.queued(app, "p") == {("j-1", 1)}


@pytest.mark.parametrize(("number", "cause"), [(signal.SIGSTOP, "TimeoutError"), (signal.SIGKILL, "ConnectionError")])
def test_a_broker_that_hangs_or_is_away_is_said_and_not_waited_for(
    number: signal.Signals, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker, "SOCKET_SECONDS", 1)
    server = servers.start_valkey(tmp_path / "valkey", secrets.token_hex(8))
    pid = server.pid
    assert pid
    try:
        app = broker.make_celery(load_settings({}, redis_url=server.url))
        broker.dispatch(app, "p", [("j-1", 1)])
        os.kill(pid, number)
        with pytest.raises(StoreUnavailable, match=f"cannot be reached: {cause}"):
            broker.queued(app, "p")
        with pytest.raises(StoreUnavailable, match=f"cannot be reached: {cause}"):
            broker.dispatch(app, "p", [("j-2", 1)])
    finally:
        if number == signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
        server.stop()


def test_a_fence_is_lifted_when_the_probes_of_all_workers_of_its_node_have_passed_twice_in_a_row(store: Store) -> None:
    def probed(worker: str, wrong: str, row: int) -> str | None:
        return store.workers.probed(worker, node="n1", wrong=wrong, row=row)

    assert probed("w1", "", 0) is None, "it has to register first"
    for worker, node in (("w1", "n1"), ("w2", "n1"), ("w3", "n2")):
        join_pool(store, worker, node=node)
    submit(store, new_cell())
    run_next(store, Outcome.failure(FailureKind.COMPILER_CRASH, "signal 11"))
    assert store.workers.heartbeat("w1").failed == 1
    assert probed("w1", "", 1) == ""
    assert store.workers.heartbeat("w1").failed == 0, "a probe that passed clears the node"
    assert probed("w1", "it hangs", 0) == "its health probe failed: it hangs"
    fenced = "its health probe failed: it hangs"
    assert probed("w1", "", 2) == fenced, "the other worker's has not passed since"
    assert probed("w1", "it hangs again", 0) == fenced
    assert probed("w2", "", 2) == fenced, "what passed before counts no more"
    assert probed("w1", "", 1) == fenced, "once is not enough"
    assert probed("w1", "", 2) == ""
    assert not store.workers.heartbeat("w2").fenced


def test_a_fence_lasts_while_probes_fail_and_what_passed_under_an_earlier_one_does_not_lift_it(
    store: Store, raw: redis.Redis
) -> None:
    def probed(worker: str, wrong: str, row: int) -> str | None:
        return store.workers.probed(worker, node="n1", wrong=wrong, row=row)

    record = key_of("node", "n1")
    join_pool(store, "w1")
    join_pool(store, "w2")
    assert probed("w2", "it hangs", 0)
    assert raw.pexpire(record, 60_000)
    assert probed("w2", "it hangs", 0)
    assert raw.pttl(record) > 60_000
    assert probed("w1", "", 2)
    raw.delete(record)  # As if it had expired.
    fenced = probed("w2", "it hangs again", 0)
    assert fenced == "its health probe failed: it hangs again"
    assert probed("w2", "", 2) == fenced, "the other worker's has not passed since"
    assert probed("w1", "", 2) == ""


def test_only_jobs_that_waited_so_long_fail_for_want_of_a_worker(store: Store, farm_settings: Settings) -> None:
    early, late = (submit(store, new_cell()) for _ in range(2))
    with redis.Redis.from_url(farm_settings.redis_url.get_secret_value()) as connection:
        for name in ("waiting", "handed"):
            (old,) = store.builds.jobs(early).values()
            if connection.zscore(key_of("pool", POOL.name, name), old):
                connection.zincrby(key_of("pool", POOL.name, name), -5_000_000, old)
        connection.hset(key_of("unserved"), POOL.name, int(store.now() * 1000) - 5_000_000)
    assert store.jobs.fail_unserved(POOL.name, 4000) == 1
    assert [cell["state"] for cell in store.builds.cells(early)] == ["failed"]
    (cell,) = store.builds.cells(early)
    assert cell["message"].startswith(f"no worker has taken jobs of pool {POOL.name} for 4000 s: none is live")
    assert [cell["state"] for cell in store.builds.cells(late)] == ["queued"]


def test_a_pool_that_somebody_served_meanwhile_is_not_unserved_for_so_long(store: Store, raw: redis.Redis) -> None:
    build_id = submit(store, new_cell(), new_cell())
    assert store.jobs.fail_unserved(POOL.name, 4000) == 0
    raw.hincrby("{farm}:unserved", POOL.name, -5_000_000)
    join_pool(store)
    take(store)
    store.workers.leave("w1")
    for job in store.builds.jobs(build_id).values():
        raw.zincrby(f"{{farm}}:pool:{POOL.name}:waiting", -5_000_000, job)
    assert store.jobs.fail_unserved(POOL.name, 4000) == 0


def test_what_a_cell_took_and_when_its_worker_came_are_in_seconds(store: Store, farm_settings: Settings) -> None:
    before = store.now()
    join_pool(store)
    build = submit(store, new_cell())
    job, claim = take(store)
    with redis.Redis.from_url(farm_settings.redis_url.get_secret_value()) as connection:
        began = int(connection.hincrby(key_of("job", job), "started_at", -800_000))
        attempt = json.loads(connection.hget(key_of("job", job, "attempts"), "1:start"))
        connection.hset(key_of("job", job, "attempts"), "1:start", json.dumps({**attempt, "started_at": began}))
    assert store.jobs.renew(claim.token, job, phase="compiling", progress=0.5, paused=300.0) == "ok"
    (cell,) = store.builds.cells(build)
    assert 800 <= cell["spent"] < 900 and 500 <= cell["elapsed"] < 600 and cell["progress"] == 0.5
    assert store.jobs.finish(job, claim.token, Outcome.released("it drains")) == "ok"
    (cell,) = store.builds.cells(build)
    assert 800 <= cell["spent"] < 900 and cell["elapsed"] is None and cell["attempt"] == 2
    run_next(store, Outcome.success({"latency": 0.01}))
    (cell,) = store.builds.cells(build)
    assert 800 <= cell["spent"] < 900 and cell["elapsed"] < 30 and cell["worker"] == "w1"
    (worker,) = store.workers.list()
    assert before - 1 <= worker["registered_at"] <= worker["seen_at"] <= store.now()

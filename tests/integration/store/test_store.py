"""The job store on a real Valkey: builds, cells, jobs, attempts."""

import json
import secrets
import time
from collections import Counter
from dataclasses import replace

import pytest
import redis

from farm.errors import NotFound, StoreUnavailable
from farm.jobs.state import FailureKind, Outcome
from farm.settings import Settings, load_settings
from farm.store import Claim, Store
from farm.store.link import key
from tests.support.helpers import wait_until
from tests.support.jobs import explain, join_pool, new_cell, run_next, submit, take
from tests.support.scripted_pool import POOL

SUCCESS = Outcome.success({"latency": 0.01})


@pytest.fixture
def farm_settings(redis_url: str) -> Settings:
    return load_settings({}, redis_url=redis_url, lease_seconds=0.4, renew_seconds=0.1, retry_delay=0.05)


def states(store: Store, build_id: str) -> list[str]:
    return [cell["state"] for cell in store.builds.cells(build_id)]


def lose(store: Store) -> str:
    """Let the lease of the running job end, and return the job."""
    (job_id,) = wait_until(lambda: store.jobs.expire_leases("reaper"), message="a lease ended")
    return job_id


def ready_again(store: Store) -> None:
    """Wait until the delay of the only job has passed."""
    wait_until(store.jobs.promote, message="the delay passed")


# --- submitting ------------------------------------------------------------------------------------------------------


def test_submitting_again_changes_nothing(store: Store) -> None:
    """A lot may come twice, and so may the whole build: the client retries what it did not hear of."""
    cells = [new_cell() for _ in range(7)]
    build = {"id": "b-0000000000000001", "namespace": "main", "cells": 7}
    assert store.builds.create(build, cells[:4]) == 4
    assert store.builds.create(build, [*cells[:4], *cells]) == 7
    assert store.builds.create(build, cells) == 7
    assert store.builds.get(build["id"])["counts"]["queued"] == 7
    assert store.jobs.pending(POOL.name) == 7
    assert [cell["identifier"] for cell in store.builds.cells(build["id"])] == [cell["identifier"] for cell in cells]


def test_a_build_of_hits_ends_at_once(store: Store) -> None:
    build_id = submit(store, new_cell(facts={"latency": 0.5}, order=None))
    (cell,) = store.builds.cells(build_id)
    assert (cell["state"], cell["hit"], cell["kind"]) == ("succeeded", True, None)
    assert cell["facts"] == {"latency": 0.5}
    assert store.builds.get(build_id)["state"] == "ended"
    assert store.jobs.pending(POOL.name) == 0
    assert store.wakeups.next("builds", 0.01) == build_id, "somebody has to write its report"


def test_what_a_hit_measured_is_not_known_before_its_job_has_ended(store: Store) -> None:
    """If the program cannot be measured, it is a hit all the same, which says why; one that was gone has failed."""
    join_pool(store)
    facts = {"latency": 0.5}
    build_id = submit(store, *(new_cell(facts=facts, order={"hit": True, "against": letter * 64}) for letter in "abcd"))
    wrong = Outcome.failure(FailureKind.COMPILER_ERROR, "no kernel")
    for outcome in (SUCCESS, wrong, replace(wrong, made_again=True)):
        run_next(store, outcome)
    take(store)
    seen = [(cell["state"], cell["hit"], cell["kind"], cell["facts"]) for cell in store.builds.cells(build_id)]
    assert seen == [
        ("succeeded", False, None, {"latency": 0.01}),
        ("succeeded", True, None, {"latency": 0.5, "unmeasured": "no kernel"}),
        ("failed", False, "compiler_error", None),
        ("running", False, None, None),
    ]
    assert store.builds.cancel(build_id) == 1
    assert [cell["facts"] for cell in store.builds.cells(build_id)][3] is None


def test_cells_of_a_build_that_is_gone_leave_nothing_behind(store: Store) -> None:
    assert store._link.run("add_cells", build="b-9", cells=json.dumps([["a"] * 13])) == -1
    assert store._link.ask("KEYS", "{farm}:*") == []


def test_a_build_without_cells_ends_at_once(store: Store) -> None:
    before = store.now()
    build = store.builds.get(submit(store))
    assert (build["state"], set(build["counts"].values()), build["paused"]) == ("ended", {0}, False)
    assert before - 0.01 <= build["created_at"] <= build["ended_at"] <= store.now()


def test_a_build_with_missing_lots_does_not_end(store: Store) -> None:
    build = {"id": "b-0000000000000002", "namespace": "main", "cells": 2}
    hits = [new_cell(facts={}, order=None) for _ in range(2)]
    store.builds.create(build, hits[:1])
    assert store.builds.get(build["id"])["state"] == "open"
    store._link.ask("ZINCRBY", ("incomplete",), -30_000, build["id"])
    assert (store.builds.incomplete(40), store.builds.incomplete(20)) == ([], [build["id"]])
    store.builds.create(build, hits)
    assert store.builds.get(build["id"])["state"] == "ended"
    assert store.builds.incomplete(0) == []


@pytest.mark.parametrize("facts", [{"latency": 0.5}, None], ids=["hits", "misses"])
def test_ten_thousand_cells_are_taken(store: Store, facts) -> None:
    build_id = submit(store, *[new_cell(facts=facts) for _ in range(10_000)])
    assert store.builds.get(build_id)["accepted"] == 10_000


def test_builds_are_listed_newest_first(store: Store) -> None:
    ids = []
    for _ in range(3):
        ids.append(submit(store, new_cell(facts={})))
        made = int(store.now() * 1000)
        wait_until(
            lambda made=made: int(store.now() * 1000) > made,
            message="the millisecond is over: its builds have no order",
        )
    assert [build["id"] for build in store.builds.list("main")] == ids[::-1]
    assert store.builds.list("other") == []


# --- one job for one key ---------------------------------------------------------------------------------------------


def test_builds_share_the_job_of_a_key(store: Store) -> None:
    join_pool(store)
    first, second = submit(store, new_cell("a" * 64)), submit(store, new_cell("a" * 64))
    job_id = run_next(store, SUCCESS)
    assert states(store, first) == states(store, second) == ["succeeded"]
    assert [cell["build"] for cell in store.jobs.get(job_id)["cells"]] == [first, second]
    assert store.jobs.hand_out(POOL.name, 4) == []


def test_a_cell_joins_a_running_job(store: Store) -> None:
    join_pool(store)
    submit(store, new_cell("a" * 64))
    job_id, claim = take(store)
    late = submit(store, new_cell("a" * 64))
    assert states(store, late) == ["running"]
    store.jobs.finish(job_id, claim.token, SUCCESS)
    assert states(store, late) == ["succeeded"]


def test_namespaces_do_not_share_jobs(store: Store) -> None:
    submit(store, new_cell("a" * 64))
    submit(store, new_cell("a" * 64, namespace="fork-7"), namespace="fork-7")
    assert store.jobs.pending(POOL.name) == 2
    assert store.jobs.unfinished("main", ["a" * 64, "b" * 64]) == {"a" * 64}


# --- claims ----------------------------------------------------------------------------------------------------------


def test_a_claim_may_be_repeated_and_nobody_else_gets_the_attempt(store: Store) -> None:
    join_pool(store)
    submit(store, new_cell("a" * 64))
    (handed,) = store.jobs.hand_out(POOL.name, 1)
    claim = store.jobs.claim(*handed, nonce="mine", worker="w1", node="n1")
    assert claim.answer == "run"
    assert claim.key == "a" * 64
    assert claim.order["identifier"] == "a" * 12
    assert store.jobs.claim(*handed, nonce="mine", worker="w1", node="n1") == claim
    assert store.jobs.claim(*handed, nonce="other", worker="w2", node="n2").answer == "stale"


def test_messages_of_the_past_are_stale(store: Store) -> None:
    join_pool(store)
    submit(store, new_cell())
    (handed,) = store.jobs.hand_out(POOL.name, 1)
    job_id = handed[0]
    claim = store.jobs.claim(*handed, nonce="n", worker="w1", node="n1")
    store.jobs.finish(job_id, claim.token, Outcome.released())

    def answer(job: str, attempt: int) -> str:
        return store.jobs.claim(job, attempt, nonce="x", worker="w1", node="n1").answer

    assert answer(job_id, 1) == "stale"
    assert answer(job_id, 2) == "stale", "queued, but not handed out"
    assert answer("j-0000000000000000", 1) == "stale"


def test_limits_are_the_largest_when_the_attempt_starts(store: Store) -> None:
    join_pool(store)
    submit(store, new_cell("a" * 64, limits={"time": 60.0, "memory": 1 << 30}))
    submit(store, new_cell("a" * 64, limits={"time": 0.5, "memory": 1 << 33}))
    assert take(store)[1].limits == {"time": 60.0, "memory": 1 << 33}
    submit(store, new_cell("b" * 64, limits={"time": 60.0, "memory": 1 << 33}))
    submit(store, new_cell("b" * 64, limits={"time": 0, "memory": 0}))
    assert take(store)[1].limits == {"time": 0.0, "memory": 0}, "0 means no limit at all"


# --- endings ---------------------------------------------------------------------------------------------------------


def test_finishing_twice_counts_once(store: Store) -> None:
    join_pool(store)
    build_id = submit(store, new_cell(), new_cell())
    job_id, claim = take(store)
    before = len(store.events.read(build_id)["items"])
    assert store.jobs.finish(job_id, claim.token, SUCCESS) == "ok"
    assert store.jobs.finish(job_id, claim.token, SUCCESS) == "ok"
    assert store.builds.get(build_id)["counts"]["succeeded"] == 1
    assert len(store.events.read(build_id)["items"]) == before + 1


def test_finishing_again_is_answered_the_same_when_another_attempt_has_ended_since(store: Store) -> None:
    """The answer was dropped, and the worker reaches the store again only when much has happened."""
    join_pool(store)
    submit(store, new_cell())
    job_id, first = take(store)
    fault = Outcome.failure(FailureKind.GPU_FAULT, "the GPU reported a fault")
    assert store.jobs.finish(job_id, first.token, fault) == "ok"
    ready_again(store)
    _, second = take(store)
    assert store.jobs.finish(job_id, first.token, fault) == "ok"
    store.jobs.finish(job_id, second.token, SUCCESS)
    assert store.jobs.finish(job_id, first.token, fault) == "ok"
    assert [attempt["end"] for attempt in store.jobs.get(job_id)["attempts"]] == ["failed", "succeeded"]


def test_words_that_are_no_text_do_not_keep_a_job_from_its_next_attempt(store: Store) -> None:
    """What a compiler says is untrusted: half a surrogate stands in JSON, and no script can read it."""
    join_pool(store)
    submit(store, new_cell())
    job_id, claim = take(store)
    fault = Outcome.failure(FailureKind.GPU_FAULT, "bad name \ud800", detail="\udcff ↯")
    assert store.jobs.finish(job_id, claim.token, fault) == "ok"
    assert store.jobs.get(job_id)["attempts"][0]["message"] == "bad name ?"
    assert store.jobs.get(job_id)["attempts"][0]["detail"] == "? ↯"
    ready_again(store)
    assert take(store)[1].previous == ("gpu_fault",)


def test_a_user_error_is_final_at_once(store: Store) -> None:
    join_pool(store)
    build_id = submit(store, new_cell())
    job_id = run_next(store, Outcome.failure(FailureKind.BAD_MODEL, "node 7 has no op", detail="line", log="f" * 64))
    (cell,) = store.builds.cells(build_id)
    assert (cell["state"], cell["kind"], cell["message"], cell["detail"]) == (
        "failed",
        "bad_model",
        "node 7 has no op",
        "line",
    )
    assert store.builds.get(build_id)["state"] == "ended"
    assert store.jobs.get(job_id)["log"] == "f" * 64


@pytest.mark.parametrize(("kind", "attempts"), [(FailureKind.STORAGE, 3), (FailureKind.COMPILER_CRASH, 2)])
def test_other_failures_get_more_attempts(store: Store, kind: FailureKind, attempts: int) -> None:
    join_pool(store)
    build_id = submit(store, new_cell())
    for number in range(1, attempts + 1):
        job_id, claim = take(store)
        assert (claim.attempt, claim.previous) == (number, (kind.value,) * (number - 1))
        store.jobs.finish(job_id, claim.token, Outcome.failure(kind, "broken"))
        if number < attempts:
            assert states(store, build_id) == ["queued"]
            ready_again(store)
    assert states(store, build_id) == ["failed"]
    assert store.jobs.get(job_id)["charged"] == attempts
    assert [attempt["kind"] for attempt in store.jobs.get(job_id)["attempts"]] == [kind.value] * attempts


def test_the_delay_before_another_attempt_grows(redis_url: str) -> None:
    store = Store.connect(load_settings({}, redis_url=redis_url, retry_delay=100.0))
    join_pool(store)
    submit(store, new_cell())
    delays = []
    for _ in range(2):
        job_id = run_next(store, Outcome.failure(FailureKind.STORAGE, "down"))
        facts = explain(store, job_id)
        delays.append(facts["delayed_until"] - store.jobs.get(job_id)["queued_at"])
        with redis.Redis.from_url(redis_url) as raw:
            raw.zadd("{farm}:delayed", {job_id: 0})
        store.jobs.promote()
    assert delays == [100.0, 200.0]


@pytest.mark.damaged
def test_a_job_that_the_store_lost_before_its_next_attempt_does_not_hold_up_others(store: Store) -> None:
    join_pool(store)
    submit(store, new_cell(), new_cell())
    lost, other = (run_next(store, Outcome.failure(FailureKind.COMPILER_CRASH, "signal 11")) for _ in range(2))
    store._link.ask("DEL", ("job", lost))

    def handed() -> list[tuple[str, int]]:
        store.jobs.promote()
        return store.jobs.hand_out(POOL.name, 1)

    assert wait_until(handed, message="the delay passed") == [(other, 2)]


def test_a_released_attempt_is_not_charged(store: Store) -> None:
    join_pool(store)
    build_id = submit(store, new_cell())
    for _ in range(5):
        run_next(store, Outcome.released())
    job_id, claim = take(store)
    assert claim.attempt == 6
    assert store.jobs.get(job_id)["charged"] == 0
    assert states(store, build_id) == ["running"]


def test_time_limit_is_final_only_for_cells_that_asked_for_no_more(store: Store) -> None:
    """A cell that joined the running job with a longer limit gets an attempt with that limit."""
    join_pool(store)
    short = submit(store, new_cell("a" * 64, limits={"time": 1.0, "memory": 0}, priority=9))
    job_id, claim = take(store)
    long = submit(store, new_cell("a" * 64, limits={"time": 9.0, "memory": 0}))
    store.jobs.finish(job_id, claim.token, Outcome.failure(FailureKind.TIME_LIMIT, "1 s is over"))
    assert (states(store, short), states(store, long)) == (["failed"], ["queued"])
    assert store.jobs.get(job_id)["priority"] == 0, "whoever is left is less urgent"
    assert store.builds.get(short)["state"] == "ended"
    again, claim = take(store)
    assert (again, claim.limits["time"]) == (job_id, 9.0)
    store.jobs.finish(job_id, claim.token, Outcome.failure(FailureKind.TIME_LIMIT, "9 s are over"))
    assert states(store, long) == ["failed"]


def test_out_of_memory_is_final_only_for_cells_that_asked_for_no_more(store: Store) -> None:
    join_pool(store)
    small = submit(store, new_cell("a" * 64, limits={"time": 0, "memory": 10}))
    failure = Outcome.failure(FailureKind.OUT_OF_MEMORY, "more than 10 bytes")
    run_next(store, failure)
    assert states(store, small) == ["queued"], "one more try, elsewhere"
    ready_again(store)
    job_id, claim = take(store)
    large = submit(store, new_cell("a" * 64, limits={"time": 0, "memory": 0}))
    store.jobs.finish(job_id, claim.token, failure)
    assert (states(store, small), states(store, large)) == (["failed"], ["queued"])


def test_messages_that_were_lost_are_found_until_they_are_sent_again_or_claimed(store: Store) -> None:
    join_pool(store, slots=2)
    submit(store, new_cell(), new_cell())
    handed = store.jobs.hand_out(POOL.name, 1)
    assert len(handed) == 2
    store._link.ask("ZADD", key("pool", POOL.name, "handed"), time.time() * 1000 - 40_000, handed[0][0])
    assert store.jobs.strays(POOL.name, 60.0) == []
    assert store.jobs.strays(POOL.name, 30.0) == [handed[0]]
    wait_until(lambda: sorted(store.jobs.strays(POOL.name, 0.01)) == sorted(handed))
    (claimed, attempt), (left, _) = handed
    store.jobs.claim(claimed, attempt, nonce="n", worker="w1", node="n1")
    assert [job for job, _ in store.jobs.strays(POOL.name, 0.01)] == [left]
    assert store.jobs.hand_again(POOL.name, [claimed, left, "j-unknown"]) == 1
    assert store.jobs.strays(POOL.name, 5.0) == []
    claim = store.jobs.claim(left, 1, nonce="n", worker="w1", node="n1")
    assert claim.answer == "run"


def test_what_counts_against_a_quota_are_the_queued_and_the_running_cells_of_a_submitter(store: Store) -> None:
    join_pool(store)
    submit(store, *(new_cell() for _ in range(4)), created_by="ci")
    submit(store, new_cell(), created_by="")
    run_next(store, SUCCESS)
    take(store)
    assert store.builds.live_cells("main") == {"ci": 3, "": 1}
    assert store.builds.live_cells("other") == {}


# --- leases ----------------------------------------------------------------------------------------------------------


def test_a_lost_lease_starts_the_next_attempt_and_supersedes_the_old(store: Store) -> None:
    join_pool(store)
    build_id = submit(store, new_cell())
    job_id, old = take(store)
    assert lose(store) == job_id
    assert states(store, build_id) == ["queued"]
    again, new = take(store)
    assert (again, new.attempt) == (job_id, 2), "the first loss adds no delay: the lease was one"
    assert store.jobs.renew(old.token, job_id) == "lost"
    assert store.jobs.finish(job_id, old.token, SUCCESS) == "superseded"
    assert states(store, build_id) == ["running"]
    assert store.jobs.finish(job_id, new.token, SUCCESS) == "ok"
    assert [attempt["end"] for attempt in store.jobs.get(job_id)["attempts"]] == ["superseded", "succeeded"]


def test_a_worker_whose_process_died_loses_its_attempts_at_once(store: Store) -> None:
    join_pool(store, slots=2)
    join_pool(store, "w2", node="n2")
    build_id = submit(store, new_cell(), new_cell(), new_cell())
    handed = [job for job, _ in store.jobs.hand_out(POOL.name, 1)]
    for job_id, worker in zip(handed, ("w1", "w1", "w2"), strict=True):
        assert store.jobs.claim(job_id, 1, nonce=job_id, worker=worker, node=f"n{worker[1]}").answer == "run"
    assert set(store.workers.died("w1", "died (exit status -9)")) == {*handed[:2]}
    assert store.workers.died("w1", "died (exit status -9)") == [], "it may be told again"
    assert sorted(states(store, build_id)) == ["queued", "queued", "running"]
    (attempt,) = store.jobs.get(handed[0])["attempts"]
    assert (attempt["end"], attempt["kind"]) == ("lost", "worker_lost")
    assert attempt["message"] == "worker w1 on node n1 died (exit status -9)"
    assert store.jobs.get(handed[0])["charged"] == 1
    (again, number), *_ = store.jobs.hand_out(POOL.name, 1)
    assert store.jobs.claim(again, number, nonce="x", worker="w1", node="n1").answer == "elsewhere"


def test_a_job_that_kills_workers_brings_no_other_into_quarantine(store: Store) -> None:
    """Two were lost together twice, so either may be it: no worker gets both, and the third loss is that of one."""
    for number in range(1, 5):
        join_pool(store, f"w{number}", node=f"n{number}", slots=2)
    build_id = submit(store, new_cell(), new_cell())
    jobs = {cell["job"] for cell in store.builds.cells(build_id)}
    handed: list[tuple[str, int]] = []

    def both_are_handed_out() -> bool:
        store.jobs.promote()
        handed.extend(store.jobs.hand_out(POOL.name, 1))
        return len(handed) == 2

    def claim(job_id: str, worker: int) -> str:
        number = store.jobs.get(job_id)["attempt"]
        return store.jobs.claim(
            job_id, number, nonce=f"{job_id}{number}", worker=f"w{worker}", node=f"n{worker}"
        ).answer

    for worker in (1, 2):
        wait_until(both_are_handed_out)
        assert {claim(job_id, worker) for job_id in jobs} == {"run"}
        assert {*store.workers.died(f"w{worker}", "died")} == jobs
        handed.clear()
    wait_until(both_are_handed_out)
    killer, other = (job_id for job_id, _ in handed)
    assert (claim(killer, 3), claim(other, 3)) == ("run", "elsewhere")
    assert store.workers.died("w3", "died") == [killer]
    assert store.jobs.get(killer)["quarantined"]
    handed.pop()
    wait_until(both_are_handed_out)
    assert claim(other, 3) == "run"


def test_what_a_worker_ran_when_it_was_stopped_is_given_back(store: Store) -> None:
    join_pool(store, slots=2)
    wanted, unwanted = submit(store, new_cell()), submit(store, new_cell())
    handed = store.jobs.hand_out(POOL.name, 1)
    for job_id, number in handed:
        store.jobs.claim(job_id, number, nonce=job_id, worker="w1", node="n1")
    store.builds.cancel(unwanted)
    assert {*store.workers.leave("w1")} == {job_id for job_id, _ in handed}
    assert store.workers.leave("w1") == [], "it may be told again"
    assert store.workers.list() == []
    assert states(store, wanted) + states(store, unwanted) == ["queued", "cancelled"]
    job = store.jobs.get(store.builds.cells(wanted)[0]["job"])
    assert [attempt["end"] for attempt in job["attempts"]] == ["released"]
    assert (job["charged"], job["attempt"]) == (0, 2)


def test_a_server_clock_that_was_set_back_keeps_no_job_for_longer_than_two_leases(store: Store) -> None:
    """As it is found after that: marks of an hour that is yet to come."""
    join_pool(store)
    submit(store, new_cell())
    job_id, _ = take(store)
    store.jobs.expire_leases("reaper")
    hour = 3_600_000 + int(store._link.ask("TIME")[0]) * 1000
    store._link.ask("ZADD", key("leases"), hour, job_id)
    store._link.ask("HSET", key("reaper", "reaper"), "since", hour, "last", hour)

    def is_mended() -> bool:
        assert store.jobs.expire_leases("reaper") == [], "it gets the time of a lease"
        return float(store._link.ask("ZSCORE", key("leases"), job_id)) < hour

    wait_until(is_mended)
    assert lose(store) == job_id


@pytest.mark.parametrize("name", ["leases", "kept"])
def test_leases_of_jobs_that_are_gone_or_over_hold_up_no_other(store: Store, name: str) -> None:
    join_pool(store)
    over, build_id = submit(store, new_cell()), submit(store, new_cell())
    ended = run_next(store, SUCCESS)
    take(store)
    store._link.ask("ZADD", key(name), 1, "j-gone", 1, ended)

    def is_lost() -> bool:
        store.jobs.expire_leases("reaper")
        return states(store, build_id) == ["queued"]

    wait_until(is_lost)
    assert states(store, over) == ["succeeded"]
    assert store._link.ask("EXISTS", key(name)) == 0


def test_a_renewed_lease_does_not_end(store: Store) -> None:
    join_pool(store)
    submit(store, new_cell())
    job_id, claim = take(store)
    deadline = time.monotonic() + 1.2

    def renewed_for_three_leases() -> bool:
        assert store.jobs.renew(claim.token, job_id) == "ok"
        assert store.jobs.expire_leases("reaper") == []
        return time.monotonic() > deadline

    wait_until(renewed_for_three_leases)


def test_three_losses_quarantine_the_job(store: Store) -> None:
    join_pool(store)
    build_id = submit(store, new_cell())
    for number in range(3):
        if number == 2:
            ready_again(store)
        take(store)
        job_id = lose(store)
    (cell,) = store.builds.cells(build_id)
    assert (cell["state"], cell["kind"]) == ("failed", "worker_lost")
    assert f"it is in quarantine: `farm reproduce {job_id}`" in cell["message"]
    assert store.jobs.get(job_id)["quarantined"]


def test_what_was_in_quarantine_costs_one_more_worker_when_it_is_submitted_again(store: Store) -> None:
    """Until it succeeds."""
    join_pool(store)

    def losses(count: int) -> dict:
        build_id = submit(store, new_cell("a" * 64))
        for number in range(count):
            if number == 2:
                ready_again(store)
            take(store)
            lose(store)
        (cell,) = store.builds.cells(build_id)
        assert (cell["state"], cell["kind"]) == ("failed", "worker_lost")
        assert store.jobs.get(cell["job"])["quarantined"]
        return cell

    losses(3)
    submit(store, new_cell("a" * 64))
    job_id = run_next(store, Outcome.failure(FailureKind.COMPILER_CRASH, "signal 11"))
    assert not store.jobs.get(job_id)["quarantined"], "no worker was lost with it"
    ready_again(store)
    run_next(store, Outcome.failure(FailureKind.BAD_MODEL, "node 7 has no op"))
    again = losses(1)
    assert "it was in quarantine before, and another worker was lost with it" in again["message"]
    submit(store, new_cell("a" * 64))
    run_next(store, SUCCESS)
    losses(3)


def test_a_reaper_that_was_silent_gives_every_lease_its_time_again(store: Store) -> None:
    """After an outage no worker could renew; nothing may expire before each had the time to."""
    join_pool(store)
    submit(store, new_cell())
    take(store)
    first = wait_until(lambda: (store.jobs.expire_leases("other"), time.monotonic()))[1]
    lost_at = wait_until(lambda: store.jobs.expire_leases("late") and time.monotonic())
    assert lost_at - first >= 0.4 - 0.001, "the store's times are whole milliseconds"
    take(store)
    silent_until = time.monotonic() + 0.6
    wait_until(lambda: time.monotonic() > silent_until)
    assert store.jobs.expire_leases("late") == []


@pytest.mark.parametrize(("silent", "expires"), [(20, True), (40, False), (-20, True), (-40, False)])
def test_a_reaper_has_been_silent_after_half_a_lease(redis_url: str, silent: int, expires: bool) -> None:
    """A worker that renewed just before has a part of its lease left; less than nothing: the clock was set back."""
    store = Store.connect(load_settings({}, redis_url=redis_url, lease_seconds=60.0, renew_seconds=10.0))
    join_pool(store)
    submit(store, new_cell())
    job_id, _ = take(store)
    store._link.ask("ZADD", ("leases",), 1, job_id)
    now = int(store.now() * 1000)
    store._link.ask("HSET", ("reaper", "r"), "since", now - 600_000, "last", now - silent * 1000)
    assert store.jobs.expire_leases("r") == [job_id] * expires


def test_what_an_attempt_is_doing_can_be_read(store: Store) -> None:
    join_pool(store)
    build_id = submit(store, new_cell())
    job_id, claim = take(store)
    store.jobs.renew(claim.token, job_id, phase="tuning", progress=0.25, detail="3 of 12 ops", log_tail=b"\xfflog")
    (cell,) = store.builds.cells(build_id)
    assert (cell["phase"], cell["progress"], cell["detail"], cell["worker"]) == ("tuning", 0.25, "3 of 12 ops", "w1")
    assert store.jobs.log_tail(job_id) == b"\xfflog"
    store.jobs.renew(claim.token, job_id, phase="tuning", progress=0.5)
    assert store.jobs.log_tail(job_id) == b"\xfflog"
    store.jobs.renew(claim.token, job_id, phase="measuring")
    phases = [event["phase"] for event in store.events.read(build_id)["items"] if event["type"] == "phase"]
    assert phases == ["tuning", "measuring"], "progress alone is not an event"


# --- other nodes first -----------------------------------------------------------------------------------------------


def test_a_node_that_failed_a_job_is_asked_last(store: Store) -> None:
    join_pool(store, "w1", node="n1")
    join_pool(store, "w2", node="n2")
    submit(store, new_cell())
    job_id = run_next(store, Outcome.failure(FailureKind.STORAGE, "down"))
    ready_again(store)
    assert take(store, "w1", "n1")[1].answer == "elsewhere"
    assert store.jobs.hand_out(POOL.name, 4) == [], "it waits a moment, or it would go in circles"
    wait_until(store.jobs.promote)
    assert take(store, "w2", "n2")[1].answer == "run"
    assert [attempt["node"] for attempt in store.jobs.get(job_id)["attempts"]] == ["n1", "n2"]


def test_it_is_asked_last_for_a_minute_after_the_job_may_be_handed_out_again(store: Store) -> None:
    join_pool(store)
    submit(store, new_cell())
    job_id = run_next(store, Outcome.failure(FailureKind.COMPILER_CRASH, "signal 11"))
    until = json.loads(store._link.ask("HGET", ("job", job_id), "excluded"))["n1"] / 1000
    assert until - explain(store, job_id)["delayed_until"] == pytest.approx(60, abs=0.01)


def test_the_last_node_of_a_pool_is_asked_all_the_same(store: Store) -> None:
    join_pool(store)
    submit(store, new_cell())
    run_next(store, Outcome.failure(FailureKind.STORAGE, "down"))
    ready_again(store)
    assert take(store)[1].answer == "run"


# --- cancelling ------------------------------------------------------------------------------------------------------


def test_cancelling_a_queued_build_ends_its_jobs(store: Store) -> None:
    join_pool(store)
    build_id = submit(store, *[new_cell() for _ in range(1200)])
    (handed,) = store.jobs.hand_out(POOL.name, 1)
    assert store.builds.cancel(build_id) == 1200
    assert set(states(store, build_id)) == {"cancelled"}
    assert store.builds.get(build_id)["state"] == "ended"
    assert store.jobs.claim(*handed, nonce="n", worker="w1", node="n1").answer == "stale"
    assert store.builds.cancel(build_id) == 0


def test_what_waits_is_cancelled_and_what_runs_goes_on(store: Store) -> None:
    join_pool(store)
    build_id = submit(store, *[new_cell() for _ in range(4)])
    run_next(store, SUCCESS)
    take(store)
    assert store.builds.cancel_queued(build_id, "a newer one is there") == 2
    found = [(cell["state"], cell["message"]) for cell in store.builds.cells(build_id)]
    assert found == [("succeeded", ""), ("running", ""), *[("cancelled", "a newer one is there")] * 2]
    assert store.builds.cancel_queued(build_id, "again") == 0


def test_cancelling_a_running_build_tells_the_worker(store: Store) -> None:
    join_pool(store)
    build_id = submit(store, new_cell())
    job_id, claim = take(store)
    assert store.jobs.get(job_id)["cancelling"] is False
    store.builds.cancel(build_id)
    assert store.jobs.get(job_id)["cancelling"] is True
    assert states(store, build_id) == ["cancelled"]
    assert store.jobs.renew(claim.token, job_id) == "cancel"
    store.jobs.finish(job_id, claim.token, Outcome.cancelled())
    assert store.jobs.get(job_id)["state"] == "cancelled"


def test_an_attempt_that_the_store_has_lost_ends_on_its_worker(store: Store) -> None:
    """A store that was restored from old data answers for jobs that it does not know."""
    join_pool(store)
    assert store.jobs.renew("1-token", "j-unknown") == "lost"
    assert store.jobs.finish("j-unknown", "1-token", SUCCESS) == "superseded"
    assert store.jobs.claim("j-unknown", 1, nonce="n", worker="w1", node="n1").answer == "stale"


def test_a_success_that_arrives_first_beats_the_cancel(store: Store) -> None:
    join_pool(store)
    build_id = submit(store, new_cell())
    run_next(store, SUCCESS)
    assert store.builds.cancel(build_id) == 0
    assert states(store, build_id) == ["succeeded"]


def test_a_success_after_the_cancel_is_the_jobs_alone(store: Store) -> None:
    join_pool(store)
    build_id = submit(store, new_cell())
    job_id, claim = take(store)
    store.builds.cancel(build_id)
    store.jobs.finish(job_id, claim.token, SUCCESS)
    assert store.jobs.get(job_id)["state"] == "succeeded"
    assert states(store, build_id) == ["cancelled"]


def test_a_cancelled_job_is_over_when_its_worker_is_lost(store: Store) -> None:
    join_pool(store)
    build_id = submit(store, new_cell())
    job_id, _ = take(store)
    store.builds.cancel(build_id)
    assert lose(store) == job_id
    assert store.jobs.get(job_id)["state"] == "cancelled"
    assert findings(store, job_id) == []


def test_a_job_lives_as_long_as_one_cell_wants_it(store: Store) -> None:
    join_pool(store)
    first, second = submit(store, new_cell("a" * 64)), submit(store, new_cell("a" * 64))
    job_id, claim = take(store)
    store.builds.cancel(first)
    assert store.jobs.renew(claim.token, job_id) == "ok"
    store.jobs.finish(job_id, claim.token, SUCCESS)
    assert (states(store, first), states(store, second)) == (["cancelled"], ["succeeded"])


def test_a_job_that_is_being_cancelled_takes_no_new_cell(store: Store) -> None:
    join_pool(store)
    first = submit(store, new_cell("a" * 64))
    job_id, claim = take(store)
    store.builds.cancel(first)
    second = submit(store, new_cell("a" * 64))
    assert states(store, second) == ["queued"]
    store.jobs.finish(job_id, claim.token, Outcome.cancelled())
    assert store.jobs.unfinished("main", ["a" * 64]) == {"a" * 64}, "the new job's name survives the old one's end"
    assert run_next(store, SUCCESS) != job_id
    assert states(store, second) == ["succeeded"]


def test_a_lot_that_comes_after_the_cancel_is_born_cancelled(store: Store) -> None:
    build = {"id": "b-0000000000000003", "namespace": "main", "cells": 2}
    cells = [new_cell(), new_cell()]
    store.builds.create(build, cells[:1])
    store.builds.cancel(build["id"])
    store.builds.create(build, cells)
    assert states(store, build["id"]) == ["cancelled", "cancelled"]
    assert store.builds.get(build["id"])["state"] == "ended"


def test_cancelling_what_is_not_there_says_so(store: Store) -> None:
    with pytest.raises(NotFound):
        store.builds.cancel("b-ffffffffffffffff")


# --- nothing is counted twice ----------------------------------------------------------------------------------------


def test_lost_calls_and_lost_answers_change_no_count(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """5 % of the calls never arrive, 5 % are done and their answers dropped; callers try again until they hear."""
    chance = secrets.SystemRandom()
    whole = store._link.run

    def flaky(script: str, **arguments):
        fate = chance.random()
        if fate < 0.05:
            raise StoreUnavailable("never arrived")
        answer = whole(script, **arguments)
        if fate > 0.95:
            raise StoreUnavailable("done, but nobody heard")
        return answer

    def insist(call, *arguments, **named):
        while True:
            try:
                return call(*arguments, **named)
            except StoreUnavailable:
                pass

    join_pool(store, slots=8)
    builds = [submit(store, *[new_cell() for _ in range(100)]) for _ in range(3)]
    monkeypatch.setattr(store._link, "run", flaky)
    finished: Counter[str] = Counter()
    while store.jobs.pending(POOL.name) or insist(store.jobs.strays, POOL.name, 0):
        insist(store.jobs.hand_out, POOL.name, 2)
        for job_id, attempt in insist(store.jobs.strays, POOL.name, 0):
            claim = insist(store.jobs.claim, job_id, attempt, nonce=f"{job_id}.{attempt}", worker="w1", node="n1")
            if claim.answer == "run":
                outcome = SUCCESS if chance.random() < 0.7 else Outcome.released()
                assert insist(store.jobs.finish, job_id, claim.token, outcome) == "ok"
                finished[outcome.end.value] += 1
        insist(store.jobs.promote)
    monkeypatch.undo()
    for build_id in builds:
        build = store.builds.get(build_id)
        assert (build["state"], build["counts"]["succeeded"], build["counts"]["queued"]) == ("ended", 100, 0)
        ends = [event for event in store.events.read(build_id)["items"] if event.get("state") == "succeeded"]
        assert len(ends) == 100
    assert finished["succeeded"] == 300


# --- programs that wait for object storage ---------------------------------------------------------------------------


def findings(store: Store, job_id: str) -> list[str]:
    """What does not agree about a job."""
    return list(store._link.run("audit_job", job=job_id))


def kept(store: Store) -> tuple[str, Claim, str]:
    """A job whose finished program lies on the disk of node n1, its attempt and its build."""
    join_pool(store)
    build_id = submit(store, new_cell())
    job_id, claim = take(store)
    assert store.jobs.renew(claim.token, job_id, phase="uploading", kept=True) == "ok"
    return job_id, claim, build_id


@pytest.mark.parametrize("end", ["lease", "died", "stopped", "given back"])
def test_a_finished_program_outlives_its_worker(store: Store, end: str) -> None:
    """Whoever finds it on the node's disk ends the very attempt that made it; nobody compiles it meanwhile."""
    job_id, claim, build_id = kept(store)
    if end == "lease":
        _, other = submit(store, new_cell()), take(store, "w2", "n2")
        assert lose(store) == other[0], "only the attempt that has no finished program is lost"
    elif end == "died":
        assert store.workers.died("w1", "died") == []
    elif end == "stopped":
        assert store.workers.leave("w1") == []
    else:
        assert store.jobs.finish(job_id, claim.token, Outcome.released()) == "ok"
    assert states(store, build_id) == ["running"]
    assert not findings(store, job_id)
    assert store.jobs.renew(claim.token, job_id, kept=True) == "ok"
    assert store.jobs.finish(job_id, claim.token, SUCCESS) == "ok"
    assert states(store, build_id) == ["succeeded"]
    job = store.jobs.get(job_id)
    assert ([one["end"] for one in job["attempts"]], job["charged"]) == (["succeeded"], 0)
    assert not findings(store, job_id)
    assert store._link.ask("EXISTS", key("kept")) == 0


def test_a_node_that_does_not_bring_its_program_costs_no_attempt(farm_settings: Settings) -> None:
    store = Store.connect(farm_settings.model_copy(update={"outbox_hours": 0.6 / 3600}))
    job_id, claim, build_id = kept(store)
    assert lose(store) == job_id
    job = store.jobs.get(job_id)
    assert states(store, build_id) == ["queued"]
    assert (job["attempts"][0]["end"], job["charged"]) == ("released", 0)
    assert job["attempts"][0]["message"] == "node n1 did not bring the finished program within 0.000166667 h"
    assert store.jobs.renew(claim.token, job_id, kept=True) == "lost"
    again, new = take(store)
    assert (again, new.attempt) == (job_id, 2)
    assert not findings(store, job_id)


def test_a_program_that_nobody_wants_any_more_is_not_waited_for(store: Store) -> None:
    job_id, claim, build_id = kept(store)
    assert store.builds.cancel(build_id) == 1
    assert states(store, build_id) == ["cancelled"]
    assert store.jobs.renew(claim.token, job_id, kept=True) == "cancel"
    assert store.jobs.finish(job_id, claim.token, Outcome.cancelled()) == "ok"
    assert store._link.ask("EXISTS", key("kept")) == 0
    assert not findings(store, job_id)


# --- what does not agree ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "said"),
    [(["HSET", "running"], "is running"), (["HDEL"], "is gone")],
    ids=["another state", "gone"],
)
@pytest.mark.damaged
def test_a_cell_that_does_not_follow_its_job_is_named(store: Store, damage: list[str], said: str) -> None:
    build_id = submit(store, cell := new_cell())
    (job_id,) = store.builds.jobs(build_id).values()
    assert findings(store, job_id) == []
    command, *state = damage
    store._link.ask(command, ("build", build_id, "states"), cell["identifier"], *state)
    assert findings(store, job_id) == [f"is queued, but its cell {cell['identifier']} of {build_id} {said}"]


@pytest.mark.damaged
def test_a_job_that_succeeded_twice_is_named(store: Store) -> None:
    join_pool(store)
    submit(store, new_cell())
    attempts = ("job", job_id := run_next(store, SUCCESS), "attempts")
    assert findings(store, job_id) == []
    store._link.ask("HSET", attempts, "2:end", store._link.ask("HGET", attempts, "1:end"))
    assert findings(store, job_id) == ["succeeded 2 times"]


def test_a_worker_that_dies_takes_only_its_own_attempts_with_it(store: Store) -> None:
    """Processes of an earlier release left jobs in the list of a worker that did not run them any more."""
    for worker in ("w1", "w2"):
        join_pool(store, worker)
    build = submit(store, new_cell(), new_cell())
    handed = store.jobs.hand_out(POOL.name, 1)
    for job, worker in zip(handed, ("w1", "w2"), strict=True):
        assert store.jobs.claim(*job, nonce=worker, worker=worker, node="n1").answer == "run"
    (mine, _), (theirs, _) = handed
    (waits,) = store.builds.jobs(submit(store, new_cell())).values()
    left = ("SADD", ("worker", "w1", "running"), theirs, waits, "j-gone")
    store._link.ask(*left)
    assert store.workers.heartbeat("w1").running == 1
    store._link.ask(*left)
    assert store.workers.died("w1", "died") == [mine]
    assert sorted(states(store, build)) == ["queued", "running"]
    assert store.workers.leave("w2") == [theirs]

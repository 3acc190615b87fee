"""Which jobs are handed out next, and how many."""

import secrets
import time
from collections import deque

import pytest

from farm.control.loops import fail_unserved, hand_out, settle_left, wake_pools
from farm.jobs.state import FailureKind, Outcome
from farm.store import Claim, Store
from farm.store.link import key
from tests.support.helpers import wait_until
from tests.support.jobs import explain, join_pool, new_cell, run_next, submit, take
from tests.support.scripted_pool import POOL

SUCCESS = Outcome.success({})


def order(store: Store, count: int) -> list[str]:
    """Hand out `count` jobs one by one; return the first letters of their keys."""
    return [store.jobs.get(run_next(store, SUCCESS))["key"][0] for _ in range(count)]


def cells(letters: str, **changes) -> list[dict]:
    return [new_cell(letter + f"{position:063x}", **changes) for position, letter in enumerate(letters)]


def start(store: Store, *attempts: tuple[str, int], node: str = "n1") -> list[Claim]:
    """What a worker of a node hears that takes these messages."""
    return [store.jobs.claim(*attempt, nonce="n", worker=f"w-{node}", node=node) for attempt in attempts]


def end_all(store: Store, outcome: Outcome) -> list[tuple[str, int]]:
    """Start all that waits at once on node n1 and end it like this; return the attempts."""
    handed = store.jobs.hand_out(POOL.name, 100)
    for (job, _), claim in zip(handed, start(store, *handed), strict=True):
        store.jobs.finish(job, claim.token, outcome)
    return handed


def test_a_higher_priority_goes_first(store: Store) -> None:
    join_pool(store)
    submit(store, *cells("aaa"))
    submit(store, *cells("b", priority=5))
    submit(store, *cells("c", priority=-5))
    assert order(store, 5) == ["b", "a", "a", "a", "c"]


def test_a_pool_is_looked_at_again_only_if_no_claim_would_have_it_looked_at(store: Store) -> None:
    """With a thousand workers each look takes a hundredth of a second, in which the store answers nobody."""

    def woken() -> bool:
        while store.wakeups.next("pools", 0.01):
            pass  # Whoever had it died.
        wake_pools(store)
        return store.wakeups.next("pools", 0.01) == POOL.name

    join_pool(store, slots=4)
    submit(store, *cells("aaaaaaaaa"))
    assert woken()
    handed = store.jobs.hand_out(POOL.name, 1)
    assert not woken()
    start(store, *handed[:2])
    assert woken()


def test_builds_take_turns(store: Store) -> None:
    """A small build does not wait for the end of a large one that came before it."""
    join_pool(store)
    submit(store, *cells("aaaa"))
    submit(store, *cells("bb"))
    assert order(store, 6) == ["a", "b", "a", "b", "a", "a"]


def test_long_jobs_go_first_then_the_order_of_the_manifest(store: Store) -> None:
    join_pool(store)
    known = cells("ab", expected_seconds=10.0) + cells("c", expected_seconds=3000.0)
    submit(store, *cells("f", expected_seconds=0.5), *cells("de"), *known)
    assert order(store, 6) == ["c", "a", "b", "f", "d", "e"]


def test_a_job_has_the_largest_priority_of_its_live_cells(store: Store) -> None:
    join_pool(store)
    submit(store, *cells("ab"))
    urgent = submit(store, new_cell("b" + f"{1:063x}", priority=9))
    assert store.jobs.get(store.builds.cells(urgent)[0]["job"])["priority"] == 9
    submit(store, *cells("c", priority=5))
    store.builds.cancel(urgent)
    assert order(store, 3) == ["c", "a", "b"]


def test_a_build_that_joins_a_job_takes_nobody_out_of_turn(store: Store) -> None:
    join_pool(store)
    for letter in "aba":
        submit(store, *cells(letter))
    assert order(store, 2) == ["a", "b"]


@pytest.mark.parametrize("slots", [1, 2, 4, 5])
def test_a_small_build_behind_a_huge_one_starts_within_two_job_lengths(store: Store, slots: int) -> None:
    """At the worst moment: the broker is just filled up, and all jobs begin and end together."""
    broker, running = deque[tuple[str, int]](), []
    join_pool(store, slots=slots)
    submit(store, *[new_cell() for _ in range(40)])

    def dispatch() -> None:
        hand_out(store, lambda _, lot: broker.extend(lot), POOL.name)

    def begin() -> set[str]:
        for _ in range(slots):
            job_id, attempt = broker.popleft()
            running.append((job_id, store.jobs.claim(job_id, attempt, nonce=job_id, worker="w1", node="n1")))
            dispatch()
        return {job_id for job_id, _ in running}

    dispatch()
    begin()
    small = {cell["job"] for cell in store.builds.cells(submit(store, *cells("bbb")))}
    lengths, begun = 0, set[str]()
    while not begun & small:
        for job_id, claim in running:
            store.jobs.finish(job_id, claim.token, SUCCESS)
        running.clear()
        lengths += 1
        begun = begin()
    assert lengths <= 2


def test_a_large_pool_gets_its_jobs_in_parts_so_that_others_are_served_between_them(store: Store) -> None:
    lots: list[list[tuple[str, int]]] = []
    join_pool(store, slots=400)
    submit(store, *[new_cell(f"{number:064x}") for number in range(500)])
    while pool := store.wakeups.next("pools", 0.2):
        hand_out(store, lambda _, lot: lots.append(lot), pool)
    assert [len(lot) for lot in lots] == [100, 100, 100], "until more than half of the slots have one"
    assert len({job for lot in lots for job, _ in lot}) == 300


def test_a_build_that_had_no_turn_yet_goes_before_those_that_had(store: Store) -> None:
    join_pool(store)
    submit(store, *cells("aaaa"))
    submit(store, *cells("bbb"))
    assert order(store, 3) == ["a", "b", "a"]
    submit(store, *cells("cc"))
    assert order(store, 6) == ["c", "b", "a", "c", "b", "a"]


def test_a_stream_of_small_builds_leaves_a_large_one_every_fourth_turn(store: Store) -> None:
    """Also where more of them come than have their turns, so that there are always some that had none."""
    join_pool(store)
    submit(store, *cells("a" * 10))
    turns = order(store, 1)
    for number in range(20):
        submit(store, new_cell(f"b{number:063x}"))
        submit(store, new_cell(f"c{number:063x}"))
        turns += order(store, 1)
    assert "".join(turns) == "abca" + "bcba" + "cbca" + "bcba" + "cbca" + "b"


def test_first_turns_go_on_while_the_others_may_not_have_theirs(store: Store) -> None:
    join_pool(store)
    paused = submit(store, *cells("aaa"))
    assert order(store, 1) == ["a"]
    store.builds.pause(paused, paused=True)
    for letter in "bcdef":
        submit(store, *cells(letter))
    assert order(store, 4) == ["b", "c", "d", "e"]
    store.builds.pause(paused, paused=False)
    assert order(store, 3) == ["a", "f", "a"], "its turn was due"


def test_many_builds_at_once_have_their_first_turns_in_order(store: Store) -> None:
    """Three of them between two turns of those that had some, and no build two turns before another has one."""
    join_pool(store)
    for letter in "abcdef":
        submit(store, *cells(letter * 3))
    assert "".join(order(store, 18)) == "abcadefbcadefbcdef"


def test_a_pool_gets_so_much_for_each_slot_and_no_more(store: Store) -> None:
    join_pool(store, slots=3)
    submit(store, *[new_cell() for _ in range(20)])
    handed = store.jobs.hand_out(POOL.name, 2)
    assert len(handed) == 6
    assert store.jobs.hand_out(POOL.name, 2) == []
    for message in handed[:3]:
        assert store.jobs.hand_out(POOL.name, 2) == [], "there is still one for each slot"
        store.jobs.claim(*message, nonce="n", worker="w1", node="n1")
    assert len(store.jobs.hand_out(POOL.name, 2)) == 3


def test_nothing_is_handed_to_a_pool_that_nobody_serves(store: Store) -> None:
    build_id = submit(store, new_cell())
    assert store.jobs.hand_out(POOL.name, 2) == []
    join_pool(store)
    assert len(store.jobs.hand_out(POOL.name, 2)) == 1
    (cell,) = store.builds.cells(build_id)
    join_pool(store, ttl=0.1)
    wait_until(lambda: explain(store, cell["job"])["live_workers"] == 0)


@pytest.mark.damaged
def test_a_job_that_the_store_has_lost_does_not_hold_up_the_next(store: Store) -> None:
    join_pool(store)
    gone, there = cells("ab")
    build_id = submit(store, gone, there)
    store._link.ask("DEL", ("job", store.builds.jobs(build_id)[gone["identifier"]]))
    assert order(store, 1) == ["b"]


def test_what_was_started_before_does_not_queue_up_again(store: Store) -> None:
    """A job whose worker was lost goes before all of its priority, also where the broker has all it may have."""
    join_pool(store, slots=2)
    submit(store, *cells("aaaaaa"))
    lost = store.jobs.hand_out(POOL.name, 2)[0]
    claim = store.jobs.claim(*lost, nonce="n", worker="w1", node="n1")
    submit(store, *cells("b"))
    urgent = submit(store, new_cell(priority=9))
    assert store.jobs.hand_out(POOL.name, 2) == []
    store.jobs.finish(lost[0], claim.token, Outcome.released())
    assert explain(store, lost[0])["ahead"] == 1, "the urgent one, and nothing of what the broker has"
    assert store.jobs.hand_out(POOL.name, 2) == [], "who is more urgent waits as well"
    store.builds.cancel(urgent)
    assert store.jobs.hand_out(POOL.name, 2) == [(lost[0], 2)]
    assert store.jobs.hand_out(POOL.name, 2) == []


def test_what_was_started_before_does_not_overtake_the_more_urgent_in_the_broker(store: Store) -> None:
    join_pool(store, slots=3)
    submit(store, *cells("a"))
    (first,) = store.jobs.hand_out(POOL.name, 2)
    (claim,) = start(store, first)
    submit(store, *cells("b", priority=9))
    submit(store, *cells("cccccc"))
    urgent, *others = store.jobs.hand_out(POOL.name, 2)
    assert len(others) == 5
    store.jobs.finish(first[0], claim.token, Outcome.released())
    assert store.jobs.hand_out(POOL.name, 2) == [], "it would go on top of the urgent one"
    while store.wakeups.next("pools", 0.01):
        pass
    start(store, urgent)
    assert store.wakeups.next("pools", 0.01) == POOL.name, "nothing more urgent lies there now"
    assert store.jobs.hand_out(POOL.name, 2) == [(first[0], 2)]


def test_what_was_started_before_is_not_handed_out_on_top_of_the_more_urgent(store: Store) -> None:
    join_pool(store)
    submit(store, *cells("a"))
    first, claim = take(store)
    store.jobs.finish(first, claim.token, Outcome.released())
    submit(store, *cells("b", priority=9))
    (urgent,) = store.jobs.hand_out(POOL.name, 2)
    assert urgent[0] != first


def test_the_less_urgent_go_on_as_soon_as_a_node_refused_the_more_urgent(store: Store) -> None:
    """Both were started before; the node that is free must not have the urgent one for now."""
    join_pool(store, "w-n1", node="n1")
    join_pool(store, "w-n2", node="n2")
    submit(store, *cells("a", priority=9))
    end_all(store, Outcome.failure(FailureKind.GPU_FAULT, "the GPU reported a fault"))
    submit(store, *cells("b"))
    urgent, other = store.jobs.hand_out(POOL.name, 1)
    store.jobs.finish(other[0], start(store, other, node="n2")[0].token, Outcome.released())
    assert store.jobs.hand_out(POOL.name, 1) == [], "it would go on top of the urgent one"
    while store.wakeups.next("pools", 0.01):
        pass
    assert start(store, urgent)[0].answer == "elsewhere"
    assert store.wakeups.next("pools", 0.01) == POOL.name, "at once, not when somebody looks at all pools"
    assert store.jobs.hand_out(POOL.name, 1) == [(other[0], 2)]


def test_what_was_started_before_has_as_much_room_as_the_rest_and_no_more(store: Store) -> None:
    join_pool(store)
    submit(store, *cells("aaaa"))
    end_all(store, Outcome.released())
    first, second = store.jobs.hand_out(POOL.name, 2)
    assert (first[1], second[1]) == (2, 2)
    assert store.jobs.hand_out(POOL.name, 2) == []
    start(store, first)
    assert len(store.jobs.hand_out(POOL.name, 2)) == 1


def test_builds_take_turns_with_what_was_started_before(store: Store) -> None:
    join_pool(store)
    submit(store, *cells("aaaa"))
    submit(store, *cells("bb"))
    assert len(end_all(store, Outcome.released())) == 6
    submit(store, *cells("c"))
    handed = store.jobs.hand_out(POOL.name, 100)
    letters = "".join(store.jobs.get(job)["key"][0] for job, _ in handed)
    assert letters in ("ababaac", "babaaac")


def test_jobs_that_a_node_must_not_have_leave_it_others(store: Store) -> None:
    """One node is free and has failed many jobs; they wait for the other one, which is busy."""
    join_pool(store, "w-n1", node="n1")
    join_pool(store, "w-n2", node="n2")
    submit(store, *cells("a" * 10))
    end_all(store, Outcome.failure(FailureKind.GPU_FAULT, "the GPU reported a fault"))
    submit(store, *cells("bb"))
    handed = store.jobs.hand_out(POOL.name, 2)
    heard = [(store.jobs.get(job)["key"][0], *start(store, (job, number))) for job, number in handed]
    assert [(letter, claim.answer) for letter, claim in heard] == [("a", "elsewhere")] * 4 + [("b", "run")] * 2


def test_a_job_waits_longer_each_time_a_node_must_not_have_it_but_a_second_at_most(store: Store) -> None:
    """The node that may have it can be free at any moment; where very many wait, they leave the others' nodes time."""
    join_pool(store, "w-n1", node="n1")
    join_pool(store, "w-n2", node="n2")
    submit(store, *cells("a"))
    end_all(store, Outcome.failure(FailureKind.GPU_FAULT, "the GPU reported a fault"))
    for delay in (0.25, 0.5, 1.0, 1.0, 1.95):
        if delay > 1:
            for number in range(39):
                store._link.ask("ZADD", key("delayed"), 1e15, f"j-{number}")
        (attempt,) = store.jobs.hand_out(POOL.name, 1)
        before = store.now() - 0.01  # Times are rounded.
        assert start(store, attempt)[0].answer == "elsewhere"
        assert before + delay <= explain(store, attempt[0])["delayed_until"] <= store.now() + delay + 0.01
        wait_until(store.jobs.promote)
    assert start(store, *store.jobs.hand_out(POOL.name, 1), node="n2")[0].answer == "run"


def test_max_parallel_bounds_a_build(store: Store) -> None:
    join_pool(store, slots=10)
    bounded = submit(store, *cells("aaaa"), max_parallel=2)
    submit(store, *cells("b"))
    handed = store.jobs.hand_out(POOL.name, 1)
    assert sorted(store.jobs.get(job)["key"][0] for job, _ in handed) == ["a", "a", "b"]
    waiting = next(job for job in store.builds.jobs(bounded).values() if job not in dict(handed))
    assert explain(store, waiting)["bounded_by"] == bounded
    job_id, attempt = handed[0]
    claim = store.jobs.claim(job_id, attempt, nonce="n", worker="w1", node="n1")
    assert store.jobs.hand_out(POOL.name, 1) == []
    store.jobs.finish(job_id, claim.token, SUCCESS)
    assert len(store.jobs.hand_out(POOL.name, 1)) == 1


@pytest.mark.parametrize("bound", [0, 1])
def test_the_end_of_a_job_wakes_its_pool_if_its_build_may_have_another_now(store: Store, bound: int) -> None:
    join_pool(store, slots=10)
    submit(store, *cells("aa"), max_parallel=bound)
    handed = store.jobs.hand_out(POOL.name, 1)
    (claim, *_) = start(store, *handed)
    while store.wakeups.next("pools", 0.01):
        pass
    store.jobs.finish(handed[0][0], claim.token, SUCCESS)
    assert store.wakeups.next("pools", 0.01) == (POOL.name if bound else None)


def test_fail_fast_ends_the_other_cells(store: Store) -> None:
    join_pool(store)
    build_id = submit(store, *[new_cell() for _ in range(5)], fail_fast=True)
    other = submit(store, new_cell())
    run_next(store, SUCCESS)
    run_next(store, SUCCESS)  # the other build's turn
    job_id, claim = take(store)
    store.jobs.finish(job_id, claim.token, Outcome.failure(FailureKind.COMPILER_ERROR, "no"))
    assert store.jobs.hand_out(POOL.name, 1) == []
    # They may have ended in the same millisecond, and have no order then. One is to be stopped.
    assert {store.wakeups.next("builds", 0.01) for _ in range(2)} == {build_id, other}
    reported: list[str] = []
    settle_left(store, reported.append)
    settle_left(store, reported.append)
    counts = store.builds.get(build_id)["counts"]
    assert (counts["succeeded"], counts["failed"], counts["cancelled"]) == (1, 1, 3)
    assert sorted(set(reported)) == sorted([build_id, other])


def test_a_fail_fast_build_without_live_cells_is_not_stopped_again_while_lots_are_missing(store: Store) -> None:
    join_pool(store)
    build_id = f"b-{'7' * 16}"
    store.builds.create({"id": build_id, "namespace": "main", "cells": 2, "fail_fast": True}, [new_cell()])
    run_next(store, Outcome.failure(FailureKind.COMPILER_ERROR, "no"))
    assert store.builds.to_stop() == [build_id]
    settle_left(store, list[str]().append)
    assert (store.builds.get(build_id)["state"], store.builds.to_stop()) == ("open", [])


@pytest.mark.parametrize(
    ("kind", "hours", "stops"), [("compiler_error", 1, False), ("compiler_error", -1, True), ("bad_model", 1, True)]
)
def test_a_failure_that_is_expected_stops_no_fail_fast_build(
    store: Store, kind: str, hours: float, stops: bool
) -> None:
    join_pool(store)
    expected = {"expected": {"kind": kind, "before": time.time() + hours * 3600}}
    cells = [new_cell(**expected), new_cell()]
    build_id = submit(store, *cells, fail_fast=True)
    job_id, claim = take(store)
    store.jobs.finish(job_id, claim.token, Outcome.failure(FailureKind.COMPILER_ERROR, "no"))
    assert set(store.builds.to_stop()) == ({build_id} if stops else set())


def test_a_lifted_fence_wakes_the_pools_of_its_node_alone(store: Store) -> None:
    join_pool(store)
    other = {**POOL.as_dict(), "name": "another"}
    store.workers.register({"id": "w2", "node": "n2", "slots": 1, "pools": [other]}, ttl=60.0)
    store.workers.probed("w1", node="n1", wrong="it hangs", row=0)
    while store.wakeups.next("pools", 0.01):
        pass
    assert store.workers.unfence("n1")
    assert [store.wakeups.next("pools", 0.01) for _ in range(2)] == [POOL.name, None]


def test_jobs_that_nobody_serves_fail_in_the_end(store: Store) -> None:
    join_pool(store, ttl=0.05)
    build_id = submit(store, new_cell(), new_cell())
    wait_until(lambda: not store.workers.list())
    assert fail_unserved(store, 0.3) == 0
    wait_until(lambda: fail_unserved(store, 0.3))
    cells_now = store.builds.cells(build_id)
    assert {(cell["state"], cell["kind"]) for cell in cells_now} == {("failed", "toolchain_mismatch")}
    assert f"no worker has taken jobs of pool {POOL.name} for 0 s: " in cells_now[0]["message"], "0.3, in whole seconds"


def test_jobs_of_a_pool_whose_only_worker_takes_none_fail_in_the_end(store: Store) -> None:
    join_pool(store)
    reasons = []
    for begin, end in (
        (lambda: store.workers.probed("w1", node="n1", wrong="it hangs", row=0), lambda: store.workers.unfence("n1")),
        (lambda: store.workers.heartbeat("w1", resting="its disk is full"), lambda: store.workers.heartbeat("w1")),
        (lambda: store.workers.drain("w1"), lambda: join_pool(store, "w2")),
    ):
        build_id = submit(store, new_cell())
        begin()
        assert fail_unserved(store, 0.3) == 0
        wait_until(lambda: fail_unserved(store, 0.3))
        cell = store.builds.cells(build_id)[0]
        assert (cell["state"], cell["kind"]) == ("failed", "toolchain_mismatch")
        reasons.append(cell["message"].partition(" s: ")[2])
        end()
        assert fail_unserved(store, 0.0) == 0, "the pool is served"
    assert not store.workers.unfence("n1"), "it is not fenced any more"
    assert reasons == [
        "node n1 takes none: its health probe failed: it hangs",
        "node n1 takes none: its disk is full",
        "node n1 takes none: it drains",
    ]


def test_a_worker_that_starts_again_and_again_serves_nobody(store: Store) -> None:
    build_id = submit(store, new_cell())

    def restarted() -> int:
        worker = {"id": f"w{secrets.token_hex(2)}", "node": "n1", "slots": 1, "pools": [POOL.as_dict()]}
        store.workers.register(worker, ttl=60.0, resting="its first health probe runs")
        return fail_unserved(store, 0.3)

    assert restarted() == 0
    wait_until(restarted)
    assert store.builds.cells(build_id)[0]["kind"] == "toolchain_mismatch"


def test_no_job_fails_because_workers_wait_for_object_storage(store: Store) -> None:
    join_pool(store)
    build_id = submit(store, new_cell())
    store.workers.heartbeat("w1", resting="object storage is away: it refuses connections")
    assert fail_unserved(store, 0.0) == 0
    assert store.builds.cells(build_id)[0]["state"] == "queued"


def test_a_waiting_job_says_why(store: Store) -> None:
    join_pool(store, slots=2)
    build_id = submit(store, *cells("aaaa"))
    submit(store, *cells("b", priority=3))
    jobs = [cell["job"] for cell in store.builds.cells(build_id)]
    facts = explain(store, jobs[2])
    assert (facts["live_workers"], facts["slots"], facts["ahead"], facts["handed_out"]) == (1, 2, 3, False)


def test_jobs_of_several_builds_and_priorities_are_explained_at_once(store: Store) -> None:
    join_pool(store)
    first, second = submit(store, *cells("aaa")), submit(store, *cells("bb"))
    urgent = submit(store, *cells("c", priority=3))
    ((handed, _),) = store.jobs.hand_out(POOL.name, 1)
    waiting = [cell["job"] for build in (urgent, first, second) for cell in store.builds.cells(build)]
    assert waiting[0] == handed
    *found, gone = store.jobs.explain([*waiting, "j-gone"])
    assert [facts["handed_out"] for facts in found] == [True] + [False] * 5
    assert [facts["ahead"] for facts in found] == [0, 2, 4, 5, 2, 4], "what the broker has, and the others' turns"
    assert gone is None


def test_the_last_attempt_is_part_of_why_a_job_waits(store: Store) -> None:
    join_pool(store)
    submit(store, *cells("a"))
    job = run_next(store, Outcome.failure(FailureKind.STORAGE, "no answer"))
    store.jobs.promote()
    before = explain(store, job)["before"]
    assert (before["number"], before["end"], before["kind"], before["node"]) == (1, "failed", "storage", "n1")


def test_what_lies_in_the_broker_does_not_start_while_it_is_paused(store: Store) -> None:
    join_pool(store)
    build_id = submit(store, *cells("aa"))
    (first, second) = store.jobs.hand_out(POOL.name, 2)

    def claim(job: str, attempt: int) -> str:
        return store.jobs.claim(job, attempt, nonce="n", worker="w1", node="n1").answer

    store.builds.pause(build_id, paused=True)
    assert claim(*first) == "elsewhere"
    store.builds.pause(build_id, paused=False)
    store.workers.pause_pool(POOL.name, paused=True)
    assert claim(*second) == "elsewhere"
    assert store.jobs.hand_out(POOL.name, 2) == []
    store.workers.pause_pool(POOL.name, paused=False)
    assert sorted(store.jobs.hand_out(POOL.name, 2)) == sorted([first, second]), (
        "the same attempts: nothing was charged"
    )


def test_a_paused_build_hands_out_nothing_and_others_go_on(store: Store) -> None:
    join_pool(store)
    paused = submit(store, *cells("aa"))
    submit(store, *cells("bb"))
    assert store.builds.pause(paused, paused=True)
    assert order(store, 2) == ["b", "b"]
    assert store.jobs.hand_out(POOL.name, 2) == []
    job = store.builds.cells(paused)[0]["job"]
    assert explain(store, job)["paused"] == paused
    submit(store, *cells("c"))
    assert store.workers.wanted_slots(POOL.name) == 1
    assert order(store, 1) == ["c"]
    store.builds.pause(paused, paused=False)
    store.builds.pause(paused, paused=False)
    assert [event["paused"] for event in store.events.read(paused)["items"] if "paused" in event] == ["1", "0"]
    assert order(store, 2) == ["a", "a"]


def test_a_job_that_another_build_wants_too_is_not_held_up(store: Store) -> None:
    join_pool(store)
    paused = submit(store, *cells("a"))
    store.builds.pause(paused, paused=True)
    submit(store, *cells("a"))
    assert order(store, 1) == ["a"]


def test_a_paused_pool_hands_out_nothing(store: Store) -> None:
    join_pool(store)
    build = submit(store, *cells("a"))
    store.workers.pause_pool(POOL.name, paused=True)
    assert store.jobs.hand_out(POOL.name, 2) == []
    assert explain(store, store.builds.cells(build)[0]["job"])["paused"] == POOL.name
    store.workers.pause_pool(POOL.name, paused=False)
    assert order(store, 1) == ["a"]


def test_a_job_whose_workers_all_rest_says_why_they_do(store: Store) -> None:
    join_pool(store, "w1", node="n1")
    join_pool(store, "w2", node="n2")
    build_id = submit(store, *cells("a"))
    (cell,) = store.builds.cells(build_id)
    store.workers.heartbeat("w1", resting="its disk is full")
    assert explain(store, cell["job"])["resting"] is None, "the other node takes jobs"
    store.workers.probed("w2", node="n2", wrong="it hangs", row=0)
    facts, fenced = explain(store, cell["job"]), "node n2 is fenced: its health probe failed: it hangs"
    assert (facts["live_workers"], facts["slots"]) == (2, 0)
    assert facts["resting"] in ("node n1 takes no jobs: its disk is full", fenced)
    store.workers.heartbeat("w1")
    assert explain(store, cell["job"])["resting"] is None
    store.workers.leave("w1")
    assert explain(store, cell["job"])["resting"] == fenced
    assert explain(store, cell["job"])["live_workers"] == 1

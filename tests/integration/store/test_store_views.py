"""What readers get of builds, cells, jobs, workers and pools: all of it, in the units that it says."""

from __future__ import annotations

from typing import Any

import pytest

from farm.jobs.state import FailureKind, Outcome
from farm.store import Store
from tests.support.helpers import wait_until
from tests.support.jobs import join_pool, new_cell, submit
from tests.support.scripted_pool import POOL

NOW = "now"


def seen(store: Store, value: Any) -> Any:
    """The value, with the word `now` for each time of the last minute, and `soon` for short durations."""
    if isinstance(value, dict):
        return {name: seen(store, each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [seen(store, each) for each in value]
    if isinstance(value, float) and value:
        now = store.now()
        return NOW if now - 60 < value <= now + 0.01 else "soon" if 0 < value < 60 else value
    return value


def counts(**numbers: int) -> dict[str, int]:
    return dict.fromkeys(("queued", "running", "succeeded", "failed", "cancelled", "expected"), 0) | numbers


NOTHING: dict[str, Any] = {
    "job": None, "attempt": 0, "hit": False, "kind": None, "message": "", "detail": "", "phase": None,
    "progress": None, "worker": None, "elapsed": None, "spent": 0.0, "facts": None, "log": None,
}  # fmt: skip


@pytest.fixture
def story(store: Store) -> tuple[str, list[dict[str, Any]], list[str]]:
    """A build with a hit, and cells that succeeded, failed, run and wait."""
    join_pool(store, "w1", slots=1)
    join_pool(store, "w2", node="n2", slots=3)
    names = ("hit", "made", "wrong", "runs", "waits")
    cells = [new_cell(f"{number}" * 64, expected_seconds=10 - number) for number, _ in enumerate(names)]
    cells[0] |= {"facts": {"latency": 0.5}, "order": None}
    build = submit(store, *cells, created_by="me", labels={"a": "b"}, max_parallel=3, warnings=["w"])
    handed = store.jobs.hand_out(POOL.name, 1)
    claims = [(job, store.jobs.claim(job, attempt, nonce=f"n{job}", worker="w1", node="n1")) for job, attempt in handed]
    (made, one), (wrong, two), (runs, three) = claims
    claimed = store.now()
    wait_until(lambda: store.now() > claimed + 0.002)  # What ends in the same millisecond has run for no time.
    store.jobs.renew(one.token, made, phase="compiling", log_tail=b"a log")
    success = Outcome.success({"latency": 0.01, "turns": {"key": "x"}}, log="d" * 64, phases={"compiling": 2.0})
    assert store.jobs.finish(made, one.token, success) == "ok"
    failure = Outcome.failure(FailureKind.COMPILER_ERROR, "no kernel", detail="at line 3", log="e" * 64)
    assert store.jobs.finish(wrong, two.token, failure) == "ok"
    assert store.jobs.renew(three.token, runs, phase="measuring", progress=0.25, detail="run 3", paused=0.0) == "ok"
    return build, cells, [made, wrong, runs]


def test_a_build_and_its_cells(store: Store, story: tuple[str, list[dict[str, Any]], list[str]]) -> None:
    build, cells, (made, wrong, runs) = story
    jobs = store.builds.jobs(build)
    waits = jobs[cells[4]["identifier"]]
    assert jobs == {cell["identifier"]: job for cell, job in zip(cells[1:], [made, wrong, runs, waits], strict=True)}
    assert seen(store, store.builds.get(build)) == {
        "id": build, "namespace": "main", "name": "test", "cells": 5, "created_by": "me", "labels": {"a": "b"},
        "max_parallel": 3, "warnings": ["w"], "created_at": NOW, "ended_at": None, "state": "open", "accepted": 5,
        "paused": False, "verdict": None, "counts": counts(queued=1, running=1, succeeded=2, failed=1),
    }  # fmt: skip
    ended = {**NOTHING, "attempt": 1, "worker": "w1", "elapsed": "soon", "spent": "soon"}
    facts = seen(store, {"latency": 0.01, "turns": {"key": "x"}})
    rows = [
        {**NOTHING, "state": "succeeded", "hit": True, "facts": seen(store, {"latency": 0.5})},
        {**ended, "state": "succeeded", "job": made, "facts": facts, "log": "d" * 64},
        {
            **ended, "state": "failed", "job": wrong, "kind": "compiler_error", "message": "no kernel",
            "detail": "at line 3", "log": "e" * 64,
        },
        {
            **ended, "state": "running", "job": runs, "phase": "measuring", "progress": "soon", "detail": "run 3",
        },
        {**NOTHING, "state": "queued", "job": waits, "attempt": 1},
    ]  # fmt: skip
    wanted = [{**row, "identifier": cell["identifier"]} for row, cell in zip(rows, cells, strict=True)]
    assert seen(store, store.builds.cells(build)) == wanted
    some = [cells[3]["identifier"], "none", cells[1]["identifier"]]
    assert seen(store, store.builds.cells(build, some)) == [wanted[1], wanted[3]]
    assert store.builds.live_cells("main") == {"me": 2}
    assert [row["id"] for row in store.builds.unreported()] == [build]
    assert store.jobs.phases() == {"measuring": 1}
    assert store.jobs.set_aside() == {"delayed_jobs": 0, "kept_jobs": 0, "unreported_builds": 0}
    keys = [cell["key"] for cell in cells]
    assert store.jobs.unfinished("main", keys) == set(keys[3:])
    assert store.index.get_many("main", keys) == {keys[1]: {"latency": 0.01}}, "without what one build asked"
    assert (store.index.count("main"), store.jobs.log_tail(made), store.jobs.log_tail(runs)) == (1, b"a log", None)


def test_a_job_with_its_attempts(store: Store, story: tuple[str, list[dict[str, Any]], list[str]]) -> None:
    build, cells, (made, _, runs) = story
    attempt = {
        "number": 1, "worker": "w1", "node": "n1", "started_at": NOW, "ended_at": NOW, "end": "succeeded",
        "limits": {"time": 60, "memory": 0}, "kind": None, "message": "", "detail": "", "log": "d" * 64,
        "phases": {"compiling": "soon"},
    }  # fmt: skip
    wanted = {
        "id": made, "state": "succeeded", "namespace": "main", "key": cells[1]["key"], "pool": POOL.name,
        "priority": 0, "attempt": 1, "charged": 0, "order": cells[1]["order"], "cancelling": False,
        "quarantined": False, "worker": "w1", "node": "n1", "phase": "compiling", "progress": None, "detail": "",
        "created_at": NOW, "queued_at": NOW, "started_at": NOW, "ended_at": NOW, "kind": None, "message": "",
        "facts": seen(store, {"latency": 0.01, "turns": {"key": "x"}}), "log": "d" * 64, "attempts": [attempt],
        "cells": [{"build": build, "identifier": cells[1]["identifier"]}],
    }  # fmt: skip
    assert seen(store, store.jobs.get(made)) == wanted
    running = {
        **attempt, "ended_at": None, "end": None, "log": None, "phases": {},
    }  # fmt: skip
    assert seen(store, store.jobs.get(runs)) == {
        **wanted, "id": runs, "state": "running", "key": cells[3]["key"], "order": cells[3]["order"],
        "phase": "measuring", "progress": "soon", "detail": "run 3", "ended_at": None, "facts": None, "log": None,
        "attempts": [running], "cells": [{"build": build, "identifier": cells[3]["identifier"]}],
    }  # fmt: skip
    job = store.jobs.get(runs)
    assert job and job["progress"] == 0.25
    assert store.jobs.get("j-none") is None


def test_workers_and_pools(store: Store, story: tuple[str, list[dict[str, Any]], list[str]]) -> None:
    _, _, (_, _, runs) = story
    store.workers.heartbeat("w2", resting="its disk is full", warning="it is hot")
    base = {
        "pools": [POOL.name], "draining": False, "registered_at": NOW, "seen_at": NOW, "running": [],
        "running_others": 0, "fenced": "", "resting": "", "warning": "",
    }  # fmt: skip
    first = {**base, "id": "w1", "node": "n1", "slots": 1, "running": [runs]}
    second = {
        **base, "id": "w2", "node": "n2", "slots": 3, "resting": "its disk is full", "warning": "it is hot",
    }  # fmt: skip
    by_id = {worker["id"]: worker for worker in seen(store, store.workers.list("main"))}
    assert by_id == {"w1": first, "w2": second}
    by_id = {worker["id"]: worker for worker in seen(store, store.workers.list("other"))}
    assert by_id["w1"] == {**first, "running": [], "running_others": 1}
    pool = {
        "name": POOL.name, "pool": POOL.as_dict(), "live_workers": 2, "slots": 1, "waiting": 1, "running": 1,
        "uploading": 0, "paused": False,
    }  # fmt: skip
    assert store.workers.pools() == [pool]
    assert store.workers.wanted_slots(POOL.name) == 2
    store.workers.pause_pool(POOL.name, paused=True)
    assert (store.workers.pools(), store.workers.paused_pools()) == ([{**pool, "paused": True}], [POOL.name])
    assert store.workers.wanted_slots(POOL.name) == 1
    assert store.workers.drain("w1") and not store.workers.drain("w9")
    assert seen(store, store.workers.list())[0]["draining"] is True
    (handed,) = take_none(store)
    assert handed == []


def test_an_attempt_that_left_its_slot_to_upload_holds_none(store: Store) -> None:
    join_pool(store, slots=1)
    submit(store, *(new_cell(letter * 64) for letter in "abc"))
    tokens = {}
    for _ in range(2):
        ((job, attempt),) = store.jobs.hand_out(POOL.name, 1)
        tokens[job] = store.jobs.claim(job, attempt, nonce=f"n{job}", worker="w1", node="n1").token
    first, second = tokens

    def found() -> tuple[int, int, int, int]:
        (pool,) = store.workers.pools()
        return pool["running"], pool["uploading"], pool["waiting"], store.workers.wanted_slots(POOL.name)

    assert found() == (2, 0, 1, 3)
    assert store.jobs.renew(tokens[first], first, phase="uploading", left=True) == "ok"
    assert store.jobs.renew(tokens[first], first, phase="uploading") == "ok", "once left, it stays so"
    assert found() == (1, 1, 1, 2)
    assert store.jobs.finish(first, tokens[first], Outcome.released()) == "ok"
    assert found() == (1, 0, 2, 3), "tried again, it holds one"
    assert store.jobs.renew(tokens[second], second, left=True) == "ok"
    assert store.workers.leave("w1") == [second]
    assert found() == (0, 0, 3, 3)


def take_none(store: Store) -> tuple[list[Any]]:
    """What a pool hands out whose workers all drain or rest."""
    store.workers.pause_pool(POOL.name, paused=False)
    return (store.jobs.hand_out(POOL.name, 1),)

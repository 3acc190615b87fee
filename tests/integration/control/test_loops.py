"""Loops: what is done now and then, and what happens where it fails."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest

from farm.app import Farm
from farm.artifacts import inventory
from farm.artifacts.inventory import MARKS
from farm.control import loops
from farm.control.loops import job_loops, repeat_all, send_strays
from farm.errors import StorageUnavailable
from farm.extension import Loop
from farm.settings import load_settings
from farm.store import Store
from tests.support.helpers import in_a_thread, wait_until
from tests.support.jobs import Reports, join_pool, new_cell, submit
from tests.support.scripted_pool import POOL


def test_a_step_that_fails_is_not_repeated_at_once(farm: Farm) -> None:
    """Such as the upkeep of storage that is away: each try costs it something."""
    tried: list[str] = []
    ticks: list[str] = []

    def tidy() -> None:
        tried.append("again")
        raise StorageUnavailable("away")

    loops_ = [Loop("tidy", tidy, 600.0), Loop("tick", partial(ticks.append, ""), 0.1, leader_only=False)]
    with in_a_thread(partial(repeat_all, farm.store, loops_)):
        wait_until(lambda: len(ticks) > 15, message="time has passed")
    assert len(tried) == 1


def test_a_control_plane_looks_about_twice_a_second_for_what_nothing_wakes_it_for() -> None:
    settings = load_settings({}, redis_url="redis://127.0.0.1:9")
    nothing: Any = None
    looks = job_loops(settings, Store.connect(settings), send=nothing, queued=nothing, finish=nothing, resume=nothing)
    assert 2 <= sum(1 / loop.seconds for loop in looks if loop.seconds) < 2.1


def test_what_waits_in_a_long_queue_and_is_claimed_meanwhile_is_not_sent_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue is read once, however many wait in it."""
    monkeypatch.setattr(loops, "STRAY_SECONDS", 0.0)
    join_pool(store, slots=4)
    submit(store, *(new_cell(str(number) * 64) for number in range(4)))
    waiting, claimed, *lost = handed = sorted(store.jobs.hand_out(POOL.name, 1))
    wait_until(lambda: sorted(store.jobs.strays(POOL.name, 0.0)) == handed)
    reads: list[str] = []
    sent: list[tuple[str, int]] = []

    def queued(pool: str) -> set[tuple[str, int]]:
        reads.append(pool)
        store.jobs.claim(*claimed, nonce="n", worker="w1", node="n1")
        return {waiting}

    assert send_strays(store, lambda _, again: sent.extend(again), queued) == 2
    assert (sorted(sent), reads) == (lost, [POOL.name])


def test_garbage_is_collected_by_itself_only_where_that_is_switched_on(
    farm: Farm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it is only reported: nothing is changed, not even marked."""
    monkeypatch.setattr(inventory, "ORPHAN_AGE", timedelta(0))
    monkeypatch.setattr(inventory, "GRACE", timedelta(0))
    monkeypatch.setattr(loops, "FIRST_COLLECTION", 0.0)
    monkeypatch.setattr(loops, "SWEEP_SECONDS", 0.01)
    monkeypatch.setattr(loops, "COLLECTIONS", 0.05)
    digest, _ = farm.artifacts.put_blob_bytes(b"nobody's")
    looked: list[bool] = []
    collect = inventory.collect

    def noted(*args: Any, **options: Any) -> Any:
        looked.append(True)
        return collect(*args, **options)

    monkeypatch.setattr(loops, "collect", noted)
    for switched_on in (False, True):
        one = Farm(farm.settings.model_copy(update={"gc": switched_on}))
        looked.clear()
        with in_a_thread(partial(loops.run_loops, one)):
            wait_until(lambda: len(looked) > 2, message="it has looked")
            if switched_on:
                wait_until(lambda: not farm.artifacts.has_blob(digest), message="it is deleted")
        assert farm.artifacts.has_blob(digest) is not switched_on
    assert list(farm.artifacts.list_objects(MARKS)) == []


def test_a_queue_that_cannot_be_read_keeps_no_job_from_its_pools_timeout(redis_url: str) -> None:
    """A message was lost with the only worker, so the queue is looked at each second."""
    settings = load_settings({}, redis_url=redis_url, pool_timeout=1.0, log_level="error")
    store, asked, stop = Store.connect(settings), threading.Event(), threading.Event()

    def broken(_: str) -> set[tuple[str, int]]:
        asked.set()
        raise ValueError("no message")

    reports = Reports(store)
    loops_ = job_loops(
        settings, store, send=lambda *_: None, queued=broken, finish=reports.finish, resume=reports.resume
    )
    thread = threading.Thread(target=repeat_all, args=(store, loops_, stop))
    thread.start()
    try:
        join_pool(store)
        build = submit(store, new_cell())
        wait_until(asked.is_set)
        store.workers.leave("w1")
        assert reports.wait(build)["counts"]["failed"] == 1
    finally:
        stop.set()
        thread.join()


def test_days_of_the_log_of_changes_are_kept_for_some_time(farm: Farm) -> None:
    today = datetime.now(UTC).date()
    days = [str(today - timedelta(days=ago)) for ago in (0, 29, 31, 400)]
    for day in days:
        farm.artifacts.put_object(f"{loops.CHANGES}{day}/1-a.json", b"{}")
    loops.forget_changes(farm.artifacts, timedelta(days=30))
    left = list(farm.artifacts.list_objects(loops.CHANGES))
    assert left == [f"{loops.CHANGES}{day}/1-a.json" for day in sorted(days[:2])]

"""Pieces of one attempt's work in its own slot and in those that it borrows."""

from __future__ import annotations

import threading

import pytest
from structlog.testing import capture_logs

from farm.compiling.attempt import FreeSlots, Slot
from farm.tuning.search import FanOut

SLOTS = [Slot(f"GPU-{index}") for index in range(4)]
OWN = SLOTS[0]


def fan_out(work, pieces: int, cancelled: threading.Event | None = None) -> None:
    free = FreeSlots(SLOTS)
    with free.one(threading.Event()) as own:
        assert own == OWN
        FanOut(free, own, work, cancelled or threading.Event()).run(range(pieces))


def test_each_piece_is_done_once_and_all_slots_are_at_work() -> None:
    """No slot gets past its first piece before all have one."""
    done: list[tuple[Slot, int]] = []
    first = {slot: threading.Event() for slot in SLOTS}

    def work(slot: Slot, piece: int) -> None:
        first[slot].set()
        for event in first.values():
            assert event.wait(30)
        done.append((slot, piece))

    fan_out(work, 100)
    assert sorted(piece for _, piece in done) == list(range(100))
    assert {slot for slot, _ in done} == set(SLOTS)


def test_what_fails_in_a_borrowed_slot_is_done_again_in_the_own_one() -> None:
    done: list[int] = []
    failed: list[Slot] = []
    all_failed = threading.Event()

    def work(slot: Slot, piece: int) -> None:
        if slot != OWN:
            failed.append(slot)
            if len(failed) == len(SLOTS) - 1:
                all_failed.set()
            raise OSError("no GPU")
        assert all_failed.wait(30)
        done.append(piece)

    fan_out(work, 10)
    assert sorted(done) == list(range(10))
    assert sorted(failed, key=str) == SLOTS[1:], "a slot that failed is borrowed no more"


def test_a_failure_in_the_own_slot_comes_when_the_others_have_done_what_they_have_in_hand() -> None:
    begun: list[Slot] = []
    ended: list[Slot] = []
    all_begun, raised = threading.Event(), threading.Event()

    def work(slot: Slot, piece: int) -> None:
        if slot == OWN:
            assert all_begun.wait(30)
            raised.set()
            raise ValueError("the model")
        begun.append(slot)
        if {*begun} == {*SLOTS[1:]}:
            all_begun.set()
        assert raised.wait(30)
        ended.append(slot)

    with pytest.raises(ValueError, match="the model"):
        fan_out(work, 100)
    assert sorted(ended, key=str) == sorted(begun, key=str)
    assert {*ended} == {*SLOTS[1:]}


@pytest.mark.parametrize(("is_cancelled", "warnings"), [(False, len(SLOTS) - 1), (True, 0)])
def test_a_cancel_is_no_failure_of_the_slots(is_cancelled: bool, warnings: int) -> None:
    cancelled, all_begun = threading.Event(), threading.Barrier(len(SLOTS))

    def work(slot: Slot, piece: int) -> None:
        all_begun.wait(30)
        if is_cancelled:
            cancelled.set()
        raise ValueError("ended")

    with capture_logs() as logs, pytest.raises(ValueError, match="ended"):
        fan_out(work, len(SLOTS), cancelled)
    assert len(logs) == warnings


def test_a_helper_that_does_not_start_ends_those_that_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node may be out of threads. Nothing is in hand any more when that is raised."""
    at_work, raised = threading.Event(), threading.Event()
    begun: list[int] = []
    ended: list[int] = []
    start = threading.Thread.start

    def start_one(thread: threading.Thread) -> None:
        if at_work.is_set():
            raised.set()
            raise RuntimeError("can't start new thread")
        start(thread)
        assert at_work.wait(30)

    def work(_: Slot, piece: int) -> None:
        begun.append(piece)
        at_work.set()
        assert raised.wait(30)
        ended.append(piece)

    monkeypatch.setattr(threading.Thread, "start", start_one)
    with pytest.raises(RuntimeError, match="new thread"):
        fan_out(work, 100)
    assert begun == ended == [0]

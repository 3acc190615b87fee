"""Tuning records: merging them in any order and any number of times comes to the same, and loses nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farm.errors import UsageError
from farm.tuning import exchange
from farm.tuning.formats import check_record
from farm.tuning.records import (
    Log,
    Record,
    RecordSource,
    RecordStore,
    Session,
    Snapshot,
    TuningWork,
    best_time,
)

FIND = "gfx942130.HIP.3_5_1_4dddc24.ufdb.txt"
OTHER_FIND = "gfx942130.HIP.3_4_0_0f1e2d3.ufdb.txt"
PERF = "gfx942130.HIP.3_5_1_4dddc24.udb.txt"

sources = st.builds(
    RecordSource, when=st.sampled_from(["2026-01-01", "2026-01-02"]), worker=st.sampled_from("ab"), seconds=st.just(1.5)
)
find_values = st.sampled_from(["A:0.5,0,x", "A:0.5,0,x;B:0.25,64,y", "C:0.75,0,z", "miopenAlgo:S,0.125,0,k,<unused>"])
records = st.one_of(
    st.builds(
        Record,
        st.just(RecordStore.PROBLEM_CACHE),
        st.just(""),
        st.sampled_from(['{"name":"a","problem":1}', '{"name":"b","problem":[2]}']),
        st.sampled_from(['"v4:1"', "7"]),
        sources,
    ),
    st.builds(
        Record,
        st.just(RecordStore.FIND_DB),
        st.sampled_from([FIND, OTHER_FIND]),
        st.sampled_from("kl"),
        find_values,
        sources,
    ),
    st.builds(
        Record,
        st.just(RecordStore.PERF_DB),
        st.just(PERF),
        st.sampled_from(["k=A", "k=B", "l=A"]),
        st.sampled_from(["1,2", "3"]),
        sources,
    ),
)
sessions = st.builds(
    Session,
    id=st.sampled_from("xyz"),
    until=st.sampled_from(["2026-01-01T10:00:00+00:00", "2026-01-02T10:00:00+00:00"]),
    work=st.builds(TuningWork, tuned=st.integers(0, 9), seconds=st.sampled_from([0.0, 1.0])),
)


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    log = Log({session.id: session for session in draw(st.lists(sessions, max_size=3))})
    return Snapshot.of(draw(st.lists(records, max_size=12)), log)


def keys(snapshot: Snapshot) -> set[tuple[RecordStore, str, str]]:
    return {(record.store, record.file, record.key) for record in snapshot}


@given(snapshots(), snapshots(), snapshots())
def test_merging_is_associative(a: Snapshot, b: Snapshot, c: Snapshot) -> None:
    assert a.join(b).join(c) == a.join(b.join(c)) == a.join(b, c)


@given(snapshots(), snapshots())
def test_merging_is_commutative(a: Snapshot, b: Snapshot) -> None:
    assert a.join(b) == b.join(a)


@given(snapshots(), snapshots())
def test_merging_again_changes_nothing(a: Snapshot, b: Snapshot) -> None:
    assert a.join(a) == a
    assert a.join(b).join(b) == a.join(b).join(a) == a.join(b)


@given(snapshots(), snapshots())
def test_merging_loses_no_key_and_makes_none(a: Snapshot, b: Snapshot) -> None:
    assert keys(a.join(b)) == keys(a) | keys(b)
    assert set(a.join(b)) <= set(a) | set(b)


@given(snapshots(), snapshots())
def test_what_is_new_is_what_brings_the_old_up_to_date(before: Snapshot, after: Snapshot) -> None:
    new = after.minus(before)
    assert keys(new) <= keys(after)
    assert {(r.key, r.file, r.value) for r in new.over(before)} >= {(r.key, r.file, r.value) for r in after}
    assert not after.minus(after)


@given(snapshots())
def test_a_snapshot_survives_its_text(snapshot: Snapshot) -> None:
    assert exchange.unpack(exchange.pack(snapshot)) == Snapshot(
        {p: t for p, t in snapshot.tables.items() if t}, snapshot.log
    )
    assert exchange.pack(snapshot) == exchange.pack(Snapshot.of(reversed(list(snapshot)), snapshot.log))


def test_a_log_that_an_earlier_farm_wrote_can_be_read() -> None:
    work = {"known": 1, "tuned": 2, "untunable": 3, "seconds": 4.0, "saved": 5.0}
    session = {"id": "j-1", "until": "2026-01-09T00:00:00+00:00", "work": work, "worker": "w", "job": "j"}
    days = {"2026-01-01": [2, [1, 2, 3, 4.0, 5.0]]}
    header = {"schema": 1, "sources": [], "sessions": [{**session, "identifier": "net/fp16"}], "days": days}
    log = exchange.read(f"{json.dumps({**header, 'folded': '2026-01-02'})}\n@@\tend".encode()).log
    assert log.total() == TuningWork(known=2, tuned=4, untunable=6, seconds=8.0, saved=10.0, sessions=3)


@given(snapshots(), st.data())
def test_cut_text_is_refused(snapshot: Snapshot, data: st.DataObject) -> None:
    whole, packed = exchange.write(snapshot), exchange.pack(snapshot)
    with pytest.raises(UsageError, match="not a snapshot"):
        exchange.read(whole[: data.draw(st.integers(0, len(whole) - 1))].encode())
    with pytest.raises(UsageError, match="not a snapshot"):
        exchange.unpack(packed[: data.draw(st.integers(0, len(packed) - 1))])


def one(store: RecordStore, value: str, when: str = "2026-01-01", key: str = "k", file: str = FIND) -> Snapshot:
    return Snapshot.of([Record(store, file, key, value, RecordSource(when))])


def value(snapshot: Snapshot) -> str:
    (record,) = snapshot
    return record.value


def test_find_db_keeps_the_whole_record_with_the_lower_time() -> None:
    slow, fast = (
        one(RecordStore.FIND_DB, "A:0.5,0,x;B:0.4,0,x"),
        one(RecordStore.FIND_DB, "C:0.3,0,x", when="2026-01-09"),
    )
    assert value(slow.join(fast)) == value(fast.join(slow)) == "C:0.3,0,x"


def test_perf_db_unites_solvers_and_keeps_the_ones_that_were_there() -> None:
    old = one(RecordStore.PERF_DB, "1,2", key="k=A", file=PERF)
    new = one(RecordStore.PERF_DB, "9,9", when="2026-02-01", key="k=A", file=PERF).join(
        one(RecordStore.PERF_DB, "3", when="2026-02-01", key="k=B", file=PERF)
    )
    assert {r.key: r.value for r in new.join(old)} == {"k=A": "1,2", "k=B": "3"}


def test_the_problem_cache_keeps_the_solution_that_was_there() -> None:
    key = '{"name":"a","problem":1}'
    old = one(RecordStore.PROBLEM_CACHE, '"v4:1"', key=key, file="")
    new = one(RecordStore.PROBLEM_CACHE, '"a4:1"', when="2026-02-01", key=key, file="")
    assert value(new.join(old)) == '"v4:1"'


def test_what_another_version_of_miopen_measured_is_never_mixed_in() -> None:
    ours = one(RecordStore.FIND_DB, "A:0.5,0,x")
    both = ours.join(one(RecordStore.FIND_DB, "A:0.1,0,x", file=OTHER_FIND))
    assert value(Snapshot({(RecordStore.FIND_DB, FIND): both.tables[RecordStore.FIND_DB, FIND]})) == "A:0.5,0,x"


@pytest.mark.parametrize(
    ("record", "time"),
    [
        ("A:0.5,0,x;B:0.25,64,y", 0.25),
        ("miopenConvolutionFwdAlgoGEMM:gemm,0.125,0,k,<unused>", 0.125),  # find-db 1.0
        ("A:nan,0,x", float("inf")),
        ("A:", float("inf")),
        ("A:-1,0,x;B:2,0,x", 2.0),
    ],
)
def test_best_time(record: str, time: float) -> None:
    assert best_time(record) == time


def test_old_sessions_become_days_and_count_once() -> None:
    """The log stays small, however long the farm lives; a delta that comes again after that adds nothing."""
    now = datetime(2026, 3, 1, tzinfo=UTC)
    log = Log(
        {
            str(age): Session(str(age), (now - timedelta(days=age)).isoformat(), TuningWork(tuned=1, seconds=2.0))
            for age in range(20)
        }
    )
    before = Snapshot(log=log)
    after = before.fold(now)
    assert len(after.log.sessions) == 8
    assert after.log.total() == before.log.total() == TuningWork(tuned=20, seconds=40.0, sessions=20)
    assert after.join(before).log.total() == after.log.total()
    assert after.join(before).fold(now + timedelta(days=9)).log.total() == after.log.total()


@pytest.mark.parametrize("until", ["2026-01-01T10:05:00+00:00", "2026-01-01T09:05:00+00:00"])
def test_a_session_counts_what_it_came_to_last(until: str) -> None:
    """Also if its worker's clock was set back meanwhile."""
    early = Session("job-1/1", "2026-01-01T10:00:00+00:00", TuningWork(tuned=1, seconds=60))
    late = replace(early, until=until, work=TuningWork(tuned=4, seconds=300))
    joined = Snapshot(log=Log({late.id: late})).join(Snapshot(log=Log({early.id: early})))
    assert joined.log.total() == TuningWork(tuned=4, seconds=300, sessions=1)


@pytest.mark.parametrize(
    ("store", "key", "value"),
    [
        (RecordStore.PROBLEM_CACHE, '{"name": "a", "problem": 1}', "1"),  # not canonical
        (RecordStore.PROBLEM_CACHE, '{"name":"a"}', "1"),
        (RecordStore.PROBLEM_CACHE, '{"name":"a","problem":1}', "null"),
        (RecordStore.FIND_DB, "k=l", "no solver"),
        (RecordStore.FIND_DB, "k", "A:1\nk2=A:1"),
        (RecordStore.PERF_DB, "k", "1,2"),
    ],
)
def test_records_from_outside_are_checked(store: RecordStore, key: str, value: str) -> None:
    assert check_record(store, key, value)

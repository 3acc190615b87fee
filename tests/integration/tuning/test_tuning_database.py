"""The tuning database on a real S3 server: shared by many, spoiled by none."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from farm.artifacts.inventory import owned
from farm.artifacts.s3 import S3Store
from farm.errors import ArtifactGone, UsageError
from farm.spec import Device
from farm.tuning import database as tuning_database
from farm.tuning.database import MERGE_COUNT, Collector, TuningDatabase, databases, device_name, mode_name
from farm.tuning.formats import PROBLEM_CACHE, read_folder, write_folder
from farm.tuning.records import RecordSource, Snapshot, TuningWork
from tests.support.tuning_writers import NAME, delta, kill_writers, race, restore


@pytest.fixture
def store(s3_connection: dict[str, str]) -> S3Store:
    return S3Store(**s3_connection)


@pytest.fixture
def database(store: S3Store) -> TuningDatabase:
    return TuningDatabase(store, *NAME)


def test_an_attempt_finds_at_once_what_another_committed(database: TuningDatabase, tmp_path: Path) -> None:
    """Merged or not: the next job on the pool tunes none of it again."""
    database.commit(delta(1))
    assert database.merge()["records"] == 3
    database.commit(delta(2))
    restored = restore(database, tmp_path)
    assert (len(database.waiting()), len(restored.snapshot)) == (1, 5)
    problems = {key["problem"] for key, _ in json.loads((tmp_path / PROBLEM_CACHE).read_text())}
    assert problems == {"own-1-0", "own-1-1", "own-2-0", "own-2-1", "shared"}


def test_nothing_is_known_at_first(database: TuningDatabase, tmp_path: Path) -> None:
    restored = restore(database, tmp_path)
    assert not restored.snapshot
    assert list(tmp_path.iterdir()) == []
    assert database.merge()["generation"] == 0
    assert database.head() is None


def test_the_same_delta_twice_is_one(database: TuningDatabase) -> None:
    """An attempt commits again when it did not hear the answer, also after the delta was merged and deleted."""
    database.commit(delta(1))
    database.commit(delta(1))
    database.merge()
    database.commit(delta(1))
    merged = database.merge()
    assert (merged["generation"], merged["records"]) == (1, 3)
    assert database.read().snapshot.log.total().sessions == 1
    assert database.waiting() == []


def test_a_namespace_reads_what_main_knows_and_writes_its_own(store: S3Store, tmp_path: Path) -> None:
    main, fork = TuningDatabase(store, *NAME), TuningDatabase(store, "pr-7", *NAME[1:])
    main.commit(delta(1))
    fork.commit(delta(2))
    assert len(restore(fork, tmp_path / "fork").snapshot) == 5
    assert len(restore(main, tmp_path / "main").snapshot) == 3
    assert [found.namespace for found in databases(store, ["main", "pr-7"])] == ["main", "pr-7"]


def test_races_lose_no_delta(store: S3Store, database: TuningDatabase) -> None:
    """The full count is in `tests/benchmarks/tuning.py`."""
    expected, merges = race(lambda: store, 60, committers=8, mergers=3)
    database.merge()
    found = database.read()
    assert found.snapshot.tables == expected.tables
    assert found.snapshot.log.total() == expected.log.total()
    assert database.waiting() == []
    assert merges > 1


def test_a_writer_killed_at_any_step_spoils_nothing(s3_connection: dict[str, str], database: TuningDatabase) -> None:
    """Between two kills the rest is merged and two attempts commit, so every merge has the same steps."""
    steps = []
    committed = [database.commit(delta(number)) for number in range(2)]
    for there_was_such_a_step in kill_writers(s3_connection):
        steps.append(there_was_such_a_step)
        for merged in (False, True):
            if merged:
                database.merge()
            expected = Snapshot().join(*map(delta, range(len(committed))))
            found = database.read()
            assert found.snapshot.tables == expected.tables
            assert found.snapshot.log.total() == expected.log.total()
        committed += [database.commit(delta(len(committed) + number)) for number in range(2)]
    # List, two deltas, head, its snapshot, list, new snapshot, new head, two deletions.
    assert steps == [True] * 10 + [False]


def test_a_delta_that_cannot_be_read_is_left_and_keeps_no_other(store: S3Store, database: TuningDatabase) -> None:
    store.put_object(f"ns/{NAME[0]}/tuning/{'/'.join(NAME[1:])}/deltas/{'0' * 64}.gz", b"\x1f\x8bcut")
    database.commit(delta(1))
    merged = database.merge()
    assert (merged["deltas"], len(merged["unreadable"]), merged["records"]) == (1, 1, 3)
    assert len(database.waiting()) == 1


def test_a_damaged_head_is_said_and_not_written_over(store: S3Store, database: TuningDatabase) -> None:
    database.commit(delta(1))
    database.merge()
    store.put_object(f"ns/{NAME[0]}/tuning/{'/'.join(NAME[1:])}/head.json", b"{}")
    database.commit(delta(2))
    with pytest.raises(ArtifactGone, match=r"head\.json cannot be read"):
        database.merge()
    assert len(database.waiting()) == 1


def test_garbage_collection_keeps_the_snapshots_of_heads(store: S3Store, database: TuningDatabase) -> None:
    database.commit(delta(1))
    database.merge()
    head = database.head()
    assert head is not None
    assert head.snapshot in owned(store, store.list_objects("ns/"))


def test_a_merge_waits_until_it_is_worth_a_snapshot(database: TuningDatabase) -> None:
    """Each rewrites the head, so one small new delta of a large head waits; many, or an old one, do not."""
    now = datetime.now(UTC)
    assert not database.merge_due(now)
    database.commit(delta(1, records=2000))
    assert database.merge_due(now)
    database.merge()
    database.commit(delta(2))
    assert not database.merge_due(now)
    assert database.merge_due(now + timedelta(hours=1))
    for number in range(3, MERGE_COUNT + 2):
        database.commit(delta(number))
    assert database.merge_due(now)


def test_pruning_takes_away_what_it_is_asked_to(database: TuningDatabase) -> None:
    for number in (1, 2):
        database.commit(delta(number))
    left = database.prune(lambda now: now.only(record for record in now if record.source.job != "job-1"))
    assert left["records"] == 2
    assert {record.source.job for record in database.read().snapshot} == {"job-2"}
    database.delete()
    assert (database.head(), database.waiting()) == (None, [])


def test_a_merge_does_not_undo_a_prune_that_ran_meanwhile(
    store: S3Store, database: TuningDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pruned between the merge's looks at deltas and at the head; merged before the prune deletes what it merged."""
    other = TuningDatabase(store, *NAME)

    def prune() -> None:
        other.prune(lambda now: now.only(()))

    def first(owner: object, name: str, act: Callable[[], object]) -> None:
        step = getattr(owner, name)

        def acted(*arguments: Any) -> Any:
            monkeypatch.undo()
            act()
            return step(*arguments)

        monkeypatch.setattr(owner, name, acted)

    for owner, name, beside, act in (
        (database, "_merged", prune, database.merge),
        (store, "delete_object", database.merge, prune),
    ):
        database.commit(delta(1))
        first(owner, name, beside)
        act()
        assert len(database.read().snapshot) == 0


def write_cache(folder: Path, problems: dict[str, str], cut: int = 0) -> None:
    entries = [[{"name": "gpu::mlir_op", "problem": problem}, solution] for problem, solution in problems.items()]
    text = json.dumps(entries)
    (folder / PROBLEM_CACHE).write_text(text[: len(text) - cut])


def test_a_collector_commits_what_is_new_while_the_child_writes(database: TuningDatabase, tmp_path: Path) -> None:
    database.commit(delta(1))
    restored = restore(database, tmp_path)
    known = {json.loads(record.key)["problem"]: "v4:1" for record in restored.snapshot}
    collector = Collector(database, tmp_path, "job-9/2", RecordSource("", "w", "job-9"))

    def collect(work: TuningWork) -> int:
        found = collector.look(tmp_path, work)
        collector.commit(work)
        return len(found)

    assert collect(TuningWork()) == 0
    write_cache(tmp_path, {**known, "new-1": "a", "new-2": "b"}, cut=4)  # half written
    assert collect(TuningWork(known=3, seconds=10.0)) == 1
    write_cache(tmp_path, {**known, "new-1": "a", "new-2": "b"})
    assert collect(TuningWork(known=3, seconds=16.0)) == 1
    assert collect(TuningWork(known=3, seconds=20.0)) == 0
    assert len(database.waiting()) == 3, "a commit of nothing is none"
    collector.finish(TuningWork(known=3, tuned=2, untunable=1, seconds=25.0, saved=6.0))

    database.merge()
    found = database.read().snapshot
    session = found.log.sessions["job-9/2"]
    assert session.work == TuningWork(known=3, tuned=2, untunable=1, seconds=25.0, saved=6.0)
    (record,) = [record for record in found if '"new-2"' in record.key]
    assert (record.value, record.source.job, record.source.seconds) == ('"b"', "job-9", 6.0)


def test_a_child_that_writes_other_records_each_time_fills_no_memory(
    database: TuningDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning_database, "CHILD_RECORDS", 5)
    collector = Collector(database, tmp_path, "job-9/3", RecordSource(""))
    found = []
    for turn in range(10):
        write_cache(tmp_path, {f"new-{turn}-1": "a", f"new-{turn}-2": "b"})
        found.append(len(collector.look(tmp_path, TuningWork())))
        collector.commit(TuningWork())
    assert found == [2, 2, *[0] * 8]
    assert len(database.read().snapshot) == 4
    # Nor do many attempts, one after the other.
    monkeypatch.setattr(tuning_database, "LARGEST_DATABASE", database.read().snapshot.size + 1)
    collector = Collector(database, tmp_path, "job-9/4", RecordSource(""))
    write_cache(tmp_path, {"new-10-1": "a"})
    assert len(collector.look(tmp_path, TuningWork())) == 0


@pytest.mark.parametrize("left", ["half", "no file"])
def test_who_is_killed_while_he_writes_takes_nothing_with_him(
    database: TuningDatabase, tmp_path: Path, left: str
) -> None:
    """MIGraphX writes its cache whole, over the old one; MIOpen deletes a file before it puts the new one there."""
    database.commit(delta(1))
    folder = tmp_path / "own"
    restored = restore(database, folder)
    collector = Collector(database, folder, "job-9/1", RecordSource(""))
    cache = folder / PROBLEM_CACHE
    whole = cache.read_bytes()
    cache.write_bytes(whole[: len(whole) // 2])
    if left == "no file":
        cache.unlink()
    assert len(collector.look(folder, TuningWork())) == 0
    write_folder(collector.known, tmp_path / "copy")
    collector.tidy(folder)
    for each in (folder, tmp_path / "copy"):
        assert len(read_folder(each, RecordSource("")).snapshot) == len(restored.snapshot)
    collector.commit(TuningWork())
    assert len(database.waiting()) == 1, "nothing of it is news"


def test_what_others_committed_is_read_once(database: TuningDatabase) -> None:
    """Also where a merge took it into the head before it was seen."""
    database.commit(delta(1))
    seen = database.read().seen
    database.commit(delta(2))
    news = database.since(seen)
    assert {record.source.job for record in news.snapshot} == {"job-2"}
    assert not database.since(news.seen).snapshot
    database.commit(delta(3))
    database.merge()
    news = database.since(news.seen)
    assert len(news.snapshot) == 7
    assert not database.since(news.seen).snapshot


def test_an_enforcement_of_its_own_has_a_database_of_its_own() -> None:
    assert mode_name({"mode": "quick"}) == "quick"
    assert mode_name({"mode": "quick", "miopen_find_enforce": 1}) == "quick-enforce1"


def test_devices_have_names_that_fit_into_object_keys() -> None:
    assert device_name(Device("gfx942:sramecc+:xnack-", 304, 8)) == "gfx942.sramecc-on.xnack-off-304cu-8xcc"
    assert device_name(Device("gfx1100", 48)) == "gfx1100-48cu"
    assert device_name(Device("cpu", cpu_family="GenuineIntel 6/143")) == "cpu-GenuineIntel_6_143"
    with pytest.raises(UsageError, match="no one device"):
        device_name(Device("gfx942:any"))

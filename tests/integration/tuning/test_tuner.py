"""Tuning slice by slice: what is kept, what is skipped, what a budget does. The GPU's compiler is a scripted one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from farm.artifacts.s3 import S3Store
from farm.compiling.asking import MadeProgram
from farm.compiling.attempt import Slot
from farm.compiling.pipeline import Databases, StepEnded
from farm.errors import StorageUnavailable
from farm.runner.onnxruntime_sessions import RECORDS, Candidate, add_record, choose
from farm.settings import Settings
from farm.tuning import search
from farm.tuning.formats import OBJECTS, write_folder
from farm.tuning.records import Record, RecordSource, RecordStore, Snapshot
from farm.tuning.search import slice_key
from tests.benchmarks.tuning_kills import kill_at_random, second_model
from tests.support.helpers import wait_until
from tests.support.scripted_tuner import (
    CANDIDATES,
    PER_SLICE,
    SPEC,
    ScriptedSteps,
    Tuner,
    begun,
    database,
    save_model,
    tuner_for,
    worked,
)

FIND_DB = "gfx942130.HIP.3_5_1_4dddc24.ufdb.txt"
QUICK = {"tuning": {"mode": "quick"}}
OPERATIONS = [f"conv-{index}" for index in range(10)]


def environments(tuner: Tuner) -> dict[str, dict[str, str]]:
    """Return the environment of the last child of each action."""
    assert isinstance(tuner.steps, ScriptedSteps)
    return dict(tuner.steps.asked)


def test_a_second_attempt_tunes_nothing_again(artifacts: S3Store, farm_settings: Settings, tmp_path: Path) -> None:
    """What one attempt tuned is known to the next, which says so and what it saved."""
    model = save_model(tmp_path, OPERATIONS)
    first = tuner_for(artifacts, farm_settings, tmp_path, "first")
    first.compile(model, None)
    assert (first.search.work.known, first.search.work.tuned, first.search.work.untunable) == (0, 10, 0)
    assert worked(model) == 10 * CANDIDATES
    second = tuner_for(artifacts, farm_settings, tmp_path, "second")
    second.compile(model, None)
    assert (second.search.work.known, second.search.work.tuned) == (10, 0)
    assert second.search.work.saved == pytest.approx(first.search.work.seconds, abs=0.01)
    assert worked(model) == 10 * CANDIDATES
    assert database(artifacts).read().snapshot.log.total().tuned == 10


def test_a_tuned_program_names_the_rows_that_it_was_made_with(
    artifacts: S3Store, farm_settings: Settings, tmp_path: Path
) -> None:
    model, kept = save_model(tmp_path, OPERATIONS[:2]), database(artifacts)
    first = tuner_for(artifacts, farm_settings, tmp_path, "first")
    first.compile(model, None)
    added = {entry.key.rpartition("/")[2].removesuffix(".gz") for entry in kept.waiting()}
    found = first.report(published=True)
    assert added and (found["database"], set(found["rows"])) == (kept.name, added)
    kept.merge()
    head = kept.head()
    second = tuner_for(artifacts, farm_settings, tmp_path, "second")
    second.compile(model, None)
    rows = {*second.report(published=True)["rows"]}
    assert head and rows == {head.snapshot, *(e.key.rpartition("/")[2].removesuffix(".gz") for e in kept.waiting())}


@pytest.mark.parametrize(
    ("mode", "search"),
    [
        ("quick", {"MIOPEN_FIND_ENFORCE": "3"}),
        ("exhaustive", {"MIOPEN_FIND_ENFORCE": "3", "MIOPEN_SYSTEM_DB_PATH": "{}/tuning"}),
        (
            "full",
            {
                "MIOPEN_FIND_ENFORCE": "3",
                "MIOPEN_SYSTEM_DB_PATH": "{}/tuning",
                "MIGRAPHX_MLIR_TUNE_EXHAUSTIVE": "1",
            },
        ),
    ],
)
def test_only_children_that_tune_search(
    artifacts: S3Store, farm_settings: Settings, tmp_path: Path, mode: str, search: dict[str, str]
) -> None:
    """Every mode sets its variables for slices and the whole; who measures has empty databases and no search."""
    tuner = tuner_for(artifacts, farm_settings, tmp_path, "one", mode=mode)
    folder = tmp_path / "one"
    tuner.compile(save_model(tmp_path, OPERATIONS[:2]), None)
    stores = {
        "MIOPEN_USER_DB_PATH": f"{folder}/tuning",
        "MIOPEN_CUSTOM_CACHE_DIR": f"{folder}/tuning/kernels",
        "MIGRAPHX_PROBLEM_CACHE": f"{folder}/tuning/problem_cache.json",
        "MIGRAPHX_TRACE_BENCHMARKING": "1",
    }
    expected = {**stores, **{name: value.format(folder) for name, value in search.items()}}
    found = environments(tuner)
    assert found["tune"] == found["compile"] == expected
    assert {name: value for name, value in tuner.measuring.environment.items() if "/proof" not in value} == {}
    assert not (tuner.measuring.environment.keys() & search.keys())


def test_the_untuned_program_is_measured_as_well(artifacts: S3Store, farm_settings: Settings, tmp_path: Path) -> None:
    """It is compiled without a search. What the tuned one left in its empty databases is reported, its kernels stay."""
    tuner = tuner_for(artifacts, farm_settings, tmp_path, "one")
    compiled = tuner.compile(save_model(tmp_path, OPERATIONS[:2]), None)
    assert tuner.prove(MadeProgram.of(tuner.steps.program, compiled), None)
    assert environments(tuner)["compile"] == {}
    report, figures = tuner.report(published=True), tuner.figures()
    assert (report["published"], report["written"], report["carried"]) == ("tuned", 0, True)
    assert (figures["ratio"], figures["tuned"]["median"], figures["baseline"]["median"]) == (2.0, 0.001, 0.002)
    assert tuner.kernels() == []
    write_folder(
        Snapshot.of([Record(RecordStore.FIND_DB, FIND_DB, "64-3x3-F", "1:0.1,0,algo", RecordSource(""))]), tuner.proof
    )
    (tuner.proof / "kernels").mkdir()
    (tuner.proof / "kernels" / "gfx942130.ukdb").write_bytes(b"kernels")
    tuner.prove(MadeProgram.of(tuner.steps.program, compiled), None)
    report = tuner.report(published=True)
    assert (report["written"], report["carried"]) == (1, False), "it tuned again"
    assert [path.name for path in tuner.kernels()] == ["gfx942130.ukdb"]


def test_others_on_the_gpu_while_programs_take_turns_make_the_measurement_shared(
    artifacts: S3Store, farm_settings: Settings, tmp_path: Path
) -> None:
    """The turns decide which program is published."""
    looks = [{"processes": {"count": count, "memory": 1}} for count in (0, 0, 2)]
    tuner = tuner_for(artifacts, farm_settings, tmp_path, "one")
    tuner.children.conditions = iter(looks).__next__

    compiled = tuner.compile(save_model(tmp_path, OPERATIONS[:1]), None)
    assert tuner.choose(compiled, None, runs=True) is None
    record: dict[str, Any] = {"tuning": {}, "measurements": {"conditions": [], "shared": False}}
    tuner.describe(record)
    assert record["tuning"]["conditions"] == looks[:2]
    assert (record["measurements"]["conditions"], record["measurements"]["shared"]) == (looks[2:], True)


def test_a_program_that_needs_its_databases_does_not_carry_its_tuning(
    artifacts: S3Store, farm_settings: Settings, tmp_path: Path
) -> None:
    """With empty databases it is slower than with those that tuned it; a program out already takes turns too."""
    out = MadeProgram(tmp_path / "published.mxr", [], None, "a" * 64)
    tuner = tuner_for(artifacts, farm_settings, tmp_path, "one", published=out)
    compiled = tuner.compile(save_model(tmp_path, OPERATIONS[:1]), None)
    tuner.measuring = Databases({**tuner.measuring.environment, "NEEDS_DATABASES": "1"}, tuner.measuring.folders)
    assert tuner.prove(MadeProgram.of(tuner.steps.program, compiled), None)
    report, against = tuner.report(published=True), tuner.figures()["against"]
    assert report["carried"] is False
    assert report["alone"]["interval"] == pytest.approx([2 / 3, 2 / 3])
    assert (against["key"], against["verdict"]) == (out.key, "slower")


def test_modes_have_databases_of_their_own(artifacts: S3Store, farm_settings: Settings, tmp_path: Path) -> None:
    """A hit stops tuning for good, so what `quick` found must not stop `exhaustive`."""
    model = save_model(tmp_path, OPERATIONS[:4])
    tuner_for(artifacts, farm_settings, tmp_path, "quick", mode="quick").compile(model, None)
    tuner_for(artifacts, farm_settings, tmp_path, "exhaustive").compile(model, None)
    assert worked(model) == 2 * 4 * CANDIDATES


def test_a_budget_cuts_tuning_short_and_the_next_goes_on(
    artifacts: S3Store, farm_settings: Settings, tmp_path: Path
) -> None:
    """At its end the child is stopped. What the compiler then chooses by itself never enters the database."""
    gate = tmp_path / "gate"
    gate.mkdir()
    model = save_model(tmp_path, OPERATIONS, gate=gate)
    slot = Slot("GPU-0")
    tuner = tuner_for(artifacts, farm_settings, tmp_path, "short", budget=6.0, slot=slot)
    with ThreadPoolExecutor(1) as thread:
        ended = thread.submit(tuner.compile, model, None)
        first = wait_until(lambda: begun(gate))[0]
        (gate / first.slice).touch()  # The others stay closed, so that it is the budget that ends.
        ended.result()
    assert tuner.search.cut
    report = tuner.report(published=True)
    assert (report["finished"], report["operations"]) == (False, 10)
    assert 0 < report["known"] + report["tuned"] < 10
    kept = database(artifacts).read().snapshot.counts()[RecordStore.PROBLEM_CACHE]
    assert kept < 10, "the whole was compiled, but from a copy"
    assert worked(model) > kept * CANDIDATES
    assert "MIOPEN_FIND_ENFORCE" not in environments(tuner)["compile"]
    (gate / slot.gpu).touch()
    longer = tuner_for(artifacts, farm_settings, tmp_path, "longer", budget=600.0, slot=slot)
    longer.compile(model, None)
    assert not longer.search.cut
    assert longer.search.work.known >= report["tuned"]
    assert database(artifacts).read().snapshot.counts()[RecordStore.PROBLEM_CACHE] == 10


def test_a_slice_that_the_compiler_refuses_is_not_tunable(
    artifacts: S3Store, farm_settings: Settings, tmp_path: Path
) -> None:
    """The others are tuned and kept, also where the whole then fails."""
    model = save_model(tmp_path, [*OPERATIONS[:4], "refused"])
    tuner = tuner_for(artifacts, farm_settings, tmp_path, "one")
    with pytest.raises(StepEnded, match="No solutions provided"):
        tuner.compile(model, None)
    assert (tuner.search.work.tuned, tuner.search.work.untunable) == (4, 1)
    assert database(artifacts).read().snapshot.log.total() == replace(tuner.search.work, sessions=1)


def test_operations_are_counted_by_where_they_came_from(
    artifacts: S3Store, farm_settings: Settings, tmp_path: Path
) -> None:
    """No slice of the second model is known as a whole; of each, one operation is new."""
    first = tuner_for(artifacts, farm_settings, tmp_path, "first")
    first.compile(save_model(tmp_path / "a", OPERATIONS[:8]), None)
    assert first.search.work.saved == 0
    second = tuner_for(artifacts, farm_settings, tmp_path, "second")
    second.compile(save_model(tmp_path / "b", ["new-1", *OPERATIONS[:3], "new-2", *OPERATIONS[4:7]]), None)
    work = second.search.work
    assert (work.known, work.tuned, work.untunable) == (6, 2, 0)
    assert work.saved > 0


def test_a_slice_that_leaves_nothing_is_not_known_because_others_of_its_attempt_left_something(
    artifacts: S3Store, farm_settings: Settings, tmp_path: Path
) -> None:
    tuner = tuner_for(artifacts, farm_settings, tmp_path, "one")
    tuner.compile(save_model(tmp_path, [*OPERATIONS[:4], *reversed(OPERATIONS[:4])]), None)
    assert (tuner.search.work.known, tuner.search.work.tuned, tuner.search.work.untunable) == (0, 4, 4)


def test_what_is_tuned_as_a_whole_counts(
    artifacts: S3Store, farm_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A TensorFlow graph is not cut. What the minute's look finds in a running child has taken its seconds, too."""
    monkeypatch.setattr(search, "COLLECT_SECONDS", 0.05)
    tuner = tuner_for(artifacts, farm_settings, tmp_path, "one")
    tuner.order["model"]["format"] = "tf"
    tuner.compile(save_model(tmp_path, OPERATIONS), None)
    work = tuner.search.work
    assert (work.known, work.tuned, work.untunable) == (0, 10, 0)
    assert work.seconds > 0
    found = database(artifacts).read().snapshot
    assert found.log.total() == replace(work, sessions=1)
    assert 0 < sum(record.source.seconds for record in found) < work.seconds + 0.01

    again = tuner_for(artifacts, farm_settings, tmp_path, "two")
    again.order["model"]["format"] = "tf"
    again.compile(save_model(tmp_path, OPERATIONS), None)
    assert (again.search.work.known, again.search.work.tuned) == (10, 0)
    assert again.search.work.saved == work.seconds


def test_an_outage_at_the_end_of_the_tuning_keeps_no_program_and_loses_nothing(
    artifacts: S3Store, farm_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was learnt is committed when the attempt has nothing else to do."""

    def away(*_: Any, **__: Any) -> None:
        raise StorageUnavailable("S3 is away")

    tuner = tuner_for(artifacts, farm_settings, tmp_path, "one")
    with monkeypatch.context() as outage:
        outage.setattr(artifacts, "put_object", away)
        assert tuner.compile(save_model(tmp_path, OPERATIONS[:4]), None)
        assert not database(artifacts).read().snapshot
        with pytest.raises(StorageUnavailable):
            tuner.search.save()
    for _ in range(2):
        tuner.search.save()
        found = database(artifacts).read().snapshot
        assert found.counts()[RecordStore.PROBLEM_CACHE] == 4
        assert len(database(artifacts).waiting()) == 1
        assert found.log.total() == replace(tuner.search.work, sessions=1)


def test_deaths_lose_the_slice_in_hand_at_most(farm_settings: Settings, tmp_path: Path) -> None:
    """Workers killed at random points; the next one goes on. `tests/benchmarks/tuning_kills.py` does it 100 times."""
    kills = kill_at_random(farm_settings, tmp_path, kills=5, operations=12)
    assert max(kills.lost) <= PER_SLICE * CANDIDATES
    assert kills.deltas and not kills.unreadable


def test_shared_operations_cost_the_next_model_nothing(farm_settings: Settings, tmp_path: Path) -> None:
    """No slice of the second model is one that was tuned, but four of five of its operations are."""
    work, _ = second_model(farm_settings, tmp_path, 20, slowest=0.004)
    assert work == pytest.approx(0.2)


def test_what_was_tried_with_few_threads_stops_no_search_with_more() -> None:
    """ONNX Runtime's candidates are numbers of threads; on a GPU these decide nothing."""
    few, many = (slice_key({**SPEC, "compiler": {"name": "onnxruntime"}, **QUICK}, "s", threads) for threads in (2, 8))
    assert few != many
    assert slice_key({**SPEC, **QUICK}, "s", 2) == slice_key({**SPEC, **QUICK}, "s", 8)


def test_the_best_candidate_of_all_slices_is_chosen(tmp_path: Path) -> None:
    """The sum over slices decides, each as often as the model has it; without figures it is the default."""
    slices = [{"key": "a", "count": 3}, {"key": "b", "count": 1}, {"key": "unknown", "count": 9}]
    assert choose(tmp_path, slices, 4) == Candidate("all", 4)
    add_record(tmp_path, "a", {"basic/1": 1.0, "all/2/spin": 2.0, "all/8": 0.1})
    add_record(tmp_path, "b", {"basic/1": 5.0, "all/2/spin": 1.0, "all/8": 0.1})
    assert choose(tmp_path, slices, 4) == Candidate("all", 2, spinning=True)
    assert choose(tmp_path, slices, 1) == Candidate("basic", 1)
    assert OBJECTS[RecordStore.ONNXRUNTIME] == RECORDS

"""Tuning under a new toolchain: what is carried over from the one before, and that nothing of it is believed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from farm.app import Farm
from farm.artifacts.s3 import S3Store
from farm.client.client import FarmClient
from farm.settings import Settings
from farm.tuning.database import TuningDatabase
from farm.tuning.records import Record, RecordSource, RecordStore, Snapshot
from farm.tuning.search import slice_key
from farm.tuning.seeds import Seeds, announced, database_of, seeds_of
from tests.support.api_farm import MANIFEST, POOL, freeze_manifest
from tests.support.scripted_tuner import SPEC, database, save_model, tuner_for

OLD, NEW = "onnxruntime1.30.0-aaaaaaaa", "onnxruntime1.31.0-bbbbbbbb"
CPU = {"arch": "cpu", "compute_units": None, "xcc": None, "cpu_family": None}
TIMES = {"all/1": 1.0, "basic/1": 1.05, "all/2": 2.0, "basic/2": 3.0}


def order(toolchain: str, target: str = "onnxruntime/cpu", device: dict[str, Any] = CPU) -> Any:
    spec = {"compiler": {"name": target.partition("/")[0]}, "device": device, "toolchain": toolchain}
    return {"target": target, "spec": {**SPEC, **spec, "tuning": {"mode": "quick"}}}


def learn(known: TuningDatabase, rows: dict[str, Any], store: RecordStore = RecordStore.ONNXRUNTIME) -> None:
    source = RecordSource("2026-11-20T00:00:00+00:00")
    known.commit(Snapshot.of([Record(store, "", key, json.dumps(value), source) for key, value in rows.items()]))


def test_rows_of_the_newest_toolchain_before_are_found_and_announced(artifacts: S3Store) -> None:
    learn(database_of(artifacts, "main", order("onnxruntime1.9.1-cccccccc"), "onnxruntime1.9.1-cccccccc"), {"a": TIMES})
    learn(database_of(artifacts, "main", order(OLD), OLD), {"a": TIMES, "b": TIMES, "broken": {"all/1": "fast"}})
    learn(database_of(artifacts, "main", order(NEW), "onnxruntime1.32.0-dddddddd"), {"a": TIMES})
    found = seeds_of(artifacts, "forks", order(NEW))
    assert found == Seeds(OLD, {"a": TIMES, "b": TIMES}), "another namespace reads what main knows"
    assert announced(artifacts, "main", [order(NEW), order(NEW)]) == [
        f"onnxruntime/cpu: 2 tuning rows carried over from {OLD}, to be proven"
    ]
    learn(database_of(artifacts, "main", order(NEW), NEW), {"a": TIMES})
    assert announced(artifacts, "main", [order(NEW)]) == [], "it has begun to learn by itself"


def test_nothing_is_carried_over_that_would_be_taken_unmeasured(artifacts: S3Store) -> None:
    gpu = {"arch": "gfx942:sramecc+:xnack-", "compute_units": 304, "xcc": 8, "cpu_family": None}
    before, now = (order(f"rocm7.{minor}-migraphx2.1{minor}-aaaaaaaa", "migraphx/gfx942", gpu) for minor in (1, 2))
    old = before["spec"]["toolchain"]
    learn(database_of(artifacts, "main", before, old), {"x": "solution"}, RecordStore.PROBLEM_CACHE)
    assert seeds_of(artifacts, "main", now) is None
    (said,) = announced(artifacts, "main", [now])
    assert said.startswith(f"migraphx/gfx942: the tuning of {old} is not carried over to ")
    assert "without measuring them" in said


def test_a_model_is_seeded_only_if_all_its_slices_are_known() -> None:
    seeds = Seeds(OLD, {"a": TIMES, "b": {**TIMES, "basic/1": 0.1}, "few": {"all/1": 1.0}})
    a, b, other, few = ({"key": key, "count": 2} for key in ("a", "b", "other", "few"))
    assert seeds.shortlist([a]) == ("all/1", "basic/1"), "those within a tenth of the best"
    assert seeds.shortlist([a, b]) == ("basic/1",)
    assert seeds.shortlist([a, other]) == ()
    assert seeds.shortlist([few]) == (), "no search is shorter than that"


def test_a_seeded_search_measures_under_keys_of_its_own_and_says_so(
    artifacts: S3Store, farm_settings: Settings, tmp_path: Path
) -> None:
    """So it ends no full search of the slices, and the next attempt with the same seeds does nothing again."""
    model = save_model(tmp_path, ["conv-1", "conv-2"])
    plain = tuner_for(artifacts, farm_settings, tmp_path, "plain", mode="quick")
    plain.compile(model, None)
    keys = [piece["key"] for piece in plain.search.slices]
    database(artifacts, "quick").delete()

    seeds = Seeds(OLD, dict.fromkeys(keys, TIMES))
    seeded = tuner_for(artifacts, farm_settings, tmp_path, "seeded", mode="quick", seeds=lambda: seeds)
    seeded.compile(model, None)
    assert seeded.report(published=True)["seeded_from"] == OLD
    assert {piece["key"] for piece in seeded.search.slices}.isdisjoint(keys)
    said = (tmp_path / "seeded" / "log.txt").read_text()
    assert f"{len(keys)} rows carried over from {OLD}, to be proven: all/1, basic/1" in said

    again = tuner_for(artifacts, farm_settings, tmp_path, "again", mode="quick", seeds=lambda: seeds)
    again.compile(model, None)
    assert (again.search.work.known, again.search.work.tuned) == (2, 0)


def test_seeds_are_part_of_a_slice_s_key_whatever_their_order() -> None:
    spec: Any = {**SPEC, "tuning": {"mode": "quick"}}
    assert slice_key(spec, "s", 1, ["a", "b"]) == slice_key(spec, "s", 1, ["b", "a"]) != slice_key(spec, "s", 1)


@pytest.mark.parametrize("value", ["[]", "{", '{"all/1": -1}', '{"all/1": null}'])
def test_a_row_that_is_none_seeds_nothing(artifacts: S3Store, value: str) -> None:
    source = RecordSource("2026-11-20T00:00:00+00:00")
    row = Record(RecordStore.ONNXRUNTIME, "", "a", value, source)
    database_of(artifacts, "main", order(OLD), OLD).commit(Snapshot.of([row]))
    assert seeds_of(artifacts, "main", order(NEW)) is None


def test_a_plan_says_what_is_carried_over(farm: Farm, client: FarmClient, tmp_path: Path) -> None:
    frozen = freeze_manifest(tmp_path, f"{MANIFEST}tuning: quick\n")
    earlier = "onnxruntime1.2.0-aaaaaaaa"
    learn(database_of(farm.artifacts, "main", order(POOL.toolchain), earlier), {"a": TIMES})
    said = f"onnxruntime/cpu: 1 tuning row carried over from {earlier}, to be proven"
    assert client.plan(frozen)["warnings"] == [said]
    assert client.submit(frozen)["warnings"] == [said]
    assert not client.plan(freeze_manifest(tmp_path, MANIFEST))["warnings"], "it is not tuned"

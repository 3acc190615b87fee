"""The index of finished builds: what plans, lists and pages read, and what happens while it is filled."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from fastapi import FastAPI

from farm.app import Farm
from farm.artifacts.storage import build_key
from farm.builds import past_builds
from farm.builds.past_builds import BuildIndex
from farm.client.client import FarmClient
from farm.errors import FarmFault
from farm.jobs.state import FailureKind, Outcome
from farm.results.report import JudgedCell, Report
from farm.results.verdict import CellLine
from tests.support.api_farm import MANIFEST, finished, freeze_manifest, succeed, work

CELL = "net/onnxruntime-cpu/fp32/b1"
ONE = MANIFEST.replace("[fp32, fp16]", "[fp32]") + "    inputs: {x: {shape: [batch, 4]}}\n    batches: [1]\n"


@pytest.fixture
def elsewhere(farm: Farm, tmp_path: Path) -> BuildIndex:
    """The index of a control plane that starts."""
    return BuildIndex(tmp_path / "elsewhere.sqlite3", farm.store, farm.artifacts)


@pytest.fixture
def second(farm: Farm, tmp_path: Path) -> Farm:
    """A second control plane of the same farm, with a folder of its own."""
    return Farm(farm.settings.model_copy(update={"data_dir": tmp_path / "second"}))


@pytest.fixture
def submit(second: Farm, client: FarmClient, api: tuple[FastAPI, str], tmp_path: Path) -> Callable[[str], str]:
    """Submits the manifest, with something more, to the second control plane."""

    def submitted(more: str) -> str:
        first, api[0].state.farm = api[0].state.farm, second
        try:
            return str(client.submit(freeze_manifest(tmp_path, f"{ONE}{more}\n", batch="N"))["id"])
        finally:
            api[0].state.farm = first

    return submitted


def fail(job: str, order: dict[str, Any], key: str) -> Outcome:
    return Outcome.failure(FailureKind.COMPILER_ERROR, "no kernel")


def many_reports(farm: Farm, report: Report, count: int, name: str = "old") -> None:
    """Put reports into object storage that the store does not know (any more)."""
    for number in range(count):
        build = {**report["build"], "id": f"b-{number:016x}", "name": name, "ended_at": 1.0 + number}
        key = build_key("main", build["id"], "report.json")
        farm.artifacts.put_object(key, json.dumps({**report, "build": build}).encode())


def stands(farm: Farm, build: str) -> tuple[str, str] | None:
    """State and kind of a build's only cell in the build before, as its plan says it."""
    (cell,) = farm.build_reader.read_plan("main", build)["cells"]
    return (before["state"], before["kind"]) if (before := cell.get("before")) else None


@pytest.fixture
def failed(farm: Farm, client: FarmClient, tmp_path: Path) -> Report:
    """The report of a build whose only cell failed."""
    return client.report(finished(farm, client, freeze_manifest(tmp_path, ONE, batch="N"), fail))


def test_a_build_of_one_control_plane_is_before_the_next_plan_of_another(
    farm: Farm, client: FarmClient, tmp_path: Path, second: Farm, submit: Callable[[str], str]
) -> None:
    second.build_index.fill()
    finished(farm, client, freeze_manifest(tmp_path, ONE, batch="N"), fail)
    build = submit("salt: new")
    assert stands(second, build) == ("failed", "compiler_error")
    assert client.build(build)["warnings"] == []


def test_what_is_not_read_yet_is_neither_new_nor_fixed(
    farm: Farm,
    client: FarmClient,
    second: Farm,
    submit: Callable[[str], str],
    failed: Report,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    many_reports(farm, failed, 3, "demo")
    server = redis.Redis.from_url(farm.settings.redis_url.get_secret_value())
    for key in server.keys(f"*{failed['build']['id']}*"):
        server.delete(key)
    farm.store.builds.forget_expired()
    folders = [f"b-{number:016x}" for number in range(3)]
    monkeypatch.setattr(second.artifacts, "list_folders", lambda prefix: folders)
    build = submit("salt: new")
    state, kind = stands(second, build) or ("", "")
    assert state == "unknown" and kind.startswith("the index is at")
    (warning,) = client.build(build)["warnings"]
    assert warning == f"{kind}: it is not known how 1 of the cells ended before"
    work(farm, fail)
    farm.build_finisher.finish(build)
    found = client.report(build)["changes"]
    assert not found["new_failures"] and not found["still_failing"] and not found["fixed"]
    assert kind in found["undecided"][0]["text"]
    monkeypatch.undo()
    second.build_index.fill()
    assert stands(second, submit("salt: newer")) == ("failed", "compiler_error")


def test_no_submission_waits_for_reports_that_are_read(
    farm: Farm,
    client: FarmClient,
    second: Farm,
    submit: Callable[[str], str],
    failed: Report,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    many_reports(farm, failed, 50)
    read, go_on, reached = second.artifacts.get_object, threading.Event(), threading.Event()

    def slow(key: str) -> object:
        if key.endswith("report.json") and threading.current_thread() is filling:
            reached.set()
            go_on.wait(60)
        return read(key)

    monkeypatch.setattr(second.artifacts, "get_object", slow)
    filling = threading.Thread(target=second.build_index.fill)
    filling.start()
    try:
        assert reached.wait(60)
        build = submit("salt: new")
        assert stands(second, build) == ("failed", "compiler_error"), "it is read for the plan"
    finally:
        go_on.set()
        filling.join()
    assert len(second.build_index.builds("main")) == 51


@pytest.mark.parametrize("how", ["removed", "no database", "cut", "foreign", "of another version"])
def test_the_file_may_be_lost_or_damaged_at_any_time(
    farm: Farm, client: FarmClient, failed: Report, tmp_path: Path, how: str
) -> None:
    path = farm.settings.data_dir / "builds.sqlite3"
    past = client.history(CELL)
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    match how:
        case "removed":
            path.unlink()
        case "no database":
            path.write_bytes(b"no database" * 1000)
        case "cut":
            path.write_bytes(path.read_bytes()[:5000])
        case "foreign":
            path.unlink()
            with sqlite3.connect(path) as database:
                database.execute("CREATE TABLE cells (name)")
        case _:
            with sqlite3.connect(path) as database:
                database.execute("PRAGMA user_version = 99")
    assert client.history(CELL) == past
    assert [each["id"] for each in client.builds()] == [failed["build"]["id"]]


def test_a_disk_that_damages_the_file_each_time_is_named(
    elsewhere: BuildIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Damaged(sqlite3.Connection):
        def executescript(self, _: str) -> sqlite3.Cursor:
            raise sqlite3.DatabaseError("database disk image is malformed")

    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Damaged))
    with pytest.raises(FarmFault, match="was damaged"):
        elsewhere.builds("main")


def test_cells_of_the_newest_builds_are_kept_and_others_read_again(
    farm: Farm, elsewhere: BuildIndex, failed: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(past_builds, "KEPT", 2)
    many_reports(farm, failed, 3)
    elsewhere.fill()
    assert [each["build"] for each in elsewhere.of("main", CELL)[1:]] == [f"b-{number:016x}" for number in (2, 1)]
    assert elsewhere.cells("main", f"b-{0:016x}", CellLine) is None and len(elsewhere.builds("main")) == 4
    monkeypatch.setattr(elsewhere, "_read", lambda *_: pytest.fail("read again by itself"))
    assert elsewhere.catch_up("main").is_whole
    farm.build_index.fill()
    assert farm.build_reader.lines("main", f"b-{0:016x}").cells[0].look == "failed"


def test_what_was_saved_counts_builds_of_which_no_cells_are_kept(
    farm: Farm, elsewhere: BuildIndex, client: FarmClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it asks for no cell: a month may have two million."""
    monkeypatch.setattr(past_builds, "KEPT", 1)
    report = client.report(finished(farm, client, freeze_manifest(tmp_path, ONE, batch="N"), succeed(farm)))
    (cell,) = report["cells"]
    assert cell["facts"]
    hit: Any = {**cell, "hit": True, "facts": {**cell["facts"], "compile_seconds": 1.5}}
    many_reports(farm, {**report, "cells": [hit]}, 3)
    elsewhere.fill()
    days = elsewhere.days("main", 0.0)
    assert [(day.cells, day.hits, day.saved) for day in days] == [(3, 3, 4.5), (1, 0, 0.0)]


def test_builds_that_the_store_forgot_are_listed(farm: Farm, client: FarmClient, failed: Report) -> None:
    redis.Redis.from_url(farm.settings.redis_url.get_secret_value()).flushdb()
    assert [each["verdict"] for each in client.builds()] == [failed["build"]["verdict"]]
    assert client.build("@latest")["id"] == failed["build"]["id"]


def test_a_report_that_cannot_be_read_stops_nothing(farm: Farm, elsewhere: BuildIndex, failed: Report) -> None:
    farm.artifacts.put_object(build_key("main", "b-" + "0" * 16, "report.json"), b"[1, 2")
    elsewhere.fill()
    assert len(elsewhere.of("main", CELL)) == 1 and elsewhere.catch_up("main").is_whole
    again = {**failed, "build": {**failed["build"], "id": "b-" + "0" * 16}}
    elsewhere.add(again)
    assert len(elsewhere.of("main", CELL)) == 2, "it was written again"


def test_a_question_reads_a_bounded_number_of_reports(
    farm: Farm, elsewhere: BuildIndex, failed: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(past_builds, "AT_ONCE", 3)
    many_reports(farm, failed, 10)
    assert str(elsewhere.catch_up("main")) == "the index is at 27 %"
    assert not elsewhere.catch_up("main", ["demo"]).is_whole
    elsewhere.fill()
    assert elsewhere.catch_up("main").is_whole


def test_a_report_that_comes_by_itself_is_not_looked_for(
    farm: Farm, elsewhere: BuildIndex, failed: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(past_builds, "AT_ONCE", 0)
    many_reports(farm, failed, 1)
    assert str(elsewhere.catch_up("main")) == "the index is at 50 %", "the store knows the other one"
    farm.artifacts.put_object(build_key("team", f"b-{0:016x}", "report.json"), b"{}")
    assert str(elsewhere.catch_up("team")) == "the index is at 0 %"
    elsewhere.add(failed)
    elsewhere.add({**failed, "build": {**failed["build"], "id": f"b-{0:016x}"}})
    assert elsewhere.catch_up("main").is_whole


def test_a_build_that_could_not_be_added_whole_is_not_there_and_is_added_later(
    farm: Farm, elsewhere: BuildIndex, failed: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cell,) = failed["cells"]
    more, added = past_builds._more, list[JudgedCell]()

    def died(cell: JudgedCell) -> tuple[object, ...]:
        added.append(cell)
        if len(added) == 2:
            raise KeyboardInterrupt
        return more(cell)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(past_builds, "_more", died)
        elsewhere.add({**failed, "cells": [cell, {**cell, "identifier": "another"}]})
    assert elsewhere.builds("main") == {} and elsewhere.cells("main", failed["build"]["id"], CellLine) is None
    elsewhere.fill()
    assert elsewhere.cells("main", failed["build"]["id"], CellLine) == farm.build_reader.lines(
        "main", failed["build"]["id"]
    )


def test_a_file_that_is_lost_while_a_build_is_added_is_made_again(
    farm: Farm, elsewhere: BuildIndex, failed: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = past_builds._more

    def lost(cell: JudgedCell) -> tuple[object, ...]:
        elsewhere._forget()
        return more(cell)

    with monkeypatch.context() as patched, suppress(FarmFault):
        patched.setattr(past_builds, "_more", lost)
        elsewhere.add(failed)
    elsewhere.fill()
    assert elsewhere.cells("main", failed["build"]["id"], CellLine) == farm.build_reader.lines(
        "main", failed["build"]["id"]
    )


@pytest.mark.damaged
def test_a_report_that_storage_lost_leaves_nothing_undecided(
    farm: Farm, elsewhere: BuildIndex, failed: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(past_builds, "AT_ONCE", 0)
    farm.artifacts.delete_object(build_key("main", failed["build"]["id"], "report.json"))
    assert not elsewhere.catch_up("main", ["demo"]).is_whole
    monkeypatch.setattr(past_builds, "AT_ONCE", 1)
    assert elsewhere.catch_up("main", ["demo"]).is_whole
    monkeypatch.setattr(past_builds, "AT_ONCE", 0)
    assert elsewhere.catch_up("main", ["demo"]).is_whole, "it is not looked for again"


def test_the_cells_of_a_manifest_that_ran_in_parts_are_found_in_several_builds(
    farm: Farm, elsewhere: BuildIndex, failed: Report
) -> None:
    (cell,) = failed["cells"]
    for ended, name in enumerate(["a", "b", "c"]):
        build = {**failed["build"], "id": f"b-{ended:016x}", "ended_at": 1.0 + ended}
        elsewhere.add({**failed, "build": build, "cells": [{**cell, "identifier": name}]})  # type: ignore[typeddict-item]
    found = elsewhere.last("main", failed["build"]["name"], ["a", "c", "none"])
    assert {name: past["build"] for name, past in found.items()} == {"c": f"b-{2:016x}", "a": f"b-{0:016x}"}


def test_the_file_is_for_the_farm_alone(farm: Farm, failed: Report, tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "builds.sqlite3"
    BuildIndex(path, farm.store, farm.artifacts).add(failed)
    assert [each.stat().st_mode & 0o777 for each in (path.parent, path)] == [0o700, 0o600]


def test_who_writes_does_not_wait_for_who_reads(farm: Farm, elsewhere: BuildIndex, failed: Report) -> None:
    with elsewhere._open() as reading:
        assert reading.execute("SELECT COUNT(*) FROM builds").fetchone()[0] == 0
        elsewhere.add(failed)
        assert reading.execute("SELECT COUNT(*) FROM builds").fetchone()[0] == 0, "it reads what was there"
    assert elsewhere.builds("main").keys() == {failed["build"]["id"]}


def test_a_build_that_is_not_done_is_read_when_it_is(
    farm: Farm, client: FarmClient, elsewhere: BuildIndex, tmp_path: Path
) -> None:
    build = str(client.submit(freeze_manifest(tmp_path, ONE, batch="N"))["id"])
    name = client.build(build)["name"]
    (cell,) = client.cells(build)
    elsewhere.fill()
    assert elsewhere.catch_up("main", {name}).is_whole
    work(farm, fail)
    farm.build_finisher.finish(build)
    assert elsewhere.catch_up("main", {"another"}).is_whole
    assert elsewhere.last("main", name, [cell["identifier"]]) == {}, "nobody asked for it"
    assert elsewhere.catch_up("main", {name}).is_whole
    assert elsewhere.last("main", name, [cell["identifier"]])[cell["identifier"]]["build"] == build


def test_a_file_that_cannot_be_used_is_a_fault_and_one_that_is_damaged_inside_is_made_again(
    farm: Farm, failed: Report, tmp_path: Path
) -> None:
    build = failed["build"]["id"]
    folder = BuildIndex(tmp_path, farm.store, farm.artifacts)
    with pytest.raises(FarmFault, match="the index of builds cannot be used: unable to open"):
        folder.builds("main")
    damaged = BuildIndex(tmp_path / "damaged.sqlite3", farm.store, farm.artifacts)
    damaged.add(failed)
    file = tmp_path / "damaged.sqlite3"
    content = file.read_bytes()
    file.write_bytes(content[:4096] + b"x" * (len(content) - 4096))  # Its schema is on the first page.
    with pytest.raises(FarmFault, match="was damaged and is made again"):
        damaged.cells("main", build, CellLine)
    assert damaged.cells("main", build, CellLine) is None
    damaged.fill()
    assert damaged.cells("main", build, CellLine) == farm.build_index.cells("main", build, CellLine)


GATES = "gates: {baseline: latest, size: 5%, compile-time: 50%}"


def test_a_plan_says_of_an_index_that_is_not_whole_what_is_not_known(
    farm: Farm,
    client: FarmClient,
    second: Farm,
    submit: Callable[[str], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    finished(farm, client, freeze_manifest(tmp_path, ONE, batch="N"), succeed(farm, node="n1"))
    made = succeed(farm, node="n2")
    latest = client.report(finished(farm, client, freeze_manifest(tmp_path, f"{ONE}salt: new\n", batch="N"), made))
    second.build_index.fill()

    def planned() -> Any:
        (cell,) = second.build_reader.read_plan("main", build := submit(GATES))["cells"]
        return cell["baseline"], cell["before"], client.build(build)["warnings"]

    baseline, before, warnings = planned()
    assert ("unread" in baseline, before["state"], warnings) == (False, "succeeded", [])
    assert list(baseline["by_node"]) == ["n2"], "another program than that of this cell"
    monkeypatch.setattr(second.build_index, "_path", tmp_path)  # Its disk is gone.
    again, before, warnings = planned()
    assert again == {**baseline, "by_node": {}, "unread": "the index is at 0 %"}
    assert (before["state"], before["kind"]) == ("unknown", "the index is at 0 %")
    assert warnings == ["the index is at 0 %: it is not known how 1 of the cells ended before"]
    assert latest["cells"][0]["facts"]["key"] == baseline["key"]

"""Builds over a real store and real object storage: acknowledged means kept, whatever Redis does."""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import onnx
import pytest
import redis
from onnx import TensorProto, helper
from prometheus_client import REGISTRY

from farm.app import Farm
from farm.artifacts.inventory import collect, rebuild
from farm.artifacts.refs import Refs
from farm.artifacts.storage import blob_key, open_key
from farm.builds import planner, reading
from farm.builds.planner import kept_as
from farm.builds.reading import BuildChanges
from farm.client.client import FarmClient
from farm.client.freezing import Frozen, freeze, new_build_id
from farm.compiling.attempt import Attempt
from farm.control import loops
from farm.control.loops import settle_left
from farm.errors import ArtifactGone, Conflict, InputsMissing, ManifestError, NotFound, StoreUnavailable, UsageError
from farm.jobs.state import WAITS_FOR_STORAGE, AttemptLimits, FailureKind, Outcome, keys_of
from farm.results.speed import Comparison
from farm.spec import comparable, cut_short
from tests.support.api_farm import MANIFEST, POOL, freeze_manifest, succeed, work
from tests.support.helpers import wait_until


def submit(farm: Farm, frozen: Frozen) -> dict[str, Any]:
    for path in frozen.files.values():
        farm.artifacts.put_blob_file(path)
    return farm.builds.submit("main", frozen.submission, by="test")


def again(frozen: Frozen) -> Frozen:
    """The same submission under another build id."""
    return Frozen({**frozen.submission, "build_id": f"b-{secrets.token_hex(8)}"}, frozen.files)


def lose_redis(farm: Farm) -> None:
    with redis.Redis.from_url(farm.settings.redis_url.get_secret_value()) as connection:
        connection.flushall()
    worker = {"id": "w1", "node": "n1", "pid": 1, "host": "n1", "slots": 2, "pools": [POOL.as_dict()]}
    farm.store.workers.register(worker, ttl=600)


def states(farm: Farm, build_id: str) -> dict[str, str]:
    return {cell["precision"]: cell["state"] for cell in farm.build_reader.cells("main", build_id)}


def test_an_acknowledged_build_survives_the_loss_of_redis(farm: Farm, frozen: Frozen) -> None:
    build = submit(farm, frozen)
    lose_redis(farm)
    farm.admission.resume()
    farm.admission.resume()
    assert states(farm, build["id"]) == {"fp32": "queued", "fp16": "queued"}
    assert work(farm) == 2
    farm.build_finisher.finish(build["id"])
    assert farm.build_reader.get("main", build["id"])["verdict"]["exit_code"] == 0


def test_a_build_that_is_lost_while_its_report_is_made_gets_none_of_cells_that_are_gone(
    farm: Farm, frozen: Frozen, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = submit(farm, frozen)
    work(farm)
    read = farm.store.builds.get

    def lost_after(build_id: str) -> Any:
        row = read(build_id)
        lose_redis(farm)
        return row

    for ask in (farm.build_reader.live_report, farm.build_reader.unjudged_lines):
        monkeypatch.setattr(farm.store.builds, "get", lost_after)
        assert ask("main", build["id"]) is None
        monkeypatch.undo()
        farm.admission.resume()
    monkeypatch.setattr(farm.store.builds, "get", lost_after)
    farm.build_finisher.finish(build["id"])
    monkeypatch.undo()
    with pytest.raises(StoreUnavailable, match="the store lost build"):
        farm.build_reader.report("main", build["id"])
    farm.admission.resume()
    farm.build_finisher.finish(build["id"])
    assert set(states(farm, build["id"]).values()) == {"succeeded"}


def test_a_wrong_clock_of_the_api_keeps_no_build_from_its_report(
    farm: Farm, frozen: Frozen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour ahead of the store's, which a build's times come from."""
    monkeypatch.setattr(time, "time", lambda now=time.time: now() + 3600)
    build = submit(farm, frozen)
    elapsed: list[float] = []

    def looked_at(job_id: str, order: dict[str, Any], key: str) -> Outcome:
        elapsed.extend(
            cell["elapsed"] for cell in farm.build_reader.cells("main", build["id"]) if cell["state"] == "running"
        )
        return succeed(farm)(job_id, order, key)

    work(farm, looked_at)
    assert elapsed
    assert max(elapsed) < 600
    farm.build_finisher.finish(build["id"])
    ended = farm.build_reader.get("main", build["id"])
    assert ended["state"] == "reported"
    assert 0 <= ended["ended_at"] - ended["created_at"] < 600, "by one clock"


def test_a_plan_and_a_report_say_when_a_build_will_be_done(farm: Farm, tmp_path: Path) -> None:
    specs: list[dict[str, Any]] = []

    def noted(job_id: str, order: dict[str, Any], key: str) -> Outcome:
        specs.append(order["spec"])
        return succeed(farm)(job_id, order, key)

    first = submit(farm, freeze_manifest(tmp_path, MANIFEST))
    unknown = farm.build_reader.report("main", first["id"])["build"]["outlook"]
    assert (unknown["eta"], unknown["unknown"]) == (None, 2)
    work(farm, noted)
    for spec in specs:
        done = {"like": comparable(spec), "model": spec["model"]["digest"][:12], "size": 100}
        compiled = {"key": "k", "created": "2026-11-21T00:00:00+00:00", "seconds": 10.0, "work": done}
        farm.store.history.remember("main", [compiled])
    frozen = freeze_manifest(tmp_path, MANIFEST + "    salt: again\n")
    planned = farm.builds.plan("main", frozen.submission)["outlook"]
    assert (planned["eta"]["expected"], planned["slot_seconds"]["expected"]) == (10, 20), "two slots"
    build = submit(farm, frozen)
    assert farm.build_reader.report("main", build["id"])["build"]["outlook"] == planned
    farm.builds.pause("main", build["id"], paused=True)
    assert farm.build_reader.report("main", build["id"])["build"]["outlook"]["eta"] is None


def test_an_index_that_is_lost_while_it_is_filled_is_not_complete(farm: Farm, frozen: Frozen) -> None:
    submit(farm, frozen)
    work(farm)
    known = list(rebuild(farm.artifacts, "main"))

    def lost_in_between() -> Iterator[tuple[str, Any]]:
        yield from known[:1]
        lose_redis(farm)
        yield from known[1:]

    farm.store.index.fill("main", lost_in_between())
    assert not farm.store.index.complete("main")
    farm.store.index.fill("main", known)
    assert farm.store.index.complete("main")


def test_a_plan_knows_what_is_published_when_the_store_has_forgotten_it(farm: Farm, frozen: Frozen) -> None:
    submit(farm, frozen)
    work(farm)
    lose_redis(farm)
    planned = farm.builds.plan("main", again(frozen).submission)
    assert [cell["state"] for cell in planned["cells"]] == ["hit", "hit"]


def test_a_build_that_cannot_be_resumed_keeps_no_other(farm: Farm, frozen: Frozen) -> None:
    builds = sorted(submit(farm, again(frozen))["id"] for _ in range(2))
    farm.artifacts.put_object(f"ns/main/builds/{builds[0]}/plan.json", b"{")
    lose_redis(farm)
    resumed = Farm(farm.settings)  # A new control plane, that has not read the plan yet.
    resumed.admission.resume()
    assert states(resumed, builds[1]) == {"fp32": "queued", "fp16": "queued"}


def test_what_was_published_before_the_loss_is_not_compiled_again(farm: Farm, frozen: Frozen) -> None:
    build = submit(farm, frozen)
    handed = farm.store.jobs.hand_out(POOL.name, 1)[:1]
    job_id, number = handed[0]
    claim = farm.store.jobs.claim(job_id, number, nonce="n", worker="w1", node="n1")
    farm.store.jobs.finish(job_id, claim.token, succeed(farm)(job_id, dict(claim.order), claim.key))
    lose_redis(farm)
    farm.admission.resume()
    assert sorted(states(farm, build["id"]).values()) == ["queued", "succeeded"]
    assert work(farm) == 1


def test_a_finished_build_is_read_from_its_report_when_redis_has_forgotten_it(farm: Farm, frozen: Frozen) -> None:
    build = submit(farm, frozen)
    work(farm)
    farm.build_finisher.finish(build["id"])
    before = farm.build_reader.report("main", build["id"])
    lose_redis(farm)
    farm.admission.resume()
    assert farm.build_reader.report("main", build["id"])["cells"] == before["cells"]
    # A finished build never reopens.
    assert farm.store.builds.get(build["id"]) is None


def test_a_store_of_old_data_ends_what_was_reported_since(
    farm: Farm, frozen: Frozen, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = submit(farm, frozen)["id"]
    with redis.Redis.from_url(farm.settings.redis_url.get_secret_value()) as connection:
        old = {name: connection.dump(name) for name in connection.keys("*")}
        work(farm)
        farm.build_finisher.finish(build)
        before = farm.build_reader.report("main", build)
        connection.flushall()
        for name, content in old.items():
            connection.restore(name, 0, content)
            if name.startswith(b"{farm}:worker:"):
                connection.expire(name, 600)
    farm.artifacts.put_object(open_key("main", build), b"{}")
    farm.artifacts.put_object(open_key("main", "b-of-nobody"), b"{}")
    farm.admission.resume()
    row = farm.store.builds.get(build)
    assert row and (row["state"], row["verdict"]) == ("reported", before["build"]["verdict"])
    assert (farm.build_reader.report("main", build), farm.store.jobs.pending(POOL.name)) == (before, 0)
    assert list(farm.artifacts.list_objects("ns/main/open/")) == [open_key("main", "b-of-nobody")]
    farm.artifacts.put_object(open_key("main", build), b"{}")
    with redis.Redis.from_url(farm.settings.redis_url.get_secret_value()) as connection:
        connection.flushall()
    farm.admission.resume()
    assert list(farm.artifacts.list_objects("ns/main/open/")) == [open_key("main", "b-of-nobody")]

    def away(*_: object) -> None:
        raise StoreUnavailable("Redis is away")

    monkeypatch.setattr(farm.admission, "resume_one", away)
    with pytest.raises(StoreUnavailable):
        farm.admission.resume()


def test_a_reported_build_is_never_opened_by_its_id_again(
    farm: Farm, frozen: Frozen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client repeats its request after Redis has forgotten the build; meanwhile its cells would fail."""
    build = submit(farm, frozen)
    work(farm)
    farm.build_finisher.finish(build["id"])
    before, ref = farm.build_reader.report("main", build["id"]), Refs(farm.artifacts).find("main", "latest")
    lose_redis(farm)
    for key in list(farm.artifacts.list_objects("ns/main/artifacts/")):
        farm.artifacts.delete_object(key)
    assert submit(farm, frozen)["state"] == "reported"
    assert farm.builds.retry("main", build["id"], build["id"], failed=False, by="test")["state"] == "reported"
    assert farm.store.builds.get(build["id"]) is None
    assert farm.build_reader.report("main", build["id"]) == before
    assert Refs(farm.artifacts).find("main", "latest") == ref


def test_a_verdict_does_not_change_when_its_end_is_repeated_or_an_expectation_runs_out(
    farm: Farm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = "expected: [{model: net, precision: fp16, kind: bad_model, reason: x, until: 2099-12-31}]\n"
    build = submit(farm, freeze_manifest(tmp_path, MANIFEST + expected))

    def fail_fp16(job_id: str, order: dict[str, Any], key: str) -> Outcome:
        if "/fp16/" in order["identifier"]:
            return Outcome.failure(FailureKind.BAD_MODEL, "no")
        return succeed(farm)(job_id, order, key)

    work(farm, fail_fp16)
    farm.build_finisher.finish(build["id"])
    before = farm.build_reader.report("main", build["id"])
    assert before["build"]["verdict"]["exit_code"] == 0

    class Later(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return datetime(2100, 1, 2, tzinfo=tz)

    monkeypatch.setattr("farm.results.verdict.datetime", Later)
    assert farm.build_reader.report("main", build["id"]) == before
    with redis.Redis.from_url(farm.settings.redis_url.get_secret_value()) as raw:
        raw.hset(f"{{farm}}:build:{build['id']}", "state", "ended")  # as if the process had died before it let it go
    farm.build_finisher.finish(build["id"])
    assert farm.build_reader.report("main", build["id"]) == before
    assert farm.build_reader.get("main", build["id"])["verdict"] == before["build"]["verdict"]


@pytest.mark.damaged
def test_of_two_control_planes_that_end_a_build_the_first_report_counts(
    farm: Farm, frozen: Frozen, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = submit(farm, frozen)
    work(farm)
    put = farm.artifacts.put_object
    key = f"ns/main/builds/{build['id']}/report.json"
    verdict = {"exit_code": 1, "text": "theirs"}
    theirs = json.dumps({"build": {"id": build["id"], "namespace": "main", "verdict": verdict}, "cells": []})

    def other_first(place: str, data: bytes, **options: Any) -> str:
        if place == key:
            put(key, theirs.encode())
        return put(place, data, **options)

    monkeypatch.setattr(farm.artifacts, "put_object", other_first)
    farm.build_finisher.finish(build["id"])
    found = farm.artifacts.get_object(key)
    assert found
    assert found.data == theirs.encode()
    assert farm.store.builds.get(build["id"])["verdict"] == {"exit_code": 1, "text": "theirs"}


@pytest.mark.damaged
def test_a_report_that_cannot_be_read_is_written_again(farm: Farm, frozen: Frozen) -> None:
    """As the audit says: submit it again."""
    build = submit(farm, frozen)
    work(farm)
    farm.build_finisher.finish(build["id"])
    farm.artifacts.put_object(f"ns/main/builds/{build['id']}/report.json", b"{")
    lose_redis(farm)
    submit(farm, frozen)
    farm.build_finisher.finish(build["id"])
    assert farm.build_reader.get("main", build["id"])["verdict"]["exit_code"] == 0


def test_builds_are_found_by_a_label_and_by_the_start_of_their_commit(farm: Farm, frozen: Frozen) -> None:
    labels = {"commit": "0123456789abcdef", "team": "vision"}
    build = submit(farm, Frozen({**frozen.submission, "labels": labels}, frozen.files))
    submit(farm, again(frozen))

    def found(label: str) -> list[str]:
        return [row["id"] for row in farm.build_reader.list("main", label=label)]

    assert found("team=vision") == found("commit=0123456789abcdef") == found("commit=0123456") == [build["id"]]
    for other in ("team=visi", "team=visions", "commit=012345", "commit=123456789", "commit=", "tea=vision"):
        assert found(other) == [], other


def test_a_build_is_named_by_a_start_of_its_id_that_no_other_has(farm: Farm, frozen: Frozen) -> None:
    with pytest.raises(NotFound, match="no build in namespace main"):
        farm.build_reader.resolve("main", "@latest")
    first, second = (
        submit(farm, Frozen({**frozen.submission, "build_id": f"b-00{digit * 14}"}, frozen.files))["id"]
        for digit in "12"
    )
    assert farm.build_reader.resolve("main", "b-001") == first
    assert farm.build_reader.resolve("main", "@latest") == second
    with pytest.raises(UsageError, match="b-00 is the start of 2 builds") as several:
        farm.build_reader.resolve("main", "b-00")
    assert (first in several.value.hint, second in several.value.hint) == (True, True)
    for namespace, unknown in (("main", "b-003"), ("other", first)):
        with pytest.raises(NotFound):
            farm.build_reader.resolve(namespace, unknown)
    work(farm, lambda *_: Outcome.failure(FailureKind.BAD_MODEL, "no"))
    farm.build_finisher.finish(first)
    assert farm.builds.retry("main", "b-001", new_build_id(), failed=True, by="test")["retries"] == first


def test_only_a_build_that_ended_with_a_cell_that_passed_can_be_named_by_a_ref(farm: Farm, frozen: Frozen) -> None:
    build = submit(farm, frozen)
    with pytest.raises(Conflict, match="has not ended"):
        farm.build_finisher.snapshot("main", build["id"])
    work(farm, lambda *_: Outcome.failure(FailureKind.BAD_MODEL, "no"))
    farm.build_finisher.finish(build["id"])
    with pytest.raises(NotFound, match=r"no cell of build .* passed: 0 of 2 cells succeeded"):
        farm.build_finisher.snapshot("main", build["id"])


def test_each_attempt_has_its_log(farm: Farm, frozen: Frozen) -> None:
    build = submit(farm, frozen)
    tries: dict[str, int] = {}

    def fail(job_id: str, order: dict[str, Any], key: str) -> Outcome:
        tries[job_id] = tries.get(job_id, 0) + 1
        log, _ = farm.artifacts.put_blob_bytes(f"{tries[job_id]} of {job_id}".encode())
        return Outcome.failure(FailureKind.INTERNAL, "no", log=log)

    assert work(farm, fail) == 2
    promoted = 0
    while promoted < 2:
        promoted += wait_until(farm.store.jobs.promote)
    assert work(farm, fail) == 2
    for cell in farm.build_reader.cells("main", build["id"]):
        job = farm.jobs.get("main", cell["job"])
        for number in (1, 2):
            assert b"".join(farm.jobs.log("main", job["id"], number).last()) == f"{number} of {job['id']}".encode()
        assert b"".join(farm.jobs.log("main", job["id"]).last()) == f"2 of {job['id']}".encode()
        with pytest.raises(NotFound, match="attempt 3 of job"):
            farm.jobs.log("main", job["id"], 3)
    with pytest.raises(NotFound, match="no job"):
        farm.jobs.get("other", job["id"])
    farm.artifacts.delete_object(blob_key(job["log"]))
    with pytest.raises(ArtifactGone, match=f"the log {job['log']} is not in object storage"):
        farm.jobs.log("main", job["id"])


def test_an_expected_failure_leaves_a_fail_fast_build_green(farm: Farm, tmp_path: Path) -> None:
    expected = "fail-fast: true\nexpected: [{model: net, precision: fp16, kind: bad_model, reason: x}]\n"
    frozen = freeze_manifest(tmp_path, MANIFEST + expected)
    build = submit(farm, frozen)
    planned = farm.builds.plan("main", again(frozen).submission)["cells"]
    assert {cell["precision"]: cell["expected"] for cell in planned} == {"fp32": False, "fp16": True}
    claims = {
        job_id: farm.store.jobs.claim(job_id, attempt, nonce=job_id, worker="w1", node="n1")
        for job_id, attempt in farm.store.jobs.hand_out(POOL.name, 10)
    }
    for job_id, claim in sorted(claims.items(), key=lambda item: "/fp16/" not in item[1].order["identifier"]):
        order = dict(claim.order)
        fails = "/fp16/" in order["identifier"]
        made = Outcome.failure(FailureKind.BAD_MODEL, "no") if fails else succeed(farm)(job_id, order, claim.key)
        farm.store.jobs.finish(job_id, claim.token, made)
        settle_left(farm.store, farm.build_finisher.finish)
    assert states(farm, build["id"]) == {"fp32": "succeeded", "fp16": "failed"}
    assert farm.build_reader.get("main", build["id"])["verdict"]["exit_code"] == 0


def test_a_hit_whose_program_is_gone_is_a_miss(farm: Farm, frozen: Frozen) -> None:
    """The index hears of it only when storage is looked after again."""
    build = submit(farm, frozen)
    work(farm)
    farm.build_finisher.finish(build["id"])
    gone, _ = (cell["facts"]["program"]["digest"] for cell in farm.build_reader.cells("main", build["id"]))
    farm.artifacts.delete_object(f"blobs/sha256/{gone[:2]}/{gone}")
    later = submit(farm, again(frozen))
    assert sorted(cell["state"] for cell in farm.build_reader.cells("main", later["id"])) == ["queued", "succeeded"]
    assert work(farm) == 1
    retried = farm.builds.retry("main", build["id"], new_build_id(), failed=False, by="test")
    assert retried["counts"]["succeeded"] == 2


def test_one_id_is_for_one_choice_of_cells_to_retry(farm: Farm, frozen: Frozen) -> None:
    build = submit(farm, frozen)
    work(farm)
    farm.build_finisher.finish(build["id"])
    other = new_build_id()
    for _ in range(2):
        retried = farm.builds.retry("main", build["id"], other, failed=False, only=["*/fp32/*"], by="test")
        assert retried["id"] == other
    for only in (["*/fp16/*"], []):
        with pytest.raises(Conflict):
            farm.builds.retry("main", build["id"], other, failed=False, only=only, by="test")
    with pytest.raises(NotFound, match=r"that fits none/\*, no/\* can be tried again: "):
        farm.builds.retry("main", build["id"], new_build_id(), failed=False, only=["none/*", "no/*"], by="test")


def test_a_cell_that_was_there_before_its_build_and_is_gone_now_cannot_be_retried(farm: Farm, frozen: Frozen) -> None:
    first = submit(farm, frozen)
    work(farm)
    farm.build_finisher.finish(first["id"])
    hits = submit(farm, again(frozen))
    farm.build_finisher.finish(hits["id"])
    for cell in farm.build_reader.cells("main", hits["id"]):
        farm.artifacts.delete_object(blob_key(cell["facts"]["program"]["digest"]))
    with pytest.raises(UsageError, match="existed before the build, and is gone now") as refused:
        farm.builds.retry("main", hits["id"], new_build_id(), failed=False, by="test")
    assert refused.value.hint.startswith("submit the manifest again")


def test_a_build_whose_plan_is_gone_is_still_there_and_says_why_it_cannot_be_retried(
    farm: Farm, frozen: Frozen
) -> None:
    build = submit(farm, frozen)
    work(farm)
    farm.build_finisher.finish(build["id"])
    before = farm.build_reader.report("main", build["id"])
    lose_redis(farm)
    collect(farm.artifacts, plans_kept=timedelta(seconds=-5))
    other = Farm(farm.settings)  # It has not read the plan.
    assert other.build_reader.report("main", build["id"]) == before
    with pytest.raises(NotFound, match="no plan") as refused:
        other.builds.retry("main", build["id"], new_build_id(), failed=False, by="test")
    assert "submit the manifest again" in refused.value.hint


def test_a_build_whose_inputs_are_gone_is_not_retried(farm: Farm, frozen: Frozen) -> None:
    build = submit(farm, frozen)
    work(farm, lambda *_: Outcome.failure(FailureKind.COMPILER_ERROR, "no"))
    farm.build_finisher.finish(build["id"])
    for digest in frozen.files:
        farm.artifacts.delete_object(blob_key(digest))
    with pytest.raises(UsageError, match=f"inputs of build {build['id']} are gone") as refused:
        farm.builds.retry("main", build["id"], new_build_id(), failed=False, by="test")
    assert refused.value.hint == "submit the manifest again, which uploads them"


def newer(farm: Farm, folder: Path, salt: str) -> str:
    """Submit the demo manifest so that its cells have other keys; return the build's id."""
    text = MANIFEST.replace("name: demo", f"name: demo\nsalt: {salt}")
    return str(submit(farm, freeze_manifest(folder, text))["id"])


def latest_keys(farm: Farm) -> set[str]:
    snapshot = Refs(farm.artifacts).read("main", "latest")
    assert snapshot
    return {cell["key"] for cell in snapshot["cells"].values()}


def test_latest_names_the_newest_submission_whichever_build_ends_last(farm: Farm, tmp_path: Path) -> None:
    old, new = (newer(farm, tmp_path, salt) for salt in ("old", "new"))
    while work(farm):
        pass
    wanted = {cell["key"] for cell in farm.build_reader.cells("main", new)}
    farm.build_finisher.finish(new)
    farm.build_finisher.finish(old)
    assert latest_keys(farm) == wanted


def test_a_later_submission_of_the_same_program_counts_as_newer(farm: Farm, tmp_path: Path) -> None:
    """Program 1, then another, then program 1 again as a hit; the one in the middle ends last."""
    first, middle = (newer(farm, tmp_path, salt) for salt in ("one", "two"))
    while work(farm):
        pass
    farm.build_finisher.finish(first)
    wanted = latest_keys(farm)
    last = newer(farm, tmp_path, "one")
    farm.build_finisher.finish(last)
    farm.build_finisher.finish(middle)
    assert latest_keys(farm) == wanted


def test_a_clock_that_is_set_back_changes_no_order(
    farm: Farm, client: FarmClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis was an hour ahead for two builds: later ones come after them in `latest`, and in a group."""

    def ended(more: str) -> str:
        build = submit(farm, freeze_manifest(tmp_path, f"{MANIFEST}{more}"))
        work(farm)
        farm.build_finisher.finish(build["id"])
        return str(build["id"])

    grouped = "concurrency: {group: nightly, cancel-in-progress: true}\n"
    now = farm.store.now
    with monkeypatch.context() as ahead:
        ahead.setattr(farm.store, "now", lambda: now() + 3600)
        ended("salt: ahead\n")
        ended(f"salt: group\n{grouped}")
    report = client.report(ended("salt: right\n"))
    assert {cell["key"] for cell in client.ls()} == {cell["key"] for cell in report["cells"]}
    (warning,) = report["build"]["warnings"]
    assert warning.startswith("the clock of Redis was set back by 60 min")
    again = client.report(ended(f"salt: later\n{grouped}"))
    assert {cell["state"] for cell in again["cells"]} == {"succeeded"}


def test_latest_survives_damage_to_its_snapshot(farm: Farm, tmp_path: Path) -> None:
    """No build of the namespace waits for an operator; the snapshot before the damaged one counts."""
    first = newer(farm, tmp_path, "one")
    work(farm)
    farm.build_finisher.finish(first)
    second = submit(farm, freeze_manifest(tmp_path, MANIFEST.replace("name: net", "name: other")))
    work(farm)
    farm.build_finisher.finish(second["id"])
    ref = Refs(farm.artifacts).find("main", "latest")
    assert ref
    for digest, models in ((ref["snapshot"], {"net", "late"}), ("", {"net", "late"})):
        if digest:
            farm.artifacts.put_object(f"blobs/sha256/{digest[:2]}/{digest}", b"{")
        late = submit(farm, freeze_manifest(tmp_path, MANIFEST.replace("name: net", "name: late")))
        work(farm)
        farm.build_finisher.finish(late["id"])
        assert farm.build_reader.get("main", late["id"])["state"] == "reported"
        snapshot = Refs(farm.artifacts).read("main", "latest")
        assert snapshot
        assert {cell["model"] for cell in snapshot["cells"].values()} == models
    for key in list(farm.artifacts.list_objects("blobs/sha256/")):
        farm.artifacts.delete_object(key)
    farm.artifacts.put_object("ns/main/refs/latest.json", b"{")
    assert farm.builds.plan("main", freeze_manifest(tmp_path, MANIFEST).submission)["cells"]


def test_latest_forgets_what_its_manifest_gave_up_a_month_ago(
    farm: Farm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(text: str, days: float, outcome: Any = None) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(farm.store, "now", lambda: 1_800_000_000.0 + days * 86_400)
            made = submit(farm, freeze_manifest(tmp_path, text))
        work(farm, outcome)
        farm.build_finisher.finish(made["id"])

    def named() -> set[str]:
        snapshot = Refs(farm.artifacts).read("main", "latest")
        assert snapshot
        return {f"{cell['model']}/{cell['precision']}" for cell in snapshot["cells"].values()}

    other = MANIFEST.replace("name: demo", "name: another").replace("name: net", "name: stays")
    renamed = MANIFEST.replace("name: net", "name: renamed")
    build(other, 0)
    build(MANIFEST, 0)
    build(renamed, 29)
    assert len(named()) == 6, "a manifest that leaves cells out for a while keeps them"
    build(renamed.replace("[fp32, fp16]", "[fp32]"), 31)
    assert named() == {"stays/fp32", "stays/fp16", "renamed/fp32", "renamed/fp16"}
    build(renamed + "salt: fails\n", 100, lambda *_: Outcome.failure(FailureKind.BAD_MODEL, "no"))
    assert "renamed/fp16" in named(), "a cell that does not pass now is not given up"


def test_what_was_planned_is_planned_again_if_its_workers_have_changed(farm: Farm, frozen: Frozen) -> None:
    for path in frozen.files.values():
        farm.artifacts.put_blob_file(path)
    farm.builds.plan("main", frozen.submission, by="test")
    newer = replace(POOL, toolchain="onnxruntime9.0")
    worker = {"id": "w1", "node": "n1", "pid": 1, "host": "n1", "slots": 2, "pools": [newer.as_dict()]}
    farm.store.workers.register(worker, ttl=600)
    build_id: str = frozen.submission["build_id"]
    farm.builds.submit_planned("main", build_id, kept_as(frozen.submission), by="test")
    assert {cell["pool"] for cell in farm.build_reader.read_plan("main", build_id)["cells"]} == {newer.name}


def test_submitting_the_same_build_twice_is_one_build(farm: Farm, frozen: Frozen) -> None:
    first = submit(farm, frozen)
    work(farm)
    second = submit(farm, frozen)
    third = farm.builds.submit_planned("main", first["id"], kept_as(frozen.submission), by="test")  # type: ignore[arg-type]
    assert first["id"] == second["id"] == third["id"]
    assert states(farm, first["id"]) == {"fp32": "succeeded", "fp16": "succeeded"}


def test_the_same_id_with_another_manifest_is_refused(farm: Farm, frozen: Frozen) -> None:
    submit(farm, frozen)
    changed = {**frozen.submission, "manifest": frozen.submission["manifest"] + "salt: other\n"}
    with pytest.raises(Conflict, match="another manifest"):
        farm.builds.submit("main", changed, by="test")


def test_a_build_without_its_inputs_is_refused_and_nothing_is_made(farm: Farm, frozen: Frozen) -> None:
    with pytest.raises(InputsMissing, match="not in object storage") as refused:
        farm.builds.submit("main", frozen.submission, by="test")
    assert refused.value.blobs == [frozen.submission["models"]["net"]["files"][0]["digest"]]
    assert farm.build_reader.list("main") == []
    assert list(farm.artifacts.list_objects("ns/main/open/")) == []


def test_a_second_build_is_all_hits_and_needs_no_worker(farm: Farm, frozen: Frozen) -> None:
    def counted(state: str, reason: str) -> float:
        return REGISTRY.get_sample_value("farm_cells_planned_total", {"state": state, "reason": reason}) or 0.0

    labels = [("miss", "first"), ("hit", "")]
    before = [counted(*each) for each in labels]
    submit(farm, frozen)
    work(farm)
    build = farm.builds.submit("main", again(frozen).submission, by="test")
    cells = farm.build_reader.cells("main", build["id"])
    assert all(cell["state"] == "succeeded" and cell["hit"] for cell in cells)
    assert [counted(*each) - then for each, then in zip(labels, before, strict=True)] == [2, 2]


def test_a_pull_requests_namespace_reads_main_and_never_writes_there(farm: Farm, frozen: Frozen) -> None:
    submit(farm, frozen)
    work(farm)
    build = farm.builds.submit("pull-request", again(frozen).submission, by="stranger")
    assert all(cell["hit"] for cell in farm.build_reader.cells("pull-request", build["id"]))
    farm.build_finisher.finish(build["id"])
    assert Refs(farm.artifacts).read("main", "latest") is None
    snapshot = Refs(farm.artifacts).read("pull-request", "latest")
    assert snapshot is not None
    assert all(cell["sidecar"].startswith("ns/main/") for cell in snapshot["cells"].values())


@pytest.mark.parametrize(
    ("namespace", "first", "limits"),
    [("main", 0, {"time": 360_000.0, "memory": 4 << 40}), ("pull-request", 1, {"time": 14_400.0, "memory": 8 << 30})],
)
def test_a_stranger_goes_ahead_of_nobody_and_has_the_farms_limits(
    farm: Farm, tmp_path: Path, namespace: str, first: int, limits: dict[str, float]
) -> None:
    settings = farm.settings.model_copy(update={"memory_limit": 8 << 30})
    farm = Farm(settings)
    builds = []
    for owner, more in (("main", ""), (namespace, "priority: 100\nlimits: {time: 100h, memory: 4TiB}\nsalt: x\n")):
        frozen = freeze_manifest(tmp_path, MANIFEST + more)
        for path in frozen.files.values():
            farm.artifacts.put_blob_file(path)
        builds.append(farm.builds.submit(owner, frozen.submission, by="test"))
    claimed = []
    for job_id, attempt in farm.store.jobs.hand_out(POOL.name, 10):
        claim = farm.store.jobs.claim(job_id, attempt, nonce="n", worker="w1", node="n1")
        claimed.append((claim.build, claim.limits))
    assert claimed[0][0] == builds[1 - first]["id"]
    assert next(given for build, given in claimed if build == builds[1]["id"]) == limits
    said = "only builds of main go ahead of others, and have more than the farm's own limits"
    assert any(said in text for text in builds[1]["warnings"]) is (namespace != "main")


@pytest.mark.damaged
def test_no_ref_names_a_cell_that_failed_its_gate(farm: Farm, tmp_path: Path) -> None:
    text = """\
version: 1
name: gated
targets: [onnxruntime/cpu]
precisions: [fp32, fp16]
verify: {tolerance: {fp32: 0.9}}
models:
  - name: net
    source: {path: net.onnx}
"""

    def inaccurate(job_id: str, order: dict[str, Any], key: str) -> Outcome:
        made = succeed(farm)(job_id, order, key)
        return Outcome.success({**made.facts, "errors": {"y": 0.5}})

    build = submit(farm, freeze_manifest(tmp_path, text))
    work(farm, inaccurate)
    farm.build_finisher.finish(build["id"])
    cells = {cell["precision"]: cell for cell in farm.build_reader.cells("main", build["id"])}
    assert (cells["fp16"]["state"], cells["fp16"]["kind"]) == ("failed", "accuracy")
    snapshot = Refs(farm.artifacts).read("main", "latest")
    assert snapshot is not None
    assert {cell["precision"] for cell in snapshot["cells"].values()} == {"fp32"}


def test_the_report_is_plain_json_that_anyone_can_read_from_the_bucket(farm: Farm, frozen: Frozen) -> None:
    build = submit(farm, frozen)
    work(farm, lambda *_: Outcome.failure(FailureKind.BAD_MODEL, "tensor w is too short"))
    farm.build_finisher.finish(build["id"])
    found = farm.artifacts.get_object(f"ns/main/builds/{build['id']}/report.json")
    assert found is not None
    report = json.loads(found.data)
    assert report["build"]["verdict"]["exit_code"] == 1
    assert {cell["message"] for cell in report["cells"]} == {"tensor w is too short"}
    there = {key.rpartition("/")[2] for key in farm.artifacts.list_objects(f"ns/main/builds/{build['id']}/")}
    assert there == {"manifest.yaml", "orders", "plan.json", "report.json"}, "all else can be made of the report"
    assert list(farm.artifacts.list_objects("ns/main/open/")) == []


def test_builds_are_found_by_the_start_of_their_id(farm: Farm, frozen: Frozen) -> None:
    build = submit(farm, frozen)
    assert farm.build_reader.resolve("main", build["id"][:8]) == build["id"]
    assert farm.build_reader.resolve("main", "@latest") == build["id"]
    with pytest.raises(NotFound):
        farm.build_reader.resolve("other", build["id"])


def test_a_queued_cell_says_why_it_waits(farm: Farm, frozen: Frozen) -> None:
    build = submit(farm, frozen)
    farm.store.workers.leave("w1")
    assert all("no live worker serves" in cell["waiting"] for cell in farm.build_reader.cells("main", build["id"]))


def test_a_build_that_is_being_accepted_or_was_not_says_so(
    farm: Farm, frozen: Frozen, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = farm.store.builds.create
    with monkeypatch.context() as patched:
        patched.setattr(farm.store.builds, "create", lambda build, cells: create(build, list(cells)[:1]))
        build = submit(farm, frozen)["id"]
    waiting = [cell["waiting"] for cell in farm.build_reader.cells("main", build)]
    assert "the farm is still accepting the build" not in waiting[0]
    assert waiting[1] == "the farm is still accepting the build"
    lose_redis(farm)
    with pytest.raises(StoreUnavailable, match=f"the store lost build {build}, but object storage has it"):
        farm.build_reader.report("main", build)
    farm.artifacts.delete_object(open_key("main", build))
    with pytest.raises(NotFound, match=f"build {build} was not accepted"):
        farm.build_reader.report("main", build)
    with pytest.raises(NotFound, match="no build b-0000000000000000"):
        farm.builds.pause("main", "b-0000000000000000", paused=True)
    with pytest.raises(NotFound, match="no build b-9"):
        farm.store.builds.pause("b-9", paused=True)


MODELS = f"models-{secrets.token_hex(4)}"
"""A bucket of models; each test process has one."""

BUCKET_MANIFEST = """\
version: 1
name: from-a-bucket
targets: [onnxruntime/cpu]
precisions: [fp32]
models:
  - name: net
    source: {s3: "s3://@MODELS@/nets/net.onnx"}
""".replace("@MODELS@", MODELS)


def from_bucket(text: str = BUCKET_MANIFEST) -> dict[str, Any]:
    return {"build_id": f"b-{secrets.token_hex(8)}", "manifest": text, "file": "m.yaml", "models": {}, "data": {}}


@pytest.fixture
def open_farm(farm: Farm, frozen: Frozen, s3_client: Any) -> Farm:
    """A farm whose operator lets it read models from the bucket `models`, in which the demo net lies."""
    with contextlib.suppress(s3_client.exceptions.BucketAlreadyOwnedByYou, s3_client.exceptions.BucketAlreadyExists):
        s3_client.create_bucket(Bucket=MODELS)
    (model,) = frozen.files.values()
    s3_client.put_object(Bucket=MODELS, Key="nets/net.onnx", Body=model.read_bytes())
    return Farm(farm.settings.model_copy(update={"s3_sources": (MODELS,)}))


def test_the_farm_reads_models_from_the_buckets_that_its_operator_lists(open_farm: Farm, frozen: Frozen) -> None:
    build = open_farm.builds.submit("main", from_bucket(), by="test")
    (cell,) = open_farm.build_reader.cells("main", build["id"])
    assert cell["state"] == "queued"
    # The same bytes have the same key, however they came.
    brought = {cell["precision"]: cell["key"] for cell in open_farm.builds.plan("main", frozen.submission)["cells"]}
    assert cell["key"] == brought["fp32"]


@pytest.mark.parametrize(("listed", "said"), [((), "none"), (("a", "b"), "a, b")])
def test_another_bucket_is_refused_with_its_line(farm: Farm, listed: tuple[str, ...], said: str) -> None:
    farm = Farm(farm.settings.model_copy(update={"s3_sources": listed}))
    with pytest.raises(ManifestError, match=rf"m\.yaml:7:.*reads no models from bucket {MODELS}") as refused:
        farm.builds.submit("main", from_bucket(), by="test")
    assert f"the operator allows: {said} (setting s3_sources)" in str(refused.value)


def test_an_object_that_is_not_there_is_refused(open_farm: Farm) -> None:
    with pytest.raises(ManifestError, match=r"m\.yaml:7:.*cannot be read: 404"):
        open_farm.builds.plan("main", from_bucket(BUCKET_MANIFEST.replace("net.onnx", "other.onnx")))


def test_a_broken_model_in_a_bucket_is_refused_and_another_digest_too(open_farm: Farm, s3_client: Any) -> None:
    promised = BUCKET_MANIFEST.replace('net.onnx"', f'net.onnx", sha256: "{"0" * 64}"')
    with pytest.raises(ManifestError, match="does not have the promised SHA-256"):
        open_farm.builds.plan("main", from_bucket(promised))
    s3_client.put_object(Bucket=MODELS, Key="nets/net.onnx", Body=b"no model at all")
    with pytest.raises(ManifestError, match="not an ONNX model"):
        open_farm.builds.plan("main", from_bucket())


def with_external_data(folder: Path, *locations: str) -> Path:
    """Save a net that adds weights, each in a file of its own next to the model."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]) for name in "xy"]
    nodes, weights, last = [], [], "x"
    for number, location in enumerate(locations):
        tensor = TensorProto(name=f"w{number}", data_type=TensorProto.FLOAT, dims=[4])
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", location), ("offset", "0"), ("length", "16")):
            tensor.external_data.add(key=key, value=value)
        weights.append(tensor)
        made = "y" if number == len(locations) - 1 else f"s{number}"
        nodes.append(helper.make_node("Add", [last, tensor.name], [made]))
        last = made
    graph = helper.make_graph(nodes, "net", values[:1], values[1:], weights)
    path = folder / "large.onnx"
    path.write_bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    )
    return path


def test_external_data_is_read_from_next_to_the_model_in_its_bucket(
    open_farm: Farm, s3_client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All parts become blobs, a part that changes is another model, and one that is missing is named."""
    model = with_external_data(tmp_path, "a.bin", "parts/more/b.bin")
    text = BUCKET_MANIFEST.replace("net.onnx", "large.onnx")
    s3_client.put_object(Bucket=MODELS, Key="nets/large.onnx", Body=model.read_bytes())
    s3_client.put_object(Bucket=MODELS, Key="nets/a.bin", Body=bytes(16))
    with pytest.raises(ManifestError, match=rf"m\.yaml:7:.*s3://{MODELS}/nets/parts/more/b.bin cannot be read: 404"):
        open_farm.builds.plan("main", from_bucket(text))
    keys = []
    for content in (bytes(16), b"1" * 16):
        s3_client.put_object(Bucket=MODELS, Key="nets/parts/more/b.bin", Body=content)
        plan = open_farm.builds.plan("main", from_bucket(text))
        assert plan["missing_blobs"] == []
        keys.append(plan["cells"][0]["key"])
    assert keys[0] != keys[1]
    whole = model.stat().st_size + 32
    for limit, said in (
        (whole - 1, "nets/parts/more/b.bin has more than 15 bytes"),
        (whole - 17, "nets/a.bin has more than"),
    ):
        monkeypatch.setattr(planner, "SIZE_LIMIT", limit)
        with pytest.raises(ManifestError, match=said):
            Farm(open_farm.settings).builds.plan("main", from_bucket(f"{text}salt: other\n"))
    monkeypatch.setattr(planner, "SIZE_LIMIT", whole)
    monkeypatch.setattr(planner, "MAX_PARTS", 1)
    with pytest.raises(ManifestError, match="has external data in more than 1 files"):
        Farm(open_farm.settings).builds.plan("main", from_bucket(f"{text}salt: other\n"))
    monkeypatch.setattr(planner, "MAX_PARTS", 2)
    Farm(open_farm.settings).builds.plan("main", from_bucket(f"{text}salt: another\n"))
    (tmp_path / "a.bin").write_bytes(bytes(16))
    (tmp_path / "parts" / "more").mkdir(parents=True)
    (tmp_path / "parts" / "more" / "b.bin").write_bytes(b"1" * 16)
    (tmp_path / "m.yaml").write_text(text.replace(f's3: "s3://{MODELS}/nets/large.onnx"', "path: large.onnx"))
    brought = freeze(tmp_path / "m.yaml", cache=tmp_path / "cache")
    assert open_farm.builds.plan("main", brought.submission)["cells"][0]["key"] == keys[1]
    assert len(brought.files) == 3


def test_external_data_of_a_bucket_does_not_leave_the_models_folder(
    open_farm: Farm, s3_client: Any, tmp_path: Path
) -> None:
    s3_client.put_object(Bucket=MODELS, Key="secret.bin", Body=bytes(16))
    model = with_external_data(tmp_path, "../secret.bin")
    s3_client.put_object(Bucket=MODELS, Key="nets/large.onnx", Body=model.read_bytes())
    with pytest.raises(ManifestError, match="is outside the model's folder"):
        open_farm.builds.plan("main", from_bucket(BUCKET_MANIFEST.replace("net.onnx", "large.onnx")))


def test_an_artifact_that_was_deleted_is_no_hit_after_storage_was_looked_after(farm: Farm, frozen: Frozen) -> None:
    build = submit(farm, frozen)
    work(farm)
    facts = farm.build_reader.cells("main", build["id"])[0]["facts"]
    farm.artifacts.delete_object(facts["sidecar"])
    loops.tidy_storage(farm.store, farm.artifacts, changes_kept=timedelta(days=400))
    planned = farm.builds.plan("main", again(frozen).submission)["cells"]
    assert sorted(cell["state"] for cell in planned) == ["hit", "miss"]


def test_a_new_build_is_not_looked_for_among_those_that_have_ended(farm: Farm, frozen: Frozen) -> None:
    asked: list[str] = []
    farm.artifacts.s3.meta.events.register("before-call.s3.GetObject", lambda params, **_: asked.append(params["url"]))
    build = submit(farm, frozen)
    assert [url.rpartition("/")[2] for url in asked if build["id"] in url].count("manifest.yaml") == 1
    assert not [url for url in asked if build["id"] in url and url.endswith("report.json")]


def test_looking_after_storage_leaves_the_server_to_others(
    farm: Farm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = f"    batches: {list(range(1, 11))}\n"
    submit(farm, freeze_manifest(tmp_path, MANIFEST + batches, batch="batch"))
    assert work(farm) == 20
    read, asking, most = farm.artifacts.get_object, set[int](), [0]

    def counted(key: str) -> Any:
        asking.add(threading.get_ident())
        most[0] = max(most[0], len(asking))
        found = read(key)
        asking.discard(threading.get_ident())
        return found

    monkeypatch.setattr(farm.artifacts, "get_object", counted)
    loops.tidy_storage(farm.store, farm.artifacts, changes_kept=timedelta(days=400))
    assert 0 < most[0] <= 2


def test_a_pause_and_a_cancel_hold_after_redis_was_lost(farm: Farm, frozen: Frozen) -> None:
    paused, cancelled = submit(farm, frozen), submit(farm, again(frozen))
    farm.builds.pause("main", paused["id"], paused=True)
    farm.builds.pause_pool(POOL.name, paused=True)
    farm.builds.cancel("main", cancelled["id"])
    lose_redis(farm)
    farm.admission.resume()
    assert farm.build_reader.get("main", paused["id"])["paused"]
    assert set(states(farm, cancelled["id"]).values()) == {"cancelled"}
    assert work(farm) == 0
    while farm.store.wakeups.next("pools", 0.01):
        pass
    farm.builds.pause_pool(POOL.name, paused=False)
    assert farm.store.wakeups.next("pools", 0.01) == POOL.name, "nothing waits for the dispatcher's next round"
    assert work(farm) == 0
    farm.builds.pause("main", paused["id"], paused=False)
    assert work(farm) == 2


@pytest.mark.parametrize("state", ["queued", "cancelled"])
def test_no_job_of_a_paused_or_cancelled_build_starts_while_the_store_gets_it_back(
    farm: Farm, frozen: Frozen, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another control plane dispatches all the while."""
    build = submit(farm, frozen)
    if state == "queued":
        farm.builds.pause("main", build["id"], paused=True)
    else:
        farm.builds.cancel("main", build["id"])
    lose_redis(farm)
    create, handed = farm.store.builds.create, list[tuple[str, int]]()

    def create_and_dispatch(*arguments: Any) -> int:
        count = create(*arguments)
        handed.extend(farm.store.jobs.hand_out(POOL.name, 10))
        return count

    monkeypatch.setattr(farm.store.builds, "create", create_and_dispatch)
    farm.admission.resume()
    assert set(states(farm, build["id"]).values()) == {state}
    assert handed == []


def test_what_waits_says_behind_how_many(farm: Farm, frozen: Frozen) -> None:
    build = submit(farm, frozen)
    waiting = [cell["waiting"] for cell in farm.build_reader.report("main", build["id"])["cells"]]
    assert waiting == [f"0 jobs ahead for 2 slots of {POOL.name}", f"1 job ahead for 2 slots of {POOL.name}"]


def test_what_is_paused_says_so(farm: Farm, frozen: Frozen) -> None:
    build = submit(farm, frozen)
    farm.builds.pause("main", build["id"], paused=True)
    waiting = farm.build_reader.report("main", build["id"])["cells"][0]["waiting"]
    assert waiting == f"{build['id']} is paused; `farm resume {build['id']}` resumes it"
    farm.builds.cancel("main", build["id"])
    with pytest.raises(Conflict, match="has ended"):
        farm.builds.pause("main", build["id"], paused=True)


def test_what_is_queued_again_says_how_its_last_attempt_ended(farm: Farm, frozen: Frozen) -> None:
    build = submit(farm, frozen)
    (handed, *_) = farm.store.jobs.hand_out(POOL.name, 1)
    claim = farm.store.jobs.claim(*handed, nonce="n", worker="w1", node="n1")
    standing = f"{WAITS_FOR_STORAGE}; its program is finished"
    for detail in (standing, "run 3 of 9"):
        farm.store.jobs.renew(claim.token, handed[0], phase="compiling", detail=detail)
        cells = farm.build_reader.report("main", build["id"])["cells"]
        said = {cell["waiting"] for cell in cells if cell["state"] == "running"}
        assert said == {f"on w1: {standing}" if detail == standing else ""}
    farm.store.jobs.finish(handed[0], claim.token, Outcome.released())
    (given_back,) = [cell for cell in farm.build_reader.cells("main", build["id"]) if cell["job"] == handed[0]]
    assert given_back["waiting"].endswith("; attempt 1 was given back: w1 stops")
    again = next(one for one in farm.store.jobs.hand_out(POOL.name, 1) if one[0] == handed[0])
    assert farm.store.jobs.claim(*again, nonce="n", worker="w1", node="n1").answer == "run"

    def waiting() -> str:
        cells = farm.build_reader.report("main", build["id"])["cells"]
        return str(next(cell["waiting"] for cell in cells if cell["job"] == handed[0]))

    assert waiting() == ""
    farm.store.workers.died("w1", "died (exit status -9)")
    assert waiting().endswith("; attempt 2 was lost: worker w1 on node n1 died (exit status -9)")
    third = next(one for one in farm.store.jobs.hand_out(POOL.name, 2) if one[0] == handed[0])
    claim = farm.store.jobs.claim(*third, nonce="n", worker="w1", node="n1")
    farm.store.jobs.finish(handed[0], claim.token, Outcome.failure(FailureKind.STORAGE, "no answer"))
    assert "tries again in" in waiting()
    assert waiting().endswith("; attempt 3 failed: storage: no answer")


BACKGROUND = """\
version: 1
name: demo
targets: [onnxruntime/cpu]
precisions: [fp32]
tuning: {mode: quick, background: exhaustive}
models:
  - name: net
    source: {path: net.onnx}
"""


def compared(farm: Farm, verdict: str) -> Callable[[str, dict[str, Any], str], Outcome]:
    """A worker whose follow-ups come out so against what was published before."""

    def make(job_id: str, order: dict[str, Any], key: str) -> Outcome:
        against = {"key": order.get("against"), "ratio": 1.5, "interval": [1.4, 1.6], "verdict": verdict}
        return succeed(farm, against=against if order.get("against") else None)(job_id, order, key)

    return make


def tuned_quickly(farm: Farm, folder: Path) -> tuple[str, str]:
    """Submit, work and finish a build with a background mode; return its id and that of its follow-up."""
    build = submit(farm, freeze_manifest(folder, BACKGROUND))
    assert work(farm) == 1
    farm.build_finisher.finish(build["id"])
    followed_by = farm.build_reader.get("main", build["id"])["followed_by"]
    assert followed_by
    return build["id"], followed_by


def latest_mode(farm: Farm) -> str:
    snapshot = Refs(farm.artifacts).read("main", "latest")
    assert snapshot
    (cell,) = snapshot["cells"].values()
    sidecar = farm.artifacts.lookup(["main"], cell["key"])
    assert sidecar
    return str(sidecar["spec"]["tuning"]["mode"])


@pytest.mark.parametrize(("verdict", "named"), [("faster", "exhaustive"), ("no difference shown", "quick")])
def test_the_background_moves_the_ref_only_where_it_is_shown_to_be_faster(
    farm: Farm, tmp_path: Path, verdict: str, named: str
) -> None:
    """The quick program is out at once; the follow-up is one build of lowest priority, whatever is repeated or lost."""
    first, follower = tuned_quickly(farm, tmp_path)
    assert latest_mode(farm) == "quick"
    assert farm.build_reader.get("main", follower)["follows"] == first
    assert [farm.store.jobs.get(cell["job"])["priority"] for cell in farm.store.builds.cells(follower)] == [-1000]
    plan = farm.artifacts.get_object(f"ns/main/builds/{follower}/plan.json")
    assert plan
    assert [cell["limits"]["time"] for cell in json.loads(plan.data)["cells"]] == [0], "a deep search may take days"
    lose_redis(farm)
    farm.admission.resume()
    farm.build_finisher.finish(first)
    assert work(farm, compared(farm, verdict)) == 1
    farm.build_finisher.finish(follower)
    farm.build_finisher.finish(follower)
    assert latest_mode(farm) == named
    assert farm.build_reader.get("main", follower)["verdict"]["exit_code"] == 0
    # The next build of the same manifest is a hit of the quick program; nothing is tuned or taken back.
    again = submit(farm, freeze_manifest(tmp_path, BACKGROUND))
    assert work(farm) == 0
    farm.build_finisher.finish(again["id"])
    assert farm.build_reader.get("main", again["id"])["followed_by"] is None
    assert latest_mode(farm) == named


def deeper(farm: Farm) -> Callable[[str, dict[str, Any], str], Outcome]:
    """A worker whose follow-ups are faster, but large and inaccurate."""

    def make(job_id: str, order: dict[str, Any], key: str) -> Outcome:
        if not (published := order.get("against")):
            return succeed(farm)(job_id, order, key)
        faster = {"key": published, "ratio": 1.5, "interval": [1.4, 1.6], "verdict": "faster"}
        return succeed(farm, against=faster, program=b"x" * 5000, error=0.05)(job_id, order, key)

    return make


REFUSING = ["verify: {tolerance: 0.001}\n", "budgets: {size: 1KiB}\n", "gates: {baseline: prod, size: 10%}\n"]


@pytest.mark.parametrize("gates", REFUSING)
def test_latest_never_names_a_program_of_the_background_that_a_gate_refuses(
    farm: Farm, tmp_path: Path, gates: str
) -> None:
    """Neither one of an earlier build, whose gates were not so strict, nor that of the build's own follow-up."""
    loose = BACKGROUND + "verify: {tolerance: 0.1}\n"
    build = submit(farm, freeze_manifest(tmp_path, loose))
    work(farm, deeper(farm))
    farm.build_finisher.finish(build["id"])
    refs = Refs(farm.artifacts)
    refs.move("main", "prod", lambda _: refs.source("main", "latest"))
    follower = farm.build_reader.get("main", build["id"])["followed_by"]
    work(farm, deeper(farm))
    farm.build_finisher.finish(follower)
    assert latest_mode(farm) == "exhaustive"
    strict = (BACKGROUND if "verify" in gates else loose) + gates
    again = submit(farm, freeze_manifest(tmp_path, strict))
    assert work(farm) == 0
    farm.build_finisher.finish(again["id"])
    assert farm.build_reader.get("main", again["id"])["verdict"]["exit_code"] == 0
    assert latest_mode(farm) == "quick"
    assert farm.build_reader.get("main", again["id"])["followed_by"] is None, "it is there already"

    other = submit(farm, freeze_manifest(tmp_path, f"{strict}salt: other\n"))
    work(farm, deeper(farm))
    farm.build_finisher.finish(other["id"])
    follower = farm.build_reader.get("main", other["id"])["followed_by"]
    work(farm, deeper(farm))
    farm.build_finisher.finish(follower)
    assert farm.build_reader.get("main", follower)["verdict"]["exit_code"] == 3
    assert latest_mode(farm) == "quick"


def test_latest_names_no_program_of_the_background_that_is_gone(farm: Farm, tmp_path: Path) -> None:
    """The index follows storage only after a while."""
    _, follower = tuned_quickly(farm, tmp_path)
    work(farm, deeper(farm))
    farm.build_finisher.finish(follower)
    (cell,) = farm.build_reader.cells("main", follower)
    farm.artifacts.delete_object(blob_key(cell["facts"]["program"]["digest"]))
    again = submit(farm, freeze_manifest(tmp_path, BACKGROUND))
    farm.build_finisher.finish(again["id"])
    assert latest_mode(farm) == "quick"
    assert farm.build_reader.get("main", again["id"])["followed_by"], "it is made again"


def test_a_follow_up_that_is_really_tuned_takes_the_place_of_the_quick_program(
    farm: Farm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker's executor and ONNX Runtime do all of it; only how the figures compare is made up."""
    farm = Farm(farm.settings.model_copy(update={"measure_seconds": 0.1, "threads": 1}))
    monkeypatch.setattr("farm.tuning.tuner.compare", lambda *_: Comparison(1.5, 1.4, 1.6, "faster"))

    def execute(job_id: str, order: dict[str, Any], key: str) -> Outcome:
        attempt = Attempt(job_id, 1, "token", order, AttemptLimits(time=0.0, memory=0), "main", key)
        return farm.executor.execute(attempt, on_phase=lambda *_: None, cancelled=threading.Event())

    def sidecar(build_id: str) -> dict[str, Any]:
        (cell,) = farm.build_reader.cells("main", build_id)
        assert cell["state"] == "succeeded", cell["message"]
        found = farm.artifacts.lookup(["main"], cell["facts"]["key"])
        assert found
        return dict(found)

    (tmp_path / "farm.yaml").write_text(BACKGROUND)
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]) for name in "xy"]
    weights = helper.make_tensor("w", TensorProto.FLOAT, [4, 4], [0.1] * 16)
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "net", value[:1], value[1:], [weights])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "net.onnx"
    )
    build = submit(farm, freeze(tmp_path / "farm.yaml", cache=tmp_path / "cache"))
    assert work(farm, execute) == 1
    farm.build_finisher.finish(build["id"])
    follower = farm.build_reader.get("main", build["id"])["followed_by"]
    quick = sidecar(build["id"])
    assert (quick["tuning"]["mode"], quick["measurements"]["against"]) == ("quick", None)
    assert latest_mode(farm) == "quick"

    assert work(farm, execute) == 1
    farm.build_finisher.finish(follower)
    deeper = sidecar(follower)
    assert deeper["measurements"]["against"] == {
        "key": quick["key"], "ratio": 1.5, "interval": [1.4, 1.6], "verdict": "faster"
    }  # fmt: skip
    assert (deeper["tuning"]["mode"], deeper["tuning"]["known"], deeper["tuning"]["tuned"]) == ("exhaustive", 0, 1)
    assert latest_mode(farm) == "exhaustive"
    again = submit(farm, freeze(tmp_path / "farm.yaml", cache=tmp_path / "cache"))
    assert work(farm) == 0
    farm.build_finisher.finish(again["id"])
    assert latest_mode(farm) == "exhaustive"


def test_the_follow_up_of_a_retried_build_retries_nothing(farm: Farm, tmp_path: Path) -> None:
    build = submit(farm, freeze_manifest(tmp_path, BACKGROUND))
    work(farm, lambda *_: Outcome.failure(FailureKind.COMPILER_ERROR, "no"))
    farm.build_finisher.finish(build["id"])
    retried = farm.builds.retry("main", build["id"], new_build_id(), failed=False, by="test")
    assert work(farm) == 1
    farm.build_finisher.finish(retried["id"])
    found = farm.build_reader.get("main", farm.build_reader.get("main", retried["id"])["followed_by"])
    assert (found["follows"], found["retries"]) == (retried["id"], None)


def test_a_follow_up_does_not_take_the_place_of_something_newer(farm: Farm, tmp_path: Path) -> None:
    """Whoever published under the name meanwhile keeps it."""
    _, follower = tuned_quickly(farm, tmp_path)
    newer = submit(farm, freeze_manifest(tmp_path, f"{BACKGROUND}    salt: newer\n    tuning: off\n"))
    while work(farm, compared(farm, "faster")):
        pass
    farm.build_finisher.finish(newer["id"])
    farm.build_finisher.finish(follower)
    assert latest_mode(farm) == "off"


def test_a_follow_up_makes_no_empty_ref(farm: Farm, tmp_path: Path) -> None:
    """Somebody has deleted `latest`: an empty one would hide that of `main` from readers of another namespace."""
    _, follower = tuned_quickly(farm, tmp_path)
    Refs(farm.artifacts).delete("main", "latest")
    work(farm, compared(farm, "faster"))
    farm.build_finisher.finish(follower)
    assert Refs(farm.artifacts).find("main", "latest") is None


def test_a_follow_up_counts_as_the_submission_that_it_follows(farm: Farm, tmp_path: Path) -> None:
    """Somebody submitted the quick program again meanwhile, as what he wants."""
    _, follower = tuned_quickly(farm, tmp_path)
    quick = BACKGROUND.replace(", background: exhaustive", "")
    again = submit(farm, freeze_manifest(tmp_path, quick))
    assert work(farm, compared(farm, "faster")) == 1
    farm.build_finisher.finish(again["id"])
    farm.build_finisher.finish(follower)
    assert latest_mode(farm) == "quick"


def test_a_follow_up_that_was_refused_once_comes_with_the_next_try(
    farm: Farm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis was full at that moment: the follow-up is written down and not taken in, and no epoch changes."""
    build = submit(farm, freeze_manifest(tmp_path, BACKGROUND))
    work(farm)

    def refuse(*_: Any) -> None:
        raise StoreUnavailable("OOM")

    with monkeypatch.context() as patched:
        patched.setattr(farm.store.builds, "create", refuse)
        with pytest.raises(StoreUnavailable):
            farm.build_finisher.finish(build["id"])
    assert farm.store.builds.get(farm.artifacts.build_id_of("follow-up", build["id"])) is None
    farm.build_finisher.finish(build["id"])
    followed_by = farm.build_reader.get("main", build["id"])["followed_by"]
    assert [cell["state"] for cell in farm.build_reader.cells("main", followed_by)] == ["queued"]


def test_a_follow_up_that_cannot_be_takes_no_verdict_away(farm: Farm, tmp_path: Path) -> None:
    """Another namespace has a build of its id: ids are the clients' own."""
    frozen = freeze_manifest(tmp_path, BACKGROUND)
    build = submit(farm, frozen)
    work(farm)
    taken = {**frozen.submission, "build_id": farm.artifacts.build_id_of("follow-up", build["id"])}
    farm.builds.submit("pr", taken, by="test")
    farm.build_finisher.finish(build["id"])
    assert farm.build_reader.get("main", build["id"])["verdict"]["exit_code"] == 0
    assert farm.store.builds.get(taken["build_id"])["namespace"] == "pr"


def test_latest_is_no_follow_up_and_the_newest_submission_also_after_a_loss(farm: Farm, tmp_path: Path) -> None:
    build, follower = tuned_quickly(farm, tmp_path)
    assert farm.build_reader.resolve("main", "@latest") == build
    older = [newer(farm, tmp_path, salt) for salt in ("one", "two", "three")]
    assert farm.build_reader.resolve("main", "@latest") == older[-1]
    lose_redis(farm)
    farm.admission.resume()
    assert farm.store.builds.get(follower)
    assert farm.build_reader.resolve("main", "@latest") == older[-1]


def test_a_background_that_finds_no_more_is_refused(farm: Farm, tmp_path: Path) -> None:
    text = BACKGROUND.replace("quick, background: exhaustive", "exhaustive, background: quick")
    with pytest.raises(ManifestError, match="`background: quick` finds nothing that `mode: exhaustive` does not"):
        submit(farm, freeze_manifest(tmp_path, text))


def test_what_a_budget_cut_short_is_fetched_like_any_other(farm: Farm, client: FarmClient, tmp_path: Path) -> None:
    """Its artifact has a cache key of its own, which is the one that a ref has to name."""
    tuned = freeze_manifest(tmp_path, MANIFEST + "    precisions: [fp32]\ntuning: {mode: quick, budget: 1s}\n")
    cut: list[str] = []

    def make(job_id: str, order: dict[str, Any], key: str) -> Outcome:
        cut[:] = [keys_of(order, key)[-1]]
        return succeed(farm)(job_id, {**order, "spec": cut_short(order["spec"], order["budget"])}, cut[0])

    build = submit(farm, tuned)
    assert work(farm, make) == 1
    farm.build_finisher.finish(build["id"])
    found = client.fetch("net", "onnxruntime/cpu", "fp32", folder=tmp_path / "out")
    assert found.artifact["key"] == cut[0]
    hit = submit(farm, again(tuned))
    farm.build_finisher.finish(hit["id"])
    (cell,) = farm.build_reader.cells("main", hit["id"])
    assert client.artifacts.log(cell["facts"]["key"]) == b"compiled\n"


def budgets(*tuning: str) -> str:
    models = "".join(
        f"  - {{name: net{number}, source: {{path: net.onnx}}, tuning: {given}}}\n"
        for number, given in enumerate(tuning)
    )
    return f"version: 1\nname: budgets\ntargets: [onnxruntime/cpu]\nprecisions: [fp32]\nmodels:\n{models}"


def test_cells_share_a_job_only_where_their_budgets_are_equal(farm: Farm, tmp_path: Path) -> None:
    """Whoever gave a larger budget, or none, never gets what a smaller one cut short; a finished tuning is for all."""
    one_second, two = "{mode: quick, budget: 1s}", "{mode: quick, budget: 2s}"
    frozen = freeze_manifest(tmp_path, budgets(one_second, two, "quick", one_second))
    build = submit(farm, frozen)
    (warning,) = build["warnings"]
    assert warning.startswith("net3/") and "is the same compile as net0/" in warning

    def make(job_id: str, order: dict[str, Any], key: str) -> Outcome:
        budget = order.get("budget")
        spec = cut_short(order["spec"], budget) if budget else order["spec"]
        return succeed(farm)(job_id, {**order, "spec": spec}, keys_of(order, key)[-1])

    def published(build: dict[str, Any]) -> list[float | None]:
        sidecars = [
            farm.artifacts.lookup(["main"], cell["facts"]["key"])
            for cell in farm.build_reader.cells("main", build["id"])
        ]
        return [found["spec"]["tuning"].get("budget") for found in sidecars if found]

    assert farm.builds.plan("main", again(frozen).submission)["cells"][1]["state"] == "joined"
    assert work(farm, make) == 3
    assert published(build) == [1, 2, None, 1]
    farm.build_finisher.finish(build["id"])
    later = submit(farm, freeze_manifest(tmp_path, budgets(one_second, "{mode: quick, budget: 1h}", "quick")))
    assert work(farm) == 0
    assert published(later) == [None, None, None]


def test_the_artifact_of_a_smaller_budget_is_no_hit_for_another_cell(farm: Farm, tmp_path: Path) -> None:
    """Also where both are cells of one build, of which the smaller one is there already."""
    short = "{mode: quick, budget: 1s}"
    submit(farm, freeze_manifest(tmp_path, budgets(short)))

    def make(job_id: str, order: dict[str, Any], key: str) -> Outcome:
        spec = cut_short(order["spec"], order["budget"])
        return succeed(farm)(job_id, {**order, "spec": spec}, keys_of(order, key)[-1])

    assert work(farm, make) == 1
    both = freeze_manifest(tmp_path, budgets("quick", short))
    assert [cell["state"] for cell in farm.builds.plan("main", both.submission)["cells"]] == ["miss", "hit"]


def test_the_end_of_a_long_log_is_shown(farm: Farm, frozen: Frozen, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that traces its work writes more than anyone reads; the end says why it failed."""
    build = submit(farm, frozen)
    digest, _ = farm.artifacts.put_blob_bytes(b"passes\n" * 1000 + b"and then it died\n")
    work(farm, lambda *_: Outcome.failure(FailureKind.COMPILER_ERROR, "no", log=digest))
    monkeypatch.setattr("farm.builds.reading.SHOWN_LOG", 24)
    job = farm.build_reader.cells("main", build["id"])[0]["job"]
    first, *rest = b"".join(farm.jobs.log("main", job).last()).decode().splitlines()
    assert first == f"(6993 bytes before this are in blob {digest})"
    assert rest == ["passes", "and then it died"]


def test_a_failed_cell_is_reproduced_when_its_job_is_forgotten(farm: Farm, client: FarmClient, frozen: Frozen) -> None:
    """The order is in the build's plan, how it ended in its report."""
    build = submit(farm, frozen)
    work(farm, lambda *_: Outcome.failure(FailureKind.COMPILER_ERROR, "no kernel"))
    farm.build_finisher.finish(build["id"])
    cell = farm.build_reader.cells("main", build["id"])[0]
    before = client.jobs.reproduction(build["id"], cell["identifier"])
    assert before == client.jobs.reproduction(cell["job"])
    lose_redis(farm)
    with pytest.raises(NotFound):
        client.jobs.reproduction(cell["job"])
    found = client.jobs.reproduction(build["id"], cell["identifier"])
    assert found["ended"] == {"kind": "compiler_error", "message": "no kernel"}
    same = ("key", "order", "limits", "job", "build", "attempt", "namespace", "worker")
    assert {name: found.get(name) for name in same} == {name: before.get(name) for name in same}
    with pytest.raises(NotFound, match="no cell other"):
        client.jobs.reproduction(build["id"], "other")


ONE = MANIFEST.replace("[fp32, fp16]", "[fp32]")


def test_a_job_in_quarantine_is_reproduced(farm: Farm, client: FarmClient, tmp_path: Path) -> None:
    """Three workers died of it; the folder has what they had."""
    farm = Farm(farm.settings.model_copy(update={"lease_seconds": 0.4, "renew_seconds": 0.1}))
    build = submit(farm, freeze_manifest(tmp_path, ONE))
    jobs = farm.store.jobs

    def handed_out() -> list[tuple[str, int]]:
        jobs.promote()
        return jobs.hand_out(POOL.name, 1)

    (cell,) = farm.build_reader.cells("main", build["id"])
    assert client.jobs.reproduction(cell["job"])["limits"] == {"time": 0, "memory": 0}, "no attempt has any yet"
    for number in range(3):
        if number == 2:
            submit(farm, freeze_manifest(tmp_path, ONE + "limits: {time: 5h}\n"))
        ((job_id, attempt),) = wait_until(handed_out, message="the delay passed")
        jobs.claim(job_id, attempt, nonce=secrets.token_hex(4), worker="w1", node="n1")
        wait_until(lambda: jobs.expire_leases("reaper"), message="a lease ended")
    (cell,) = farm.build_reader.cells("main", build["id"])
    assert (cell["kind"], farm.jobs.get("main", cell["job"])["quarantined"]) == ("worker_lost", True)
    document = client.jobs.reproduce(cell["job"], tmp_path / "again", farm.settings)
    assert (document["ended"]["kind"], document["attempt"]) == ("worker_lost", 3)
    assert (document["limits"]["time"], document["previous"]) == (18_000, ["worker_lost"] * 2)
    assert client.jobs.reproduction(build["id"], cell["identifier"]) == client.jobs.reproduction(cell["job"])
    assert (tmp_path / "again" / "inputs" / "model" / "net.onnx").read_bytes() == (tmp_path / "net.onnx").read_bytes()
    assert json.loads((tmp_path / "again" / "spec.json").read_text()) == document["order"]["spec"]


# --- what readers follow -----------------------------------------------------------------------------------------


def test_a_reader_who_follows_hears_of_accepted_cells_and_when_they_are_expected_to_end(
    farm: Farm, frozen: Frozen, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = submit(farm, frozen)["id"]
    first = farm.store.events.read(build)["items"][0]["id"]
    names = [cell["identifier"] for cell in farm.build_reader.read_plan("main", build)["cells"]]
    changes = BuildChanges(farm.build_reader, "main", build, first)
    (change,) = changes.after(0)
    assert [cell["identifier"] for cell in change["cells"]] == names
    assert change["outlook"]["unknown"] == len(names)
    assert list(changes.after(0)) == []
    assert farm.build_reader.accepted("main", build, 2, 1) == names[1:]
    monkeypatch.setattr(reading, "AT_ONCE", 1)
    one, other = BuildChanges(farm.build_reader, "main", build, first).after(0)
    assert [one["cells"][0]["identifier"], other["cells"][0]["identifier"]] == names
    assert "id" not in one and other["id"] == changes._position


def test_large_plans_are_kept_until_they_are_too_many(
    farm: Farm, frozen: Frozen, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = farm.build_reader
    builds = [submit(farm, again(frozen))["id"] for _ in range(3)]
    plans = [reader.read_plan("main", build) for build in builds]
    monkeypatch.setattr(reading, "PLANS", 4)
    reader._plans = {}
    for plan in plans:
        reader.keep_plan(plan)
    assert [build for _, build in reader._plans] == builds[1:]
    monkeypatch.setattr(reading, "PLANS", 1)
    reader.keep_plan(plans[0])
    assert [build for _, build in reader._plans] == builds[:1], "the last one stays, however large"


def test_a_build_is_cancelled_and_paused_by_the_start_of_its_id(farm: Farm, frozen: Frozen) -> None:
    build = submit(farm, frozen)["id"]
    short = build[:-6]
    assert farm.build_reader.pauses("main", build) == set()
    assert farm.builds.pause("main", short, paused=True)["id"] == build
    assert farm.build_reader.pauses("main", build) == {build}
    assert farm.builds.cancel("main", short) == {"build": build, "cancelled": 2}


def test_what_was_there_before_a_build_has_no_attempt_to_reproduce_and_ended_cells_are_counted(
    farm: Farm, frozen: Frozen
) -> None:
    def counted() -> float:
        labels = {"state": "succeeded", "kind": ""}
        return REGISTRY.get_sample_value("farm_cells_ended_total", labels) or 0.0

    first, before = submit(farm, frozen)["id"], counted()
    work(farm)
    farm.build_finisher.finish(first)
    assert counted() == before + 2
    hits = submit(farm, again(frozen))["id"]
    name = farm.build_reader.cells("main", hits)[0]["identifier"]
    assert farm.build_reader.reproduction_of_cell("main", first, name)
    with pytest.raises(NotFound, match="existed before build"):
        farm.build_reader.reproduction_of_cell("main", hits, name)
    with pytest.raises(NotFound, match="no cell other"):
        farm.build_reader.reproduction_of_cell("main", hits, "other")

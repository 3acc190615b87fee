"""Triggers of stored manifests: each occasion makes one build, however many look and whatever fails in between."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from botocore.exceptions import ClientError
from pydantic import SecretStr

from farm.app import Farm
from farm.artifacts.refs import Refs
from farm.artifacts.tokens import Role, Token
from farm.cli import main
from farm.client.client import FarmClient
from farm.client.freezing import Frozen
from farm.errors import StorageUnavailable
from farm.extras.triggers.firing import TriggerRounds
from farm.extras.triggers.stored_manifests import StoredManifests
from farm.serving.server import create_app
from tests.support.api_farm import MANIFEST, POOL, commands, serving, work

NIGHTLY = 'triggers: [{schedule: "17 3 * * *", timezone: Europe/Berlin}]\n'


def at(text: str) -> float:
    return datetime.fromisoformat(f"{text}+00:00").replace(tzinfo=UTC).timestamp()


class Clock:
    """The farm's clock, as a test sets it."""

    def __init__(self, farm: Farm, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = at("2026-11-22T12:00")
        monkeypatch.setattr(farm.store, "now", lambda: self.now)


@pytest.fixture
def clock(farm: Farm, monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(farm, monkeypatch)


def push(farm: Farm, frozen: Frozen, triggers: str, *, by: str = "admin", namespace: str = "main") -> None:
    for path in frozen.files.values():
        farm.artifacts.put_blob_file(path)
    content: Any = {name: value for name, value in frozen.submission.items() if name != "build_id"}
    content["manifest"] = MANIFEST + triggers
    known = next((token for token in farm.tokens.list() if token.name == by), Token(by, Role.ADMIN, namespace))
    farm.part(StoredManifests).push(namespace, "demo", content, by=known)


def builds(farm: Farm, namespace: str = "main") -> list[Any]:
    return farm.build_reader.list(namespace)


def trigger(farm: Farm, namespace: str = "main") -> Any:
    (found,) = farm.part(StoredManifests).show(namespace, "demo")["triggers"]
    return found


def test_a_schedule_builds_once_for_each_run(farm: Farm, frozen: Frozen, clock: Clock) -> None:
    push(farm, frozen, NIGHTLY)
    assert trigger(farm)["next"] == at("2026-11-23T02:17"), "03:17 in Berlin"
    assert farm.part(TriggerRounds).go() == 0
    clock.now = at("2026-11-23T02:17:04")
    assert [farm.part(TriggerRounds).go() for _ in range(3)] == [1, 0, 0]
    (build,) = builds(farm)
    assert build["labels"] == {"trigger": "schedule", "manifest": "demo@1"}
    assert not [each for each in build["warnings"] if "away" in each]
    found = trigger(farm)
    assert found["next"] == at("2026-11-24T02:17")
    assert (found["last"]["build"], found["last"]["why"], found["last"]["error"]) == (
        build["id"],
        "due at 2026-11-23 03:17 Europe/Berlin (17 3 * * *)",
        "",
    )
    clock.now = at("2026-11-24T02:17:09")
    assert farm.part(TriggerRounds).go() == 1
    assert len(builds(farm)) == 2


def test_runs_that_an_outage_missed_make_one_build_which_says_so(farm: Farm, frozen: Frozen, clock: Clock) -> None:
    push(farm, frozen, NIGHTLY)
    clock.now = at("2026-11-26T09:00")
    assert [farm.part(TriggerRounds).go() for _ in range(2)] == [1, 0]
    (build,) = builds(farm)
    said = "the farm was away: this build is for the run of 2026-11-26 03:17 Europe/Berlin and 3 before it"
    assert said in build["warnings"]
    assert trigger(farm)["next"] == at("2026-11-27T02:17")


def test_many_control_planes_at_once_make_one_build(farm: Farm, frozen: Frozen, clock: Clock) -> None:
    push(farm, frozen, NIGHTLY)
    clock.now = at("2026-11-23T02:17:04")
    planes = [Farm(farm.settings) for _ in range(4)]
    for plane in planes:
        plane.store = farm.store  # The clock is its own.
    together = threading.Barrier(len(planes))

    def look(plane: Farm) -> int:
        together.wait()
        return plane.part(TriggerRounds).go()

    with ThreadPoolExecutor(len(planes)) as threads:
        assert sum(threads.map(look, planes)) == 1
    assert len(builds(farm)) == 1


def test_a_control_plane_that_dies_after_its_claim_loses_no_build_and_makes_none_twice(
    farm: Farm, frozen: Frozen, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(farm, frozen, NIGHTLY)
    clock.now = at("2026-11-23T02:17:04")
    build = StoredManifests.build

    class Died(BaseException):
        pass

    def dies_before(*_: Any, **__: Any) -> Any:
        raise Died

    def dies_after(*args: Any, **options: Any) -> Any:
        build(*args, **options)
        raise Died

    for dies in (dies_before, dies_after):
        monkeypatch.setattr(StoredManifests, "build", dies)
        with pytest.raises(Died):
            farm.part(TriggerRounds).go()
        monkeypatch.setattr(StoredManifests, "build", build)
        assert farm.part(TriggerRounds).go() == 0, "it may be at work still"
        clock.now += 301
    assert farm.part(TriggerRounds).go() == 1
    assert len(builds(farm)) == 1
    clock.now += 301
    assert farm.part(TriggerRounds).go() == 0


def test_what_the_farm_cannot_take_now_is_tried_again_and_what_is_wrong_is_said(
    farm: Farm, frozen: Frozen, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(farm, frozen, NIGHTLY)
    clock.now = at("2026-11-23T02:17:04")
    build = StoredManifests.build

    def away(*_: Any, **__: Any) -> Any:
        raise StorageUnavailable("storage is away")

    monkeypatch.setattr(StoredManifests, "build", away)
    assert farm.part(TriggerRounds).go() == 0
    assert trigger(farm)["problem"] == "storage is away"
    monkeypatch.setattr(StoredManifests, "build", build)
    clock.now += 61
    assert farm.part(TriggerRounds).go() == 1
    assert trigger(farm)["problem"] == ""

    broken = MANIFEST.replace("onnxruntime/cpu", "migraphx/gfx90a")
    content: Any = {name: value for name, value in frozen.submission.items() if name != "build_id"}
    farm.part(StoredManifests).push(
        "main", "demo", {**content, "manifest": broken + NIGHTLY}, by=Token("admin", Role.ADMIN, "main")
    )
    clock.now = at("2026-11-24T02:17:04")
    assert [farm.part(TriggerRounds).go() for _ in range(2)] == [0, 0]
    last = trigger(farm)["last"]
    assert last["build"] == ""
    assert "no pool serves" in last["error"]
    assert trigger(farm)["next"] == at("2026-11-25T02:17")
    assert len(builds(farm)) == 1


def test_a_push_keeps_what_a_trigger_knows_and_forgets_triggers_that_are_gone(
    farm: Farm, frozen: Frozen, clock: Clock
) -> None:
    push(farm, frozen, NIGHTLY)
    clock.now = at("2026-11-23T02:17:04")
    farm.part(TriggerRounds).go()
    push(farm, frozen, NIGHTLY + "salt: x\n")
    assert trigger(farm)["last"]["version"] == 1
    push(farm, frozen, NIGHTLY.replace("17 3", "18 3"))
    assert trigger(farm)["last"] is None
    push(farm, frozen, "")
    assert farm.part(StoredManifests).show("main", "demo")["triggers"] == []
    farm.part(StoredManifests).remove("main", "demo")
    clock.now = at("2026-11-30T00:00")
    assert farm.part(TriggerRounds).go() == 0


def test_a_trigger_that_was_removed_and_comes_back_builds_again(farm: Farm, frozen: Frozen, clock: Clock) -> None:
    push(farm, frozen, NIGHTLY)
    clock.now = at("2026-11-23T02:17:04")
    assert farm.part(TriggerRounds).go() == 1
    push(farm, frozen, "")
    push(farm, frozen, NIGHTLY)
    clock.now = at("2026-11-24T02:17:04")
    assert farm.part(TriggerRounds).go() == 1, "not the build of its first run before"
    assert len(builds(farm)) == 2


def test_a_revoked_token_builds_no_more(farm: Farm, frozen: Frozen, clock: Clock) -> None:
    farm.tokens.create("ci", Role.SUBMITTER, "pr", max_cells=1)
    push(farm, frozen, NIGHTLY, by="ci", namespace="pr")
    clock.now = at("2026-11-23T02:17:04")
    assert farm.part(TriggerRounds).go() == 0
    assert "the token ci may have 1 unfinished cells" in trigger(farm, "pr")["problem"]
    farm.tokens.revoke("ci")
    clock.now += 61
    assert farm.part(TriggerRounds).go() == 0
    assert "the token ci, which pushed version 1, may no longer submit" in trigger(farm, "pr")["last"]["error"]
    assert builds(farm, "pr") == []
    farm.tokens.create("ci2", Role.SUBMITTER, "pr")
    push(farm, frozen, NIGHTLY, by="ci2", namespace="pr")
    clock.now = at("2026-11-24T02:17:04")
    assert farm.part(TriggerRounds).go() == 1, "the same content, pushed again by a token that may"
    (build,) = builds(farm, "pr")
    assert (build["created_by"], build["labels"]["manifest"]) == ("ci2", "demo@1")


def test_a_later_token_of_the_same_name_does_not_fire_what_an_earlier_one_pushed(
    farm: Farm, frozen: Frozen, clock: Clock
) -> None:
    farm.tokens.create("ci", Role.SUBMITTER, "pr")
    push(farm, frozen, NIGHTLY, by="ci", namespace="pr")
    farm.tokens.revoke("ci")
    farm.tokens.create("ci", Role.SUBMITTER, "pr")
    clock.now = at("2026-11-23T02:17:04")
    assert farm.part(TriggerRounds).go() == 0
    assert "may no longer submit" in trigger(farm, "pr")["last"]["error"]


def test_a_person_whom_a_proxy_calls_admin_is_not_the_administrator(farm: Farm, frozen: Frozen) -> None:
    for path in frozen.files.values():
        farm.artifacts.put_blob_file(path)
    content: Any = {name: value for name, value in frozen.submission.items() if name != "build_id"}
    settings = farm.settings.model_copy(update={"proxy_secret": SecretStr("of-the-proxy")})
    person = {"Farm-Proxy-Secret": "of-the-proxy", "Farm-User": "admin", "Farm-User-Role": "submitter"}
    with serving(create_app(Farm(settings))) as url:

        def pushed(manifest: str) -> httpx.Response:
            body = {**content, "manifest": manifest}
            return httpx.put(f"{url}/v1/manifests/demo", json=body, headers=person, timeout=60)

        refused = pushed(MANIFEST + NIGHTLY)
        assert refused.status_code == 403 and "push with a token" in refused.json()["hint"]
        assert pushed(MANIFEST).json()["versions"][0]["by"] == "person:admin"


def test_nobody_takes_the_id_of_another_namespaces_next_build(farm: Farm, client: FarmClient, frozen: Frozen) -> None:
    """Its parts are public: a namespace, a name, and a number that a CI server counts up."""
    push(farm, frozen, "")
    guessed = f"b-{hashlib.sha256(chr(0).join(('main', 'demo', 'run-7')).encode()).hexdigest()[:16]}"
    farm.builds.submit("forks", {**frozen.submission, "build_id": guessed}, by="stranger")
    made = client.manifests.build("demo", key="run-7")["id"]
    assert made != guessed
    assert client.manifests.build("demo", key="run-7")["id"] == made, "asked for twice"
    other = Farm(farm.settings)
    assert other.artifacts.build_id_of("main", "demo", "run-7") == made, "also by another control plane"


def test_an_object_that_changes_builds_and_one_that_does_not_never(
    farm: Farm, frozen: Frozen, s3_client: Any, s3_settings: dict[str, str], clock: Clock
) -> None:
    bucket = s3_settings["s3_bucket"]
    push(farm, frozen, f"triggers: [{{source: s3://{bucket}/incoming/net.onnx}}]\n")
    assert farm.part(TriggerRounds).go() == 0
    assert f"the farm may not read the bucket {bucket}" in trigger(farm)["problem"]
    allowed = Farm(farm.settings.model_copy(update={"s3_sources": (bucket,)}))
    allowed.store = farm.store

    def write(text: str) -> None:
        s3_client.put_object(Bucket=bucket, Key="incoming/net.onnx", Body=text.encode())

    assert allowed.part(TriggerRounds).go() == 0
    assert "cannot be read: 404" in trigger(farm)["problem"]
    for text, made in (("one", 0), ("one", 0), ("two", 1), ("two", 0), ("one", 1)):
        write(text)
        assert [allowed.part(TriggerRounds).go() for _ in range(2)] == [made, 0]
    assert trigger(farm)["problem"] == ""
    assert {build["labels"]["trigger"] for build in builds(farm)} == {"source"}
    assert len(builds(farm)) == 2


def test_a_bucket_that_is_busy_is_asked_again_and_holds_up_no_other_trigger(
    farm: Farm, frozen: Frozen, s3_settings: dict[str, str], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = s3_settings["s3_bucket"]
    push(farm, frozen, NIGHTLY.replace("[", f"[{{source: s3://{bucket}/incoming/net.onnx}}, "))
    allowed = Farm(farm.settings.model_copy(update={"s3_sources": (bucket,)}))
    allowed.store = farm.store
    clock.now = at("2026-11-23T02:17:04")

    head = allowed.artifacts.s3.head_object

    def busy(**request: Any) -> Any:
        if request["Key"] != "incoming/net.onnx":
            return head(**request)
        answer: Any = {"Error": {"Code": "SlowDown"}, "ResponseMetadata": {"HTTPStatusCode": 503}}
        raise ClientError(answer, "HeadObject")

    monkeypatch.setattr(allowed.artifacts.s3, "head_object", busy)
    assert allowed.part(TriggerRounds).go() == 1, "the schedule's"
    source, _ = farm.part(StoredManifests).show("main", "demo")["triggers"]
    assert "SlowDown" in source["problem"]
    with pytest.raises(StorageUnavailable, match="SlowDown"):  # A build that meets it is tried again.
        allowed.artifacts.source_version(bucket, "incoming/net.onnx")


def test_a_new_toolchain_builds_once_and_one_that_comes_back_does_not(farm: Farm, frozen: Frozen, clock: Clock) -> None:
    push(farm, frozen, "triggers: [{toolchain: onnxruntime/cpu}]\n")

    def worker(name: str, toolchain: str) -> Callable[[], Any]:
        pool = replace(POOL, toolchain=toolchain)
        row: Any = {"id": name, "node": name, "pid": 1, "host": name, "slots": 1, "pools": [pool.as_dict()]}
        farm.store.workers.register(row, ttl=600)
        return lambda: farm.store.workers.leave(name)

    assert [farm.part(TriggerRounds).go() for _ in range(2)] == [0, 0], "what is there now is known"
    leave = worker("w2", "onnxruntime9.9.9-1a2b3c4d")
    assert farm.part(TriggerRounds).go() == 0
    refused = trigger(farm)["last"]
    assert "several pools serve" in refused["error"], "the upgrade is half done"
    clock.now += 60
    assert farm.part(TriggerRounds).go() == 0
    assert trigger(farm)["last"] == refused, "it is not tried again until something changes"
    farm.store.workers.leave("w1")
    assert [farm.part(TriggerRounds).go() for _ in range(2)] == [1, 0]
    assert trigger(farm)["last"]["why"] == "onnxruntime/cpu has a new toolchain: onnxruntime9.9.9-1a2b3c4d"
    leave()
    worker("w1", POOL.toolchain)
    assert [farm.part(TriggerRounds).go() for _ in range(2)] == [0, 0], "an old one that comes back"
    assert len(builds(farm)) == 1


def test_the_command_shows_last_and_next_runs(
    farm: Farm, url: str, frozen: Frozen, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    push(farm, frozen, NIGHTLY)
    clock.now = at("2026-11-23T02:17:04")
    farm.part(TriggerRounds).go()
    (build,) = builds(farm)
    with commands(farm, url, tmp_path, monkeypatch):
        assert main(["manifest", "triggers"]) == 0
        (row,) = [line.split("  ") for line in capsys.readouterr().out.splitlines() if line.startswith("demo")]
        assert [word.strip() for word in row if word] == [
            "demo", "schedule 17 3 * * * Europe/Berlin", "2026-11-24 02:17", "2026-11-23 02:17", build["id"],
        ]  # fmt: skip
        assert main(["manifest", "triggers", "nobody"]) == 4


def test_a_build_of_a_trigger_without_a_baseline_ends_as_one_that_cannot_be_judged(
    farm: Farm, frozen: Frozen, clock: Clock
) -> None:
    """Nobody reads an error at night: the programs are made, and a red build says why nothing takes them."""
    push(farm, frozen, NIGHTLY + "gates: {baseline: prod, size: 10%}\n")
    clock.now = at("2026-11-23T02:17:04")
    assert farm.part(TriggerRounds).go() == 1
    assert work(farm) == 2
    (build,) = builds(farm)
    farm.build_finisher.finish(build["id"])
    report = farm.build_reader.report("main", build["id"])
    why = "the tag prod does not exist in namespace main"
    assert f"cannot judge: {why}" in report["build"]["warnings"]
    verdict = report["build"]["verdict"]
    assert verdict
    assert (verdict["exit_code"], verdict["text"]) == (3, "0 of 2 cells succeeded, 2 that a gate cannot judge")
    assert {(cell["kind"], cell["message"]) for cell in report["cells"]} == {
        ("undecided", f"cannot judge: gate size=10%: size is not compared with prod: {why}")
    }
    assert Refs(farm.artifacts).find("main", "latest") is None

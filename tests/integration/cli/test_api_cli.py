"""Commands against a running farm: what they print, and what they exit with. The test plays the worker."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import junitparser
import pytest

import farm as package
from farm.app import Farm
from farm.artifacts.storage import blob_key
from farm.cli import build_commands, connection, main
from farm.client import transport
from farm.client.client import FarmClient
from farm.client.freezing import Frozen, freeze
from farm.jobs.state import FailureKind, Outcome
from farm.local import servers
from farm.node.survey import Findings
from farm.results.gates import UNCHANGED
from farm.settings import Settings
from tests.support.api_farm import MANIFEST, POOL, commands, freeze_manifest, succeed, work
from tests.support.helpers import in_a_thread, wait_until

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


@pytest.fixture
def manifest(farm: Farm, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A manifest in the current folder, and a farm that commands find."""
    freeze_manifest(tmp_path, MANIFEST)
    with commands(farm, url, tmp_path, monkeypatch):
        yield "farm.yaml"


@pytest.fixture
def worker(farm: Farm, manifest: str) -> Iterator[list[Outcome]]:
    """A worker in the background, and the control plane's end of builds; fails as the list says."""
    failures: list[Outcome] = []

    def run(over: threading.Event) -> None:
        while not over.wait(0.05):
            work(farm, (lambda *_: failures[0]) if failures else None)
            for build_id in farm.store.builds.ended_unreported():
                farm.build_finisher.finish(build_id)

    with in_a_thread(run):
        yield failures


def test_submit_prints_plan_progress_and_table(
    worker: list[Outcome], manifest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", manifest, "--label", "team=x", "--junit", "junit.xml"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0] == "demo: 2 cells, 0 hits, 2 misses"
    assert "net/onnxruntime-cpu/fp32/static" in lines[1]
    assert "first compile" in lines[1]
    assert any(line.startswith("build b-") for line in lines)
    assert "cell  " in out
    assert lines[-1].endswith("2 of 2 cells succeeded")
    assert "net/onnxruntime-cpu/fp32/static succeeded" in err
    assert "\x1b" not in out + err
    (suite,) = junitparser.JUnitXml.fromfile("junit.xml")
    assert suite.tests == 2


def test_submit_says_what_differs_from_the_plan_that_it_showed(
    farm: Farm, manifest: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker with newer modules of the farm's registers in between."""
    newer = dataclasses.replace(POOL, recipe=POOL.recipe + 1)
    plan = FarmClient.plan

    def then_upgraded(client: FarmClient, frozen: Frozen) -> dict[str, Any]:
        planned = plan(client, frozen)
        worker = {"id": "w2", "node": "n2", "pid": 1, "host": "n2", "slots": 2, "pools": [newer.as_dict()]}
        farm.store.workers.register(worker, ttl=600)
        return planned

    monkeypatch.setattr(FarmClient, "plan", then_upgraded)
    assert main(["submit", manifest, "--detach"]) == 0
    err = capsys.readouterr().err
    assert "the farm changed after it showed the plan: 2 cells now differ" in err
    assert f"net/onnxruntime-cpu/fp32/static  {POOL.name} -> {newer.name}" in err


def test_submit_as_json_prints_one_document(
    worker: list[Outcome], manifest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", manifest, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["build"]["verdict"]["exit_code"] == 0
    assert [cell["state"] for cell in document["cells"]] == ["succeeded", "succeeded"]


def test_dry_run_creates_nothing(manifest: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", manifest, "--dry-run"]) == 0
    assert "2 misses" in capsys.readouterr().out
    assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"items": []}


def test_the_second_time_everything_is_a_hit(
    worker: list[Outcome], manifest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", manifest]) == 0
    capsys.readouterr()
    assert main(["submit", manifest]) == 0
    out = capsys.readouterr().out
    assert out.startswith("demo: 2 cells, 2 hits, 0 misses")
    assert sum(line.endswith(" hit") for line in out.splitlines()) == 2


@pytest.mark.parametrize(
    ("kind", "code", "whose"),
    [(FailureKind.BAD_MODEL, 1, "yours to fix"), (FailureKind.TIME_LIMIT, 1, "yours to fix")],
)
def test_a_failure_is_explained_and_decides_the_exit_code(
    worker: list[Outcome], manifest: str, capsys: pytest.CaptureFixture[str], kind: FailureKind, code: int, whose: str
) -> None:
    worker.append(Outcome.failure(kind, "node `a` has no input", detail="line one\nline two"))
    assert main(["submit", manifest]) == code
    out = capsys.readouterr().out
    assert f"{kind.value} ({whose})" in out
    assert "node `a` has no input" in out
    assert "log: farm logs b-" in out


def test_the_pages_that_are_printed_are_there(
    farm: Farm, worker: list[Outcome], manifest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    worker.append(Outcome.failure(FailureKind.COMPILER_ERROR, "no kernel", detail="no kernel"))
    assert main(["submit", manifest]) == 1
    out, err = capsys.readouterr()
    pages = [line.partition("page: ")[2] for line in (out + err).splitlines() if "page: " in line]
    assert sum("/cells/" in page for page in pages) == 1, "one for both cells, which failed alike"
    assert any(page.rpartition("/")[2].startswith("b-") for page in pages), "and one for the build"
    token = farm.settings.api_token.get_secret_value()
    for page in pages:
        answer = httpx.get(page, headers={"Authorization": f"Bearer {token}"}, timeout=60)
        assert answer.status_code == 200, page
    capsys.readouterr()
    assert main(["status", "@latest"]) == 0
    assert set(pages) & set(re.findall(r"page: (\S+)", "".join(capsys.readouterr()))) != set()


def test_detach_watch_status_logs_cancel(farm: Farm, manifest: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", manifest, "--detach", "--json"]) == 0
    build_id = json.loads(capsys.readouterr().out)["build"]["id"]
    assert main(["status", build_id[:9]]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"demo {build_id}: 2 queued")
    assert "waiting: " in out
    assert main(["logs", "@latest", "fp32"]) in (0, 4)
    capsys.readouterr()
    assert main(["cancel", "@latest"]) == 0
    assert capsys.readouterr().out == f"{build_id}: 2 cells cancelled\n"
    farm.build_finisher.finish(build_id)
    assert main(["watch", build_id]) == 1
    assert "2 cancelled" in capsys.readouterr().out


def test_a_retry_tries_what_failed_again_in_a_new_build(
    worker: list[Outcome], manifest: str, capsys: pytest.CaptureFixture[str], farm: Farm
) -> None:
    """What succeeded meanwhile, in this build or another, is a hit; the old build stays as it ended."""
    worker.append(Outcome.failure(FailureKind.BAD_MODEL, "node `a` has no input"))
    assert main(["submit", manifest, "--label", "team=x"]) == 1
    old = farm.build_reader.resolve("main", "@latest")
    capsys.readouterr()
    assert main(["retry", old, "--failed", "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("demo: 2 cells, 0 hits, 2 misses\n")
    assert len(farm.build_reader.list("main")) == 1

    worker.clear()
    assert main(["retry", "@latest", "--failed", "--junit", "junit.xml"]) == 0
    out = capsys.readouterr().out
    assert "tried again" in out
    assert out.splitlines()[-1].endswith("2 of 2 cells succeeded")
    (suite,) = junitparser.JUnitXml.fromfile("junit.xml")
    assert suite.tests == 2
    new, before = farm.build_reader.list("main")
    assert (new["retries"], new["labels"], new["verdict"]["exit_code"]) == (old, {"team": "x"}, 0)
    assert (before["id"], before["verdict"]["exit_code"]) == (old, 1)

    # The whole build again, of which all is there by now; and nothing failed of the new one.
    assert main(["retry", old, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["build"]["counts"]["hits"] == 2
    assert main(["retry", old, "--only", "net/*/fp16/*", "--json"]) == 0
    assert [cell["precision"] for cell in json.loads(capsys.readouterr().out)["cells"]] == ["fp16"]
    assert main(["retry", old, "--only", "nett/*"]) == 4
    assert main(["retry", str(new["id"]), "--failed"]) == 4
    assert "no cell of build" in capsys.readouterr().err


def test_some_cells_of_a_manifest_make_a_build_of_their_own(
    farm: Farm, manifest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", manifest, "--only", "net/*/fp61/*", "--dry-run"]) == 4
    assert "no cell fits net/*/fp61/*\n  the first of 2 is net/" in capsys.readouterr().err
    for words in ([], ["--offline"]):
        assert main(["plan", manifest, "--only", "net/*/fp16/*", "--json", *words]) == 0
        assert ["/fp16/" in cell["identifier"] for cell in json.loads(capsys.readouterr().out)["cells"]] == [True]
        assert main(["plan", manifest, "--only", "net/*/fp61/*", *words]) == 4
        assert "the first of 2 is net/" in capsys.readouterr().err
    assert main(["submit", manifest, "--only", "net/*/fp16/*", "--fail-fast", "--detach"]) == 0
    build_id = capsys.readouterr().out.strip()
    assert [cell["precision"] for cell in farm.build_reader.cells("main", build_id)] == ["fp16"]
    planned = farm.build_reader.read_plan("main", build_id)["build"]
    assert (planned["only"], planned["fail_fast"], planned["cells"]) == (["net/*/fp16/*"], True, 1)


def test_the_page_of_a_build_or_a_cell_is_opened_by_its_name(
    farm: Farm, url: str, manifest: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["submit", manifest, "--label", "branch=a/b", "--detach"]) == 0
    build_id = capsys.readouterr().out.strip()
    work(farm)
    farm.build_finisher.finish(build_id)
    cell = farm.build_reader.cells("main", build_id)[0]["identifier"]
    page = f"{url}/ui/ns/main/builds/{build_id}"
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda page: opened.append(page) or "cells" in page)
    for what, expected in (
        ([], f"{url}/ui/"), (["demo"], page), (["branch=a/b"], page), ([cell], f"{page}/cells/{cell}"),
    ):  # fmt: skip
        assert main(["open", *what]) == 0
        assert capsys.readouterr() == (f"{expected}\n", "")
        assert opened == [], "a script wants no browser"
        with monkeypatch.context() as terminal:
            terminal.setattr("farm.cli.output.lively", lambda: True)
            assert main(["open", *what, "--json"]) == 0
            assert (json.loads(capsys.readouterr().out), opened) == ({"page": expected}, [])
            assert main(["open", *what]) == 0
            assert opened.pop() == expected
            assert ("there is no browser here" in capsys.readouterr().err) == (what != [cell])
    assert main(["open", "net/none/fp16/b1"]) == 4
    assert "no build had the cell net/none/fp16/b1\n  `farm ls`" in capsys.readouterr().err
    assert main(["status", build_id, "--export", "cells.csv"]) == 0
    assert Path("cells.csv").read_text().count(",succeeded,") == 2
    assert main(["status", "--export", "cells.csv"]) == 2


def test_a_retry_has_only_the_cells_that_did_not_succeed(
    farm: Farm, manifest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", manifest, "--detach"]) == 0
    made = succeed(farm)
    work(
        farm,
        lambda job, order, key: (
            made(job, order, key)
            if "fp32" in order["identifier"]
            else Outcome.failure(FailureKind.TIME_LIMIT, "too long")
        ),
    )
    build_id = farm.build_reader.resolve("main", "@latest")
    farm.build_finisher.finish(build_id)
    capsys.readouterr()
    assert main(["retry", build_id, "--failed", "--detach", "--json"]) == 0
    retried = json.loads(capsys.readouterr().out)["build"]
    (cell,) = farm.build_reader.cells("main", retried["id"])
    assert cell["identifier"] == "net/onnxruntime-cpu/fp16/static"
    assert main(["retry", retried["id"]]) == 2
    assert "has not ended" in capsys.readouterr().err
    work(farm)
    farm.build_finisher.finish(retried["id"])
    assert main(["watch", retried["id"]]) == 0
    assert {cell["precision"] for cell in farm.build_reader.cells("main", build_id) if cell["state"] == "failed"} == {
        "fp16"
    }


def test_two_builds_are_held_against_each_other(
    worker: list[Outcome], manifest: str, capsys: pytest.CaptureFixture[str], farm: Farm
) -> None:
    assert main(["submit", manifest]) == 0
    old = farm.build_reader.resolve("main", "@latest")
    worker.append(Outcome.failure(FailureKind.TIME_LIMIT, "too long"))
    Path("other.yaml").write_text(MANIFEST.replace("fp16]", "bf16]"))
    assert main(["submit", "other.yaml"]) == 1
    failed = farm.build_reader.resolve("main", "@latest")
    capsys.readouterr()
    assert main(["diff", old]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"{old} -> {failed}: 0 of 1 cell that both have differ",
        f"left out, only in {old}: 1 cell",
        "  net/onnxruntime-cpu/fp16/static",
        f"left out, only in {failed}: 1 cell",
        "  net/onnxruntime-cpu/bf16/static",
    ]
    worker.clear()
    Path("again.yaml").write_text(MANIFEST + "    salt: again\n")
    assert main(["submit", "again.yaml"]) == 0
    capsys.readouterr()
    assert main(["diff", old, "@latest"]) == 0
    head, around, _, *rows = capsys.readouterr().out.splitlines()
    assert head.endswith(": 2 of 2 cells that both have differ")
    assert around == f"  {UNCHANGED}"
    assert [row.split()[0] for row in rows] == [f"net/onnxruntime-cpu/{name}/static" for name in ("fp32", "fp16")]
    assert all(row.endswith("salt: none -> again") for row in rows)
    assert main(["diff", old, old, "--json"]) == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert (found["same"], found["cells"]) == (2, [])
    assert "the same build" in shown.err


def test_the_programs_of_a_model_are_compared_and_one_is_recommended(
    worker: list[Outcome], manifest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", manifest]) == 0
    capsys.readouterr()
    assert main(["compare", "net", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [cell["precision"] for cell in found["cells"]] == ["fp32", "fp16"]
    assert [(row["target"], row["cell"]) for row in found["recommended"]] == [
        ("onnxruntime-cpu", "net/onnxruntime-cpu/fp32/static")
    ]
    assert main(["compare", "net", found["build"]]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"net in {found['build']}\n")
    assert "onnxruntime-cpu static: ship fp32: error " in out
    assert main(["compare", "nett"]) == 4
    assert "no program of nett in the newest 50 builds" in capsys.readouterr().err


def test_a_retry_says_what_is_gone_since(farm: Farm, manifest: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", manifest, "--detach"]) == 0
    work(farm, lambda *_: Outcome.failure(FailureKind.TIME_LIMIT, "too long"))
    build_id = farm.build_reader.resolve("main", "@latest")
    farm.build_finisher.finish(build_id)
    (digest,) = {
        cell["order"]["model"]["files"][0]["digest"] for cell in farm.build_reader.read_plan("main", build_id)["cells"]
    }
    farm.artifacts.delete_object(blob_key(digest))
    assert main(["retry", build_id]) == 2
    err = capsys.readouterr().err
    assert f"1 inputs of build {build_id} are gone" in err
    assert "submit the manifest again" in err
    assert len(farm.build_reader.list("main")) == 1


def test_doctor_makes_a_missing_bucket_if_asked_to(
    farm: Farm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("farm.node.survey.survey", lambda *_: Findings())
    named = {
        name: value for name, value in farm.settings.environment().items() if name.startswith("FARM_S3_") and value
    }
    for name, value in {**named, "FARM_S3_BUCKET": f"made-{secrets.token_hex(6)}"}.items():
        monkeypatch.setenv(name, value)

    def storage(*options: str) -> str:
        main(["doctor", "--json", *options])
        (check,) = [one for one in json.loads(capsys.readouterr().out)["checks"] if one["name"] == "object storage"]
        return str(check["state"])

    assert [storage(), storage("--fix"), storage("--fix"), storage()] == ["broken", "ok", "ok", "ok"]


def test_doctor_refuses_a_server_without_conditional_writes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """LocalBucket creates conditionally, and replaces and deletes whatever was read: refs would lose moves."""
    monkeypatch.setattr("farm.node.survey.survey", lambda *_: Findings())
    (port,) = servers.free_ports(1)
    command = [sys.executable, "-m", "localbucket", str(tmp_path / "data"), "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    log = tmp_path / "log"
    server = servers.Server("localbucket", url, command, log, lambda: b"serving" in log.read_bytes(), patience=5)
    server.spawn()
    try:
        assert server.wait_until_ready()
        given = {"ENDPOINT": url, "BUCKET": "farm", "ACCESS_KEY": "any", "SECRET_KEY": "any"}
        for name, value in given.items():
            monkeypatch.setenv(f"FARM_S3_{name}", value)
        assert main(["doctor", "--fix", "--json"]) == 6
        checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
        storage, bucket = checks["object storage"], checks["bucket"]
        ignored = "ignores `If-Match`: two workers would overwrite or delete each other's work"
        assert (storage["state"], storage["found"]) == ("broken", f"{url} {ignored}")
        assert storage["fix"].startswith("use a server with conditional writes and deletes: AWS S3, SeaweedFS")
        assert bucket["state"] == "absent", "it has no lifecycle rules at all"
    finally:
        server.stop()


def test_doctor_says_what_the_bucket_does_by_itself(
    farm: Farm, s3_client: S3Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("farm.node.survey.survey", lambda *_: Findings())
    for name, value in farm.settings.environment().items():
        if name.startswith("FARM_S3_") and value:
            monkeypatch.setenv(name, value)

    def found() -> tuple[str, str]:
        main(["doctor", "--json"])
        checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
        return checks["bucket"]["state"], checks["bucket"]["fix"]

    assert found() == ("ok", "")
    name = farm.settings.s3_bucket
    s3_client.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})
    assert found() == ("absent", "add a lifecycle rule with NoncurrentVersionExpiration")
    rule: Any = {"ID": "old", "Status": "Enabled", "Filter": {"Prefix": "ns/"}, "Expiration": {"Days": 30}}
    s3_client.put_bucket_lifecycle_configuration(Bucket=name, LifecycleConfiguration={"Rules": [rule]})
    assert found()[0] == "broken"
    assert found()[1].startswith("remove the rule, or limit it to quarantine/")


def test_doctor_makes_the_users_of_each_role_and_says_their_addresses_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("farm.node.survey.survey", lambda *_: Findings())

    def users() -> str:
        main(["doctor", "--json", "--fix"])
        checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
        return str(checks["redis users"]["found"])

    valkey = servers.start_valkey(tmp_path / "redis", "password")
    try:
        monkeypatch.setenv("FARM_REDIS_URL", valkey.url)
        made = dict(re.findall(r"(redis://(farm-\w+):\w+@[^ ,]+)", users()))
        assert sorted(made.values()) == ["farm-reader", "farm-serve", "farm-worker"]
        assert users() == "each role has one"
        monkeypatch.setenv("FARM_REDIS_URL", next(url for url, name in made.items() if name == "farm-worker"))
        assert users().startswith("not made: ")
    finally:
        valkey.stop()


def test_doctor_says_which_workers_the_farm_has(
    farm: Farm, manifest: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that rests is named, also where another of its node works; none at all is not a fault, but idle."""
    monkeypatch.setattr("farm.node.survey.survey", lambda *_: Findings())

    def found() -> tuple[str, str]:
        main(["doctor", "--json"])
        checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
        return checks["workers"]["state"], checks["workers"]["found"]

    assert found() == ("ok", "1 live, on 1 node")
    farm.store.workers.register(
        {"id": "w0", "node": "n1", "slots": 1, "pools": []}, ttl=60.0, resting="its disk is full"
    )
    assert found() == ("broken", "node n1 takes no jobs: its disk is full")
    farm.store.workers.heartbeat("w0", warning="its disk is slow")
    assert main(["ls", "workers"]) == 0
    assert capsys.readouterr().err == "node n1: its disk is slow\n"
    assert found() == ("broken", "node n1: its disk is slow")
    older = {"id": "w2", "node": "n2", "slots": 1, "pools": [], "versions": {"farm": "0.0.1"}}
    farm.store.workers.register(older, ttl=60.0)
    farm.store.workers.register({"id": "w3", "node": "n3", "slots": 1, "pools": []}, ttl=0.001)
    wait_until(farm.store.workers.silent, message="n3 is missed")
    said = found()[1]
    assert "node n2 runs release 0.0.1 of the farm" in said
    assert "upgrade control planes first, then workers" in said
    assert "node n3 has been silent for" in said
    assert "it is off, has another name now, or does not reach Redis" in said
    for worker in ("w0", "w1", "w2", "w3"):
        farm.store.workers.leave(worker)
    assert found() == ("absent", "no worker is live: jobs wait")


def test_ctrl_c_detaches_and_says_how_to_return(
    farm: Farm, manifest: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("farm.cli.build_commands.SECOND_THOUGHT", 0)
    monkeypatch.setattr("farm.cli.output._next", interrupted)
    assert main(["submit", manifest, "--json"]) == 8
    out, err = capsys.readouterr()
    (build,) = farm.build_reader.list("main")
    assert f"return:  farm watch {build['id']}" in err
    assert f"cancel:  farm cancel {build['id']}" in err
    assert f"build {build['id']} goes on" in json.loads(out)["error"]["message"]
    assert build["counts"]["queued"] == 2


def test_logs_fetch_ls_inspect(worker: list[Outcome], manifest: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", manifest]) == 0
    capsys.readouterr()
    assert main(["logs", "@latest", "net/onnxruntime-cpu/fp32/static"]) == 0
    assert capsys.readouterr().out == "compiled\n"
    assert main(["logs", "@latest"]) == 2
    assert "2 cells match" in capsys.readouterr().err

    assert main(["ls"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert "SUBMITTED (UTC)" in header and all(re.search(r" B +20\d\d-\d\d-\d\d \d\d:\d\d ", row) for row in rows)
    assert [line.split()[0] for line in (header, *rows)] == [
        "ARTIFACT",
        "net/onnxruntime-cpu/fp16/static",
        "net/onnxruntime-cpu/fp32/static",
    ]
    assert header.split()[1:4] == ["LATENCY", "ERROR", "SIZE"]
    assert all(re.search(r"/static +[\d.]+ [µm]?s +\S+ +\d+ B ", row) for row in rows)
    for what in ("artifacts", "refs", "builds", "workers", "pools"):
        assert main(["ls", what]) == 0
        assert capsys.readouterr().out
        assert main(["ls", what, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["items"]

    assert main(["fetch", "net@latest", "-t", "onnxruntime/cpu", "-p", "fp16", "-o", "out"]) == 0
    assert "checked" in capsys.readouterr().out
    # The test's worker publishes bytes that are no program, and that is said.
    assert main(["inspect", "out/net--onnxruntime-cpu--fp16--static.onnx"]) == 39
    shown = capsys.readouterr()
    assert shown.out.startswith("net/onnxruntime-cpu/fp16/static\n")
    assert "is not an ONNX program" in shown.err
    assert main(["fetch", "net", "-t", "onnxruntime/cpu", "-p", "fp16", "-o", "all", "--family"]) == 0
    assert "all/family.json  1 program, checked" in capsys.readouterr().out
    assert main(["inspect", "all/static"]) == 0
    capsys.readouterr()
    key = json.loads(Path("out/net--onnxruntime-cpu--fp16--static.onnx.artifact.json").read_text())["key"]
    assert main(["inspect", key, "--program"]) == 39
    assert "is not an ONNX program" in capsys.readouterr().err
    for name in (key, key[:8], "net/onnxruntime-cpu/fp16/static", "net/onnxruntime-cpu/fp16/static@latest"):
        assert main(["inspect", name, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["key"] == key


def test_a_list_of_artifacts_is_sorted_and_cut_as_one_asks(
    worker: list[Outcome], manifest: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", manifest]) == 0
    ask = FarmClient.ls

    def ls(self: FarmClient, ref: str = "latest") -> list[Any]:
        half, whole = ask(self, ref)
        bytes_ = {**whole["program"], "size": 1}
        return [{**half, "latency": None}, {**whole, "error": 0.5, "submitted": 1.0, "program": bytes_}]

    monkeypatch.setattr(FarmClient, "ls", ls)
    for sort, first in (("name", "fp16"), ("latency", "fp32"), ("error", "fp16"), ("size", "fp32"), ("age", "fp16")):
        capsys.readouterr()
        assert main(["ls", "--sort", sort, "-n", "1"]) == 0
        assert re.findall("net/onnxruntime-cpu/(.*)/", capsys.readouterr().out) == [first], sort


def test_fetch_takes_the_names_that_builds_print(
    worker: list[Outcome], manifest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(manifest).write_text(MANIFEST.replace("net.onnx}", "net.onnx}\n    batches: [2, 10]").replace("static", ""))
    freeze_manifest(Path(), Path(manifest).read_text(), batch="batch")
    assert main(["submit", manifest]) == 0
    build = re.findall(r"build (b-[0-9a-f]{16})", capsys.readouterr().out)[0]
    assert main(["ls"]) == 0
    header, *names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert header == "ARTIFACT"
    assert main(["ls", "fp32", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["items"]) == 2
    assert main(["ls", "nett"]) == 4
    assert "did you mean `net`?" in capsys.readouterr().err
    assert names == [f"net/onnxruntime-cpu/{precision}/b{size}" for precision in ("fp16", "fp32") for size in (2, 10)]
    assert main(["fetch", f"net/onnxruntime-cpu/fp16/b10@{build}", "-o", "out", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["identifier"] == "net/onnxruntime-cpu/fp16/b10"
    assert main(["fetch", "net", "-t", "onnxruntime-cpu", "-p", "fp32", "-s", "b2", "-o", "other"]) == 0
    capsys.readouterr()
    assert main(["tag", "nightly", build[:8]]) == 0
    assert main(["fetch", f"net/onnxruntime-cpu/fp16/b10@{build[:8]}", "-o", "short"]) == 0
    assert main(["ls", "--ref", "nightly"]) == 0
    assert main(["tag", "r10", build[:8]]) == main(["tag", "r9", build[:8]]) == 0
    capsys.readouterr()
    assert main(["ls", "refs"]) == 0
    assert re.findall(r"^r\d+", capsys.readouterr().out, re.MULTILINE) == ["r9", "r10"]
    for wanted in (["net", "-t", "onnxruntime-cpu", "-p", "fp61", "-s", "b10"], ["net/onnxruntime-cpu/fp61/b10"]):
        assert main(["fetch", *wanted]) == 4
        assert "it has net/onnxruntime-cpu/fp16/b10, " in capsys.readouterr().err
    assert main(["fetch", "net/onnxruntime-cpu/fp16"]) == 2
    assert "add --shape, one of b2, b10" in capsys.readouterr().err
    assert main(["fetch", "net/onnxruntime-cpu"]) == 2
    assert "add --precision" in capsys.readouterr().err


def test_a_ref_is_promoted_rolled_back_and_forgotten(
    worker: list[Outcome], manifest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", manifest]) == 0
    assert main(["tag", "prod"]) == 4
    capsys.readouterr()
    assert main(["tag", "prod", "latest"]) == 0
    said = re.match(r"prod: 2 cells, generation (\d{13}), moved 2", capsys.readouterr().out)
    assert said
    first = int(said[1])
    Path("more.yaml").write_text(MANIFEST.replace("name: net", "name: more"))
    assert main(["submit", "more.yaml"]) == 0
    assert main(["fetch", "more@prod", "-t", "onnxruntime/cpu", "-p", "fp16", "-o", "out"]) == 4
    assert main(["tag", "prod", "latest", "--generation", str(first)]) == 0
    assert main(["fetch", "more@prod", "-t", "onnxruntime/cpu", "-p", "fp16", "-o", "out"]) == 0
    capsys.readouterr()
    assert main(["tag", "prod", "--delete", "--generation", str(first)]) == 2
    assert f"has generation {first + 1}, not generation {first}" in capsys.readouterr().err
    assert main(["tag", "prod", "--previous", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["generation"], len(found["cells"])) == (first + 2, 2)
    assert main(["tag", "prod", "--delete"]) == 0
    assert main(["ls", "refs", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out.partition("\n")[2])
    assert (listed["items"], [ref["namespace"] for ref in listed["refs"]]) == (["latest"], ["main"])
    moved, number = (listed["refs"][0][name] for name in ("moved", "generation"))
    assert main(["ls", "refs"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["latest", str(number), *moved[:16].split("T"), "main"]
    assert main(["tag", "prod", "latest", "--delete"]) == 2


def test_exit_codes_of_fetch(
    farm: Farm,
    worker: list[Outcome],
    manifest: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert main(["submit", manifest]) == 0
    fetch = ["fetch", "net", "-t", "onnxruntime/cpu", "-o", "out", "-p"]
    assert main([*fetch, "int8"]) == 4
    (cell, _) = sorted(farm.build_reader.cells("main", "@latest"), key=lambda cell: str(cell["precision"]))
    farm.artifacts.delete_object(
        f"blobs/sha256/{cell['facts']['program']['digest'][:2]}/{cell['facts']['program']['digest']}"
    )
    assert main([*fetch, "fp16"]) == 39
    monkeypatch.setenv("FARM_API_TOKEN", "wrong")
    assert main([*fetch, "fp32"]) == 5


def test_manifest_errors_come_at_once_and_create_nothing(manifest: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.yaml").write_text(
        MANIFEST.replace("precisions", "precisons").replace("onnxruntime/cpu", "onnxrutime/cpu")
    )
    assert main(["submit", "bad.yaml"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "bad.yaml:3:" in err
    assert "bad.yaml:4:1: unknown field `precisons`" in err
    assert "2 errors; nothing was changed" in err


def test_a_watcher_sees_what_happens_meanwhile(farm: Farm, manifest: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", manifest, "--detach"]) == 0
    codes: list[int] = []
    watching = threading.Thread(target=lambda: codes.append(main(["watch"])))
    watching.start()
    handed = wait_until(lambda: work(farm))
    assert handed == 2
    farm.build_finisher.finish(farm.build_reader.resolve("main", "@latest"))
    watching.join(timeout=60)
    assert codes == [0]
    assert "net/onnxruntime-cpu/fp16/static succeeded" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_keeps_its_data_to_itself_answers_and_ends_on_a_signal(
    settings: Settings, number: signal.Signals
) -> None:
    settings.data_dir.chmod(0o755)
    (settings.data_dir / "builds.sqlite3").touch(0o644)
    environment = {**os.environ, **settings.environment(), "PYTHONPATH": str(Path(package.__file__).parents[1])}
    command = [sys.executable, "-m", "farm", "serve", "--port", "0", "--json"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as server:
        assert server.stdout is not None
        lines = [server.stdout.readline() for _ in range(3)]
        url = json.loads(b"".join(lines))["api_url"]
        try:
            assert httpx.get(f"{url}/v1/health", timeout=60).json()["status"] == "ok"
            httpx.get(f"{url}/v1/history", params={"cell": "net/onnxruntime-cpu/fp32/static"}, timeout=60)
        finally:
            server.send_signal(number)
        assert server.wait(timeout=60) == 0
    modes = {path.name: path.stat().st_mode & 0o777 for path in settings.data_dir.glob("builds.sqlite3*")}
    assert modes["builds.sqlite3"] == 0o600
    assert not [mode for mode in modes.values() if mode & 0o077]
    assert settings.data_dir.stat().st_mode & 0o777 == 0o700


def test_completion_knows_ids_refs_artifacts_and_targets(
    worker: list[Outcome], manifest: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["submit", manifest, "--label", "run=7"]) == 0
    build = re.findall(r"build (b-[0-9a-f]{16})", capsys.readouterr().out)[0]
    monkeypatch.setattr(transport, "RETRY_DELAYS", transport.RETRY_DELAYS)  # It changes them for its whole process.
    monkeypatch.setattr(connection, "PATIENCE", 60)
    monkeypatch.setattr(sys, "argv", ["farm"])
    monkeypatch.setenv("_FARM_COMPLETE", "complete_bash")

    def completed(line: str) -> list[str]:
        """What bash would offer at the end of a line."""
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
        main([])
        out, err = capsys.readouterr()
        assert err == ""
        return str(out).split()

    assert completed("farm status b-") == [build]
    assert completed("farm watch ") == ["@latest", build, "demo", "run=7"]
    assert completed("farm logs demo net/onnxruntime-cpu/fp3") == ["net/onnxruntime-cpu/fp32/static"]
    assert completed("farm fetch n") == ["net"]
    assert completed("farm fetch net/") == ["net/onnxruntime-cpu/fp16/static", "net/onnxruntime-cpu/fp32/static"]
    assert completed("farm fetch net@la") == ["net@latest"]
    assert completed("farm inspect net/onnxruntime-cpu/fp16") == ["net/onnxruntime-cpu/fp16/static"]
    assert completed("farm inspect n") == [], "so the shell offers files"
    assert completed("farm ls w") == ["workers"]
    assert completed("farm fetch net -t onnx") == ["onnxruntime/cpu"]
    assert completed("farm fetch net -t onnxruntime/cpu -p ") == ["fp16", "fp32"]
    assert completed("farm drain ") == ["w1"]
    monkeypatch.setenv("FARM_API_URL", "http://127.0.0.1:9")
    assert completed("farm fetch n") == []
    # As bash asks for it, in a process of its own.
    environment = {**os.environ, "PYTHONPATH": str(Path(package.__file__).parents[1])}
    environment |= {"COMP_WORDS": "farm ls w", "COMP_CWORD": "2"}
    done = subprocess.run([sys.executable, "-m", "farm"], env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.stderr) == (["workers"], "")


def test_ctrl_c_says_what_exists(
    farm: Farm, manifest: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(FarmClient, "submit", interrupted)
        assert main(["submit", manifest]) == 8
    assert "stopped: nothing was submitted" in capsys.readouterr().err
    assert farm.build_reader.list("main", 10) == []
    with monkeypatch.context() as patch:
        patch.setattr(FarmClient, "fetch", interrupted)
        assert main(["fetch", "net/onnxruntime-cpu/fp32/static"]) == 8
    assert "stopped: no file is half written" in capsys.readouterr().err


def test_earlier_builds_that_go_on_are_named(
    client: FarmClient, manifest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", manifest, "--detach"]) == 0
    build = capsys.readouterr().out.strip()
    build_commands._say_unfinished(client)
    err = capsys.readouterr().err
    assert f"an earlier build goes on, too: {build} demo (2 queued)\n  cancel:  farm cancel {build}\n" in err
    assert main(["status", "demo", "--json"]) == 0, "a build may be called by its manifest's name"
    assert json.loads(capsys.readouterr().out)["build"]["id"] == build
    assert main(["cancel", "nightly"]) == 4
    Path(manifest).write_text(Path(manifest).read_text().replace("name: demo", "name: face"))
    assert main(["submit", manifest, "--detach"]) == 0
    face = capsys.readouterr().out.strip()
    assert client.find_build("face") == face, "also by one of hex digits, as the start of an id is"
    assert client.find_build(build[2:8]) == build


def test_a_run_goes_on_with_the_build_of_the_same_manifest_that_was_stopped(
    client: FarmClient, manifest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", manifest, "--detach"]) == 0
    build = capsys.readouterr().out.strip()
    assert build_commands._stopped_before(client, freeze(manifest)) == build
    assert f"going on with {build}, which was stopped" in capsys.readouterr().err
    assert build_commands._stopped_before(client, freeze(manifest, labels={"team": "x"})) == ""
    assert len(client.builds()) == 1
    build_commands._say_unfinished(client, but=build)
    client.cancel(build)
    assert build_commands._stopped_before(client, freeze(manifest)) == "", "it has ended"
    assert capsys.readouterr().err == ""


def test_cancel_asks_a_person_first(
    client: FarmClient, manifest: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["submit", manifest, "--detach"]) == 0
    build = capsys.readouterr().out.strip()

    def types(text: str) -> None:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        monkeypatch.setattr("sys.stdin.isatty", lambda: True)

    types("n\n")
    assert main(["cancel", build]) != 0
    assert f"cancel 2 cells of {build} demo?" in capsys.readouterr().err
    assert client.build(build)["counts"]["queued"] == 2
    types("")
    assert main(["cancel", build, "--yes"]) == 0
    assert client.build(build)["counts"]["cancelled"] == 2


def test_of_a_long_log_of_a_hit_the_end_is_shown(
    worker: list[Outcome], manifest: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A gigabyte of it took seven times as much memory."""
    monkeypatch.setattr("farm.client.artifact_apis.SHOWN_LOG", 4)
    monkeypatch.setattr("farm.cli.cell_commands.PIECE", 1)
    assert main(["submit", manifest]) == main(["submit", manifest]) == 0
    capsys.readouterr()
    assert main(["logs", "@latest", "fp16"]) == 0
    said, end = capsys.readouterr().out.splitlines()
    assert said.startswith("(5 bytes before this are in blob ") and end == "led"


def test_lists_as_json_are_objects(manifest: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["token", "ls", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"items": []}
    assert main(["token", "ls"]) == 0
    assert capsys.readouterr() == ("", "no tokens yet: farm token create NAME --namespace NS\n")
    assert main(["history", "no/such/cell", "--json"]) == 4
    assert json.loads(capsys.readouterr().out)["error"]["kind"] == "NotFound"


def test_a_log_is_followed_to_its_end(worker: list[Outcome], manifest: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", manifest, "--detach", "--label", "run=8"]) == 0
    build = capsys.readouterr().out.strip()
    assert main(["logs", build, "fp16", "--follow"]) == 0
    assert capsys.readouterr().out == "compiled\n"
    for named in ("demo", "run=8"):
        assert main(["logs", named, "fp16"]) == 0
        assert capsys.readouterr().out == "compiled\n"
        assert main(["pause", named]) == 2
        assert f"build {build} has ended" in capsys.readouterr().err
    assert main(["pause", "demos"]) == 4
    assert "the pools are onnxruntime-cpu." in capsys.readouterr().err
    assert main(["logs", build, "fp16", "--follow", "--json"]) == 2
    assert main(["status", "--label", "run=8"]) == 0
    assert "run=8" in capsys.readouterr().out
    assert main(["status", "--label", "run=9"]) == 0
    assert "no build has the label run=9" in capsys.readouterr().err

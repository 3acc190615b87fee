"""Failures that somebody acknowledged: over the API and on pages, and what later builds make of them."""

from __future__ import annotations

import secrets
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import httpx
import pytest

from farm.app import Farm
from farm.artifacts.tokens import Role
from farm.builds.known_failures import LONGEST, today
from farm.client.client import FarmClient
from farm.client.freezing import Frozen
from farm.jobs.state import FailureKind, Outcome
from farm.results.report import JudgedCell
from tests.support.api_farm import MANIFEST, freeze_manifest, work

FP32, FP16 = (f"net/onnxruntime-cpu/{precision}/static" for precision in ("fp32", "fp16"))
UNTIL = str(today() + timedelta(days=7))
KNOWN = {"kind": "compiler_error", "reason": "bug 4711", "until": UNTIL, "link": "https://bugs.example/4711"}


@pytest.fixture
def asking(farm: Farm, url: str) -> httpx.Client:
    return httpx.Client(
        base_url=url, timeout=60, headers={"Authorization": f"Bearer {farm.settings.api_token.get_secret_value()}"}
    )


def failing(kind: FailureKind) -> Outcome:
    return Outcome.failure(kind, "no kernel")


def submit(client: FarmClient, frozen: Frozen) -> str:
    """Submit it as a new build; return its id."""
    again = {**frozen.submission, "build_id": f"b-{secrets.token_hex(8)}"}
    return str(client.submit(replace(frozen, submission=again))["id"])


def built(farm: Farm, client: FarmClient, frozen: Frozen, kind: FailureKind) -> tuple[int, dict[str, JudgedCell]]:
    """Submit a build of which everything fails; return the exit code and the cells."""
    build_id = submit(client, frozen)
    while work(farm, lambda *_: failing(kind)) or farm.store.jobs.promote():
        pass
    farm.build_finisher.finish(build_id)
    report = farm.build_reader.report("main", build_id)
    assert report["build"]["verdict"]
    return report["build"]["verdict"]["exit_code"], {cell["identifier"]: cell for cell in report["cells"]}


def test_a_later_build_expects_what_was_acknowledged(
    farm: Farm, client: FarmClient, frozen: Frozen, asking: httpx.Client
) -> None:
    assert built(farm, client, frozen, FailureKind.COMPILER_ERROR)[0] == 1
    for _ in range(2):
        answer = asking.put("/v1/acknowledged", params={"cell": FP32}, json=KNOWN)
        assert answer.status_code == 200 and answer.json()["by"] == "admin"
    code, cells = built(farm, client, frozen, FailureKind.COMPILER_ERROR)
    assert code == 1 and not cells[FP16]["as_expected"]
    assert cells[FP32]["as_expected"] and cells[FP32]["expected_reason"] == "bug 4711"
    asking.put("/v1/acknowledged", params={"cell": FP16}, json=KNOWN)
    assert [entry["cell"] for entry in asking.get("/v1/acknowledged").json()["items"]] == [FP16, FP32]
    assert built(farm, client, frozen, FailureKind.COMPILER_ERROR)[0] == 0
    assert built(farm, client, frozen, FailureKind.ACCURACY)[0] != 0, "another failure is none that is known"
    build_id = submit(client, frozen)
    work(farm)
    farm.build_finisher.finish(build_id)
    verdict = farm.build_reader.get("main", build_id)["verdict"]
    assert verdict and verdict["exit_code"] == 0, "a mended cell makes no manifest out of date"
    for status in (204, 404):
        assert asking.delete("/v1/acknowledged", params={"cell": FP32}).status_code == status


def test_a_retry_expects_nothing_that_was_taken_back(
    farm: Farm, client: FarmClient, asking: httpx.Client, tmp_path: Path
) -> None:
    frozen = freeze_manifest(tmp_path, MANIFEST.replace("[fp32, fp16]", "[fp32]"))
    asking.put("/v1/acknowledged", params={"cell": FP32}, json=KNOWN)
    assert built(farm, client, frozen, FailureKind.COMPILER_ERROR)[0] == 0
    asking.delete("/v1/acknowledged", params={"cell": FP32})
    new_id = f"b-{secrets.token_hex(8)}"
    client.retry(client.find_build("@latest"), failed=False, new_id=new_id)
    work(farm, lambda *_: failing(FailureKind.COMPILER_ERROR))
    farm.build_finisher.finish(new_id)
    verdict = client.build(new_id)["verdict"]
    assert verdict and verdict["exit_code"] == 1


def test_a_failed_cell_is_not_called_a_first_compile(
    farm: Farm, client: FarmClient, frozen: Frozen, tmp_path: Path
) -> None:
    assert {cell["reason"] for cell in client.plan(frozen)["cells"]} == {"first compile"}
    built(farm, client, frozen, FailureKind.COMPILER_ERROR)
    assert {cell["reason"] for cell in client.plan(frozen)["cells"]} == {"failed last time: compiler_error"}


def test_the_manifest_wins(farm: Farm, client: FarmClient, asking: httpx.Client, tmp_path: Path) -> None:
    entry = "expected:\n  - {model: net, precision: fp32, kind: accuracy, reason: reviewed}\n"
    asking.put("/v1/acknowledged", params={"cell": FP32}, json=KNOWN)
    code, cells = built(farm, client, freeze_manifest(tmp_path, MANIFEST + entry), FailureKind.COMPILER_ERROR)
    assert code == 1 and not cells[FP32]["as_expected"] and cells[FP32]["expected_reason"] == "reviewed"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"until": str(today() - timedelta(days=1))}, "not within"),
        ({"until": str(today() + timedelta(days=LONGEST + 1))}, "not within"),
        ({"until": "2026-02-31"}, "not a day"),
        ({"kind": "laziness"}, "not a kind of failure"),
        ({"link": "javascript:alert(1)"}, "link"),
        ({"reason": ""}, "reason"),
    ],
)
def test_what_has_no_end_or_no_sense_is_refused(asking: httpx.Client, changes: dict[str, str], said: str) -> None:
    answer = asking.put("/v1/acknowledged", params={"cell": FP32}, json={**KNOWN, **changes})
    assert answer.status_code in (400, 422) and said in answer.text


def test_the_page_of_a_failed_cell_acknowledges_it(
    farm: Farm, url: str, client: FarmClient, frozen: Frozen, asking: httpx.Client
) -> None:
    built(farm, client, frozen, FailureKind.COMPILER_ERROR)
    reader = farm.tokens.create("guest", Role.READER, "main")
    page = f"/ui/ns/main/builds/@latest/cells/{FP32}"
    assert "I know this failure" in asking.get(page).text
    assert "I know this failure" not in httpx.get(url + page, headers={"Cookie": f"farm={reader}"}, timeout=60).text
    form = {"cell": FP32, **KNOWN}
    for headers, status in (
        ({}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": url, "Authorization": f"Bearer {reader}"}, 403),
        ({"Origin": url}, 303),
    ):
        assert asking.post("/ui/ns/main/known", data=form, headers=headers).status_code == status
    assert "bug 4711" in asking.get("/ui/ns/main/known").text and "Known until" in asking.get(page).text
    assert "Known until" in asking.get("/ui/ns/main/builds/@latest").text
    assert asking.post("/ui/ns/main/known/forget", data=form, headers={"Origin": url}).status_code == 303
    assert "bug 4711" not in asking.get("/ui/ns/main/known").text

"""What scripts in Python do: submit, wait, look; errors are what `farm watch` exits with."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from farm.app import Farm
from farm.client.client import FarmClient
from farm.client.freezing import Frozen, freeze
from farm.control.loops import fail_unserved
from farm.errors import (
    CompileFailed,
    ExitCode,
    FarmError,
    FarmFault,
    GateFailed,
    ManifestError,
    StillRunning,
    UsageError,
)
from farm.jobs.state import FailureKind, Outcome
from tests.support.api_farm import MANIFEST, work
from tests.support.helpers import wait_until

CONTENT: dict[str, Any] = {
    "version": 1,
    "name": "demo",
    "targets": ["onnxruntime/cpu"],
    "precisions": ["fp32", "fp16"],
    "models": [{"name": "net", "source": {"path": "net.onnx"}}],
}


def test_the_content_of_a_manifest_is_frozen_like_a_file(tmp_path: Path, frozen: Frozen, client: FarmClient) -> None:
    made = freeze(CONTENT, folder=tmp_path, cache=tmp_path / "cache")
    assert made.submission["models"] == frozen.submission["models"]
    assert made.files.keys() == frozen.files.keys()
    plans = [client.plan(each)["cells"] for each in (made, frozen)]
    assert [cell["key"] for cell in plans[0]] == [cell["key"] for cell in plans[1]]
    globbed = {**CONTENT, "models": [{"source": {"glob": "*.onnx"}}]}
    assert list(freeze(globbed, folder=tmp_path).submission["models"]) == ["net"]
    named = {
        **CONTENT,
        "models": [{"name": "net", "source": {"path": tmp_path / "net.onnx"}}],
        "labels": {"who": "\U0001f600"},
    }
    assert freeze(named).submission["models"] == frozen.submission["models"]
    with pytest.raises(ManifestError, match="unknown field `precisons`"):
        freeze({**CONTENT, "precisons": ["fp32"]}, folder=tmp_path)
    for value in (object(), float("nan")):
        with pytest.raises(UsageError, match="not the content of a manifest"):
            freeze({**CONTENT, "salt": value}, folder=tmp_path)


def test_wait_returns_the_report_of_a_green_build(farm: Farm, client: FarmClient, frozen: Frozen) -> None:
    build = client.submit(frozen)
    assert (build.id, build["id"], build.get("plan")) == (frozen.build_id, frozen.build_id, build["plan"])
    assert build.url == f"{client.url}/ui/ns/main/builds/{build.id}"
    with pytest.raises(StillRunning, match=f"build {build.id} goes on after 0 seconds") as caught:
        build.wait(timeout=0)
    assert caught.value.exit_code == ExitCode.INTERRUPTED

    def later() -> None:
        work(farm)
        farm.build_finisher.finish(build.id)

    thread = threading.Thread(target=later)
    thread.start()
    said: list[str] = []
    report = build.wait(timeout=60, progress=said.append)
    thread.join()
    assert said[-1] == "2 succeeded" and len(said) == len(set(said))
    assert "succeeded</td>" in build._repr_html_()
    assert [cell["state"] for cell in report["cells"]] == ["succeeded", "succeeded"]
    assert client.attach(build.id[:9]).wait() == report
    assert client.retry(build.id).document["retries"] == build.id


def unsupported(farm: Farm) -> None:
    work(farm, lambda *_: Outcome.failure(FailureKind.UNSUPPORTED_OPERATOR, "as the test wants it"))


def nobody_there(farm: Farm) -> None:
    farm.store.workers.leave("w1")
    wait_until(lambda: fail_unserved(farm.store, 0.0), message="its jobs have failed")


@pytest.mark.parametrize(
    ("happens", "error", "code"), [(unsupported, CompileFailed, 1), (nobody_there, FarmFault, 6), (work, GateFailed, 3)]
)
def test_wait_raises_as_watch_exits(
    farm: Farm, client: FarmClient, frozen: Frozen, happens: Callable[[Farm], Any], error: type[FarmError], code: int
) -> None:
    text = MANIFEST + ("budgets: {size: 10B}\n" if happens is work else "")
    build = client.submit(Frozen({**frozen.submission, "manifest": text}, frozen.files))
    happens(farm)
    farm.build_finisher.finish(build.id)
    with pytest.raises(error, match=f"build {build.id}: ") as caught:
        build.wait(timeout=60)
    assert int(caught.value.exit_code) == code
    verdict = client.build(build.id)["verdict"]
    assert verdict and verdict["exit_code"] == code


def test_a_farm_that_is_away_for_a_while_does_not_end_the_wait(
    farm: Farm, url: str, frozen: Frozen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that stays away does."""
    away: list[bool] = []

    class Sometimes(httpx.HTTPTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            if away and away.pop():
                raise httpx.ConnectError("away")
            return super().handle_request(request)

    monkeypatch.setattr("farm.client.transport.RETRY_DELAYS", ())
    with FarmClient(url, farm.settings.api_token.get_secret_value(), transport=Sometimes()) as client:
        build = client.submit(frozen)
        work(farm)
        farm.build_finisher.finish(build.id)
        away += [True] * 3
        assert build.wait(timeout=60)["build"]["state"] == "reported"
        monkeypatch.setattr("farm.client.client.PATIENCE", 0.2)
        away += [True] * 100
        with pytest.raises(FarmFault, match="cannot reach the farm"):
            build.wait(timeout=60)

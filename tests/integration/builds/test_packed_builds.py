"""Builds that ended long ago: their records are packed, and who asks gets the answers of before."""

from __future__ import annotations

from typing import Any

import pytest

from farm.app import Farm
from farm.artifacts.storage import build_key
from farm.builds import finishing
from farm.cli.cell_commands import follow_log
from farm.client.client import FarmClient
from farm.client.freezing import Frozen
from farm.jobs.state import FailureKind, Outcome
from tests.support.api_farm import succeed, work


def is_packed(farm: Farm, build: str) -> bool:
    return not farm.store.builds.states(build)


@pytest.fixture
def build(farm: Farm, client: FarmClient, frozen: Frozen) -> str:
    """A build with one success and one failure, reported."""
    build = client.submit(frozen)["id"]
    log, _ = farm.artifacts.put_blob_bytes(b"no kernel\n")

    def outcome(job_id: str, order: dict[str, Any], key: str) -> Outcome:
        if "/fp16/" in order["identifier"]:
            return Outcome.failure(FailureKind.COMPILER_ERROR, "no kernel", log=log)
        return succeed(farm)(job_id, order, key)

    work(farm, outcome)
    farm.build_finisher.finish(build)
    return build


def told(client: FarmClient, build: str) -> dict[str, Any]:
    """What the API says of a build and its jobs."""
    cells = client.cells(build)
    jobs = [str(cell["job"]) for cell in cells]
    return {
        "build": client.build(build),
        "report": client.report(build),
        "jobs": [client.jobs.get(job) for job in jobs],
        "logs": [client.jobs.log(job) for job in jobs],
        "followed": [list(follow_log(client, job)) for job in jobs],
        "reproductions": [client.jobs.reproduction(job) for job in jobs],
        "of cells": [client.jobs.reproduction(build, cell["identifier"]) for cell in cells],
        "trace": client.transport.get(f"/v1/builds/{build}/trace.json", dict[str, Any]),
    }


def test_a_packed_build_is_told_as_before(
    farm: Farm, client: FarmClient, frozen: Frozen, build: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = told(client, build)
    started = next(change["id"] for change in client.watch(build))
    farm.build_finisher.pack_reported()
    assert not is_packed(farm, build), "it has just ended"
    monkeypatch.setattr(finishing, "GRACE", -60.0)
    farm.build_finisher.pack_reported()
    farm.build_finisher.pack_reported()
    assert is_packed(farm, build)
    assert told(client, build) == before
    for changes in (client.watch(build), client.watch(build, after=started), client.changes(build, after=started)):
        assert next(change["type"] for change in changes) == "reset", "read the report"
    assert client.submit(frozen)["id"] == build, "a repeated submission"
    assert (
        client.submit(Frozen({**frozen.submission, "build_id": "b-" + "7" * 16}, frozen.files))["counts"]["hits"] == 1
    )
    retried = client.retry(build)
    assert (retried["retries"], retried["counts"]["queued"]) == (build, 1)
    assert told(client, build)["report"] == before["report"]


@pytest.mark.damaged
def test_a_build_whose_report_cannot_be_read_keeps_its_records(
    farm: Farm, client: FarmClient, build: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finishing, "GRACE", -60.0)
    farm.artifacts.put_object(build_key("main", build, "report.json"), b"{")
    farm.build_finisher.pack_reported()
    assert not is_packed(farm, build)
    assert [cell["state"] for cell in client.cells(build)] == ["succeeded", "failed"]

"""Hostile manifests: refused with their place, at small cost, where they are written and where they are submitted."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from farm.app import Farm
from farm.client.client import FarmClient
from farm.client.freezing import Frozen
from tests.chaos.report import Fault
from tests.support.hostile_manifests import OPENED_BY_THE_CLIENT, hostile
from tests.support.hostile_manifests import __file__ as corpus


@pytest.mark.fault("22")
def test_every_one_is_refused_with_its_line(fault: Fault, tmp_path: Path) -> None:
    """In a process of its own, which reads them all in 200 MiB; CPU time and not the clock, since others run too.

    And not seconds either: a core that works for others too, on its other thread, takes longer for the same.
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(corpus).parents[2])}
    done = subprocess.run([sys.executable, corpus, str(tmp_path)], capture_output=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    answer = json.loads(done.stdout)
    problems = answer["problems"]
    seconds, name = answer["slowest"]
    fault.measured(
        refused=sum(map(bool, problems.values())),
        slowest=f"{seconds:.2f} s: {name}",
        honest=answer["honest"],
        memory_mib=answer["memory"] >> 20,
    )
    assert len(problems) >= fault.count.manifests
    assert [name for name, *_ in hostile() if not problems[name]] == [], "each is refused"
    wrong = [name for name, _, line in hostile() if line and line not in [found for found, _ in problems[name]]]
    assert wrong == [], "each at its line"
    assert all(line > 0 for found in problems.values() for line, _ in found)
    assert all(len(message) < 1000 for found in problems.values() for _, message in found)
    assert answer["memory"] <= 200 << 20
    assert seconds <= 1.5 * answer["honest"], name


@pytest.mark.fault("22-api")
def test_the_api_refuses_them_too_and_makes_nothing(
    fault: Fault, farm: Farm, client: FarmClient, frozen: Frozen
) -> None:
    client.upload(frozen.files)
    before = list(farm.artifacts.list_objects(""))
    refused = 0
    for name, content, _ in hostile():
        # JSON carries text alone: what is not text ends at the client.
        text = content.decode(errors="ignore")
        if name in OPENED_BY_THE_CLIENT or text.encode() != content:
            continue
        submission = {
            **frozen.submission,
            "build_id": f"b-{secrets.token_hex(8)}",
            "manifest": text,
        }
        answer = client.transport._api.post("/v1/builds", json=submission)
        assert answer.status_code == 422, (name, answer.text)
        assert answer.json()["title"] in ("Manifest error", "Usage error"), name
        refused += 1
    fault.measured(refused=refused, builds=len(client.builds()))
    assert refused >= fault.count.manifests
    assert list(farm.artifacts.list_objects("")) == before
    assert client.builds() == []

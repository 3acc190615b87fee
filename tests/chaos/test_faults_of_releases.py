"""Upgrades: the last release and this code share one store, as they do while a farm is upgraded and if it goes back."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.chaos.conftest import Rigs
from tests.chaos.report import Fault
from tests.support.jobs import ROOT
from tests.support.releases import COMMIT


@pytest.fixture
def last_release(tmp_path: Path) -> Path:
    """The code of the last release."""
    packed, folder = tmp_path / "release.tar", tmp_path / "release"
    found = subprocess.run(["git", "-C", ROOT, "archive", "-o", packed, COMMIT], check=False)
    if found.returncode:
        pytest.skip(f"this clone does not have the commit of the last release, {COMMIT}")
    with tarfile.open(packed) as files:
        files.extractall(folder, filter="data")
    return folder


@pytest.mark.fault("8")
def test_the_last_release_and_this_code_work_on_one_store(fault: Fault, rig: Rigs, last_release: Path) -> None:
    """Each serves in turn, with the other as its worker; then this code's server reads all that both stored."""
    farm = rig(log_level="warning")
    for server, worker in ((last_release, ROOT), (ROOT, last_release)):
        client, node = farm.serve(root=server), farm.node(root=worker)
        build = farm.submit(client, fault.count.jobs // 2)
        ends = {one["end"] for cell in farm.wait(build, timeout=900) for one in farm.attempts(cell)}
        assert ends == {"succeeded"}
        assert client.report(build)["build"]["verdict"]["exit_code"] == 0
        node.stop()
        farm.server.stop()
        for log in (node.log, farm.server.log):
            assert "Traceback" not in log.read_text(errors="replace")
    client = farm.serve()
    assert {build["id"] for build in client.builds()} == set(farm.builds)
    fault.measured(**farm.ledger())
    assert fault.figures["succeeded"] == fault.count.jobs // 2 * 2

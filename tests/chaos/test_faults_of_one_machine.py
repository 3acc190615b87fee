"""The farm under faults that a laptop sees: kill -9 of a worker, of each part, of the farm itself, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from farm.artifacts.s3 import S3Store
from farm.local.embedded import EmbeddedFarm
from tests.support.embedded_farms import Run, none_runs, processes_of, settings_for
from tests.support.farm_command import Command, command
from tests.support.helpers import wait_until

SLOW = """
version: 1
name: slow
targets: [onnxruntime/cpu]
precisions: [int8]
models:
  - name: squeezenet
    source: {package: onnx/backend/test/data/light/light_squeezenet.onnx}
    calibration: {generate: 32, seed: 1}
"""
"""A real compile that takes some seconds: calibration runs the net on 64 samples."""


@pytest.fixture
def farm(tmp_path: Path) -> Iterator[Command]:
    """`farm` in an empty folder; nothing of it may be left running afterwards."""
    runner = command(tmp_path)
    yield runner
    # A compiler ends a moment after its worker, when it sees that its lifeline is closed.
    _, left = psutil.wait_procs(runner.processes(), timeout=10)
    for process in left:
        process.kill()
    assert left == [], "processes were left running"


def compiling(farm: Command) -> list[psutil.Process]:
    """Processes of compilers at work on a job: the runner started by path, in the attempt's folder."""
    work = str(farm.folder / "data" / "work")
    return [
        process
        for process in psutil.process_iter()
        if any("runner/child.py" in word for word in words(process))
        and any(word.startswith(work) and "/j-" in word for word in words(process))
    ]


def alive(process: psutil.Process) -> bool:
    """Whether a process still does something; one that is dead and not yet reaped does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def words(process: psutil.Process) -> list[str]:
    try:
        return [*process.cmdline(), process.cwd()]
    except psutil.Error:
        return []


def test_a_job_of_a_killed_worker_runs_again_and_is_published_once(farm: Command) -> None:
    (farm.folder / "slow.yaml").write_text(SLOW)
    run = farm.start("run", "slow.yaml", "--json")
    wait_until(lambda: compiling(farm), timeout=180)
    doomed = [process for process in farm.processes() if "tasks" in words(process)]
    assert doomed
    children = compiling(farm)
    for process in doomed:
        process.kill()
    wait_until(lambda: not any(alive(process) for process in children), message="compilers are gone")
    output, _ = run.communicate(timeout=300)
    report, _ = json.JSONDecoder().raw_decode(output, output.index("{"))
    cell = report["cells"][0]
    assert cell["state"] == "succeeded", cell
    assert cell["attempt"] == 2


def test_nothing_is_left_running_after_the_farm_is_killed(farm: Command) -> None:
    manifest = farm.folder / "slow.yaml"
    manifest.write_text(SLOW)
    run = farm.start("run", str(manifest))
    wait_until(lambda: compiling(farm), timeout=180)
    assert len(farm.processes()) >= 5
    run.kill()
    run.communicate()
    wait_until(lambda: not farm.processes(), message="all processes of the farm are gone")
    # The next run takes the build up where it was, from the same folder.
    again = farm.json("run", str(manifest))
    assert again["build"]["verdict"]["exit_code"] == 0
    assert list((farm.folder / "data" / "work").glob("*/*/*")) == [], "the killed attempt left its files"


def test_ctrl_c_stops_the_farm_and_says_how_to_go_on(farm: Command, tmp_path: Path) -> None:
    manifest = farm.folder / "slow.yaml"
    manifest.write_text(SLOW)
    run = farm.start("run", str(manifest))
    wait_until(lambda: compiling(farm), timeout=180)
    run.send_signal(signal.SIGINT)
    output, _ = run.communicate(timeout=120)
    assert run.returncode == 8
    assert "farm run" in output


def test_a_part_that_dies_is_started_again(tmp_path: Path) -> None:
    """At its old address, and with its data."""
    farm = EmbeddedFarm(settings_for(tmp_path))
    with farm as settings:
        store = S3Store.from_settings(settings)
        digest, size = store.put_blob_bytes(b"kept")
        parts = {server.name: server for server in farm._servers}
        pids = {name: server.pid for name, server in parts.items()}
        assert set(pids) == {"valkey", "weed", "server", "worker"}
        for pid in pids.values():
            assert pid
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: all(parts[name].pid not in (None, pid) for name, pid in pids.items()), timeout=180)
        wait_until(lambda: parts["server"].ready() and parts["worker"].ready(), timeout=180)
        assert store.has_blob(digest, size)


def test_a_killed_farm_leaves_nothing_running_and_starts_again(tmp_path: Path) -> None:
    """kill -9 of the process that runs it: its parts go within seconds, what was stored is there after the
    restart."""
    run = Run(tmp_path)
    url = run.wait_until_up()
    assert len(run.processes) >= 8, "four parts, each with its guard"
    written = json.loads((tmp_path / "farm.json").read_text())
    settings = settings_for(tmp_path, **written)
    digest, size = S3Store.from_settings(settings).put_blob_bytes(b"kept")
    run.kill()
    wait_until(lambda: none_runs(run.processes))
    assert (tmp_path / "farm.json").exists(), "stale, and nobody minds"
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, timeout=60)

    farm = EmbeddedFarm(settings_for(tmp_path))
    with farm as settings:
        assert not farm.joined
        assert settings.s3_access_key.get_secret_value() == written["s3_access_key"]
        assert S3Store.from_settings(settings).has_blob(digest, size)
        processes = processes_of(farm)
    assert len(processes) >= 8
    assert none_runs(processes)
    assert not (tmp_path / "farm.json").exists()

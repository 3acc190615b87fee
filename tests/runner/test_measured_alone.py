"""Two worker processes of one host with real children: what measures is alone, and what pauses loses nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from farm.compiling import alone, cgroups
from farm.compiling.alone import Clock, Host
from farm.compiling.child_process import OnMessage, run_child
from farm.compiling.failures import ChildEnd, ChildLimits, EndedBy
from farm.jobs.state import PAUSED, WAITS_FOR_TURN
from farm.targets.compilers import compilers, filled
from tests.integration.node.test_node_workers import standin
from tests.support.helpers import alive, in_a_thread, wait_until
from tests.support.places import ROOT
from tests.support.reaching import HOSTILE

WORKER = """
import dataclasses, json, sys
from farm.compiling import cgroups
from pathlib import Path
from farm.compiling.alone import Clock, Host
from farm.compiling.child_process import run_child
from farm.compiling.failures import ChildLimits

folder, request, limits = Path(sys.argv[1]), json.loads(sys.argv[2]), ChildLimits(**json.loads(sys.argv[3]))
if sys.argv[5] == "False":
    cgroups.find = lambda: cgroups.Groups(None, "as the test wants it")
clock = Clock()
end = run_child(request, log_path=folder / f"{request['do']}.txt", folder=folder, script=Path(sys.argv[4]),
                limits=limits, host=Host(folder), clock=clock)
print(json.dumps({"ok": end.ok, "by": end.by, "seconds": clock(), "paused": clock.lost, "shared": end.shared}))
"""


class OtherWorker:
    """A process that runs one child."""

    def __init__(
        self, folder: Path, do: str, *, grouped: bool, limits: dict[str, float] | None = None, **fields: Any
    ) -> None:
        self.at, self.until = folder / f"{do}-at", folder / f"{do}-until"
        request = {"do": do, "action": "hostile", "at": str(self.at), "until": str(self.until), **fields}
        command = [sys.executable, "-c", WORKER, str(folder), json.dumps(request), json.dumps(limits or {})]
        self.process = subprocess.Popen(
            [*command, str(HOSTILE), str(grouped)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )

    @property
    def count(self) -> int:
        return self.at.stat().st_size if self.at.exists() else 0

    def counts_on(self) -> None:
        before = self.count
        wait_until(lambda: self.count > before, message="its child works")

    @property
    def stands_still(self) -> bool:
        launchers = psutil.Process(self.process.pid).children()
        guards = [guard for launcher in launchers for guard in launcher.children()]
        below = [each for guard in guards for each in guard.children(True)]
        return bool(below) and all(each.status() == psutil.STATUS_STOPPED or is_frozen(each.pid) for each in below)

    def end(self) -> dict[str, Any]:
        self.until.touch()
        said, _ = self.process.communicate(timeout=60)
        found: dict[str, Any] = json.loads(said)
        return found


Start = Callable[..., OtherWorker]


def is_frozen(pid: int) -> bool:
    """Whether the kernel has stopped the control group that a process is in."""
    folder = cgroups.find().folder
    group = Path(f"/proc/{pid}/cgroup").read_text().rpartition("0::")[2].split()[0]
    events = (folder or Path()) / Path(group).name / "cgroup.events"
    return folder is not None and events.exists() and "frozen 1" in events.read_text()


@pytest.fixture(params=["groups", "no groups"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Start]:
    """Starts workers whose children are paused by `cgroup.freeze`, or by SIGSTOP."""
    workers = []
    if request.param == "groups" and not cgroups.find().folder:
        pytest.skip(f"no control group can be made here, so none can be frozen: {cgroups.find()}")

    def make(do: str, **options: Any) -> OtherWorker:
        workers.append(OtherWorker(tmp_path, do, grouped=request.param == "groups", **options))
        return workers[-1]

    yield make
    for worker in workers:
        worker.process.kill()
        worker.process.communicate()


def run_here(
    folder: Path,
    do: str,
    host: Host,
    cancelled: threading.Event,
    clock: Clock | None = None,
    on_message: OnMessage | None = None,
    **fields: Any,
) -> ChildEnd:
    request: Any = {"do": do, "action": "hostile", "at": str(folder / "here"), "until": str(folder / "done"), **fields}
    limits = ChildLimits(time=60)
    log = folder / "here.txt"
    return run_child(
        request,
        log_path=log,
        folder=folder,
        script=HOSTILE,
        limits=limits,
        host=host,
        clock=clock,
        cancelled=cancelled,
        on_message=on_message,
    )


def test_a_worker_pauses_its_child_and_all_below_while_another_measures(start: Start, tmp_path: Path) -> None:
    """The child gets 6 s; it stands still for as long, and neither that nor its silence counts."""
    compiling = start("count", pids=str(tmp_path / "pids"), limits={"time": 6, "hang": 3})
    compiling.counts_on()
    measuring = start("measure")
    wait_until(measuring.at.exists)
    assert compiling.stands_still
    before, began = compiling.count, measuring.at.stat().st_mtime
    clock = tmp_path / "clock"

    def passed() -> bool:
        clock.touch()
        return clock.stat().st_mtime > began + 6.5

    wait_until(passed)
    assert (compiling.count, compiling.stands_still) == (before, True)
    assert not measuring.end()["shared"]
    compiling.counts_on()
    found = compiling.end()
    assert found["ok"], found
    assert found["paused"] > 6
    assert found["seconds"] < 6


def test_all_continue_if_the_worker_that_measures_is_killed(start: Start, tmp_path: Path) -> None:
    compiling = start("count")
    compiling.counts_on()
    measuring = start("measure")
    wait_until(measuring.at.exists)
    child = int(measuring.at.read_text())
    assert compiling.stands_still
    measuring.process.kill()
    compiling.counts_on()
    wait_until(lambda: not alive(child))
    again = start("measure")
    wait_until(lambda: again.at.read_text() != str(child), message="the next one measures")
    assert compiling.stands_still
    assert not again.end()["shared"]


def test_another_measures_between_two_slices_that_migraphx_searches(start: Start, tmp_path: Path) -> None:
    """A slice is one compile, which nobody can stop and go on with: it is not paused, and who waits comes after it."""
    found = {"arch": "gfx942", "cross": False, "gate": str(tmp_path)}
    search = [standin(tmp_path / "standin", "gfx942")]
    Path(*search, "standin.json").write_text(json.dumps(found))
    model: dict[str, Any] = {"path": str(tmp_path / "net.onnx"), "format": "onnx"}
    request: Any = {
        **{"action": "tune", "compiler": "migraphx", "device": "gfx942", "gpu": "GPU-1", "maker": "amd"},
        **{"model": model, "inputs": {"x": {"dtype": "float32", "shape": [1, 4]}}, "batch": None, "precision": "fp32"},
        **{
            "tuning": {"mode": "full", "exhaustive_tune": True},
            "search": search,
            "calibration": None,
            "quantization": {},
        },
        "options": filled(compilers()["migraphx"].options_of("gfx942"), {}),
    }
    host, ends, begun, beats = Host(tmp_path), list[ChildEnd](), tmp_path / "begun", tmp_path / "beats"

    def tune(over: threading.Event) -> None:
        for _ in range(2):
            ends.append(run_child(request, log_path=tmp_path / "log.txt", folder=tmp_path, host=host, cancelled=over))

    def has_begun(count: int) -> bool:
        return begun.exists() and len(begun.read_text().splitlines()) == count

    with in_a_thread(tune):
        wait_until(lambda: has_begun(1))
        measuring = start("measure")
        wait_until(lambda: host._paused is not None, message="the other one has the turn")
        before = beats.stat().st_size
        wait_until(lambda: beats.stat().st_size > before + 50, message="it is not paused")
        assert not measuring.at.exists()
        (tmp_path / "go-1").touch()
        wait_until(measuring.at.exists)
        assert has_begun(1)
        assert not measuring.end()["shared"]
        wait_until(lambda: has_begun(2))
        (tmp_path / "go-2").touch()
        wait_until(lambda: len(ends) == 2)
    assert [(end.ok, end.shared) for end in ends] == [(True, False)] * 2


def test_nothing_is_left_of_a_paused_child_whose_worker_is_killed(start: Start, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    compiling = start("count", pids=str(pids))
    compiling.counts_on()
    measuring = start("measure")
    wait_until(measuring.at.exists)
    compiling.process.kill()
    wait_until(lambda: not [pid for pid in map(int, pids.read_text().split()) if alive(pid)])
    assert not measuring.end()["shared"]


def test_a_child_that_holds_a_file_lock_is_not_paused(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may wait for its lock and never come to the end of what they do."""
    monkeypatch.setattr(alone, "PATIENCE", 0.3)
    compiling = start("count", locks=True)
    compiling.counts_on()
    ended: list[ChildEnd] = []
    host, never = Host(tmp_path), threading.Event()
    with in_a_thread(lambda _: ended.append(run_here(tmp_path, "measure", host, never))):
        wait_until((tmp_path / "here").exists)
        compiling.counts_on()
        (tmp_path / "done").touch()
        wait_until(lambda: ended)
    assert ended[0].ok
    assert ended[0].shared


@pytest.mark.parametrize("start", ["no groups"], indirect=True)
def test_processes_that_wake_each_other_up_stand_still_too(start: Start, tmp_path: Path) -> None:
    """What the kernel says of a process whose first thread has ended looks like its end."""
    compiling = start("count_awake")
    compiling.counts_on()
    measuring = start("measure")
    wait_until(measuring.at.exists)
    before, until = compiling.count, time.monotonic() + 0.3
    wait_until(lambda: time.monotonic() > until)
    after = compiling.count
    assert measuring.end()["shared"] or after == before
    compiling.counts_on()
    assert not compiling.end()["ok"]


@pytest.mark.parametrize("start", ["no groups"], indirect=True)
def test_a_child_that_runs_while_it_is_paused_is_ended(start: Start, tmp_path: Path) -> None:
    compiling = start("spin", seconds=60, pids=str(tmp_path / "pids"))
    wait_until((tmp_path / "pids").exists)
    measuring = start("measure")
    wait_until(measuring.at.exists)
    for pid in (tmp_path / "pids").read_text().split():
        os.kill(int(pid), signal.SIGCONT)
    assert compiling.end()["by"] == EndedBy.AWAKE
    assert measuring.end()["ok"]


@pytest.mark.parametrize("longest", [600.0, 0.5], ids=["is paused", "waits for its turn"])
def test_a_child_that_stands_still_is_shown_to(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, longest: float
) -> None:
    """`farm status` says why, and afterwards what the child does. One that continues soon asks for its turn."""
    monkeypatch.setattr(alone, "LONGEST", longest)
    said: list[str] = []
    ended: list[ChildEnd] = []
    host, clock, never = Host(tmp_path), Clock(), threading.Event()

    def count_and_measure(_: threading.Event) -> None:
        ended.append(
            run_here(tmp_path, "count_and_measure", host, never, clock, lambda each: said.append(each["detail"]))
        )

    with in_a_thread(count_and_measure):
        wait_until((tmp_path / "here").exists, message="it works")
        measuring = start("measure")
        wait_until(measuring.at.exists)
        (tmp_path / "done").touch()
        wait_until(lambda: (PAUSED if longest > 60 else WAITS_FOR_TURN) in said)
        measuring.end()
        wait_until(lambda: ended)
    assert ended[0].ok
    assert said[0] == ""
    assert said[-1] == "measures"
    assert clock.lost > 1


@pytest.mark.parametrize("do", ["count", "measure"])
def test_a_child_that_pauses_or_waits_for_its_turn_can_be_cancelled(start: Start, tmp_path: Path, do: str) -> None:
    pids = tmp_path / "pids"
    cancelled = threading.Event()
    ended: list[ChildEnd] = []
    if do == "count":
        with in_a_thread(lambda _: ended.append(run_here(tmp_path, do, Host(tmp_path), cancelled, pids=str(pids)))):
            wait_until((tmp_path / "here").exists)
            measuring = start("measure")
            wait_until(measuring.at.exists)
            cancelled.set()
            wait_until(lambda: ended)
    else:
        measuring = start("measure")
        wait_until(measuring.at.exists)
        host = Host(tmp_path)
        with in_a_thread(lambda _: ended.append(run_here(tmp_path, do, host, cancelled, pids=str(pids)))):
            # It stands still before it starts, for as long as the other measures.
            cancelled.set()
            wait_until(lambda: ended)
    assert ended[0].by is EndedBy.CANCELLED
    assert not measuring.end()["shared"]
    assert not pids.exists() or not [pid for pid in map(int, pids.read_text().split()) if alive(pid)]

"""Warm children: forked from a template, they are what cold ones are, and nothing depends on the template."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from celery.worker.worker import SHUTDOWN_SOCKET_TIMEOUT

from farm.compiling.child_process import Seal, run_child
from farm.compiling.failures import ChildEnd, ChildLimits, EndedBy
from farm.runner.seal import unsealable
from farm.targets.environment import MIGRAPHX_ENV
from tests.support.compiling import PNET, Case, inputs_of
from tests.support.helpers import alive, wait_until
from tests.support.reaching import HOSTILE, PROBES, make_places, within_reach
from tests.support.warm import Counted

needs_seal = pytest.mark.skipif(bool(unsealable()), reason=f"this kernel cannot seal {', '.join(unsealable())}")
SEAL = Seal(read=[HOSTILE.parent])
Run = Callable[..., ChildEnd]


@pytest.fixture(scope="module")
def shared() -> Iterator[Counted]:
    """Templates of all tests that leave them as they are."""
    with closing(Counted()) as found:
        yield found


@pytest.fixture
def own() -> Iterator[Counted]:
    with closing(Counted()) as found:
        yield found


def hostile(do: str, folder: Path, templates: Counted | None, **fields: Any) -> ChildEnd:
    limits = fields.pop("limits", ChildLimits(time=60))
    added, seal = fields.pop("added", None), fields.pop("seal", SEAL)
    return run_child(
        {"do": do, "action": "hostile", **fields},
        log_path=folder / "log.txt",
        folder=folder,
        limits=limits,
        environment=added,
        seal=seal,
        script=HOSTILE,
        templates=templates,
    )


def test_a_killed_template_costs_no_attempt(own: Counted, tmp_path: Path) -> None:
    """Its running child goes on, the next one starts cold, and then there is a template again."""
    pids = tmp_path / "pids"
    ends: list[ChildEnd] = []
    spin = {"seconds": 2, "pids": str(pids), "seal": None}
    running = threading.Thread(target=lambda: ends.append(hostile("spin", tmp_path, own, **spin)))
    running.start()
    wait_until(pids.exists)
    (template,) = own.processes
    template.kill()
    wait_until(lambda: not own.processes)
    assert hostile("answer", tmp_path, own, seal=None).ok
    assert hostile("answer", tmp_path, own, seal=None).ok
    running.join()
    assert ends[0].ok
    assert own.warm == [True, False, True]


def test_a_template_that_hangs_is_ended_and_its_child_starts_cold(
    own: Counted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farm.compiling.templates.FORK_SECONDS", 0.5)
    assert hostile("answer", tmp_path, own).ok
    (template,) = own.processes
    template.suspend()
    assert hostile("answer", tmp_path, own).ok
    assert own.warm == [True, False]
    assert not template.is_running() or template.status() == psutil.STATUS_ZOMBIE


def test_children_of_a_worker_that_drains_are_forked(
    own: Counted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Celery then gives new sockets a time-out, for the whole process: such a socket does not wait by itself."""
    opened = os.pidfd_open

    def waits(pid: int) -> int:
        """The fork has come as far as it gets without a word of ours."""
        wait_until(lambda: psutil.Process(pid).status() in (psutil.STATUS_SLEEPING, psutil.STATUS_ZOMBIE))
        return opened(pid)

    monkeypatch.setattr(os, "pidfd_open", waits)
    assert hostile("answer", tmp_path, own).ok
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(SHUTDOWN_SOCKET_TIMEOUT)
    try:
        end = hostile("answer", tmp_path, own)
    finally:
        socket.setdefaulttimeout(before)
    assert end.ok
    assert own.warm == [True, True]


def module(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "migraphx.py").write_text(text)
    return folder


def test_a_changed_toolchain_gets_another_template(own: Counted, tmp_path: Path) -> None:
    """An old one would load the rest of its libraries from the new toolchain's files."""
    request = {"compiler": "migraphx", "name": "migraphx", "search": [str(module(tmp_path / "one", "VERSION = 1"))]}
    assert hostile("version", tmp_path, own, **request).result == {"answer": 1}
    module(tmp_path / "one", "VERSION = 2  # Installed over it.")
    assert hostile("version", tmp_path, own, **request).result == {"answer": 2}
    assert hostile("version", tmp_path, own, **request).result == {"answer": 2}
    other = {**request, "search": [str(module(tmp_path / "two", "VERSION = 3"))]}
    assert hostile("version", tmp_path, own, **other).result == {"answer": 3}
    assert own.warm == [True, False, True, True]
    assert len(own.processes) == 2


def test_a_template_for_a_device_loads_its_libraries(
    own: Counted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each child would load them again: CUDA's take a tenth of a second."""
    search = [str(module(tmp_path / "one", "VERSION = 1"))]
    (tmp_path / "added").mkdir()
    (tmp_path / "added" / "__init__.py").touch()
    (tmp_path / "added" / "card.py").write_text("import migraphx\ndef preload():\n    migraphx.VERSION = 2\n")
    added = {"migraphx/card": ["added.card", str(tmp_path / "added")]}
    monkeypatch.setattr("farm.compiling.child_process._modules", lambda: added)
    request = {"compiler": "migraphx", "name": "migraphx", "search": search, "gpu": "0"}
    assert hostile("version", tmp_path, own, **request, device="card").result == {"answer": 2}
    assert hostile("version", tmp_path, own, **request, device="other").result == {"answer": 1}
    assert own.warm == [True, True]


@pytest.mark.parametrize(
    "text",
    [
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
        "KEPT = open('/dev/zero', 'rb')",
        "import mmap; KEPT = mmap.mmap(-1, 4096)",
        "import sys; sys.stderr.write('cannot'); raise ImportError",
    ],
    ids=["thread", "device", "memory", "import"],
)
def test_what_cannot_be_forked_starts_cold(own: Counted, tmp_path: Path, text: str) -> None:
    """A thread that goes on may hold a lock, a device works in one process, and shared memory is no wall."""
    folder = str(module(tmp_path / "one", text))
    assert hostile("answer", tmp_path, own, compiler="migraphx", search=[folder]).ok
    assert own.warm == [False]
    assert not own.processes


def test_more_variables_than_a_template_can_be_told_cost_no_attempt(own: Counted, tmp_path: Path) -> None:
    """A manifest may set very many, and a template has them in its command line."""
    many = {f"MIOPEN_DEBUG_{number}": "x" * 200 for number in range(700)}
    assert hostile("answer", tmp_path, own, environment=many).ok
    assert own.warm == [False]


@needs_seal
def test_a_warm_child_reaches_nothing_of_its_template(shared: Counted, tmp_path: Path) -> None:
    """Neither its memory, nor by a signal, nor through a descriptor."""
    seen = hostile("environment", tmp_path, shared)
    places = make_places(tmp_path)
    template = shared.processes[0]
    with within_reach(places) as fields:
        end = hostile("reach", tmp_path, shared, **{**fields, "worker": template.pid})
    assert end.result is not None, end.log_tail
    assert len(end.result["probes"]) == PROBES
    assert [name for name, said in end.result["probes"].items() if not said.startswith("refused")] == []
    assert shared.warm[-2:] == [True, True]
    cold = hostile("environment", tmp_path, None)
    assert seen.result is not None
    assert cold.result is not None
    assert len(seen.result["descriptors"]) == len(cold.result["descriptors"])


def test_four_slots_of_hostile_children_leave_their_template_as_it_was(shared: Counted, tmp_path: Path) -> None:
    attacks = ("kill_launcher", "close_everything", "hang", "babble")
    with ThreadPoolExecutor(4) as slots:
        for number, do in enumerate(attacks):
            (folder := tmp_path / str(number)).mkdir()
            fields = {"limits": ChildLimits(time=2), "pids": str(tmp_path / f"pids-{number}"), "seal": None}
            slots.submit(hostile, do, folder, shared, what="deep", **fields)
    left = [int(pid) for file in tmp_path.glob("pids-?") for pid in file.read_text().split()]
    assert left
    assert not [pid for pid in left if alive(pid)]
    assert hostile("answer", tmp_path, shared, seal=None).result == {"answer": 42}
    assert all(shared.warm)
    assert len(left) == 20


def test_nothing_gathers_with_each_child(shared: Counted, tmp_path: Path) -> None:
    """Neither descriptors nor dead processes."""

    def held() -> list[int]:
        return [each.num_fds() for each in (psutil.Process(), *shared.processes)]

    def alone() -> bool:
        return not any(template.children() for template in shared.processes)

    assert hostile("answer", tmp_path, shared).ok
    wait_until(alone)
    before = held()
    for _ in range(5):
        assert hostile("answer", tmp_path, shared).ok
    wait_until(alone)
    assert held() == before
    assert all(shared.warm)


@pytest.mark.parametrize("how", [signal.SIGKILL, 0], ids=["killed", "over"])
def test_a_template_ends_with_its_worker(tmp_path: Path, how: int) -> None:
    code = (
        "import os, sys; from pathlib import Path; from tests.runner.test_templates import Counted, hostile\n"
        "own = Counted(); assert hostile('answer', Path(sys.argv[1]), own).ok; assert own.warm == [True]\n"
        "print(own.processes[0].pid, flush=True); int(sys.argv[2]) and os.kill(os.getpid(), int(sys.argv[2]))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, tmp_path, str(int(how))], capture_output=True, check=False)
    assert ended.stdout, ended.stderr.decode()
    wait_until(lambda: not alive(int(ended.stdout)))


def test_memory_counts_from_the_fork(shared: Counted, tmp_path: Path) -> None:
    """What the template has imported takes more than this limit."""
    fields = {"compiler": "onnxruntime", "limits": ChildLimits(time=60, memory=48 << 20)}
    assert hostile("spin", tmp_path, shared, seconds=0.5, **fields).ok
    assert shared.warm[-1]
    assert hostile("hog", tmp_path, shared, **fields).by is EndedBy.MEMORY_LIMIT


ECHO = """\
import os, sys
def told(when):
    own = (os.environ["HOME"], "/nonexistent")
    print(when, {name: value for name, value in sorted(os.environ.items()) if not value.startswith(own)})
told("import")
"""
VALUES = {"flag": "1", "switch": "0", "number": "3", "text": "fused_dot", "file": "/nowhere"}


def test_a_documented_variable_is_seen_as_by_a_cold_child(
    own: Counted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a library is loaded, and later; so both make the same program and log, also where there is no locale."""
    for name in ("LANG", "LC_ALL"):
        monkeypatch.delenv(name, raising=False)
    variables = {name.replace("*", "CONV"): VALUES[variable.kind] for name, variable in MIGRAPHX_ENV.items()}
    request = {
        "compiler": "migraphx",
        "name": "migraphx",
        "search": [str(module(tmp_path / "one", ECHO))],
        "environment": variables,
    }
    logs = []
    for templates in (None, own, own):
        (log := tmp_path / "log.txt").unlink(missing_ok=True)
        end = hostile("told", tmp_path, templates, **request, added={"MIGRAPHX_TRACE_EVAL": "1"})
        assert end.ok, end.log_tail
        logs.append(log.read_text())
    assert own.warm == [True, True]
    assert all(name in logs[0] for name in variables)
    assert logs[1] == logs[0]
    assert logs[2] == logs[0]


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_warm_child_makes_the_program_and_the_log_of_a_cold_one(
    shared: Counted, tmp_path: Path, precision: str
) -> None:
    made = []
    for templates in (None, shared):
        (folder := tmp_path / str(len(made))).mkdir()
        case = Case(folder, PNET, inputs_of(PNET, input_1=[1, 32, 32, 3]), templates=templates)
        case.compile(precision)
        log = (folder / "log.txt").read_text().replace(str(folder), "")
        made.append((case.program.read_bytes(), log))
    assert made[0] == made[1]
    assert shared.warm[-1]

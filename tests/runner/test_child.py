"""Children that misbehave: the worker survives all of it, names it rightly, and nothing is left behind."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from farm.compiling import cgroups, child_process
from farm.compiling.child_process import Seal, run_child
from farm.compiling.failures import NO_LIMITS, ChildEnd, ChildLimits, EndedBy, classify
from farm.compiling.templates import Templates
from farm.jobs.state import FailureKind, policy_of
from farm.runner.seal import unsealable
from tests.support import other_user
from tests.support.helpers import alive, wait_until
from tests.support.places import ROOT
from tests.support.reaching import HOSTILE, PROBES, make_places, within_reach
from tests.support.undying import undying
from tests.support.warm import AlwaysWarm

Run = Callable[..., ChildEnd]
needs_seal = pytest.mark.skipif(bool(unsealable()), reason=f"this kernel cannot seal {', '.join(unsealable())}")
MINUTE = ChildLimits(time=60)


@pytest.fixture(scope="module")
def templates() -> Iterator[Templates]:
    with closing(AlwaysWarm()) as found:
        yield found


@pytest.fixture
def hostile(tmp_path: Path, templates: Templates) -> Run:
    """Runs children that were forked from a template, as a worker's are."""

    def run(do: str, *, limits: ChildLimits = MINUTE, **fields: Any) -> ChildEnd:
        arguments = {
            name: fields.pop(name) for name in ("on_message", "cancelled", "environment", "seal") if name in fields
        }
        # A template is sealed by the kernel that there is.
        arguments["templates"] = None if {"landlock", "no_clone3"} & fields.keys() else templates
        return run_child(
            {"do": do, "action": "hostile", **fields},
            log_path=tmp_path / "log.txt",
            limits=limits,
            folder=tmp_path,
            script=HOSTILE,
            **arguments,
        )

    return run


@pytest.fixture(params=["root", "user"])
def sealed_run(request: pytest.FixtureRequest, hostile: Run) -> Run:
    """Runs sealed children of a worker that is root, or an ordinary user."""
    if request.param == "root":
        if os.geteuid() != 0:
            pytest.skip("only root is root")
        return lambda do, **fields: hostile(do, seal=Seal(read=[HOSTILE.parent]), **fields)
    if os.geteuid() != 0:
        return lambda do, **fields: hostile(do, seal=Seal(read=[HOSTILE.parent]), **fields)
    if why := other_user.why_not():
        pytest.skip(why)

    def run(do: str, *, limits: ChildLimits = MINUTE, **fields: Any) -> ChildEnd:
        return other_user.run_as_user({"do": do, "action": "hostile", **fields}, limits)

    return run


def left_of(pids: Path) -> list[int]:
    """Those that run. One that has left its group is dead a moment later; nobody kills any after that."""
    found = [int(pid) for pid in pids.read_text().split()]
    with suppress(AssertionError):
        wait_until(lambda: not any(map(alive, found)), timeout=2)
    return [pid for pid in found if alive(pid)]


@pytest.mark.parametrize(
    ("do", "kind", "words"),
    [
        ("segv", FailureKind.COMPILER_CRASH, "died by SIGSEGV while compiling"),
        ("abort", FailureKind.COMPILER_CRASH, "died by SIGABRT while compiling"),
        ("kill", FailureKind.COMPILER_CRASH, "died by SIGKILL while compiling"),
        ("exit", FailureKind.COMPILER_CRASH, "exited with code 42 and no answer"),
        ("silence", FailureKind.COMPILER_CRASH, "exited with code 0 and no answer"),
        ("gpu_fault", FailureKind.GPU_FAULT, "the GPU reported a fault"),
        ("impossible", FailureKind.OUT_OF_MEMORY, "memory ran out"),
    ],
)
def test_death_has_its_kind(hostile: Run, do: str, kind: FailureKind, words: str) -> None:
    """However the compiler dies, the worker goes on and the failure says how."""
    failure = classify(hostile(do))
    assert failure is not None
    assert failure.kind is kind
    assert words in failure.message


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("x.cpp:12: parse: Unknown operator: Foo", FailureKind.UNSUPPORTED_OPERATOR),
        ("x.cpp:12: PARSE_FROM: Failed reading onnx file: m.onnx", FailureKind.BAD_MODEL),
        ("could not construct a memory descriptor using strides", FailureKind.INTERNAL),
        ("x.cpp:1: allocate: Gpu allocation failed", FailureKind.GPU_MEMORY),
        ("std::bad_alloc", FailureKind.OUT_OF_MEMORY),
        ("[Errno 28] No space left on device", FailureKind.STORAGE),
        (
            "Program version mismatch. MXR file was created using program file version: 7",
            FailureKind.TOOLCHAIN_MISMATCH,
        ),
        ("something new", FailureKind.INTERNAL),
    ],
)
def test_what_compilers_say_has_its_kind(hostile: Run, message: str, kind: FailureKind) -> None:
    """Known messages get their kind; what the runner itself did not expect is the farm's mistake."""
    failure = classify(hostile("raise", message=message))
    assert failure is not None
    assert failure.kind is kind


@needs_seal
def test_links_and_pipes_that_a_child_leaves_fail_it_and_are_gone(hostile: Run, tmp_path: Path) -> None:
    """Whoever collects, hashes or uploads its files must meet neither the worker's own files nor a pipe to wait on."""
    folder = tmp_path / "program"
    folder.mkdir()
    end = hostile("stray", folder=str(folder), seal=Seal(read=[HOSTILE.parent], write=[folder]))
    failure = classify(end)
    assert failure is not None
    assert failure.kind is FailureKind.COMPILER_ERROR
    assert "it left what is not a plain file" in failure.message
    assert "before.txt (a link)" in end.left
    assert [path.name for path in folder.rglob("*") if path.is_symlink() or not (path.is_file() or path.is_dir())] == []


def test_a_child_cannot_leave_folders_that_its_worker_cannot_remove(hostile: Run, tmp_path: Path) -> None:
    assert hostile("deep_scratch").ok
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_log_is_kept_and_its_last_lines_are_the_detail(hostile: Run, tmp_path: Path) -> None:
    """The detail is readable: colours are gone, the useful lines are there."""
    failure = classify(hostile("gpu_fault"))
    assert failure is not None
    assert "Memory access fault by GPU node-1" in failure.detail
    assert "\x1b" not in failure.detail
    assert "\x1b[31m" in (tmp_path / "log.txt").read_text()


def test_answer_and_progress_arrive(hostile: Run) -> None:
    """Phases come in order, as they happen; an answer may be longer than a pipe holds."""
    messages: list[Any] = []
    end = hostile("talk", on_message=messages.append)
    assert end.ok
    assert end.result == {"long": "x" * 300_000}
    assert [(message["phase"], message["progress"]) for message in messages] == [
        ("compiling", None),
        *[("tuning", index / 5) for index in range(5)],
    ]
    assert end.phase == "tuning"
    assert classify(end) is None


def test_what_a_child_says_is_text_that_a_log_takes(hostile: Run, tmp_path: Path) -> None:
    """Python spells a name that is not UTF-8 with halves of characters: no file takes them."""
    messages: list[Any] = []
    (made := tmp_path / "made").mkdir()
    end = hostile("mumble", on_message=messages.append, folder=str(made), seal=Seal(write=[made]))
    assert messages[-1]["detail"] == "reads ?"
    assert end.error == {"kind": "unverifiable", "message": "cannot read ?", "detail": "?"}
    assert end.left == ["\ufffd (a link)"]


def test_end_is_noticed_at_once(hostile: Run) -> None:
    """The worker waits on the pipe, not on a clock: an answer costs no more than the interpreter's start."""
    hostile("answer")
    starts, answers = [], []
    for _ in range(5):  # In turns, since the machine may have more to do now than then.
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        starts.append(time.monotonic() - began)
        began = time.monotonic()
        hostile("answer")
        answers.append(time.monotonic() - began)
    assert min(answers) < 5 * max(starts) + 0.25


@pytest.mark.parametrize("held_by", ["kernel", "polling"])
def test_memory_limit(hostile: Run, held_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hog is ended at its limit; what it took is in the facts."""
    if held_by == "polling":
        monkeypatch.setattr(cgroups, "find", lambda: cgroups.Groups(None, why="as the test wants it"))
    elif not cgroups.find().memory:
        pytest.skip(f"no control group holds memory here, {cgroups.find()}")
    limit = 256 << 20
    end = hostile("hog", limits=ChildLimits(time=60, memory=limit))
    failure = classify(end)
    assert end.by is EndedBy.MEMORY_LIMIT
    assert failure is not None
    assert failure.kind is FailureKind.OUT_OF_MEMORY
    assert failure.message == "it needed more memory than 256 MiB while compiling"
    assert end.memory >= limit


def test_memory_of_a_process_without_its_first_thread_counts(hostile: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "find", lambda: cgroups.Groups(None, why="as the test wants it"))
    limits = ChildLimits(time=60, memory=256 << 20)
    assert hostile("without_first_thread", then="hog", limits=limits).by is EndedBy.MEMORY_LIMIT


@needs_seal
@pytest.mark.parametrize("do", ["without_first_thread", "with_own_files"])
def test_a_thread_hides_no_deleted_file(hostile: Run, tmp_path: Path, do: str) -> None:
    """Neither one that goes on alone, nor one that would have open files of its own."""
    (folder := tmp_path / "program").mkdir()
    seal = Seal(read=[HOSTILE.parent], write=[folder])
    limits = ChildLimits(time=60, disk=64 << 20)
    end = hostile(do, then="fill", how="unnamed", folder=str(folder), limits=limits, seal=seal)
    assert end.by is EndedBy.DISK_LIMIT


@needs_seal
@pytest.mark.parametrize("how", ["one", "many", "unnamed", "empty", "open", "out of sight"])
def test_a_child_that_fills_the_disk_is_ended(hostile: Run, tmp_path: Path, how: str) -> None:
    """However it does it; what others of its attempt have written counts."""
    folder = tmp_path / "program"
    folder.mkdir()
    limits = ChildLimits(time=60, disk=96 << 20, written=32 << 20, files=500)
    end = hostile("fill", folder=str(folder), how=how, limits=limits, seal=Seal(read=[HOSTILE.parent], write=[folder]))
    failure = classify(end)
    assert failure is not None
    assert failure.kind is FailureKind.DISK_LIMIT, failure
    said = {
        "empty": ["it made, or has open, more files than any compiler while compiling"],
        "open": ["it made, or has open, more files than any compiler while compiling"],
        "one": ["it wrote a file that is larger than its node allows"],
        "out of sight": ["it made, or has open, more files than any compiler while compiling"],
    }
    whole = "its attempt wrote more than 96 MiB to the node's disk while compiling"
    assert failure.message in [whole, *said.get(how, [])]


@needs_seal
def test_what_a_child_wrote_is_looked_at_also_when_it_has_answered(hostile: Run, tmp_path: Path) -> None:
    folder = tmp_path / "program"
    folder.mkdir()
    seal = Seal(read=[HOSTILE.parent], write=[folder])
    limits = ChildLimits(time=60, disk=4 << 20)
    assert hostile("gulp", folder=str(folder), bytes=2 << 20, limits=limits, seal=seal).ok
    end = hostile("gulp", folder=str(folder), bytes=6 << 20, limits=limits, seal=seal)
    assert (end.by, end.ok) == (EndedBy.DISK_LIMIT, False)


@needs_seal
@pytest.mark.parametrize("how", ["processes", "threads"])
def test_a_child_that_starts_too_many_processes_is_ended_with_all_of_them(
    hostile: Run, tmp_path: Path, how: str
) -> None:
    end = hostile("forks", how=how, limits=ChildLimits(time=60, processes=64), seal=Seal(read=[HOSTILE.parent]))
    failure = classify(end)
    assert failure is not None
    assert failure.kind is FailureKind.PROCESS_LIMIT, failure
    assert failure.message == "it had more than 64 processes and threads while compiling"
    assert end.stuck == ()


@needs_seal
def test_a_sealed_child_cannot_hide_from_its_guard(hostile: Run, tmp_path: Path) -> None:
    assert hostile("hide", seal=Seal(read=[HOSTILE.parent])).result == {"hidden": False}
    assert hostile("hide").result == {"hidden": True}


def test_a_kill_is_not_the_kernels_because_another_child_was_over_its_limit(hostile: Run, tmp_path: Path) -> None:
    """A machine has one count of what the kernel killed for want of memory, for all of them."""
    if not cgroups.find().memory:
        pytest.skip(f"no control group holds memory here, {cgroups.find()}")
    pids, ends = tmp_path / "pids", list[ChildEnd]()
    thread = threading.Thread(target=lambda: ends.append(hostile("hang", pids=str(pids))))
    thread.start()
    wait_until(pids.exists)
    assert hostile("hog", limits=ChildLimits(time=60, memory=256 << 20)).by is EndedBy.MEMORY_LIMIT
    os.kill(int(pids.read_text().split()[0]), signal.SIGKILL)
    thread.join()
    failure = classify(ends[0])
    assert failure is not None
    assert (failure.kind, failure.message) == (FailureKind.COMPILER_CRASH, "it died by SIGKILL while compiling")


def test_memory_of_descendants_counts(hostile: Run) -> None:
    """A limit cannot be dodged by starting another process."""
    end = hostile("hog_elsewhere", limits=ChildLimits(time=60, memory=256 << 20))
    assert end.by is EndedBy.MEMORY_LIMIT


def test_time_limit(hostile: Run, tmp_path: Path) -> None:
    """Busy or not, it ends at its time limit, with all that it started."""
    pids = tmp_path / "pids"
    began = time.monotonic()
    end = hostile("spin", seconds=60, pids=str(pids), limits=ChildLimits(time=2, whole=7200))
    failure = classify(end)
    assert failure is not None
    assert (failure.kind, failure.message) == (FailureKind.TIME_LIMIT, "it took longer than 2 h while compiling")
    assert time.monotonic() - began < 30, "it would have gone on for 60 s"
    assert not left_of(pids)


def test_hang(hostile: Run) -> None:
    """No message and no CPU time: hung."""
    began = time.monotonic()
    end = hostile("hang", limits=ChildLimits(time=60, hang=1))
    failure = classify(end)
    assert failure is not None
    assert failure.kind is FailureKind.HANG
    assert time.monotonic() - began < 30, "half of its time limit"


@pytest.mark.noise
def test_cpu_time_is_progress_beyond_that_of_waiting(hostile: Run) -> None:
    """A long quiet compile that computes is not hung; on a GPU, where waiting keeps a core busy, one core is none."""
    assert hostile("spin", seconds=4, limits=ChildLimits(time=60, hang=2)).ok
    assert hostile("spin", seconds=6, limits=ChildLimits(time=60, hang=3, waiting=0.1)).ok
    assert hostile("spin", seconds=20, limits=ChildLimits(time=60, hang=1, waiting=1.0)).by is EndedBy.HANG


def test_a_log_that_was_made_long_at_once_is_cut(hostile: Run, tmp_path: Path) -> None:
    """The child holds the log open: what it makes of it is uploaded whole."""
    end = hostile("stretch_log", bytes=1 << 40, limits=ChildLimits(time=60, log=1 << 20))
    assert end.by is EndedBy.LOG_LIMIT
    assert (tmp_path / "log.txt").stat().st_size <= 1 << 20


def test_log_limit(hostile: Run) -> None:
    """A child cannot fill the disk with its log."""
    failure = classify(hostile("flood", limits=ChildLimits(time=60, log=1 << 20)))
    assert failure is not None
    assert failure.kind is FailureKind.COMPILER_ERROR
    assert "more than 1 MiB of log" in failure.message


@pytest.mark.parametrize(
    "what", ["text", "deep", "nested", "endless", "phase", "progress", "no number", "novel", "error", "guard"]
)
def test_nonsense(hostile: Run, what: str) -> None:
    """A child cannot break or fill the worker by what it writes to its pipe; it is the compiler's fault, at once."""
    failure = classify(hostile("babble", what=what))
    assert failure is not None
    assert failure.kind is FailureKind.COMPILER_ERROR
    assert "it sent the worker something that is not a message" in failure.message


EVALUATED = {
    "verification": {
        **{"errors": {"y": 0.0}, "rms": {}, "equal": {}, "nonfinite": [], "spread": {"y": 1.0}, "weak": False},
        **{"samples": 8, "runs": 1, "origin": {}, "unverified": {}},
    },
    "measurements": {"load": 0.1},
}


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, ""), (1, "an output that the model does not have"), (25_000, "something that is not a message")],
)
def test_an_answer_has_the_models_names_and_is_short(hostile: Run, count: int, words: str) -> None:
    """25 MB of names that no model has would lie in the store's memory several times."""
    answer = {"says": EVALUATED, "fill": ["verification", "errors"], "count": count}
    end = hostile("say", action="evaluate", outputs=["y"], **answer)
    failure = classify(end)
    assert end.ok is not bool(words)
    assert words in (failure.message if failure else "")
    if failure:
        assert failure.kind is FailureKind.COMPILER_ERROR


def test_a_child_changes_its_phase_only_so_often(hostile: Run) -> None:
    """Each change is an event of its build, which keeps so many."""
    assert hostile("change_phases", count=100).ok
    assert hostile("change_phases", count=5000).by is EndedBy.NONSENSE


def test_a_child_that_says_the_same_for_ever_is_ended(hostile: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each message takes time of its worker, which other attempts share: 350,000 took 8 s."""
    assert child_process._MOST_MESSAGES >= 50_000, "what an honest one may say"
    monkeypatch.setattr(child_process, "_MOST_MESSAGES", 20_000)
    assert hostile("chatter", count=5_000).ok
    assert hostile("chatter", count=30_000).by is EndedBy.NONSENSE


@pytest.mark.parametrize("kind", ["worker_lost", "accuracy", "gpu_fault", "no kind"])
def test_a_child_states_no_kind_that_only_others_know(kind: str) -> None:
    """A compiler that blames the farm, the node or a gate has failed itself; a novel is cut."""
    error = {"kind": kind, "message": "m" * 100_000, "detail": "d" * 100_000}
    failure = classify(ChildEnd(by=EndedBy.ITSELF, limits=NO_LIMITS, error=error))
    assert failure is not None
    assert failure.kind is FailureKind.COMPILER_ERROR
    assert len(failure.message) + len(failure.detail) < 10_000


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("the program does not load, on CUDA: CUDA failure 2: out of memory ; GPU=0", "gpu_memory"),
        ("refuses its program, on CUDA: Available memory of 0 is smaller than requested bytes of 256", "gpu_memory"),
        ("refuses its program: Failed to allocate memory for requested buffer of size 256", "out_of_memory"),
        ("CUDA failure 700: an illegal memory access was encountered ; GPU=0", "gpu_fault"),
        ("CUDA failure 100: no CUDA-capable device is detected ; GPU=-1", "gpu_lost"),
        ("CUDA failure 304: OS call failed or operation not supported on this OS", "gpu_lost"),
        ("libcudnn.so.9: cannot open shared object file: No such file or directory", "gpu_library"),
        ("CUDA failure 35: CUDA driver version is insufficient for CUDA runtime version", "gpu_library"),
        ("CUDA failure 209: no kernel image is available for execution on the device", "gpu_unserved"),
    ],
)
def test_what_happens_on_an_nvidia_card_has_a_kind_with_advice(said: str, kind: str) -> None:
    for error in ({"kind": "", "message": said, "detail": said}, {"kind": "internal", "message": said, "detail": said}):
        failure = classify(ChildEnd(by=EndedBy.ITSELF, limits=NO_LIMITS, error=error))
        assert failure is not None
        assert (failure.kind, bool(failure.message and policy_of(failure.kind).advice)) == (kind, True)
    died = classify(ChildEnd(by=EndedBy.ITSELF, limits=NO_LIMITS, code=-6, log_tail=said))
    assert died is not None and died.kind == kind


def test_cancel(hostile: Run, tmp_path: Path) -> None:
    """A cancel ends the child and all it started; that is not a failure."""
    pids, cancelled = tmp_path / "pids", threading.Event()
    ends: list[ChildEnd] = []
    thread = threading.Thread(target=lambda: ends.append(hostile("hang", pids=str(pids), cancelled=cancelled)))
    thread.start()
    wait_until(pids.exists)
    # Slurm preempts by SIGTERM to every process of a job: the worker alone has to see to its end.
    assert [pid for pid in running(tmp_path) if not outlives_sigterm(pid)] == []
    cancelled.set()
    thread.join(60)
    assert ends[0].by is EndedBy.CANCELLED
    assert classify(ends[0]) is None
    assert not left_of(pids)


@pytest.mark.parametrize("do", ["answer", "segv", "exit", "kill"])
def test_no_descendant_outlives_the_child(hostile: Run, tmp_path: Path, do: str) -> None:
    """What called setsid, lost its parent or ignores SIGTERM ends with the child, however that ended."""
    pids = tmp_path / "pids"
    hostile(do, pids=str(pids))
    assert len(pids.read_text().split()) == 5
    assert not left_of(pids)


@pytest.fixture(params=["groups", "no groups"])
def grouped(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test with control groups and without."""
    if request.param == "no groups":
        monkeypatch.setattr(cgroups, "find", lambda: cgroups.Groups(None, why="as the test wants it"))
    elif not cgroups.find().folder:
        pytest.skip(f"no control group can be made here, {cgroups.find()}")


def running(folder: Path) -> list[int]:
    """Every process that was started for a child in this folder; a fork has the same command line."""
    lines = [(each.pid, each.info["cmdline"] or []) for each in psutil.process_iter(["cmdline"]) if alive(each.pid)]
    return [pid for pid, words in lines if any(str(folder) in word for word in words[:4])]


def outlives_sigterm(pid: int) -> bool:
    """Whether a process ignores or catches SIGTERM."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool((int(status["SigIgn"], 16) | int(status["SigCgt"], 16)) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize("how", [{}, {"no_clone3": True}], ids=["born", "entered"])
def test_a_child_is_in_its_group_from_the_start_and_knows_its_thread(hostile: Run, how: dict[str, bool]) -> None:
    """Also where the kernel, or a filter, has no clone3."""
    folder = cgroups.find().folder
    if not folder:
        pytest.skip(f"no control group can be made here, {cgroups.find()}")
    began = time.monotonic()
    end = hostile("say_group", **how)
    assert end.ok, end
    assert Path(end.result["group"]).name.startswith("farm-")
    assert 0 < end.result["ran"] < time.monotonic() - began
    assert not list(folder.glob(Path(end.result["group"]).name))


@pytest.mark.usefixtures("grouped")
@pytest.mark.parametrize("do", ["kill_guard", "kill_launcher"])
def test_nothing_is_left_when_guard_or_launcher_is_killed(hostile: Run, tmp_path: Path, do: str) -> None:
    """As by the kernel for want of memory; a sealed child cannot. Without a last word, the attempt has failed."""
    pids = tmp_path / "pids"
    end = hostile(do, pids=str(pids))
    assert not left_of(pids)
    assert running(tmp_path) == []
    failure = classify(end)
    assert failure is not None
    assert failure.kind is FailureKind.COMPILER_CRASH
    assert "the process that starts and guards it ended early" in failure.message


def test_a_control_group_ends_what_has_neither_guard_nor_launcher(hostile: Run, tmp_path: Path) -> None:
    if not cgroups.find().folder:
        pytest.skip(f"no control group can be made here, {cgroups.find()}")
    pids = tmp_path / "pids"
    end = hostile("kill_launcher", both=True, pids=str(pids))
    assert end.by is EndedBy.UNGUARDED
    assert not left_of(pids)


@pytest.mark.usefixtures("grouped")
def test_a_guard_that_hangs_is_ended_with_its_child(hostile: Run, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    end = hostile("stop_guard", pids=str(pids), limits=ChildLimits(time=1, dying=1))
    assert end.by is EndedBy.TIME_LIMIT
    assert end.stuck == ()
    assert not left_of(pids)
    assert running(tmp_path) == []


@needs_seal
@pytest.mark.usefixtures("grouped")
def test_a_sealed_child_neither_ends_its_guard_nor_leaves_a_process_that_hides(sealed_run: Run) -> None:
    """It had its guard's wake-up pipe, and a process without the mark in its environment outlived the attempt."""
    end = sealed_run("escape")
    (escaped,) = re.findall(r"escaped as (\d+)", end.log_tail)
    assert not alive(int(escaped))
    assert end.ok, end


@pytest.mark.usefixtures("grouped")
def test_processes_that_start_others_faster_than_they_are_looked_at_are_ended(hostile: Run, tmp_path: Path) -> None:
    end = hostile("chains", count=20)
    assert end.ok, end
    assert running(tmp_path) == []


@pytest.mark.parametrize("do", ["hang", "linger"])
def test_what_cannot_be_killed_is_the_gpus_fault_and_waited_for_no_longer(
    hostile: Run, tmp_path: Path, do: str
) -> None:
    """It answers or not: the compiler is in the kernel when it is to end, and stays there."""
    pids = tmp_path / "pids"
    limits = ChildLimits(time=60, hang=3, dying=2)
    with ThreadPoolExecutor(1) as thread:
        run = thread.submit(hostile, do, pids=str(pids), limits=limits)
        wait_until(pids.exists)
        inner, *_ = map(int, pids.read_text().split())
        with undying(inner):
            end = run.result(60)
    assert end.stuck == (inner,)
    failure = classify(end)
    assert failure is not None
    assert (failure.kind, failure.fences) == (FailureKind.GPU_FAULT, True)
    assert f"process {inner} cannot be killed" in failure.message
    assert not left_of(pids)


def test_an_answer_counts_though_the_child_does_not_end(hostile: Run) -> None:
    end = hostile("linger", limits=ChildLimits(time=60, dying=1))
    assert end.ok
    assert end.result == {"answer": 42}


def test_closing_every_pipe_is_no_way_out(hostile: Run, tmp_path: Path) -> None:
    """A child that closes its pipes is still watched."""
    pids = tmp_path / "pids"
    end = hostile("close_everything", pids=str(pids), limits=ChildLimits(time=3))
    assert end.by is EndedBy.TIME_LIMIT
    assert not left_of(pids)


@pytest.mark.parametrize("do", ["hang", "spin"])
def test_nothing_outlives_a_killed_worker(tmp_path: Path, do: str) -> None:
    """kill -9 of the worker takes the compiler and all its descendants along."""
    pids = tmp_path / "pids"
    worker = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from pathlib import Path; from farm.compiling.child_process import run_child\n"
            "run_child({'do': sys.argv[1], 'pids': sys.argv[2], 'seconds': 600}, log_path=Path(sys.argv[3]),"
            " script=Path(sys.argv[4]), folder=Path(sys.argv[3]).parent)",
            do,
            str(pids),
            str(tmp_path / "log.txt"),
            str(HOSTILE),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    wait_until(pids.exists)
    (request,) = tmp_path.glob("child-*/request.json")
    group = json.loads(request.read_text())["group"]
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    wait_until(lambda: not left_of(pids))
    assert bool(group) == bool(cgroups.find().folder)
    wait_until(lambda: not group or not Path(group["folder"]).exists(), message="its control group is gone")


def test_environment_is_an_allow_list(hostile: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No address, no credential, no setting of the farm reaches the child; its folder is its own and goes away."""
    ours = ("FARM_REDIS_URL", "FARM_S3_SECRET_KEY", "AWS_SECRET_ACCESS_KEY")
    for name in (*ours, "MIGRAPHX_TRACE_EVAL", "MIOPEN_FIND_ENFORCE", "PYTHONPATH"):
        monkeypatch.setenv(name, "canary")
    secret = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(secret, True)
    try:
        end = hostile("environment", threads=3, environment={"MIGRAPHX_DISABLE_MLIR": "1"})
    finally:
        os.close(secret)
    assert end.result is not None
    seen = end.result["environment"]
    assert "canary" not in seen.values()
    assert {name for name in seen if name.startswith(("FARM_", "AWS_"))} == set()
    assert seen["OMP_NUM_THREADS"] == seen["MIGRAPHX_GPU_COMPILE_PARALLEL"] == "3"
    assert seen["OPENBLAS_THREAD_TIMEOUT"] == "4"
    assert seen["MIGRAPHX_DISABLE_MLIR"] == "1"
    assert seen["ROCR_VISIBLE_DEVICES"] == "-1"
    assert seen["TMPDIR"] == seen["HOME"] == (folder := end.result["folder"])
    databases = ("MIOPEN_USER_DB_PATH", "MIOPEN_CUSTOM_CACHE_DIR")
    assert [Path(seen[name]).parent for name in databases] == [Path(folder)] * 2, "its own, and empty"
    assert "MIOPEN_FIND_ENFORCE" not in seen
    assert not Path(end.result["folder"]).exists()
    assert secret not in end.result["descriptors"]


def test_child_sees_nothing_of_the_farm(hostile: Run) -> None:
    """The farm's own packages, and the runner's folder, are not on the child's import path; `farm` itself is empty."""
    end = hostile("environment")
    assert end.result is not None
    ours = {name for name in end.result["modules"] if name.split(".")[0] == "farm"}
    assert {name for name in ours if not name.startswith("farm.runner")} == {"farm"}
    assert not end.result["farm"], "a package of no file"
    assert not [entry for entry in end.result["path"] if entry.endswith("farm/runner")]
    assert not {"numpy", "onnx", "onnxruntime"} & set(end.result["modules"])


def test_failing_callback_ends_the_child(hostile: Run, tmp_path: Path) -> None:
    """An error in the worker's own code leaves no child behind."""
    pids = tmp_path / "pids"

    def fail(message: Any) -> None:
        wait_until(pids.exists)
        raise LookupError("worker's own")

    with pytest.raises(LookupError):
        hostile("hang", pids=str(pids), on_message=fail)
    assert not left_of(pids)


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    return make_places(tmp_path)


def sealed(places: dict[str, Path]) -> Seal:
    return Seal(read=[places["input"].parent, HOSTILE.parent], write=[places["output"].parent])


LOCAL_SOCKETS = {"listen on a local socket", "keep bytes in a pair of sockets"}


@needs_seal
@pytest.mark.parametrize("maker", ["", "amd", "nvidia"])
def test_a_sealed_child_reaches_nothing_but_its_own(hostile: Run, places: dict[str, Path], maker: str) -> None:
    """Other jobs' files, the worker, its guard and every server are out of a hostile compiler's reach.

    On an NVIDIA GPU it may have local sockets, since CUDA listens on one, and nothing comes of it.
    """
    with within_reach(places) as fields:
        end = hostile("reach", seal=sealed(places), gpu="GPU-0" if maker else "", maker=maker, **fields)
    assert end.result is not None, end.log_tail
    assert len(end.result["probes"]) == PROBES
    reached = {name for name, said in end.result["probes"].items() if not said.startswith("refused")}
    assert reached == (LOCAL_SOCKETS if maker == "nvidia" else set())
    assert places["input"].read_bytes() == b"a model"
    assert places["other"].read_bytes() == b"a secret model"


def test_a_sealed_child_makes_files_as_any_program(hostile: Run, places: dict[str, Path]) -> None:
    """The seal changes no file's times and says that it did; `Path.touch` would then believe that its file is there."""
    folder = places["output"].parent
    end = hostile("make_files", seal=sealed(places), folder=str(folder))
    assert end.result is not None, end.log_tail
    assert {"touched", "copied"} <= set(end.result["made"])


def test_without_a_seal_the_same_probes_succeed(hostile: Run, places: dict[str, Path]) -> None:
    """The probes would notice a seal that is not there."""
    with within_reach(places) as fields:
        end = hostile("reach", **fields)
    assert end.result is not None, end.log_tail
    reached = {name for name, said in end.result["probes"].items() if said == "reached"}
    assert {
        "read another job's model",
        "write to the node's cache",
        "connect to a server",
        "connect to a local socket",
        "listen on a local socket",
        "keep bytes in a pair of sockets",
        "signal its guard",
        "limit the worker",
        "open another job's model to everybody",
        "change the times of another job's model",
    } <= reached


@needs_seal
@pytest.mark.parametrize("how", ["file", "folder", "above"])
def test_a_grant_does_not_follow_the_link_that_a_child_before_it_left(
    hostile: Run, places: dict[str, Path], tmp_path: Path, how: str
) -> None:
    """`program -> /` would give the next child every file of the worker's user."""
    folder = tmp_path / "attempt"
    (folder / "program").symlink_to({"file": places["other"], "folder": "/", "above": places["other"].parent}[how])
    granted = folder / "program" / (places["other"].name if how == "above" else "")
    seal = Seal(read=[HOSTILE.parent, granted], within=folder)
    end = hostile("read", seal=seal, path=str(places["other"]), folder=str(places["other"].parent))
    assert end.result is None
    assert end.error is not None
    assert "a link leads out of what was granted" in end.error["message"]


@needs_seal
def test_the_kernel_keeps_no_memory_semaphore_queue_or_key_for_a_sealed_child(
    hostile: Run, places: dict[str, Path]
) -> None:
    """They would outlive the attempt, and be shared with every other one of the node."""
    end = hostile("ipc", seal=sealed(places), key=os.getpid())
    assert end.result == dict.fromkeys(("shmget", "semget", "msgget", "mq_open", "add_key"), "refused")


@needs_seal
def test_a_sealed_child_gets_no_namespace_and_no_program_in_the_kernel(sealed_run: Run) -> None:
    """In a namespace of its own it would have all capabilities. `clone3` is answered as libraries expect."""
    end = sealed_run("namespaces")
    assert end.result is not None, end.log_tail
    said = end.result["said"]
    assert said.pop("clone3") == "ENOSYS"
    assert said == dict.fromkeys(said, "EACCES")
    assert len(said) == 10 + (platform.machine() == "x86_64")


@needs_seal
@pytest.mark.parametrize("landlock", [0, 5], ids=["this kernel", "before Linux 6.12"])
def test_a_sealed_child_cannot_signal_its_guard(sealed_run: Run, landlock: int) -> None:
    end = sealed_run("signal_guard", **({"landlock": landlock} if landlock else {}))
    assert end.result is not None, end.log_tail
    assert [name for name, said in end.result["said"].items() if not said.startswith("refused")] == []
    assert end.ok, "its guard has the last word"


@needs_seal
@pytest.mark.parametrize("landlock", [0, 2], ids=["this kernel", "before Linux 6.2"])
def test_a_sealed_child_cuts_no_file_short_but_its_own(hostile: Run, places: dict[str, Path], landlock: int) -> None:
    where = {name: str(places[name]) for name in ("other", "input")} | {"folder": str(places["output"].parent)}
    end = hostile("cut", seal=sealed(places), **where, **({"landlock": landlock} if landlock else {}))
    assert end.result is not None, end.log_tail
    assert [name for name, said in end.result["said"].items() if not said.startswith("refused")] == []
    assert end.result["own"] == "ow"
    assert (places["input"].read_bytes(), places["other"].read_bytes()) == (b"a model", b"a secret model")


@needs_seal
@pytest.mark.parametrize("landlock", [0, 5], ids=["this kernel", "before Linux 6.12"])
def test_a_sealed_child_works_in_threads_and_processes(hostile: Run, tmp_path: Path, landlock: int) -> None:
    """An older kernel's seal lets nobody end processes, not even their own: the guard does so in the end."""
    seal = Seal(read=[HOSTILE.parent])
    end = hostile("many", seal=seal, **({"landlock": landlock} if landlock else {}))
    killed = "refused" if landlock else -signal.SIGKILL
    assert end.result == {"threads": 285, "fork": 0, "spawn": 0, "forkserver": "EACCES", "killed": killed}
    assert classify(hostile("abort", seal=seal, **({"landlock": landlock} if landlock else {}))).message.startswith(
        "it died by SIGABRT"
    )


@needs_seal
def test_a_search_folder_may_be_made_of_links(hostile: Run, places: dict[str, Path], tmp_path: Path) -> None:
    """As where a module lies in a build folder, and the folder that is searched has a link to it."""
    for name in ("real/library", "real/module", "search"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "real/module/linked.py").write_text("import beside")
    (tmp_path / "real/library/beside.py").write_text("")
    (tmp_path / "search/linked.py").symlink_to(tmp_path / "real/module/linked.py")
    (tmp_path / "search/library").symlink_to(tmp_path / "real/library")
    request = {"path": str(tmp_path / "search/linked.py"), "folder": str(tmp_path / "search/library")}
    end = hostile("read", seal=sealed(places), search=[str(tmp_path / "search")], **request)
    assert end.result == {"read": "import beside", "listed": ["beside.py"]}, end.log_tail


@needs_seal
def test_a_sealed_child_can_work(hostile: Run, places: dict[str, Path]) -> None:
    """Inputs, outputs, temporary files and other programs are there."""
    end = hostile("work", seal=sealed(places), **{name: str(path) for name, path in places.items()})
    assert end.result == {"answer": 42}, end.log_tail
    assert places["output"].read_bytes() == b"made"

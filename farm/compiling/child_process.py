"""The worker's side of a child process: start it, follow it, end it, and say how that was.

Everything that touches a compiler or an unchecked model runs in such a child (`farm/runner/`): compilers read
their environment once, hold the interpreter for minutes, and can abort or hang the process.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from farm.compiling.answers import WrongAnswer, read_answer
from farm.compiling.cgroups import limited
from farm.compiling.outputs import MOST, sweep
from farm.files import remove_tree
from farm.jobs.state import Phase
from farm.targets.compilers import Maker

RUNNER = Path(__file__).parent.parent / "runner" / "child.py"
"""The program of every child; its folder holds nothing but the runner."""

OnMessage = Callable[[Mapping[str, Any]], None]
"""Takes `{"phase", "progress", "detail"}`, in the thread that called `run_child`."""

_LOOK_SECONDS = 0.2
"""Longest time until a cancel or a limit is noticed; messages and the end are noticed at once."""
LONGEST_MESSAGE = 1 << 20
"""Bytes of one message: what is in an answer goes on to the store, which holds all of it in memory."""
_DEEPEST_MESSAGE = 32
"""Levels of lists and objects in a message; answers have six or so."""
_PHASES = frozenset(Phase)
_LONGEST_DETAIL = 4000
"""Characters with which a child says how far it is; the store keeps the last of them."""
_MOST_PHASES = 1000
"""Phase changes that a child may report: each is an event of its build."""
_PATIENCE = 10.0
"""Seconds that the guard gets to say its last word, beyond those that processes may take to die."""
_MARK = "FARM_CHILD"
"""Environment variable with a random token, by which a child without its guard is still found."""
_INHERITED = (
    "PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TZ", "ROCM_PATH", "ROCM_HOME", "HIP_PATH", "SSL_CERT_FILE",
)  # fmt: skip
_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "DNNL_NUM_THREADS",
    "MIGRAPHX_GPU_COMPILE_PARALLEL",
    "MIOPEN_COMPILE_PARALLEL_LEVEL",
)


@dataclass(frozen=True, slots=True)
class ChildLimits:
    """What a child may use; 0 is no limit. Times in seconds, sizes in bytes.

    `hang` is how long neither a message, nor the log, nor CPU time may move, that is, beyond the cores that `waiting`
    burns: one where a GPU is waited for, none elsewhere. `whole` is the limit that `time` is the rest of, where it is
    one: what people are told. `dying` is how long what was killed may take to be gone, and a child that has answered
    to end by itself. `disk` is what it may write together with what others of its attempt have `written`, `processes`
    how many processes and threads it may have at once. `files` holds where `disk` is limited.
    """

    time: float = 0
    whole: float = 0
    memory: int = 0
    hang: float = 0
    waiting: float = 0.0
    log: int = 1 << 30
    disk: int = 0
    written: int = 0
    files: int = MOST
    processes: int = 0
    dying: float = 60.0


NO_LIMITS = ChildLimits(log=0)


@dataclass(frozen=True, slots=True)
class Seal:
    """What a sealed child may reach beside the system, its interpreter and its private folder (`farm/runner/seal.py`).

    `read` and `write` are files or folders, named by who starts the child, never by a child. Sockets and other
    processes are out of its reach. `within` is a folder in which other children write: no link there is followed.
    """

    read: Sequence[Path] = ()
    write: Sequence[Path] = ()
    within: Path | None = None


class EndedBy(StrEnum):
    """Who ended the child."""

    ITSELF = "itself"
    TIME_LIMIT = "time_limit"
    MEMORY_LIMIT = "memory_limit"
    DISK_LIMIT = "disk_limit"
    FILE_LIMIT = "file_limit"
    PROCESS_LIMIT = "process_limit"
    LOG_LIMIT = "log_limit"
    HANG = "hang"
    NONSENSE = "nonsense"
    STRAY_FILES = "stray_files"
    CANCELLED = "cancelled"


_KILLED = {
    "memory": EndedBy.MEMORY_LIMIT,
    "disk": EndedBy.DISK_LIMIT,
    "files": EndedBy.FILE_LIMIT,
    "processes": EndedBy.PROCESS_LIMIT,
}
"""Why the guard ended a child, in its words."""


@dataclass(frozen=True, slots=True)
class ChildEnd:
    """How a child ended, as it was seen; `classify` says what that means.

    `result` is its answer, checked by `read_answer`, `error` its own account of a failure. `signal` or `exit_code` is
    how the process went. `phases` has the seconds of each phase, `memory` the peak in bytes of all its processes
    together.
    """

    by: EndedBy
    limits: ChildLimits
    result: dict[str, Any] | None = None
    wrong: str = ""
    """What is wrong with its answer, by which it ended as NONSENSE; empty where it was no message at all."""
    error: dict[str, str] | None = None
    exit_code: int | None = None
    signal: int | None = None
    seconds: float = 0.0
    memory: int = 0
    oom_killer: bool = False
    """Whether the kernel killed it for want of memory; where it has no control group, whether it killed anybody so
    while it ran.
    """
    phase: str = ""
    phases: Mapping[str, float] = field(default_factory=dict)
    log_tail: str = ""
    left: Sequence[str] = ()
    """What was removed from its folders, since it was no plain file; such a child has failed."""
    stuck: tuple[int, ...] = ()
    """Process ids of what could not be killed, and is still there."""

    @property
    def ok(self) -> bool:
        """Whether it answered, and is gone."""
        return self.result is not None and self.by is EndedBy.ITSELF and not self.stuck


def run_child(
    request: Mapping[str, Any],
    *,
    log_path: Path,
    python: str = "",
    environment: Mapping[str, str] | None = None,
    limits: ChildLimits = NO_LIMITS,
    folder: Path | None = None,
    on_message: OnMessage | None = None,
    cancelled: threading.Event | None = None,
    seal: Seal | None = None,
    script: Path = RUNNER,
) -> ChildEnd:
    """Run one request (`farm/runner/protocol.py`) in a child and return how it ended.

    `environment` is added to the clean one that `child_environment` makes; the log is appended to `log_path`;
    `folder` is where the child's private temporary folder is made, and removed at the end. Whatever opens a model that
    nobody vouches for has a `seal`. When this returns or raises, or the calling process dies in any way, no process of
    the child is left, but those that the kernel does not let go (`ChildEnd.stuck`).

    Raises OSError where the child cannot be started.
    """
    scratch = Path(tempfile.mkdtemp(prefix="child-", dir=folder))
    try:
        with limited(limits.memory, limits.processes) as group, log_path.open("ab") as log:
            sealed = _sealed(seal, scratch, request)
            whole = {**request, "seal": sealed, "group": dict(group)}
            whole["folders"] = sealed["write"] if sealed else [str(scratch)]
            run = _ChildProcess(whole, scratch, limits, on_message, cancelled)
            start = log.tell()
            run.start([python or sys.executable, str(script)], environment or {}, log.fileno())
            try:
                run.follow()
            finally:
                run.end()
                _cut(log.fileno(), start + limits.log if limits.log else 0)
                run.left = [entry for place in (seal.write if seal else ()) for entry in _swept(place)]
        return run.outcome(_tail(log_path, start))
    finally:
        remove_tree(scratch)


def _cut(log: int, limit: int) -> None:
    """Cut a log that its child stretched: a process that holds a file can make it long without writing it."""
    if limit and os.fstat(log).st_size > limit:
        os.ftruncate(log, limit)


def _swept(place: Path) -> list[str]:
    return sweep(place) if place.is_dir() and not place.is_symlink() else []


def _sealed(seal: Seal | None, scratch: Path, request: Mapping[str, Any]) -> dict[str, list[str]] | None:
    if seal is None:
        return None
    search = [Path(folder) for folder in request.get("search") or ()]
    # A folder of modules may be made of links to where they are, and a library looks for others beside itself.
    entries = [entry for folder in search if folder.is_dir() for entry in folder.iterdir()]
    linked = [entry.resolve() for entry in entries if entry.is_symlink()]
    real = {place if place.is_dir() else place.parent for place in linked}
    return {
        "read": [_granted(path, seal.within) for path in (*seal.read, *search, *sorted(real))],
        "write": [_granted(path, seal.within) for path in (*seal.write, scratch)],
    }


def _granted(path: Path, within: Path | None) -> str:
    """Return the real path to grant; below `within` as it is written, so that the seal meets every link there."""
    if within and path.is_relative_to(within) and ".." not in path.parts:
        return str(within.resolve() / path.relative_to(within))
    return str(path.resolve())


def child_environment(
    scratch: Path,
    *,
    threads: int,
    gpu: str,
    maker: Maker,
    search: str,
    extra: Mapping[str, str],
) -> dict[str, str]:
    """Return the whole environment of a child: an allow-list, nothing else of the worker's.

    No address or credential of Redis, S3 or the API is in it. `gpu` pins the child to one GPU of its maker's (a UUID,
    or an index); without it no GPU is visible. `search` is an import path.
    """
    environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    environment |= dict.fromkeys(_THREAD_VARIABLES, str(threads))
    environment |= {
        "HOME": str(scratch),
        "TMPDIR": str(scratch),
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONNOUSERSITE": "1",
        # The quantizers walk through sets; what comes out shall not depend on the run.
        "PYTHONHASHSEED": "0",
        "MIOPEN_USER_DB_PATH": str(scratch / "miopen"),
        "MIOPEN_CUSTOM_CACHE_DIR": str(scratch / "miopen-cache"),
        # What the driver compiles for its card, and keeps: nobody's but this child's.
        "CUDA_CACHE_PATH": str(scratch / "cuda-cache"),
        # HIP counts within what ROCr leaves visible, so ROCr alone pins; -1 is a device that does not exist.
        "ROCR_VISIBLE_DEVICES": (gpu if maker == "amd" else "") or "-1",
        "CUDA_VISIBLE_DEVICES": (gpu if maker == "nvidia" else "") or "-1",
    }
    if search:
        environment["PYTHONPATH"] = search
    return environment | dict(extra or {})


class _ChildProcess:
    """One child from start to end."""

    def __init__(
        self,
        request: Mapping[str, Any],
        scratch: Path,
        limits: ChildLimits,
        on_message: OnMessage | None,
        cancelled: threading.Event | None,
    ) -> None:
        self.request = {
            **request,
            "memory": limits.memory,
            "processes": limits.processes,
            "disk": max(limits.disk - limits.written, 1) if limits.disk else 0,
            "files": limits.files,
            "dying": limits.dying,
        }
        self.scratch = scratch
        self.limits = limits
        self.on_message = on_message
        self.cancelled = cancelled
        self.token = secrets.token_hex(16)
        self.by = EndedBy.ITSELF
        self.nonsense = False
        self.wrong = ""
        self.turns = 0
        self.result: dict[str, Any] | None = None
        self.error: dict[str, str] | None = None
        self.ended: dict[str, Any] | None = None
        self.answered = math.inf
        self.stuck: list[int] = []
        self.phase = ""
        self.phases: dict[str, float] = {}
        self.cpu = 0.0
        self.memory = 0
        self.left: Sequence[str] = ()

    def start(self, command: list[str], environment: Mapping[str, str], log: int) -> None:
        path = self.scratch / "request.json"
        path.write_text(json.dumps(self.request))
        messages, message_end = os.pipe()
        words, word_end = os.pipe()
        self.pipes = {messages: bytearray(), words: bytearray()}
        self.words = words
        self.log = log
        self.log_start = self.log_size = os.fstat(log).st_size
        self.oom_kills = 0 if self.request["group"] else _oom_kills()
        self.started = self.moved = self.phase_since = time.monotonic()
        try:
            self.process = subprocess.Popen(
                [*command, str(path), str(message_end), str(word_end)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.scratch,
                env=child_environment(
                    self.scratch,
                    threads=int(self.request.get("threads") or 1),
                    gpu=str(self.request.get("gpu") or ""),
                    maker=self.request.get("maker") or "amd",
                    search=os.pathsep.join(self.request.get("search") or ()),
                    extra={**environment, _MARK: self.token},
                ),
                pass_fds=(message_end, word_end),
                start_new_session=True,
            )
        except BaseException:
            os.close(messages)
            os.close(words)
            raise
        finally:
            os.close(message_end)
            os.close(word_end)

    def follow(self) -> None:
        """Read until the guard has said its last word, or the child has to be ended."""
        with selectors.DefaultSelector() as selector:
            for pipe in self.pipes:
                selector.register(pipe, selectors.EVENT_READ)
            while self.words in selector.get_map():
                self.read(selector, self.pause())
                self.by = EndedBy.NONSENSE if self.nonsense else self.verdict()
                if self.by is not EndedBy.ITSELF or time.monotonic() - self.answered > self.limits.dying:
                    return

    def read(self, selector: selectors.BaseSelector, timeout: float) -> None:
        for key, _ in selector.select(timeout):
            data = os.read(key.fd, 1 << 16)
            if not data:
                selector.unregister(key.fd)
            buffer = self.pipes[key.fd]
            buffer += data
            if b"\n" not in data:
                self.nonsense |= len(buffer) > LONGEST_MESSAGE
                continue
            *lines, rest = buffer.split(b"\n")
            buffer[:] = rest
            for line in lines:
                self.hear(key.fd, line)

    def hear(self, pipe: int, line: bytearray) -> None:
        if len(line) > LONGEST_MESSAGE:
            self.nonsense = True
            return
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            self.nonsense = True
            return
        if pipe != self.words and _is_deep(message):
            self.nonsense = True
        else:
            # The child does not hold the guard's pipe, so it cannot say how it ended, or what it uses.
            self.guard_says(message) if pipe == self.words else self.child_says(message)

    def guard_says(self, message: Any) -> None:
        match message:
            case {"usage": {"cpu": float() | int() as cpu, "memory": int() as memory}}:
                self.memory = max(self.memory, memory)
                # A process that only wakes up now and then is not working: ask for 1 % of a core, and a tenth more than
                # waiting burns. Silent compilers of hundreds of candidates for a GPU keep all of their cores busy.
                idle = 0.01 + 1.1 * self.limits.waiting
                if cpu - self.cpu > idle * (time.monotonic() - self.moved):
                    self.moved, self.cpu = time.monotonic(), cpu
            case {"ended": dict(ended)}:
                self.ended = ended

    def child_says(self, message: Any) -> None:
        match message:
            case {"result": dict(result)}:
                self.answered = time.monotonic()
                try:
                    self.result = read_answer(self.request, result)
                except WrongAnswer as wrong:
                    self.wrong, self.nonsense = str(wrong), True
            case {"error": {"kind": str(), "message": str(), "detail": str()} as error}:
                self.error, self.answered = error, time.monotonic()
            case {"phase": str(phase), "progress": None | float() | int() as done, "detail": str(detail)} if (
                phase in _PHASES and (done is None or 0 <= done <= 1) and len(detail) <= _LONGEST_DETAIL
            ):
                self.moved = time.monotonic()
                self.turns += phase != self.phase
                self.nonsense |= self.turns > _MOST_PHASES
                self.enter(phase)
                if self.on_message:
                    self.on_message(message)
            case _:
                self.nonsense = True

    def enter(self, phase: str) -> None:
        now = time.monotonic()
        if self.phase:
            self.phases[self.phase] = self.phases.get(self.phase, 0.0) + now - self.phase_since
        self.phase, self.phase_since = phase, now

    def pause(self) -> float:
        if self.limits.time:
            return max(0.0, min(_LOOK_SECONDS, self.started + self.limits.time - time.monotonic()))
        return _LOOK_SECONDS

    def verdict(self) -> EndedBy:
        """Return who ends the child now; ITSELF lets it go on."""
        now = time.monotonic()
        if self.ended:
            by = _KILLED.get(self.ended["killed"], EndedBy.ITSELF)
            return EndedBy.ITSELF if by is EndedBy.MEMORY_LIMIT and not self.limits.memory else by
        size = os.fstat(self.log).st_size
        if size != self.log_size:
            self.log_size, self.moved = size, now
        if self.cancelled and self.cancelled.is_set():
            return EndedBy.CANCELLED
        if self.limits.time and now - self.started >= self.limits.time:
            return EndedBy.TIME_LIMIT
        if self.limits.hang and now - self.moved >= self.limits.hang:
            return EndedBy.HANG
        if self.limits.log and size - self.log_start > self.limits.log:
            return EndedBy.LOG_LIMIT
        return EndedBy.ITSELF

    def end(self) -> None:
        """Close the guard's pipe and wait until it has cleared up; where it cannot, do it in its place."""
        if self.process.stdin:
            self.process.stdin.close()
        deadline = time.monotonic() + self.limits.dying + _PATIENCE
        with selectors.DefaultSelector() as selector:
            for pipe in self.pipes:
                selector.register(pipe, selectors.EVENT_READ)
            while self.words in selector.get_map() and time.monotonic() < deadline:
                self.drain(selector, deadline - time.monotonic())
        for pipe in self.pipes:
            os.close(pipe)
        if self.ended is None:
            self.process.kill()
            self.stuck = _kill_marked(self.token, self.process.pid, self.limits.dying)
        else:
            self.stuck = self.ended["stuck"]
        try:
            self.process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self.stuck.append(self.process.pid)
        self.enter("")
        self.seconds = time.monotonic() - self.started

    def drain(self, selector: selectors.BaseSelector, timeout: float) -> None:
        """Read what still comes, so that nobody blocks on a full pipe; progress is no longer told."""
        self.on_message = None
        self.read(selector, timeout)

    def outcome(self, log_tail: str) -> ChildEnd:
        ended = self.ended or {}
        killed, out_of_memory = bool(ended.get("killed")), ended.get("killed") == "memory"
        return ChildEnd(
            by=EndedBy.STRAY_FILES if self.left and self.by is EndedBy.ITSELF else self.by,
            left=self.left,
            limits=self.limits,
            result=self.result,
            wrong=self.wrong,
            error=self.error,
            exit_code=ended.get("exit"),
            signal=ended.get("signal") or (int(signal.SIGKILL) if killed or not ended else None),
            seconds=self.seconds,
            memory=max(self.memory, ended.get("memory", 0)),
            # Of the machine's count nobody knows whom it is about: another child may have gone over its limit.
            oom_killer=out_of_memory if self.request["group"] else _oom_kills() > self.oom_kills,
            phase=max(self.phases, key=lambda name: list(self.phases).index(name), default=""),
            phases={name: round(seconds, 3) for name, seconds in self.phases.items()},
            log_tail=log_tail,
            stuck=tuple(self.stuck),
        )


def _is_deep(message: Any) -> bool:
    """Whether the lists and objects of a message are nested deeper than `_DEEPEST_MESSAGE`."""
    level = [message] if isinstance(message, dict | list) else []
    for _ in range(_DEEPEST_MESSAGE):
        level = [
            inner
            for value in level
            for inner in (value.values() if isinstance(value, dict) else value)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def _tail(path: Path, start: int) -> str:
    """Return the last bytes of what was written to a log from a position on, as text."""
    with path.open("rb") as log:
        log.seek(max(start, log.seek(0, os.SEEK_END) - 16384))
        return log.read().decode(errors="replace")


def _oom_kills() -> int:
    """Return how often the kernel killed a process of this machine, or of this control group, for memory."""
    total = 0
    for place in ("/proc/vmstat", "/sys/fs/cgroup/memory.events"):
        try:
            text = Path(place).read_text()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill "))
    return total


def _kill_marked(token: str, guard: int, seconds: float) -> list[int]:
    """Kill every process with a child's mark in its environment; return those that are still there after `seconds`."""
    mark = f"{_MARK}={token}".encode()
    deadline = time.monotonic() + seconds
    while found := [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and _is_alive_with(entry, mark, guard)
    ]:
        if time.monotonic() > deadline:
            return found
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return []


def _is_alive_with(process: Path, mark: bytes, guard: int) -> bool:
    try:
        state, _, _, session, *_ = (process / "stat").read_text().rpartition(")")[2].split()
        if state == "D":  # Its environment may be locked, and who reads that would be as stuck.
            return int(session) == guard
        # The environment of a zombie reads as empty, so what was killed is not found again.
        return mark in (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return False

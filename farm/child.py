"""The worker's side of a child process: start it, follow it, end it, and decide how it ended.

Everything that touches a compiler or an unchecked model runs in such a child (`farm/runner/`): compilers read
their environment once, hold the interpreter for minutes, and can abort or hang the process.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from farm.cgroups import limited
from farm.jobs.state import FailureKind

RUNNER = Path(__file__).parent / "runner" / "child.py"
"""The program of every child; its folder holds nothing but the runner."""

OnMessage = Callable[[Mapping[str, Any]], None]
"""Takes `{"phase", "progress", "detail"}`, in the thread that called `run_child`."""

_LOOK_SECONDS = 0.2
"""Longest time until a cancel or a limit is noticed; messages and the end are noticed at once."""
_PATIENCE = 10.0
"""Seconds that the guard gets to kill and reap what it watches."""
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
class Limits:
    """What a child may use; 0 is no limit. Times in seconds, sizes in bytes.

    `hang` is how long neither a message, nor the log, nor CPU time may move; with `progress_only` (on a GPU,
    where waiting burns CPU too) CPU time does not count. `whole` is the limit that `time` is the rest of, where it is
    one: what people are told.
    """

    time: float = 0
    whole: float = 0
    memory: int = 0
    hang: float = 0
    progress_only: bool = False
    log: int = 1 << 30


NO_LIMITS = Limits(log=0)


@dataclass(frozen=True, slots=True)
class Seal:
    """What a sealed child may reach beside the system, its interpreter and its private folder (`farm/runner/seal.py`).

    `read` and `write` are files or folders. Sockets and other processes are out of its reach.
    """

    read: Sequence[Path] = ()
    write: Sequence[Path] = ()


class EndedBy(StrEnum):
    """Who ended the child."""

    ITSELF = "itself"
    TIME_LIMIT = "time_limit"
    MEMORY_LIMIT = "memory_limit"
    LOG_LIMIT = "log_limit"
    HANG = "hang"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class ChildEnd:
    """How a child ended, as it was seen; `classify` says what that means.

    `result` is its answer, `error` its own account of a failure. `signal` or `exit_code` is how the process
    went. `phases` has the seconds of each phase, `memory` the peak in bytes of all its processes together.
    """

    by: EndedBy
    limits: Limits
    result: dict[str, Any] | None = None
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

    @property
    def ok(self) -> bool:
        """Whether it answered."""
        return self.result is not None and self.by is EndedBy.ITSELF


class Failure(NamedTuple):
    """Why a child failed: the kind, one sentence, and a few useful lines of its log."""

    kind: FailureKind
    message: str
    detail: str = ""


def run_child(
    request: Mapping[str, Any],
    *,
    log_path: Path,
    python: str = "",
    environment: Mapping[str, str] | None = None,
    limits: Limits = NO_LIMITS,
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
    the child is left.

    Raises OSError where the child cannot be started.
    """
    scratch = Path(tempfile.mkdtemp(prefix="child-", dir=folder))
    try:
        with limited(limits.memory) as group, log_path.open("ab") as log:
            whole = {**request, "seal": _sealed(seal, scratch, request), "group": dict(group)}
            run = _Run(whole, scratch, limits, on_message, cancelled)
            start = log.tell()
            run.start([python or sys.executable, str(script)], environment or {}, log.fileno())
            try:
                run.follow()
            finally:
                run.end()
        return run.outcome(_tail(log_path, start))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _sealed(seal: Seal | None, scratch: Path, request: Mapping[str, Any]) -> dict[str, list[str]] | None:
    if seal is None:
        return None
    search = [Path(folder) for folder in request.get("search") or ()]
    # A folder of modules may be made of links to where they are, and a library looks for others beside itself.
    entries = [entry for folder in search if folder.is_dir() for entry in folder.iterdir()]
    linked = [entry.resolve() for entry in entries if entry.is_symlink()]
    real = {place if place.is_dir() else place.parent for place in linked}
    return {
        "read": [*map(str, (*seal.read, *search, *sorted(real)))],
        "write": [*map(str, seal.write), str(scratch)],
    }


def child_environment(
    scratch: Path,
    *,
    threads: int,
    gpu: str,
    search: str,
    extra: Mapping[str, str],
) -> dict[str, str]:
    """Return the whole environment of a child: an allow-list, nothing else of the worker's.

    No address or credential of Redis, S3 or the API is in it. `gpu` pins the child to one GPU (`GPU-<uuid>`
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
        # HIP counts within what ROCr leaves visible, so ROCr alone pins; -1 is a device that does not exist.
        "ROCR_VISIBLE_DEVICES": gpu or "-1",
    }
    if search:
        environment["PYTHONPATH"] = search
    return environment | dict(extra or {})


class _Run:
    """One child from start to end."""

    def __init__(
        self,
        request: Mapping[str, Any],
        scratch: Path,
        limits: Limits,
        on_message: OnMessage | None,
        cancelled: threading.Event | None,
    ) -> None:
        self.request = {**request, "memory": limits.memory}
        self.scratch = scratch
        self.limits = limits
        self.on_message = on_message
        self.cancelled = cancelled
        self.token = secrets.token_hex(16)
        self.by = EndedBy.ITSELF
        self.result: dict[str, Any] | None = None
        self.error: dict[str, str] | None = None
        self.ended: dict[str, Any] | None = None
        self.phase = ""
        self.phases: dict[str, float] = {}
        self.cpu = 0.0
        self.memory = 0

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
                self.by = self.verdict()
                if self.by is not EndedBy.ITSELF:
                    return

    def read(self, selector: selectors.BaseSelector, timeout: float) -> None:
        for key, _ in selector.select(timeout):
            data = os.read(key.fd, 1 << 16)
            if not data:
                selector.unregister(key.fd)
            buffer = self.pipes[key.fd]
            buffer += data
            *lines, rest = buffer.split(b"\n")
            buffer[:] = rest
            for line in lines:
                self.message(json.loads(line))

    def message(self, message: dict[str, Any]) -> None:
        match message:
            case {"usage": {"cpu": cpu, "memory": memory}}:
                self.memory = max(self.memory, memory)
                # A process that only wakes up now and then is not working: ask for 1 % of a core.
                if not self.limits.progress_only and cpu - self.cpu > 0.01 * (time.monotonic() - self.moved):
                    self.moved, self.cpu = time.monotonic(), cpu
            case {"ended": dict(ended)}:
                self.ended = ended
            case {"result": dict(result)}:
                self.result = result
            case {"error": dict(error)}:
                self.error = error
            case {"phase": str(phase)}:
                self.moved = time.monotonic()
                self.enter(phase)
                if self.on_message:
                    self.on_message(message)

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
            return EndedBy.MEMORY_LIMIT if self.ended["killed"] and self.limits.memory else EndedBy.ITSELF
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
        deadline = time.monotonic() + _PATIENCE
        with selectors.DefaultSelector() as selector:
            for pipe in self.pipes:
                selector.register(pipe, selectors.EVENT_READ)
            while self.words in selector.get_map() and time.monotonic() < deadline:
                self.drain(selector, deadline - time.monotonic())
        for pipe in self.pipes:
            os.close(pipe)
        if self.ended is None:
            self.process.kill()
            _kill_marked(self.token)
        self.process.wait()
        self.enter("")
        self.seconds = time.monotonic() - self.started

    def drain(self, selector: selectors.BaseSelector, timeout: float) -> None:
        """Read what still comes, so that nobody blocks on a full pipe; progress is no longer told."""
        self.on_message = None
        self.read(selector, timeout)

    def outcome(self, log_tail: str) -> ChildEnd:
        ended = self.ended or {}
        killed = bool(ended.get("killed"))
        return ChildEnd(
            by=self.by,
            limits=self.limits,
            result=self.result,
            error=self.error,
            exit_code=ended.get("exit"),
            signal=ended.get("signal") or (int(signal.SIGKILL) if killed or not ended else None),
            seconds=self.seconds,
            memory=max(self.memory, ended.get("memory", 0)),
            # Of the machine's count nobody knows whom it is about: another child may have gone over its limit.
            oom_killer=killed if self.request["group"] else _oom_kills() > self.oom_kills,
            phase=max(self.phases, key=lambda name: list(self.phases).index(name), default=""),
            phases={name: round(seconds, 3) for name, seconds in self.phases.items()},
            log_tail=log_tail,
        )


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


def _kill_marked(token: str) -> None:
    """Kill every process that carries a child's mark in its environment."""
    mark = f"{_MARK}={token}".encode()
    found = True
    while found:
        found = False
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and _is_alive_with(entry, mark):
                found = True
                try:
                    os.kill(int(entry.name), signal.SIGKILL)
                except ProcessLookupError:
                    continue


def _is_alive_with(process: Path, mark: bytes) -> bool:
    try:
        # The environment of a zombie reads as empty, so what was killed is not found again.
        return mark in (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return False


# --- how it ended ----------------------------------------------------------------------------------------------


class _Known(NamedTuple):
    """Something that compilers say: the pattern, the kind it is, and the sentence (empty: the compiler's own)."""

    pattern: str
    kind: FailureKind
    sentence: str = ""


_DYING_WORDS = (
    _Known(r"No space left on device|Disk quota exceeded", FailureKind.STORAGE, "the worker's disk is full"),
    _Known(
        r"Gpu allocation failed|hipErrorOutOfMemory|HIP out of memory",
        FailureKind.GPU_MEMORY,
        "the GPU's memory ran out",
    ),
    _Known(
        r"Memory access fault by GPU|HW Exception by GPU|GPU Hang|hipErrorIllegalAddress",
        FailureKind.GPU_FAULT,
        "the GPU reported a fault",
    ),
    _Known(
        r"No device\b|Failed to get device properties|no ROCm-capable device",
        FailureKind.GPU_FAULT,
        "the compiler found no working GPU",
    ),
    _Known(
        r"std::bad_alloc|\bbad allocation\b|MemoryError|Cannot allocate memory|Failed to allocate memory",
        FailureKind.OUT_OF_MEMORY,
        "memory ran out",
    ),
)
"""Also looked for at the end of the log of a process that died."""

_MESSAGES = (
    _Known(
        r"Unknown operator: (?P<what>\S+)",
        FailureKind.UNSUPPORTED_OPERATOR,
        "the compiler does not have operator {what}",
    ),
    _Known(
        r"Prototensor data type (?P<what>\d+) not supported",
        FailureKind.UNSUPPORTED_OPERATOR,
        "the compiler does not have the model's tensor type {what}",
    ),
    _Known(
        r"NOT_IMPLEMENTED|is not a registered function/op|Could not find an implementation"
        r"|can't be converted to MLDataType|Unsupported model IR version|ONNX Runtime only \*guarantees\* support"
        r"|\b(?:is|are) not supported\b",
        FailureKind.UNSUPPORTED_OPERATOR,
    ),
    _Known(r"Failed reading (?:onnx|tf) file", FailureKind.BAD_MODEL, "the compiler cannot read the model file"),
    _Known(
        r"Dynamic loading or symbol lookup failed|Program version mismatch|Operator not found: "
        r"|Failed to load module: ",
        FailureKind.TOOLCHAIN_MISMATCH,
    ),
    *_DYING_WORDS,
)

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


def classify(end: ChildEnd) -> Failure | None:
    """Return why a child failed; None where it answered, or was cancelled. Decided here and nowhere else."""
    if end.ok or end.by is EndedBy.CANCELLED:
        return None
    detail = useful_lines(end.log_tail)
    if end.by is not EndedBy.ITSELF:
        return _from_limit(end, detail)
    if end.error is not None:
        return _from_error(end.error, detail)
    return _from_death(end, detail)


def _from_limit(end: ChildEnd, detail: str) -> Failure:
    signs = "progress" if end.limits.progress_only else "progress and no CPU time"
    kind, sentence = {
        EndedBy.TIME_LIMIT: (
            FailureKind.TIME_LIMIT,
            f"it took longer than {_seconds(end.limits.whole or end.limits.time)}",
        ),
        EndedBy.HANG: (FailureKind.HANG, f"no {signs} for {_seconds(end.limits.hang)}"),
        EndedBy.MEMORY_LIMIT: (
            FailureKind.OUT_OF_MEMORY,
            f"it needed more memory than {_bytes(end.limits.memory)}",
        ),
        EndedBy.LOG_LIMIT: (
            FailureKind.COMPILER_ERROR,
            f"it wrote more than {_bytes(end.limits.log)} of log",
        ),
    }[end.by]
    return Failure(kind, sentence + _during(end), detail)


def _from_error(error: Mapping[str, str], detail: str) -> Failure:
    message = error.get("message") or "the compiler failed without a message"
    detail = error.get("detail") or detail
    stated = error.get("kind", "")
    if stated in ("", FailureKind.INTERNAL):
        found = _recognise(_MESSAGES, f"{message}\n{detail}")
        if found:
            return Failure(found.kind, found.message or message, detail)
    return Failure(FailureKind(stated or FailureKind.COMPILER_ERROR), message, detail)


def _from_death(end: ChildEnd, detail: str) -> Failure:
    found = _recognise(_DYING_WORDS, end.log_tail)
    if found and end.exit_code != 0:
        return Failure(found.kind, found.message + _during(end), detail)
    if end.signal == signal.SIGKILL and end.oom_killer:
        return Failure(FailureKind.OUT_OF_MEMORY, "the machine's memory ran out" + _during(end), detail)
    how = f"died by {_signal_name(end.signal)}" if end.signal else f"exited with code {end.exit_code} and no answer"
    return Failure(FailureKind.COMPILER_CRASH, f"it {how}{_during(end)}", detail)


def _recognise(table: tuple[_Known, ...], text: str) -> Failure | None:
    for known in table:
        if found := re.search(known.pattern, text):
            return Failure(known.kind, known.sentence.format(**found.groupdict()))
    return None


def _during(end: ChildEnd) -> str:
    return f" while {end.phase}" if end.phase else ""


def useful_lines(log: str) -> str:
    """Return the last lines of a log that say something, without colours."""
    lines = [_ANSI.sub("", line).rstrip()[:400] for line in log.splitlines()]
    return "\n".join([line for line in lines if line][-8:])


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _seconds(seconds: float) -> str:
    return f"{seconds:g} s" if seconds < 120 else f"{seconds / 60:g} min" if seconds < 7200 else f"{seconds / 3600:g} h"


def _bytes(size: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20)):
        if size >= scale:
            return f"{size / scale:.4g} {unit}"
    return f"{size} bytes"

"""The parent's side of a child process: start it, follow it, end it, and return how it ended.

Everything that touches a compiler or an unchecked model runs in such a child (`farm/runner/`): compilers read
their environment once, hold the interpreter for minutes, and can abort or hang the process. A hostile model can have
its child say anything, so each line is checked; the child does not hold the guard's pipe.
"""

from __future__ import annotations

import json
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from farm import entry_points
from farm.compiling.alone import LOOK_SECONDS, Clock, Host, HostChild
from farm.compiling.asking import WrongAnswer, read_answer
from farm.compiling.cgroups import limited
from farm.compiling.failures import NO_LIMITS, ChildEnd, ChildLimits, EndedBy, classify
from farm.compiling.templates import Templates
from farm.files import remove_tree, sweep
from farm.jobs.state import Phase
from farm.runner.documents import ChildError, ChildRequest, PhaseMessage, SealPaths
from farm.runner.protocol import is_deep
from farm.targets.compilers import child_modules, with_folder

RUNNER = Path(__file__).parent.parent / "runner" / "child.py"
"""The program of every child; its folder holds nothing but the runner."""

_LOOK_SECONDS = 0.2  # Longest time until a cancel or a limit is noticed; messages and the end are noticed at once.
_PATIENCE = 10.0  # Seconds that the launcher gets for its last word, beyond the time that processes may take to die.
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

OnMessage = Callable[[PhaseMessage], None]  # Hears what the child is doing, in the thread that called `run_child`.

LONGEST_MESSAGE = 1 << 20
"""Bytes of one message: what is in an answer goes on to the store, which holds all of it in memory."""
_DEEPEST_MESSAGE = 32  # Levels of lists and objects in a message; answers have six or so.
_PHASES = frozenset(Phase)
_LONGEST_DETAIL = 4000  # Characters with which a child says how far it is; the store keeps the last of them.
_MOST_PHASES = 1000  # Phase changes that a child may report: each is an event of its build.
_MOST_MESSAGES = 200_000  # Messages of one child: each takes time of the worker, which other attempts share.


@dataclass(frozen=True, slots=True)
class Seal:
    """What a sealed child may access, besides the system, its interpreter and its private folder (`runner/seal.py`).

    `read` and `write` are files or folders. The parent chooses them, never a child. Sockets and other processes are out
    of reach. `within` is a folder in which other children write: links in it are not followed.
    """

    read: Sequence[Path] = ()
    write: Sequence[Path] = ()
    within: Path | None = None


def run_child(
    request: ChildRequest,
    *,
    log_path: Path,
    python: str = "",
    environment: Mapping[str, str] | None = None,
    limits: ChildLimits = NO_LIMITS,
    folder: Path | None = None,
    on_message: OnMessage | None = None,
    cancelled: threading.Event | None = None,
    seal: Seal | None = None,
    host: Host | None = None,
    clock: Clock | None = None,
    script: Path = RUNNER,
    answer: Hashable = None,
    templates: Templates | None = None,
) -> ChildEnd:
    """Run one request (`farm/runner/protocol.py`) in a child and return how it ended.

    `environment` is added to the clean one that `child_environment` makes. The log is appended to `log_path`. The
    child's private temporary folder is made in `folder`, and removed at the end. A child that opens an untrusted model
    needs a `seal`. On a `host`, it is paused while another program is measured there; `clock` stands still then.
    `answer` is the type of the answer to an extension's action. With `templates` the child is forked from one, if that
    can be. When this returns or raises, or if the calling process dies in any way, no process of the child is left,
    except those that the kernel cannot end (`ChildEnd.stuck`).

    Raises OSError if the child cannot be started.
    """
    scratch = Path(tempfile.mkdtemp(prefix="child-", dir=folder))
    try:
        with limited(limits.memory, limits.processes) as group, log_path.open("ab") as log:
            sealed: SealPaths | None = None
            if seal:
                sealed = {
                    "read": [*(_granted(path, seal.within) for path in seal.read), *_libraries(request)],
                    "write": [_granted(path, seal.within) for path in (*seal.write, scratch)],
                }
            whole: ChildRequest = {
                **request,
                "modules": _modules(),
                "seal": sealed,
                "group": group,
                "folders": sealed["write"] if sealed else [str(scratch)],
                "memory": limits.memory,
                "processes": limits.processes,
                "disk": max(limits.disk - limits.written, 1) if limits.disk else 0,
                "files": limits.files,
                "dying": limits.dying,
            }
            command = [python or sys.executable, str(script)]
            variables = partial(child_environment, request=whole, extra=environment or {})
            launch = partial(ChildProcess, command, whole, variables, scratch, log.fileno())
            with (
                (host or Host()).child(clock or Clock(), gpu=bool(request.get("gpu")), cancelled=cancelled) as place,
                closing(launch(place, limits, answer, on_message, templates)) as child,
            ):
                try:
                    place.started(child.say)
                    by = child.follow(cancelled)
                finally:
                    place.leave()
                    child.end()
                    if limits.log:  # A process that holds the log can make it long without writing to it.
                        os.ftruncate(log.fileno(), min(os.fstat(log.fileno()).st_size, child.log_start + limits.log))
                    written = [place for place in (seal.write if seal else ()) if place.is_dir()]
                    left = [entry for place in written if not place.is_symlink() for entry in sweep(place)]
        with log_path.open("rb") as written_log:
            written_log.seek(max(child.log_start, written_log.seek(0, os.SEEK_END) - 16384))
            tail = written_log.read().decode(errors="replace")
        return child.outcome(by, left, tail)
    finally:
        remove_tree(scratch)


def ask_once(
    request: ChildRequest,
    limits: ChildLimits,
    *,
    python: str = "",
    folder: Path | None = None,
    seal: Seal | None = None,
    answer: Hashable = None,
) -> Any:
    """Run one request in a child of no attempt, in a folder of its own; return its answer, else the Failure.

    The arguments are those of `run_child`. Raises OSError if the child cannot be started.
    """
    with tempfile.TemporaryDirectory(prefix="farm-", dir=folder) as name:
        own = Path(name)
        log = own / "log.txt"
        end = run_child(request, log_path=log, python=python, limits=limits, folder=own, seal=seal, answer=answer)
    return classify(end) or end.result


def _libraries(request: ChildRequest) -> list[str]:
    """Return the real paths of the folders from which a child loads what is not its interpreter's."""
    search = [Path(folder) for folder in request.get("search") or ()]
    # A folder of modules may consist of links, and a library looks for others in its own folder.
    entries = [entry for folder in search if folder.is_dir() for entry in folder.iterdir()]
    linked = [entry.resolve() for entry in entries if entry.is_symlink()]
    real = {place if place.is_dir() else place.parent for place in linked}
    added = [Path(folder) for _, folder in _modules().values()]
    return [str(path.resolve()) for path in (*search, *sorted(real), *added)]


@cache
def _modules() -> dict[str, list[str]]:
    """Return the modules that extensions add to children, as `farm.runner.actions.add_modules` takes them."""
    others = entry_points.modules(entry_points.CHILDREN)
    return {**child_modules(), **{f"{name}/*": with_folder(module) for name, module in others.items()}}


def _granted(path: Path, within: Path | None) -> str:
    """Return the real path to grant; below `within` as it is written, so that the seal meets every link there."""
    if within and path.is_relative_to(within) and ".." not in path.parts:
        return str(within.resolve() / path.relative_to(within))
    return str(path.resolve())


def child_environment(scratch: Path, request: ChildRequest, extra: Mapping[str, str]) -> dict[str, str]:
    """Return the whole environment of a child: an allow-list, nothing else of the worker's.

    No address or credential of Redis, S3 or the API is in it. The request's `gpu` pins the child to one GPU of its
    maker's (a UUID, or an index); without it no GPU is visible.
    """
    gpu, maker = request.get("gpu") or "", request.get("maker") or "amd"
    search = os.pathsep.join(request.get("search") or ())
    environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    environment |= dict.fromkeys(_THREAD_VARIABLES, str(request.get("threads") or 1))
    environment |= {
        # Let numpy's idle threads sleep after 2^4 ticks: by default they spin, at each start for half its import time.
        "OPENBLAS_THREAD_TIMEOUT": "4",
        "HOME": str(scratch),
        "TMPDIR": str(scratch),
        "LC_CTYPE": "C.UTF-8",  # Else Python sets it in a cold child, where there is no locale.
        # ONNX Runtime 1.32 opens a database in HOME and a thread as it is loaded, to report its use to its maker.
        "ORT_DISABLE_TELEMETRY": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONNOUSERSITE": "1",
        # The quantizers walk through sets; what comes out shall not depend on the run.
        "PYTHONHASHSEED": "0",
        "MIOPEN_USER_DB_PATH": str(scratch / "miopen"),
        "MIOPEN_CUSTOM_CACHE_DIR": str(scratch / "miopen-cache"),
        # The driver's cache of kernels: this child's own.
        "CUDA_CACHE_PATH": str(scratch / "cuda-cache"),
        # HIP counts within what ROCr leaves visible, so ROCr alone pins; -1 is a device that does not exist.
        "ROCR_VISIBLE_DEVICES": (gpu if maker == "amd" else "") or "-1",
        "CUDA_VISIBLE_DEVICES": (gpu if maker == "nvidia" else "") or "-1",
    }
    if search:
        environment["PYTHONPATH"] = search
        if libraries := environment.get("LD_LIBRARY_PATH"):
            environment["LD_LIBRARY_PATH"] = _without_others(libraries, search)
    return {**environment, **extra}


def _without_others(libraries: str, search: str) -> str:
    """Return a path of libraries without folders of another MIGraphX, whose targets the searched one would load."""
    own = {Path(folder).resolve() for folder in search.split(os.pathsep)}
    return os.pathsep.join(
        folder
        for folder in libraries.split(os.pathsep)
        if Path(folder).resolve() in own or not any(Path(folder).glob("libmigraphx.so*"))
    )


@dataclass
class ChildProcess:
    """One child process: starts it, follows it until it ends or has to be ended, and cleans up. Has to be closed.

    It reads what the child and its guard say, over one pipe each. `environment` returns the child's variables by its
    folder, `log` is a file descriptor, `place` the child's among those of its host, `answer` an extension's type.

    Raises OSError if the child cannot be started.
    """

    command: Sequence[str]
    request: ChildRequest
    environment: Callable[[Path], dict[str, str]]
    scratch: Path
    log: int
    place: HostChild
    limits: ChildLimits
    answer: Hashable
    on_message: OnMessage | None
    templates: Templates | None

    def __post_init__(self) -> None:
        self.seen = ChildEnd(EndedBy.ITSELF, self.limits)
        """What is known of its end so far."""
        self.killed: str | None = None
        """Which limit its guard enforced, once that has said its last word; empty for none."""
        self.is_nonsense = False
        """Whether the child said something that is not a message."""
        self.heard = self.changes = 0
        """Messages of the child so far, and changes of its phase."""
        self.last = PhaseMessage(phase=Phase.MEASURING, progress=None, detail="")
        """What the child has reported last; one that only measures does not report before."""
        self.standstill = ""
        self.answered = math.inf
        self.used = self.counted = 0.0
        """Seconds of CPU time: those that it has used, and how many of them were taken for a sign of life."""
        self.grouped = self.request["group"].get("memory", False)
        self.oom_kills = 0 if self.grouped else _oom_kills()
        self.log_start = self.log_size = os.fstat(self.log).st_size
        messages, message_end = os.pipe()
        self.words, word_end = os.pipe()
        self.buffers = {messages: bytearray(), self.words: bytearray()}
        self.selector = selectors.DefaultSelector()
        for pipe in self.buffers:
            self.selector.register(pipe, selectors.EVENT_READ)
        self._start((message_end, word_end))
        self.started = self.moved = self.now
        """When it last gave a sign of life, as far as was looked. A child that is paused loses no time."""

    def _start(self, ends: tuple[int, int]) -> None:
        """Start its launcher, or fork it; `ends` are the writing ends of the child and of its guard, closed here."""
        path = self.scratch / "request.json"
        told, teller = os.pipe()
        self.guard = open(teller, "wb", buffering=0)  # noqa: PTH123, SIM115 (`end` closes it)
        # Children inherit it: until the launcher ignores SIGTERM, none gets there.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            path.write_text(json.dumps(self.request))
            inherited = told, self.log, *ends
            forked = self.templates and self.templates.fork(self, _libraries(self.request), inherited)
            self.process = forked or subprocess.Popen(
                [*self.command, str(path), *map(str, ends)],
                stdin=told,
                stdout=self.log,
                stderr=subprocess.STDOUT,
                cwd=self.scratch,
                env=self.environment(self.scratch),
                pass_fds=ends,
                start_new_session=True,
            )
        except BaseException:
            self.guard.close()
            self.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            for end in (told, *ends):
                os.close(end)

    @property
    def now(self) -> float:
        """Seconds of its attempt, without those in which that was paused."""
        return self.place.clock()

    @property
    def is_over(self) -> bool:
        """Whether the guard has closed its pipe."""
        return self.words not in self.selector.get_map()

    def close(self) -> None:
        """Close the reading ends."""
        self.selector.close()
        for pipe in self.buffers:
            os.close(pipe)

    def follow(self, cancelled: threading.Event | None) -> EndedBy:
        """Read until the launcher has said its last word, or the child has to be ended; return why."""
        limits = self.limits
        while not self.is_over:
            left = self.started + limits.time - self.now if limits.time else math.inf
            self._read(LOOK_SECONDS if self.place.asks else max(0.01, min(_LOOK_SECONDS, left)))
            if (standstill := self.place.look()) != self.standstill:
                self.standstill = standstill
                self._report({**self.last, "detail": standstill or self.last["detail"]})
            by = EndedBy.NONSENSE if self.is_nonsense or self.seen.wrong else self._verdict(cancelled)
            if by is not EndedBy.ITSELF or time.monotonic() - self.answered > limits.dying:
                return by
        return EndedBy.ITSELF

    def _verdict(self, cancelled: threading.Event | None) -> EndedBy:
        """Return why the child has to be ended now; ITSELF if it may continue."""
        now, size, limits = self.now, os.fstat(self.log).st_size, self.limits
        is_too_long = bool(limits.log) and size - self.log_start > limits.log
        if self.killed is not None:
            by = EndedBy(self.killed)
            if by is EndedBy.MEMORY_LIMIT and not limits.memory:
                by = EndedBy.ITSELF
            # A child can make its log long and end between two looks.
            return EndedBy.LOG_LIMIT if by is EndedBy.ITSELF and is_too_long else by
        if cancelled and cancelled.is_set():
            return EndedBy.CANCELLED
        if limits.time and now - self.started >= limits.time:
            return EndedBy.TIME_LIMIT
        if limits.hang and now - self._alive(now, size) >= limits.hang:
            return EndedBy.HANG
        return EndedBy.LOG_LIMIT if is_too_long else EndedBy.ITSELF

    def _alive(self, now: float, size: int) -> float:
        """Return when it last gave a sign of life; its log has this size now."""
        # A process that only wakes up now and then is not working: ask for 1 % of a core, and a tenth more than
        # waiting burns. Silent compilers of hundreds of candidates for a GPU keep all of their cores busy.
        idle = 0.01 + 1.1 * self.limits.waiting
        if size != self.log_size:
            self.log_size, self.moved = size, now
        if self.used - self.counted > idle * (now - self.moved):
            self.moved, self.counted = now, self.used
        return self.moved

    def say(self, words: bytes) -> None:
        """Send words to the guard, if it is still there."""
        with suppress(OSError):
            self.guard.write(words)

    def end(self) -> None:
        """Close the launcher's pipe and wait for its last word; without it the child has failed."""
        self.guard.close()
        self.on_message = None
        self._hear_out()
        if self.killed is None and not self.is_over:
            self.process.kill()  # Then its guard ends what is left.
            self._hear_out()
        try:
            self.process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self.seen = replace(self.seen, stuck=(*self.seen.stuck, self.process.pid))

    def _hear_out(self) -> None:
        """Read what still comes, so that no writer blocks on a full pipe."""
        deadline = time.monotonic() + self.limits.dying + _PATIENCE
        while not self.is_over and (left := deadline - time.monotonic()) > 0:
            self._read(left)

    def outcome(self, by: EndedBy, left: Sequence[str], log_tail: str) -> ChildEnd:
        """Return how the child ended; `left` is what was removed from its folders."""
        seen, killed = self.seen, EndedBy.UNGUARDED if self.killed is None else EndedBy(self.killed)
        if by is EndedBy.ITSELF and (left or killed is EndedBy.UNGUARDED):
            by = EndedBy.STRAY_FILES if killed is not EndedBy.UNGUARDED else killed
        return replace(
            seen,
            by=by,
            left=left,
            ok=seen.result is not None and by is EndedBy.ITSELF and not seen.stuck,
            code=-signal.SIGKILL if killed and (seen.code or 0) >= 0 else seen.code,
            shared=self.place.shared,
            # The machine's count does not name the child: another one may have been killed.
            oom_killer=killed is EndedBy.MEMORY_LIMIT if self.grouped else _oom_kills() > self.oom_kills,
            log_tail=log_tail,
        )

    def _report(self, message: PhaseMessage) -> None:
        if self.on_message:
            self.on_message(message)

    def _read(self, timeout: float) -> None:
        """Read what has come, or comes within `timeout` seconds."""
        for key, _ in self.selector.select(timeout):
            data = os.read(key.fd, 1 << 16)
            if not data:
                self.selector.unregister(key.fd)
            buffer = self.buffers[key.fd]
            buffer += data
            if b"\n" not in data:
                self.is_nonsense |= len(buffer) > LONGEST_MESSAGE
                continue
            *lines, rest = buffer.split(b"\n")
            buffer[:] = rest
            for line in lines:
                self._hear(line, from_guard=key.fd == self.words)

    def _hear(self, line: bytearray, *, from_guard: bool) -> None:
        try:
            message = json.loads(line) if len(line) <= LONGEST_MESSAGE else None
        except (ValueError, RecursionError):
            message = None
        if message is None or (not from_guard and is_deep(message, _DEEPEST_MESSAGE)):
            self.is_nonsense = True
        elif from_guard:
            self._hear_guard(message)
        else:
            self._hear_child(message)

    def _hear_guard(self, message: Any) -> None:
        match message:
            case {"usage": {"cpu": float() | int() as cpu, "memory": int() as memory}}:
                self.used = cpu
                self.seen = replace(self.seen, memory=max(self.seen.memory, memory))
            case {"paused": True}:
                self.place.stands_still()
            case {"ended": {"code": code, "killed": killed, "memory": memory, "stuck": stuck}}:
                self.killed, most = killed, max(self.seen.memory, memory)
                self.seen = replace(self.seen, code=code, memory=most, stuck=tuple(stuck))

    def _hear_child(self, message: Any) -> None:
        self.heard += 1
        self.is_nonsense |= self.heard > _MOST_MESSAGES
        match message:
            case {"result": dict(result)}:
                self.answered = time.monotonic()
                try:
                    self.seen = replace(self.seen, result=read_answer(self.request, result, self.answer))
                except WrongAnswer as wrong:
                    self.seen = replace(self.seen, wrong=str(wrong))
            case {"error": {"kind": str(kind), "message": str(text), "detail": str(detail)}}:
                self.answered = time.monotonic()
                error = ChildError(kind=kind, message=_whole(text), detail=_whole(detail))
                self.seen = replace(self.seen, error=error)
            case {"alone": bool(alone)}:
                self.place.wish(alone=alone)
            case {"phase": str(phase), "progress": None | float() | int() as done, "detail": str(detail)} if (
                phase in _PHASES and (done is None or 0 <= done <= 1) and len(detail) <= _LONGEST_DETAIL
            ):
                self.moved = self.now
                self.changes += phase != self.seen.phase
                self.seen = replace(self.seen, phase=phase)
                self.is_nonsense |= self.changes > _MOST_PHASES
                self.last = PhaseMessage(phase=phase, progress=done, detail=_whole(detail))
                self._report(self.last)
            case _:
                self.is_nonsense = True


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


def _whole(text: str) -> str:
    """Return a text with `?` for halves of characters, which stand for the bytes of a name and which no file takes."""
    return text.encode(errors="replace").decode()

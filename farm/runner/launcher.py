"""The launcher of a child: starts it under a guard, leaves nothing of it behind, and has the last word on it.

    worker ── launcher ── guard ── the child's first process ── …

Both are subreapers: whatever the child starts stays below them, also what called `setsid` or lost its parent. So when
the launcher has no child any more, nothing is left, however that tried to hide. The child holds no descriptor of it and
cannot signal it (`seal.py`). It reads nothing of the child but the numbers of processes.

The guard watches the child's memory, processes and files, pauses it, and says when it is to be ended. It may meet
anything there: if it fails or hangs, the launcher ends both. If the launcher itself is killed, its guard ends the
child, and nobody says a last word. Only the standard library's light modules are imported on this side.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import resource
import select
import signal
import stat
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from .protocol import CONTINUE, GO, PAUSE, RequestFailed, first_line
from .seal import seal

if TYPE_CHECKING:
    from .documents import ChildRequest, GuardEnd, Request

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PR_GET_TID_ADDRESS = 40  # Where the C library keeps this thread's number: the kernel writes that of a forked one there.
SYS_CLONE3 = 435
CLONE_FLAGS = 1 << 33 | 1 << 24 | 1 << 21  # CLONE_INTO_CGROUP, CLONE_CHILD_SETTID, CLONE_CHILD_CLEARTID.

SPARE_BYTES = 16 << 20  # How much more than the disk limit a file may take, so that going over it is seen as that.
AGAIN_SECONDS = 2.0  # Seconds for killed processes to be gone, after a guard that took all that the request gives them.
_LONGEST_DETAIL = 1000  # Characters with which a child says how far it is.
_KEPT = 20_000  # Characters of each end of an error's detail: the worker takes no message of more than 1 MiB.


class Messages:
    """The child's end of the pipe to the worker."""

    def __init__(self, descriptor: int, go: int | None = None) -> None:
        """`go` is where the guard passes `GO` on; without it nobody is waited for."""
        self.descriptor = descriptor
        self.go = go

    def send(self, message: Mapping[str, object]) -> None:
        """Write one message; a worker that is gone is not an error here: the guard ends the child."""
        line = json.dumps(message, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        with suppress(BrokenPipeError):
            while line:
                line = line[os.write(self.descriptor, line) :]

    def phase(self, phase: str, progress: float | None = None, detail: str = "") -> None:
        """Report what is being done now, and how much of it is done (0 to 1, if known)."""
        self.send({"phase": phase, "progress": progress, "detail": detail[:_LONGEST_DETAIL]})

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let nothing else of the farm run on the host while the block does; wait for that. Not to be nested."""
        if self.go is None:
            yield
            return
        self.send({"alone": True})
        os.read(self.go, 1)
        try:
            yield
        finally:
            self.send({"alone": False})

    def error(self, kind: str, message: str, detail: str = "") -> None:
        """Report why there is no answer. A long detail is cut in the middle; the log has all of it."""
        if len(detail) > 2 * _KEPT:
            detail = f"{detail[:_KEPT]}\n[…]\n{detail[-_KEPT:]}"
        self.send({"error": {"kind": kind, "message": message[:_KEPT], "detail": detail}})


RequestWork = Callable[[Any, Messages], Any]  # Takes a request, and returns its answer.


def run(request_path: str, messages: int, words: int, work: RequestWork | None) -> int:
    """Run one request, and return 0 when nothing of the child is left but what cannot be killed.

    `messages` is the child's file descriptor to the worker, `words` that of guard and launcher. The child is ended when
    its first process or its guard has ended, and when standard input closes: the worker ends the attempt, or died.
    """
    # Slurm and systemd may send it to all processes at once. It is for the worker, which drains, and ends its children.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    with open(request_path, encoding="utf-8") as file:  # noqa: PTH123 (no pathlib on this side)
        request = json.load(file)
    if request.get("cpus"):
        os.sched_setaffinity(0, request["cpus"])
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    wake, (told, teller) = woken_by_children(), os.pipe()
    guard = os.fork()
    if guard == 0:
        _guard(request, messages, words, teller, work)
    os.close(messages)
    os.close(teller)
    asked = _wait(guard, wake, float(request["dying"]))
    stuck = _end_all(wake, asked, request)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    seen: GuardEnd = {"code": None, "killed": "guard", "memory": 0}
    os.set_blocking(told, False)
    with suppress(BlockingIOError):
        if report := os.read(told, 4096):  # Else the guard ended before it reported.
            seen = json.loads(report)
    ended: GuardEnd = {**seen, "memory": max(seen["memory"], used.ru_maxrss * 1024), "stuck": stuck}
    Messages(words).send({"ended": ended})
    return 0


def _wait(guard: int, wake: int, dying: float) -> float:
    """Wait until the guard has ended, or has not done so in time after standard input closed.

    Returns when processes that are killed now have to be gone, by the monotonic clock.
    """
    poll = select.poll()
    poll.register(wake, select.POLLIN)
    poll.register(0, 0)  # Its end alone: what the worker says is for the guard.
    deadline = math.inf
    while guard not in (reap() or {}):
        if time.monotonic() > deadline:
            break
        if 0 in dict(poll.poll(None if deadline == math.inf else 1000 * AGAIN_SECONDS)):
            poll.unregister(0)
            deadline = time.monotonic() + dying
        drain(wake)
    return max(time.monotonic() + AGAIN_SECONDS, min(deadline, time.monotonic() + dying))


def _end_all(wake: int, deadline: float, request: Request) -> list[int]:
    """Kill all that is below this process, until it is gone. Children of what died become children of this process.

    Return those that the kernel cannot end before a time, such as a process that waits for a GPU that was reset.
    """
    group = request["group"].get("folder", "")
    if group:
        with suppress(OSError):  # At once, however fast they fork; since Linux 5.14.
            write(f"{group}/cgroup.kill", "1")
    left: list[int] = []
    while reap() is not None:
        left = list(descendants(os.getpid()))
        if time.monotonic() > deadline:
            break
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        select.select([wake], [], [], 0.02)
        drain(wake)
        left = []
    if group:
        with suppress(OSError):  # Nobody else does it if the worker was killed.
            os.rmdir(group)  # noqa: PTH106
    return left


def _guard(request: Request, messages: int, words: int, teller: int, work: RequestWork | None) -> None:
    """The guard: start the child, watch it, and tell the launcher what was seen."""
    launcher, code = os.getppid(), 1
    try:
        close_all_but(messages, words, teller)
        wake = woken_by_children()
        signal.signal(signal.SIGTERM, lambda *_: None)
        # It wakes up if the launcher is killed. That has one thread, so the signal cannot come early.
        _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        go, goer = os.pipe()
        guard = os.getpid()
        inner = _fork_into(request["group"].get("folder", ""))
        if inner == 0:
            _work(request, Messages(messages, go), guard, work)
        os.close(messages)
        os.close(go)
        seen = Guard(inner, wake, words, goer, request, launcher).watch()
        if os.getppid() == launcher:
            os.write(teller, json.dumps(seen).encode())
        else:
            _end_all(wake, time.monotonic() + request["dying"], request)
        code = 0
    except Exception:
        sys.__excepthook__(*sys.exc_info())
    finally:
        os._exit(code)


def _fork_into(group: str) -> int:
    """Do what `os.fork` does, with the child in a control group; empty: without one.

    One that is born there need not wait 10 ms for all CPUs, as one that enters does: where clone3(2) is refused.
    """
    with suppress(OSError):
        if group:
            return _clone_into(group)
    pid = os.fork()
    if group and pid == 0:
        try:
            write(f"{group}/cgroup.procs", "0")
        except OSError as error:  # The guard checks the limits.
            print(f"cannot enter the control group: {error}", file=sys.stderr)  # noqa: T201
    return pid


def _clone_into(group: str) -> int:
    """Do what fork(3) does in a process of one thread, by clone3(2), into a control group. Raises OSError."""
    thread = ctypes.c_void_p()
    _prctl(PR_GET_TID_ADDRESS, ctypes.addressof(thread))
    folder = os.open(group, os.O_RDONLY | os.O_DIRECTORY)
    wish = struct.pack("=11Q", CLONE_FLAGS, 0, thread.value or 0, 0, signal.SIGCHLD, 0, 0, 0, 0, 0, folder)
    python, libc = ctypes.pythonapi, ctypes.PyDLL(None, use_errno=True)
    python.PyOS_BeforeFork()
    pid = int(libc.syscall(ctypes.c_long(SYS_CLONE3), wish, ctypes.c_size_t(len(wish))))
    (python.PyOS_AfterFork_Parent if pid else python.PyOS_AfterFork_Child)()
    os.close(folder)
    if pid < 0:
        raise OSError(ctypes.get_errno(), "clone3")
    return pid


def _work(request: Request, messages: Messages, guard: int, work: RequestWork | None) -> None:
    """The child's first process: do the request, send the result or the error, and end without Python's teardown."""
    # If the guard is killed, this goes too; the guard has one thread, so the signal cannot come early.
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:
        os._exit(1)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    close_all_but(messages.descriptor, messages.go)
    os.setsid()  # What it sends to its own group reaches neither guard nor launcher.
    os.set_inheritable(messages.descriptor, False)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    code = 1
    try:
        # If the machine runs out of memory, the kernel chooses this process, not the worker.
        write("/proc/self/oom_score_adj", "1000")
    except OSError as error:
        print(f"cannot raise the OOM score: {error}", file=sys.stderr)  # noqa: T201
    if request["disk"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["disk"] + SPARE_BYTES,) * 2)
    try:
        seal_for(request)
        if not work:
            import faulthandler

            faulthandler.enable()
            from .actions import run_action

            work = run_action
        messages.send({"result": work(request, messages)})
        code = 0
    except RequestFailed as failure:
        messages.error(failure.kind, failure.message, failure.detail)
        print(failure.detail or failure.message, file=sys.stderr)  # noqa: T201
    except MemoryError:
        messages.error("out_of_memory", "memory ran out")
        sys.__excepthook__(*sys.exc_info())
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        messages.error("internal", first_line(text), text)
        sys.__excepthook__(*sys.exc_info())
    finally:
        with suppress(OSError):  # A full disk takes no log.
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
        ctypes.CDLL(None).fflush(None)  # What a compiler wrote through C, and still has in its buffer.
        os._exit(code)


def seal_for(request: ChildRequest) -> None:
    """Seal this thread as a request asks for. Raises OSError."""
    if paths := request.get("seal"):
        seal(paths["read"], paths["write"], maker=request.get("maker", "amd") if request.get("gpu") else "")


def close_all_but(*descriptors: int | None) -> None:
    """Close all descriptors but these and the standard ones."""
    kept = sorted({2, *(each for each in descriptors if each is not None)})
    for last, following in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(last + 1, following)


def woken_by_children() -> int:
    """Return a descriptor that becomes readable when a child of this process ends."""
    wake, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    return wake


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


SAMPLE_SECONDS = 0.1  # Seconds between two checks of the child's memory, if it has a limit.
COUNT_SECONDS = 0.25  # Seconds between two counts of its processes, if they have a limit and its memory has none.
USAGE_SECONDS = 1.0  # Seconds between two messages about CPU time and memory, and between two checks of its files.
DISK_SHARE = 10  # The guard waits this many times as long as a check of its files took: large trees take a while.
PAUSE_SECONDS = 0.05  # Seconds between two tries to pause the child.
AWAKE_SECONDS = 0.1  # CPU seconds of a child that stands still: stopped ones use none, but the kernel counts roughly.

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICK = os.sysconf("SC_CLK_TCK")


class Guard:
    """Watches one child from a process of its own, below its launcher."""

    def __init__(self, inner: int, wake: int, words: int, goer: int, request: Request, launcher: int) -> None:
        """`inner` is the child's first process; `goer` is where `GO` is passed on to it."""
        group = request["group"]
        self.request, self.launcher, self.inner = request, launcher, inner
        self.words, self.wake, self.goer = Messages(words), wake, goer
        self.pausing = self.paused = False
        self.spent = 0.0  # CPU seconds when it was paused.
        self.looked, self.look_took = time.monotonic(), 0.0
        self.group = group.get("folder", "")
        self.events = f"{self.group}/memory.events" if group.get("memory") else ""
        self.refused_forks = f"{self.group}/pids.events" if group.get("processes") else ""
        self.status: int | None = None
        self.killed = ""
        self.peak = 0

    def watch(self) -> GuardEnd:
        """Return what was seen, once the child has ended, or is to be ended, or the launcher is gone."""
        poll = select.poll()
        poll.register(0, select.POLLIN)
        poll.register(self.wake, select.POLLIN)
        counting = COUNT_SECONDS if self.request["processes"] else USAGE_SECONDS
        pause = SAMPLE_SECONDS if self.request["memory"] else counting
        said = time.monotonic()
        while self.status is None and not self.killed and os.getppid() == self.launcher:
            # While the child stands still, its guard does next to nothing, either.
            wait = USAGE_SECONDS if self.paused else PAUSE_SECONDS if self.pausing else pause
            events = dict(poll.poll(wait * 1000))
            if self.wake in events:
                drain(self.wake)
                self.status = (reap() or {}).get(self.inner, self.status)
            if 0 in events:
                words = os.read(0, 4096)
                if not words:
                    break
                self.obey(words)
            if self.pausing and not self.paused and self.status is None and self.stop():
                self.paused, self.spent = True, self.measure()[0]
                self.words.send({"paused": True})
            if self.status is None:
                cpu, memory = self.measure()
                if self.paused:
                    if cpu > self.spent + AWAKE_SECONDS:
                        self.killed = "awake"
                    continue
                if time.monotonic() - said >= USAGE_SECONDS:
                    said = time.monotonic()
                    self.words.send({"usage": {"cpu": cpu, "memory": memory}})
                self.look_at_disk()
        self.look_for_kernels_kill()
        self.look_at_disk(now=True)
        code = None if self.status is None else os.waitstatus_to_exitcode(self.status)
        return {"code": code, "killed": self.killed, "memory": self.peak}

    def obey(self, words: bytes) -> None:
        """Do what the worker says."""
        for word in (words[place : place + 1] for place in range(len(words))):
            if word == GO:
                os.write(self.goer, GO)
            self.pausing = word == PAUSE or (self.pausing and word != CONTINUE)
        if not self.pausing:
            self.paused = False
            self.resume()

    def stop(self) -> bool:
        """Let all processes of the child stand still; return whether they do.

        They run on if one holds a file lock: others might wait for it, and never get so far as to end the pause.
        """
        still = self.freeze("1") or self.stop_each()
        if still and not any(map(holds_lock, descendants(os.getpid()))):
            return True
        self.resume()
        return False

    def resume(self) -> None:
        """Let all processes of the child continue."""
        self.freeze("0")
        for pid in descendants(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def freeze(self, state: str) -> bool:
        """Let the kernel stop or continue the control group of the child at once; return whether it did (Linux 5.2)."""
        if not self.group:
            return False
        try:
            write(f"{self.group}/cgroup.freeze", state)
        except OSError:
            return False
        return soon(lambda: counted(f"{self.group}/cgroup.events", "frozen") == int(state))

    def stop_each(self) -> bool:
        """Stop all processes one by one; return whether they stand still. What is stopped starts no other."""

        def still() -> bool:
            going = [pid for pid in descendants(os.getpid()) if not stands_still(pid)]
            for pid in going:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            return not going

        return soon(still)

    def measure(self) -> tuple[float, int]:
        """Return CPU seconds and resident bytes of the child with its descendants; end it over its limit."""
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu, memory = used.ru_utime + used.ru_stime, 0
        pids = descendants(os.getpid())
        if 0 < self.request["processes"] < sum(pids.values()):
            self.killed = "processes"
        for pid in pids:
            seconds, resident = usage(pid)
            cpu += seconds
            memory += resident
        if 0 < self.request["memory"] < memory:
            # Pages shared after a fork were counted twice: ask for each process's share before judging.
            memory = sum(share(pid) for pid in pids)
            if memory > self.request["memory"]:
                self.killed = "memory"
        self.peak = max(self.peak, memory)
        self.look_for_kernels_kill()
        return round(cpu, 2), memory

    def look_for_kernels_kill(self) -> None:
        """End the child if the kernel has killed any process of its control group, or refused it one more."""
        if self.events and not self.killed and counted(self.events, "oom_kill"):
            self.killed = "memory"
            self.peak = max(self.peak, self.request["memory"])
        if self.refused_forks and not self.killed and counted(self.refused_forks, "max"):
            self.killed = "processes"

    def look_at_disk(self, *, now: bool = False) -> None:
        """End the child if its files take too much of the disk, or are too many.

        Checks at intervals; `now` checks at once, for the last time.
        """
        began, most, many = time.monotonic(), self.request["disk"], self.request["files"]
        pause = 0.0 if now else max(USAGE_SECONDS, DISK_SHARE * self.look_took)
        if not most or began - self.looked < pause:
            return
        used, files = disk_usage(self.request["folders"], descendants(os.getpid()), many)
        if not self.killed and (used > most or files > many):
            self.killed = "disk" if used > most else "files"
        self.looked = time.monotonic()
        self.look_took = self.looked - began


def soon(is_so: Callable[[], bool], seconds: float = PAUSE_SECONDS) -> bool:
    """Whether something is so, now or within some seconds."""
    deadline = time.monotonic() + seconds
    while not (found := is_so()) and time.monotonic() < deadline:
        time.sleep(0.001)
    return found


# --- what the kernel's files say about processes, and about what they hold --------------------------------------------


def stands_still(pid: int) -> bool:
    """Whether all threads of a process are stopped, or have ended."""
    return all(state in "TtZX" for _, state in _threads(pid))


def holds_lock(pid: int) -> bool:
    """Whether a process holds a lock of a file."""
    folder = f"/proc/{_living(pid)}/fdinfo"
    try:
        return any("\nlock:" in _read(f"{folder}/{name}") for name in os.listdir(folder))  # noqa: PTH208
    except OSError:
        return False


def _threads(pid: int) -> Iterator[tuple[int, str]]:
    """Yield the threads of a process with their states, the first one first: it may have ended, and then is a `Z`."""
    with suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
            with suppress(FileNotFoundError, ProcessLookupError):
                yield int(thread), _read(f"/proc/{pid}/task/{thread}/stat").rpartition(")")[2].split()[0]


def _living(pid: int) -> int:
    """Return a living thread of a process: its first one may have ended, and all have the same memory and files."""
    return next((thread for thread, state in _threads(pid) if state not in "ZX"), pid)


def counted(events: str, name: str) -> int:
    """Return a number of a control group's file of events; 0 if it has none of this name."""
    return next((int(line.split()[1]) for line in _read(events).splitlines() if line.startswith(f"{name} ")), 0)


def descendants(root: int) -> dict[int, int]:
    """Return every process below one with its number of threads, parents first."""
    found: dict[int, int] = {}
    pending = [root]
    while pending:
        pid = pending.pop()
        try:
            threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208
            if pid != root:
                found[pid] = len(threads)
            for thread in threads:
                pending += [int(child) for child in _read(f"/proc/{pid}/task/{thread}/children").split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def disk_usage(folders: Iterable[str], pids: Iterable[int], most: int) -> tuple[int, int]:
    """Return the bytes that the files in folders take of the disk, with those that were deleted and are still open, and
    how many files and folders there are, with all that processes have open; beyond `most` it stops.

    A folder that cannot be read, because of its rights or a path that is too long, counts as too much: it could hide
    any number of files.
    """
    sizes: dict[tuple[int, int], int] = {}  # By device and number, since a file may have several names.
    devices: set[int] = set()
    count, todo = 0, list(folders)
    while todo:
        try:
            entries = os.scandir(todo.pop())
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            return sum(sizes.values()), most + 1
        with entries:
            for entry in entries:
                count += 1
                if count > most:
                    return sum(sizes.values()), count
                try:
                    if entry.is_dir(follow_symlinks=False):
                        todo.append(entry.path)
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                except OSError:
                    return sum(sizes.values()), most + 1
                devices.add(status.st_dev)
                sizes[status.st_dev, status.st_ino] = status.st_blocks * 512
    for held in (held for pid in pids for held in _opened(pid)):
        count += 1
        if count > most:
            break
        if held and held.st_dev in devices:
            sizes[held.st_dev, held.st_ino] = held.st_blocks * 512
    return sum(sizes.values()), count


def _opened(pid: int) -> Iterator[os.stat_result | None]:
    """Yield for each file that a process has open what it takes if it has no name any more, else None."""
    with suppress(OSError), os.scandir(f"/proc/{_living(pid)}/fd") as entries:
        for entry in entries:
            status = None
            with suppress(OSError):
                status = entry.stat()
            yield status if status and stat.S_ISREG(status.st_mode) and not status.st_nlink else None


def usage(pid: int) -> tuple[float, int]:
    """Return CPU seconds (with those of reaped children) and resident bytes; 0 once it is gone."""
    try:
        fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        if fields[0] == "Z" and (living := _living(pid)) != pid:
            fields = _read(f"/proc/{living}/stat").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0, 0
    return sum(int(field) for field in fields[11:15]) / _TICK, int(fields[21]) * _PAGE


def share(pid: int) -> int:
    """Return a process's proportional share of the memory it uses, in bytes; 0 once it is gone.

    Files that it has mapped are left out: the system takes their memory back when it is short.
    """
    try:
        text = _read(f"/proc/{_living(pid)}/smaps_rollup")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    except OSError:
        return usage(pid)[1]
    shares = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in text.splitlines()[1:])}
    if "Pss_Anon" not in shares:  # before Linux 5.4
        return shares.get("Pss", 0) * 1024
    return (shares["Pss_Anon"] + shares["Pss_Shmem"]) * 1024


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123
        return file.read()


def write(path: str, text: str) -> None:
    """Tell the kernel something by one of its files. Raises OSError."""
    with open(path, "w", encoding="ascii") as file:  # noqa: PTH123
        file.write(text)


def reap() -> dict[int, int] | None:
    """Return the status of each child of this process that has ended, by its id; None if it has no child at all."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended or None
        if pid == 0:
            return ended
        ended[pid] = status


def drain(wake: int) -> None:
    """Empty a pipe that wakes this process up, if there is anything in it."""
    with suppress(BlockingIOError):
        os.read(wake, 4096)

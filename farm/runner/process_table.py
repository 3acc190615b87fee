"""What the kernel's files say about processes, and about what they hold. Light modules only: guards use it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICK = os.sysconf("SC_CLK_TCK")


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
    """Return a thread of a process that says what all of them have: the first one says nothing once it has ended.

    No thread has memory or files of its own (`seal.py`).
    """
    return next((thread for thread, state in _threads(pid) if state not in "ZX"), pid)


def counted(events: str, name: str) -> int:
    """Return a number of a control group's file of events; 0 if it has none of this name."""
    for line in _read(events).splitlines():
        if line.startswith(f"{name} "):
            return int(line.split()[1])
    return 0


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
    seen: set[tuple[int, int]] = set()
    devices: set[int] = set()
    used = count = 0
    todo = list(folders)
    while todo:
        try:
            entries = os.scandir(todo.pop())
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            return used, most + 1
        with entries:
            for entry in entries:
                count += 1
                if count > most:
                    return used, count
                try:
                    if entry.is_dir(follow_symlinks=False):
                        todo.append(entry.path)
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                except OSError:
                    return used, most + 1
                devices.add(status.st_dev)
                if (status.st_dev, status.st_ino) not in seen:
                    seen.add((status.st_dev, status.st_ino))
                    used += status.st_blocks * 512
    for held in (held for pid in pids for held in _opened(pid)):
        count += 1
        if count > most:
            break
        if held and held.st_dev in devices and (held.st_dev, held.st_ino) not in seen:
            seen.add((held.st_dev, held.st_ino))
            used += held.st_blocks * 512
    return used, count


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
    try:
        os.read(wake, 4096)
    except BlockingIOError:
        return

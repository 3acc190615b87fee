"""The template of warm children: has imported what they import, and forks the launcher of each (decision 64).

    worker ── template ── launcher ── guard ── the child's first process ── …

It learns nothing of a child: with each byte of the worker's comes a socket, from which only the fork reads. The fork
takes a session, descriptors and variables of its own, and goes on as a launcher that was started cold. No attempt needs
the template: without one, a cold child starts.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec, resolve_name
from typing import TYPE_CHECKING

from . import launcher
from .launcher import drain, reap, soon

if TYPE_CHECKING:
    from .documents import ChildRequest

READY = b"r"
FORK = b"f"
LONGEST = 1 << 17  # Bytes of what a fork reads: paths and variables.
_COMMON = ("numpy", "onnx", ".actions", ".onnx_models", ".tf_check", ".samples", ".measuring")
_IMPORTED = {
    "onnxruntime": (*_COMMON, "onnxruntime", ".onnxruntime_compiler", ".precisions"),
    "migraphx": (*_COMMON, "migraphx", ".migraphx_compiler"),
}
_END_SECONDS = 1.0  # Seconds for the threads that libraries end before a fork to be gone.


def serve(control: int, wish: ChildRequest, work: launcher.RequestWork | None) -> int:
    """Import what children of a compiler import, then fork a launcher for each byte that comes, until the worker ends.

    Returns 1 if a fork would not be what a cold child is: if an import fails, a thread goes on, which could hold a
    lock, a device is open, or memory would be shared. Returns when the imported files change, too: a cold child then
    finds another toolchain.
    """
    if wish.get("cpus"):
        os.sched_setaffinity(0, wish["cpus"])
    said = os.memfd_create("said")
    for stream in (1, 2):
        os.dup2(said, stream)
    # The seal of a thread holds what goes wrong as libraries are loaded. It is not a wall: they stay in this process.
    thread = threading.Thread(target=_import, args=(wish,))
    thread.start()
    thread.join()
    gc.collect()
    gc.freeze()
    files = _files()
    if not _is_alone() or _has_device() or _shares_memory() or not all(map(sys.modules.__contains__, _named(wish))):
        return 1
    seen = _states(files)
    worker = socket.socket(fileno=control)
    worker.send(READY)
    wake = launcher.woken_by_children()
    poll = select.poll()
    poll.register(worker, select.POLLIN)
    poll.register(wake, select.POLLIN)
    while True:
        events = dict(poll.poll())
        drain(wake)
        reap()
        if control not in events:
            continue
        word, found, _, _ = socket.recv_fds(worker, 1, 1)
        if not word or _states(files) != seen:
            return 0
        # If the system has no room for a fork, the worker sees that nobody holds its socket.
        with socket.socket(fileno=found[0]) as own, suppress(OSError):
            if not (pid := os.fork()):
                _become_launcher(own, said, work)
            own.send(str(pid).encode())


def _named(wish: ChildRequest) -> list[str]:
    names = [resolve_name(name, __package__) for name in _IMPORTED.get(wish["compiler"], ())]
    return [name for name in names if find_spec(name)]


def _import(wish: ChildRequest) -> None:
    """Import what children do, under their seal, in a thread that ends then."""
    launcher.seal_for(wish)
    os.environ.update(wish.get("environment") or {})
    for name in _named(wish):
        importlib.import_module(name)
    if wish.get("gpu"):
        from .actions import add_modules, find_module

        add_modules(wish["modules"])
        # What sessions on the device load from files, such as CUDA's libraries.
        getattr(find_module(wish["compiler"], wish["device"]), "preload", lambda: None)()


def _become_launcher(own: socket.socket, said: int, work: launcher.RequestWork | None) -> None:
    """Take from the worker what a cold launcher gets as it starts, and run the request."""
    code = 1
    try:
        # Celery gives sockets that are opened while it shuts down a time-out, with which the system does not wait.
        own.setblocking(True)
        text, found, _, _ = socket.recv_fds(own, LONGEST, 4)
        if not text:  # The worker has given up.
            return
        told, log, messages, words = found
        path, folder, environment = json.loads(text)
        os.setsid()
        signal.set_wakeup_fd(-1)
        os.write(log, os.pread(said, os.fstat(said).st_size, 0))
        for stream, descriptor in enumerate((told, log, log)):
            os.dup2(descriptor, stream)
        launcher.close_all_but(messages, words)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        code = launcher.run(path, messages, words, work)
    except Exception:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def _is_alone() -> bool:
    """Whether one thread is left after a fork: libraries that have idle threads end these before it."""
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return soon(lambda: len(os.listdir("/proc/self/task")) == 1, _END_SECONDS)  # noqa: PTH208


def _has_device() -> bool:
    """Whether this process has opened anything of the machine's but /dev/null."""
    places = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with suppress(FileNotFoundError):
            places.append(os.readlink(f"/proc/self/fd/{name}"))  # noqa: PTH115
    return any(place.startswith("/dev/") and place != os.devnull for place in places)


def _shares_memory() -> bool:
    """Whether its forks would write to the same memory: what one left there, another attempt's child would read."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as lines:  # noqa: PTH123
        return any(line.split()[1][1::2] == "ws" for line in lines)


def _files() -> list[str]:
    """Return what this process has loaded, and the folders of modules: an installation changes some of them."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as lines:  # noqa: PTH123
        mapped = {line[line.index("/") :].rstrip("\n") for line in lines if "/" in line}
    modules = {getattr(module, "__file__", None) or "" for module in sys.modules.values()}
    return sorted({path for path in {*mapped, *modules, *sys.path} if os.path.exists(path)})  # noqa: PTH110


def _states(files: Sequence[str]) -> list[tuple[int, int] | None]:
    """Return by what each file is seen to be another one; None for one that is gone."""
    found: list[tuple[int, int] | None] = []
    for path in files:
        try:
            status = os.stat(path)  # noqa: PTH116
            found.append((status.st_ino, status.st_mtime_ns))
        except OSError:
            found.append(None)
    return found

"""Templates: processes that have imported a compiler, from which the children of a worker process are forked."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from farm.runner.documents import ChildRequest
from farm.runner.template import FORK, LONGEST, READY

if TYPE_CHECKING:
    from farm.compiling.child_process import ChildProcess

NOWHERE = Path("/nonexistent")  # What a template has for the folder of its children, which have one each.
MOST = 8  # Templates at once: each holds some 60 MB.
IDLE_SECONDS = 60.0  # Seconds after which a template without work makes room for another.
START_SECONDS = 10.0  # Seconds that a child waits for a new template; then it starts cold.
_WITHOUT_OWN = ("onnx", "expected", "none")  # Not compilers: their children import what those of ONNX Runtime do.
FORK_SECONDS = 5.0  # Seconds in which a template forks; one that needs longer is ended.


class Forked:
    """A launcher that a template has forked: what `subprocess.Popen` offers of one that was started cold."""

    def __init__(self, pid: int, handle: int) -> None:
        """`handle` is a descriptor of the process; `wait` closes it."""
        self.pid = pid
        self._handle = handle

    def kill(self) -> None:
        """Kill it, if it is still there."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def wait(self, timeout: float) -> None:
        """Wait for its end. Raises subprocess.TimeoutExpired."""
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        try:
            if not poll.poll(1000 * timeout):
                raise subprocess.TimeoutExpired("launcher", timeout)
        finally:
            os.close(self._handle)


class Templates:
    """The templates of one process: one for each set of interpreter, compiler, CPUs and variables. For any thread."""

    def __init__(self) -> None:
        self._change = threading.Lock()
        self._kept: dict[tuple[object, ...], _Template] = {}

    def fork(self, child: ChildProcess, libraries: list[str], descriptors: Sequence[int]) -> Forked | None:
        """Fork the launcher of a child whose request is in its folder; None: it has to be started cold.

        It may read `libraries` to load its compiler; `descriptors` are its standard input, log, messages and words.
        """
        request, compiler = child.request, child.request.get("compiler", "")
        wish: ChildRequest = {
            "action": "serve",
            "compiler": "onnxruntime" if compiler in _WITHOUT_OWN else compiler,
            "maker": request.get("maker", ""),
            "gpu": request.get("gpu", ""),
            "cpus": request.get("cpus", ()),
            "device": request.get("device", ""),
            "modules": request.get("modules") or {},
            # A library may read a variable as it is loaded, or later.
            "environment": request.get("environment") or {},
            "seal": {"read": libraries, "write": []} if request.get("seal") else None,
        }
        template = self._template([*child.command, json.dumps(wish, sort_keys=True)], child.environment(NOWHERE))
        own = child.environment(child.scratch)
        said = json.dumps([str(child.scratch / "request.json"), str(child.scratch), own]).encode()
        return template.fork(said, descriptors) if template and len(said) <= LONGEST else None

    def close(self) -> None:
        """End all templates; their children go on. Repeatable."""
        with self._change:
            for key in list(self._kept):
                self._kept.pop(key).end()

    def _template(self, command: list[str], variables: dict[str, str]) -> _Template | None:
        """Return the template for these, started if there is none; None if it cannot start."""
        key = (*command, *sorted(variables.items()))
        with self._change:
            if (found := self._kept.get(key)) and found.is_over:
                self._kept.pop(key).end()
                found = None
            if not found and len(self._kept) == MOST:
                oldest = min(self._kept, key=lambda key: self._kept[key].used)
                if time.monotonic() - self._kept[oldest].used < IDLE_SECONDS:
                    return None
                self._kept.pop(oldest).end()
            if not found:
                with suppress(OSError):  # Such as for more variables than a command line holds.
                    found = self._kept[key] = _Template(command, variables)
            if found:
                found.used = time.monotonic()
            return found


class _Template:
    def __init__(self, command: list[str], variables: dict[str, str]) -> None:
        self.used = 0.0
        """When a child was last asked for."""
        self.is_over = False
        """Whether it forks no more, so that another can take its place."""
        self._ready: bool | None = None
        """Whether it has said so; False: it ended before, and another would, too. None: it still imports."""
        self._starting = threading.Lock()
        self._patience = START_SECONDS
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        python, script, *arguments = command
        with theirs:
            self._process = subprocess.Popen(
                [python, script, str(theirs.fileno()), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env=variables,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def fork(self, said: bytes, descriptors: Sequence[int]) -> Forked | None:
        """Fork a launcher that reads what is `said`; None if there is none, then another template may be started."""
        if not self._is_ready():
            return None
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        handle = None
        try:
            with own:
                own.settimeout(FORK_SECONDS)
                with theirs:
                    socket.send_fds(self._control, [FORK], [theirs.fileno()])
                pid = int(own.recv(32) or 0)
                if pid:
                    # The fork waits for what is said: so this is its process, and no later one with its number.
                    handle = os.pidfd_open(pid)
                    socket.send_fds(own, [said], descriptors)
                    return Forked(pid, handle)
        except OSError:
            self._process.kill()
            if handle is not None:
                os.close(handle)
        self.is_over = True
        return None

    def _is_ready(self) -> bool:
        """Whether it has imported everything; waits for that once."""
        with self._starting:
            if self._ready is None and select.select([self._control], [], [], self._patience)[0]:
                self._ready = self._control.recv(1) == READY
            self._patience = 0.0
            return bool(self._ready)

    def end(self) -> None:
        """Let it end."""
        self._control.close()
        try:
            self._process.wait(FORK_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

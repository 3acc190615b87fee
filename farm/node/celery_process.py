"""The Celery process of a worker: started, spoken to over its lifeline, and ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from farm.compiling.slots import AWAY, CONSUME, CONSUMING, FAULT, MISMATCH, PAUSE, RELEASE, Slot, as_text


class CeleryProcess:
    """A Celery worker process that ends when this one does."""

    def __init__(
        self,
        app: str,
        *,
        queues: Sequence[str],
        slots: Sequence[Slot],
        worker: str,
        node: str,
        environment: dict[str, str],
    ) -> None:
        self._lifeline, lifeline = socket.socketpair()
        options = {
            "quiet": True,
            "pool_cls": "threads",
            "concurrency": len(slots),
            "queues": list(queues),
            "without_gossip": True,
            "without_mingle": True,
            "without_heartbeat": True,
            "hostname": worker,
            "lifeline": lifeline.fileno(),
            "worker": worker,
            "node": node,
            "slots": as_text(slots),
        }
        # A session of its own: Ctrl-C at a terminal reaches the supervisor alone, which drains.
        with lifeline:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "tasks", app, json.dumps(options)],
                stdin=subprocess.DEVNULL,
                pass_fds=[lifeline.fileno()],
                env=environment,
                start_new_session=True,
            )
        self._lifeline.setblocking(False)
        self.descriptor = os.pidfd_open(self._popen.pid)
        """Readable when the process has ended."""
        self._started = time.monotonic()
        self._consuming: float | None = None
        self._away = False
        self._mismatched = False
        self._faulted = False
        self.may_consume = False

    @property
    def age(self) -> float:
        """Seconds since it was started, or since it may consume (again)."""
        return time.monotonic() - self._started

    @property
    def consuming_for(self) -> float | None:
        """Seconds since it reported that it takes messages, or was allowed to again; None before its report."""
        self._hear()
        return None if self._consuming is None else min(time.monotonic() - self._consuming, self.age)

    def met_outage(self) -> bool:
        """Return whether one of its attempts has found object storage away since the last call."""
        self._hear()
        met, self._away = self._away, False
        return met

    def met_mismatch(self) -> bool:
        """Return whether one of its attempts has found the wrong toolchain for its job since the last call."""
        self._hear()
        met, self._mismatched = self._mismatched, False
        return met

    def met_fault(self) -> bool:
        """Return whether a GPU has failed under one of its attempts since the last call."""
        self._hear()
        met, self._faulted = self._faulted, False
        return met

    def _hear(self) -> None:
        with suppress(OSError):  # No message, or the process is gone.
            words = self._lifeline.recv(4096)
            if CONSUMING in words and self._consuming is None:
                self._consuming = time.monotonic()
            self._away = self._away or AWAY in words
            self._mismatched = self._mismatched or MISMATCH in words
            self._faulted = self._faulted or FAULT in words

    @property
    def ended(self) -> bool:
        """Whether it runs no more."""
        return self._popen.poll() is not None

    @property
    def status(self) -> int | None:
        """Its exit status, once it has ended."""
        return self._popen.poll()

    def consume(self) -> None:
        """Let it take messages; its age counts from now. Repeatable."""
        if not self.may_consume:
            self.may_consume, self._started = True, time.monotonic()
            with suppress(BrokenPipeError):
                self._lifeline.send(CONSUME)

    def pause(self) -> None:
        """Let it take no messages until `consume` is called again. Running attempts continue. Repeatable."""
        if self.may_consume:
            self.may_consume = False
            with suppress(BrokenPipeError):
                self._lifeline.send(PAUSE)

    def stop_consuming(self) -> None:
        """Take no more messages, and end when the running ones have."""
        self._popen.send_signal(signal.SIGTERM)

    def release(self) -> None:
        """End the attempts that run, and give them back."""
        with suppress(BrokenPipeError):
            self._lifeline.send(RELEASE)

    def kill(self) -> None:
        """Kill it if it has not ended, and close its lifeline. Repeatable."""
        self._popen.kill()
        self._popen.wait()
        if self._lifeline.fileno() >= 0:
            self._lifeline.close()
            os.close(self.descriptor)

"""Worker: the supervisor behind `farm worker`. Runs one Celery worker process and keeps it consuming.

It registers the worker, sends its heartbeats, starts the process again when it dies or stops consuming, and drains it
on SIGTERM: Celery's thread pool has no soft shutdown, so that is ours. The process is tied to the supervisor by a
socket, its lifeline: when that closes, by whatever death, the process exits, and with it the compilers that it started.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

import farm
from farm.errors import StoreUnavailable
from farm.logging import get_logger
from farm.pools import Pool
from farm.settings import Settings
from farm.store import Beat, Store

log = get_logger(__name__)

APP = "tasks.app"
CONSUMING, RELEASE = b"c", b"r"
"""The words on the lifeline: the process takes messages; it is to end its attempts and give them back."""

RELEASE_SECONDS = 5.0
"""What a process gets to end its compilers and give attempts back, before it is killed."""

START_SECONDS = 60.0
"""What a process gets to begin consuming, once the store can be reached."""

RESTART_SECONDS = 2.0
"""Between two starts of a process that does not stay."""


def run_worker(
    settings: Settings,
    pools: Sequence[Pool],
    *,
    slots: int | None = None,
    node: str | None = None,
    app: str = APP,
) -> int:
    """Serve `pools` until SIGTERM or SIGINT and return the exit status.

    The first signal drains: nothing more is taken, and what runs has `grace_seconds` to end; then, or at a second
    signal, it is ended and given back, uncharged. `app` is the module of the Celery application that the process runs.
    To be called from the main thread. Raises StoreUnavailable when the store cannot be reached at first.
    """
    return Supervisor(settings, pools, slots=slots or settings.slots, node=node or socket.gethostname(), app=app).run()


class Supervisor:
    """One worker: its registration, its Celery process, its end."""

    def __init__(self, settings: Settings, pools: Sequence[Pool], *, slots: int, node: str, app: str) -> None:
        self._settings = settings
        self._pools = list(pools)
        self._slots = slots
        self._node = node
        self._app = app
        self._id = f"{node}-{os.getpid()}-{secrets.token_hex(3)}"
        self._store = Store.connect(settings)
        self._process: Process | None = None
        self._reaches_store = True
        self._signals = 0
        self._wake, self._woken = os.pipe()

    def run(self) -> int:
        """Register, supervise, drain."""
        self._store.check()
        self._register()
        with self._listening():
            try:
                self._process = self._start()
                self._supervise()
                self._drain()
            finally:
                if self._process:
                    self._process.kill()
                self._leave()
        return 0

    # --- while it serves ----------------------------------------------------------------------------------------

    def _supervise(self) -> None:
        while not self._signals:
            self._wait(self._settings.renew_seconds)
            if self._process and self._process.ended:
                log.error("the worker process died, starting it again", status=self._process.status)
                self._process.kill()
                self._restart()
            elif self._beat(draining=False) == "drain":
                log.info("draining, as the operator asked")
                return

    def _beat(self, *, draining: bool) -> str:
        """Send one heartbeat; start the process again where it does not consume.

        That is where it has been idle for a lease while its pools had work, or takes too long to begin.
        """
        try:
            beat = self._store.workers.heartbeat(self._id, draining=draining)
            if beat.answer == "unknown":
                self._register()
        except StoreUnavailable as error:
            if self._reaches_store:
                log.warning("no heartbeat", error=error.message)
            self._reaches_store = False
            return "ok"
        self._reaches_store = True
        if not draining and self._process and not self._consumes(self._process, beat):
            log.error("the worker process takes no work while there is some, starting it again")
            self._process.kill()
            self._restart()
        return beat.answer

    def _consumes(self, process: Process, beat: Beat) -> bool:
        if beat.running or beat.unclaimed < self._settings.lease_seconds:
            return True
        consuming = process.consuming_for
        return process.age < START_SECONDS if consuming is None else consuming < self._settings.lease_seconds

    def _restart(self) -> None:
        if self._process and self._process.age < RESTART_SECONDS:
            self._wait(RESTART_SECONDS, process=False)
        if not self._signals:
            self._process = self._start()

    def _start(self) -> Process:
        return Process(
            self._app,
            queues=[pool.name for pool in self._pools],
            slots=self._slots,
            worker=self._id,
            node=self._node,
            environment={**os.environ, **self._settings.environment()},
        )

    def _register(self) -> None:
        self._store.workers.register(
            {
                "id": self._id,
                "node": self._node,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "slots": self._slots,
                "pools": [pool.as_dict() for pool in self._pools],
                "versions": {"farm": farm.__version__, "python": sys.version.split()[0]},
            },
            ttl=self._settings.lease_seconds,
        )
        log.info("worker registered", worker=self._id, slots=self._slots, pools=[pool.name for pool in self._pools])

    # --- while it stops -----------------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Stop consuming; let attempts end, then give them back."""
        if not self._process or self._process.ended:
            return
        log.info("draining", grace=self._settings.grace_seconds)
        asked = self._signals
        self._process.stop_consuming()
        self._beat(draining=True)
        self._wait_for_end(self._settings.grace_seconds, until_signals=max(asked, 1) + 1)
        if not self._process.ended:
            log.info("giving attempts back")
            self._process.release()
            self._wait_for_end(RELEASE_SECONDS, until_signals=self._signals + 1)

    def _wait_for_end(self, seconds: float, *, until_signals: int) -> None:
        deadline = time.monotonic() + seconds
        while self._process and not self._process.ended and self._signals < until_signals:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            self._wait(min(left, self._settings.renew_seconds))
            self._beat(draining=True)

    def _leave(self) -> None:
        try:
            self._store.workers.leave(self._id)
        except StoreUnavailable as error:
            log.info("registration is left to expire", error=error.message)
        self._store.close()

    # --- waiting ------------------------------------------------------------------------------------------------

    def _wait(self, seconds: float, *, process: bool = True) -> None:
        """Wait for a signal, or the end of the process, or for so long."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        if process and self._process:
            poll.register(self._process.descriptor, select.POLLIN)
        if any(descriptor == self._wake for descriptor, _ in poll.poll(seconds * 1000)):
            os.read(self._wake, 64)

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Count SIGTERM and SIGINT, and wake up at them: Python writes each to the wake-up pipe."""
        os.set_blocking(self._woken, False)
        before = [(number, signal.signal(number, self._count)) for number in (signal.SIGTERM, signal.SIGINT)]
        wakeup = signal.set_wakeup_fd(self._woken)
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before:
                signal.signal(number, handler)
            os.close(self._wake)
            os.close(self._woken)

    def _count(self, _number: int, _frame: FrameType | None) -> None:
        self._signals += 1


class Process:
    """A Celery worker process that ends when this one does."""

    def __init__(
        self, app: str, *, queues: Sequence[str], slots: int, worker: str, node: str, environment: dict[str, str]
    ) -> None:
        self._lifeline, lifeline = socket.socketpair()
        command = [
            *(sys.executable, "-m", "celery", "--app", app, "--quiet", "worker"),
            *("--pool", "threads", "--concurrency", str(slots), "--queues", ",".join(queues)),
            *("--without-gossip", "--without-mingle", "--without-heartbeat", "--hostname", worker),
            *("--lifeline", str(lifeline.fileno()), "--worker", worker, "--node", node),
        ]
        # A session of its own: Ctrl-C at a terminal reaches the supervisor alone, which drains.
        with lifeline:
            self._popen = subprocess.Popen(
                command,
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

    @property
    def age(self) -> float:
        """Seconds since it was started."""
        return time.monotonic() - self._started

    @property
    def consuming_for(self) -> float | None:
        """Seconds since it said that it consumes; None where it has not."""
        if self._consuming is None:
            with suppress(BlockingIOError, ConnectionResetError):
                if self._lifeline.recv(1) == CONSUMING:
                    self._consuming = time.monotonic()
        return None if self._consuming is None else time.monotonic() - self._consuming

    @property
    def ended(self) -> bool:
        """Whether it runs no more."""
        return self._popen.poll() is not None

    @property
    def status(self) -> int | None:
        """Its exit status, once it has ended."""
        return self._popen.poll()

    def stop_consuming(self) -> None:
        """Take no more messages, and end when the running ones have."""
        self._popen.send_signal(signal.SIGTERM)

    def release(self) -> None:
        """End the attempts that run, and give them back."""
        with suppress(BrokenPipeError):
            self._lifeline.send(RELEASE)

    def kill(self) -> None:
        """End it now, where it has not ended, and let go of it. Repeatable."""
        self._popen.kill()
        self._popen.wait()
        if self._lifeline.fileno() >= 0:
            self._lifeline.close()
            os.close(self.descriptor)

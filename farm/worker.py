"""Worker: what is behind `farm worker`. Runs one Celery worker process for each kind of slot, and keeps it consuming.

A node has a worker for each kind (each GPU model, CPU), because an attempt that waits for a card must not hold a CPU
slot. The supervisor registers them, sends their heartbeats, starts a process again when it dies or stops consuming, and
drains on SIGTERM: Celery's thread pool has no soft shutdown, so that is ours. A process is tied to the supervisor by a
socket, its lifeline: when that closes, by whatever death, the process exits, and with it the compilers that it started.
"""

from __future__ import annotations

import math
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

import farm
from farm.errors import StoreUnavailable
from farm.logging import get_logger
from farm.settings import Settings
from farm.slots import Kind, Slot, as_text
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
    kinds: Sequence[Kind],
    *,
    node: str | None = None,
    app: str = APP,
    versions: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Serve the pools of every kind of slot until SIGTERM or SIGINT and return the exit status.

    The first signal drains: nothing more is taken, and what runs has `grace_seconds` to end; then, or at a second
    signal, it is ended and given back, uncharged. `app` is the module of the Celery application that processes run,
    `environment` is added to theirs, `versions` is recorded with the workers. To be called from the main thread.
    Raises StoreUnavailable when the store cannot be reached at first.
    """
    supervisor = Supervisor(
        settings,
        kinds,
        node=node or socket.gethostname(),
        app=app,
        versions=versions or {},
        environment=environment or {},
    )
    return supervisor.run()


class Supervisor:
    """The workers of one node: one for each kind of slot, from registration to end."""

    def __init__(
        self,
        settings: Settings,
        kinds: Sequence[Kind],
        *,
        node: str,
        app: str,
        versions: Mapping[str, str],
        environment: Mapping[str, str],
    ) -> None:
        self._settings = settings
        self._store = Store.connect(settings)
        self._workers = [
            Worker(
                self._store,
                settings.model_copy(update={"threads": kind.threads}),
                kind,
                node=node,
                app=app,
                versions=versions,
                environment=environment,
                pause=self._wait,
            )
            for kind in kinds
        ]
        self._signals = 0
        self._wake, self._woken = os.pipe()

    def run(self) -> int:
        """Register, supervise, drain."""
        self._store.check()
        for worker in self._workers:
            worker.register()
        with self._listening():
            try:
                for worker in self._workers:
                    worker.start()
                while working := [worker for worker in self._workers if not worker.done]:
                    self._wait(
                        min(self._settings.renew_seconds, *(worker.patience for worker in working)),
                        [worker.descriptor for worker in working],
                    )
                    for worker in working:
                        worker.look(self._signals)
            finally:
                for worker in self._workers:
                    worker.leave()
                self._store.close()
        return 0

    def _wait(self, seconds: float, descriptors: Sequence[int] = ()) -> bool:
        """Wait for a signal, or the end of a process, or for so long; return whether a signal has come so far."""
        poll = select.poll()
        for descriptor in (self._wake, *descriptors):
            poll.register(descriptor, select.POLLIN)
        if any(descriptor == self._wake for descriptor, _ in poll.poll(max(0.0, seconds) * 1000)):
            os.read(self._wake, 64)
        return bool(self._signals)

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


class Worker:
    """The worker of one kind of slot: its registration, its Celery process, its end."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        kind: Kind,
        *,
        node: str,
        app: str,
        versions: Mapping[str, str],
        environment: Mapping[str, str],
        pause: Callable[[float], bool],
    ) -> None:
        self._store = store
        self._settings = settings
        self._kind = kind
        self._node = node
        self._app = app
        self._versions = {"farm": farm.__version__, "python": sys.version.split()[0], **versions}
        self._environment = environment
        self._pause = pause
        self._id = f"{node}-{kind.name}-{os.getpid()}-{secrets.token_hex(3)}"
        self._process: Process | None = None
        self._reaches_store = True
        self._draining = False
        self._released = False
        self._deadline = math.inf
        self.done = False
        """Whether it has drained."""

    def register(self) -> None:
        """Make it known to the store."""
        self._store.workers.register(
            {
                "id": self._id,
                "node": self._node,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "kind": self._kind.name,
                "slots": len(self._kind.slots),
                "gpus": [slot.gpu for slot in self._kind.slots if slot.gpu],
                "threads": self._kind.threads,
                "pools": [pool.as_dict() for pool in self._kind.pools],
                "versions": self._versions,
            },
            ttl=self._settings.lease_seconds,
        )
        pools = [pool.name for pool in self._kind.pools]
        log.info("worker registered", worker=self._id, slots=len(self._kind.slots), pools=pools)

    def start(self) -> None:
        """Start its process."""
        self._process = Process(
            self._app,
            queues=[pool.name for pool in self._kind.pools],
            slots=self._kind.slots,
            worker=self._id,
            node=self._node,
            environment={**os.environ, **self._environment, **self._settings.environment()},
        )

    @property
    def descriptor(self) -> int:
        """Readable when the process has ended."""
        assert self._process is not None
        return self._process.descriptor

    @property
    def patience(self) -> float:
        """Seconds until it has to be looked at again, where that is soon."""
        return self._deadline - time.monotonic()

    def look(self, signals: int) -> None:
        """Send a heartbeat and do what has to be done, after so many signals in all."""
        assert self._process is not None
        if self._process.ended and (self._draining or signals):
            self.done = True
        elif self._draining or signals:
            self._drain(self._process, hurry=signals)
        elif self._process.ended:
            log.error("the worker process died, starting it again", worker=self._id, status=self._process.status)
            self._restart(self._process)
        elif (beat := self._beat()) and beat.answer == "drain":
            log.info("draining, as the operator asked", worker=self._id)
            self._drain(self._process, hurry=signals)
        elif beat and not self._consumes(self._process, beat):
            log.error("the worker process takes no work while there is some, starting it again", worker=self._id)
            self._restart(self._process)

    def leave(self) -> None:
        """End its process, where it has not ended, and its registration."""
        if self._process:
            self._process.kill()
        try:
            self._store.workers.leave(self._id)
        except StoreUnavailable as error:
            log.info("registration is left to expire", error=error.message)

    def _beat(self) -> Beat | None:
        """Send one heartbeat; None where the store cannot be reached."""
        try:
            beat = self._store.workers.heartbeat(self._id, draining=self._draining)
            if beat.answer == "unknown":
                self.register()
        except StoreUnavailable as error:
            if self._reaches_store:
                log.warning("no heartbeat", error=error.message)
            self._reaches_store = False
            return None
        self._reaches_store = True
        return beat

    def _consumes(self, process: Process, beat: Beat) -> bool:
        """Whether it does not idle for a whole lease while its pools have work, nor takes too long to begin."""
        if beat.running or beat.unclaimed < self._settings.lease_seconds:
            return True
        consuming = process.consuming_for
        return process.age < START_SECONDS if consuming is None else consuming < self._settings.lease_seconds

    def _restart(self, process: Process) -> None:
        process.kill()
        stopping = process.age < RESTART_SECONDS and self._pause(RESTART_SECONDS)
        if not stopping:
            self.start()

    def _drain(self, process: Process, *, hurry: int) -> None:
        """Stop consuming; let attempts end, then give them back, then end the process. Called until it is done."""
        if not self._draining:
            log.info("draining", worker=self._id, grace=self._settings.grace_seconds)
            self._draining = True
            self._deadline = time.monotonic() + self._settings.grace_seconds
            process.stop_consuming()
        elif not self._released and (hurry > 1 or self.patience <= 0):
            log.info("giving attempts back", worker=self._id)
            self._released = True
            self._deadline = time.monotonic() + RELEASE_SECONDS
            process.release()
        elif self._released and (hurry > 2 or self.patience <= 0):
            process.kill()
            self.done = True
            return
        self._beat()


class Process:
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
        command = [
            *(sys.executable, "-m", "celery", "--app", app, "--quiet", "worker"),
            *("--pool", "threads", "--concurrency", str(len(slots)), "--queues", ",".join(queues)),
            *("--without-gossip", "--without-mingle", "--without-heartbeat", "--hostname", worker),
            *("--lifeline", str(lifeline.fileno()), "--worker", worker, "--node", node, "--slots", as_text(slots)),
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

"""Supervisor: runs `farm worker`. It has one Celery worker process for each kind of slot, and keeps it consuming.

A node has a worker for each kind (each GPU model, CPU), because an attempt that waits for a card must not hold a CPU
slot. The supervisor registers them, sends their heartbeats, starts a process again when it dies or stops consuming, and
drains on SIGTERM: Celery's thread pool has no soft shutdown, so that is ours. It also has the node's health probed, and
takes nothing while the node is fenced or its disk is full. A process is tied to the supervisor by a
socket, its lifeline: when that closes, by whatever death, the process exits, and with it the compilers that it started.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from enum import Enum, auto
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import farm
from farm.compiling import cgroups
from farm.compiling.alone import lock_place
from farm.compiling.attempt import AWAY, CONSUME, CONSUMING, FAULT, MISMATCH, PAUSE, RELEASE
from farm.errors import StoreUnavailable
from farm.jobs.state import FailureKind
from farm.logging import get_logger
from farm.metrics.instruments import FOLDER_VARIABLE, LEASES_ENDED, GaugeValue, bounded, exposition
from farm.node.disk import Deliveries
from farm.node.gpus import foreign_users, usage_now
from farm.node.health import DiskWatch, Health, Probes, lacks_room, serve_health
from farm.node.health import probe as health_probe
from farm.node.survey import SlotKind
from farm.settings import Settings, worker_environment
from farm.store import Beat, Store

log = get_logger(__name__)

APP = "tasks.celery_app"
RELEASE_SECONDS = 5.0  # What a process gets to end its compilers and give attempts back, before it is killed.
START_SECONDS = 60.0  # What a process gets to begin consuming, once the store can be reached.
RESTART_SECONDS = 2.0  # Between two starts of a process that does not stay.
SUSPICIOUS = 3  # So many failures in a row that may be the node's doing, and it is probed.
STILL_SECONDS = 60.0  # Seconds without a look at its workers after which the supervisor counts as stuck.
UNPROVEN = "its first health probe runs"  # Reason of a worker that has just started and takes no jobs yet.

FAULTED = "a GPU failed under an attempt: a health probe looks at it before the next job"

MISMATCHED = "an attempt found another toolchain than its job is for: a health probe looks at what is installed"
"""Reason of a worker that takes no jobs until that is known."""


class Supervisor:
    """The workers of one node: one for each kind of slot, from registration to end."""

    def __init__(
        self,
        settings: Settings,
        kinds: Sequence[SlotKind],
        *,
        node: str = "",
        app: str = APP,
        versions: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
        probe: Callable[[Settings, SlotKind], str] = health_probe,
        idle_seconds: float = math.inf,
    ) -> None:
        """`app` is the module of the Celery application that processes run, `environment` is added to theirs.

        `versions` is recorded with the workers. A kind of slot takes its first job when `probe` has passed; it is asked
        again when jobs fail in a row, and while the node is fenced. After `idle_seconds` without work the node drains
        by itself, so that no autoscaler has to choose which worker to stop.
        """
        self.settings = settings
        self.node = node or socket.gethostname()
        self.app = app
        self.versions = {"farm": farm.__version__, "python": sys.version.split()[0], **(versions or {})}
        self.environment = dict(environment or {})
        """Variables for the workers' processes, next to those of the settings."""
        self.probe = probe
        self.store = Store.connect(settings)
        self.deliveries = Deliveries(self.store, settings, self.nudge)
        self.disk = DiskWatch(settings.data_dir)
        self._idle_seconds = idle_seconds
        self._kinds = kinds
        self._workers = [Worker(self, kind) for kind in kinds]
        self._signals = 0
        self._news: SimpleQueue[None] = SimpleQueue()
        self._counted: Path | None = None
        """The folder in which worker processes count, while the health port is served."""
        self._seen = (time.monotonic(), [worker.health() for worker in self._workers])

    def _health(self) -> Health:
        """Return the state of its workers at the last look; not alive if the loop that looks at them is stuck."""
        looked, workers = self._seen
        alive = time.monotonic() - looked < max(STILL_SECONDS, 2 * self.settings.renew_seconds)
        return Health(alive, {"node": self.node, "workers": workers})

    def _metrics(self) -> bytes:
        """Return what the node's processes count, and how its workers, GPUs and disk are now."""
        readings = []
        for worker in self._seen[1]:
            states = {"fenced": bool(worker["fenced"]), "reaches_store": worker["reaches_store"]}
            states |= {"up": worker["consuming"], "running_attempts": worker["running"]}
            for name, state in states.items():
                readings.append(GaugeValue(f"farm_worker_{name}", float(state), (worker["kind"],)))
        gpus = {slot.gpu: slot for kind in self._kinds for slot in kind.slots if slot.gpu}
        for gpu, slot in gpus.items():
            usage = usage_now(slot)
            for name, value in (("busy_ratio", usage["busy"]), ("memory_used_bytes", usage["memory"])):
                if value is not None:
                    readings.append(GaugeValue(f"farm_gpu_{name}", value, (gpu,)))
        free = shutil.disk_usage(self.settings.data_dir).free
        return exposition(bounded([*readings, GaugeValue("farm_disk_free_bytes", free)]), self._counted)

    def nudge(self) -> None:
        """Let the loop look at its workers now. Thread-safe."""
        self._news.put(None)

    def run(self) -> int:
        """Serve the pools of every kind of slot until SIGTERM or SIGINT and return the exit status.

        The first signal drains: nothing more is taken, and what runs has `grace_seconds` to end; then, or at a second
        signal, it is ended and given back, uncharged. To be called from the main thread. Raises StoreUnavailable when
        the store cannot be reached at first.
        """
        self.store.check()
        cgroups.hand_on()
        log.info("memory limits", held=str(cgroups.find()))
        if self.settings.api_token.get_secret_value():
            log.warning("this worker can read a token of the API, which it does not need: start it without api_token")
        for worker in self._workers:
            worker.register()
        with self._counting(), self._listening(), serve_health(self.settings.health_port, self._health, self._metrics):
            try:
                self.deliveries.start()
                for worker in self._workers:
                    worker.start()
                    worker.look(self._signals)  # Its first probe waits for no heartbeat.
                while working := [worker for worker in self._workers if not worker.done]:
                    self.wait(min(self.settings.renew_seconds, *(worker.patience for worker in working)))
                    self.disk.start()
                    for worker in working:
                        worker.look(self._signals)
                    self._leave_if_idle()
                    self._seen = (time.monotonic(), [worker.health() for worker in self._workers])
            finally:
                for worker in self._workers:
                    worker.leave()
                self.store.close()
        return 0

    def _leave_if_idle(self) -> None:
        """Drain, as at a signal, if no worker had work for long and no finished program waits on this disk."""
        idle = time.monotonic() - max(worker.busy_at for worker in self._workers)
        if idle >= self._idle_seconds and not self._signals and not self.deliveries.outbox.size:
            log.info("leaving, for there is no work", seconds=round(idle))
            self._signals = 1
            self.nudge()

    def wait(self, seconds: float) -> bool:
        """Wait for a signal, the end of a process or another nudge, or for so long; return if a signal has come."""
        with suppress(Empty):
            self._news.get(timeout=max(0.0, seconds))
            while True:
                self._news.get_nowait()
        return bool(self._signals)

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Let the worker processes count in one folder, if anybody can ask for it. Counts of dead processes stay."""
        if not self.settings.health_port:
            yield
            return
        with TemporaryDirectory(prefix="metrics-", dir=self.settings.data_dir) as folder:
            self._counted = Path(folder)
            self.environment[FOLDER_VARIABLE] = folder
            yield

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Count SIGTERM and SIGINT, and wake up at them."""
        with ExitStack() as before:
            for number in (signal.SIGTERM, signal.SIGINT):
                before.callback(signal.signal, number, signal.signal(number, self._count))
            yield

    def _count(self, _number: int, _frame: FrameType | None) -> None:
        self._signals += 1
        self.nudge()


class Stage(Enum):
    """How far a worker is with its end; each stage follows the one before."""

    SERVING = auto()  # It takes jobs, unless it rests.
    DRAINING = auto()  # It takes nothing more; what runs may end within the grace period.
    RELEASING = auto()  # It ends what runs and gives it back.
    DONE = auto()


class Worker:
    """The worker of one kind of slot: its registration, its Celery process, its end."""

    def __init__(self, node: Supervisor, kind: SlotKind) -> None:
        self._supervisor = node
        self._store = node.store
        self._settings = node.settings.model_copy(update={"threads": kind.threads})
        self._kind = kind
        self._node = node.node
        self._id = f"{node.node}-{kind.name}-{os.getpid()}-{secrets.token_hex(3)}"
        self._process: CeleryProcess | None = None
        """None before the start, and while a process that died waits for the store to come back."""
        self._probes = Probes(partial(node.probe, self._settings, kind), self._settings.probe_pause, node.nudge)
        self._fenced = ""
        self._resting = UNPROVEN
        self._broken = ""
        """Why its process takes no jobs though it may."""
        self._doubt = ""
        self._beaten = Beat("ok", 0, 0.0)
        self.busy_at = time.monotonic()
        """When it last had work, was not yet proven, or did not reach the store."""
        self._reaches_store = True
        self._stage = Stage.SERVING
        self._deadline = math.inf

    @property
    def done(self) -> bool:
        """Whether it has drained."""
        return self._stage is Stage.DONE

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
                "locks": lock_place(self._settings.lock_dir),
                "pools": [pool.as_dict() for pool in self._kind.pools],
                "versions": self._supervisor.versions,
            },
            ttl=self._settings.lease_seconds,
            resting=self._takes_none,
            fenced=self._fenced,
        )
        pools = [pool.name for pool in self._kind.pools]
        log.info("worker registered", worker=self._id, slots=len(self._kind.slots), pools=pools)

    def start(self) -> None:
        """Start its process, which begins to consume when nothing speaks against it."""
        options = {
            "quiet": True,
            "pool_cls": "threads",
            # An attempt that publishes has left its slot to the next one.
            "concurrency": 2 * len(self._kind.slots),
            "queues": [pool.name for pool in self._kind.pools],
            "without_gossip": True,
            "without_mingle": True,
            "without_heartbeat": True,
            "hostname": self._id,
            "worker": self._id,
            "node": self._node,
            "slots": [asdict(slot) for slot in self._kind.slots],
        }
        environment = worker_environment(self._settings, {**os.environ, **self._supervisor.environment})
        self._process = CeleryProcess(self._supervisor.app, options, environment, self._supervisor.nudge)

    def health(self) -> dict[str, Any]:
        """Return how it is: whether it takes jobs, and why not."""
        consuming = self._process.consuming_for if self._process and not self._rests else None
        return {
            "id": self._id,
            "kind": self._kind.name,
            "pools": [pool.name for pool in self._kind.pools],
            "consuming": consuming is not None and self._stage is Stage.SERVING and self._reaches_store,
            "consuming_for": consuming and round(consuming, 3),
            "draining": self._stage is not Stage.SERVING,
            "fenced": self._fenced,
            "resting": self._takes_none,
            "running": self._beaten.running,
            "reaches_store": self._reaches_store,
        }

    @property
    def _rests(self) -> bool:
        return bool(self._fenced or self._resting)

    @property
    def _takes_none(self) -> str:
        """Why it takes no jobs, for the store; its node's fence is known there."""
        return self._resting or self._broken

    @property
    def patience(self) -> float:
        """Seconds until its next check, if that is soon."""
        return self._deadline - time.monotonic()

    def look(self, signals: int) -> None:
        """Send a heartbeat and act on the answer; `signals` counts the signals to stop so far."""
        if self._process and self._process.met(AWAY):
            self._supervisor.deliveries.suspect()
        if self._stage is not Stage.SERVING or signals:
            self._drain(hurry=signals)
            return
        beat = self._beat()
        if beat and beat.answer == "drain":
            log.info("draining, as the operator asked", worker=self._id)
            self._drain(hurry=signals)
            return
        reported = self._takes_none
        if beat:
            self._see_to_health(beat)
        if not beat or beat.running or self._resting == UNPROVEN or (beat.unclaimed and not self._rests):
            self.busy_at = time.monotonic()
        if self._process and self._process.consuming_for is not None:
            self._broken = ""
        if beat and self._takes_none != reported:
            self._beat()  # Claims are answered, and jobs handed out, by what the store knows.
        self._see_to_process(beat)

    def _see_to_process(self, beat: Beat | None) -> None:
        """Let its process take messages, or pause it. Start another process if it died or does not take them."""
        if self._process is None or self._process.status is not None:
            self._replace(self._process)
        elif self._rests:
            if self._process.may_consume:
                log.warning("taking no jobs for now", worker=self._id, reason=self._fenced or self._resting)
            self._process.pause()
        else:
            if not self._process.may_consume:
                log.info("taking jobs", worker=self._id)
            self._process.consume()
            if beat and not self._consumes(self._process, beat):
                log.error("the worker process takes no work while there is some, starting it again", worker=self._id)
                if self._process.consuming_for is None:
                    self._broken = "its worker process does not begin to take messages"
                self._restart(self._process)

    def _see_to_health(self, beat: Beat) -> None:
        """Check whether the node is fenced, its disk has room and its GPUs are free; probe it if that is due."""
        full = lacks_room(self._settings)
        foreign = foreign_users(self._kind.slots, self._settings.lock_dir)
        if self._probes.answer and full:
            self._probes.answer = None  # A full disk is not the node's fault: it is probed again when there is room.
        self._see_to_doubts()
        wrong = self._probes.answer
        if wrong is not None:
            if wrong:
                log.error("health probe failed", worker=self._id, reason=wrong)
            try:
                fenced = self._store.workers.probed(self._id, node=self._node, wrong=wrong, row=self._probes.row)
            except StoreUnavailable as error:
                log.info("the health probe's answer is reported later", error=error.message)
                return
            if fenced is None:
                return  # The store lost it since this heartbeat: the next one registers it, with its fence.
            self._probes.answer, self._probes.proven = None, True
        else:
            fenced = beat.fenced
        if fenced and not self._fenced:
            log.error("the node is fenced", node=self._node, reason=fenced)
            self._probes.begin_row()
        elif self._fenced and not fenced:
            log.info("the node takes jobs again", node=self._node)
        self._fenced = fenced
        suspect = wrong is None and beat.failed >= SUSPICIOUS
        soon = not self._probes.proven or (self._probes.due if fenced else suspect)
        if not (full or foreign) and (self._probes.due if self._doubt else soon):
            self._probes.start()
        unproven = "" if self._probes.proven else UNPROVEN
        # An outage first: it costs no job, even if it has filled the disk.
        self._resting = self._supervisor.deliveries.resting or full or foreign or self._doubt or unproven

    def _see_to_doubts(self) -> None:
        """Take no jobs after an attempt found the wrong toolchain or a GPU failed.

        It ends when a probe finds the registered toolchain, or passes on the GPU. The node is not fenced for it: a new
        installation is not the node's fault, and its other workers continue. A GPU may be well again; if it is not, the
        probe fences the node.
        """
        wrong = self._probes.answer
        if wrong and FailureKind.TOOLCHAIN_MISMATCH in wrong:
            log.error("worker rests", worker=self._id, reason=wrong)
            self._doubt = f"{wrong}; start it again, then it serves what is installed now"
            self._probes.answer = None
        elif wrong == "":
            self._doubt = ""
        for word, doubt in ((MISMATCH, MISMATCHED), (FAULT, FAULTED)):
            if self._process and self._process.met(word):
                log.error("worker rests", worker=self._id, reason=doubt)
                self._doubt = self._doubt or doubt
                self._probes.due_at = 0.0  # No fence: the pauses stay as they are.

    def leave(self) -> None:
        """End its process and its registration."""
        if self._process:
            self._process.kill()
        try:
            for job in self._store.workers.leave(self._id):
                LEASES_ENDED.labels("stopped").inc()
                log.warning("attempt given back as its worker stopped", job=job, worker=self._id)
        except StoreUnavailable as error:
            log.info("registration is left to expire", error=error.message)

    def _give_up(self, why: str) -> None:
        """Report its attempts as lost, since its process is dead. If the store is away, their leases will expire."""
        try:
            self._supervisor.deliveries.keep_left()
            for job in self._store.workers.died(self._id, why):
                LEASES_ENDED.labels("died").inc()
                log.warning("attempt lost with its worker process", job=job, worker=self._id)
        except StoreUnavailable as error:
            log.info("attempts are left to their leases", error=error.message)

    def _beat(self) -> Beat | None:
        """Send one heartbeat; return None if the store is away, or had forgotten this worker."""
        try:
            draining = self._stage is not Stage.SERVING
            slow = self._supervisor.disk.slow
            beat = self._store.workers.heartbeat(self._id, draining=draining, resting=self._takes_none, warning=slow)
            self._beaten = beat
            if beat.answer == "unknown":
                self.register()
        except StoreUnavailable as error:
            if self._reaches_store:
                log.warning("no heartbeat, trying again", error=error.message, hint=error.hint)
            self._reaches_store = False
            return None
        if not self._reaches_store:
            log.info("heartbeats reach the store again", worker=self._id)
        self._reaches_store = True
        return None if beat.answer == "unknown" else beat

    def _consumes(self, process: CeleryProcess, beat: Beat) -> bool:
        """Whether it does not idle for a whole lease while its pools have work, nor takes too long to begin."""
        if beat.running or beat.unclaimed < self._settings.lease_seconds:
            return True
        consuming = process.consuming_for
        return process.age < START_SECONDS if consuming is None else consuming < self._settings.lease_seconds

    def _replace(self, process: CeleryProcess | None) -> None:
        """Start another process for one that died; as long as the store is away that would only die again."""
        if process:
            log.error("the worker process died, starting it again", worker=self._id, status=process.status)
            self._give_up(f"died (exit status {process.status})")
            if process.consuming_for is None:
                self._broken = f"its worker process dies at start (exit status {process.status}): see its log"
            if self._reaches_store:
                self._restart(process)
            else:
                process.kill()
                self._process = None
        elif self._reaches_store:
            self.start()

    def _restart(self, process: CeleryProcess) -> None:
        process.kill()
        self._process = None
        until = time.monotonic() + RESTART_SECONDS if process.age < RESTART_SECONDS else 0.0
        while (left := until - time.monotonic()) > 0:
            if self._supervisor.wait(left):
                return
        self.start()

    def _drain(self, *, hurry: int) -> None:
        """Stop consuming; let attempts end, then give them back, then end the process. Called until it is done."""
        process, late = self._process, self.patience <= 0
        if process is None or process.status is not None:
            self._stage = Stage.DONE
        elif self._stage is Stage.SERVING:
            log.info("draining", worker=self._id, grace=self._settings.grace_seconds)
            self._stage, self._deadline = Stage.DRAINING, time.monotonic() + self._settings.grace_seconds
            process.stop_consuming()
        elif self._stage is Stage.DRAINING and (hurry > 1 or late):
            log.info("giving attempts back", worker=self._id)
            self._stage, self._deadline = Stage.RELEASING, time.monotonic() + RELEASE_SECONDS
            process.say(RELEASE)
        elif self._stage is Stage.RELEASING and (hurry > 2 or late):
            process.kill()
            self._stage = Stage.DONE
        if not self.done:
            self._beat()


class CeleryProcess:
    """A Celery worker process that ends when this one does."""

    def __init__(
        self, app: str, options: Mapping[str, object], environment: dict[str, str], nudge: Callable[[], None]
    ) -> None:
        """`options` are those of Celery's worker; `nudge` is called, in another thread, when it has ended."""
        self._lifeline, lifeline = socket.socketpair()
        whole = json.dumps({**options, "lifeline": lifeline.fileno()})
        # A session of its own: Ctrl-C at a terminal reaches the supervisor alone, which drains.
        with lifeline:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "tasks", app, whole],
                stdin=subprocess.DEVNULL,
                pass_fds=[lifeline.fileno()],
                env=environment,
                start_new_session=True,
            )
        self._started = time.monotonic()
        self._consuming: float | None = None
        self._heard: set[bytes] = set()
        self.may_consume = False
        threading.Thread(target=self._listen, args=(nudge,), name="lifeline", daemon=True).start()

    def _listen(self, nudge: Callable[[], None]) -> None:
        with suppress(OSError):  # It died with something of ours unread.
            while words := self._lifeline.recv(4096):
                if CONSUMING in words and self._consuming is None:
                    self._consuming = time.monotonic()
                self._heard |= {word for word in (AWAY, MISMATCH, FAULT) if word in words}
        self._popen.wait()
        nudge()

    @property
    def age(self) -> float:
        """Seconds since it was started, or since it may consume (again)."""
        return time.monotonic() - self._started

    @property
    def consuming_for(self) -> float | None:
        """Seconds since it reported that it takes messages, or was allowed to again; None before its report."""
        return None if self._consuming is None else min(time.monotonic() - self._consuming, self.age)

    def met(self, word: bytes) -> bool:
        """Return whether one of its attempts has said this word (AWAY, MISMATCH, FAULT) since the last call."""
        met = word in self._heard
        self._heard.discard(word)
        return met

    @property
    def status(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._popen.poll()

    def consume(self) -> None:
        """Let it take messages; its age counts from now. Repeatable."""
        if not self.may_consume:
            self.may_consume, self._started = True, time.monotonic()
            self.say(CONSUME)

    def pause(self) -> None:
        """Let it take no messages until `consume` is called again. Running attempts continue. Repeatable."""
        if self.may_consume:
            self.may_consume = False
            self.say(PAUSE)

    def stop_consuming(self) -> None:
        """Take no more messages, and end when the running ones have."""
        self._popen.send_signal(signal.SIGTERM)

    def say(self, word: bytes) -> None:
        """Send a message to it (RELEASE: end the attempts that run, and give them back), unless it is gone."""
        with suppress(BrokenPipeError):
            self._lifeline.send(word)

    def kill(self) -> None:
        """Kill it if it has not ended, and close its lifeline. Repeatable."""
        self._popen.kill()
        self._popen.wait()
        self._lifeline.close()

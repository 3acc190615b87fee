"""Attempts: what a worker process does with a message. Claim, execute under a renewed lease, finish."""

from __future__ import annotations

import math
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from farm.artifacts.storage import MAIN
from farm.compiling.alone import host_at
from farm.compiling.attempt import AWAY, CONSUME, FAULT, MISMATCH, PAUSE, RELEASE, Attempt, FreeSlots, Slot
from farm.errors import StoreUnavailable
from farm.jobs.state import WAITS_FOR_STORAGE, AttemptEnd, FailureKind, Outcome, Phase
from farm.logging import bound, get_logger
from farm.metrics.instruments import ATTEMPT_HITS, ATTEMPTS, COMPILED_SECONDS, PHASE_SECONDS, count_tuning
from farm.node.gpus import until_forgotten
from farm.settings import Settings
from farm.store import Renewal, Renewed, Store

if TYPE_CHECKING:
    from farm.node.executor import Executor

log = get_logger(__name__)

_JOB = re.compile("j-[0-9a-f]{16}")

_DOUBTS: dict[FailureKind | None, bytes] = {
    FailureKind.TOOLCHAIN_MISMATCH: MISMATCH,
    FailureKind.GPU_FAULT: FAULT,
    FailureKind.GPU_LOST: FAULT,
}
"""What an attempt's end says of its node."""

HEARD_AGAIN = 3600.0  # Seconds after which a namespace other than `main` has a node looked at again.

RETRY_SECONDS = 0.5  # Between two tries to reach the store.

Answer = TypeVar("Answer")


class Draining(Exception):
    """The worker takes no more work; the message goes back."""


class Attempts:
    """The attempts of one worker process. One thread of Celery's pool calls `run` for each message."""

    current: ClassVar[Attempts]  # Those of this process: Celery calls tasks and signals without them.

    def __init__(
        self, store: Store, executor: Executor, settings: Settings, slots: Sequence[Slot], *, worker: str, node: str
    ) -> None:
        self._store = store
        self._executor = executor
        self._settings = settings
        self._free = FreeSlots(slots, settings.lock_dir, until_forgotten)
        self._leases = Leases(store, settings.renew_seconds)
        self._worker = worker
        self._node = node
        self._heard: dict[str, float] = {}
        self._draining = threading.Event()
        self._may_consume = threading.Event()
        self._lifeline: socket.socket | None = None
        self.when_resumed: Callable[[], object] = lambda: None
        """Called when messages may be taken again; from another thread."""

    def run(self, job_id: str, number: int) -> None:
        """Claim the attempt that a message names and run it. Any answer but `run` drops the message.

        Waits for a store that is away, before and after the attempt, so that no finished work is lost. Raises Draining.
        """
        if not _JOB.fullmatch(job_id):  # Every worker may send messages; an id is part of the names of folders.
            log.error("message dropped: it names no job", job=job_id)
            return
        nonce, claims = secrets.token_hex(16), self._store.jobs.claim
        ask = partial(claims, job_id, number, nonce=nonce, worker=self._worker, node=self._node)
        claim = _until_reached(ask, "claim", self._draining)
        if claim.answer != "run" or claim.order is None:
            log.info("message dropped", job=job_id, attempt=number, answer=claim.answer)
            return
        granted = ("token", "order", "limits", "namespace", "key", "build", "previous")
        given = {name: getattr(claim, name) for name in granted}
        attempt = Attempt(job_id=job_id, number=number, worker=self._worker, claimed=True, **given)
        host_at(self._settings.lock_dir).is_split = claim.is_split
        named = bound(
            job=job_id, attempt=number, cell=claim.order["identifier"], build=claim.build, worker=self._worker
        )
        with named, self._leases.hold(attempt) as lease:
            if self._draining.is_set():
                lease.cancelled.set()
            outcome = self._execute(attempt, lease)
            if (doubt := _DOUBTS.get(outcome.kind)) and self._listens_to(attempt.namespace):
                if doubt == FAULT:
                    self._may_consume.clear()  # At once: the slot is free before the supervisor has heard of it.
                self.say(doubt)
            # Until the store answers: an outcome is worth more than a free slot.
            send = partial(self._store.jobs.finish, job_id, attempt.token, outcome)
            answer = _until_reached(send, "finish", threading.Event())
            log.info("attempt ended", end=outcome.end.value, kind=outcome.kind, answer=answer)
            _count("superseded" if answer == "superseded" else outcome.end.value, outcome)

    def release(self) -> None:
        """End all attempts soon and give them back uncharged. Claim nothing more."""
        self._draining.set()
        self._leases.cancel_all()

    def may_consume(self, running: int) -> bool:
        """Whether the supervisor wants messages to be taken, and one more than so many attempts finds a slot."""
        return self._may_consume.is_set() and self._free.has_room(running)

    def obey(self, lifeline: int) -> None:
        """Wait until the supervisor allows to consume, on `lifeline`; then pause, resume and release as it says.

        If the supervisor's end closes, the supervisor is dead: exit at once. The children of attempts end with this
        process, because each child's guard holds a pipe to it.
        """

        # Opened once: one that is opened while Celery shuts down gets its time-out, and this one with it.
        line = self._lifeline = socket.socket(fileno=lifeline)
        line.settimeout(None)

        def listen() -> None:
            with suppress(ConnectionResetError):  # It died with something of ours unread.
                while word := line.recv(1):
                    if word == CONSUME:
                        self._may_consume.set()
                        self.when_resumed()
                    elif word == PAUSE:
                        self._may_consume.clear()
                    elif word == RELEASE:
                        self.release()
                        self._may_consume.set()
            os._exit(1)

        threading.Thread(target=listen, name="lifeline", daemon=True).start()
        self._may_consume.wait()

    def _execute(self, attempt: Attempt, lease: Lease) -> Outcome:
        try:
            with ExitStack() as publishing, ExitStack() as holding:
                slot = holding.enter_context(self._free.one(lease.cancelled))

                def leave() -> None:
                    if slot:
                        lease.leave_slot()
                        publishing.enter_context(self._free.left(slot))
                    holding.close()
                    self.when_resumed()

                if slot is None:
                    outcome = Outcome.cancelled()
                else:
                    away = partial(self._away, lease)
                    attempt = replace(attempt, slot=slot, free=self._free, on_away=away, leave=leave)
                    outcome = self._executor.execute(attempt, on_phase=lease.note, cancelled=lease.cancelled)
        except Exception as error:
            log.exception("executor failed")
            return Outcome.failure(FailureKind.INTERNAL, f"the farm made a mistake: {type(error).__name__}: {error}")
        if outcome.end is AttemptEnd.CANCELLED and not lease.unwanted:
            return Outcome.released()
        return outcome

    def _away(self, lease: Lease, kept: bool, /) -> None:
        """Report to the store and the supervisor that an attempt waits for object storage."""
        lease.wait_for_storage(kept=kept)
        self.say(AWAY)

    def _listens_to(self, namespace: str) -> bool:
        """Whether an attempt's end counts against this node: outside `main` its compiler may say what it likes."""
        now = time.monotonic()
        listens = namespace == MAIN or now >= self._heard.get(namespace, now)
        if listens:
            self._heard[namespace] = now + HEARD_AGAIN
        return listens

    def say(self, word: bytes) -> None:
        """Send a message to the supervisor. If its buffer is full of them, drop it: those are sent again soon."""
        if self._lifeline is not None:
            with suppress(OSError):
                self._lifeline.send(word, socket.MSG_DONTWAIT)


def _until_reached(ask: Callable[[], Answer], what: str, stop: threading.Event) -> Answer:
    """Ask the store until it answers. Raises Draining once `stop` is set."""
    warned = False
    while not stop.is_set():
        try:
            return ask()
        except StoreUnavailable as error:
            if not warned:
                log.warning(f"cannot {what}, trying again", error=error.message, hint=error.hint)
            warned = True
            stop.wait(RETRY_SECONDS)
    raise Draining


def _count(end: str, outcome: Outcome) -> None:
    ATTEMPTS.labels(end, outcome.kind.value if outcome.kind else "").inc()
    for phase, seconds in outcome.phases.items():
        PHASE_SECONDS.labels(phase).observe(seconds)
    if outcome.hit:
        ATTEMPT_HITS.inc()
    elif outcome.facts:
        COMPILED_SECONDS.observe(outcome.facts.get("seconds", 0.0))
        if tuning := outcome.facts.get("tuning"):
            count_tuning(tuning)


class Lease:
    """One attempt's claim on its job, as this process holds it.

    `cancelled` is set when the attempt is to end; `unwanted` says that the store wants it so (else the worker drains).
    """

    def __init__(self, attempt: Attempt, due: float, news: threading.Condition) -> None:
        self.attempt = attempt
        self.cancelled = threading.Event()
        self.unwanted = False
        self.due = due
        self._says = Renewal(attempt.token, attempt.job_id)
        self._news = news

    def note(self, phase: Phase, progress: float | None, detail: str, /) -> None:
        """Remember what the attempt is doing. A new phase is reported at once, progress with the next renewal."""
        self._say(at_once=phase != self._says.phase, phase=phase.value, progress=progress, detail=detail)

    def wait_for_storage(self, *, kept: bool) -> None:
        """Remember that the attempt cannot go on, and whether its finished program is kept on the node's disk."""
        detail = f"{WAITS_FOR_STORAGE}; its program is finished" if kept else WAITS_FOR_STORAGE
        self._say(at_once=detail != self._says.detail, progress=None, detail=detail, kept=kept or self._says.kept)

    def leave_slot(self) -> None:
        """Remember that the attempt only uploads, and holds no slot any more."""
        self._say(at_once=True, left=True)

    def renewal(self) -> Renewal:
        """Return what it says to the store."""
        return replace(self._says, paused=self.attempt.clock.lost, log_tail=self.attempt.tail.news())

    def _say(self, *, at_once: bool, **says: Any) -> None:
        with self._news:
            self._says = replace(self._says, **says)
            if at_once:
                self.due = 0.0
                self._news.notify()

    def hear(self, answer: Renewed) -> None:
        """Hear whether the store wants the attempt to go on."""
        if answer != "ok":
            self.unwanted = True
            self.cancelled.set()
        if answer == "lost":
            self.due = math.inf


class Leases:
    """Renews the leases of all attempts of this process in one thread, and cancels attempts that the store ends."""

    def __init__(self, store: Store, seconds: float) -> None:
        self._store = store
        self._seconds = seconds
        self._held: set[Lease] = set()
        self._news = threading.Condition()
        self._reaches_store = True
        threading.Thread(target=self._run, name="leases", daemon=True).start()

    @contextmanager
    def hold(self, attempt: Attempt) -> Iterator[Lease]:
        """Renew the lease of an attempt that was just claimed, until the block ends."""
        lease = Lease(attempt, time.monotonic() + self._seconds, self._news)
        with self._news:
            self._held.add(lease)
        try:
            yield lease
        finally:
            with self._news:
                self._held.discard(lease)

    def cancel_all(self) -> None:
        """Have every attempt end soon."""
        with self._news:
            for lease in self._held:
                lease.cancelled.set()

    def _run(self) -> None:
        while True:
            with self._news:
                # Never longer than one interval: a lease that is added in this time is due after that.
                first = min((lease.due for lease in self._held), default=math.inf)
                self._news.wait(min(max(first - time.monotonic(), 0.0), self._seconds))
                due = [lease for lease in self._held if lease.due <= time.monotonic()]
            if due:
                self._renew(due)

    def _renew(self, leases: Sequence[Lease]) -> None:
        """Renew leases, all in one call. While the store is away, try again and again; the attempts continue."""
        for lease in leases:
            lease.due = time.monotonic() + self._seconds
        try:
            answers = self._store.jobs.renew_all([lease.renewal() for lease in leases])
        except StoreUnavailable as error:
            if self._reaches_store:
                log.warning("cannot renew leases, trying again", error=error.message, hint=error.hint)
            self._reaches_store = False
            for lease in leases:
                lease.due = time.monotonic() + min(RETRY_SECONDS, self._seconds)
            return
        except Exception:  # The other attempts need this thread.
            if len(leases) == 1:
                log.exception("cannot renew a lease", job=leases[0].attempt.job_id)
            else:
                for lease in leases:
                    self._renew([lease])
            return
        self._reaches_store = True
        for lease, answer in zip(leases, answers, strict=True):
            lease.hear(answer)

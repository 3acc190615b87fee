"""Slots: what a worker process does with a message. Claim, execute under a renewed lease, finish."""

from __future__ import annotations

import os
import secrets
import threading
from typing import ClassVar, Protocol

from farm.errors import StoreUnavailable
from farm.jobs.attempt import Attempt
from farm.jobs.state import AttemptEnd, FailureKind, Outcome, Phase
from farm.logging import bind_attempt, get_logger, unbind
from farm.settings import Settings
from farm.store import Claim, Store

log = get_logger(__name__)

RETRY_SECONDS = 0.5
"""Between two tries to reach the store."""

CONSUMING, RELEASE = b"c", b"r"
"""The words on the lifeline, as `farm/worker.py` has them: we take messages; end the attempts and give them back."""


class Executor(Protocol):
    """What runs an attempt: `farm.executor.Executor`, or a scripted one in tests."""

    def execute(self, attempt: Attempt, *, on_phase: OnPhase, cancelled: threading.Event) -> Outcome:
        """Run the attempt to its end, soon after `cancelled` where that is set."""
        ...


class OnPhase(Protocol):
    """Hears what an attempt is doing; `progress` is a share of 1, or None where it is not known."""

    def __call__(self, phase: Phase, progress: float | None, detail: str, /) -> None:
        """Note it; the next renewal of the lease tells the store."""
        ...


class Draining(Exception):
    """The worker takes no more work; the message goes back."""


class Slots:
    """The attempts of one worker process. One thread of Celery's pool calls `run` for each message."""

    _opened: ClassVar[Slots]

    def __init__(self, store: Store, executor: Executor, settings: Settings, *, worker: str, node: str) -> None:
        self._store = store
        self._executor = executor
        self._settings = settings
        self._worker = worker
        self._node = node
        self._draining = threading.Event()
        self._running: set[Renewals] = set()
        self._lifeline: int | None = None

    @classmethod
    def open(cls, store: Store, executor: Executor, settings: Settings, *, worker: str, node: str) -> Slots:
        """Make the slots of this process; `current` returns them."""
        cls._opened = cls(store, executor, settings, worker=worker, node=node)
        return cls._opened

    @classmethod
    def current(cls) -> Slots:
        """Return the slots of this process."""
        return cls._opened

    def run(self, job_id: str, number: int) -> None:
        """Claim the attempt that a message names and run it; anything but `run` drops the message.

        A lost store is waited for, before and after: what was compiled is not thrown away. Raises Draining.
        """
        claim = self._claim(job_id, number)
        if claim.answer != "run":
            log.info("message dropped", job=job_id, attempt=number, answer=claim.answer)
            return
        attempt = Attempt(
            job_id=job_id,
            number=number,
            token=claim.token,
            order=claim.order,
            limits=claim.limits,
            namespace=claim.namespace,
            key=claim.key,
            build=claim.build,
            worker=self._worker,
            previous=claim.previous,
        )
        bind_attempt(job_id, number, str(claim.order.get("identifier", "")))
        try:
            with Renewals(self._store, attempt, self._settings.renew_seconds) as renewals:
                self._running.add(renewals)
                try:
                    if self._draining.is_set():
                        renewals.cancelled.set()
                    outcome = self._execute(attempt, renewals)
                    self._finish(attempt, outcome, renewals)
                finally:
                    self._running.discard(renewals)
        finally:
            unbind()

    def release(self) -> None:
        """End all attempts soon and give them back uncharged; claim nothing more."""
        self._draining.set()
        for renewals in list(self._running):
            renewals.cancelled.set()

    def obey(self, lifeline: int) -> None:
        """Release when the supervisor says so on `lifeline`; when its end closes, the supervisor is dead: exit at once.

        What attempts have started ends with this process: each child's guard holds a pipe to it.
        """

        def listen() -> None:
            while os.read(lifeline, 1) == RELEASE:
                self.release()
            os._exit(1)

        threading.Thread(target=listen, name="lifeline", daemon=True).start()
        self._lifeline = lifeline

    def consuming(self) -> None:
        """Tell the supervisor that messages are taken from here on."""
        if self._lifeline is not None:
            os.write(self._lifeline, CONSUMING)

    def _claim(self, job_id: str, number: int) -> Claim:
        nonce = secrets.token_hex(16)
        while not self._draining.is_set():
            try:
                return self._store.jobs.claim(job_id, number, nonce=nonce, worker=self._worker, node=self._node)
            except StoreUnavailable as error:
                log.warning("cannot claim, trying again", job=job_id, error=error.message)
                self._draining.wait(RETRY_SECONDS)
        raise Draining

    def _execute(self, attempt: Attempt, renewals: Renewals) -> Outcome:
        try:
            outcome = self._executor.execute(attempt, on_phase=renewals.note, cancelled=renewals.cancelled)
        except Exception as error:
            log.exception("executor failed")
            return Outcome.failure(FailureKind.INTERNAL, f"the farm made a mistake: {type(error).__name__}: {error}")
        if outcome.end is AttemptEnd.CANCELLED and not renewals.unwanted:
            return Outcome.released()
        return outcome

    def _finish(self, attempt: Attempt, outcome: Outcome, renewals: Renewals) -> None:
        """Tell the store until it answers: an outcome is worth more than a free slot."""
        while True:
            try:
                if outcome.end is AttemptEnd.SUCCEEDED:
                    # Before the job ends: who sees it ended finds its artifact in the index.
                    self._store.index.put(outcome.facts.get("namespace", attempt.namespace), attempt.key, outcome.facts)
                answer = self._store.jobs.finish(attempt.job_id, attempt.token, outcome)
            except StoreUnavailable as error:
                log.warning("cannot finish, trying again", error=error.message)
                renewals.pause(RETRY_SECONDS)
            else:
                log.info("attempt ended", end=outcome.end.value, kind=outcome.kind, answer=answer)
                return


class Renewals:
    """Keeps the lease of one attempt from a thread of its own, and hears whether anybody still wants it.

    `cancelled` is set when the attempt is to end; `unwanted` says that the store wants it so (else the worker drains).
    """

    def __init__(self, store: Store, attempt: Attempt, seconds: float) -> None:
        self.cancelled = threading.Event()
        self.unwanted = False
        self._store = store
        self._attempt = attempt
        self._seconds = seconds
        self._doing: tuple[str, float | None, str] = ("", None, "")
        self._news = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name=f"lease-{attempt.job_id}", daemon=True)

    def __enter__(self) -> Renewals:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._news.set()

    def note(self, phase: Phase, progress: float | None, detail: str, /) -> None:
        """Remember what the attempt is doing; a new phase is told at once, progress with the next renewal."""
        changed = phase.value != self._doing[0]
        self._doing = (phase.value, progress, detail)
        if changed:
            self._news.set()

    def pause(self, seconds: float) -> None:
        """Wait."""
        self._over.wait(seconds)

    def _renew(self) -> None:
        """Renew until the attempt is over or lost; a store that is away is tried again and again."""
        wait = self._seconds
        while True:
            self._news.wait(wait)
            self._news.clear()
            if self._over.is_set():
                return
            try:
                answer = self._tell()
            except StoreUnavailable as error:
                log.warning("cannot renew, trying again", job=self._attempt.job_id, error=error.message)
                wait = min(RETRY_SECONDS, self._seconds)
                continue
            wait = self._seconds
            if answer != "ok":
                self.unwanted = True
                self.cancelled.set()
            if answer == "lost":
                return

    def _tell(self) -> str:
        phase, progress, detail = self._doing
        return self._store.jobs.renew(
            self._attempt.token,
            self._attempt.job_id,
            phase=phase,
            progress=progress,
            detail=detail,
            log_tail=self._attempt.tail.news(),
        )

"""Deliveries: watches object storage while it is away, and publishes the parcels that attempts left in the outbox."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from farm.errors import FarmError, StorageAway, StorageUnavailable, StoreUnavailable
from farm.extension import publishing
from farm.jobs.state import FailureKind, Outcome, Phase
from farm.logging import get_logger
from farm.node.outbox import Outbox, Parcel
from farm.settings import Settings
from farm.store import Store

if TYPE_CHECKING:
    from farm.artifacts.s3 import S3Store

log = get_logger(__name__)

LOOK_SECONDS = 5.0
"""Seconds between two looks into the outbox."""

AWAY_PAUSES = (0.5, 1.5)
"""Seconds between two checks whether storage is back; random, so that nodes do not ask all at once."""


AWAY = "object storage is away"
"""Start of the reason for which jobs wait without a time limit; `_workers.lua` knows it, too."""


class Deliveries:
    """Watches object storage for the supervisor of a node, in a thread."""

    def __init__(self, store: Store, settings: Settings, nudge: Callable[[], None]) -> None:
        self._store = store
        self._settings = settings
        self._nudge = nudge
        self._outbox = Outbox(settings.data_dir.resolve() / "outbox", publishing(settings))
        self._wake = threading.Event()
        self._suspected = True
        self._refused: dict[str, float] = {}
        """By the tokens of parcels: since when storage refuses them while it answers others."""
        self.resting = ""
        """Why the node's workers take no jobs: storage is away or refuses, or the outbox is full."""

    def start(self) -> None:
        """Begin to watch if the farm has an object storage."""
        if self._settings.s3_bucket:
            # A daemon: the worker must be able to end while storage hangs.
            threading.Thread(target=self._run, name="deliveries", daemon=True).start()

    def suspect(self) -> None:
        """Check storage now: an attempt found it away."""
        self._suspected = True
        self._wake.set()

    def keep_left(self) -> None:
        """Let the jobs of abandoned programs wait for them: their worker process is dead. Raises StoreUnavailable."""
        try:
            for parcel in self._outbox.left():
                with suppress(OSError):  # A full disk gets room when it is delivered.
                    parcel.settle()
                self._store.jobs.renew(parcel.token, parcel.job, phase=Phase.UPLOADING, kept=True)
        except OSError as error:
            log.error("cannot look into the outbox", error=str(error))
        self._wake.set()

    def _run(self) -> None:
        from farm.artifacts.s3 import S3Store

        artifacts = S3Store.from_settings(self._settings)
        while True:
            try:
                resting = self._look(artifacts)
            except Exception:  # The next look may succeed, and nothing else looks.
                log.exception("cannot look after the outbox")
                resting = ""
            if resting != self.resting:
                self.resting = resting
                self._nudge()
            self._wake.wait(random.uniform(*AWAY_PAUSES) if resting else LOOK_SECONDS)  # noqa: S311 - keeps no secret
            self._wake.clear()

    def _look(self, artifacts: S3Store) -> str:
        """Deliver the abandoned parcels; return why no jobs can be taken, or an empty text."""
        try:
            if self._suspected or self.resting:
                self._suspected = False
                artifacts.with_patience(0).reach()
            for parcel in self._outbox.left():
                try:
                    self._deliver(parcel, artifacts)
                except StorageAway as error:
                    # A server that lives, and has lost a part of its disk, refuses some names for ever.
                    artifacts.with_patience(0).check()
                    log.error("a finished program waits, others go first", job=parcel.job, error=error.message)
                    since = self._refused.setdefault(parcel.token, time.monotonic())
                    if time.monotonic() - since >= self._settings.outbox_hours * 3600:
                        self._give_up(parcel, error)
        except StorageAway as error:
            self._refused.clear()
            return f"{AWAY}: {error.message}"
        except StorageUnavailable as error:
            return f"its object storage refuses: {error.message}"
        except StoreUnavailable as error:
            log.info("what is left in the outbox waits for the store", error=error.message)
        most = self._settings.outbox_bytes
        if (size := self._outbox.size) > most:
            return f"its outbox is full: {size / 1e9:.2f} GB of finished programs wait, {most / 1e9:g} GB may"
        return ""

    def _deliver(self, parcel: Parcel, artifacts: S3Store) -> None:
        """Publish a program whose attempt has ended, and end the attempt. No other worker compiles it in this time."""
        with suppress(OSError):
            parcel.settle()
        self._store.jobs.renew(parcel.token, parcel.job, phase=Phase.UPLOADING, kept=True)
        try:
            # Whatever the answer was: the program of a cancelled job, or of one that has another attempt by now, is
            # good, too, and the next build that wants it need not compile it.
            outcome = parcel.publish_left(artifacts)
        except StorageAway:
            raise
        except (FarmError, OSError, ValueError) as error:
            self._give_up(parcel, error)
        else:
            self._end(parcel, outcome)

    def _give_up(self, parcel: Parcel, error: Exception) -> None:
        log.error("a finished program cannot be published", job=parcel.job, error=str(error))
        self._end(parcel, Outcome.failure(FailureKind.STORAGE, f"the finished program cannot be published: {error}"))

    def _end(self, parcel: Parcel, outcome: Outcome) -> None:
        self._refused.pop(parcel.token, None)
        answer = self._store.jobs.finish(parcel.job, parcel.token, outcome)
        log.info("finished program delivered", job=parcel.job, end=outcome.end.value, answer=answer)
        parcel.drop()

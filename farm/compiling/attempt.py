"""Attempt: one try of a job, as the executor gets it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import farm
from farm.compiling.alone import Clock
from farm.compiling.slots import ANYWHERE, FreeSlots, Slot
from farm.jobs.order import WorkOrder
from farm.jobs.rows import FailureDocument, ReproductionDocument
from farm.jobs.state import AttemptLimits
from farm.spec import FileReference

TAIL_BYTES = 64 * 1024
"""How much of a running attempt's log can be read while it runs."""


class LogTail:
    """The end of a log that is still being written. The executor names the file, the lease's renewals read it."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._size = 0

    def follow(self, path: Path) -> None:
        """Read from this file from now on."""
        self._path, self._size = path, 0

    def news(self) -> bytes | None:
        """Return the last 64 KiB if the file has grown since the last call, else None."""
        try:
            if self._path is None or (size := self._path.stat().st_size) == self._size:
                return None
            with self._path.open("rb") as file:
                file.seek(max(0, size - TAIL_BYTES))
                tail = file.read(TAIL_BYTES)
        except FileNotFoundError:  # The attempt ended and took its folder along.
            return None
        self._size = size
        return tail


@dataclass(frozen=True, slots=True)
class Attempt:
    """What one attempt needs: the work order, its limits, and where its artifact goes.

    `build` is the first build that asked for the job. `previous` has the failure kinds of the job's earlier attempts
    ("" if one did not fail). Its children run in `slot`; it may borrow slots that are `free`.
    """

    job_id: str
    number: int
    token: str
    order: WorkOrder
    limits: AttemptLimits
    namespace: str
    key: str
    build: str = ""
    worker: str = ""
    previous: tuple[str, ...] = ()
    claimed: bool = False
    """Whether it came through Redis: then its order has to be one that the control plane has planned."""
    slot: Slot = ANYWHERE
    free: FreeSlots = field(default_factory=FreeSlots, compare=False)
    on_away: Callable[[bool], None] = field(default=lambda kept: None, compare=False)
    """To be called, from any thread, whenever object storage is found away; says whether the finished program is kept
    on the node's disk, so that it outlives this attempt."""
    leave: Callable[[], None] = field(default=lambda: None, compare=False)
    """To be called when it needs its slot no more: another attempt takes it while this one publishes."""
    tail: LogTail = field(default_factory=LogTail, compare=False)
    clock: Clock = field(default_factory=Clock, compare=False)
    """Stands still while the attempt is paused."""

    def describe(
        self, *, reference: FileReference | None, ended: FailureDocument | None = None
    ) -> ReproductionDocument:
        """Return everything that decides an attempt, as JSON. `farm reproduce` writes a folder from it.

        `reference` is the file reference of the reference outputs, if they were made before; `ended` is how the attempt
        ended.
        """
        return {
            "schema": 1,
            "farm": farm.__version__,
            "job": self.job_id,
            "attempt": self.number,
            "namespace": self.namespace,
            "build": self.build,
            "worker": self.worker,
            "key": self.key,
            "limits": self.limits,
            "previous": list(self.previous),
            "ended": ended,
            "reference": reference,
            "order": self.order,
        }

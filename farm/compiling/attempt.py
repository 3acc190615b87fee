"""Attempt: one try of a job, as the executor gets it, with the slot and the installation that it runs in.

A slot is the right to run one attempt on a node, on one GPU or on a few CPU cores. An installation has a compiler in an
interpreter of its own, so that one node has several versions of one side by side.
"""

from __future__ import annotations

import fcntl
import math
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, cast

import farm
from farm.compiling.alone import Clock, lock_folder, open_lock
from farm.jobs.rows import FailureDocument, ReproductionDocument
from farm.jobs.state import AttemptLimits, WorkOrder
from farm.spec import FileReference
from farm.targets.compilers import Maker
from farm.wire.program import GpuFields

LOOK_SECONDS = 0.5  # Seconds between two looks for a free slot; a process of another worker may hold a GPU.
UPLOAD_SECONDS = 60.0
"""Seconds that an attempt waits for its slot's last upload before it measures; after them it measures, and says so."""

# Messages between a supervisor and its Celery process, of one byte.
CONSUME = b"g"  # Take jobs.
PAUSE = b"p"  # Take no jobs for now; attempts continue.
CONSUMING = b"c"  # Jobs are being taken.
RELEASE = b"r"  # Give the attempts back.
AWAY = b"a"  # Object storage is away.
MISMATCH = b"m"  # An attempt found the wrong toolchain.
FAULT = b"f"  # A GPU failed under an attempt; no job is taken until `CONSUME` comes again.


@dataclass(frozen=True, slots=True)
class Slot:
    """The right to run one attempt: the GPU that its children see, by its maker's variable (empty: none).

    `lock` names the GPU among all workers of the node. `cpus` are the CPUs that children are bound to; none: all.
    `bdf` is the GPU's PCI address, by which the kernel names it; NVML uses `gpu`.
    """

    gpu: str = ""
    lock: str = ""
    cpus: tuple[int, ...] = ()
    bdf: str = ""
    maker: Maker = "amd"
    device: GpuFields = field(default_factory=GpuFields, compare=False)  # Further fields of the GPU for sidecars.

    def is_apart_from(self, other: Slot) -> bool:
        """Whether what runs here is timed as if nothing ran in the other slot: on a GPU, or on CPUs of its own."""
        return bool(self.gpu) or bool(self.cpus and other.cpus and not {*self.cpus} & {*other.cpus})


ANYWHERE = Slot()


def slots_of(rows: Iterable[Mapping[str, Any]]) -> list[Slot]:
    """Return the slots with these fields, which a supervisor has written as JSON for its worker process."""
    return [Slot(**{**row, "cpus": tuple(row["cpus"])}) for row in rows]


class FreeSlots:
    """The slots of one worker process. A lock file for each GPU keeps workers of the whole node apart.

    An attempt that holds a slot may borrow others for one piece of work at a time, unless another attempt waits.
    """

    def __init__(
        self,
        slots: Sequence[Slot] = (),
        folder: str = "",
        around: Callable[[Slot], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> None:
        """The lock files are in `folder`; empty: in the system's temporary one.

        `around` makes a block that a slot is held in: when it ends, the slot is fit for others.
        """
        self._around = around
        self._slots = tuple(slots)
        self._free = list(slots)
        self._held: list[Slot] = []
        self._waiting = 0
        self._left = Counter[int]()
        """How many attempts have left a slot, by its id, and still publish. Two slots may be equal."""
        self._lent: dict[Slot, float] = {}
        """When a slot was last given back by its borrower."""
        self._folder = lock_folder(folder)
        self._change = threading.Condition()

    @contextmanager
    def one(self, cancelled: threading.Event) -> Iterator[Slot | None]:
        """Hold a slot while the block runs, and wait for a free one; yield None if `cancelled` is set in this time."""
        with self._change:
            self._waiting += 1
        try:
            taken = self._take(lambda: self._free, cancelled)
        finally:
            with self._change:
                self._waiting -= 1
        try:
            with self._around(taken[0]) if taken else nullcontext():
                yield taken[0] if taken else None
        finally:
            if taken:
                self._give_back(*taken)

    @contextmanager
    def left(self, slot: Slot) -> Iterator[None]:
        """Count an attempt that has left its slot and still publishes, while the block runs."""
        with self._change:
            self._left[id(slot)] += 1
        try:
            yield
        finally:
            with self._change:
                self._left[id(slot)] -= 1
                self._change.notify_all()

    def has_room(self, attempts: int) -> bool:
        """Whether another attempt finds a slot next to so many of this process."""
        return attempts < len(self._slots) + self._left.total()

    def until_quiet(self, slot: Slot, cancelled: threading.Event) -> bool:
        """Wait for attempts that have left this slot: their uploads disturb a measurement. Return whether they ended.

        Waits for `UPLOAD_SECONDS` at most, since storage may hold up an upload, and not for those of other slots.
        """
        until = time.monotonic() + UPLOAD_SECONDS
        with self._change:
            while self._left[id(slot)] and not cancelled.is_set() and time.monotonic() < until:
                self._change.wait(LOOK_SECONDS)
            return not self._left[id(slot)]

    def others(self, slot: Slot) -> list[Slot]:
        """Return the slots that an attempt in this slot may borrow: work in them does not disturb its timing."""
        return [other for other in self._slots if other != slot and other.is_apart_from(slot)]

    @contextmanager
    def borrow(self, slot: Slot, ended: threading.Event) -> Iterator[bool]:
        """Hold this slot while the block runs, once nobody else wants it; yield False if `ended` is set before.

        Give it back soon: a new attempt has to wait for it.
        """
        taken = self._take(lambda: [slot] if self._is_spare(slot) else [], ended)
        try:
            with self._around(slot) if taken else nullcontext():
                yield taken is not None
        finally:
            if taken:
                with self._change:
                    self._lent[slot] = time.monotonic()
                self._give_back(*taken)

    def _is_spare(self, slot: Slot) -> bool:
        # Other processes look for a free GPU at intervals: leave it free long enough for them to find it.
        rests = bool(slot.lock) and time.monotonic() - self._lent.get(slot, -math.inf) < 2 * LOOK_SECONDS
        return (
            not self._waiting
            and not rests
            and slot in self._free
            and all(slot.is_apart_from(other) for other in self._held)
        )

    def _take(
        self, candidates: Callable[[], Sequence[Slot]], cancelled: threading.Event
    ) -> tuple[Slot, int | None] | None:
        with self._change:
            while not cancelled.is_set():
                for slot in candidates():
                    held, lock = _locked(slot, self._folder)
                    if held:
                        self._free.remove(slot)
                        self._held.append(slot)
                        return slot, lock
                self._change.wait(LOOK_SECONDS)
        return None

    def _give_back(self, slot: Slot, lock: int | None) -> None:
        with self._change:
            if lock is not None:
                os.close(lock)
            self._held.remove(slot)
            self._free.append(slot)
            self._change.notify_all()


def _locked(slot: Slot, folder: Path) -> tuple[bool, int | None]:
    """Lock the lock file of a GPU; closing it releases the lock. A slot without a GPU needs none."""
    if not slot.lock:
        return True, None
    lock = open_lock(folder / f"farm-{slot.lock}.lock")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return False, None
    return True, lock


@contextmanager
def unless_held(slot: Slot, folder: str) -> Iterator[bool]:
    """Hold the GPU of a slot while the block runs, for a short look; yield False if somebody holds it already."""
    held, lock = _locked(slot, lock_folder(folder))
    try:
        yield held
    finally:
        if lock is not None:
            os.close(lock)


_ENTRY = re.compile(r"(?:(?P<toolchain>[a-z][a-z0-9._-]{0,99})=)?(?P<python>[^:]+)(?::(?P<folder>.+))?")


class Installation(NamedTuple):
    """The interpreter that imports a compiler (empty: this one), and the folder of MIGraphX's module if it is named."""

    python: str
    folder: str = ""


def installation_of(text: str) -> tuple[str, Installation]:
    """Read an item of the setting `other_toolchains`: `PYTHON` or `PYTHON:FOLDER`.

    Once a worker has looked at it, it begins with `TOOLCHAIN=`, which is returned; else that is empty. Raises
    ValueError if it names no interpreter.
    """
    if not (found := _ENTRY.fullmatch(text)):
        raise ValueError(f"`{text}` names no interpreter")
    return found["toolchain"] or "", Installation(found["python"], found["folder"] or "")


def by_toolchain(entries: Iterable[str]) -> dict[str, Installation]:
    """Return the installations that a worker has looked at, by the ids of their toolchains."""
    return {toolchain: found for toolchain, found in map(installation_of, entries) if toolchain}


def is_same_build(toolchain: str, other: str) -> bool:
    """Whether two ids name the same libraries: labels may have the version of an installation around them."""
    return toolchain.rpartition("-")[2] == other.rpartition("-")[2]


TAIL_BYTES = 64 * 1024  # How much of a running attempt's log can be read while it runs.


class LogTail:
    """The end of a log that is still being written. The executor names the file, the lease's renewals read it."""

    _path: Path | None = None
    _size = 0

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
    clock: Clock = field(default_factory=Clock, compare=False)  # Stands still while the attempt is paused.

    def describe(
        self, *, reference: FileReference | None, ended: FailureDocument | None = None
    ) -> ReproductionDocument:
        """Return everything that decides an attempt, as JSON. `farm reproduce` writes a folder from it."""
        known = {each.name: getattr(self, each.name) for each in fields(self)}
        known |= {"schema": 1, "farm": farm.__version__, "job": self.job_id, "attempt": self.number}
        known |= {"ended": ended, "reference": reference}
        return cast("ReproductionDocument", {name: known[name] for name in ReproductionDocument.__annotations__})

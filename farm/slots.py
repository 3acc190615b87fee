"""Slots: the right to run one attempt on a node, on one GPU or on a few CPU cores, taken by one attempt at a time."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from farm.pools import Pool

LOOK_SECONDS = 0.5
"""Between two looks for a free slot; a GPU's holder may be a process of another worker."""

CONSUME, CONSUMING, RELEASE = b"g", b"c", b"r"
"""The words between a worker and its Celery process: take messages; they are taken; give the attempts back."""


@dataclass(frozen=True, slots=True)
class Slot:
    """The right to run one attempt: what its children are pinned to (ROCR_VISIBLE_DEVICES; empty shows them no GPU).

    `lock` names the GPU among all workers of the node. `cpus` are the CPUs that children are bound to; none: all.
    `bdf` is the GPU's PCI address, under which the kernel tells of it.
    """

    gpu: str = ""
    lock: str = ""
    cpus: tuple[int, ...] = ()
    bdf: str = ""


ANYWHERE = Slot()


@dataclass(frozen=True, slots=True)
class Kind:
    """The slots of one kind on a node (each GPU model, CPU), and the pools that any of them serves.

    `threads` is what the compiler of one attempt uses.
    """

    name: str
    pools: tuple[Pool, ...]
    slots: tuple[Slot, ...]
    threads: int = 1

    def as_dict(self) -> dict[str, Any]:
        """Return the kind as plain JSON."""
        return {**asdict(self), "pools": [pool.as_dict() for pool in self.pools]}


def as_text(slots: Sequence[Slot]) -> str:
    """Return slots as JSON, for a worker process's command line."""
    return json.dumps([asdict(slot) for slot in slots])


def from_text(text: str) -> list[Slot]:
    """Read back what `as_text` wrote."""
    return [Slot(**{**row, "cpus": tuple(row["cpus"])}) for row in json.loads(text)]


class FreeSlots:
    """The slots of one worker process. A lock file for each GPU keeps workers of the whole node apart."""

    def __init__(self, slots: Sequence[Slot], folder: Path | None = None) -> None:
        """The lock files are in `folder`, else in the temporary one."""
        self._free = list(slots)
        self._folder = folder or Path(tempfile.gettempdir())
        self._change = threading.Condition()

    @contextmanager
    def one(self, cancelled: threading.Event) -> Iterator[Slot | None]:
        """Hold a slot while the block runs, waiting for a free one; None where `cancelled` is set meanwhile."""
        taken = self._take(cancelled)
        try:
            yield taken[0] if taken else None
        finally:
            if taken:
                self._give_back(*taken)

    def _take(self, cancelled: threading.Event) -> tuple[Slot, int | None] | None:
        with self._change:
            while not cancelled.is_set():
                for slot in self._free:
                    held, lock = self._locked(slot)
                    if held:
                        self._free.remove(slot)
                        return slot, lock
                self._change.wait(LOOK_SECONDS)
        return None

    def _locked(self, slot: Slot) -> tuple[bool, int | None]:
        """Take a GPU's lock file, which is let go when it is closed; a slot without a GPU needs none."""
        if not slot.lock:
            return True, None
        path = self._folder / f"farm-{slot.lock}.lock"
        # Another user's file in a shared folder may be opened, but not in a way that could create it.
        lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (0 if path.exists() else os.O_CREAT), 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return False, None
        return True, lock

    def _give_back(self, slot: Slot, lock: int | None) -> None:
        with self._change:
            if lock is not None:
                os.close(lock)
            self._free.append(slot)
            self._change.notify()

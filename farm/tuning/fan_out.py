"""Fan-out: runs the pieces of one attempt's work in its own slot and in spare slots at the same time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import Generic, TypeVar

from farm.compiling.slots import FreeSlots, Slot
from farm.logging import get_logger

log = get_logger(__name__)

Piece = TypeVar("Piece")


class FanOut(Generic[Piece]):
    """Gives each piece to one slot: to the attempt's own, or to one that it borrows for this piece alone.

    So an attempt that waits for a slot waits for one piece at most.
    """

    def __init__(
        self, free: FreeSlots, own: Slot, work: Callable[[Slot, Piece], None], cancelled: threading.Event
    ) -> None:
        """`work` does a piece in a slot; it is called by several threads, one for each slot.

        Once `cancelled` is set, that it raises says nothing of the slot.
        """
        self._free, self._own, self._work, self._cancelled = free, own, work, cancelled
        self._change = threading.Condition()
        self._waiting: deque[Piece] = deque()
        self._returned: list[Piece] = []
        """Pieces that failed in a borrowed slot."""
        self._borrowed = 0
        """Borrowed slots that work at the moment."""

    @property
    def slots(self) -> int:
        """How many slots are at work."""
        return 1 + self._borrowed

    def run(self, pieces: Sequence[Piece]) -> None:
        """Do all pieces, the own slot's by the calling thread.

        A piece that fails in a borrowed slot is done again in the own one, and the slot is borrowed no more. Raises
        what `work` raises in the own slot, once the pieces that others have in hand are done.
        """
        self._waiting.extend(pieces)
        ended = threading.Event()
        try:
            for slot in self._free.others(self._own) if len(pieces) > 1 else ():
                run = copy_context().run  # The log's lines name the attempt in these threads too.
                threading.Thread(target=run, args=(self._help, slot, ended), name="fan-out", daemon=True).start()
            while piece := self._next():
                self._work(self._own, piece[0])
        finally:
            ended.set()
            with self._change:
                self._waiting.clear()
                self._change.wait_for(lambda: not self._borrowed)

    def _next(self) -> tuple[Piece] | None:
        """Return a piece for the own slot; None when none is left."""
        with self._change:
            self._change.wait_for(lambda: self._waiting or self._returned or not self._borrowed)
            if self._waiting:
                return (self._waiting.popleft(),)
            return (self._returned.pop(),) if self._returned else None

    def _help(self, slot: Slot, ended: threading.Event) -> None:
        """Do pieces in a slot whenever nobody else wants it."""
        works = True
        while works:
            with self._free.borrow(slot, ended) as borrowed:
                works = borrowed and self._help_once(slot)

    def _help_once(self, slot: Slot) -> bool:
        """Do one piece; return whether there was one and it was done."""
        with self._change:
            if not self._waiting:
                return False
            piece = self._waiting.popleft()
            self._borrowed += 1
        failed = [piece]
        try:
            self._work(slot, piece)
            failed.clear()
        except Exception as error:
            if not self._cancelled.is_set():
                log.warning("a borrowed slot failed", slot=slot.gpu or slot.cpus, reason=repr(error))
        finally:
            with self._change:
                self._returned += failed
                self._borrowed -= 1
                self._change.notify_all()
        return not failed

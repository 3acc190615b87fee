"""Conversation: what a child and its guard say, over one pipe each, checked line by line.

A child that a hostile model controls can say anything; it does not hold the guard's pipe.
"""

from __future__ import annotations

import json
import math
import os
import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from farm.compiling.alone import HostChild
from farm.jobs.state import Phase
from farm.runner.documents import ChildError, GuardEnd, PhaseMessage
from farm.runner.protocol import is_deep

OnMessage = Callable[[PhaseMessage], None]
"""Hears what the child is doing, in the thread that called `run_child`."""

LONGEST_MESSAGE = 1 << 20
"""Bytes of one message: what is in an answer goes on to the store, which holds all of it in memory."""
_DEEPEST_MESSAGE = 32
"""Levels of lists and objects in a message; answers have six or so."""
_PHASES = frozenset(Phase)
_LONGEST_DETAIL = 4000
"""Characters with which a child says how far it is; the store keeps the last of them."""
_MOST_PHASES = 1000
"""Phase changes that a child may report: each is an event of its build."""
_MOST_MESSAGES = 200_000
"""Messages of one child: each takes time of the worker, which other attempts share."""


@dataclass
class PhaseClock:
    """How long each phase of a child took, in seconds, in the order in which they began."""

    seconds: dict[str, float] = field(default_factory=dict)
    current: str = ""
    changes: int = 0
    clock: Callable[[], float] = time.monotonic
    _since: float = 0.0

    def enter(self, phase: str) -> None:
        """End the current phase and begin another; an empty one ends the child."""
        now = self.clock()
        if self.current:
            self.seconds[self.current] = self.seconds.get(self.current, 0.0) + now - self._since
        self.changes += phase != self.current
        self.current, self._since = phase, now

    @property
    def last(self) -> str:
        """The phase that ended last for the first time; empty if none has ended."""
        return next(reversed(self.seconds), "")


class Conversation:
    """Reads what a child and its guard say. Has to be closed."""

    def __init__(self, place: HostChild, on_message: OnMessage | None) -> None:
        """`place` is the child's among those of its host."""
        self.place = place
        self.moved = place.clock()
        """When it last said how far it is, in seconds of its life."""
        self.cpu = 0.0
        """Seconds of CPU time that it has used."""
        self.memory = 0
        """The most bytes that all its processes have held together."""
        self.answers: list[dict[str, Any]] = []
        """What the child has answered; nothing of it is checked."""
        self.error: ChildError | None = None
        self.ended: GuardEnd | None = None
        self.is_nonsense = False
        """Whether the child said something that is not a message."""
        self.phases = PhaseClock(clock=place.clock)
        self._on_message = on_message
        self._last = PhaseMessage(phase=Phase.MEASURING, progress=None, detail="")
        """What the child has reported last; one that only measures does not report before."""
        self._standstill = ""
        self._answered = math.inf
        self._heard = 0
        """Messages of the child so far."""
        messages, message_end = os.pipe()
        self._words, word_end = os.pipe()
        self.ends = message_end, word_end
        """The writing ends, for the child and for its guard. The process that starts the child closes them."""
        self._buffers = {messages: bytearray(), self._words: bytearray()}
        self._selector = selectors.DefaultSelector()
        for pipe in self._buffers:
            self._selector.register(pipe, selectors.EVENT_READ)

    @property
    def is_over(self) -> bool:
        """Whether the guard has closed its pipe."""
        return self._words not in self._selector.get_map()

    @property
    def silence(self) -> float:
        """Seconds since the child has answered; below 0 if it has not."""
        return time.monotonic() - self._answered

    def close(self) -> None:
        """Close the reading ends."""
        self._selector.close()
        for pipe in self._buffers:
            os.close(pipe)

    def mute(self) -> None:
        """Report no more progress."""
        self._on_message = None

    def look(self) -> None:
        """Let the child measure if its turn has come; report why it stands still, or then what it said last."""
        self.place.look()
        if (standstill := self.place.standstill) != self._standstill:
            self._standstill = standstill
            self._report({**self._last, "detail": standstill or self._last["detail"]})

    def _report(self, message: PhaseMessage) -> None:
        if self._on_message:
            self._on_message(message)

    def read(self, timeout: float) -> None:
        """Read what has come, or comes within `timeout` seconds."""
        for key, _ in self._selector.select(timeout):
            data = os.read(key.fd, 1 << 16)
            if not data:
                self._selector.unregister(key.fd)
            buffer = self._buffers[key.fd]
            buffer += data
            if b"\n" not in data:
                self.is_nonsense |= len(buffer) > LONGEST_MESSAGE
                continue
            *lines, rest = buffer.split(b"\n")
            buffer[:] = rest
            for line in lines:
                self._hear(line, from_guard=key.fd == self._words)

    def _hear(self, line: bytearray, *, from_guard: bool) -> None:
        try:
            message = json.loads(line) if len(line) <= LONGEST_MESSAGE else None
        except (ValueError, RecursionError):
            message = None
        if message is None or (not from_guard and is_deep(message, _DEEPEST_MESSAGE)):
            self.is_nonsense = True
        elif from_guard:
            self._hear_guard(message)
        else:
            self._hear_child(message)

    def _hear_guard(self, message: Any) -> None:
        match message:
            case {"usage": {"cpu": float() | int() as cpu, "memory": int() as memory}}:
                self.cpu, self.memory = cpu, max(self.memory, memory)
            case {"paused": True}:
                self.place.stands_still()
            case {"ended": dict(ended)}:
                self.ended = GuardEnd(
                    exit=ended["exit"],
                    signal=ended["signal"],
                    killed=ended["killed"],
                    memory=ended["memory"],
                    stuck=ended["stuck"],
                )

    def _hear_child(self, message: Any) -> None:
        self._heard += 1
        self.is_nonsense |= self._heard > _MOST_MESSAGES
        match message:
            case {"result": dict(result)}:
                self._answered = time.monotonic()
                self.answers.append(result)
            case {"error": {"kind": str(kind), "message": str(text), "detail": str(detail)}}:
                self.error = ChildError(kind=kind, message=_whole(text), detail=_whole(detail))
                self._answered = time.monotonic()
            case {"alone": bool(alone)}:
                self.place.wish(alone=alone)
            case {"phase": str(phase), "progress": None | float() | int() as done, "detail": str(detail)} if (
                phase in _PHASES and (done is None or 0 <= done <= 1) and len(detail) <= _LONGEST_DETAIL
            ):
                self.moved = self.place.clock()
                self.phases.enter(phase)
                self.is_nonsense |= self.phases.changes > _MOST_PHASES
                self._last = PhaseMessage(phase=phase, progress=done, detail=_whole(detail))
                self._report(self._last)
            case _:
                self.is_nonsense = True


def _whole(text: str) -> str:
    """Return a text with `?` for halves of characters, which stand for the bytes of a name and which no file takes."""
    return text.encode(errors="replace").decode()

"""Watching a build: the cells that its events name, as they are now, for one reader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from time import monotonic

from farm.builds.reading import BuildReader
from farm.jobs.rows import BuildEvent
from farm.jobs.state import State
from farm.results.report import BuildChange, JudgedCell
from farm.store.link import lots

AT_ONCE = 50
"""Most cells of one change, and most events that one change covers: a reader that is cut off repeats no more."""

OUTLOOK_EVERY = 10.0
"""Seconds between two estimates of a build's end, which look at all of its cells."""


class BuildChanges:
    """The changes of one build for one reader, who knows everything up to `position`.

    An empty position stands for a reader who knows nothing. Such a reader, and one whose position the store does not
    know, first gets a change of type `reset`: he reads the whole report, and then follows the changes.
    """

    def __init__(self, reader: BuildReader, namespace: str, build_id: str, position: str | None) -> None:
        self._reader = reader
        self._namespace = namespace
        self._build_id = build_id
        self._position = position or "none"
        self._running: dict[str, tuple[object, ...]] = {}
        """How far each running cell was when it was last sent."""
        self._looked = False
        self._estimated = monotonic()

    def after(self, seconds: float) -> Iterator[BuildChange]:
        """Yield the next changes; wait up to `seconds` for the first event."""
        if not self._looked:
            self._look()
        found = self._reader.events(self._namespace, self._build_id, self._position, seconds)
        for lot in lots(found["items"], AT_ONCE):
            last = lot[-1]
            if last["type"] == "reset":
                self._look()
                yield {"type": "reset", "id": last["id"]}
            else:
                yield from self._changed(lot)
                if last["type"] == "build" and last.get("state") == "reported":
                    yield {"type": "build", "id": last["id"], "state": "reported"}
            self._position = last["id"]
        yield from self._progress()

    def _look(self) -> None:
        """Find the running cells of a reader who may know them already."""
        self._running = dict.fromkeys(self._reader.running(self._namespace, self._build_id), ())
        self._looked = True

    def _changed(self, events: Sequence[BuildEvent]) -> Iterator[BuildChange]:
        """Yield the cells that these events name; the last change has the last event's id."""
        names = dict.fromkeys(name for event in events for name in self._names(event))
        parts = list(lots(names, AT_ONCE))
        for number, lot in enumerate(parts, 1):
            change: BuildChange = {"type": "cells", "cells": self._cells(lot)}
            if number == len(parts):
                change["id"] = events[-1]["id"]
                if monotonic() - self._estimated >= OUTLOOK_EVERY:
                    self._estimated = monotonic()
                    if estimate := self._reader.current_outlook(self._namespace, self._build_id):
                        change["outlook"] = estimate
            yield change

    def _names(self, event: BuildEvent) -> Iterable[str]:
        if "identifier" in event:
            return (event["identifier"],)
        if event["type"] == "accepted":
            return self._reader.accepted(self._namespace, self._build_id, event["accepted"], event["cells"])
        return ()

    def _progress(self) -> Iterator[BuildChange]:
        """Yield the running cells that came further: a phase has an event, but not what happens within it."""
        before = dict(self._running)
        cells = [cell for cell in self._cells(list(before)) if _progress_of(cell) != before[cell["identifier"]]]
        for lot in lots(cells, AT_ONCE):
            yield {"type": "cells", "cells": lot}

    def _cells(self, names: Sequence[str]) -> list[JudgedCell]:
        cells = self._reader.some_cells(self._namespace, self._build_id, names)
        for cell in cells:
            if cell["state"] == State.RUNNING:
                self._running[cell["identifier"]] = _progress_of(cell)
            else:
                self._running.pop(cell["identifier"], None)
        return cells


def _progress_of(cell: JudgedCell) -> tuple[object, ...]:
    return cell["attempt"], cell["phase"], cell["progress"], cell["detail"]

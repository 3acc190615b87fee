"""Reading builds for pages, once for all readers: as they were a moment ago, and the news of those that are open."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import NamedTuple

import anyio

from farm.app import Farm
from farm.builds.reading import is_aside
from farm.errors import FarmError
from farm.inert import one_line
from farm.jobs.rows import BuildEvent
from farm.pages.build_view import Across, ComparedBuilds, ShownBuild, across, compare, said
from farm.pages.quantities import duration
from farm.results.report import BuildView
from farm.results.verdict import CellLine
from farm.units import by_number

KEPT_CELLS = 400_000  # Cells of the builds that are kept in memory, a few hundred bytes each.
STALE = 2.0  # An open build that changes all the time is read at most once in so many times what reading it takes.

UNCHANGED = 1.0
"""Seconds for which a build without new events counts as unchanged; why it waits may change without one."""

PATIENCE = 1.2  # Seconds that a page waits for a build that was never read.
PARTIAL = 20  # Builds among which a whole one is looked for, to compare the next with.
IMPATIENCE = 0.3  # Seconds that a page waits for a build, if it has an older state, before it shows that.

WHOLE = 10.0
"""An open build is read whole once in so many times what that takes; between, only the cells that changed are read."""

FEW = 2000  # Changed cells from which on a build is read whole.
SMALL = 1000  # A build with fewer cells is always read whole: that also says newly why its cells wait.
ACROSS = 2  # Builds next to each other that are kept: twelve of 100,000 cells take 100 MB.
READERS = 4  # Builds that are read at once.


class StillReading(FarmError, http_status=503):
    """A build of so many cells that it is not in memory yet."""

    def __init__(self, namespace: str, build_id: str) -> None:
        super().__init__(f"build {build_id} is being read", hint="reload the page in a few seconds")
        self.key = (namespace, build_id)


@dataclass(frozen=True, slots=True)
class _Kept:
    view: ShownBuild
    read_at: float
    cost: float
    whole_at: float
    whole_cost: float


class BuildPages:
    """Builds as pages show them, of one farm. Thread-safe."""

    def __init__(self, farm: Farm) -> None:
        self._farm = farm
        self._kept: OrderedDict[tuple[str, str], _Kept] = OrderedDict()
        self._lock = threading.Lock()
        self._under_way: dict[tuple[str, str], tuple[Future[ShownBuild], Future[ShownBuild]]] = {}
        """What is being read: what can be shown first (of a large open build its cells before they are judged), all."""
        self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="pages")
        self._side_by_side: dict[tuple[str, ...], Across] = {}
        self._compared = lru_cache(maxsize=8)(compare)

    def view(self, namespace: str, reference: str, patience: float = PATIENCE) -> ShownBuild:
        """Return a build with its cells, as it was a short time ago. Raises NotFound, StillReading.

        `patience` are the seconds to wait for a build that was never read.
        """
        key = (namespace, self._farm.build_reader.resolve(namespace, reference))
        kept = self._find(key)
        if kept and self._is_current(key, kept):
            return kept.view
        # All who ask for a build that is being read wait for the same reading.
        first, whole = self._begin(key)
        done, _ = wait([whole] if kept else [first, whole], IMPATIENCE if kept else patience, FIRST_COMPLETED)
        if done:
            return (whole if whole in done else first).result()
        if kept:
            return kept.view
        raise StillReading(*key)

    def newest(self, namespace: str, build_id: str) -> ShownBuild:
        """Return a build after all of its events so far, however long it takes. Raises NotFound."""
        key = (namespace, build_id)
        position = self.position(*key)
        while True:
            view = self._begin(key)[1].result()
            if not view.is_open or not _is_before(view.position, position):
                return view

    def cost(self, namespace: str, build_id: str) -> float:
        """Return the seconds that reading a build took last."""
        kept = self._find((namespace, build_id))
        return kept.cost if kept else 0.0

    def position(self, namespace: str, build_id: str) -> str:
        """Return the id of a build's last event."""
        # An unknown id is answered with the place to go on from.
        return str(self._farm.build_reader.events(namespace, build_id, "newest", 0)["items"][-1]["id"])

    def earlier(self, namespace: str, after: ShownBuild) -> list[BuildView]:
        """Return the builds of the same name before that ended, newest first."""
        build = after.build
        if is_aside(build):
            return []
        listed = self._farm.build_reader.list(namespace, 1000)
        before = [row for row in listed if row["name"] == build["name"] and row["created_at"] < build["created_at"]]
        return [row for row in before if row["state"] == "reported" and not is_aside(row)]

    def changes(self, namespace: str, after: ShownBuild) -> ComparedBuilds | None:
        """Return how a build differs from the one of its name before it that ended; None if that is not known.

        One of chosen cells alone says nothing of the others: the one before is the newest whole one, if there is any.
        """
        before = self.earlier(namespace, after) if after.judged else []
        with suppress(FarmError):  # Its report may be gone, or take long to read.
            if before:
                build = next((row for row in before[:PARTIAL] if self._is_whole(row)), before[0])
                return self.compared(self.view(namespace, build["id"], IMPATIENCE), after)
        return None

    def _is_whole(self, build: BuildView) -> bool:
        try:
            plan = self._farm.build_reader.read_plan(build["namespace"], build["id"])
        except FarmError:  # An old one may be gone.
            return not build["retries"]
        return not (build["retries"] or plan["build"].get("only"))

    def compared(self, before: ShownBuild, after: ShownBuild) -> ComparedBuilds:
        """Return how two builds differ."""
        if before.is_open or after.is_open:
            return compare(before, after)
        return self._compared(before, after)

    def across(self, namespace: str, references: Sequence[str]) -> Across:
        """Return builds next to each other, the oldest first. Raises NotFound, StillReading."""
        ids = [self._farm.build_reader.resolve(namespace, each) for each in references]
        if found := self._side_by_side.get(key := (namespace, *sorted(ids))):
            return found
        builds = [self._farm.build_reader.ends(namespace, each) for each in ids]
        found = across(sorted(builds, key=lambda each: each[0]["created_at"]))
        if all(build["state"] == "reported" for build, _ in builds):
            with self._lock:
                self._side_by_side[key] = found
                while len(self._side_by_side) > ACROSS:
                    self._side_by_side.pop(next(iter(self._side_by_side)))
        return found

    def message(self, namespace: str, build_id: str, position: str) -> Message | None:
        """Return what changed in a build after a position, waiting a moment for it; None if nothing did.

        Raises FarmError.
        """
        key = (namespace, build_id)
        if position == READING:
            self.newest(*key)
            return Message("", "event: reset\ndata: {}\n\n", last=True)
        events = list(self._events(key, position, READ_WAIT))
        after = str(events[-1]["id"]) if events else position
        ended = any(event["type"] == "build" and event.get("state") == "reported" for event in events)
        if not events:  # They may be gone while its report is there.
            ended = self._farm.build_reader.get(*key)["state"] == "reported"
        if ended or any(event["type"] == "reset" for event in events):
            return Message(after, f"event: {'end' if ended else 'reset'}\nid: {after}\ndata: {{}}\n\n", last=True)
        if not events:
            return None
        data = news(self.newest(*key), {event["identifier"] for event in events if "identifier" in event})
        return Message(after, f"event: news\nid: {after}\ndata: {data}\n\n", last=False)

    def _events(self, key: tuple[str, str], position: str, wait: float = 0.0) -> Iterator[BuildEvent]:
        """Yield the events of a build after a position, waiting so many seconds for the first one."""
        while items := self._farm.build_reader.events(*key, position, wait)["items"]:
            yield from items
            position, wait = str(items[-1]["id"]), 0.0

    def _find(self, key: tuple[str, str]) -> _Kept | None:
        with self._lock:
            return self._kept.get(key)

    def _is_current(self, key: tuple[str, str], kept: _Kept) -> bool:
        if not kept.view.is_open or not kept.view.judged:
            return not kept.view.is_open
        age = time.monotonic() - kept.read_at
        return age < (UNCHANGED if kept.view.position == self.position(*key) else STALE * kept.cost)

    def _begin(self, key: tuple[str, str]) -> tuple[Future[ShownBuild], Future[ShownBuild]]:
        with self._lock:
            if key not in self._under_way:
                first = Future[ShownBuild]()
                self._under_way[key] = first, self._threads.submit(self._read, key, first)
            return self._under_way[key]

    def _read(self, key: tuple[str, str], first: Future[ShownBuild]) -> ShownBuild:
        try:
            return self._keep(key, first)
        finally:
            with self._lock:
                del self._under_way[key]

    def _keep(self, key: tuple[str, str], first: Future[ShownBuild]) -> ShownBuild:
        kept = self._find(key)
        if kept and not kept.view.is_open:
            return kept.view
        began = time.monotonic()
        if kept and (view := self._updated(key, kept)):
            now = time.monotonic()
            self._remember(key, replace(kept, view=view, read_at=now, cost=now - began))
            return view
        position = self.position(*key)
        found = self._farm.build_reader.unjudged_lines(*key) if kept is None else None
        if found and len(found.cells) >= SMALL:
            unjudged = ShownBuild(*found, position, judged=False)
            self._remember(key, _Kept(unjudged, began, 0.0, began, 0.0))
            first.set_result(unjudged)
        view = ShownBuild(*self._farm.build_reader.lines(*key), position)
        now = time.monotonic()
        self._remember(key, _Kept(view, now, now - began, now, now - began))
        return view

    def _remember(self, key: tuple[str, str], kept: _Kept) -> None:
        with self._lock:
            self._kept[key] = kept
            self._kept.move_to_end(key)
            while len(self._kept) > 1 and sum(len(each.view.cells) for each in self._kept.values()) > KEPT_CELLS:
                self._kept.popitem(last=False)

    def _updated(self, key: tuple[str, str], kept: _Kept) -> ShownBuild | None:
        """Return a large open build with the cells that changed; None if it has to be read whole."""
        if (
            not kept.view.judged
            or len(kept.view.cells) < SMALL
            or time.monotonic() - kept.whole_at > WHOLE * kept.whole_cost
        ):
            return None
        events = list(self._events(key, kept.view.position))
        changed = {event["identifier"] for event in events if "identifier" in event}
        if len(changed) > FEW or any("identifier" not in event for event in events):
            return None  # Cells were accepted, the build was paused or ended, the place is unknown.
        cells = self._farm.build_reader.some_cells(*key, sorted(changed))
        return kept.view.updated(map(CellLine.of, cells), str(events[-1]["id"]) if events else kept.view.position)


def _is_before(position: str, other: str) -> bool:
    """Whether the id of an event is before another one of the same epoch (`farm.store`)."""
    (epoch, _, place), (other_epoch, _, other_place) = position.partition("."), other.partition(".")
    return epoch == other_epoch and by_number(place) < by_number(other_place)


# --- news of open builds ----------------------------------------------------------------------------------------------

READ_WAIT = 2.0  # Seconds that one read of a build's events waits in the store.
PAUSE = 0.5  # Seconds between two messages about one build: people do not read faster.
SPARED = 4.0  # Reading a build takes at most this part (1 / n) of the time between two messages.
KEEP_ALIVE = 15.0  # Seconds after which a connection without news gets a comment, so that no proxy closes it.
REMEMBERED = 64  # Messages, of all builds, that are kept for those who come back.
RUNNING = 50  # Running cells that a page lists.

READING = "reading"  # The place of those who wait until a build has been read for the first time.
RETRY = 1000  # Milliseconds after which a browser connects again.


class Message(NamedTuple):
    """What an event stream gets: the id that it has, text in the wire format, and whether it is the last."""

    position: str
    text: str
    last: bool


class EventHub:
    """News of open builds: all who are at the same place of a build share one reading. Belongs to one event loop."""

    def __init__(self, limiter: anyio.CapacityLimiter) -> None:
        self._in_thread = partial(anyio.to_thread.run_sync, limiter=limiter, abandon_on_cancel=True)
        self._readings: dict[tuple[str, str, str], asyncio.Task[Message | None]] = {}
        """What is being read, and the last messages, by build and position."""

    async def follow(self, pages: BuildPages, namespace: str, build_id: str, position: str) -> AsyncIterator[str]:
        """Yield news of a build since a position, until its report is written."""
        yield f"retry: {RETRY}\n\n"
        while True:
            reading = self._reading(pages, (namespace, build_id, position))
            is_kept = reading.done()
            while not (await asyncio.wait({reading}, timeout=KEEP_ALIVE))[0]:
                yield ":\n\n"
            try:
                message = reading.result()
            except FarmError:  # The store is away: those who look have what they have.
                yield ":\n\n"
                await asyncio.sleep(READ_WAIT)
                continue
            yield message.text if message else ":\n\n"
            if message is None:
                continue
            if message.last:
                return
            position = message.position
            if not is_kept:
                # All readers of a build go on at the same moments: soon they are at the same place.
                pause = max(PAUSE, SPARED * pages.cost(namespace, build_id))
                await asyncio.sleep(pause - time.monotonic() % pause)

    def _reading(self, pages: BuildPages, place: tuple[str, str, str]) -> asyncio.Task[Message | None]:
        """Return the reading of what comes after a place, which is begun unless it is under way or remembered."""

        def forget(done: asyncio.Task[Message | None]) -> None:
            message = None if done.cancelled() or done.exception() else done.result()
            if message is None or message.last:
                self._readings.pop(place, None)
            while len(self._readings) > REMEMBERED:
                del self._readings[next(iter(self._readings))]

        if place not in self._readings:
            for other, reading in self._readings.items():  # What comes after an earlier place is more.
                if other[:2] == place[:2] and _is_before(other[2], place[2]) and not reading.done():
                    return reading
            self._readings[place] = asyncio.ensure_future(self._in_thread(partial(pages.message, *place)))
            self._readings[place].add_done_callback(forget)
        return self._readings[place]


def news(view: ShownBuild, changed: set[str]) -> str:
    """Return how a build is now, with the changed cells, as JSON on one line."""
    lines = [view.by_identifier[name] for name in changed if name in view.by_identifier]
    return json.dumps(
        {
            "headline": one_line(view.headline(), 1000),
            "looks": {**view.looks, "uploading": sum(cell.phase == "uploading" for cell in view.running)},
            "cells": {cell.identifier: [cell.look, said(cell)] for cell in lines},
            "running": [
                [cell.identifier, cell.phase, one_line(cell.worker), duration(cell.elapsed)]
                for cell in view.running[:RUNNING]
            ],
        },
        ensure_ascii=False,
    )

"""News of open builds for the pages that show them: one reader for each build, however many look at it.

A message says how cells are after some events; it has the id of the last of them. Whoever comes back with an id gets
what changed since then, once.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from functools import partial
from typing import NamedTuple

import anyio

from farm.app import Farm
from farm.errors import FarmError
from farm.inert import one_line
from farm.logging import get_logger
from farm.pages.build_view import ShownBuild, said
from farm.pages.page_reading import BuildPages, order_of
from farm.pages.quantities import duration

log = get_logger(__name__)

READ_WAIT = 2.0
"""Seconds that one read of a build's events waits in the store."""

PAUSE = 0.5
"""Seconds at least between two messages about one build: people do not read faster."""

SPARED = 4.0
"""Reading a build takes at most this part (1 / n) of the time between two messages."""

KEEP_ALIVE = 15.0
"""Seconds after which a connection without news gets a comment, so that no proxy closes it."""

REMEMBERED = 256
"""Messages that are kept for those who come back."""

RUNNING = 50
"""Running cells that a page lists."""

LOOK_EVERY = 8
"""Reads without an event between two looks at the build: its stream may be gone while its report is there."""

READING = "reading"
"""The place of those who wait until a build has been read for the first time."""

RETRY = 1000
"""Milliseconds after which a browser connects again."""


class Message(NamedTuple):
    """What one event stream gets: text in the wire format, the id that it has, and whether it is the last."""

    position: str
    text: str
    last: bool


class EventHub:
    """The open builds that somebody looks at. Belongs to one event loop."""

    def __init__(self, limiter: anyio.CapacityLimiter) -> None:
        self._limiter = limiter
        self._channels: dict[tuple[str, str], _Channel] = {}

    async def follow(
        self, farm: Farm, pages: BuildPages, namespace: str, build_id: str, position: str
    ) -> AsyncIterator[str]:
        """Yield news of a build since a position, until its report is written."""
        key = (namespace, build_id)
        channel = self._channels.get(key)
        if channel is None or channel.ended:
            channel = self._channels[key] = _Channel(farm, pages, namespace, build_id, self._limiter)
        channel.readers += 1
        try:
            yield f"retry: {RETRY}\n\n"
            async for text in channel.until_read() if position == READING else channel.follow(position):
                yield text
        except FarmError as error:
            # The answer has begun, so it can only end; browsers connect again.
            log.warning("news of a build broke off", build=build_id, error=error.message)
        finally:
            channel.readers -= 1
            if not channel.readers:
                channel.stop()
                if self._channels.get(key) is channel:
                    del self._channels[key]


class _Channel:
    """One build: a task that reads its events, and the last messages."""

    def __init__(
        self, farm: Farm, pages: BuildPages, namespace: str, build_id: str, limiter: anyio.CapacityLimiter
    ) -> None:
        self.readers = 0
        self._farm = farm
        self._pages = pages
        self._key = (namespace, build_id)
        self._in_thread = partial(anyio.to_thread.run_sync, limiter=limiter, abandon_on_cancel=True)
        self._messages: deque[Message] = deque(maxlen=REMEMBERED)
        self._start = ""
        """The position from which the messages are without a gap."""
        self._news = asyncio.Event()
        self._missed: dict[str, asyncio.Task[Message | None]] = {}
        """What is being read for those who are behind, by their position."""
        self._task = asyncio.create_task(self._read())

    @property
    def ended(self) -> bool:
        """Whether no more messages will come."""
        return self._task.done()

    def stop(self) -> None:
        """Read no more."""
        self._task.cancel()

    async def until_read(self) -> AsyncIterator[str]:
        """Say when the build has been read, so that its page can be shown."""
        reading = asyncio.ensure_future(self._in_thread(partial(self._pages.newest, *self._key)))
        while not (await asyncio.wait({reading}, timeout=KEEP_ALIVE))[0]:
            yield ":\n\n"
        reading.result()
        yield "event: reset\ndata: {}\n\n"

    async def follow(self, position: str) -> AsyncIterator[str]:
        """Yield the messages after a position."""
        while True:
            news, known = self._news, self._since(position)
            if known is None:
                found = await self._catch_up(position)
                known = [found] if found else []
            for message in known:
                position = message.position
                yield message.text
                if message.last:
                    return
            if not known:
                if self.ended:
                    return
                try:
                    await asyncio.wait_for(news.wait(), KEEP_ALIVE)
                except TimeoutError:
                    yield ":\n\n"

    async def _catch_up(self, position: str) -> Message | None:
        """Read what came before the messages; those who are behind at the same place wait for one reading."""
        task = self._missed.get(position)
        if task is None:
            reading = self._in_thread(partial(self._message, position, 0.0))
            task = self._missed[position] = asyncio.ensure_future(reading)
            task.add_done_callback(lambda _: self._missed.pop(position, None))
        return await asyncio.shield(task)

    def _since(self, position: str) -> list[Message] | None:
        """Return the messages after a position; None if some may be missing."""
        start, place = order_of(self._start), order_of(position)
        if start[0] != place[0] or place < start:
            return None
        return [message for message in self._messages if order_of(message.position) > order_of(position)]

    async def _read(self) -> None:
        position = self._start = await self._in_thread(partial(self._pages.position, *self._key))
        idle = 0
        while True:
            try:
                message = await self._in_thread(partial(self._message, position, READ_WAIT))
                if message is None and idle % LOOK_EVERY == 0:
                    message = await self._in_thread(partial(self._reported, position))
                idle = 0 if message else idle + 1
            except FarmError:
                # The store is away: those who look have what they have.
                await asyncio.sleep(READ_WAIT)
                continue
            if message is None:
                continue
            if len(self._messages) == REMEMBERED:
                self._start = self._messages[0].position
            self._messages.append(message)
            position = message.position
            self._news.set()
            self._news = asyncio.Event()
            if message.last:
                return
            await asyncio.sleep(max(PAUSE, SPARED * self._pages.cost(*self._key)))

    def _message(self, position: str, wait: float) -> Message | None:
        """Return what changed after a position; None if nothing did. Raises FarmError."""
        changed: set[str] = set()
        after, ended, found = position, False, False
        while True:
            read = self._farm.build_reader.events(*self._key, after, 0.0 if found else wait)
            if read["reset"]:
                after = str(read["items"][-1]["id"])
                return Message(after, f"event: reset\nid: {after}\ndata: {{}}\n\n", last=True)
            for item in read["items"]:
                found, after = True, str(item["id"])
                changed |= {str(item["identifier"])} if "identifier" in item else set()
                ended = ended or (item["type"] == "build" and item.get("state") == "reported")
            if len(read["items"]) < 500:
                break
        if not found:
            return None
        if ended:
            return Message(after, f"event: end\nid: {after}\ndata: {{}}\n\n", last=True)
        data = news(self._pages.newest(*self._key), changed)
        return Message(after, f"event: news\nid: {after}\ndata: {data}\n\n", last=False)

    def _reported(self, position: str) -> Message | None:
        if self._farm.build_reader.get(*self._key)["state"] != "reported":
            return None
        return Message(position, "event: end\ndata: {}\n\n", last=True)


def news(view: ShownBuild, changed: set[str]) -> str:
    """Return how a build is now, with the changed cells, as JSON on one line."""
    lines = [view.by_identifier[name] for name in changed if name in view.by_identifier]
    return json.dumps(
        {
            "headline": one_line(view.headline(), 1000),
            "looks": dict(view.looks),
            "cells": {cell.identifier: [cell.look, said(cell)] for cell in lines},
            "running": [
                [cell.identifier, cell.phase, one_line(cell.worker), duration(cell.elapsed)]
                for cell in view.running[:RUNNING]
            ],
        },
        ensure_ascii=False,
    )

"""Events of a build, in order; a reader continues from the id of the last event that it saw."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from farm.jobs.rows import BuildEvent
from farm.store.link import Link, key

BATCH = 500
_STREAM_ID = re.compile(r"[0-9]{1,20}(-[0-9]{1,20})?")
"""Milliseconds and a count, each of 64 bits."""

LONGEST_BLOCK = 2000
"""Most milliseconds that one command waits: less than the socket's timeout."""


@dataclass(frozen=True, slots=True)
class Events:
    """Events of a build, oldest first.

    `reset`: the reader's position was trimmed, or belongs to another epoch. Then the only item is of type `reset`.
    """

    items: list[BuildEvent]
    reset: bool = False


class EventStreams:
    """The events of all builds, one stream each. An id is `<epoch>.<stream id>`."""

    def __init__(self, link: Link, epoch: Callable[[], str]) -> None:
        self._link = link
        self._new_epoch = epoch

    def read(self, build_id: str, after: str | None = None, block_ms: int = 0) -> Events:
        """Return up to 500 events after an id (None: from the beginning), waiting up to `block_ms` for the first.

        An unknown id counts as an id of another epoch.
        """
        stream = key("build", build_id, "events")
        epoch, edges = self._link.ask_many([["HGET", key("epoch"), "epoch"], ["XINFO STREAM", stream]], tolerant=True)
        epoch = epoch or self._new_epoch()
        first, last, trimmed = _edges(edges)
        position = _position(after, epoch)
        if position is None or (trimmed and _order(position) < _order(first)):
            item: BuildEvent = {
                "id": f"{epoch}.{last}",
                "at": _seconds(last) or time.time(),
                "type": "reset",
                "build": build_id,
            }
            return Events([item], reset=True)
        entries = self._link.ask("XRANGE", stream, f"({position}", "+", "COUNT", BATCH)
        if not entries and block_ms > 0:
            entries = self._wait(stream, position, block_ms)
        return Events([_item(build_id, epoch, *entry) for entry in entries])

    def _wait(self, stream: str, position: str, block_ms: int) -> list[Any]:
        deadline = time.monotonic() + block_ms / 1000
        while (left := round((deadline - time.monotonic()) * 1000)) > 0:
            block = min(left, LONGEST_BLOCK)
            answer = self._link.ask("XREAD", "COUNT", BATCH, "BLOCK", block, "STREAMS", stream, position)
            if answer:
                return list(answer[0][1])
        return []


def _position(after: str | None, epoch: str) -> str | None:
    """Return the stream id for a reader's id, or None if it is not of this epoch."""
    if not after:
        return "0-0"
    life, _, position = after.partition(".")
    ours = life == epoch and _STREAM_ID.fullmatch(position) and max(_order(position)) < 1 << 64
    return position if ours else None


def _edges(info: Any) -> tuple[str, str, bool]:
    """First and last id of a stream, and whether entries before the first were trimmed."""
    if not isinstance(info, dict) or not info.get("first-entry"):
        return "0-0", "0-0", False
    return info["first-entry"][0], info["last-generated-id"], info["entries-added"] > info["length"]


def _order(position: str) -> tuple[int, ...]:
    return tuple(int(part) for part in position.split("-"))


def _seconds(position: str) -> float:
    return int(position.partition("-")[0]) / 1000


def _item(build_id: str, epoch: str, position: str, fields: dict[str, str]) -> BuildEvent:
    numbers = {name: int(fields[name]) for name in ("attempt", "cells", "accepted") if fields.get(name)}
    item = {"id": f"{epoch}.{position}", "at": _seconds(position), "build": build_id, **fields, **numbers}
    return cast(BuildEvent, item)

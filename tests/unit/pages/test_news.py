"""News of an open build, for many who look at it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from farm.pages import page_reading
from farm.pages.page_reading import EventHub, Message


def test_those_who_came_at_different_moments_soon_share_each_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build that always has news would otherwise be read as often as there are readers."""
    monkeypatch.setattr(page_reading, "PAUSE", 0.1)
    reads: list[str] = []

    def message(_namespace: str, _build: str, position: str) -> Message:
        reads.append(position)
        time.sleep(0.005)
        return Message(f"e.{time.monotonic_ns()}-0", "event: news\n\n", last=False)

    pages = cast(Any, SimpleNamespace(message=message, cost=lambda *_: 0.0))

    async def look(hub: EventHub, number: int) -> None:
        await asyncio.sleep(number / 200)
        async for _ in hub.follow(pages, "main", "b-1", f"e.{number}-0"):
            pass

    async def all_look() -> int:
        hub = EventHub(anyio.CapacityLimiter(256))
        looking = asyncio.gather(*(look(hub, number) for number in range(40)))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(looking), 1.0)
        before = len(reads)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(looking, 1.0)
        return len(reads) - before

    assert asyncio.run(all_look()) < 40

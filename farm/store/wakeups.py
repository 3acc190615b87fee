"""Wake-ups: signals of the scripts to the control plane, so that nothing waits for a timer."""

from __future__ import annotations

from farm.store.link import Link, key

LONGEST = 2.0
"""Most seconds that one call blocks: less than the socket's timeout."""


class Wakeups:
    """Pools with jobs to hand out, and builds that ended or have to be stopped. Each wake-up goes to one process."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def next_pool(self, seconds: float) -> str | None:
        """Wait for a pool that may have jobs to hand out."""
        return self._next("pools", seconds)

    def next_build(self, seconds: float) -> str | None:
        """Wait for a build that ended, or whose cells have to be cancelled."""
        return self._next("builds", seconds)

    def wake_pool(self, pool: str) -> None:
        """Wake a dispatcher for a pool."""
        self._link.ask("ZADD", key("wake", "pools"), 0, pool)

    def _next(self, what: str, seconds: float) -> str | None:
        found = self._link.ask("BZPOPMIN", key("wake", what), min(seconds, LONGEST))
        return str(found[1]) if found else None

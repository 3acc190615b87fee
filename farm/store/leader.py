"""Leader: a lease that saves the control planes double work. Two leaders do no harm."""

from __future__ import annotations

from farm.store.link import Link


class Leader:
    """The leader's lease."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def lead(self, process: str, seconds: float) -> bool:
        """Take or renew the lease for `seconds`; return whether `process` has it."""
        return bool(self._link.run("lead", process=process, ttl=round(seconds * 1000)))

    def resign(self, process: str) -> None:
        """Release the lease."""
        self._link.run("resign", process=process)

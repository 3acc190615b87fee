"""How fast this machine is while a test runs: bounds of seconds that other load does not break.

A promise in seconds is one for a machine that does nothing else. A `Pace` measures how long the smallest build takes in
the same run, undisturbed; where that is slow, so many of it are the bound.
"""

from __future__ import annotations

import time
from statistics import median

from farm.client.client import FarmClient
from tests.chaos.rig import Rig


class Pace:
    """Seconds of undisturbed builds of one cell, from the submission to the report, on one farm with a free slot."""

    def __init__(self, farm: Rig, client: FarmClient, times: int = 4) -> None:
        self._farm = farm
        self._client = client
        self._seconds: list[float] = []
        self.measure(times)

    @property
    def build(self) -> float:
        """Seconds of the middle one of those that were measured."""
        return median(self._seconds)

    def measure(self, times: int = 4) -> None:
        """Measure before the fault and, for load that comes later, after it; compilers do nothing meanwhile."""
        self._farm.script({"": [{}]})
        for _ in range(times):
            start = time.monotonic()
            self._farm.wait(self._farm.submit(self._client, 1))
            self._seconds.append(time.monotonic() - start)

    def bound(self, promised: float, builds: float) -> float:
        """Return what may be taken: `promised` seconds, or as long as so many undisturbed builds take."""
        return max(promised, builds * self.build)

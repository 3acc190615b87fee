"""A build that was submitted, in the hands of a script: wait for its verdict, look at it, fetch what it made."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

from farm.errors import CompileFailed, ExitCode, FarmError, FarmFault, GateFailed, StillRunning

if TYPE_CHECKING:
    from farm.client.client import FarmClient
    from farm.results.report import BuildView, JudgedCell, Report

LONGEST_PAUSE = 2.0
"""Seconds between two questions whether a build has ended, at most; they grow from a tenth of one."""

PATIENCE = 30.0
"""Seconds for which a farm that is away is asked again."""

_ERRORS: dict[int, type[FarmError]] = {
    ExitCode.CELL_FAILED: CompileFailed,
    ExitCode.GATE_FAILED: GateFailed,
    ExitCode.FARM_FAULT: FarmFault,
}


class SubmittedBuild(Mapping[str, Any]):
    """A build and the client that made it. As a mapping it is `document`, the answer to the submission."""

    def __init__(self, client: FarmClient, document: BuildView) -> None:
        self._client = client
        self.document = document
        self.url = client.page_of(document)
        """The build's page, for a browser."""

    @property
    def id(self) -> str:
        """The build's id."""
        return self.document["id"]

    def wait(self, timeout: float | None = None) -> Report:
        """Wait for the verdict, and return the build with its cells if it is green.

        Raises as `farm watch` exits: CompileFailed (1) if a cell failed, GateFailed (3) if only gates did, FarmFault
        (6) if it ended by the farm's fault, or the farm stays away. `report` then has the cells. Raises StillRunning
        (8) after `timeout` seconds; the build goes on.
        """
        end = None if timeout is None else time.monotonic() + timeout
        pause, heard = 0.1, time.monotonic()
        while True:
            try:
                found = self._client.build(self.id)
                heard = time.monotonic()
                if found["state"] == "reported":
                    break
            except FarmFault:
                if time.monotonic() - heard > PATIENCE:
                    raise
            left = pause if end is None else end - time.monotonic()
            if left <= 0:
                raise StillRunning(f"build {self.id} goes on after {timeout:g} seconds", hint=f"look at {self.url}")
            time.sleep(min(pause, left))
            pause = min(2 * pause, LONGEST_PAUSE)
        verdict = found["verdict"]
        if verdict and verdict["exit_code"]:
            kind = _ERRORS.get(verdict["exit_code"], CompileFailed)
            raise kind(f"build {self.id}: {verdict['text']}", hint=self.url)
        return self.report()

    def report(self) -> Report:
        """Return the build with its cells, as it is now."""
        return self._client.report(self.id)

    def cells(self) -> list[JudgedCell]:
        """Return its cells, judged, as they are now."""
        return self._client.cells(self.id)

    def cancel(self) -> int:
        """End every cell that has not ended; return how many those were."""
        return self._client.cancel(self.id)

    def __getitem__(self, name: str) -> Any:
        return cast(Mapping[str, Any], self.document)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.document)

    def __len__(self) -> int:
        return len(self.document)

    def __repr__(self) -> str:
        return f"<build {self.id}, {self.url}>"

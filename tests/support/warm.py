"""Templates for tests of children that have to be warm."""

from __future__ import annotations

from typing import Any

import psutil

from farm.compiling.templates import Forked, Templates


class Counted(Templates):
    """Templates that say whether they forked."""

    def __init__(self) -> None:
        super().__init__()
        self.warm: list[bool] = []

    def fork(self, *arguments: Any) -> Forked | None:
        forked = super().fork(*arguments)
        self.warm.append(forked is not None)
        return forked

    @property
    def processes(self) -> list[psutil.Process]:
        """The templates that run."""
        return [psutil.Process(each._process.pid) for each in self._kept.values() if each._process.poll() is None]


class AlwaysWarm(Counted):
    """Templates that fork, or fail the test."""

    def fork(self, *arguments: Any) -> Forked | None:
        forked = super().fork(*arguments)
        assert forked, "it would have started cold"
        return forked

"""Installations: compilers in interpreters of their own, so that one node has several versions of one side by side."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

_ENTRY = re.compile(r"(?:(?P<toolchain>[a-z][a-z0-9._-]{0,99})=)?(?P<python>[^:]+)(?::(?P<folder>.+))?")


class Installation(NamedTuple):
    """The interpreter that imports a compiler (empty: this one), and the folder of MIGraphX's module if it is named."""

    python: str
    folder: str = ""


class InstallationEntry(NamedTuple):
    """An item of the setting `other_toolchains`; `toolchain` is empty until a worker has looked at it."""

    toolchain: str
    installation: Installation

    def __str__(self) -> str:
        python, folder = self.installation
        return f"{f'{self.toolchain}=' if self.toolchain else ''}{python}{f':{folder}' if folder else ''}"

    @classmethod
    def of(cls, text: str) -> InstallationEntry:
        """Read an item: `PYTHON`, `PYTHON:FOLDER`, and once a worker has looked at it `TOOLCHAIN=PYTHON:FOLDER`.

        Raises ValueError if it names no interpreter.
        """
        if not (found := _ENTRY.fullmatch(text)):
            raise ValueError(f"`{text}` names no interpreter")
        return cls(found["toolchain"] or "", Installation(found["python"], found["folder"] or ""))


def by_toolchain(entries: Iterable[str]) -> dict[str, Installation]:
    """Return the installations that a worker has looked at, by the ids of their toolchains."""
    return {entry.toolchain: entry.installation for entry in map(InstallationEntry.of, entries) if entry.toolchain}


def is_same_build(toolchain: str, other: str) -> bool:
    """Whether two ids name the same libraries: labels may have the version of an installation around them."""
    return toolchain.rpartition("-")[2] == other.rpartition("-")[2]

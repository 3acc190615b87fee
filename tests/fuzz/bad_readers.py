"""Readers that break a promise each: the fuzz test has to see it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from farm.errors import UsageError
from tests.fuzz.reader import Reader


def _hangs(path: Path) -> None:
    while path.read_bytes() == b"seed":
        pass


def _hoards(path: Path) -> None:
    len(b"x" * (80 << 20))


def _dies(path: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raises(path: Path) -> None:
    raise KeyError(path)


def _is_silent(path: Path) -> None:
    raise UsageError("")


READERS = tuple(
    Reader(each.__name__.strip("_").replace("_", "-"), each, lambda folder: [b"seed"])
    for each in (_hangs, _hoards, _dies, _raises, _is_silent)
)

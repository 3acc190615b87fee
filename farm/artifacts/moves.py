"""Moves of an object by conditional writes, which another writer may win."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from farm.errors import StorageUnavailable

T = TypeVar("T")

MOVES = 64
"""Most tries of a move while other writers move the object: each try lets one of them through."""


def until_moved(key: str, attempt: Callable[[], T | None]) -> T:
    """Return what `attempt` returns. While it returns None, because another writer was faster, call it again.

    Raises StorageUnavailable if others never stop moving the object.
    """
    for turn in range(MOVES):
        if (moved := attempt()) is not None:
            return moved
        time.sleep(random.uniform(0, 0.01 * min(turn + 1, 10)))  # noqa: S311 - lets one of many through
    raise StorageUnavailable(f"{key} was moved by others {MOVES} times while we tried")

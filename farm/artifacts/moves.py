"""Moves of an object by conditional writes, which another writer may win."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from farm.errors import Conflict, StorageUnavailable

if TYPE_CHECKING:
    from farm.artifacts.storage import ArtifactStore, Object

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


def rewrite(
    artifacts: ArtifactStore,
    key: str,
    change: Callable[[Object | None], bytes],
    *,
    content_type: str = "application/json",
) -> None:
    """Replace an object by the bytes that `change` makes of it (None: there is none).

    `change` is called again if another writer was faster. The same bytes are not written again.
    """

    def attempt() -> bool | None:
        there = artifacts.get_object(key)
        data = change(there)
        if there and data == there.data:
            return True
        with suppress(Conflict):
            etag = there.etag if there else ""
            artifacts.put_object(key, data, create=there is None, if_match=etag, content_type=content_type)
            return True
        return None

    until_moved(key, attempt)

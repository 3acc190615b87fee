"""Helpers that tests of several rooms share."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(fact: Callable[[], T], timeout: float = 60.0, message: str = "") -> T:
    """Ask `fact` again and again until it is true, and return its answer; fail after `timeout` seconds.

    Tests wait for facts, never for time: this is the one place in them that sleeps, and as long as it asked, so that
    asking leaves at least half of a core to what is waited for. The timeout only ends a test that hangs: it is far
    beyond what a fact takes on a machine that does much else.
    """
    asked = time.monotonic()
    deadline = asked + timeout
    while not (answer := fact()):
        if (now := time.monotonic()) > deadline:
            said = message or getattr(fact, "__name__", repr(fact))
            raise AssertionError(f"not true within {timeout} s: {said} (last answer {answer!r})")
        time.sleep(max(0.02, now - asked))
        asked = time.monotonic()
    return answer

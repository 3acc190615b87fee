"""Helpers that tests of several rooms share."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def wait_until(fact: Callable[[], T], timeout: float = 60.0, message: str = "") -> T:
    """Ask `fact` again and again until it is true, and return its answer; fail after `timeout` seconds.

    Tests wait for facts, never for time: this is the one place in them that sleeps: as long as it asked, and a tenth
    of the time so far, so that asking leaves the cores to what is waited for. The timeout only ends a test that hangs:
    it is far beyond what a fact takes on a machine that does much else.
    """
    began = asked = time.monotonic()
    deadline = began + timeout
    while not (answer := fact()):
        if (now := time.monotonic()) > deadline:
            said = message or getattr(fact, "__name__", repr(fact))
            raise AssertionError(f"not true within {timeout} s: {said} (last answer {answer!r})")
        time.sleep(max(0.02, now - asked, min(0.2, (now - began) / 10)))
        asked = time.monotonic()
    return answer


@contextmanager
def in_a_thread(run: Callable[[threading.Event], object]) -> Iterator[None]:
    """Call `run` in a thread while the block runs; it returns when its event is set."""
    over = threading.Event()
    thread = threading.Thread(target=run, args=(over,))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def folders_without_end(place: Path) -> None:
    """Make 1500 folders in each other: more than Python has levels of calls."""
    inner = os.open(place, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("deep", dir_fd=inner)
        outer, inner = inner, os.open("deep", os.O_RDONLY, dir_fd=inner)
        os.close(outer)
    os.close(inner)

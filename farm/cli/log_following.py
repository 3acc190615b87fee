"""Following a log: the last part of a running job's log is asked for again and again, and only what is new is shown."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farm.client.client import FarmClient

PAUSE = 1.0
"""Seconds between two questions."""


def follow_log(client: FarmClient, job: str) -> Iterator[str]:
    """Yield whole lines of a job's log as they come, until the job has ended."""
    shown = b""
    attempt = 0
    while True:
        found = client.jobs.get(job)
        ended, text = found["state"] not in ("queued", "running"), client.jobs.log(job)
        if found["attempt"] != attempt:
            shown, attempt = b"", found["attempt"]
        new = added(shown, text)
        whole = new if ended else new[: new.rfind(b"\n") + 1]
        if whole:
            shown += whole
            yield whole.decode(errors="replace").rstrip("\n")
        if ended:
            return
        time.sleep(PAUSE)


def added(before: bytes, now: bytes) -> bytes:
    """Return what a log has more than before. `now` may be its last part only, or the whole."""
    if now.startswith(before):
        return now[len(before) :]
    # It is a window that moved on: what is new begins after the longest end of the known that it begins with.
    for length in range(min(len(before), len(now)), 0, -1):
        if before.endswith(now[:length]):
            return now[length:]
    # The window may also begin before what was shown, or lie behind it altogether.
    place = now.rfind(before[-TAIL:]) if before else -1
    return now[place + len(before[-TAIL:]) :] if place >= 0 else now


TAIL = 200
"""Bytes of what was shown by which its end is found again."""

"""Endings: writes the reports of ended builds, and stops fail-fast builds."""

from __future__ import annotations

from collections.abc import Callable

from farm.errors import FarmFault
from farm.logging import get_logger
from farm.store import Store

log = get_logger(__name__)

FinishBuild = Callable[[str], None]
"""Writes the report of an ended build, and marks it reported. Repeatable."""


def settle_next(store: Store, finish: FinishBuild, seconds: float) -> None:
    """Wait up to `seconds` for a build that ended or has to be stopped, and handle it."""
    build_id = store.wakeups.next_build(seconds)
    if build_id:
        settle(store, finish, build_id)


def settle(store: Store, finish: FinishBuild, build_id: str) -> None:
    """Cancel the live cells of a build that has to be stopped; report a build that ended."""
    build = store.builds.get(build_id)
    if build and build["state"] == "open" and build_id in store.builds.to_stop():
        store.builds.stop(build_id)
    elif build and build["state"] == "ended":
        finish(build_id)


def settle_left(store: Store, finish: FinishBuild) -> None:
    """Handle builds whose wake-up was missed: object storage was away, or a process died with it."""
    for build_id in [*store.builds.to_stop(), *store.builds.ended_unreported()]:
        try:
            settle(store, finish, build_id)
        except FarmFault:
            raise
        except Exception:  # One build that cannot be reported must not stop the others.
            log.exception("build not settled", build=build_id)

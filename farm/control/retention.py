"""Retention: what expires by itself leaves names behind in lists; this drops them."""

from __future__ import annotations

from farm.store import Store

INTERVAL = 3600.0
"""Seconds between two runs."""


def forget_expired(store: Store) -> None:
    """Drop the names of builds and workers whose records expired."""
    store.builds.forget_expired()
    store.workers.forget_dead()

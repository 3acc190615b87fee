"""Retention: drops the names that expired records leave behind, and keeps object storage tidy."""

from __future__ import annotations

from datetime import timedelta

from farm.artifacts.index import rebuild
from farm.artifacts.s3 import S3Store
from farm.logging import get_logger
from farm.store import Store

log = get_logger(__name__)

INTERVAL = 600.0
"""Seconds between two runs: after a loss of Redis, only the sidecars of so long have to be read one by one."""

UPLOADS_KEPT = timedelta(days=1)
"""How long a multipart upload may go on."""


def forget_expired(store: Store) -> None:
    """Drop the names of builds and workers whose records expired."""
    store.builds.forget_expired()
    store.workers.forget_dead()


def tidy_storage(store: Store, artifacts: S3Store) -> None:
    """End uploads that were given up, and bring every namespace's index up to date with object storage.

    The index's checkpoint is what makes planning fast again after Redis was lost.
    """
    aborted = artifacts.abort_uploads(UPLOADS_KEPT)
    if aborted:
        log.info("uploads ended that were given up", count=aborted)
    for namespace in artifacts.list_folders("ns/"):
        store.index.fill(namespace, rebuild(artifacts, namespace))

"""Retention: drops names of expired records, and cleans up object storage."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from farm.artifacts.index import rebuild
from farm.artifacts.ownership import collect
from farm.artifacts.s3 import S3Store
from farm.logging import get_logger
from farm.store import Store

log = get_logger(__name__)

CHANGES = "config/changes/"
"""Prefix of the log of changes: a folder for each day (ISO, UTC), in it objects in the order of time."""

INTERVAL = 600.0
"""Seconds between two runs: after a loss of Redis, only sidecars younger than this are read one by one."""

COLLECTIONS = 86_400.0
"""Seconds between two garbage collections: each reads all documents."""

UPLOADS_KEPT = timedelta(days=1)
"""How long a multipart upload may take."""


def forget_expired(store: Store) -> None:
    """Drop the names of builds and workers whose records expired."""
    store.builds.forget_expired()
    store.workers.forget_dead()


def forget_changes(artifacts: S3Store, kept: timedelta) -> None:
    """Delete the days of the log of changes that are older than this."""
    first = str((datetime.now(UTC) - kept).date())
    old = [day for day in artifacts.list_folders(CHANGES) if day < first]
    for day in old:
        for key in artifacts.list_objects(f"{CHANGES}{day}/"):
            artifacts.delete_object(key)
        log.info("a day of the log of changes deleted", day=day)


def tidy_storage(store: Store, artifacts: S3Store, *, changes_kept: timedelta) -> None:
    """Abort abandoned uploads, forget old changes, and update every namespace's index from object storage.

    The index's checkpoint is what makes planning fast again after Redis was lost.
    """
    aborted = artifacts.uploads.abort(UPLOADS_KEPT)
    if aborted:
        log.info("abandoned uploads aborted", count=aborted)
    forget_changes(artifacts, changes_kept)
    forget_extracts(artifacts)
    for namespace in artifacts.list_folders("ns/"):
        store.index.fill(namespace, rebuild(artifacts, namespace))


def forget_extracts(artifacts: S3Store) -> None:
    """Delete what earlier versions wrote for pages of large builds: nothing reads it."""
    for namespace in artifacts.list_folders("ns/"):
        for key in artifacts.list_objects(f"ns/{namespace}/extracts/"):
            artifacts.delete_object(key)


def collect_garbage(artifacts: S3Store, *, delete: bool, plans_kept: timedelta) -> None:
    """Collect garbage like `farm gc`; without `delete`, only log how much there is."""
    found = collect(artifacts, plans_kept=plans_kept, dry_run=not delete)
    size = sum(entry.size for entry in found.deleted)
    if delete:
        log.info("garbage collected", blobs=len(found.deleted), bytes=size, marked=len(found.marked))
    elif found.deleted:
        log.info("some blobs are garbage; `gc = true` or `farm gc` deletes them", blobs=len(found.deleted), bytes=size)

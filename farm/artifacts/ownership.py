"""Which blobs somebody needs: those that a document names, and those that a ref's snapshot leads to."""

from __future__ import annotations

import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

from farm.artifacts import BLOBS, ArtifactStore, ListedObject, blob_key
from farm.artifacts.refs import SNAPSHOT_LIMIT
from farm.errors import ArtifactGone

THREADS = 16
ORPHAN_AGE = timedelta(days=1)
"""How long a blob may be without an owner: it is uploaded before the document that names it is written."""
_DIGEST = re.compile(rb"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")

_CACHES = "/index/"
"""Documents that only repeat what others say."""


def orphans(artifacts: ArtifactStore, blobs: Iterable[ListedObject]) -> list[ListedObject]:
    """Return those of the blobs that nothing has named for `ORPHAN_AGE`."""
    before = datetime.now(UTC) - ORPHAN_AGE
    old = [entry for entry in blobs if entry.modified < before]
    if not old:
        return []
    named = {blob_key(digest) for digest in owned(artifacts, documents(artifacts))}
    return [entry for entry in old if entry.key not in named]


def collect(artifacts: ArtifactStore, *, dry_run: bool = False) -> list[ListedObject]:
    """Delete the blobs that nothing names, and return them; with `dry_run` nothing is deleted.

    What was submitted while the documents were read is looked at once more. A submission that finds an old blob in the
    moment in which it is deleted gets attempts of the kind `storage`; submitted again, it brings the blob again.
    """
    seen = set(documents(artifacts))
    found = orphans(artifacts, artifacts.list_entries(BLOBS))
    if dry_run or not found:
        return found
    since = {blob_key(digest) for digest in owned(artifacts, set(documents(artifacts)) - seen)}
    garbage = [entry for entry in found if entry.key not in since]
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda entry: artifacts.delete_object(entry.key), garbage))
    return garbage


def documents(artifacts: ArtifactStore) -> list[str]:
    """Return the keys of all documents that can own a blob."""
    prefixes = ("ns/", "config/")
    return [key for prefix in prefixes for key in artifacts.list_objects(prefix) if _CACHES not in key]


def owned(artifacts: ArtifactStore, keys: Iterable[str]) -> set[str]:
    """Return every SHA-256 that these documents mention anywhere, and those that snapshots of refs among them mention.

    Whatever looks like a digest counts: a blob that is kept for nothing costs little, one that is deleted wrongly costs
    an artifact.
    """

    def mentioned(key: str) -> set[str]:
        found = artifacts.get_object(key)
        digests = _digests(found.data) if found else set()
        if "/refs/" in key:
            digests |= {digest for snapshot in digests for digest in _in_snapshot(artifacts, snapshot)}
        return digests

    with ThreadPoolExecutor(THREADS) as pool:
        return set().union(*pool.map(mentioned, keys))


def _in_snapshot(artifacts: ArtifactStore, digest: str) -> set[str]:
    try:
        return _digests(artifacts.read_blob(digest, SNAPSHOT_LIMIT))
    except ArtifactGone:
        return set()


def _digests(data: bytes) -> set[str]:
    return {found.decode() for found in _DIGEST.findall(data)}

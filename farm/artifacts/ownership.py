"""Which blobs are needed: those that a document or a ref's snapshot names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta

from typing_extensions import TypedDict

from farm.artifacts.refs import SNAPSHOT_LIMIT
from farm.artifacts.storage import BLOBS, ArtifactStore, ListedObject, at_once, blob_key, build_key, builds_prefix
from farm.errors import ArtifactGone

ORPHAN_AGE = timedelta(days=1)
"""How long a blob may have no owner: it is uploaded before the document that names it is written."""
GRACE = timedelta(days=1)
"""How long a blob stays marked before it is deleted."""
MARKS = "gc/"
"""Prefix of the marks: an object for each blob that is deleted after `GRACE` unless it is named or uploaded again."""
_DIGEST = re.compile(rb"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")

_CACHES = re.compile(r"ns/[^/]+/(extracts|index|statements)/")
"""Documents that only repeat what other documents say."""


def orphans(artifacts: ArtifactStore, blobs: Iterable[ListedObject]) -> list[ListedObject]:
    """Return the blobs that nothing has named for `ORPHAN_AGE`."""
    before = datetime.now(UTC) - ORPHAN_AGE
    old = [entry for entry in blobs if entry.modified < before]
    named = {blob_key(digest) for digest in owned(artifacts, documents(artifacts))}
    return [entry for entry in old if entry.key not in named]


class Collected(TypedDict):
    """Blobs that nothing named and that were deleted (or would be marked), and how many are marked and go later."""

    blobs: int
    bytes: int
    marked: int


def collect(artifacts: ArtifactStore, *, plans_kept: timedelta, dry_run: bool = False) -> Collected:
    """Mark the blobs that nothing names, and delete those that have been marked for `GRACE`.

    First deletes the plans of builds that were reported more than `plans_kept` ago, so that they no longer keep models.
    Documents that may be new since the first read are read again, and a blob that was uploaded since its mark stays:
    before a document names an old blob, its writer calls `lacking`. With `dry_run` nothing changes; blobs that would be
    marked count as deleted.
    """
    if not dry_run:
        _forget_plans(artifacts, datetime.now(UTC) - plans_kept)
    seen = set(documents(artifacts))
    found = orphans(artifacts, artifacts.list_entries(BLOBS))
    if dry_run:
        return _counted(found, marked=0)
    before = datetime.now(UTC) - GRACE
    marks = _mark(artifacts, found)
    ripe = [entry for entry in found if (mark := marks.get(_mark_key(entry))) and mark.modified <= before]
    if not ripe:
        return _counted([], marked=len(found))
    again = {blob_key(digest) for digest in owned(artifacts, _since(artifacts, seen))}

    def remove(entry: ListedObject) -> bool:
        gone = entry.key not in again and _is_doomed(artifacts, entry.key)
        if gone:
            artifacts.delete_object(entry.key)
        artifacts.delete_object(_mark_key(entry))
        return gone

    deleted = [entry for entry, gone in zip(ripe, at_once(remove, ripe), strict=True) if gone]
    return _counted(deleted, marked=len(found) - len(ripe))


def _counted(deleted: Sequence[ListedObject], *, marked: int) -> Collected:
    return {"blobs": len(deleted), "bytes": sum(entry.size for entry in deleted), "marked": marked}


def lacking(artifacts: ArtifactStore, wanted: Mapping[str, int]) -> list[str]:
    """Return which blobs (digest: size) have to be uploaded before a document may name them.

    These are the missing ones, and those that the garbage collection marked and nobody uploaded since.
    """

    def lacks(digest: str) -> bool:
        return not artifacts.has_blob(digest, wanted[digest]) or _is_doomed(artifacts, blob_key(digest))

    return [digest for digest, lack in zip(wanted, at_once(lacks, wanted), strict=True) if lack]


def _mark(artifacts: ArtifactStore, found: Iterable[ListedObject]) -> dict[str, ListedObject]:
    """Mark these blobs, remove other marks, and return all marks by their keys."""
    doomed = {_mark_key(entry): entry for entry in found}
    there = {mark.key: mark for mark in artifacts.list_entries(MARKS)}
    new = [key for key, entry in doomed.items() if key not in there or there[key].modified <= entry.modified]
    at_once(artifacts.delete_object, there.keys() - doomed.keys())
    at_once(lambda key: artifacts.put_object(key, b"{}"), new)
    return {mark.key: mark for mark in artifacts.list_entries(MARKS)}


def _mark_key(entry: ListedObject) -> str:
    return MARKS + entry.key.rpartition("/")[2]


def _is_doomed(artifacts: ArtifactStore, key: str) -> bool:
    """Whether a blob is marked, and was not uploaded since: some servers report times in whole seconds."""
    mark = next(artifacts.list_entries(MARKS + key.rpartition("/")[2]), None)
    blob = next(artifacts.list_entries(key), None) if mark else None
    return mark is not None and blob is not None and blob.modified < mark.modified


def _since(artifacts: ArtifactStore, seen: set[str]) -> list[str]:
    """Return the documents that may name more than at the first read: new ones, refs, heads, plans of open builds."""
    now = documents(artifacts)
    opened = [key.split("/") for key in now if "/open/" in key]
    plans = {build_key(parts[1], parts[-1], "plan.json") for parts in opened}
    return [key for key in now if key not in seen or key in plans or "/refs/" in key or key.endswith("/head.json")]


def _forget_plans(artifacts: ArtifactStore, before: datetime) -> None:
    """Delete the plans of builds that were reported before a time: their reports stay."""
    plans, old = set[str](), set[str]()
    for namespace in artifacts.list_folders("ns/"):
        for entry in artifacts.list_entries(builds_prefix(namespace)):
            folder, _, name = entry.key.rpartition("/")
            if name == "plan.json":
                plans.add(folder)
            elif name == "report.json" and entry.modified < before:
                old.add(folder)
    at_once(lambda folder: artifacts.delete_object(f"{folder}/plan.json"), plans & old)


def documents(artifacts: ArtifactStore) -> list[str]:
    """Return the keys of all documents that can own a blob."""
    prefixes = ("ns/", "config/")
    return [key for prefix in prefixes for key in artifacts.list_objects(prefix) if not _CACHES.match(key)]


def owned(artifacts: ArtifactStore, keys: Iterable[str]) -> set[str]:
    """Return every SHA-256 in these documents, and in the snapshots of refs among them.

    Everything that looks like a digest counts: a blob that is kept for nothing costs little, a wrong deletion costs an
    artifact.
    """

    def mentioned(key: str) -> set[str]:
        found = artifacts.get_object(key)
        digests = _digests(found.data) if found else set()
        if "/refs/" in key:
            digests |= {digest for snapshot in digests for digest in _in_snapshot(artifacts, snapshot)}
        return digests

    return set().union(*at_once(mentioned, keys))


def _in_snapshot(artifacts: ArtifactStore, digest: str) -> set[str]:
    try:
        return _digests(artifacts.read_blob(digest, SNAPSHOT_LIMIT))
    except ArtifactGone:
        return set()


def _digests(data: bytes) -> set[str]:
    return {found.decode() for found in _DIGEST.findall(data)}

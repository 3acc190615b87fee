"""Inventory: which artifacts of a namespace are complete, and which blobs documents and refs need."""

from __future__ import annotations

import gzip
import io
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

from typing_extensions import TypedDict

from farm.artifacts import sidecar as sidecars
from farm.artifacts import storage
from farm.artifacts.refs import SNAPSHOT_LIMIT
from farm.errors import ArtifactGone
from farm.jobs.facts import ArtifactFacts
from farm.logging import get_logger

if TYPE_CHECKING:
    from farm.artifacts.s3 import S3Store

log = get_logger(__name__)

SCHEMA = 2
FEW = 500  # Up to this number of blobs, asking for each is faster than listing all.


class Known(NamedTuple):
    """The checkpoint's entry for one readable sidecar: its facts, and the blobs that it needs."""

    etag: str
    facts: ArtifactFacts
    blobs: list[tuple[str, int]]


def rebuild(artifacts: S3Store, namespace: str, requests: int = storage.AT_ONCE) -> Iterator[tuple[str, ArtifactFacts]]:
    """Yield key and facts of every complete artifact of a namespace, and update its checkpoint.

    It sends so many requests at once: with many, whatever else this process does has to wait for its turn.
    """
    prefix = storage.artifacts_prefix(namespace)
    listed = {entry.key: entry.etag for entry in artifacts.list_entries(prefix)}
    checkpoint = _read_checkpoint(artifacts, namespace)
    known = {key: found for key, found in checkpoint.items() if listed.get(key) == found.etag}
    changed = [key for key in listed if key not in known]
    read = storage.at_once(lambda key: _read(artifacts, key), changed, requests)
    known |= {key: found for key, found in zip(changed, read, strict=True) if found}
    if known != checkpoint:
        text = json.dumps({"schema": SCHEMA, "sidecars": known}).encode()
        packed = gzip.compress(text, compresslevel=1)
        artifacts.put_object(_checkpoint_key(namespace), packed, content_type="application/gzip")
    sizes = _blob_sizes(artifacts, {blob for found in known.values() for blob in found.blobs}, requests)
    whole = [found for found in known.values() if all(sizes.get(digest) == size for digest, size in found.blobs)]
    log.info("artifacts indexed", namespace=namespace, sidecars=len(listed), read=len(changed), whole=len(whole))
    for found in whole:
        yield found.facts["key"], found.facts


def without_program(artifacts: S3Store, found: Mapping[str, ArtifactFacts]) -> list[str]:
    """Return the names of the artifacts (name: facts) whose program is gone, or has another size."""
    programs = {name: (facts["program"]["digest"], facts["program"]["size"]) for name, facts in found.items()}
    sizes = _blob_sizes(artifacts, set(programs.values()))
    return [name for name, (digest, size) in programs.items() if sizes.get(digest) != size]


def _read(artifacts: S3Store, key: str) -> Known | None:
    found = artifacts.get_object(key)
    if found is None:
        return None
    try:
        sidecar = sidecars.read(found.data)
    except ValueError:
        log.warning("sidecar unreadable", key=key)
        return None
    facts = sidecars.facts(sidecar)
    if facts["sidecar"] != key:
        log.warning("sidecar misplaced", key=key)
        return None
    return Known(found.etag, facts, [(blob["digest"], blob["size"]) for blob in sidecars.required(sidecar["blobs"])])


def _blob_sizes(
    artifacts: S3Store, wanted: Collection[tuple[str, int]], requests: int = storage.AT_ONCE
) -> dict[str, int]:
    if len(wanted) <= FEW:
        there = storage.at_once(lambda blob: artifacts.has_blob(*blob), wanted, requests)
        return {digest: size for (digest, size), is_there in zip(wanted, there, strict=True) if is_there}
    folders = Counter(digest[:2] for digest, _ in wanted)
    listings = storage.at_once(
        lambda folder: list(artifacts.list_entries(f"{storage.BLOBS}{folder}/")), folders, requests
    )
    return {entry.key.rpartition("/")[2]: entry.size for listing in listings for entry in listing}


LARGEST_CHECKPOINT = 1 << 30  # Most bytes of an unpacked checkpoint; in place of a larger one all sidecars are read.


def _checkpoint_key(namespace: str) -> str:
    return f"ns/{namespace}/index/checkpoint.json.gz"


def _read_checkpoint(artifacts: S3Store, namespace: str) -> dict[str, Known]:
    found = artifacts.get_object(_checkpoint_key(namespace))
    if found is None:
        return {}
    try:
        with gzip.open(io.BytesIO(found.data)) as unpacked:
            text = unpacked.read(LARGEST_CHECKPOINT)
        if len(text) == LARGEST_CHECKPOINT:
            raise ValueError(f"{LARGEST_CHECKPOINT} bytes or more when unpacked")
        document = json.loads(text)
        if document["schema"] != SCHEMA:
            return {}
        return {
            key: Known(etag, facts, [(digest, size) for digest, size in blobs])
            for key, (etag, facts, blobs) in document["sidecars"].items()
        }
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        log.warning("checkpoint unreadable", namespace=namespace, error=repr(error))
        return {}


ORPHAN_AGE = timedelta(days=1)  # How long a blob may have no owner: it is uploaded before the document that names it.
GRACE = timedelta(days=1)  # How long a blob stays marked before it is deleted.
MARKS = "gc/"  # Prefix of the marks: one for each blob that goes after `GRACE` unless it is named or uploaded again.
_DIGEST = re.compile(rb"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")

_CACHES = re.compile(r"ns/[^/]+/(extracts|index|statements)/")  # Documents that only repeat what other documents say.


def orphans(artifacts: S3Store, blobs: Iterable[storage.ListedObject]) -> list[storage.ListedObject]:
    """Return the blobs that nothing has named for `ORPHAN_AGE`."""
    before = datetime.now(UTC) - ORPHAN_AGE
    old = [entry for entry in blobs if entry.modified < before]
    named = {storage.blob_key(digest) for digest in owned(artifacts, documents(artifacts))}
    return [entry for entry in old if entry.key not in named]


class Collected(TypedDict):
    """Blobs that nothing named and that were deleted (or would be marked), and how many are marked and go later."""

    blobs: int
    bytes: int
    marked: int


def collect(artifacts: S3Store, *, plans_kept: timedelta, dry_run: bool = False) -> Collected:
    """Mark the blobs that nothing names, and delete those that have been marked for `GRACE`.

    First deletes the plans of builds that were reported more than `plans_kept` ago, so that they no longer keep models.
    Documents that may be new since the first read are read again, and a blob that was uploaded since its mark stays:
    before a document names an old blob, its writer calls `lacking`. With `dry_run` nothing changes; blobs that would be
    marked count as deleted.
    """
    if not dry_run:
        _forget_plans(artifacts, datetime.now(UTC) - plans_kept)
    seen = set(documents(artifacts))
    found = orphans(artifacts, artifacts.list_entries(storage.BLOBS))
    if dry_run:
        return _counted(found, marked=0)
    before = datetime.now(UTC) - GRACE
    marks = _mark(artifacts, found)
    ripe = [entry for entry in found if (mark := marks.get(_mark_key(entry))) and mark.modified <= before]
    if not ripe:
        return _counted([], marked=len(found))
    again = {storage.blob_key(digest) for digest in owned(artifacts, _since(artifacts, seen))}

    def remove(entry: storage.ListedObject) -> bool:
        gone = entry.key not in again and _is_doomed(artifacts, entry.key.rpartition("/")[2])
        if gone:
            artifacts.delete_object(entry.key)
        artifacts.delete_object(_mark_key(entry))
        return gone

    deleted = [entry for entry, gone in zip(ripe, storage.at_once(remove, ripe), strict=True) if gone]
    return _counted(deleted, marked=len(found) - len(ripe))


def _counted(deleted: Sequence[storage.ListedObject], *, marked: int) -> Collected:
    return {"blobs": len(deleted), "bytes": sum(entry.size for entry in deleted), "marked": marked}


def lacking(artifacts: S3Store, wanted: Mapping[str, int]) -> list[str]:
    """Return which blobs (digest: size) have to be uploaded before a document may name them.

    These are the missing ones, and those that the garbage collection marked and nobody uploaded since.
    """

    def lacks(digest: str) -> bool:
        return not artifacts.has_blob(digest, wanted[digest]) or _is_doomed(artifacts, digest)

    return [digest for digest, lack in zip(wanted, storage.at_once(lacks, wanted), strict=True) if lack]


def _mark(artifacts: S3Store, found: Iterable[storage.ListedObject]) -> dict[str, storage.ListedObject]:
    """Mark these blobs, remove other marks, and return all marks by their keys."""
    doomed = {_mark_key(entry): entry for entry in found}
    there = {mark.key: mark for mark in artifacts.list_entries(MARKS)}
    new = [key for key, entry in doomed.items() if key not in there or there[key].modified <= entry.modified]
    storage.at_once(artifacts.delete_object, there.keys() - doomed.keys())
    storage.at_once(lambda key: artifacts.put_object(key, b"{}"), new)
    return {mark.key: mark for mark in artifacts.list_entries(MARKS)}


def _mark_key(entry: storage.ListedObject) -> str:
    return MARKS + entry.key.rpartition("/")[2]


def _is_doomed(artifacts: S3Store, digest: str) -> bool:
    """Whether a blob is marked, and was not uploaded since: some servers report times in whole seconds."""
    mark = next(artifacts.list_entries(MARKS + digest), None)
    blob = next(artifacts.list_entries(storage.blob_key(digest)), None) if mark else None
    return mark is not None and blob is not None and blob.modified < mark.modified


def _since(artifacts: S3Store, seen: set[str]) -> list[str]:
    """Return the documents that may name more than at the first read: new ones, refs, heads, plans of open builds."""
    now = documents(artifacts)
    opened = [key.split("/") for key in now if "/open/" in key]
    plans = {storage.build_key(parts[1], parts[-1], "plan.json") for parts in opened}
    return [key for key in now if key not in seen or key in plans or "/refs/" in key or key.endswith("/head.json")]


def _forget_plans(artifacts: S3Store, before: datetime) -> None:
    """Delete the plans of builds that were reported before a time: their reports stay."""
    plans, old = set[str](), set[str]()
    for namespace in artifacts.list_folders("ns/"):
        for entry in artifacts.list_entries(storage.builds_prefix(namespace)):
            folder, _, name = entry.key.rpartition("/")
            if name == "plan.json":
                plans.add(folder)
            elif name == "report.json" and entry.modified < before:
                old.add(folder)
    storage.at_once(lambda folder: artifacts.delete_object(f"{folder}/plan.json"), plans & old)


def documents(artifacts: S3Store) -> list[str]:
    """Return the keys of all documents that can own a blob."""
    prefixes = ("ns/", "config/")
    return [key for prefix in prefixes for key in artifacts.list_objects(prefix) if not _CACHES.match(key)]


def owned(artifacts: S3Store, keys: Iterable[str]) -> set[str]:
    """Return every SHA-256 in these documents, and in the snapshots of refs among them.

    Everything that looks like a digest counts: a blob that is kept for nothing costs little, a wrong deletion costs an
    artifact.
    """

    def mentioned(key: str) -> set[str]:
        found = artifacts.get_object(key)
        digests = _digests(found.data) if found else set()
        for snapshot in [*digests] if "/refs/" in key else ():
            with suppress(ArtifactGone):
                digests |= _digests(artifacts.read_blob(snapshot, SNAPSHOT_LIMIT))
        return digests

    return set().union(*storage.at_once(mentioned, keys))


def _digests(data: bytes) -> set[str]:
    return {found.decode() for found in _DIGEST.findall(data)}

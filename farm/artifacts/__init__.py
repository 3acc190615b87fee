"""Artifacts: what the farm keeps in object storage, and the few verbs it uses for that.

Two kinds of things: *blobs*, bytes named by their SHA-256 that anyone may write again, and *documents*, small
JSON under readable names that are created or replaced under conditions. An artifact is a document (the
sidecar) that leads to its blobs; `docs/object-storage.md` describes the layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Protocol

MAIN = "main"
"""The namespace of trusted submitters; every other one reads through to it and can never write there."""

BLOBS = "blobs/sha256/"
"""Prefix of all blobs."""

UPLOADS = "uploads/"
"""Prefix of large uploads that are not yet hashed into blobs."""

QUARANTINE = "quarantine/sha256/"
"""Prefix under which blobs are kept whose bytes did not match their name."""


def blob_key(digest: str) -> str:
    """Object key of a blob. Raises ValueError for anything but 64 lower-case hex digits."""
    if len(digest) != 64 or set(digest) - set("0123456789abcdef"):
        raise ValueError(f"{digest!r} is not a SHA-256 in hex")
    return f"{BLOBS}{digest[:2]}/{digest}"


def upload_key(namespace: str, digest: str) -> str:
    """Object key under which the parts of a large blob are put together, until its bytes are known to be right."""
    return f"{UPLOADS}{namespace}/{digest}"


def readable(namespace: str) -> list[str]:
    """Namespaces whose artifacts a namespace may use, in the order in which they are asked."""
    return [MAIN] if namespace == MAIN else [MAIN, namespace]


def artifacts_prefix(namespace: str) -> str:
    """Prefix of all sidecars of a namespace."""
    return f"ns/{namespace}/artifacts/"


def sidecar_key(namespace: str, key: str) -> str:
    """Object key of the sidecar of a cache key in a namespace."""
    return f"{artifacts_prefix(namespace)}{key[:2]}/{key}.json"


def reference_key(namespace: str, recipe: str) -> str:
    """Object key of the record that leads to reference outputs, by the digest of how they are made."""
    return f"ns/{namespace}/references/{recipe[:2]}/{recipe}.json"


@dataclass(frozen=True, slots=True)
class Object:
    """A document as it was read: `etag` is what a later put or delete may be made conditional on."""

    key: str
    data: bytes
    etag: str


@dataclass(frozen=True, slots=True)
class ListedObject:
    """One line of a listing. `size` in bytes."""

    key: str
    size: int
    etag: str
    modified: datetime


@dataclass(frozen=True, slots=True)
class Artifact:
    """A whole artifact: a readable sidecar whose blobs are all there, in the right size."""

    namespace: str
    key: str
    sidecar: Mapping[str, Any]
    etag: str


@dataclass(frozen=True, slots=True)
class Published:
    """What publishing came to. `adopted`: another attempt was first, and `sidecar` is its."""

    sidecar: Mapping[str, Any]
    adopted: bool


@dataclass(frozen=True, slots=True)
class PresignedPut:
    """A permission to upload `size` bytes of a blob from `start` on: a PUT to `url` with exactly these headers."""

    url: str
    headers: Mapping[str, str]
    start: int
    size: int


class ArtifactStore(Protocol):
    """Where artifacts are kept. Safe to use from several threads.

    Every verb raises StorageUnavailable when the storage cannot be reached or refuses; what else it raises is
    said.
    """

    def put_blob_file(self, path: Path, *, digest: str | None = None) -> tuple[str, int]:
        """Upload a file as a blob and return its digest and size.

        What was there under that name is overwritten: its bytes may be wrong. Ask `has_blob` first to save
        the way. Raises UsageError when the file does not have the `digest` that was promised, or changes
        meanwhile.
        """

    def put_blob_bytes(self, data: bytes) -> tuple[str, int]:
        """Upload bytes as a blob and return their digest and size."""

    def has_blob(self, digest: str, size: int | None = None) -> bool:
        """Say whether a blob is there, in the right size where one is given. Its bytes are not read."""

    def verify_blob(self, digest: str, size: int | None = None) -> bool:
        """Read a blob and say whether it is what its name says; put a damaged one into quarantine."""

    def get_blob(self, digest: str, path: Path, size: int | None = None) -> None:
        """Download a blob to `path`: checked against its digest, and there as a whole or not at all.

        Raises ArtifactGone when it is missing or damaged (which also puts it into quarantine).
        """

    def read_blob(self, digest: str, limit: int) -> bytes:
        """Return a blob's bytes, checked.

        Raises ArtifactGone, UsageError for a blob of more than `limit` bytes.
        """

    def publish(self, namespace: str, sidecar: Mapping[str, Any]) -> Published:
        """Commit an artifact whose blobs are uploaded: create its sidecar, or adopt the one that was first.

        A broken one in its place (unreadable, or its blobs missing) is replaced.
        Raises UsageError when this sidecar is not valid or its own blobs are not there.
        """

    def lookup(self, namespaces: Sequence[str], key: str) -> Artifact | None:
        """Return the first whole artifact of a cache key, asking the namespaces in order."""

    def put_object(
        self,
        key: str,
        data: bytes,
        *,
        create: bool = False,
        if_match: str = "",
        content_type: str = "application/json",
    ) -> str:
        """Write a document and return its ETag.

        `create`: only where there is none. `if_match`: only over the document with that ETag. Raises Conflict
        when the condition does not hold; a repetition that finds its own bytes already there has succeeded.
        """

    def get_object(self, key: str) -> Object | None:
        """Read a document; None where there is none."""

    def delete_object(self, key: str, *, if_match: str = "") -> None:
        """Delete an object if it is there. Raises Conflict when it does not have the ETag `if_match`."""

    def list_objects(self, prefix: str) -> Iterator[str]:
        """Yield the keys of all objects under a prefix, in order."""

    def list_entries(self, prefix: str) -> Iterator[ListedObject]:
        """Yield all objects under a prefix with size, ETag and time, in order of their keys."""

    def list_folders(self, prefix: str) -> list[str]:
        """Return the names right under a prefix with something below them: `ns/` gives the namespaces.

        Some servers also name folders that were emptied.
        """

    def source_version(self, bucket: str, key: str) -> str:
        """Return the ETag of an object in another bucket. Raises UsageError where it is not, or may not be read."""

    def get_source(self, bucket: str, key: str, version: str, path: Path, *, limit: int) -> None:
        """Download an object of another bucket, as it was in `version`, of at most `limit` bytes. Raises UsageError."""

    def presign_get(self, key: str, *, filename: str = "", seconds: int = 3600) -> str:
        """Return a URL from which anyone may download an object for a while, as a file named `filename`."""

    def presign_put(self, digest: str, size: int, *, seconds: int = 3600) -> PresignedPut:
        """Return a permission to upload one blob: the signature covers its SHA-256 and size."""

    def begin_upload(self, namespace: str, digest: str, size: int, *, seconds: int = 43_200) -> list[PresignedPut]:
        """Return permissions to upload a large blob in parts: those parts that an earlier try has not brought yet.

        Nothing signs the bytes of a part: the blob is there once `finish_upload` has hashed the whole.
        """

    def finish_upload(self, namespace: str, digest: str, size: int) -> None:
        """Put a large blob's parts together, hash them, and make them the blob. Repeating it is harmless.

        Raises UsageError where parts are missing, or the bytes are not those of the digest (which are deleted).
        """

    def abort_uploads(self, older_than: timedelta) -> int:
        """End large uploads that were begun longer ago and never became blobs; return how many."""

    def check(self) -> None:
        """Refuse a server that would lose work. Leaves nothing behind.

        Raises StorageUnavailable with the reason: it cannot be reached, or it ignores conditions.
        """

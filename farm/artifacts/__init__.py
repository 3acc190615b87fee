"""Artifacts: what the farm keeps in object storage, and the few verbs it uses for that.

Two kinds of things: *blobs*, bytes named by their SHA-256 that anyone may write again, and *documents*, small
JSON under readable names that are created or replaced under conditions. An artifact is a document (the
sidecar) that leads to its blobs; `docs/object-storage.md` describes the layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
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
    """What a room needs of a store to keep documents and small blobs in it; `S3Store` says what each verb promises."""

    def put_blob_bytes(self, data: bytes) -> tuple[str, int]:
        """Upload bytes as a blob."""

    def has_blob(self, digest: str, size: int | None = None) -> bool:
        """Say whether a blob is there."""

    def read_blob(self, digest: str, limit: int) -> bytes:
        """Return a blob's bytes."""

    def put_object(
        self,
        key: str,
        data: bytes,
        *,
        create: bool = False,
        if_match: str = "",
        content_type: str = "application/json",
    ) -> str:
        """Write a document."""

    def get_object(self, key: str) -> Object | None:
        """Read a document."""

    def delete_object(self, key: str, *, if_match: str = "") -> None:
        """Delete an object."""

    def list_objects(self, prefix: str) -> Iterator[str]:
        """Yield keys."""

    def list_entries(self, prefix: str) -> Iterator[ListedObject]:
        """Yield objects with size, ETag and time."""

    def list_folders(self, prefix: str) -> list[str]:
        """Return names."""

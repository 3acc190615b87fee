"""Storage: the few verbs by which rooms reach object storage, and what they answer with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol


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

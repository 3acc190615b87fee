"""Storage: the operations on object storage, and their results."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Protocol, TypeVar

from typing_extensions import TypedDict

from farm.errors import Conflict, StorageUnavailable

if TYPE_CHECKING:
    from farm.wire.program import Sidecar


@dataclass(frozen=True, slots=True)
class Object:
    """A document as it was read; a later put or delete may be conditional on its `etag`."""

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
    """A complete artifact: a readable sidecar whose blobs all exist, in the right size."""

    namespace: str
    key: str
    sidecar: Sidecar
    etag: str


@dataclass(frozen=True, slots=True)
class Published:
    """Result of publishing. `adopted`: another attempt was first, and `sidecar` is its sidecar."""

    sidecar: Sidecar
    adopted: bool


@dataclass(frozen=True, slots=True)
class PresignedPut:
    """A permission to upload `size` bytes of a blob from `start` on: a PUT to `url` with exactly these headers."""

    url: str
    headers: Mapping[str, str]
    start: int
    size: int


class Put(TypedDict):
    """A PUT to `url` with `headers` and `size` bytes of a blob from `start` on."""

    url: str
    headers: dict[str, str]
    start: int
    size: int


class Upload(TypedDict):
    """How to send a missing blob: these PUTs, and if `finish` is true a POST to `/v1/blobs/{digest}/finish`."""

    digest: str
    size: int
    puts: list[Put]
    finish: bool


class Missing(TypedDict):
    """The blobs that the farm does not have yet."""

    missing: list[Upload]


Sign = Callable[["ArtifactStore", "Sidecar", bytes], None]
"""Keeps signed statements about a sidecar that is about to be stored as these bytes."""


class SignedSidecar(TypedDict):
    """A sidecar as it is stored, and the bundles about it, each as text."""

    sidecar: str
    statements: list[str]


class ArtifactStore(Protocol):
    """The part of a store that keeps documents and small blobs; `S3Store` documents each method."""

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

    def statements(self, namespaces: Iterable[str], key: str) -> list[bytes]:
        """Return what is signed about the artifacts of a cache key."""

    def delete_object(self, key: str, *, if_match: str = "") -> None:
        """Delete an object."""

    def list_objects(self, prefix: str) -> Iterator[str]:
        """Yield keys."""

    def list_entries(self, prefix: str) -> Iterator[ListedObject]:
        """Yield objects with size, ETag and time."""

    def list_folders(self, prefix: str) -> list[str]:
        """Return names."""


T = TypeVar("T")

MOVES = 64
"""Most tries of a move while other writers move the object: each try lets one of them through."""


def until_moved(key: str, attempt: Callable[[], T | None]) -> T:
    """Return what `attempt` returns. While it returns None, because another writer was faster, call it again.

    Raises StorageUnavailable if others never stop moving the object.
    """
    for turn in range(MOVES):
        if (moved := attempt()) is not None:
            return moved
        time.sleep(random.uniform(0, 0.01 * min(turn + 1, 10)))  # noqa: S311 - lets one of many through
    raise StorageUnavailable(f"{key} was moved by others {MOVES} times while we tried")


def rewrite(
    artifacts: ArtifactStore,
    key: str,
    change: Callable[[Object | None], bytes],
    *,
    content_type: str = "application/json",
) -> None:
    """Replace an object by the bytes that `change` makes of it (None: there is none).

    `change` is called again if another writer was faster. The same bytes are not written again.
    """

    def attempt() -> bool | None:
        there = artifacts.get_object(key)
        data = change(there)
        if there and data == there.data:
            return True
        with suppress(Conflict):
            etag = there.etag if there else ""
            artifacts.put_object(key, data, create=there is None, if_match=etag, content_type=content_type)
            return True
        return None

    until_moved(key, attempt)

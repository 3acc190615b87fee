"""Storage: the operations on object storage, and their results."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, TypeVar

from typing_extensions import TypedDict

from farm.errors import Conflict, StorageUnavailable, UsageError

if TYPE_CHECKING:
    from farm.artifacts.s3 import S3Store
    from farm.wire.program import Sidecar

MAIN = "main"  # The namespace of trusted submitters; every other namespace can read it and never write there.
BLOBS = "blobs/sha256/"  # Prefix of all blobs.

BUILD_IDS = "config/build-ids"  # The farm's key for ids of its own builds; lost, they are submitted once more.
UPLOADS = "uploads/"  # Prefix of large uploads that are not yet hashed into blobs.
QUARANTINE = "quarantine/sha256/"  # Prefix of blobs whose bytes did not match their name.


def blob_key(digest: str) -> str:
    """Object key of a blob. Raises ValueError for anything but 64 lower-case hex digits."""
    if len(digest) != 64 or set(digest) - set("0123456789abcdef"):
        raise ValueError(f"{digest!r} is not a SHA-256 in hex")
    return f"{BLOBS}{digest[:2]}/{digest}"


def upload_key(namespace: str, digest: str) -> str:
    """Object key under which the parts of a large blob are assembled, until its bytes are checked."""
    return f"{UPLOADS}{namespace}/{digest}"


WORKERS_WRITE = frozenset({"artifacts", "references", "statements", "tuning"})
"""Folders of a namespace in which workers may write: `ns/*/artifacts/*`, where `*` may be empty, or contain a `/`."""


def folder_name(name: str) -> str:
    """Return the name of a namespace or a manifest. Raises UsageError for that of a folder in which workers write."""
    if name in WORKERS_WRITE:
        raise UsageError(f"{name} is the name of a folder of the farm in object storage", hint="choose another name")
    return name


def readable(namespace: str) -> list[str]:
    """Namespaces whose artifacts a namespace may use, in order."""
    return [MAIN] if namespace == MAIN else [MAIN, namespace]


def artifacts_prefix(namespace: str) -> str:
    """Prefix of all sidecars of a namespace."""
    return f"ns/{namespace}/artifacts/"


def sidecar_key(namespace: str, key: str) -> str:
    """Object key of the sidecar of a cache key in a namespace."""
    return f"{artifacts_prefix(namespace)}{key[:2]}/{key}.json"


def builds_prefix(namespace: str) -> str:
    """Prefix of what is kept of a namespace's builds."""
    return f"ns/{namespace}/builds/"


def build_key(namespace: str, build_id: str, name: str) -> str:
    """Object key of one document of a build, such as its `plan.json`."""
    return f"{builds_prefix(namespace)}{build_id}/{name}"


def open_prefix(namespace: str) -> str:
    """Prefix of the marks of a namespace's builds that have no report yet."""
    return f"ns/{namespace}/open/"


def open_key(namespace: str, build_id: str) -> str:
    """Object key of the mark of a build that has no report yet."""
    return f"{open_prefix(namespace)}{build_id}"


def statements_key(namespace: str, key: str) -> str:
    """Object key of what is signed about the artifacts of a cache key in a namespace."""
    return f"ns/{namespace}/statements/{key[:2]}/{key}.sigstore.jsonl"


def reference_key(namespace: str, recipe: str) -> str:
    """Object key of the record of reference outputs, by the digest of how they are made."""
    return f"ns/{namespace}/references/{recipe[:2]}/{recipe}.json"


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


class Put(TypedDict):
    """A permission to upload `size` bytes of a blob from `start` on: a PUT to `url` with exactly these headers."""

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


Sign = Callable[["S3Store", "Sidecar", bytes], None]
"""Keeps signed statements about a sidecar that is about to be stored as these bytes."""


class SignedSidecar(TypedDict):
    """A sidecar as it is stored, and the bundles about it, each as text."""

    sidecar: str
    statements: list[str]


A = TypeVar("A")
T = TypeVar("T")

MOVES = 64  # Most tries of a move while other writers move the object: each try lets one of them through.


def until_moved(key: str, attempt: Callable[[], T | None]) -> T:
    """Return what `attempt` returns. While it returns None, because another writer was faster, call it again.

    Raises StorageUnavailable if others never stop moving the object.
    """
    for turn in range(MOVES):
        if (moved := attempt()) is not None:
            return moved
        time.sleep(random.uniform(0, 0.01 * min(turn + 1, 10)))  # noqa: S311 - lets one of many through
    raise StorageUnavailable(f"{key} was moved by others {MOVES} times while we tried")


AT_ONCE = 16  # Requests of one question at once.


def at_once(ask: Callable[[A], T], about: Iterable[A], most: int = AT_ONCE) -> list[T]:
    """Ask storage about many things, `most` at once; return the answers in order. Raises what the first one raises."""
    from concurrent.futures import ThreadPoolExecutor  # Most commands ask for nothing here.

    with ThreadPoolExecutor(most) as threads:
        return list(threads.map(ask, about))


def rewrite(
    artifacts: S3Store, key: str, change: Callable[[Object | None], bytes], *, content_type: str = "application/json"
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

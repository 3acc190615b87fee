"""S3Store: blobs and artifacts in one bucket, on any S3 server that honours conditional writes."""

from __future__ import annotations

import base64
import copy
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from farm.artifacts import (
    BLOBS,
    QUARANTINE,
    Artifact,
    ListedObject,
    Object,
    PresignedPut,
    Published,
    blob_key,
    sidecar_key,
    statements_key,
)
from farm.artifacts import sidecar as sidecars
from farm.artifacts.moves import until_moved
from farm.artifacts.s3_bucket import Body, Bucket, Connection, FinalStatus, SourceBuckets
from farm.artifacts.s3_uploads import LargeUploads
from farm.artifacts.storage import Sign
from farm.errors import ArtifactGone, Conflict, StorageAway, UsageError
from farm.files import replacing
from farm.logging import get_logger
from farm.metrics.instruments import STORAGE_BYTES
from farm.settings import Settings

if TYPE_CHECKING:
    from mypy_boto3_s3.type_defs import CopySourceTypeDef

log = get_logger(__name__)

T = TypeVar("T")

PART = 8 << 20
"""Bytes of one part of a multipart transfer."""

PIECE = 256 << 10
"""Bytes that each thread of a download holds at once."""

THREADS = 4
"""Parts of one transfer that are sent at once; an upload holds this many in memory."""

MAX_PARTS = 10_000
"""S3's bound on the parts of one upload."""

URL_SECONDS = 3600
"""How long a presigned URL for an object is valid."""


class S3Store:
    """The artifact store in one bucket. One per process is enough: it is thread-safe.

    Every method raises StorageUnavailable if the storage cannot be reached or refuses; other errors are documented.
    """

    def __init__(self, **connection: Unpack[Connection]) -> None:
        """Take what `Bucket` takes."""
        self.bucket = Bucket(**connection)

    @classmethod
    def from_settings(cls, settings: Settings) -> S3Store:
        """Return the store that the settings name."""
        return cls(
            bucket=settings.s3_bucket,
            endpoint=settings.s3_endpoint,
            public_endpoint=settings.s3_public_endpoint,
            region=settings.s3_region,
            access_key=settings.s3_access_key.get_secret_value(),
            secret_key=settings.s3_secret_key.get_secret_value(),
        )

    def with_patience(self, seconds: float, wait: Callable[[StorageAway], object] | None = None) -> S3Store:
        """Return the same storage for a caller who repeats requests for so many seconds; as `Bucket.with_patience`."""
        other = copy.copy(self)
        other.bucket = self.bucket.with_patience(seconds, wait)
        return other

    @property
    def uploads(self) -> LargeUploads:
        """Blobs that clients bring in parts."""
        return LargeUploads(self)

    @property
    def sources(self) -> SourceBuckets:
        """Objects of users, in other buckets."""
        return SourceBuckets(self.bucket.s3)

    # --- documents ------------------------------------------------------------------------------------------

    def put_object(
        self,
        key: str,
        data: bytes,
        *,
        create: bool = False,
        if_match: str = "",
        content_type: str = "application/json",
    ) -> str:
        """Write a document and return its ETag; as `Bucket.put`."""
        return self.bucket.put(key, data, create=create, if_match=if_match, content_type=content_type)

    def get_object(self, key: str) -> Object | None:
        """Read a document; None if there is none."""
        return self.bucket.get(key)

    def delete_object(self, key: str, *, if_match: str = "") -> None:
        """Delete an object if it is there. Raises Conflict when it does not have the ETag `if_match`."""
        self.bucket.delete(key, if_match=if_match)

    def list_objects(self, prefix: str) -> Iterator[str]:
        """Yield the keys of all objects under a prefix, in order."""
        return (entry.key for entry in self.list_entries(prefix))

    def list_entries(self, prefix: str) -> Iterator[ListedObject]:
        """Yield all objects under a prefix with size, ETag and time, in order of their keys."""
        return self.bucket.entries(prefix)

    def list_folders(self, prefix: str) -> list[str]:
        """Return the names right under a prefix with something below them; as `Bucket.folders`."""
        return self.bucket.folders(prefix)

    # --- blobs ----------------------------------------------------------------------------------------------

    def put_blob_file(self, path: Path, *, digest: str | None = None) -> tuple[str, int]:
        """Upload a file as a blob and return its digest and size.

        Overwrites an existing blob: its bytes may be wrong. Call `has_blob` first to save the upload.
        Raises UsageError if the file does not have the expected `digest`, or changes meanwhile.
        """
        before = _identity(path)
        size = path.stat().st_size
        if size <= 2 * PART:
            data = path.read_bytes()
            actual, size = hashlib.sha256(data).hexdigest(), len(data)
            _require_digest(path, digest, actual)
            self._put_small_blob(actual, data)
            return actual, size
        with path.open("rb") as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
        _require_digest(path, digest, actual)
        self._put_large_blob(actual, path, size)
        if _identity(path) != before:
            # The uploaded bytes may be neither the old nor the new content; they must not stay under this name.
            self.verify_blob(actual, size)
            raise UsageError(f"{path} changed while it was uploaded")
        return actual, size

    def put_blob_bytes(self, data: bytes) -> tuple[str, int]:
        """Upload bytes as a blob and return their digest and size."""
        digest = hashlib.sha256(data).hexdigest()
        self._put_small_blob(digest, data)
        return digest, len(data)

    def _put_small_blob(self, digest: str, data: bytes) -> None:
        key = blob_key(digest)
        checksum = _base64(digest)
        self.bucket.ask(
            "write",
            key,
            lambda: self.bucket.s3.put_object(Bucket=self.bucket.name, Key=key, Body=data, ChecksumSHA256=checksum),
        )
        STORAGE_BYTES.labels("written").inc(len(data))

    def _put_large_blob(self, digest: str, path: Path, size: int) -> None:
        # Not with boto3's own transfers: they do not repeat for long enough, nor handle a lost last answer.
        key = blob_key(digest)
        part_size = max(PART, -(-size // MAX_PARTS))
        upload = self.bucket.ask(
            "write", key, lambda: self.bucket.s3.create_multipart_upload(Bucket=self.bucket.name, Key=key)
        )["UploadId"]
        try:
            with path.open("rb") as file, ThreadPoolExecutor(THREADS) as pool:

                def put_part(number: int) -> str:
                    data = os.pread(file.fileno(), part_size, (number - 1) * part_size)
                    STORAGE_BYTES.labels("written").inc(len(data))
                    return self.bucket.ask(
                        "write",
                        key,
                        lambda: self.bucket.s3.upload_part(
                            Bucket=self.bucket.name, Key=key, UploadId=upload, PartNumber=number, Body=data
                        ),
                    )["ETag"]

                tags = list(pool.map(put_part, range(1, -(-size // part_size) + 1)))
            parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, 1)]
            self.bucket.complete(key, upload, parts, lambda: self.has_blob(digest, size))
        except BaseException:
            self.bucket.give_up(key, upload)
            raise

    def has_blob(self, digest: str, size: int | None = None) -> bool:
        """Return whether a blob exists, in the right size if one is given. Does not read its bytes."""
        found = self.bucket.head(blob_key(digest))
        return found is not None and (size is None or found.size == size)

    def verify_blob(self, digest: str, size: int | None = None) -> bool:
        """Read a blob and return whether its bytes match its name; put a damaged one into quarantine."""

        with suppress(ArtifactGone):
            self._read_checked(digest, size, self.hash_of)
            return True
        return False

    def hash_of(self, entry: ListedObject) -> str:
        """Read an object and return the SHA-256 of its bytes."""
        sha256 = hashlib.sha256()
        for start in range(0, entry.size, PART):
            sha256.update(self._read_part(entry, start, _all))
        return sha256.hexdigest()

    def get_blob(self, digest: str, path: Path, size: int | None = None) -> None:
        """Download a blob to `path`, checked against its digest; the file is complete or missing.

        Raises ArtifactGone when it is missing or damaged (which also puts it into quarantine).
        """
        with replacing(path) as part, part.open("w+b") as file:
            self._read_checked(digest, size, lambda entry: self._download(entry, file.fileno()))

    def read_blob(self, digest: str, limit: int) -> bytes:
        """Return a blob's bytes, checked.

        Raises ArtifactGone, UsageError for a blob of more than `limit` bytes.
        """
        data = b""

        def read(entry: ListedObject) -> str:
            nonlocal data
            if entry.size > limit:
                raise UsageError(f"blob {digest} has {entry.size} bytes, more than the {limit} allowed here")
            data = b"".join(self._read_part(entry, start, _all) for start in range(0, entry.size, PART))
            return hashlib.sha256(data).hexdigest()

        self._read_checked(digest, None, read)
        return data

    def _read_checked(self, digest: str, size: int | None, read: Callable[[ListedObject], str]) -> None:
        """Read a blob by `read`, which returns the SHA-256 of what it got; raise ArtifactGone if it is wrong.

        Bytes can also be damaged in transit, so they are read once more before the blob goes into quarantine.
        """
        key, etag = blob_key(digest), ""
        for _ in range(2):
            found = self.bucket.head(key)
            if found is None:
                raise ArtifactGone(f"there is no {self.bucket.place(key)}", hint="it was deleted, or never uploaded")
            actual, etag = read(found), found.etag
            if actual == digest and size in (None, found.size):
                return
            if actual == digest:
                raise ArtifactGone(f"{self.bucket.place(key)} has {found.size} bytes where {size} were expected")
        self._quarantine(digest, etag)
        raise ArtifactGone(
            f"{self.bucket.place(key)} is damaged: its bytes have the SHA-256 {actual}",
            hint="it is in quarantine now; submit again, and the farm compiles it again",
        )

    def _download(self, entry: ListedObject, file: int) -> str:
        """Fetch an object's parts in parallel into an open file; return its SHA-256.

        Bytes pass through memory in pieces that fit the processor's cache, and are hashed out of the page
        cache: twice as fast as parts held in memory, and no memory to speak of.
        """
        os.ftruncate(file, 0)
        sha256 = hashlib.sha256()
        starts = range(0, entry.size, PART)

        def fetch(start: int) -> int:
            return self._read_part(entry, start, lambda body: _write_at(file, start, body))

        with ThreadPoolExecutor(min(THREADS, max(1, len(starts)))) as pool:
            for start, end in zip(starts, pool.map(fetch, starts), strict=True):
                for position in range(start, end, PIECE):
                    sha256.update(os.pread(file, min(PIECE, end - position), position))
        return sha256.hexdigest()

    def _read_part(self, entry: ListedObject, start: int, take: Callable[[Body], T]) -> T:
        """Let `take` read the part from `start` on; again if the transfer is interrupted."""
        end = min(start + PART, entry.size)

        def read() -> T:
            answer = self.bucket.s3.get_object(
                Bucket=self.bucket.name, Key=entry.key, Range=f"bytes={start}-{end - 1}", IfMatch=entry.etag
            )
            return take(answer["Body"])

        try:
            taken = self.bucket.ask("read", entry.key, read, final={404, 412})
            STORAGE_BYTES.labels("read").inc(end - start)
            return taken
        except FinalStatus as status:
            # Overwritten or deleted since the transfer began: the object cannot be read completely any more.
            raise status.unavailable from None

    def _quarantine(self, digest: str, etag: str) -> None:
        """Move a damaged blob to quarantine, so that lookups miss and the next put restores it."""
        key = blob_key(digest)
        aside = QUARANTINE + key.removeprefix(BLOBS)
        source: CopySourceTypeDef = {"Bucket": self.bucket.name, "Key": key}
        with suppress(Conflict, FinalStatus):  # Somebody else was faster, or uploaded the right bytes meanwhile.
            self.bucket.ask(
                "quarantine", key, lambda: self.bucket.s3.copy(source, self.bucket.name, aside), final={404}
            )
            self.delete_object(key, if_match=etag)
        log.error("blob quarantined", digest=digest, key=aside)

    # --- artifacts ------------------------------------------------------------------------------------------

    def publish(self, namespace: str, sidecar: Mapping[str, Any], *, sign: Sign | None = None) -> Published:
        """Commit an artifact whose blobs are uploaded: create its sidecar, or adopt an existing one.

        Replaces a broken sidecar (unreadable, or with missing blobs). `sign` keeps statements about the new one before
        it is there.
        Raises UsageError if this sidecar is not valid or its own blobs are missing.
        """
        ours = sidecars.validate({**sidecar, "namespace": namespace})
        key = sidecar_key(namespace, ours.key)
        if absent := self._first_absent(ours):
            raise UsageError(
                f"{self.bucket.place(key)} cannot be published: {self.bucket.place(blob_key(absent))} is not there"
            )
        data = sidecars.text(ours)
        document = sidecars.document(ours)
        if sign:
            sign(self, ours, data)

        def attempt() -> Published | None:
            with suppress(Conflict):
                self.put_object(key, data, create=True)
                return Published(document, adopted=False)
            there = self.get_object(key)
            if there is None:  # Retention took it in between.
                return None
            if theirs := self._whole(namespace, ours.key, there):
                return Published(theirs.sidecar, adopted=True)
            with suppress(Conflict):
                self.put_object(key, data, if_match=there.etag)
                log.warning("artifact repaired", key=key)
                return Published(document, adopted=False)
            return None

        return until_moved(self.bucket.place(key), attempt)

    def lookup(self, namespaces: Sequence[str], key: str) -> Artifact | None:
        """Return the first complete artifact of a cache key, in the order of the namespaces."""
        for namespace in namespaces:
            found = self.get_object(sidecar_key(namespace, key))
            if found and (artifact := self._whole(namespace, key, found)):
                return artifact
        return None

    def statements(self, namespaces: Iterable[str], key: str) -> list[bytes]:
        """Return what is signed about the artifacts of a cache key in namespaces: Sigstore bundles, unchecked."""
        found = (self.get_object(statements_key(namespace, key)) for namespace in namespaces)
        return [line for there in found if there for line in there.data.splitlines()]

    def _whole(self, namespace: str, key: str, found: Object) -> Artifact | None:
        """Return the artifact of a sidecar, unless the sidecar is unreadable, misplaced or lacks blobs."""
        try:
            sidecar = sidecars.read(found.data)
        except ValueError:
            log.warning("sidecar unreadable", key=found.key)
            return None
        if (sidecar.namespace, sidecar.key) != (namespace, key) or self._first_absent(sidecar):
            log.warning("artifact broken", key=found.key)
            return None
        return Artifact(namespace, key, sidecars.document(sidecar), found.etag)

    def _first_absent(self, sidecar: sidecars.Sidecar) -> str | None:
        blobs = sidecar.blobs.required()
        with ThreadPoolExecutor(len(blobs)) as pool:
            there = pool.map(lambda blob: self.has_blob(blob.digest, blob.size), blobs)
            return next((blob.digest for blob, is_there in zip(blobs, there, strict=True) if not is_there), None)

    # --- outside access -------------------------------------------------------------------------------------

    def presign_get(self, key: str, *, filename: str = "") -> str:
        """Return a URL from which anyone may download an object for a while, as a file named `filename`."""
        parameters = {"Bucket": self.bucket.name, "Key": key}
        if filename:
            safe = re.sub(r"[^\w.+-]", "_", filename, flags=re.ASCII)
            parameters["ResponseContentDisposition"] = f'attachment; filename="{safe}"'
        return self.bucket.public.generate_presigned_url("get_object", Params=parameters, ExpiresIn=URL_SECONDS)

    def presign_put(self, digest: str, size: int) -> PresignedPut:
        """Return a permission to upload one blob: the signature covers its SHA-256 and size."""
        checksum = _base64(digest)
        url = self.bucket.public.generate_presigned_url(
            "put_object",
            Params={
                "Bucket": self.bucket.name,
                "Key": blob_key(digest),
                "ChecksumSHA256": checksum,
                "ContentLength": size,
            },
            ExpiresIn=URL_SECONDS,
        )
        return PresignedPut(url, {"x-amz-checksum-sha256": checksum, "content-length": str(size)}, 0, size)


def _require_digest(path: Path, digest: str | None, actual: str) -> None:
    if digest and digest != actual:
        raise UsageError(f"{path} has the SHA-256 {actual}, not {digest}")


def _all(body: Body) -> bytes:
    return body.read()


def _write_at(file: int, position: int, body: Body) -> int:
    """Write what comes to a file from `position` on; return where it ended."""
    for piece in body.iter_chunks(PIECE):
        position += os.pwrite(file, piece, position)
    return position


def _base64(digest: str) -> str:
    return base64.b64encode(bytes.fromhex(digest)).decode()


def _identity(path: Path) -> tuple[int, int, int]:
    """What changes when a file's content is replaced or written to."""
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns

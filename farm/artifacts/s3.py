"""S3Store: the artifact store on any S3 server that honours conditional writes. The only module that
knows boto3."""

from __future__ import annotations

import base64
import copy
import hashlib
import os
import random
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, IncompleteReadError
from botocore.exceptions import ConnectionError as NoConnection

from farm.artifacts import (
    BLOBS,
    QUARANTINE,
    UPLOADS,
    Artifact,
    ListedObject,
    Object,
    PresignedPut,
    Published,
    blob_key,
    sidecar_key,
    statements_key,
    upload_key,
)
from farm.artifacts import sidecar as sidecars
from farm.artifacts.moves import until_moved
from farm.artifacts.storage import Sign
from farm.errors import ArtifactGone, Conflict, StorageAway, StorageUnavailable, UsageError
from farm.files import replacing
from farm.logging import get_logger
from farm.metrics.instruments import STORAGE_BYTES, STORAGE_ERRORS, STORAGE_SECONDS, timed
from farm.settings import Settings

if TYPE_CHECKING:
    from botocore.response import StreamingBody
    from mypy_boto3_s3.client import S3Client
    from mypy_boto3_s3.type_defs import (
        CopySourceTypeDef,
        ListObjectsV2OutputTypeDef,
        ListObjectsV2RequestTypeDef,
        MultipartUploadTypeDef,
        PartTypeDef,
    )

log = get_logger(__name__)

T = TypeVar("T")

PART = 8 << 20
"""Bytes of one part of a multipart transfer."""

PIECE = 256 << 10
"""Bytes that each thread of a download holds at once."""

THREADS = 4
"""Parts of one transfer that are sent at once; an upload holds this many in memory."""

CLIENT_PART = 128 << 20
"""Fewest bytes of one part of a client's upload: this much is sent again after an interruption."""

CLIENT_PARTS = 1000
"""Parts of one client's upload at most: each costs a signature, and S3 takes parts of 5 GiB."""

MAX_PARTS = 10_000
"""S3's bound on the parts of one upload."""

URL_SECONDS = 3600
"""How long a presigned URL for an object is valid."""

UPLOAD_SECONDS = 43_200
"""How long URLs for the parts of a large upload are valid: a slow line needs hours."""

HINT = "`farm doctor` checks address, bucket and credentials"

UNREACHABLE_SECONDS = 5.0
"""How long a request is repeated if no connection can be made: somebody may wait for the answer."""

RETRY_STATUS = frozenset({429, 500, 502, 503, 504})
RETRY_CODES = frozenset(
    {"SlowDown", "RequestTimeout", "InternalError", "ConditionalRequestConflict", "OperationAborted"}
)
"""Answers after which the same request may succeed; the last two are a 409 because of another write."""

NO_ANSWER = RETRY_CODES | {"NoSuchBucket"}
"""Codes that say nothing about the object, whatever their status."""


class S3Store:
    """The artifact store in one bucket. One per process is enough: it is thread-safe.

    Every method raises StorageUnavailable if the storage cannot be reached or refuses; other errors are documented.
    """

    def __init__(
        self,
        *,
        bucket: str,
        endpoint: str = "",
        public_endpoint: str = "",
        region: str = "us-east-1",
        access_key: str = "",
        secret_key: str = "",
        patience: float = 30.0,
    ) -> None:
        """Without `endpoint` this is AWS; without keys their usual places are searched.

        `patience` is how many seconds a request is repeated while the storage fails in a way that may pass.
        """
        self._bucket = bucket
        self._endpoint = endpoint or f"AWS {region}"
        self._patience = patience
        self._wait: Callable[[StorageAway], object] = _give_up
        session = boto3.Session(
            aws_access_key_id=access_key or None, aws_secret_access_key=secret_key or None, region_name=region
        )
        config = Config(
            signature_version="s3v4",
            s3={"addressing_style": "path" if endpoint else "auto"},
            # We repeat requests ourselves: bounded by time, and aware of what an unanswered conditional write
            # means.
            retries={"mode": "standard", "total_max_attempts": 1},
            # Every blob is checked against its SHA-256, so a CRC in addition would only cost time.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            max_pool_connections=32,
            connect_timeout=5,
            read_timeout=60,
            tcp_keepalive=True,
        )
        self._s3: S3Client = session.client("s3", endpoint_url=endpoint or None, config=config)
        self._public: S3Client = (
            session.client("s3", endpoint_url=public_endpoint, config=config) if public_endpoint else self._s3
        )

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
        """Return the same storage for a caller who repeats requests for so many seconds while it is away.

        After them `wait` is called, from any thread: the request is repeated when it returns, again and again, and ends
        with what it raises. Without one, StorageAway is raised.
        """
        other = copy.copy(self)
        other._patience, other._wait = seconds, wait or _give_up
        return other

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
            self._require_digest(path, digest, actual)
            self._put_small_blob(actual, data)
            return actual, size
        with path.open("rb") as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
        self._require_digest(path, digest, actual)
        self._put_large_blob(actual, path, size)
        if _identity(path) != before:
            # The uploaded bytes may be neither the old nor the new content; they must not stay under this name.
            self.verify_blob(actual, size)
            raise UsageError(f"{path} changed while it was uploaded")
        return actual, size

    @staticmethod
    def _require_digest(path: Path, digest: str | None, actual: str) -> None:
        if digest and digest != actual:
            raise UsageError(f"{path} has the SHA-256 {actual}, not {digest}")

    def put_blob_bytes(self, data: bytes) -> tuple[str, int]:
        """Upload bytes as a blob and return their digest and size."""
        digest = hashlib.sha256(data).hexdigest()
        self._put_small_blob(digest, data)
        return digest, len(data)

    def _put_small_blob(self, digest: str, data: bytes) -> None:
        key = blob_key(digest)
        checksum = _base64(digest)
        self._ask(
            "write",
            key,
            lambda: self._s3.put_object(Bucket=self._bucket, Key=key, Body=data, ChecksumSHA256=checksum),
        )
        STORAGE_BYTES.labels("written").inc(len(data))

    def _put_large_blob(self, digest: str, path: Path, size: int) -> None:
        # Not with boto3's own transfers: they do not repeat for long enough, nor handle a lost last answer.
        key = blob_key(digest)
        part_size = max(PART, -(-size // MAX_PARTS))
        upload = self._ask("write", key, lambda: self._s3.create_multipart_upload(Bucket=self._bucket, Key=key))[
            "UploadId"
        ]
        try:
            with path.open("rb") as file, ThreadPoolExecutor(THREADS) as pool:

                def put_part(number: int) -> str:
                    data = os.pread(file.fileno(), part_size, (number - 1) * part_size)
                    STORAGE_BYTES.labels("written").inc(len(data))
                    return self._ask(
                        "write",
                        key,
                        lambda: self._s3.upload_part(
                            Bucket=self._bucket, Key=key, UploadId=upload, PartNumber=number, Body=data
                        ),
                    )["ETag"]

                tags = list(pool.map(put_part, range(1, -(-size // part_size) + 1)))
            parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, 1)]
            self._complete(key, upload, parts, lambda: self.has_blob(digest, size))
        except BaseException:
            with suppress(BotoCoreError, ClientError):  # `abort_uploads` ends it later.
                self._s3.abort_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload)
            raise

    def _complete(self, key: str, upload: str, parts: Sequence[Any], done: Callable[[], bool]) -> None:
        try:
            self._ask(
                "write",
                key,
                lambda: self._s3.complete_multipart_upload(
                    Bucket=self._bucket, Key=key, UploadId=upload, MultipartUpload={"Parts": parts}
                ),
                final={404},
            )
        except ClientError as error:
            # The upload is also gone if an earlier try succeeded and only its answer was lost.
            if not done():
                raise self._unavailable("write", key, error) from None

    def has_blob(self, digest: str, size: int | None = None) -> bool:
        """Return whether a blob exists, in the right size if one is given. Does not read its bytes."""
        found = self._head(blob_key(digest))
        return found is not None and (size is None or found.size == size)

    def verify_blob(self, digest: str, size: int | None = None) -> bool:
        """Read a blob and return whether its bytes match its name; put a damaged one into quarantine."""

        with suppress(ArtifactGone):
            self._read_checked(digest, size, self._hash)
            return True
        return False

    def _hash(self, entry: ListedObject) -> str:
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
            found = self._head(key)
            if found is None:
                raise ArtifactGone(f"there is no {self._place(key)}", hint="it was deleted, or never uploaded")
            actual, etag = read(found), found.etag
            if actual == digest and size in (None, found.size):
                return
            if actual == digest:
                raise ArtifactGone(f"{self._place(key)} has {found.size} bytes where {size} were expected")
        self._quarantine(digest, etag)
        raise ArtifactGone(
            f"{self._place(key)} is damaged: its bytes have the SHA-256 {actual}",
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

    def _read_part(self, entry: ListedObject, start: int, take: Callable[[StreamingBody], T]) -> T:
        """Let `take` read the part from `start` on; again if the transfer is interrupted."""
        end = min(start + PART, entry.size)

        def read() -> T:
            answer = self._s3.get_object(
                Bucket=self._bucket, Key=entry.key, Range=f"bytes={start}-{end - 1}", IfMatch=entry.etag
            )
            return take(answer["Body"])

        try:
            taken = self._ask("read", entry.key, read, final={404, 412})
            STORAGE_BYTES.labels("read").inc(end - start)
            return taken
        except ClientError as error:
            # Overwritten or deleted since the transfer began: the object cannot be read completely any more.
            raise self._unavailable("read", entry.key, error) from None

    def _quarantine(self, digest: str, etag: str) -> None:
        """Move a damaged blob to quarantine, so that lookups miss and the next put restores it."""
        key = blob_key(digest)
        aside = QUARANTINE + key.removeprefix(BLOBS)
        source: CopySourceTypeDef = {"Bucket": self._bucket, "Key": key}
        with suppress(Conflict, ClientError):  # Somebody else was faster, or uploaded the right bytes meanwhile.
            self._ask("quarantine", key, lambda: self._s3.copy(source, self._bucket, aside), final={404})
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
            raise UsageError(f"{self._place(key)} cannot be published: {self._place(blob_key(absent))} is not there")
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

        return until_moved(self._place(key), attempt)

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
        """Write a document and return its ETag.

        `create`: only if there is none. `if_match`: only over the document with that ETag. Raises Conflict
        when the condition does not hold; a repetition that finds its own bytes already there has succeeded.
        """
        condition: dict[str, Any] = {"IfNoneMatch": "*"} if create else {"IfMatch": if_match} if if_match else {}
        STORAGE_BYTES.labels("written").inc(len(data))
        with suppress(ClientError):
            return self._ask(
                "write",
                key,
                lambda: self._s3.put_object(
                    Bucket=self._bucket, Key=key, Body=data, ContentType=content_type, **condition
                ),
                final={404, 412} if condition else (),
            )["ETag"]
        # An earlier try may have succeeded, with its answer lost.
        found = self.get_object(key)
        if found and found.data == data:
            return found.etag
        raise Conflict(f"{self._place(key)} exists already" if create else f"{self._place(key)} was changed meanwhile")

    def get_object(self, key: str) -> Object | None:
        """Read a document; None if there is none."""

        def read() -> Object:
            answer = self._s3.get_object(Bucket=self._bucket, Key=key)
            data = answer["Body"].read()
            STORAGE_BYTES.labels("read").inc(len(data))
            return Object(key, data, answer["ETag"])

        return self._unless_absent("read", key, read)

    def delete_object(self, key: str, *, if_match: str = "") -> None:
        """Delete an object if it is there. Raises Conflict when it does not have the ETag `if_match`."""
        condition: dict[str, Any] = {"IfMatch": if_match} if if_match else {}
        with suppress(ClientError):
            self._ask(
                "delete",
                key,
                lambda: self._s3.delete_object(Bucket=self._bucket, Key=key, **condition),
                final={404, 412},
            )
            return
        if self._head(key):
            raise Conflict(f"{self._place(key)} was changed meanwhile")

    def list_objects(self, prefix: str) -> Iterator[str]:
        """Yield the keys of all objects under a prefix, in order."""
        return (entry.key for entry in self.list_entries(prefix))

    def list_entries(self, prefix: str) -> Iterator[ListedObject]:
        """Yield all objects under a prefix with size, ETag and time, in order of their keys."""
        for page in self._pages(prefix, ""):
            for item in page.get("Contents", ()):
                yield ListedObject(item["Key"], item["Size"], item["ETag"], item["LastModified"])

    def list_folders(self, prefix: str) -> list[str]:
        """Return the names right under a prefix with something below them: `ns/` gives the namespaces.

        Some servers also name folders that were emptied.
        """
        folders = (item["Prefix"] for page in self._pages(prefix, "/") for item in page.get("CommonPrefixes", ()))
        return [folder.removeprefix(prefix).removesuffix("/") for folder in folders]

    def _pages(self, prefix: str, delimiter: str) -> Iterator[ListObjectsV2OutputTypeDef]:
        request: ListObjectsV2RequestTypeDef = {
            "Bucket": self._bucket,
            "Prefix": prefix,
            "Delimiter": delimiter,
        }
        # Each page is repeated until it comes: boto3's paginator ends at the first failure.
        while True:
            page = self._ask("list", prefix, partial(self._s3.list_objects_v2, **request))
            yield page
            if not page.get("IsTruncated"):
                return
            request = {**request, "ContinuationToken": page["NextContinuationToken"]}

    # --- other buckets --------------------------------------------------------------------------------------

    def source_version(self, bucket: str, key: str) -> str:
        """Return the ETag of an object in another bucket. Raises UsageError if it is not there, or may not be read."""
        with _reading_source(bucket, key):
            return self._s3.head_object(Bucket=bucket, Key=key)["ETag"]

    def get_source(self, bucket: str, key: str, version: str, path: Path, *, limit: int) -> None:
        """Download an object of another bucket, as it was in `version`, of at most `limit` bytes. Raises UsageError."""
        with _reading_source(bucket, key), path.open("wb") as file:
            found = self._s3.get_object(Bucket=bucket, Key=key, IfMatch=version)
            if found["ContentLength"] > limit:
                raise UsageError(f"s3://{bucket}/{key} has more than {limit} bytes")
            for piece in found["Body"].iter_chunks(1 << 20):
                file.write(piece)

    # --- outside access -------------------------------------------------------------------------------------

    def presign_get(self, key: str, *, filename: str = "") -> str:
        """Return a URL from which anyone may download an object for a while, as a file named `filename`."""
        parameters = {"Bucket": self._bucket, "Key": key}
        if filename:
            safe = re.sub(r"[^\w.+-]", "_", filename, flags=re.ASCII)
            parameters["ResponseContentDisposition"] = f'attachment; filename="{safe}"'
        return self._public.generate_presigned_url("get_object", Params=parameters, ExpiresIn=URL_SECONDS)

    def presign_put(self, digest: str, size: int) -> PresignedPut:
        """Return a permission to upload one blob: the signature covers its SHA-256 and size."""
        checksum = _base64(digest)
        url = self._public.generate_presigned_url(
            "put_object",
            Params={
                "Bucket": self._bucket,
                "Key": blob_key(digest),
                "ChecksumSHA256": checksum,
                "ContentLength": size,
            },
            ExpiresIn=URL_SECONDS,
        )
        return PresignedPut(url, {"x-amz-checksum-sha256": checksum, "content-length": str(size)}, 0, size)

    # --- large uploads, by clients --------------------------------------------------------------------------

    def begin_upload(self, namespace: str, digest: str, size: int) -> list[PresignedPut]:
        """Return permissions to upload a large blob in parts: those parts that an earlier try has not brought yet.

        Nothing signs the bytes of a part: the blob is there once `finish_upload` has hashed the whole.
        """
        key = upload_key(namespace, digest)
        upload = self._begun(key)
        if not upload:
            begin = partial(self._s3.create_multipart_upload, Bucket=self._bucket, Key=key)
            upload = self._ask("write", key, begin)["UploadId"]
        there = {part["PartNumber"]: part["Size"] for part in self._parts(key, upload)}
        part_size = _client_part(size)
        puts = []
        for number, start in enumerate(range(0, size, part_size), 1):
            length = min(part_size, size - start)
            if there.get(number) == length:
                continue
            parameters = {"Bucket": self._bucket, "Key": key, "UploadId": upload, "PartNumber": number}
            url = self._public.generate_presigned_url(
                "upload_part", Params={**parameters, "ContentLength": length}, ExpiresIn=UPLOAD_SECONDS
            )
            puts.append(PresignedPut(url, {"content-length": str(length)}, start, length))
        return puts

    def finish_upload(self, namespace: str, digest: str, size: int) -> None:
        """Put a large blob's parts together, hash them, and make them the blob. Repeating it is harmless.

        Raises UsageError when parts are missing, or the bytes are not those of the digest (which are deleted).
        """
        key = upload_key(namespace, digest)
        if upload := self._begun(key):
            parts = self._parts(key, upload)
            brought = sum(part["Size"] for part in parts)
            if brought != size:
                hint = "upload the missing parts, then finish again"
                raise UsageError(f"{brought} of {size} bytes of blob {digest} are there", hint=hint)
            listed = [{"PartNumber": part["PartNumber"], "ETag": part["ETag"]} for part in parts]
            self._complete(key, upload, listed, lambda: self._head(key) is not None)
        found = self._head(key)
        if found is None:
            if not self.has_blob(digest, size):
                raise UsageError(f"no upload of blob {digest} was started here", hint="submit again")
            return
        actual = self._hash(found)
        if actual == digest:
            source: CopySourceTypeDef = {"Bucket": self._bucket, "Key": key}
            what_was_hashed = {"CopySourceIfMatch": found.etag}
            copy = partial(self._s3.copy, source, self._bucket, blob_key(digest), ExtraArgs=what_was_hashed)
            self._ask("copy", key, copy)
        self.delete_object(key)
        if actual != digest:
            hint = "did the file change while it was uploaded?"
            raise UsageError(f"the uploaded bytes have the SHA-256 {actual}, not {digest}", hint=hint)

    def _begun(self, key: str) -> str | None:
        """Return the id of the newest multipart upload to a key that is neither completed nor ended."""
        ours = [upload for upload in self._uploads(key) if upload["Key"] == key]
        return max(ours, key=lambda upload: upload["Initiated"])["UploadId"] if ours else None

    def _uploads(self, prefix: str) -> list[MultipartUploadTypeDef]:
        """Return the multipart uploads under a prefix that are neither completed nor ended."""
        pages = self._s3.get_paginator("list_multipart_uploads").paginate(Bucket=self._bucket, Prefix=prefix)
        return self._ask("list uploads in", prefix, lambda: pages.build_full_result().get("Uploads", []))

    def _parts(self, key: str, upload: str) -> list[PartTypeDef]:
        """Return the parts of an upload that are there, in order."""
        pages = self._s3.get_paginator("list_parts").paginate(Bucket=self._bucket, Key=key, UploadId=upload)
        return self._ask("list parts of", key, lambda: pages.build_full_result().get("Parts", []))

    # --- upkeep ---------------------------------------------------------------------------------------------

    def abort_uploads(self, older_than: timedelta) -> int:
        """End large uploads that were begun longer ago and never became blobs; return how many."""
        before = datetime.now(UTC) - older_than
        ours = (BLOBS, UPLOADS, QUARANTINE)  # The bucket may have other users.
        old = [upload for prefix in ours for upload in self._uploads(prefix) if upload["Initiated"] < before]
        for upload in old:
            key = upload["Key"]
            abort = partial(self._s3.abort_multipart_upload, Bucket=self._bucket, Key=key, UploadId=upload["UploadId"])
            with suppress(ClientError):  # Completed or ended meanwhile.
                self._ask("end an upload to", key, abort, final={404})
        stale = [entry for entry in self.list_entries(UPLOADS) if entry.modified < before]
        for entry in stale:
            self.delete_object(entry.key)
        return len(old) + len(stale)

    def create_bucket(self) -> None:
        """Make the bucket where it is missing: for servers of our own, elsewhere that is its owner's to
        do."""
        with suppress(ClientError):
            self._ask("make", "", lambda: self._s3.create_bucket(Bucket=self._bucket), final={409})

    def reach(self) -> None:
        """Ask for a sign of life. Raises StorageUnavailable with the reason where there is none."""
        self._ask("reach", "", lambda: self._s3.head_bucket(Bucket=self._bucket))

    def answers(self) -> bool:
        """Say whether it takes, gives back and deletes an object just now, without being asked twice."""
        try:
            self.with_patience(0).check()
        except StorageUnavailable:
            return False
        return True

    def check(self) -> None:
        """Refuse a server that would lose work. Leaves nothing behind.

        Raises StorageUnavailable with the reason: it cannot be reached, or it ignores conditions.
        """
        self.reach()
        key = f"config/check-{secrets.token_hex(8)}"
        try:
            etag = self.put_object(key, b"1", create=True)
            self._require_conflict("If-None-Match: *", lambda: self.put_object(key, b"2", create=True))
            self._require_conflict("If-Match", lambda: self.put_object(key, b"3", if_match='"' + "0" * 32 + '"'))
            self.put_object(key, b"4", if_match=etag)
            self._require_conflict("If-Match", lambda: self.delete_object(key, if_match=etag))
        except Conflict as error:
            raise StorageUnavailable(
                f"{self._endpoint} refuses a conditional write that it should take: {error}"
            ) from None
        finally:
            self.delete_object(key)

    def _require_conflict(self, condition: str, write: Callable[[], object]) -> None:
        with suppress(Conflict):
            write()
            raise StorageUnavailable(
                f"{self._endpoint} ignores `{condition}`: two workers would overwrite or delete each other's work",
                hint="use a server with conditional writes and deletes: AWS S3, SeaweedFS, or a Ceph RGW that has both",
            )

    # --- asking ---------------------------------------------------------------------------------------------

    def _ask(self, action: str, key: str, request: Callable[[], T], *, final: Collection[int] = ()) -> T:
        """Send a request, again and again while it fails in a way that may pass and our patience lasts.

        Raises ClientError for the statuses in `final`, which mean something to the caller, StorageAway (or what our
        `wait` raises) for what may pass and did not in time, and StorageUnavailable for every other failure.
        """
        with timed(STORAGE_SECONDS, action):
            return self._ask_again(action, key, request, final)

    def _ask_again(self, action: str, key: str, request: Callable[[], T], final: Collection[int]) -> T:
        began, pause = time.monotonic(), 0.05
        while True:
            patience = self._patience
            try:
                return request()
            except ClientError as error:
                if _status(error) in final and error.response["Error"].get("Code") not in NO_ANSWER:
                    raise
                failure: ClientError | BotoCoreError = error
                may_pass = _status(error) in RETRY_STATUS or error.response["Error"].get("Code") in RETRY_CODES
            except NoConnection as error:
                failure, may_pass = error, True
                patience = min(patience, UNREACHABLE_SECONDS)
            except BotoCoreError as error:
                failure = error
                may_pass = isinstance(error, HTTPClientError | IncompleteReadError)
            STORAGE_ERRORS.labels(action).inc()
            if not may_pass:
                raise self._unavailable(action, key, failure) from None
            if time.monotonic() + pause > began + patience:
                self._wait(StorageAway(self._said(action, key, failure), hint=HINT, since=began))
                continue
            time.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 - spreads retries, keeps no secret
            pause = min(pause * 2, 5.0)

    def _unless_absent(self, action: str, key: str, request: Callable[[], T]) -> T | None:
        try:
            return self._ask(action, key, request, final={404})
        except ClientError:
            return None

    def _head(self, key: str) -> ListedObject | None:
        def head() -> ListedObject:
            answer = self._s3.head_object(Bucket=self._bucket, Key=key)
            return ListedObject(key, answer["ContentLength"], answer["ETag"], answer["LastModified"])

        return self._unless_absent("look at", key, head)

    def _place(self, key: str) -> str:
        return f"s3://{self._bucket}/{key} at {self._endpoint}"

    def _unavailable(self, action: str, key: str, error: ClientError | BotoCoreError) -> StorageUnavailable:
        return StorageUnavailable(self._said(action, key, error), hint=HINT)

    def _said(self, action: str, key: str, error: ClientError | BotoCoreError) -> str:
        if isinstance(error, ClientError):
            said = error.response["Error"]
            reason = f"{_status(error)} {said.get('Code', '')} {said.get('Message', '')}".strip()
        else:
            reason = str(error)
        return f"cannot {action} {self._place(key)}: {reason}"


def client_parts(size: int) -> int:
    """Return in how many parts a client sends a large blob."""
    return -(-size // _client_part(size))


def _client_part(size: int) -> int:
    return max(CLIENT_PART, -(-size // CLIENT_PARTS))


def _give_up(away: StorageAway) -> None:
    raise away


def _status(error: ClientError) -> int:
    return int(error.response["ResponseMetadata"]["HTTPStatusCode"])


def _all(body: StreamingBody) -> bytes:
    return body.read()


def _write_at(file: int, position: int, body: StreamingBody) -> int:
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


@contextmanager
def _reading_source(bucket: str, key: str) -> Iterator[None]:
    """Turn what S3 says of a user's object into a sentence for that user."""
    try:
        yield
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        raise UsageError(
            f"s3://{bucket}/{key} cannot be read: {code or error}",
            hint="check the name, and that the farm's credentials may read the bucket",
        ) from None
    except BotoCoreError as error:
        raise StorageUnavailable(f"s3://{bucket}/{key} cannot be reached: {type(error).__name__}") from None

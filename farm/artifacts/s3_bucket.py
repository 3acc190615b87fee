"""Bucket: blobs and documents in one bucket on any S3 server that honours conditional writes. The only module that
knows boto3."""

from __future__ import annotations

import base64
import copy
import hashlib
import os
import random
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import boto3
import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, IncompleteReadError
from botocore.exceptions import ConnectionError as NoConnection
from botocore.utils import parse_timestamp

from farm import __version__
from farm.artifacts.storage import BLOBS, QUARANTINE, ListedObject, Object, Put, blob_key
from farm.errors import ArtifactGone, Conflict, StorageAway, StorageUnavailable, UsageError
from farm.files import replacing
from farm.logging import get_logger
from farm.metrics.instruments import STORAGE_BYTES, STORAGE_ERRORS, STORAGE_SECONDS, timed

if TYPE_CHECKING:
    from botocore.response import StreamingBody
    from mypy_boto3_s3.client import S3Client
    from mypy_boto3_s3.type_defs import CopySourceTypeDef, ListObjectsV2OutputTypeDef, ListObjectsV2RequestTypeDef

log = get_logger(__name__)

T = TypeVar("T")

HINT = "check s3_endpoint, s3_bucket and the keys (`farm doctor`); `farm doctor --fix` makes a missing bucket"

MAKING_CLIENTS = threading.Lock()  # A session is not thread-safe; its clients are.

UNREACHABLE_SECONDS = 5.0  # How long a request is repeated without a connection: somebody may wait for the answer.

SILENT_SECONDS = 15
"""How long a host may leave what it was sent without an acknowledgement; its kernel sends that, however busy it is."""

RETRY_STATUS = frozenset({429, 500, 502, 503, 504})
RETRY_CODES = frozenset(
    {"SlowDown", "RequestTimeout", "InternalError"}
    | {"ConditionalRequestConflict", "ConcurrentModification", "OperationAborted"}
)
"""Answers after which the same request may succeed; the last three are a 409 because of another write."""

NO_ANSWER = RETRY_CODES | {"NoSuchBucket"}  # Codes that say nothing about the object, whatever their status.
PART = 8 << 20  # Bytes of one part of a multipart transfer.
PIECE = 256 << 10  # Bytes that each thread of a download holds at once.
THREADS = 4  # Parts of one transfer that are sent at once; an upload holds this many in memory.
MAX_PARTS = 10_000  # S3's bound on the parts of one upload.
URL_SECONDS = 3600  # How long a presigned URL for an object is valid.


class FinalStatus(Exception):
    """The server's answer to a request is a status that means something to the caller, such as 404."""

    def __init__(self, unavailable: StorageUnavailable) -> None:
        self.unavailable = unavailable  # What to raise if it means nothing.


class Bucket:
    """Blobs and documents in one bucket. One per process is enough: it is thread-safe.

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
        Raises UsageError for an endpoint that is not an address.
        """
        self.name = bucket
        self._endpoint = endpoint or f"AWS {region}"
        self._patience = patience
        self._wait: Callable[[StorageAway], object] = _give_up
        config = Config(
            # Server logs show who asked. botocore's own text is put together again for each request.
            user_agent=f"migraphx-farm/{__version__}",
            signature_version="s3v4",
            s3={"addressing_style": "path" if endpoint else "auto"},
            # We repeat requests ourselves: bounded by time, and aware of what an unanswered conditional write means.
            retries={"mode": "standard", "total_max_attempts": 1},
            # Every blob is checked against its SHA-256, so a CRC in addition would only cost time.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            max_pool_connections=32,
            connect_timeout=5,
            read_timeout=60,
            tcp_keepalive=True,
        )
        keys = {"aws_access_key_id": access_key or None, "aws_secret_access_key": secret_key or None}
        client = partial(_session().client, "s3", region_name=region, config=config, **keys)
        try:
            with MAKING_CLIENTS:
                self.s3: S3Client = client(endpoint_url=endpoint or None)
                self.public: S3Client = client(endpoint_url=public_endpoint) if public_endpoint else self.s3
        except ValueError as error:
            raise UsageError(
                f"an address of object storage (s3_endpoint, s3_public_endpoint) is not valid: {error}",
                hint="write it as https://s3.example:9000",
            ) from None
        # botocore has no setting for it.
        options: list[tuple[int, int, int]] = self.s3._endpoint.http_session._socket_options
        options.append((socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_SECONDS * 1000))

    def with_patience(self, seconds: float, wait: Callable[[StorageAway], object] | None = None) -> Self:
        """Return the same bucket for a caller who repeats requests for so many seconds while it is away.

        After them `wait` is called, from any thread: the request is repeated when it returns, again and again, and ends
        with what it raises. Without one, StorageAway is raised.
        """
        other = copy.copy(self)
        other._patience, other._wait = seconds, wait or _give_up
        return other

    # --- documents ------------------------------------------------------------------------------------------

    def put_object(
        self, key: str, data: bytes, *, create: bool = False, if_match: str = "", content_type: str = "application/json"
    ) -> str:
        """Write a document and return its ETag.

        `create`: only if there is none. `if_match`: only over the document with that ETag. Raises Conflict
        when the condition does not hold; a repetition that finds its own bytes already there has succeeded.
        """
        condition: dict[str, Any] = {"IfNoneMatch": "*"} if create else {"IfMatch": if_match} if if_match else {}
        put = partial(self.s3.put_object, Bucket=self.name, Key=key, Body=data, ContentType=content_type, **condition)
        STORAGE_BYTES.labels("written").inc(len(data))
        with suppress(FinalStatus):
            return self.ask("write", key, put, final={404, 412} if condition else ())["ETag"]
        # An earlier try may have succeeded, with its answer lost.
        found = self.get_object(key)
        if found and found.data == data:
            return found.etag
        raise Conflict(f"{self.place(key)} exists already" if create else f"{self.place(key)} was changed meanwhile")

    def get_object(self, key: str, *, limit: int = sys.maxsize) -> Object | None:
        """Read a document; None if there is none, or none of at most `limit` bytes."""

        def read() -> Object | None:
            answer = self.s3.get_object(Bucket=self.name, Key=key)
            with closing(answer["Body"]) as body:
                if answer["ContentLength"] > limit:
                    return None
                data = body.read()
            STORAGE_BYTES.labels("read").inc(len(data))
            return Object(key, data, answer["ETag"])

        return self.unless_absent("read", key, read)

    def delete_object(self, key: str, *, if_match: str = "") -> None:
        """Delete an object if it is there. Raises Conflict when it does not have the ETag `if_match`."""
        condition: dict[str, Any] = {"IfMatch": if_match} if if_match else {}
        delete = partial(self.s3.delete_object, Bucket=self.name, Key=key, **condition)
        with suppress(FinalStatus):
            self.ask("delete", key, delete, final={404, 412})
            return
        if self.head(key):
            raise Conflict(f"{self.place(key)} was changed meanwhile")

    def head(self, key: str) -> ListedObject | None:
        """Return an object without its bytes; None if there is none."""

        def head() -> ListedObject:
            answer = self.s3.head_object(Bucket=self.name, Key=key)
            return ListedObject(key, answer["ContentLength"], answer["ETag"], answer["LastModified"])

        return self.unless_absent("look at", key, head)

    def list_objects(self, prefix: str) -> Iterator[str]:
        """Yield the keys of all objects under a prefix, in order."""
        yield from (entry.key for entry in self.list_entries(prefix))

    def list_entries(self, prefix: str) -> Iterator[ListedObject]:
        """Yield all objects under a prefix with size, ETag and time, in order of their keys."""
        for page in self._pages(prefix, ""):
            for item in page.get("Contents", ()):
                yield ListedObject(item["Key"], item["Size"], item["ETag"], item["LastModified"])

    def list_folders(self, prefix: str) -> list[str]:
        """Return the names right under a prefix that have, or had, something below: `ns/` gives the namespaces."""
        folders = (item["Prefix"] for page in self._pages(prefix, "/") for item in page.get("CommonPrefixes", ()))
        return [folder.removeprefix(prefix).removesuffix("/") for folder in folders]

    def _pages(self, prefix: str, delimiter: str) -> Iterator[ListObjectsV2OutputTypeDef]:
        request: ListObjectsV2RequestTypeDef = {"Bucket": self.name, "Prefix": prefix, "Delimiter": delimiter}
        # Each page is repeated until it comes: boto3's paginator ends at the first failure.
        while True:
            page = self.ask("list", prefix, partial(self.s3.list_objects_v2, **request))
            yield page
            if not page.get("IsTruncated"):
                return
            request = {**request, "ContinuationToken": page["NextContinuationToken"]}

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
        put = partial(self.s3.put_object, Bucket=self.name, Key=key, Body=data, ChecksumSHA256=_base64(digest))
        self.ask("write", key, put)
        STORAGE_BYTES.labels("written").inc(len(data))

    def _put_large_blob(self, digest: str, path: Path, size: int) -> None:
        # Not with boto3's own transfers: they do not repeat for long enough, nor handle a lost last answer.
        key = blob_key(digest)
        part_size = max(PART, -(-size // MAX_PARTS))
        upload = self.ask("write", key, lambda: self.s3.create_multipart_upload(Bucket=self.name, Key=key))["UploadId"]
        put = partial(self.s3.upload_part, Bucket=self.name, Key=key, UploadId=upload)
        try:
            with path.open("rb") as file, ThreadPoolExecutor(THREADS) as pool:

                def put_part(number: int) -> str:
                    data = os.pread(file.fileno(), part_size, (number - 1) * part_size)
                    STORAGE_BYTES.labels("written").inc(len(data))
                    return self.ask("write", key, partial(put, PartNumber=number, Body=data))["ETag"]

                tags = list(pool.map(put_part, range(1, -(-size // part_size) + 1)))
            parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, 1)]
            self.complete(key, upload, parts, lambda: self.has_blob(digest, size))
        except BaseException:
            with suppress(BotoCoreError, ClientError):  # Else `abort_uploads` ends it later.
                self.s3.abort_multipart_upload(Bucket=self.name, Key=key, UploadId=upload)
            raise

    def has_blob(self, digest: str, size: int | None = None) -> bool:
        """Return whether a blob exists, in the right size if one is given. Does not read its bytes."""
        found = self.head(blob_key(digest))
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
            sha256.update(self._read_part(entry, start, lambda body: body.read()))
        return sha256.hexdigest()

    def get_blob(self, digest: str, path: Path, size: int | None = None) -> None:
        """Download a blob to `path`, checked against its digest; the file is complete or missing.

        Raises ArtifactGone when it is missing or damaged (which also puts it into quarantine).
        """
        with replacing(path) as part, part.open("w+b") as file:
            self._read_checked(digest, size, lambda entry: self._download(entry, file.fileno()))

    def read_blob(self, digest: str, limit: int) -> bytes:
        """Return a blob's bytes, checked. Raises ArtifactGone, UsageError for a blob of more than `limit` bytes."""
        # Most are small and right: then one request is enough.
        found = self.get_object(blob_key(digest), limit=min(limit, PART))
        if found and hashlib.sha256(found.data).hexdigest() == digest:
            return found.data
        data = b""

        def read(entry: ListedObject) -> str:
            nonlocal data
            if entry.size > limit:
                raise UsageError(f"blob {digest} has {entry.size} bytes, more than the {limit} allowed here")
            starts = range(0, entry.size, PART)
            data = b"".join(self._read_part(entry, start, lambda body: body.read()) for start in starts)
            return hashlib.sha256(data).hexdigest()

        self._read_checked(digest, None, read)
        return data

    def read_range(self, digest: str, start: int, end: int) -> bytes:
        """Return a blob's bytes from `start` to `end`, for a look: a part cannot be checked. Raises ArtifactGone."""
        key = blob_key(digest)

        def read() -> bytes:
            return self.s3.get_object(Bucket=self.name, Key=key, Range=f"bytes={start}-{end - 1}")["Body"].read()

        found = self.unless_absent("read", key, read) if start < end else b""
        if found is None:
            raise ArtifactGone(f"there is no {self.place(key)}", hint="it was deleted, or never uploaded")
        return found

    def _read_checked(self, digest: str, size: int | None, read: Callable[[ListedObject], str]) -> None:
        """Read a blob by `read`, which returns the SHA-256 of what it got; raise ArtifactGone if it is wrong.

        Bytes can also be damaged in transit, so they are read once more before the blob goes into quarantine.
        """
        key, etag = blob_key(digest), ""
        for _ in range(2):
            found = self.head(key)
            if found is None:
                raise ArtifactGone(f"there is no {self.place(key)}", hint="it was deleted, or never uploaded")
            actual, etag = read(found), found.etag
            if actual == digest and size in (None, found.size):
                return
            if actual == digest:
                raise ArtifactGone(f"{self.place(key)} has {found.size} bytes where {size} were expected")
        self._quarantine(digest, etag)
        hint = "it is in quarantine now; submit again, and the farm compiles it again"
        raise ArtifactGone(f"{self.place(key)} is damaged: its bytes have the SHA-256 {actual}", hint=hint)

    def _download(self, entry: ListedObject, file: int) -> str:
        """Fetch an object's parts in parallel into an open file; return its SHA-256.

        Bytes pass through memory in pieces that fit the processor's cache, and are hashed out of the page
        cache: twice as fast as parts held in memory, and no memory to speak of.
        """
        os.ftruncate(file, 0)
        sha256 = hashlib.sha256()
        starts = range(0, entry.size, PART)

        def fetch(start: int) -> int:
            def write(body: StreamingBody) -> int:
                position = start
                for piece in body.iter_chunks(PIECE):
                    position += os.pwrite(file, piece, position)
                return position

            return self._read_part(entry, start, write)

        with ThreadPoolExecutor(THREADS) as pool:
            for start, end in zip(starts, pool.map(fetch, starts), strict=True):
                for position in range(start, end, PIECE):
                    sha256.update(os.pread(file, min(PIECE, end - position), position))
        return sha256.hexdigest()

    def _read_part(self, entry: ListedObject, start: int, take: Callable[[StreamingBody], T]) -> T:
        """Let `take` read the part from `start` on; again if the transfer is interrupted.

        Raises StorageUnavailable, too, if the object was overwritten or deleted since the transfer began.
        """
        end = min(start + PART, entry.size)

        def read() -> T:
            answer = self.s3.get_object(
                Bucket=self.name, Key=entry.key, Range=f"bytes={start}-{end - 1}", IfMatch=entry.etag
            )
            return take(answer["Body"])

        taken = self.ask("read", entry.key, read)
        STORAGE_BYTES.labels("read").inc(end - start)
        return taken

    def _quarantine(self, digest: str, etag: str) -> None:
        """Move a damaged blob to quarantine, so that lookups miss and the next put restores it."""
        key = blob_key(digest)
        aside = QUARANTINE + key.removeprefix(BLOBS)
        source: CopySourceTypeDef = {"Bucket": self.name, "Key": key}
        with suppress(Conflict, FinalStatus):  # Somebody else was faster, or uploaded the right bytes meanwhile.
            self.ask("quarantine", key, lambda: self.s3.copy(source, self.name, aside), final={404})
            self.delete_object(key, if_match=etag)
        log.error("blob quarantined", digest=digest, key=aside)

    # --- outside access -------------------------------------------------------------------------------------

    def presign_get(self, key: str, *, filename: str = "") -> str:
        """Return a URL from which anyone may download an object for a while, as a file named `filename`."""
        parameters = {"Bucket": self.name, "Key": key}
        if filename:
            safe = re.sub(r"[^\w.+-]", "_", filename, flags=re.ASCII)
            parameters["ResponseContentDisposition"] = f'attachment; filename="{safe}"'
        return self.public.generate_presigned_url("get_object", Params=parameters, ExpiresIn=URL_SECONDS)

    def presign_put(self, digest: str, size: int) -> Put:
        """Return a permission to upload one blob: the signature covers its SHA-256 and size."""
        checksum = _base64(digest)
        what = {"Bucket": self.name, "Key": blob_key(digest), "ChecksumSHA256": checksum, "ContentLength": size}
        url = self.public.generate_presigned_url("put_object", Params=what, ExpiresIn=URL_SECONDS)
        headers = {"x-amz-checksum-sha256": checksum, "content-length": str(size)}
        return {"url": url, "headers": headers, "start": 0, "size": size}

    # --- buckets of users ---------------------------------------------------------------------------------------

    def source_version(self, bucket: str, key: str) -> str:
        """Return the ETag of an object in another bucket, which the farm's credentials may read.

        Raises UsageError if it is not there, or may not be read, StorageUnavailable if its bucket does not answer now.
        """
        with _reading_source(bucket, key):
            return self.s3.head_object(Bucket=bucket, Key=key)["ETag"]

    def get_source(self, bucket: str, key: str, version: str, path: Path, *, limit: int) -> None:
        """Download an object of another bucket, as it was in `version`, of at most `limit` bytes. Raises UsageError."""
        with _reading_source(bucket, key), path.open("wb") as file:
            found = self.s3.get_object(Bucket=bucket, Key=key, IfMatch=version)
            if found["ContentLength"] > limit:
                raise UsageError(f"s3://{bucket}/{key} has more than {limit} bytes")
            for piece in found["Body"].iter_chunks(1 << 20):
                file.write(piece)

    # --- asking ---------------------------------------------------------------------------------------------

    def ask(self, action: str, key: str, request: Callable[[], T], *, final: Collection[int] = ()) -> T:
        """Send a request, again and again while it fails in a way that may pass and our patience lasts.

        Raises FinalStatus for the statuses in `final`, which mean something to the caller, StorageAway (or what our
        `wait` raises) for what may pass and did not in time, and StorageUnavailable for every other failure.
        """
        with timed(STORAGE_SECONDS, action):
            began, pause = time.monotonic(), 0.05
            while True:
                patience = self._patience
                try:
                    return request()
                except ClientError as error:
                    if _status(error) in final and error.response["Error"].get("Code") not in NO_ANSWER:
                        raise FinalStatus(StorageUnavailable(self._said(action, key, error), hint=HINT)) from None
                    failure: ClientError | BotoCoreError = error
                    may_pass = _may_pass(error)
                except NoConnection as error:
                    failure, may_pass = error, True
                    patience = min(patience, UNREACHABLE_SECONDS)
                except BotoCoreError as error:
                    failure = error
                    may_pass = isinstance(error, HTTPClientError | IncompleteReadError)
                STORAGE_ERRORS.labels(action).inc()
                if not may_pass:
                    raise StorageUnavailable(self._said(action, key, failure), hint=HINT) from None
                if time.monotonic() + pause > began + patience:
                    self._wait(StorageAway(self._said(action, key, failure), hint=HINT, since=began))
                    continue
                time.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 - spreads retries, keeps no secret
                pause = min(pause * 2, 5.0)

    def unless_absent(self, action: str, key: str, request: Callable[[], T]) -> T | None:
        """Send a request as `ask` does; None if what it asks for is not there."""
        try:
            return self.ask(action, key, request, final={404})
        except FinalStatus:
            return None

    def complete(self, key: str, upload: str, parts: Sequence[Any], done: Callable[[], bool]) -> None:
        """Make the parts of a multipart upload one object; `done` says whether it is there."""
        end = partial(self.s3.complete_multipart_upload, Bucket=self.name, Key=key, UploadId=upload)
        try:
            self.ask("write", key, lambda: end(MultipartUpload={"Parts": parts}), final={404})
        except FinalStatus as status:
            # The upload is also gone if an earlier try succeeded and only its answer was lost.
            if not done():
                raise status.unavailable from None

    def place(self, key: str) -> str:
        """Return how people know an object."""
        return f"s3://{self.name}/{key} at {self._endpoint}"

    def _said(self, action: str, key: str, error: ClientError | BotoCoreError) -> str:
        if isinstance(error, ClientError):
            said = error.response["Error"]
            reason = f"{_status(error)} {said.get('Code', '')} {said.get('Message', '')}".strip()
        else:
            reason = str(error)
        return f"cannot {action} {self.place(key)}: {reason}"

    # --- the server -----------------------------------------------------------------------------------------

    def create(self) -> None:
        """Make the bucket if it is missing: on a server of our own; elsewhere its owner does."""
        with suppress(FinalStatus):
            self.ask("make", "", lambda: self.s3.create_bucket(Bucket=self.name), final={409})

    def reach(self) -> None:
        """Ask for a sign of life. Raises StorageUnavailable with the reason if there is none."""
        self.ask("reach", "", lambda: self.s3.head_bucket(Bucket=self.name))

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
                hint="use a server with conditional writes and deletes: AWS S3, SeaweedFS, or Ceph RGW from 20 on",
            )


def _require_digest(path: Path, digest: str | None, actual: str) -> None:
    if digest and digest != actual:
        raise UsageError(f"{path} has the SHA-256 {actual}, not {digest}")


def _base64(digest: str) -> str:
    return base64.b64encode(bytes.fromhex(digest)).decode()


def _identity(path: Path) -> tuple[int, int, int]:
    """What changes when a file's content is replaced or written to."""
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _give_up(away: StorageAway) -> None:
    raise away


@cache
def _session() -> boto3.Session:
    """Return the one session, which knows how S3 writes times; to guess it takes longer than all else of a list."""
    session = botocore.session.Session()
    session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=_time_of)
    return boto3.Session(botocore_session=session)


def _time_of(text: str) -> datetime:
    """Read a time as S3 writes it in lists (ISO 8601) and in headers (RFC 9110); other servers' as botocore does."""
    with suppress(ValueError, TypeError):
        if text[10:11] == "T":
            return datetime.fromisoformat(text)
        if text.endswith("GMT"):
            return parsedate_to_datetime(text)
    return parse_timestamp(text)


def _status(error: ClientError) -> int:
    return int(error.response["ResponseMetadata"]["HTTPStatusCode"])


def _may_pass(error: ClientError) -> bool:
    return _status(error) in RETRY_STATUS or error.response["Error"].get("Code") in RETRY_CODES


@contextmanager
def _reading_source(bucket: str, key: str) -> Iterator[None]:
    """Turn what S3 says about a user's object into a sentence for that user."""
    try:
        yield
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        said = f"s3://{bucket}/{key} cannot be read: {code or error}"
        if _may_pass(error):
            raise StorageUnavailable(said, hint="its bucket is busy: try again later") from None
        raise UsageError(said, hint="check the name, and that the farm's credentials may read the bucket") from None
    except BotoCoreError as error:
        raise StorageUnavailable(f"s3://{bucket}/{key} cannot be reached: {type(error).__name__}") from None

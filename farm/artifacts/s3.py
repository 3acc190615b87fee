"""S3Store: artifacts in one bucket, the blobs that clients bring in parts, and what the bucket does by itself."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import cached_property, partial
from typing import TYPE_CHECKING

from farm.artifacts import sidecar as sidecars
from farm.artifacts import storage
from farm.artifacts.s3_bucket import Bucket, FinalStatus
from farm.errors import Conflict, UsageError
from farm.logging import get_logger
from farm.settings import Settings
from farm.wire.program import Sidecar

if TYPE_CHECKING:
    from mypy_boto3_s3 import type_defs

CLIENT_PART = 128 << 20  # Fewest bytes of one part of a client's upload: this much is sent again after an interruption.
CLIENT_PARTS = 1000  # Parts of one client's upload at most: each costs a signature, and S3 takes parts of 5 GiB.
UPLOAD_SECONDS = 43_200  # How long URLs for the parts of a large upload are valid: a slow line needs hours.


class LargeUploads(Bucket):
    """A bucket to which clients bring large blobs in parts."""

    def begin_upload(self, namespace: str, digest: str, size: int) -> list[storage.Put]:
        """Return permissions to upload a large blob in parts: those parts that an earlier try has not brought yet.

        Nothing signs the bytes of a part: the blob is there once `finish_upload` has hashed the whole.
        """
        key = storage.upload_key(namespace, digest)
        upload = self._begun(key)
        if not upload:
            begin = partial(self.s3.create_multipart_upload, Bucket=self.name, Key=key)
            upload = self.ask("write", key, begin)["UploadId"]
        there = {part["PartNumber"]: part["Size"] for part in self._parts(key, upload)}
        part_size = _client_part(size)
        puts: list[storage.Put] = []
        for number, start in enumerate(range(0, size, part_size), 1):
            length = min(part_size, size - start)
            if there.get(number) == length:
                continue
            part = {"Bucket": self.name, "Key": key, "UploadId": upload, "PartNumber": number, "ContentLength": length}
            url = self.public.generate_presigned_url("upload_part", Params=part, ExpiresIn=UPLOAD_SECONDS)
            puts.append({"url": url, "headers": {"content-length": str(length)}, "start": start, "size": length})
        return puts

    def finish_upload(self, namespace: str, digest: str, size: int) -> None:
        """Put a large blob's parts together, hash them, and make them the blob. Repeating it is harmless.

        Raises UsageError when parts are missing, or the bytes are not those of the digest (which are deleted).
        """
        key = storage.upload_key(namespace, digest)
        if upload := self._begun(key):
            parts = self._parts(key, upload)
            brought = sum(part["Size"] for part in parts)
            if brought != size:
                hint = "upload the missing parts, then finish again"
                raise UsageError(f"{brought} of {size} bytes of blob {digest} are there", hint=hint)
            listed = [{"PartNumber": part["PartNumber"], "ETag": part["ETag"]} for part in parts]
            self.complete(key, upload, listed, lambda: self.head(key) is not None)
        found = self.head(key)
        if found is None:
            if not self.has_blob(digest, size):
                raise UsageError(f"no upload of blob {digest} was started here", hint="submit again")
            return
        actual = self.hash_of(found)
        if actual == digest:
            source: type_defs.CopySourceTypeDef = {"Bucket": self.name, "Key": key}
            what_was_hashed = {"CopySourceIfMatch": found.etag}
            copy = partial(self.s3.copy, source, self.name, storage.blob_key(digest), ExtraArgs=what_was_hashed)
            self.ask("copy", key, copy)
        self.delete_object(key)
        if actual != digest:
            hint = "did the file change while it was uploaded?"
            raise UsageError(f"the uploaded bytes have the SHA-256 {actual}, not {digest}", hint=hint)

    def abort_uploads(self, older_than: timedelta) -> int:
        """End large uploads that were begun longer ago and never became blobs; return how many."""
        before = datetime.now(UTC) - older_than
        ours = (storage.BLOBS, storage.UPLOADS, storage.QUARANTINE)  # The bucket may have other users.
        old = [upload for prefix in ours for upload in self._open(prefix) if upload["Initiated"] < before]
        for upload in old:
            key = upload["Key"]
            abort = partial(self.s3.abort_multipart_upload, Bucket=self.name, Key=key, UploadId=upload["UploadId"])
            with suppress(FinalStatus):  # Completed or ended meanwhile.
                self.ask("end an upload to", key, abort, final={404})
        stale = [entry for entry in self.list_entries(storage.UPLOADS) if entry.modified < before]
        for entry in stale:
            self.delete_object(entry.key)
        return len(old) + len(stale)

    def _begun(self, key: str) -> str | None:
        """Return the id of the newest multipart upload to a key that is neither completed nor ended."""
        ours = [upload for upload in self._open(key) if upload["Key"] == key]
        return max(ours, key=lambda upload: upload["Initiated"])["UploadId"] if ours else None

    def _open(self, prefix: str) -> list[type_defs.MultipartUploadTypeDef]:
        """Return the multipart uploads under a prefix that are neither completed nor ended."""
        pages = self.s3.get_paginator("list_multipart_uploads").paginate(Bucket=self.name, Prefix=prefix)
        return self.ask("list uploads in", prefix, lambda: pages.build_full_result().get("Uploads", []))

    def _parts(self, key: str, upload: str) -> list[type_defs.PartTypeDef]:
        pages = self.s3.get_paginator("list_parts").paginate(Bucket=self.name, Key=key, UploadId=upload)
        return self.ask("list parts of", key, lambda: pages.build_full_result().get("Parts", []))


def client_parts(size: int) -> int:
    """Return in how many parts a client sends a large blob."""
    return -(-size // _client_part(size))


def _client_part(size: int) -> int:
    return max(CLIENT_PART, -(-size // CLIENT_PARTS))


log = get_logger(__name__)


class S3Store(LargeUploads):
    """The artifact store: a bucket with artifacts in it. One per process is enough: it is thread-safe."""

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

    def build_id_of(self, *parts: str) -> str:
        """Return the build id that these texts stand for in this farm: what is asked for twice is built once.

        Only who reads the farm's key can compute it, so nobody can have a build of that id in another namespace before.
        """
        return f"b-{hmac.new(self._build_ids, chr(0).join(parts).encode(), hashlib.sha256).hexdigest()[:16]}"

    @cached_property
    def _build_ids(self) -> bytes:
        def attempt() -> bytes | None:
            with suppress(Conflict):
                self.put_object(storage.BUILD_IDS, secrets.token_hex().encode(), create=True)
            found = self.get_object(storage.BUILD_IDS)
            return found.data if found else None

        return storage.until_moved(self.place(storage.BUILD_IDS), attempt)

    def publish(self, namespace: str, sidecar: Mapping[str, object], *, sign: storage.Sign | None = None) -> Sidecar:
        """Commit an artifact whose blobs are uploaded: create its sidecar, or adopt an existing one.

        Returns the sidecar that counts then. Replaces a broken one (unreadable, or with missing blobs). `sign` keeps
        statements about the new one before it is there. Raises UsageError if this sidecar is not valid or its own blobs
        are missing.
        """
        ours = sidecars.validate({**sidecar, "namespace": namespace})
        key = storage.sidecar_key(namespace, ours["key"])
        if absent := self._first_absent(ours):
            needed = self.place(storage.blob_key(absent))
            raise UsageError(f"{self.place(key)} cannot be published: {needed} is not there")
        data = sidecars.text(ours)
        if sign:
            sign(self, ours, data)

        def attempt() -> Sidecar | None:
            with suppress(Conflict):
                self.put_object(key, data, create=True)
                return ours
            there = self.get_object(key)
            if there is None:  # Retention took it in between.
                return None
            if theirs := self._whole(namespace, ours["key"], there):
                return theirs
            with suppress(Conflict):
                self.put_object(key, data, if_match=there.etag)
                log.warning("artifact repaired", key=key)
                return ours
            return None

        return storage.until_moved(self.place(key), attempt)

    def lookup(self, namespaces: Sequence[str], key: str) -> Sidecar | None:
        """Return the sidecar of a key's first artifact that is whole: readable, with all blobs in the right size."""
        found = self.stored(namespaces, key)
        return found[0] if found else None

    def stored(self, namespaces: Sequence[str], key: str) -> tuple[Sidecar, bytes] | None:
        """Return what `lookup` does, also as it is stored, byte by byte."""
        for namespace in namespaces:
            found = self.get_object(storage.sidecar_key(namespace, key))
            if found and (sidecar := self._whole(namespace, key, found)):
                return sidecar, found.data
        return None

    def statements(self, namespaces: Iterable[str], key: str) -> list[bytes]:
        """Return what is signed about the artifacts of a cache key in namespaces: Sigstore bundles, unchecked."""
        found = (self.get_object(storage.statements_key(namespace, key)) for namespace in namespaces)
        return [line for there in found if there for line in there.data.splitlines()]

    def _whole(self, namespace: str, key: str, found: storage.Object) -> Sidecar | None:
        """Return a sidecar, unless it is unreadable, misplaced or lacks blobs."""
        try:
            sidecar = sidecars.read(found.data)
        except ValueError:
            log.warning("sidecar unreadable", key=found.key)
            return None
        if (sidecar["namespace"], sidecar["key"]) != (namespace, key) or self._first_absent(sidecar):
            log.warning("artifact broken", key=found.key)
            return None
        return sidecar

    def _first_absent(self, sidecar: Sidecar) -> str | None:
        blobs = sidecars.required(sidecar["blobs"])
        there = storage.at_once(lambda blob: self.has_blob(blob["digest"], blob["size"]), blobs)
        return next((blob["digest"] for blob, is_there in zip(blobs, there, strict=True) if not is_there), None)


FROZEN = frozenset({"GLACIER", "DEEP_ARCHIVE"})  # Storage classes: to be read, an object has to be restored first.


def rules(bucket: Bucket) -> Iterator[tuple[str, str, bool]]:
    """What the bucket's own settings do to the farm: each with what to do, and whether something is lost or fails.

    Raises StorageUnavailable if our keys may not read them.
    """
    s3, name = bucket.s3, bucket.name
    head = bucket.ask("reach", "", lambda: s3.head_bucket(Bucket=name))
    ours, its = s3.meta.region_name, head["ResponseMetadata"]["HTTPHeaders"].get("x-amz-bucket-region")
    if its not in (None, ours):
        said = f"the bucket is in {its}, and s3_region is {ours}: presigned addresses are refused"
        yield said, f"set s3_region = {its}", True
    asked = bucket.unless_absent("read the rules of", "", lambda: s3.get_bucket_lifecycle_configuration(Bucket=name))
    enabled = [rule for rule in (asked["Rules"] if asked else []) if rule["Status"] == "Enabled"]
    for rule in enabled:
        if what := _takes(rule):
            said = f"the lifecycle rule {rule.get('ID', 'without an id')} {what}"
            yield said, "remove the rule, or limit it to quarantine/", True
    status = bucket.ask("read the versioning of", "", lambda: s3.get_bucket_versioning(Bucket=name).get("Status"))
    if status and not any("NoncurrentVersionExpiration" in rule for rule in enabled):
        said = f"versioning is {status.lower()}: what the farm deletes or replaces is kept, and takes room for ever"
        yield said, "add a lifecycle rule with NoncurrentVersionExpiration", False


def _takes(rule: type_defs.LifecycleRuleOutputTypeDef) -> str:
    """What an enabled lifecycle rule does to objects that the farm keeps; empty if it spares them."""
    chosen = rule.get("Filter", {})
    both = chosen.get("And", {})
    if chosen.get("Tag") or both.get("Tags"):  # The farm tags nothing.
        return ""
    prefix = rule.get("Prefix") or chosen.get("Prefix") or both.get("Prefix") or ""
    if not any(kept.startswith(prefix) or prefix.startswith(kept) for kept in (storage.BLOBS, "ns/", "config/")):
        return ""
    where = f"objects under {prefix}" if prefix else "all objects"
    if {"Days", "Date"} & set(rule.get("Expiration", {})):
        return f"deletes {where}: artifacts, refs or tokens are lost"
    frozen = [move["StorageClass"] for move in rule.get("Transitions", []) if move.get("StorageClass") in FROZEN]
    return f"moves {where} to {frozen[0]}, from where nothing can be read at once" if frozen else ""

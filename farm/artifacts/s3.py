"""S3Store: artifacts in one bucket."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from farm.artifacts import sidecar as sidecars
from farm.artifacts.keys import blob_key, sidecar_key, statements_key
from farm.artifacts.moves import until_moved
from farm.artifacts.s3_bucket import Bucket, SourceBuckets
from farm.artifacts.s3_uploads import LargeUploads
from farm.artifacts.storage import Artifact, Object, Published, Sign
from farm.errors import Conflict, UsageError
from farm.logging import get_logger
from farm.settings import Settings

log = get_logger(__name__)


class S3Store(Bucket):
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

    @property
    def uploads(self) -> LargeUploads:
        """Blobs that clients bring in parts."""
        return LargeUploads(self)

    @property
    def sources(self) -> SourceBuckets:
        """Objects of users, in other buckets."""
        return SourceBuckets(self.s3)

    def publish(self, namespace: str, sidecar: Mapping[str, Any], *, sign: Sign | None = None) -> Published:
        """Commit an artifact whose blobs are uploaded: create its sidecar, or adopt an existing one.

        Replaces a broken sidecar (unreadable, or with missing blobs). `sign` keeps statements about the new one before
        it is there.
        Raises UsageError if this sidecar is not valid or its own blobs are missing.
        """
        ours = sidecars.validate({**sidecar, "namespace": namespace})
        key = sidecar_key(namespace, ours.key)
        if absent := self._first_absent(ours):
            raise UsageError(f"{self.place(key)} cannot be published: {self.place(blob_key(absent))} is not there")
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

        return until_moved(self.place(key), attempt)

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

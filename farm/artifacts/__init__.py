"""Artifacts: what the farm keeps in object storage, and the operations for it.

Two kinds of things: *blobs*, bytes named by their SHA-256 that anyone may write again, and *documents*, small
JSON under readable names that are created or replaced under conditions. An artifact is a document (the
sidecar) that leads to its blobs; `docs/object-storage.md` describes the layout.
"""

from farm.artifacts.keys import (
    BLOBS,
    MAIN,
    QUARANTINE,
    REVOCATIONS,
    UPLOADS,
    artifacts_prefix,
    blob_key,
    build_key,
    builds_prefix,
    open_key,
    open_prefix,
    readable,
    reference_key,
    sidecar_key,
    statements_key,
    upload_key,
)
from farm.artifacts.storage import Artifact, ArtifactStore, ListedObject, Object, PresignedPut, Published

__all__ = [
    "BLOBS",
    "MAIN",
    "QUARANTINE",
    "REVOCATIONS",
    "UPLOADS",
    "Artifact",
    "ArtifactStore",
    "ListedObject",
    "Object",
    "PresignedPut",
    "Published",
    "artifacts_prefix",
    "blob_key",
    "build_key",
    "builds_prefix",
    "open_key",
    "open_prefix",
    "readable",
    "reference_key",
    "sidecar_key",
    "statements_key",
    "upload_key",
]

"""Keys of objects in object storage; `docs/object-storage.md` describes the layout."""

from __future__ import annotations

MAIN = "main"
"""The namespace of trusted submitters; every other namespace can read it and never write there."""


BLOBS = "blobs/sha256/"
"""Prefix of all blobs."""


UPLOADS = "uploads/"
"""Prefix of large uploads that are not yet hashed into blobs."""


QUARANTINE = "quarantine/sha256/"
"""Prefix of blobs whose bytes did not match their name."""


REVOCATIONS = f"ns/{MAIN}/revocations.json"
"""The newest revocation document, signed; where everybody who reads artifacts may read it."""


def blob_key(digest: str) -> str:
    """Object key of a blob. Raises ValueError for anything but 64 lower-case hex digits."""
    if len(digest) != 64 or set(digest) - set("0123456789abcdef"):
        raise ValueError(f"{digest!r} is not a SHA-256 in hex")
    return f"{BLOBS}{digest[:2]}/{digest}"


def upload_key(namespace: str, digest: str) -> str:
    """Object key under which the parts of a large blob are assembled, until its bytes are checked."""
    return f"{UPLOADS}{namespace}/{digest}"


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
